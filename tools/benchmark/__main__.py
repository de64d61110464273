"""Measure time and peak memory on this machine, next to other libraries in the same run: a table, a CSV file and a plot.

Values are medians with random inputs, on CUDA in bfloat16. Kernels have three times:
  replayed  as a CUDA graph: the time of the device
  queued    called repeatedly, as in training: the larger time of host and device
  launched  called once on an idle device: a small problem then waits for the host
The L2 cache is overwritten before every launched or replayed run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.cli.arguments import above_zero, command, command_line, positive
from tools.cli.help_text import HelpFormatter

if TYPE_CHECKING:
    from .training import Plan

_LOADER_SECONDS = 5.0
_MORE_EXAMPLES = {
    "profile": "\n  torchrun --nproc-per-node 2 -m tools.benchmark profile --shape 131072x1 parallel.context=2"
    "    the first of two processes"
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = command_line(
        "python -m tools.benchmark",
        __doc__,
        "example:\n  python -m tools.benchmark mixers --hidden 64 --heads 4 --length 128 --batch 2    one minute on a CPU\n\n"
        "COMMAND --help describes a command and gives an example.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text, example in (
        (
            "kernels",
            "compare LION and MetaLA's epilogue with softmax attention, PyTorch and flash-linear-attention",
            "",
        ),
        ("choice", "compare LION's tile and chunk kernel by length and decay", ""),
        ("mixers", "compare all mixers at one model shape", "--hidden 64 --heads 4 --length 128 --batch 2"),
        ("layouts", "compare the training speed of one model in each kind of parallelism with one GPU", "--gpus 4"),
        (
            "train",
            "compare training steps with flash-linear-attention's GLA, HGRN2, RetNet and Hugging Face's Llama",
            "--subjects metalion llama --shapes 2048x8",
        ),
        (
            "profile",
            "measure the time of a training step by part and by kernel",
            "--config configs/default.yml --shape 512x4",
        ),
        (
            "masked",
            "compare training steps of LION's masked models with softmax BERT's, in BERT's shapes",
            "--shapes 128x32 --steps 6",
        ),
        (
            "images",
            "compare training steps of LION's image classifiers with ViT's, or measure the data loader",
            "--shapes 224x256",
        ),
        (
            "decode",
            "compare decoding speed and memory by context with Hugging Face's Llama of the same shape",
            "--contexts 8192 --batch 64",
        ),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  python -m tools.benchmark {name} {example}".rstrip() + _MORE_EXAMPLES.get(name, ""),
            formatter_class=HelpFormatter,
        )
        command.add_argument(
            "--output", type=Path, default=Path("runs/benchmark"), help="folder for CSV files and plots (%(default)s)"
        )
        if name in ("layouts", "profile", "decode"):
            model = "the model (%(default)s)"
            command.add_argument("--config", type=Path, default=Path("configs/metala_1.4b.yml"), help=model)
        if name in ("layouts", "mixers"):
            command.add_argument("--length", type=positive, default=2048, help="tokens per sequence (%(default)s)")
            command.add_argument("--batch", type=positive, default=8, help="sequences per forward pass (%(default)s)")
        if name in ("train", "images"):
            subjects = "models under test (default: all; an unknown name lists them)"
            command.add_argument("--subjects", nargs="+", metavar="NAME", help=subjects)
        if name in ("profile", "decode"):
            command.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (%(default)s)")
        if name == "layouts":
            command.add_argument(
                "--gpus", type=positive, default=4, help="most GPUs; 2, 4, ... are measured (%(default)s)"
            )
            command.add_argument("--steps", type=positive, default=4, help="timed steps per layout (%(default)s)")
            command.add_argument(
                "--only", nargs="+", default=[], metavar="NAME", help="measure these layouts: names, or parts of names"
            )
            keys = "override configuration keys; with optimizer.name=muon the table also has the time of its update"
            command.add_argument("override", nargs="*", metavar="key=value", help=keys)
        if name == "train":
            _train_arguments(command)
        if name == "profile":
            command.add_argument(
                "--shape",
                default="2048x8",
                metavar="LENGTHxBATCH",
                help="shape of a batch; of images PIXELSxBATCH (%(default)s)",
            )
            command.add_argument("override", nargs="*", metavar="key=value", help="override configuration keys")
            command.add_argument("--steps", type=positive, default=3, help="profiled steps (%(default)s)")
            command.add_argument("--top", type=positive, default=25, help="kernels in the table (%(default)s)")
            command.add_argument("--trace", action="store_true", help="also write the trace for ui.perfetto.dev")
        if name in ("masked", "images"):
            size, sizes, shapes, default = (
                ("large", "base or large", "LENGTHxBATCH", ["128x32", "128x128", "512x32", "2048x8", "8192x2"])
                if name == "masked"
                else ("tiny", "tiny, small or base", "PIXELSxBATCH", ["224x256"])
            )
            command.add_argument("--size", default=size, help=f"{sizes} (%(default)s)")
            command.add_argument(
                "--shapes",
                nargs="+",
                default=default,
                metavar=shapes,
                help=f"shapes to measure (default: {' '.join(default)})",
            )
            command.add_argument("--steps", type=positive, default=20, help="timed steps per round (%(default)s)")
            command.add_argument(
                "--rounds", type=positive, default=3, help="rounds; each times all models (%(default)s)"
            )
            command.add_argument("override", nargs="*", metavar="key=value", help="override keys of all configurations")
        if name == "images":
            command.add_argument(
                "--loader",
                type=positive,
                nargs="+",
                metavar="THREADS",
                help="measure only the data loader, by number of threads: of CIFAR-10 up to 64 pixels, of ImageNet above",
            )
        if name == "decode":
            command.add_argument(
                "--contexts",
                type=positive,
                nargs="+",
                default=[128, 8192],
                help="tokens before the decoded ones (128 8192)",
            )
            command.add_argument("--batch", type=positive, default=64, help="sequences per batch (%(default)s)")
            command.add_argument("--steps", type=positive, default=100, help="timed steps (%(default)s)")
            command.add_argument(
                "--no-llama", action="store_true", help="leave out Llama, whose cache grows with the context"
            )
        if name == "mixers":
            command.add_argument("--hidden", type=positive, default=1024, help="hidden size of the model (%(default)s)")
            command.add_argument("--heads", type=positive, default=16, help="heads of every mixer (%(default)s)")
            command.add_argument(
                "--no-tuning",
                action="store_true",
                help="do not autotune flash-linear-attention's kernels; autotuning takes a minute or two per mixer",
            )
            command.add_argument("--only", nargs="+", metavar="MIXER", help="measure only these mixers and attention")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Put key=value words before the options: an option with nargs="+" would take them as its values. Paths may contain "=".
    is_override = [
        "=" in word and not word.startswith("-") and previous not in ("--output", "--config")
        for previous, word in zip(["", *words], words, strict=False)
    ]
    order = sorted(range(1, len(words)), key=lambda index: not is_override[index])
    options = parser.parse_args([*words[:1], *(words[index] for index in order)])
    # Imported here, so that --help does not wait for torch.
    from . import decode, kernels, layouts, mixers, profile, training
    from . import image_step as images
    from . import masked_lm_step as masked

    options.output.mkdir(parents=True, exist_ok=True)
    if options.command == "mixers":
        shape = options.hidden, options.heads, options.length, options.batch
        mixers.run(options.output, *shape, only=options.only, tuned=not options.no_tuning)
    elif options.command == "layouts":
        limits = options.gpus, options.length, options.batch, options.steps
        layouts.run(options.output, options.config, options.override, *limits, options.only)
    elif options.command == "masked":
        shapes = [_shape(word) for word in options.shapes]
        masked.run(options.output, options.size, shapes, options.steps, options.rounds, options.override)
    elif options.command == "images" and options.loader:
        for word in options.shapes:
            images.measure_loader(_LOADER_SECONDS, *_shape(word, kind="PIXELSxBATCH"), options.loader)
    elif options.command == "images":
        shapes = [_shape(word, kind="PIXELSxBATCH") for word in options.shapes]
        subjects = options.subjects or list(images.MODELS)
        images.run(options.output, options.size, shapes, options.steps, options.rounds, subjects, options.override)
    elif options.command == "train":
        training.run(options.output, _training_plan(options))
    elif options.command == "profile":
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
    elif options.command == "decode":
        sizes = options.contexts, options.batch, options.steps
        decode.run(options.output, options.config, *sizes, options.device, not options.no_llama)
    elif options.command == "choice":
        kernels.choice(options.output)
    else:
        kernels.run(options.output)
    return 0


def _train_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        default=Path("configs/metala_1.4b.yml"),
        help="the project's model, whose size the other models get (%(default)s)",
    )
    command.add_argument(
        "--shapes",
        nargs="+",
        metavar="LENGTHxBATCH",
        help="shapes to measure (default: 2048x8 16384x1, or the shapes from --lengths)",
    )
    command.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="LENGTH",
        help="sequence lengths at a constant number of tokens per step",
    )
    command.add_argument(
        "--tokens", type=positive, metavar="NUMBER", help="tokens per step with --lengths (default: the longest length)"
    )
    command.add_argument(
        "--peer-precision",
        nargs="+",
        default=["bf16"],
        choices=["bf16", "mixed"],
        help="weights, gradients and moments in bf16, or all in float32 with matmuls in bf16 (bf16)",
    )
    command.add_argument(
        "--peer-loss",
        default="logits",
        choices=["linear", "logits"],
        help="flash-linear-attention's cross entropy: fused with the output projection, or on logits (%(default)s)",
    )
    command.add_argument("--steps", type=positive, default=10, help="timed steps per shape (%(default)s)")
    command.add_argument(
        "--limit", type=above_zero, default=900, metavar="SECONDS", help="time limit per model under test (%(default)s)"
    )
    command.add_argument("--cold", action="store_true", help="also time the first step with empty kernel caches")
    command.add_argument("--no-tuning", action="store_true", help="do not autotune Triton kernels, for any model")
    command.add_argument(
        "--peak", type=above_zero, metavar="TFLOPS", help="peak for MFU (default: measured with a matmul)"
    )
    command.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"], help="device (%(default)s)")
    command.add_argument(
        "--resume", action="store_true", help="continue after the last line of train.jsonl in --output"
    )
    command.add_argument("override", nargs="*", metavar="key=value", help="override configuration keys")


def _training_plan(options: argparse.Namespace) -> Plan:
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


def _shape(word: str, option: str = "--shapes", kind: str = "LENGTHxBATCH") -> tuple[int, int]:
    length, _, batch = word.partition("x")
    if not (length.isdecimal() and batch.isdecimal() and int(length) and int(batch)):
        raise ValueError(f"{option} {word}: allowed is {kind}, for example 128x32")
    return int(length), int(batch)


if __name__ == "__main__":
    sys.exit(main())
