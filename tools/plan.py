"""Which layouts a run can take on so many GPUs, what they cost in memory, and how long the run takes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tools.cli.arguments import above_zero, above_zero_to_one, command, command_line, from_zero, positive
from tools.planning.estimate import any_layout, layer_flops, memory, read_config, workload

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from megatron_lite.config.schema import Config
    from megatron_lite.parallel.layout import Layout
    from megatron_lite.planning.communication_cost import Links
    from megatron_lite.planning.memory import LayerCost
    from models.config import ModelConfig

EPILOG = """
examples:
  python -m tools.plan configs/metala_1.4b.yml --gpus 32
  python -m tools.plan configs/metala_1.4b.yml batch.micro_batch_size=4 --gpus 64 --gpu "A100" --gpu-memory 40
  torchrun --nproc-per-node 2 -m tools.plan configs/metala_360m.yml --measure     estimate beside what is allocated

Nothing is trained (but with --measure) and no GPU is needed. Memory is counted from one layer of each kind, run without
computing; it leaves out the CUDA context and NCCL's buffers, about 1 to 2 GiB a GPU. Speed follows from --mfu, the FLOP/s that
one GPU reaches alone, and from the links (docs/guide/parallelism.md). Rows that do not fit are marked and come last.
"""


@dataclass(frozen=True)
class Row:
    """One layout of the plan.

    Attributes:
        memory: bytes by part of the fullest process; seconds: of a step, by part.
    """

    layout: Layout
    data: int
    zero_stage: int
    accumulation: int
    memory: dict[str, float]
    seconds: dict[str, float]

    @property
    def bytes(self) -> float:
        """Of the fullest process."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, or 2 for a configuration that cannot run."""
    parser = command_line("python -m tools.plan", __doc__, EPILOG)
    parser.add_argument("config", nargs="+", metavar="FILE.yml | key.sub=value", help="as for train.py")
    parser.add_argument("--gpus", type=positive, default=1, help="processes of the run (default 1)")
    parser.add_argument(
        "--gpu", default="H200", help="name as in megatron_lite/planning/flops.py, for the peak (default H200)"
    )
    parser.add_argument("--gpu-memory", type=above_zero, default=141.0, metavar="GB", help="of one GPU (default 141)")
    parser.add_argument(
        "--mfu", type=above_zero_to_one, default=0.4, help="share of the peak that one GPU reaches (default 0.4)"
    )
    parser.add_argument("--gpus-per-machine", type=positive, default=8, help="(default 8)")
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
    options = parser.parse_intermixed_args(arguments)
    if options.measure:
        from tools.planning.measure_memory import measure

        return measure(options.config)
    return plan(options)


def plan(options: argparse.Namespace) -> int:
    """Print the table."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # only its arithmetic is used; it would look for one and say so
    from megatron_lite.planning.communication_cost import Links
    from megatron_lite.planning.flops import PEAK_TERAFLOPS, listed_peak_flops

    config, words, problem = any_layout(options.config, options.gpus)
    dtype = "bf16" if config.precision.dtype == "auto" else config.precision.dtype
    peak = listed_peak_flops(options.gpu, dtype)
    if peak is None:
        raise ValueError(f"--gpu {options.gpu!r}: no {dtype} peak; known are {', '.join(PEAK_TERAFLOPS)}")
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
    print(table(rows[: options.rows or None], config, limit))
    hidden = len(rows) - len(rows[: options.rows or None])
    fitting = [row for row in rows if row.bytes <= limit]
    print(
        f"\n{len(rows)} layouts, {len(fitting)} fit into {options.gpu_memory:g} GB"
        + (f", {hidden} not shown" if hidden else "")
    )
    if fitting:
        best = fitting[0]
        words = [f"parallel.{key}={getattr(best.layout, key)}" for key in ("tensor", "pipeline", "context")]
        if best.layout.sequence_parallel:
            words.append("parallel.sequence_parallel=true")
        print(f"the first: {' '.join([*words, f'parallel.zero_stage={best.zero_stage}'])}")
    return 0


def layouts(
    config: Config[ModelConfig], words: Sequence[str], gpus: int, dtype: str, flops: float, links: Links
) -> Iterator[Row]:
    """Every legal layout with every ZeRO stage that it can take, and its cost."""
    from tqdm import tqdm

    from megatron_lite.config.loader import ConfigError
    from megatron_lite.parallel.layout import legal_layouts, limits_of
    from megatron_lite.planning.communication_cost import step_seconds

    limits = limits_of(config.model, config.batch.sequence_length)
    found = legal_layouts(gpus, limits)
    if gpus > 1:
        cut = legal_layouts(gpus, limits, sequence_parallel=True)
        found += [layout for layout in cut if layout.sequence_parallel]
    known: dict[Any, list[LayerCost]] = {}
    flops_of = layer_flops(config)
    work = workload(config, flops_of, dtype)
    for layout in tqdm(found, desc="layouts", leave=False, disable=not sys.stderr.isatty()):
        more = [f"parallel.{key}={getattr(layout, key)}" for key in ("tensor", "pipeline", "context")]
        more += [f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}"]
        for stage in (1, 2, 3):
            try:
                here = read_config([*words, *more, f"parallel.zero_stage={stage}"], gpus)
            except (
                ConfigError
            ):  # the batch does not divide, or the stage, and those above it, do not go with another setting
                break
            # The engine calls the layers in one way for ZeRO 1 and 2, in another for 3.
            called = (layout.tensor, layout.context, layout.sequence_parallel, stage == 3)
            if called not in known:
                known[called] = _layers(here, layout, dtype, stage)
            layers = known[called]
            yield Row(
                layout,
                here.batch.data_ranks,
                stage,
                here.batch.gradient_accumulation_steps,
                memory(layers, flops_of, here, layout, dtype, stage),
                step_seconds(replace(work, zero_stage=stage), layout, gpus, flops, links),
            )


def header(config: Config[ModelConfig], gpus: int, dtype: str) -> str:
    """The model and the run in three lines."""
    work = workload(config, layer_flops(config), dtype)
    batch, steps = config.batch, config.schedule.train_steps
    tokens = batch.tokens_of(steps)
    mode = config.parallel.activation_checkpointing.mode
    return (
        f"{'+'.join(dict.fromkeys(config.model.mixers))}, {work.parameters / 1e6:,.1f} M parameters, {dtype}, "
        f"activation checkpointing {mode}, on {gpus} GPUs\n"
        f"{batch.global_batch_size} samples of {batch.sequence_length} a step in micro batches of "
        f"{batch.micro_batch_size}; {steps:,} steps, {tokens / 1e9:,.2f} G tokens\n"
        f"{work.flops_per_token / 1e9:,.2f} GFLOP a token, {work.flops_per_token * tokens:.3g} FLOP in all"
    )


def table(rows: Sequence[Row], config: Config[ModelConfig], limit: float) -> str:
    """The rows as text."""
    from megatron_lite.planning.memory import GIB

    lines = [
        "tensor  pipe  context  data  ZeRO  micro |  weights  gradients  optimizer  activations     sum |"
        "  tokens/s     days  busy",
        "-" * 121,
    ]
    tokens = config.batch.tokens_per_step
    for row in rows:
        parts = row.memory
        work = parts["activations"] + parts["at work"]
        days = config.batch.tokens_of(config.schedule.train_steps) / tokens * row.step / 86400
        name = f"{row.layout.tensor}{' +SP' if row.layout.sequence_parallel else ''}"
        lines.append(
            f"{name:<6}{row.layout.pipeline:>6}{row.layout.context:>9}{row.data:>6}{row.zero_stage:>6}{row.accumulation:>7} |"
            f"{parts['weights'] / GIB:>9.2f}{parts['gradients'] / GIB:>11.2f}{parts['optimizer'] / GIB:>11.2f}"
            f"{work / GIB:>13.2f}{row.bytes / GIB:>8.1f} |{tokens / row.step:>10,.0f}{days:>9.2f}"
            f"{row.seconds['compute'] / row.step:>6.0%}" + ("   does not fit" if row.bytes > limit else "")
        )
    lines.append(
        "activations: with what one layer needs at work (logits in chunks included); busy: share spent computing"
    )
    return "\n".join(lines)


def _layers(config: Config[ModelConfig], layout: Layout, dtype: str, stage: int) -> list[LayerCost]:
    from megatron_lite.engine.precision import DTYPES
    from tools.planning.layer_memory import layer_costs

    return layer_costs(
        config.model,
        dtype=DTYPES[dtype],
        micro_batch_size=config.batch.micro_batch_size,
        sequence_length=config.batch.sequence_length,
        layout=layout,
        parallel=config.parallel.model_copy(update={"zero_stage": stage}),
    )


if __name__ == "__main__":
    sys.exit(main())
