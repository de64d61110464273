"""Times and peak memory on this machine, each beside its peers in the same run: a table, a CSV and a plot.

python -m tools.benchmark kernels     # LION and MetaLA's epilogue against softmax attention, PyTorch and FLA; CUDA
python -m tools.benchmark choice      # LION's two kernels over length and memory of the decays: what "auto" rests on; CUDA
python -m tools.benchmark mixers      # every mixer at one model shape, forward and backward; CUDA or CPU
python -m tools.benchmark layouts --gpus 4   # one model by data, tensor, pipeline and context parallelism; CUDA
python -m tools.benchmark train       # whole training steps beside flash-linear-attention's models and Llama; CUDA or CPU
python -m tools.benchmark profile     # where a training step's time goes, by part and by kernel; CUDA or CPU
python -m tools.benchmark decode      # tokens a second over context, beside Hugging Face's Llama with its cache; CUDA or CPU
python -m tools.benchmark masked      # training steps of LION's masked models beside BERT's, by length; CUDA or CPU
python -m tools.benchmark mixers --hidden 64 --heads 4 --length 128 --batch 2      # a small shape, on a CPU in a minute

Figures are medians, on CUDA of bfloat16 with random inputs. Of one piece of work are given
  replayed  its time as a CUDA graph: what the device needs
  queued    its time when PyTorch starts it again and again, as in training: the larger of host and device
  launched  its time when PyTorch starts it once with an idle device: a small problem then waits for the host
The second-level cache is emptied before every launched or replayed run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.cli.arguments import above_zero, command, command_line, from_zero, positive

if TYPE_CHECKING:
    from .training import Plan


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("python -m tools.benchmark", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("kernels", "LION and MetaLA's epilogue against softmax attention, PyTorch and flash-linear-attention"),
        ("choice", "LION's tile and chunk kernel over length and memory"),
        ("mixers", "every mixer at one model shape"),
        ("layouts", "training speed of one model in each kind of parallelism, beside one GPU"),
        ("train", "training steps beside flash-linear-attention's GLA, HGRN2, RetNet and Hugging Face's Llama"),
        ("profile", "the training step by part and by kernel"),
        ("masked", "training steps of LION's masked models beside softmax BERT's, in BERT's shapes"),
        ("decode", "decoding speed and memory over context, beside Hugging Face's Llama of the same shape"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument(
            "--output", type=Path, default=Path("runs/benchmark"), help="folder of CSV and plot (%(default)s)"
        )
        if name == "layouts":
            command.add_argument("--config", type=Path, default=Path("configs/metala_1.4b.yml"), help="(%(default)s)")
            command.add_argument("--gpus", type=positive, default=4, help="at most; 2, 4, ... are tried (%(default)s)")
            command.add_argument("--length", type=positive, default=2048, help="tokens of a sequence (%(default)s)")
            command.add_argument("--batch", type=positive, default=8, help="sequences of a micro batch (%(default)s)")
            command.add_argument(
                "--long",
                type=from_zero,
                default=131072,
                help="tokens of a sequence split over GPUs; 0: none (%(default)s)",
            )
            command.add_argument("--steps", type=positive, default=4, help="timed steps of a layout (%(default)s)")
            command.add_argument("--only", default="", metavar="TEXT", help="layouts whose name holds this")
        if name == "train":
            _train_arguments(command)
        if name == "profile":
            command.add_argument("--config", type=Path, default=Path("configs/metala_1.4b.yml"), help="(%(default)s)")
            command.add_argument("--shape", default="2048x8", metavar="LENGTHxBATCH", help="(%(default)s)")
            command.add_argument("override", nargs="*", metavar="key=value", help="of the configuration")
            command.add_argument("--steps", type=positive, default=3, help="profiled steps (%(default)s)")
            command.add_argument("--top", type=positive, default=25, help="kernels in the table (%(default)s)")
            command.add_argument("--trace", action="store_true", help="also keep the trace, for ui.perfetto.dev")
            command.add_argument("--device", default="auto", help="cuda or cpu (%(default)s)")
        if name == "masked":
            command.add_argument("--size", default="large", help="base or large (%(default)s)")
            command.add_argument(
                "--shapes",
                nargs="+",
                default=["128x32", "128x128", "512x32", "2048x8", "8192x2"],
                metavar="LENGTHxBATCH",
                help="(default: 128x32 128x128 512x32 2048x8 8192x2)",
            )
            command.add_argument("--steps", type=positive, default=20, help="timed steps a round (%(default)s)")
            command.add_argument("--rounds", type=positive, default=3, help="of all models in turn (%(default)s)")
            command.add_argument("override", nargs="*", metavar="key=value", help="of every configuration")
        if name == "decode":
            command.add_argument("--config", type=Path, default=Path("configs/metala_1.4b.yml"), help="(%(default)s)")
            command.add_argument("--contexts", type=positive, nargs="+", default=[128, 8192], help="tokens (128 8192)")
            command.add_argument("--batch", type=positive, default=64, help="texts side by side (%(default)s)")
            command.add_argument("--steps", type=positive, default=100, help="timed steps (%(default)s)")
            command.add_argument("--device", default="auto", help="cuda or cpu (%(default)s)")
            command.add_argument("--no-llama", action="store_true", help="leave Llama out")
        if name == "mixers":
            command.add_argument("--hidden", type=positive, default=1024, help="width of the model (%(default)s)")
            command.add_argument("--heads", type=positive, default=16, help="heads of every mixer (%(default)s)")
            command.add_argument("--length", type=positive, default=2048, help="tokens of a sequence (%(default)s)")
            command.add_argument("--batch", type=positive, default=8, help="sequences (%(default)s)")
            command.add_argument(
                "--no-tuning",
                action="store_true",
                help="flash-linear-attention's kernels in one configuration each; tuning takes a minute or two a mixer",
            )
            command.add_argument("--only", nargs="+", metavar="MIXER", help="these mixers and attention alone")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Ahead of the options, one of which would take them for more of its own values. A path may hold a "=" too.
    override = [
        "=" in word and not word.startswith("-") and before not in ("--output", "--config", "--chosen")
        for before, word in zip(["", *words], words, strict=False)
    ]
    ordered = sorted(range(1, len(words)), key=lambda place: not override[place])
    options = parser.parse_args([*words[:1], *(words[place] for place in ordered)])
    # After the arguments, so that --help does not wait for torch.
    from . import decode, kernels, layouts, mixers, profile, training
    from . import masked_lm_step as masked

    options.output.mkdir(parents=True, exist_ok=True)
    if options.command == "mixers":
        shape = options.hidden, options.heads, options.length, options.batch
        mixers.run(options.output, *shape, only=options.only, tuned=not options.no_tuning)
    elif options.command == "layouts":
        layouts.run(
            options.output,
            options.config,
            options.gpus,
            options.length,
            options.batch,
            options.long,
            options.steps,
            options.only,
        )
    elif options.command == "masked":
        shapes = [_shape(word) for word in options.shapes]
        masked.run(options.output, options.size, shapes, options.steps, options.rounds, options.override)
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
        decode.run(
            options.output,
            options.config,
            options.contexts,
            options.batch,
            options.steps,
            options.device,
            not options.no_llama,
        )
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
        help="the project's model, whose size the peers get (%(default)s)",
    )
    command.add_argument(
        "--shapes", nargs="+", metavar="LENGTHxBATCH", help="(default: 2048x8 16384x1, or those of --lengths)"
    )
    command.add_argument(
        "--lengths", nargs="+", type=positive, metavar="LENGTH", help="at a constant number of tokens a step"
    )
    command.add_argument(
        "--tokens", type=positive, metavar="NUMBER", help="a step of --lengths (default: those of the longest)"
    )
    command.add_argument("--subjects", nargs="+", metavar="NAME", help="(default: all; an unknown name lists them)")
    command.add_argument(
        "--peer-precision",
        nargs="+",
        default=["bf16"],
        choices=["bf16", "mixed"],
        help="weights, gradients and moments in bf16, or all in float32 with products in bf16 (bf16)",
    )
    command.add_argument(
        "--peer-loss",
        default="logits",
        choices=["linear", "logits"],
        help="flash-linear-attention's cross entropy: fused with the projection, or over whole logits (%(default)s)",
    )
    command.add_argument("--steps", type=positive, default=10, help="timed steps of a shape (%(default)s)")
    command.add_argument(
        "--limit", type=above_zero, default=900, metavar="SECONDS", help="for one subject (%(default)s)"
    )
    command.add_argument("--cold", action="store_true", help="also the first step of each with empty kernel caches")
    command.add_argument("--no-tuning", action="store_true", help="Triton's kernels in one configuration each, for all")
    command.add_argument(
        "--peak", type=above_zero, metavar="TFLOPS", help="for MFU (default: a matrix product's, measured)"
    )
    command.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"], help="(%(default)s)")
    command.add_argument("--resume", action="store_true", help="go on where train.jsonl in --output ends")
    command.add_argument("override", nargs="*", metavar="key=value", help="of the configuration")


def _training_plan(options: argparse.Namespace) -> Plan:
    from tools.cli.devices import device_of

    from .training import Plan
    from .training_models import SUBJECTS

    shapes = [_shape(word) for word in options.shapes or []]
    lengths = options.lengths or []
    tokens = options.tokens or max(lengths, default=0)
    for length in lengths:
        if not 0 < length <= tokens or tokens % length:
            raise ValueError(f"--lengths {length}: must divide --tokens {tokens}")
        shapes.append((length, tokens // length))
    shapes = shapes or [(2048, 8), (16384, 1)]
    return Plan(
        config=options.config,
        overrides=tuple(options.override),
        shapes=tuple(dict.fromkeys(shapes)),
        subjects=tuple(options.subjects or SUBJECTS),
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


def _shape(word: str, option: str = "--shapes") -> tuple[int, int]:
    length, _, batch = word.partition("x")
    if not (length.isdecimal() and batch.isdecimal() and int(length) and int(batch)):
        raise ValueError(f"{option} {word}: LENGTHxBATCH is allowed, for example 128x32")
    return int(length), int(batch)


if __name__ == "__main__":
    sys.exit(main())
