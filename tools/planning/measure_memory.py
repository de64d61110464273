"""The plan's estimate of memory beside what a training step allocates: `python -m tools.plan CONFIG --measure`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.grid import Grid, init_grid
from megatron_lite.planning.memory import GIB, Allocations
from models.config import ModelConfig
from tools.loading.engine import build_engine
from tools.planning.estimate import memory_of, read_config

# Steps before the one that is measured: CUDA graphs are recorded in the third micro batch.
BEFORE = 3
CASES = [(stage, mode) for stage in (1, 2, 3) for mode in ("none", "elementwise", "selective", "full")]


def measure(words: Sequence[str], cases: Sequence[tuple[int, str]] | None = None) -> int:
    """A few training steps on random tokens in the layout of the configuration, under each ZeRO stage and checkpointing mode.

    Returns 0, or 1 when an estimate is further than 15 % from what was allocated.
    """
    import os

    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    config = read_config(words, gpus)
    sizes = config.parallel
    grid = init_grid(config.run.device, tensor=sizes.tensor, pipeline=sizes.pipeline, context=sizes.context)
    dtype = "bf16" if config.precision.dtype == "auto" else config.precision.dtype
    name = torch.cuda.get_device_name(grid.device) if grid.device.type == "cuda" else "cpu"
    if grid.is_main:
        print(
            f"{Path(words[0]).stem}: {gpus} processes on {name}, {dtype}, micro batch {config.batch.micro_batch_size}"
        )
        print("ZeRO  checkpointing   estimated GiB   allocated GiB   ratio")
    worst = 1.0
    if cases is None:
        most = 1 if sizes.pipeline > 1 else 2 if config.parallel.cuda_graph else 3
        cases = [case for case in CASES if case[0] <= most]
    for stage, mode in cases:
        here = read_config(
            [*words, f"parallel.zero_stage={stage}", f"parallel.activation_checkpointing.mode={mode}"], gpus
        )
        estimated, allocated = estimate(here, dtype, grid), _largest(allocation(here, dtype, grid), grid)
        ratio = estimated / allocated
        worst = max(worst, ratio, 1 / ratio)
        if grid.is_main:
            print(f"{stage:>4}  {mode:<14}{estimated / GIB:>15.3f}{allocated / GIB:>16.3f}{ratio:>8.3f}", flush=True)
    if grid.is_main and worst > 1.15:
        print(f"error: an estimate is off by {worst - 1:.0%}, more than 15 %", file=sys.stderr)
    return int(worst > 1.15)


def estimate(config: Config[ModelConfig], dtype: str, grid: Grid) -> float:
    """Bytes of the fullest process, as tools.plan counts them."""
    return sum(memory_of(config, dtype, cuda=grid.device.type == "cuda").values())


def allocation(config: Config[ModelConfig], dtype: str, grid: Grid) -> float:
    """Most bytes that this process holds at once in a step after the first ones: of tensors, and on CUDA of graphs, which
    keep their memory also while no tensor lies there."""
    if grid.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        engine = build_engine(config, grid, dtype)
        for _ in range(BEFORE):
            _step(engine, config, grid)
        torch.cuda.reset_peak_memory_stats(grid.device)
        _step(engine, config, grid)
        peak = float(torch.cuda.max_memory_allocated(grid.device)) + _idle_in_graphs()
        engine.close()
        return peak
    with Allocations("cpu") as count:
        engine = build_engine(config, grid, dtype)
        _step(engine, config, grid)
        gc.collect()
        count.peak = count.now
        _step(engine, config, grid)
        peak = float(count.peak)
    engine.close()
    return peak


def _idle_in_graphs() -> int:
    """Bytes that CUDA graphs hold and where no tensor lies now."""
    segments = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in segments)


def _step(engine: Engine, config: Config[ModelConfig], grid: Grid) -> None:
    draw = torch.Generator().manual_seed(grid.data_rank)
    batches: list[dict[str, Any]] = []
    for _ in range(config.batch.gradient_accumulation_steps):
        shape = (config.batch.micro_batch_size, config.batch.sequence_length + 1)
        tokens = torch.randint(config.model.vocab_size, shape, generator=draw)
        batches.append(
            {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_weight": torch.ones(shape[0], shape[1] - 1),
            }
        )
    engine.train_step(batches, lr=1e-4)


def _largest(value: float, grid: Grid) -> float:
    if grid.world_size == 1:
        return value
    import torch.distributed as dist

    tensor = torch.tensor(value, dtype=torch.float64, device=grid.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
