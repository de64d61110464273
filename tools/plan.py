"""List the parallel layouts of a run on N GPUs with their memory and the time of the run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megatron_lite.plural import counted
from tools.cli.arguments import (
    FAILED,
    above_zero,
    above_zero_to_one,
    command,
    command_line,
    from_zero,
    parse_with_overrides,
    positive,
)
from tools.planning.estimate import (
    decoding_bytes,
    layer_flops,
    layers_of,
    memory,
    read_config,
    read_config_any_layout,
    workload,
)
from tools.pretraining.run import schema
from tools.reporting.tables import terminal_width

if TYPE_CHECKING:  # torch is imported on use, so that --help is fast
    from megatron_lite.config.schema import Config
    from megatron_lite.parallel.layout import Layout
    from megatron_lite.planning.communication_cost import Links
    from megatron_lite.planning.memory import LayerCost
    from models.config import ModelConfig

EPILOG = """
examples:
  python -m tools.plan configs/metala_1.4b.yml --gpus 32
  python -m tools.plan configs/metala_1.4b.yml batch.micro_batch_size=4 --gpus 64 --gpu "A100" --gpu-memory 40
  torchrun --nproc-per-node 2 -m tools.plan configs/metala_360m.yml --measure     compare the estimate with allocations

Every legal layout is listed. The layout of the configuration counts for --measure only.
Nothing is trained (except with --measure) and no GPU is needed. Memory is counted from one layer of each kind, run without
computing. It excludes the CUDA context and NCCL's buffers, about 1 to 2 GiB per GPU. Speed follows from --mfu, the share of
the peak that one GPU reaches alone, and from the links (docs/guide/parallelism.md). Layouts that do not fit come last.
Exit status 1: no layout fits.
"""
# Settings that save memory, least cost first.
SAVINGS = (
    ("parallel.activation_checkpointing.mode", "full"),
    ("batch.micro_batch_size", 1),
    ("precision.optimizer_state", "bf16"),
)


@dataclass(frozen=True)
class Row:
    """Hold the cost of one layout with one ZeRO stage.

    Attributes:
        data: data-parallel ranks.
        memory: bytes by part of the process with the most memory.
        seconds: of one step, by part.
    """

    layout: Layout
    data: int
    zero_stage: int
    accumulation: int
    memory: dict[str, float]
    seconds: dict[str, float]

    @property
    def bytes(self) -> float:
        """Return the bytes of the process with the most memory."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Return the seconds of one step."""
        return sum(self.seconds.values())


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if no layout fits, 2 for a configuration that cannot run."""
    parser = command_line("python -m tools.plan", __doc__, EPILOG)
    parser.add_argument("config", nargs="+", metavar="FILE.yml | key.sub=value", help="as for train.py")
    parser.add_argument("--gpus", type=positive, default=1, help="processes of the run (default 1)")
    parser.add_argument(
        "--gpu", default="H200", help="name whose peak megatron_lite/planning/flops.py lists (default H200)"
    )
    parser.add_argument("--gpu-memory", type=above_zero, default=141.0, metavar="GB", help="per GPU (default 141)")
    parser.add_argument(
        "--mfu", type=above_zero_to_one, default=0.4, help="share of the peak that one GPU reaches (default 0.4)"
    )
    parser.add_argument("--gpus-per-machine", type=positive, default=8, help="joined by the faster link (default 8)")
    parser.add_argument(
        "--node-bandwidth",
        type=above_zero,
        default=353.0,
        metavar="GB/s",
        help="per GPU, inside a machine (default 353)",
    )
    parser.add_argument(
        "--network-bandwidth",
        type=above_zero,
        default=45.0,
        metavar="GB/s",
        help="per GPU, between machines (default 45)",
    )
    parser.add_argument("--rows", type=from_zero, default=20, help="layouts to print; 0: all (default 20)")
    parser.add_argument(
        "--measure", action="store_true", help="train a few steps of each ZeRO stage and checkpointing mode"
    )
    options = parse_with_overrides(parser, arguments, schema)
    if options.measure:
        from tools.planning.measure_memory import measure

        return measure(options.config)
    return plan(options)


def plan(options: argparse.Namespace) -> int:
    """Print the table and the fastest layout that fits. Returns 0, or 1 if no layout fits."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for a GPU and prints a warning
    from megatron_lite.planning.communication_cost import Links
    from megatron_lite.planning.flops import PEAK_TERAFLOPS, listed_peak_flops

    config, words, problem = read_config_any_layout(options.config, options.gpus)
    dtype = "bf16" if config.precision.dtype == "auto" else config.precision.dtype
    peak = listed_peak_flops(options.gpu, dtype)
    if peak is None:
        known = [name for name, peaks in PEAK_TERAFLOPS.items() if dtype in peaks]
        raise ValueError(f"--gpu {options.gpu!r}: its {dtype} peak is not known; allowed are {', '.join(known)}")
    inside, outside = options.node_bandwidth, options.network_bandwidth
    links = Links(inside=inside * 1e9, outside=outside * 1e9, machine=options.gpus_per_machine)
    rows = list(layouts(config, words, options.gpus, dtype, peak * options.mfu, links))
    if problem is not None and not rows:
        raise problem
    limit = options.gpu_memory * 1e9
    rows.sort(key=lambda row: (row.bytes > limit, row.step))
    print(header(config, options.gpus, dtype))
    print(
        f"links: {inside:g} GB/s inside a machine, {outside:g} GB/s between machines; "
        f"{options.gpu}, {options.mfu:.0%} of {peak / 1e12:.0f} TFLOP/s; GiB per GPU\n"
    )
    shown = rows[: options.rows or None]
    print(table(shown, config, limit))
    hidden = len(rows) - len(shown)
    fitting = [row for row in rows if row.bytes <= limit]
    print(
        f"\n{counted(len(rows), 'layout')}, {len(fitting)} fit into {options.gpu_memory:g} GB"
        + (f", {hidden} not shown" if hidden else "")
    )
    if not fitting:
        print(advice(config, min(rows, key=lambda row: row.bytes), options.gpu_memory), file=sys.stderr)
        return FAILED
    print(f"the fastest: {' '.join(_overrides(fitting[0]))}")
    return 0


def advice(config: Config[ModelConfig], smallest: Row, gigabytes: float) -> str:
    """Return the message that no layout fits: the smallest layout, its largest part and the settings that save memory."""
    part = max(smallest.memory, key=lambda name: smallest.memory[name])
    settings = [f"{key}={value}" for key, value in SAVINGS if attrgetter(key)(config) != value]
    return (
        f"error: no layout fits into {gigabytes:g} GB. The smallest ({' '.join(_overrides(smallest))}) needs "
        f"{smallest.bytes / 1e9:.3g} GB, most of it for {part}: "
        f"{', '.join([*settings, 'more --gpus'])} or a smaller model need less"
    )


def _overrides(row: Row) -> list[str]:
    words = [f"parallel.{key}={getattr(row.layout, key)}" for key in ("tensor", "pipeline", "context")]
    if row.layout.sequence_parallel:
        words.append("parallel.sequence_parallel=true")
    return [*words, f"parallel.zero_stage={row.zero_stage}"]


def layouts(
    config: Config[ModelConfig], words: Sequence[str], gpus: int, dtype: str, flops: float, links: Links
) -> Iterator[Row]:
    """Yield the cost of each legal layout with each ZeRO stage that it supports."""
    from data.progress import ProgressBar
    from megatron_lite.config.loader import ConfigError
    from megatron_lite.parallel.layout import legal_layouts, limits_of
    from megatron_lite.planning.communication_cost import step_seconds

    limits = limits_of(config.model, config.batch.sequence_length)
    candidates = legal_layouts(gpus, limits)
    if gpus > 1:
        with_sequence_parallel = legal_layouts(gpus, limits, sequence_parallel=True)
        candidates += [layout for layout in with_sequence_parallel if layout.sequence_parallel]
    known: dict[Any, list[LayerCost]] = {}
    flops_of = layer_flops(config)
    work = workload(config, flops_of, dtype)
    for layout in ProgressBar(candidates, desc="layouts", leave=False):
        more = [f"parallel.{key}={getattr(layout, key)}" for key in ("tensor", "pipeline", "context")]
        more += [f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}"]
        for stage in (1, 2, 3):
            try:
                candidate = read_config([*words, *more, f"parallel.zero_stage={stage}"], gpus)
            except ConfigError:  # the batch does not divide, or another setting excludes this stage and higher ones
                break
            # The engine calls the layers in one way for ZeRO 1 and 2, in another for 3.
            called = (layout.tensor, layout.context, layout.sequence_parallel, stage == 3)
            if called not in known:
                known[called] = layers_of(candidate, layout, dtype)
            yield Row(
                layout,
                candidate.batch.data_ranks,
                stage,
                candidate.batch.gradient_accumulation_steps,
                memory(known[called], flops_of, candidate, layout, dtype, stage),
                step_seconds(replace(work, zero_stage=stage), layout, gpus, flops, links),
            )


def header(config: Config[ModelConfig], gpus: int, dtype: str) -> str:
    """Return the lines about the model and the run."""
    work = workload(config, layer_flops(config), dtype)
    batch, steps = config.batch, config.schedule.train_steps
    tokens = batch.tokens_of(steps)
    mode = config.parallel.activation_checkpointing.mode
    cache = decoding_bytes(config.model, batch.sequence_length, dtype)
    decoding = "" if cache is None else f"; decoding keeps {cache / 2**20:,.2f} MiB per sequence of this length"
    return (
        f"{'+'.join(dict.fromkeys(config.model.mixers))}, {work.parameters / 1e6:,.1f} M parameters, {dtype}, "
        f"activation checkpointing {mode}, on {counted(gpus, 'GPU')}\n"
        f"{counted(batch.global_batch_size, 'sample')} of {batch.sequence_length} per step in micro-batches of "
        f"{batch.micro_batch_size}; {counted(steps, 'step')}, {tokens / 1e9:,.2f} G tokens\n"
        f"{work.flops_per_token / 1e9:,.2f} GFLOP per token, {work.flops_per_token * tokens:.3g} FLOP in total{decoding}"
    )


def table(rows: Sequence[Row], config: Config[ModelConfig], limit: float) -> str:
    """Return the rows as a text table."""
    from megatron_lite.planning.memory import GIB

    header = (
        "tensor  pipe  context  data  ZeRO  micro |",
        " weights  grads  optim  activ    sum |",
        "  tokens/s    days  busy",
    )
    lines = [header, tuple("-" * len(part) for part in header)]
    tokens = config.batch.tokens_per_step
    for row in rows:
        parts = row.memory
        work = parts["activations"] + parts["workspace"]
        days = config.batch.tokens_of(config.schedule.train_steps) / tokens * row.step / 86400
        name = f"{row.layout.tensor}{' +SP' if row.layout.sequence_parallel else ''}"
        sizes = f"{row.layout.pipeline:>6}{row.layout.context:>9}{row.data:>6}{row.zero_stage:>6}{row.accumulation:>7}"
        numbers = [parts["weights"], parts["gradients"], parts["optimizer"], work]
        memory = f"{numbers[0] / GIB:>8.2f}" + "".join(f"{number / GIB:>7.2f}" for number in numbers[1:])
        speed = f"{tokens / row.step:>10,.0f}{days:>8.2f}{row.seconds['compute'] / row.step:>6.0%}"
        fits = "  does not fit" if row.bytes > limit else ""
        lines.append((f"{name:<6}{sizes} |", f"{memory}{row.bytes / GIB:>7.1f} |", speed + fits))
    # A narrow terminal shows memory and speed one below the other.
    narrow = max(len("".join(parts)) for parts in lines) > terminal_width()
    columns = [(0, 1), (0, 2)] if narrow else [(0, 1, 2)]
    tables = ["\n".join("".join(parts[i] for i in shown) for parts in lines) for shown in columns]
    notes = (
        "data: data-parallel ranks; micro: micro-batches per step; grads: gradients;",
        "optim: optimizer state; activ: activations, with the workspace of one layer",
        "(logits in chunks included); busy: share of time spent computing",
    )
    return "\n\n".join(tables) + "\n" + "\n".join(notes)


if __name__ == "__main__":
    sys.exit(main())
