"""Measure the training speed of one model in several layouts and on one GPU of the same machine, in the same run."""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.loader import load_config
from megatron_lite.plural import counted
from models.config import ModelConfig
from tools.cli.process_status import describe_status
from tools.cli.worker_environment import worker_environment

from .report import machine, plot_bars, table, write_csv
from .timing import timed
from .training_models import project_batch

LONG = 1 << 17  # tokens per sequence with context parallelism, and on the GPU beside it


@dataclass(frozen=True)
class LayoutCase:
    """Describe a layout and the batch of one data rank.

    Attributes:
        parallel: keys of the section `parallel`.
        peer: name of the case whose tokens per second are the unit.
    """

    name: str
    gpus: int
    length: int
    micro_batch_size: int
    accumulation: int
    parallel: dict[str, Any] = field(default_factory=dict)
    peer: str = "1 GPU"


def cases(gpus: int, length: int, micro: int) -> list[LayoutCase]:
    """Return the layouts to measure: one GPU, and each kind of parallelism alone over 2, 4, ... GPUs up to `gpus`."""
    full = {"activation_checkpointing": {"mode": "full"}}
    long = f"1 GPU, {LONG} tokens"
    layouts = [LayoutCase("1 GPU", 1, length, micro, 4), LayoutCase(long, 1, LONG, 1, 1, full)]
    count = 2
    while count <= gpus:
        layouts.append(LayoutCase(f"data {count}", count, length, micro, 4))
        overlap = {"tensor": count, "tensor_overlap": micro % 2 == 0, "cuda_graph": True}
        layouts.append(LayoutCase(f"tensor {count}", count, length, micro, 4, overlap))
        sequence = {"tensor": count, "sequence_parallel": True}
        layouts.append(LayoutCase(f"tensor {count}, sequence parallel", count, length, micro, 4, sequence))
        layouts.append(LayoutCase(f"pipeline {count}", count, length, micro, 16, {"pipeline": count}))
        context = {"context": count, **full}
        layouts.append(LayoutCase(f"context {count}, {LONG} tokens", count, LONG, 1, 1, context, long))
        count *= 2
    return layouts


def run(
    output: Path,
    config: Path,
    overrides: Sequence[str],
    gpus: int,
    length: int,
    micro: int,
    steps: int,
    only: Sequence[str],
) -> None:
    """Print the table and write layouts.csv and layouts.png.

    only: names of the layouts to measure, or parts of names. Raises ValueError for too few GPUs, for an override of a key that
    the layouts set, for a name without a layout, and if no layout is measured.
    """
    if fixed := [word for word in overrides if word.startswith(("parallel.", "batch."))]:
        raise ValueError(f"{fixed[0]}: each layout has its own `parallel` and `batch`; override keys of other sections")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available < gpus:
        raise ValueError(
            f"--gpus {gpus}: this machine has {counted(available, 'GPU')}, and at most that many are allowed"
        )
    known = cases(gpus, length, micro)
    names = [case.name for case in known]
    wanted: set[str] = set() if only else set(names)
    for text in only:
        matches = [text] if text in names else [name for name in names if text in name]
        if not matches:
            raise ValueError(f"--only {text} is in no name; the layouts are: {'; '.join(names)}")
        wanted.update(matches)
    chosen = [case for case in known if case.name in wanted]
    results: dict[str, dict[str, Any]] = {}
    for count in sorted({case.gpus for case in chosen}):
        group = [case for case in chosen if case.gpus == count]
        results |= _launch(config, overrides, group, count, steps)
    rows = []
    for case in chosen:
        result = results.get(case.name)
        if result is None:
            continue
        peer = results.get(case.peer)
        times = result["tokens/s"] / peer["tokens/s"] if peer else None
        rows.append({"method": case.name, "GPUs": case.gpus, "x 1 GPU": times, **result})
    if not rows:
        raise ValueError("no layout finished: read the output of the processes above for the reason")
    title = "".join([config.stem, *(f", {word}" for word in overrides)])
    print(table(rows, f"{title}, bf16, sequence {length}"))
    write_csv(output / "layouts.csv", rows)
    columns = {"tokens/s": "tokens per second", "GiB per GPU": "peak memory per GPU, GiB"}
    plot_bars(output / "layouts.png", rows, columns, f"{title} by layout, {machine()}")


def _launch(
    config: Path, overrides: Sequence[str], group: Sequence[LayoutCase], processes: int, steps: int
) -> dict[str, dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **worker_environment(),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    words = [sys.executable, "-m", "tools.benchmark.layouts", str(config), str(steps)]
    words += [json.dumps([asdict(case) for case in group]), *overrides]
    running = [
        subprocess.Popen(
            words,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    results: dict[str, dict[str, Any]] = {}
    assert running[0].stdout is not None
    for line in running[0].stdout:  # read line by line, so that a failure keeps earlier results
        if line.startswith("{"):
            result = json.loads(line)
            results[result.pop("name")] = result
            print(line, end="", file=sys.stderr, flush=True)
    for rank, process in enumerate(running):
        if process.wait() < 0:
            print(f"rank {rank} of {processes}: {describe_status(process.returncode)}", file=sys.stderr)
    return results


def worker(config_file: str, steps: int, group: Sequence[LayoutCase], overrides: Sequence[str]) -> None:
    """Measure all cases in one process of the group. Rank 0 prints one line of JSON per case."""
    from megatron_lite.parallel.grid import init_grid

    for case in group:
        shape = {key: case.parallel.get(key, 1) for key in ("tensor", "pipeline", "context")}
        grid = init_grid("cuda", 10.0, **shape)
        result = _measure(case, config_file, overrides, grid, steps)
        if grid.is_main:
            print(json.dumps({"name": case.name, **result}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def _measure(case: LayoutCase, config_file: str, overrides: Sequence[str], grid: Any, steps: int) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron_lite.config.schema import ParallelConfig
    from tools.loading.engine import build_engine

    settings = [
        f"batch.sequence_length={case.length}",
        f"batch.micro_batch_size={case.micro_batch_size}",
        f"batch.gradient_accumulation_steps={case.accumulation}",
        "batch.global_batch_size=null",
    ]
    config = load_config([config_file], [*overrides, *settings], model_type=ModelConfig, world_size=grid.world_size)
    config = config.model_copy(update={"parallel": ParallelConfig(**case.parallel)})
    engine = build_engine(config, grid, "bf16")
    generator = torch.Generator().manual_seed(grid.data_rank)
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps + 2):
        batches = []
        for _ in range(case.accumulation):
            size = (case.micro_batch_size, case.length + 1)
            batches.append(project_batch(torch.randint(0, config.model.vocab_size, size, generator=generator)))
        if grid.world_size > 1:
            dist.barrier()
        step, seconds = timed(partial(engine.train_step, batches, lr=1e-5), cuda=True)
        loss = step.loss
        times.append(seconds)
    update = {}
    if engine.muon_parameters:
        rounds = [timed(engine.optimizer_state.compute_muon_update, cuda=True)[1] for _ in range(steps + 1)]
        update = {"Muon update ms": 1e3 * statistics.median(rounds[1:])}
    memory = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=grid.device)
    if grid.world_size > 1:
        dist.all_reduce(memory, dist.ReduceOp.MAX)
    engine.close()
    median = statistics.median(times[2:])
    tokens_per_step = case.micro_batch_size * case.accumulation * case.length * grid.data_size
    return {
        "tokens/s": tokens_per_step / median,
        "step s": median,
        "GiB per GPU": memory.item(),
        **update,
        "loss": loss,
        "first step s": times[0],
    }


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), [LayoutCase(**case) for case in json.loads(sys.argv[3])], sys.argv[4:])
    os._exit(0)  # a process group with an ended peer would wait for its timeout
