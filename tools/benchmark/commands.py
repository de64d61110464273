"""Define the commands of `python -m tools.benchmark`: the options of each, and the measurement that it runs.

The measurements are imported when they run, so that --help does not wait for torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.cli.arguments import above_zero, positive

if TYPE_CHECKING:
    from .training import Plan

_LOADER_SECONDS = 5.0
Parser = argparse.ArgumentParser
Options = argparse.Namespace


@dataclass(frozen=True)
class Command:
    """Describe a command.

    Attributes:
        text: the sentence of --help.
        run: measures and prints.
        arguments: adds the command's own options to its parser.
        example: options of the example. more_examples: lines below it.
    """

    text: str
    run: Callable[[Options], None]
    arguments: Callable[[Parser], None] = lambda parser: None
    example: str = ""
    more_examples: str = ""


def _kernels(options: Options) -> None:
    from . import kernels

    kernels.run(options.output)


def _choice(options: Options) -> None:
    from . import kernels

    kernels.choice(options.output)


def _mixers_arguments(parser: Parser) -> None:
    _shape_arguments(parser)
    parser.add_argument("--hidden", type=positive, default=1024, help="hidden size of the model (%(default)s)")
    parser.add_argument("--heads", type=positive, default=16, help="heads of every mixer (%(default)s)")
    parser.add_argument(
        "--no-tuning",
        action="store_true",
        help="do not autotune flash-linear-attention's kernels; autotuning takes a minute or two per mixer",
    )
    parser.add_argument("--only", nargs="+", metavar="MIXER", help="measure only these mixers and attention")


def _mixers(options: Options) -> None:
    from . import mixers

    shape = options.hidden, options.heads, options.length, options.batch
    mixers.run(options.output, *shape, only=options.only, tuned=not options.no_tuning)


def _layouts_arguments(parser: Parser) -> None:
    _model_argument(parser)
    _shape_arguments(parser)
    parser.add_argument("--gpus", type=positive, default=4, help="most GPUs; 2, 4, ... are measured (%(default)s)")
    parser.add_argument("--steps", type=positive, default=4, help="timed steps per layout (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="measure these layouts: names, or parts of names"
    )
    _override_argument(
        parser, "override configuration keys; with optimizer.name=muon the table also has the time of its update"
    )


def _layouts(options: Options) -> None:
    from . import layouts

    limits = options.gpus, options.length, options.batch, options.steps
    layouts.run(options.output, options.config, options.override, *limits, options.only)


def _train_arguments(parser: Parser) -> None:
    _subjects_argument(parser)
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("configs/metala_1.4b.yml"),
        help="the project's model, whose size the other models get (%(default)s)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="LENGTHxBATCH",
        help="shapes to measure (default: 2048x8 16384x1, or the shapes from --lengths)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="LENGTH",
        help="sequence lengths at a constant number of tokens per step",
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="NUMBER", help="tokens per step with --lengths (default: the longest length)"
    )
    parser.add_argument(
        "--peer-precision",
        nargs="+",
        default=["bf16"],
        choices=["bf16", "mixed"],
        help="weights, gradients and moments in bf16, or all in float32 with matmuls in bf16 (bf16)",
    )
    parser.add_argument(
        "--peer-loss",
        default="logits",
        choices=["linear", "logits"],
        help="flash-linear-attention's cross entropy: fused with the output projection, or on logits (%(default)s)",
    )
    parser.add_argument("--steps", type=positive, default=10, help="timed steps per shape (%(default)s)")
    parser.add_argument(
        "--limit", type=above_zero, default=900, metavar="SECONDS", help="time limit per model under test (%(default)s)"
    )
    parser.add_argument("--cold", action="store_true", help="also time the first step with empty kernel caches")
    parser.add_argument("--no-tuning", action="store_true", help="do not autotune Triton kernels, for any model")
    parser.add_argument(
        "--peak", type=above_zero, metavar="TFLOPS", help="peak for MFU (default: measured with a matmul)"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"], help="device (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue after the last line of train.jsonl in --output")
    _override_argument(parser, "override configuration keys")


def _train(options: Options) -> None:
    from . import training

    training.run(options.output, _training_plan(options))


def _training_plan(options: Options) -> Plan:
    from tools.cli.devices import device_of

    from .training import Plan
    from .training_models import MODELS_UNDER_TEST

    shapes = [_shape(word) for word in options.shapes or []]
    lengths = options.lengths or []
    tokens = options.tokens or max(lengths, default=0)
    if options.tokens and not lengths:
        raise ValueError(f"--tokens {options.tokens} has no effect without --lengths: give both, or --shapes alone")
    for length in lengths:
        if tokens % length:
            raise ValueError(f"--lengths {length}: it must divide --tokens {tokens}")
        shapes.append((length, tokens // length))
    shapes = shapes or [(2048, 8), (16384, 1)]
    return Plan(
        config=options.config,
        overrides=tuple(options.override),
        shapes=tuple(dict.fromkeys(shapes)),
        models=tuple(options.subjects or MODELS_UNDER_TEST),
        precisions=tuple(options.peer_precision),
        peer_loss=options.peer_loss,
        steps=options.steps,
        limit=options.limit,
        cold=options.cold,
        tuned=not options.no_tuning,
        peak=options.peak and 1e12 * options.peak,
        device=str(device_of(options.device)),
        resume=options.resume,
    )


def _profile_arguments(parser: Parser) -> None:
    _model_argument(parser)
    _device_argument(parser)
    parser.add_argument(
        "--shape",
        default="2048x8",
        metavar="LENGTHxBATCH",
        help="shape of a batch; of images PIXELSxBATCH (%(default)s)",
    )
    _override_argument(parser, "override configuration keys")
    parser.add_argument("--steps", type=positive, default=3, help="profiled steps (%(default)s)")
    parser.add_argument("--top", type=positive, default=25, help="kernels in the table (%(default)s)")
    parser.add_argument("--trace", action="store_true", help="also write the trace for ui.perfetto.dev")


def _profile(options: Options) -> None:
    from . import profile

    profile.run(
        options.output,
        options.config,
        options.override,
        *_shape(options.shape, "--shape"),
        steps=options.steps,
        top=options.top,
        trace=options.trace,
        device=options.device,
    )


def _masked_arguments(parser: Parser) -> None:
    shapes = ["128x32", "128x128", "512x32", "2048x8", "8192x2"]
    _rounds_arguments(parser, "large", "base or large", "LENGTHxBATCH", shapes)


def _masked(options: Options) -> None:
    from . import masked_lm_step

    shapes = [_shape(word) for word in options.shapes]
    masked_lm_step.run(options.output, options.size, shapes, options.steps, options.rounds, options.override)


def _images_arguments(parser: Parser) -> None:
    _subjects_argument(parser)
    _rounds_arguments(parser, "tiny", "tiny, small or base", "PIXELSxBATCH", ["224x256"])
    parser.add_argument(
        "--loader",
        type=positive,
        nargs="+",
        metavar="THREADS",
        help="measure only the data loader, by number of threads: of CIFAR-10 up to 64 pixels, of ImageNet above",
    )


def _images(options: Options) -> None:
    from . import image_step

    shapes = [_shape(word, kind="PIXELSxBATCH") for word in options.shapes]
    if options.loader:
        for shape in shapes:
            image_step.measure_loader(_LOADER_SECONDS, *shape, options.loader)
        return
    subjects = options.subjects or list(image_step.MODELS)
    image_step.run(options.output, options.size, shapes, options.steps, options.rounds, subjects, options.override)


def _decode_arguments(parser: Parser) -> None:
    _model_argument(parser)
    _device_argument(parser)
    parser.add_argument(
        "--contexts", type=positive, nargs="+", default=[128, 8192], help="tokens before the decoded ones (128 8192)"
    )
    parser.add_argument("--batch", type=positive, default=64, help="sequences per batch (%(default)s)")
    parser.add_argument("--steps", type=positive, default=100, help="timed steps (%(default)s)")
    parser.add_argument("--no-llama", action="store_true", help="leave out Llama, whose cache grows with the context")


def _decode(options: Options) -> None:
    from . import decode

    sizes = options.contexts, options.batch, options.steps
    decode.run(options.output, options.config, *sizes, options.device, not options.no_llama)


def _model_argument(parser: Parser) -> None:
    parser.add_argument("--config", type=Path, default=Path("configs/metala_1.4b.yml"), help="the model (%(default)s)")


def _shape_arguments(parser: Parser) -> None:
    parser.add_argument("--length", type=positive, default=2048, help="tokens per sequence (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per forward pass (%(default)s)")


def _subjects_argument(parser: Parser) -> None:
    text = "models under test (default: all; an unknown name lists them)"
    parser.add_argument("--subjects", nargs="+", metavar="NAME", help=text)


def _device_argument(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (%(default)s)")


def _override_argument(parser: Parser, text: str) -> None:
    parser.add_argument("override", nargs="*", metavar="key=value", help=text)


def _rounds_arguments(parser: Parser, size: str, sizes: str, kind: str, shapes: list[str]) -> None:
    """Add the options of a comparison in rounds. kind: form of a shape. size, shapes: default values."""
    parser.add_argument("--size", default=size, help=f"{sizes} (%(default)s)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=shapes,
        metavar=kind,
        help=f"shapes to measure (default: {' '.join(shapes)})",
    )
    parser.add_argument("--steps", type=positive, default=20, help="timed steps per round (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds; each times all models (%(default)s)")
    _override_argument(parser, "override keys of all configurations")


def _shape(word: str, option: str = "--shapes", kind: str = "LENGTHxBATCH") -> tuple[int, int]:
    length, _, batch = word.partition("x")
    if not (length.isdecimal() and batch.isdecimal() and int(length) and int(batch)):
        raise ValueError(f"{option} {word}: allowed is {kind}, for example 128x32")
    return int(length), int(batch)


COMMANDS = {
    "kernels": Command(
        "compare LION and MetaLA's epilogue with softmax attention, PyTorch and flash-linear-attention", _kernels
    ),
    "choice": Command("compare LION's tile and chunk kernel by length and decay", _choice),
    "mixers": Command(
        "compare all mixers at one model shape",
        _mixers,
        _mixers_arguments,
        "--hidden 64 --heads 4 --length 128 --batch 2",
    ),
    "layouts": Command(
        "compare the training speed of one model in each kind of parallelism with one GPU",
        _layouts,
        _layouts_arguments,
        "--gpus 4",
    ),
    "train": Command(
        "compare training steps with models of flash-linear-attention and Hugging Face's Llama",
        _train,
        _train_arguments,
        "--subjects metalion llama --shapes 2048x8",
    ),
    "profile": Command(
        "measure the time of a training step by part and by kernel",
        _profile,
        _profile_arguments,
        "--config configs/default.yml --shape 512x4",
        "\n  torchrun --nproc-per-node 2 -m tools.benchmark profile --shape 131072x1 parallel.context=2"
        "    the first of two processes",
    ),
    "masked": Command(
        "compare training steps of LION's masked models with softmax BERT's, in BERT's shapes",
        _masked,
        _masked_arguments,
        "--shapes 128x32 --steps 6",
    ),
    "images": Command(
        "compare training steps of LION's image classifiers with ViT's, or measure the data loader",
        _images,
        _images_arguments,
        "--shapes 224x256",
    ),
    "decode": Command(
        "compare decoding speed and memory by context with Hugging Face's Llama of the same shape",
        _decode,
        _decode_arguments,
        "--contexts 8192 --batch 64",
    ),
}
