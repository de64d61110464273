"""Flip random bits of replicated weights and moments in small runs of two processes; count the flips that are noticed.

`run` starts the processes: `python -m tests.faults.bit_flips COUNT SEED FOLDER [ARGUMENT...]`.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import train
from megatron_lite.engine.engine import Engine
from megatron_lite.fault_tolerance.replica_check import ReplicaCheck, ReplicasDifferError
from megatron_lite.parallel.grid import Grid
from tests.faults import inject
from tests.faults.outcomes import record_failure
from tests.parity import launch, layouts
from tests.parity.worker import engine_of, grid_of, own

INTERVAL = 3
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({}, "fp32"),
    ({"tensor": 2}, "fp32"),
    ({"context": 2}, "bf16"),
    ({"tensor": 2, "sequence_parallel": True}, "bf16"),
    ({"zero_stage": 2}, "fp32"),
]


def run(count: int, seed: int, folder: Path, words: Sequence[str] = ()) -> dict[str, int]:
    """Flip `count` bits, one per run. Each must be noticed within one interval of the replica check.

    Args:
        words: arguments of a run of `train.py` that follows, with a flipped bit on rank 1. Its output is in
            `folder/stderr.txt`.

    Returns:
        "tried", "noticed" (the run ended), "named" (the message lists the flipped tensor and the ranks), and the "status" of
        `train.py`. A flip may spread to more tensors than the message lists, so "named" may be less than "noticed".
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = launch.launch_forked("tests.faults.bit_flips", 2, str(count), str(seed), str(folder), *words)
    (folder / "stderr.txt").write_text(output)
    return json.loads((folder / "bit_flips.json").read_text())


def replicated(engine: Engine, grid: Grid) -> list[tuple[str, Tensor]]:
    """Return the tensors of this process that another process holds too, by name."""
    state = engine.optimizer_state
    if grid.tensor_size > 1:
        return [entry for named in state.tensor_replicas() for entry in named]
    return [
        (name, flat.buffer[start : start + numel])
        for flat in state.weight_buffers()
        for name, (start, numel) in flat.ranges.items()
    ]


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element, in place."""
    bits = 8 * tensor.element_size()
    words = tensor.view(-1).view({16: torch.int16, 32: torch.int32}[bits])
    words[element] ^= (1 << bit) - (1 << bits if bit == bits - 1 else 0)


def attempts(engine: Engine, grid: Grid, draw: random.Random, count: int, folder: Path) -> dict[str, int]:
    """Repeat `INTERVAL` steps from the same state `count` times, with one flipped bit on one rank; return the counts.

    folder: receives the descriptions of flips that were not noticed or not named.
    """
    state, steps = engine.optimizer_state, layouts.steps()
    engine.train_step(own(steps[0], grid), lr=layouts.LR)
    updates = state.steps
    saved = [tensor.clone() for fragment in state.fragments() for tensor in fragment.tensors.values()]
    counts = {"tried": 0, "noticed": 0, "named": 0}
    for attempt in range(-1, count):  # attempt -1 has no flip
        check = ReplicaCheck(state, grid, INTERVAL, 1)
        targets = replicated(engine, grid)
        name, tensor = draw.choice(targets)
        element, bit = draw.randrange(tensor.numel()), draw.randrange(8 * tensor.element_size())
        rank, when = draw.randrange(2), draw.randrange(INTERVAL)
        message = ""
        try:
            for step in range(INTERVAL):
                if attempt >= 0 and step == when and grid.rank == rank:
                    flip(tensor, element, bit)

                def should_skip(loss: float, step: int = step, check: ReplicaCheck = check) -> bool:
                    check.before_update(step + 1)
                    return not math.isfinite(loss)

                engine.train_step(own(steps[1 + step % 3], grid), lr=layouts.LR, should_skip=should_skip)
                check.finish()
        except ReplicasDifferError as error:
            message = str(error)
        if attempt < 0:
            assert not message, message
        else:
            counts["tried"] += 1
            counts["noticed"] += bool(message)
            is_named = f"{name}: ranks 0-1" in message
            counts["named"] += is_named
            if grid.is_main and not is_named:
                record_failure(folder, tensor=name, element=element, bit=bit, rank=rank, step=when, output=message)
        for tensor, values in zip(
            (tensor for fragment in state.fragments() for tensor in fragment.tensors.values()), saved, strict=True
        ):
            tensor.copy_(values)
        state.finish_load(updates)
    return counts


def main(count: int, seed: int, folder: Path, words: Sequence[str]) -> None:
    draw = random.Random(seed)
    total = {"tried": 0, "noticed": 0, "named": 0}
    for index, (parallel, dtype) in enumerate(LAYOUTS):
        share = count // len(LAYOUTS) + (index < count % len(LAYOUTS))
        if share:
            grid = grid_of(parallel)
            engine = engine_of(layouts.model_config("metala", num_layers=2), parallel, grid, dtype=dtype)
            for key, value in attempts(engine, grid, draw, share, folder).items():
                total[key] += value
            engine.close()
    if words:
        if grid_of({}).rank == 1:
            inject.install("flip", 2)
        total["status"] = train.main(words)
    if grid_of({}).is_main:
        (folder / "bit_flips.json").write_text(json.dumps(total))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    launch.leave()
