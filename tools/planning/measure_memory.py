"""Compare the memory estimate with the allocations of a training step: `python -m tools.plan CONFIG --measure`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.config.loader import ConfigError
from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.grid import Grid, init_grid
from megatron_lite.planning.memory import GIB, Allocations, idle_bytes_in_graph_pools
from megatron_lite.plural import counted
from models.config import ModelConfig
from models.language_model import example_batch
from tools.loading.engine import build_engine
from tools.planning.estimate import memory_of, read_config

# CUDA graphs are recorded in the third micro-batch.
WARMUP_STEPS = 3
CASES = [(stage, mode) for stage in (1, 2, 3) for mode in ("none", "elementwise", "selective", "full")]


def measure(words: Sequence[str], cases: Sequence[tuple[int, str]] | None = None) -> int:
    """Train a few steps on random tokens with each ZeRO stage and checkpointing mode, in the configuration's layout.

    Stages that another setting excludes are left out. cases: (stage, mode) to measure, by default all.
    Returns 0, or 1 if an estimate differs from the allocated memory by more than 15 %.
    """
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    config = read_config(words, gpus)
    parallel = config.parallel
    grid = init_grid(config.run.device, tensor=parallel.tensor, pipeline=parallel.pipeline, context=parallel.context)
    dtype = "bf16" if config.precision.dtype == "auto" else config.precision.dtype
    name = torch.cuda.get_device_name(grid.device) if grid.device.type == "cuda" else "cpu"
    if grid.is_main:
        print(
            f"{Path(words[0]).stem}: {counted(gpus, 'process', 'processes')} on {name}, {dtype}, "
            f"micro-batch {config.batch.micro_batch_size}"
        )
        print("ZeRO  checkpointing   estimated GiB   allocated GiB   ratio")
    worst = 1.0
    for stage, mode in CASES if cases is None else cases:
        overrides = [f"parallel.zero_stage={stage}", f"parallel.activation_checkpointing.mode={mode}"]
        try:
            case = read_config([*words, *overrides], gpus)
        except ConfigError:  # another setting excludes this stage
            continue
        estimated, allocated = estimate(case, dtype, grid), _largest(allocation(case, dtype, grid), grid)
        ratio = estimated / allocated
        worst = max(worst, ratio, 1 / ratio)
        if grid.is_main:
            print(f"{stage:>4}  {mode:<14}{estimated / GIB:>15.3f}{allocated / GIB:>16.3f}{ratio:>8.3f}", flush=True)
    if grid.is_main and worst > 1.15:
        print(f"error: an estimate is off by {worst - 1:.0%}, more than 15 %", file=sys.stderr)
    return int(worst > 1.15)


def estimate(config: Config[ModelConfig], dtype: str, grid: Grid) -> float:
    """Return the estimated bytes of the process with the most memory."""
    return sum(memory_of(config, dtype, cuda=grid.device.type == "cuda").values())


def allocation(config: Config[ModelConfig], dtype: str, grid: Grid) -> float:
    """Return the peak bytes of this process in a step after the first ones.

    On CUDA they include the memory that graphs hold while no tensor uses it.
    """
    if grid.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        engine = build_engine(config, grid, dtype)
        for _ in range(WARMUP_STEPS):
            _step(engine, config, grid)
        torch.cuda.reset_peak_memory_stats(grid.device)
        _step(engine, config, grid)
        peak = float(torch.cuda.max_memory_allocated(grid.device)) + idle_bytes_in_graph_pools()
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


def _step(engine: Engine, config: Config[ModelConfig], grid: Grid) -> None:
    batch = example_batch(config.model, config.batch.micro_batch_size, config.batch.sequence_length)
    generator = torch.Generator().manual_seed(grid.data_rank)
    if not batch["tokens"].is_floating_point():
        batch["tokens"] = torch.randint(config.model.vocab_size, batch["tokens"].shape, generator=generator)
    engine.train_step([batch] * config.batch.gradient_accumulation_steps, lr=1e-4)


def _largest(value: float, grid: Grid) -> float:
    if grid.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=grid.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
