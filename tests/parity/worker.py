"""One process of the parity matrix: it runs every case of its number of processes; rank 0 writes the results."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config.schema import ScheduleConfig
from megatron_lite.engine.engine import Engine
from megatron_lite.optim.lr_schedule import learning_rate
from megatron_lite.parallel.grid import Grid, init_grid
from models.config import ModelConfig
from tests.megatron_lite.conftest import allow_fp16_on_a_cpu, leave_bf16_steps, reduce_in_float32, run_config
from tests.parity import layouts
from tests.parity.launch import leave
from tests.parity.layouts import LR, STEPS, WARMUP
from tests.untuned import leave_untuned
from tools.loading.engine import build_engine


class Groups:
    """Create each process group once for all cases.

    An NCCL communicator takes about 100 MB of GPU memory, which DeepSpeed never frees, and up to a second.
    """

    def __init__(self) -> None:
        self._new = torch.distributed.new_group
        self._groups: dict[Any, Any] = {}
        self._of_case: Counter[Any] = Counter()

    def next_case(self) -> None:
        """Begin a case. It may reuse the groups of earlier cases, but not its own."""
        self._of_case.clear()

    def __call__(self, ranks: list[int] | None = None, *args: Any, pg_options: Any = None, **options: Any) -> Any:
        kind = (*(ranks or ()), pg_options is not None)
        self._of_case[kind] += 1
        key = (kind, self._of_case[kind])
        if key not in self._groups:
            self._groups[key] = self._new(ranks, *args, pg_options=pg_options, **options)
        return self._groups[key]


def grid_of(parallel: dict[str, Any]) -> Grid:
    sizes = {key: parallel[key] for key in ("tensor", "pipeline", "context") if key in parallel}
    return init_grid(os.environ.get("MATRIX_DEVICE", "cpu"), 2.0, **sizes)


def engine_of(
    config: ModelConfig,
    parallel: dict[str, Any],
    grid: Grid,
    *,
    seed: int = 11,
    dtype: str = "fp32",
    state: str = "fp32",
    fp8: str = "none",
    counts_correct: bool = False,
    micro_batch_size: int = 2,
    optimizer: str = "adamw",
) -> Engine:
    settings = run_config(
        config,
        seed=seed,
        lr=LR,
        length=layouts.LENGTH,
        micro_batch_size=micro_batch_size,
        accumulation=2 * layouts.MICRO_BATCHES // micro_batch_size // grid.data_size,
        optimizer=layouts.OPTIMIZERS[optimizer],
        precision={"optimizer_state": state, "fp16": {"initial_scale_power": 8}, "fp8": {"recipe": fp8}},
        counts_correct=counts_correct,
        **parallel,
    )
    return build_engine(settings, grid, dtype)


def rate(step: int) -> float:
    return learning_rate(step, LR, ScheduleConfig(train_steps=STEPS, warmup_steps=WARMUP, decay_steps=STEPS))


def own(step: list[Any], grid: Grid) -> list[Any]:
    return step[grid.data_rank :: grid.data_size]


def run(case: layouts.LayoutCase) -> dict[str, Any]:
    grid = grid_of(case.parallel)
    # Fewer micro-batches where each one costs collectives in every layer.
    pairs = grid.data_size * grid.pipe_size == 1 and not case.packed
    other = grid.pipe_size > 1 and not case.packed
    engine = engine_of(
        case.config,
        case.parallel,
        grid,
        dtype=case.dtype if case.fp8 == "none" or grid.device.type == "cpu" else "bf16",  # CUDA needs it for FP8
        state=case.state,
        fp8=case.fp8,
        counts_correct=True,
        micro_batch_size=4 if pairs else 2,
        optimizer=case.optimizer,
    )
    history, accuracies, evaluated = [], [], []
    for index, step in enumerate(layouts.steps_of(case)[: case.num_steps]):
        step = layouts.in_pairs(step) if pairs else step
        result = engine.train_step(own(step, grid), lr=rate(index))
        history.append((result.loss, result.gradient_norm))
        accuracies.append(result.accuracy)
        if index == 1:  # between training steps; unless packed, stages then expect another size
            evaluated = list(engine.evaluate(own(layouts.in_pairs(step) if other else step, grid)))
    engine.close()
    return {"history": history, "accuracies": accuracies, "evaluated": evaluated}


def guards(parallel: dict[str, Any], dtype: str) -> list[list[Any]]:
    """Return [skipped, state is unchanged, loss is finite] of three steps on every process.

    The first step is skipped by request. The loss of the second is not finite on the last process. The third is ordinary.
    """
    grid = grid_of(parallel)
    engine = engine_of(layouts.model_config("hybrid"), parallel, grid, dtype=dtype)
    steps = [own(step, grid) for step in layouts.steps()]
    engine.train_step(steps[0], lr=LR)
    broken = steps[2]
    if grid.data_rank == grid.data_size - 1:
        broken = [{**batch, "loss_weight": batch["loss_weight"] * math.inf} for batch in broken]
    outcome = []
    for step, should_skip in ((steps[1], lambda loss: loss > 0), (broken, None), (steps[3], None)):
        old = [
            tensor.clone() for fragment in engine.optimizer_state.fragments() for tensor in fragment.tensors.values()
        ]
        result = engine.train_step(step, lr=LR, should_skip=should_skip)
        new = [tensor for fragment in engine.optimizer_state.fragments() for tensor in fragment.tensors.values()]
        same = all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        outcome.append((result.skipped, same, math.isfinite(result.loss)))
    engine.close()
    everyone: list[Any] = [None] * grid.world_size
    torch.distributed.all_gather_object(everyone, outcome)
    return everyone


def bf16_steps(parallel: dict[str, Any], optimizer: str, count: int, *, replaced: bool) -> list[Tensor]:
    """Return losses, gradient norms, and this process's final master weights, moments and 16-bit weights of bf16 steps.

    The second step is skipped by request.

    replaced: step by `megatron_lite.optim.bf16_optimizer`, else by DeepSpeed.
    """
    grid = grid_of(parallel)
    pairs = grid.data_size * grid.pipe_size == 1  # as in `run`
    with pytest.MonkeyPatch.context() as patch:
        (reduce_in_float32 if replaced else leave_bf16_steps)(patch)
        config = layouts.model_config("hybrid")
        engine = engine_of(
            config, parallel, grid, dtype="bf16", optimizer=optimizer, micro_batch_size=4 if pairs else 2
        )
    steps = [own(layouts.in_pairs(step) if pairs else step, grid) for step in layouts.steps()]
    results = [
        engine.train_step(step, lr=1e-3, should_skip=lambda _, index=index: index == 1)
        for index, step in enumerate(steps[:count])
    ]
    state = [
        torch.cat([fragment.tensors[key] for fragment in engine.optimizer_state.fragments()])
        for key in ("weight", "exp_avg", "exp_avg_sq")
    ]
    state.append(torch.cat([p.detach().float().flatten() for layer in engine.layers for p in layer.parameters()]))
    engine.close()
    assert [result.skipped for result in results] == [False, True, False, False][:count]
    norms = [result.gradient_norm for result in results if not result.skipped]
    return [torch.tensor([result.loss for result in results]), torch.tensor(norms), *state]


def distances(parallel: dict[str, Any]) -> list[list[float]]:
    """Return the relative distances of the project's `bf16_steps` to DeepSpeed's, on every process.

    Clipped steps are compared once: the order of summation changes the last bit of the norm, by which a weight may round to the
    next 16-bit number, and further steps would differ by more than rounding.
    """
    values = []
    for optimizer, count in (("unclipped", STEPS), ("adamw", 1)):
        actual, expected = (bf16_steps(parallel, optimizer, count, replaced=replaced) for replaced in (True, False))
        values += [((a - b).norm() / b.norm()).item() for a, b in zip(actual, expected, strict=True)]
    everyone: list[Any] = [None] * grid_of(parallel).world_size
    torch.distributed.all_gather_object(everyone, values)
    return everyone


def main(processes: int, out: Path) -> None:
    results: dict[str, Any] = {}
    if os.environ.get("MATRIX_DEVICE") == "cuda":
        leave_untuned()
    torch.distributed.new_group = groups = Groups()  # type: ignore[assignment]
    reached = out.with_suffix(f".{os.environ['RANK']}")  # names the case in which a process hangs

    def begin(name: str) -> None:
        reached.write_text(name)
        groups.next_case()
        # DeepSpeed collects garbage several times per engine. Exempt the objects of modules and caches.
        gc.collect()
        gc.freeze()

    for name, parallel, dtype in layouts.guarded(processes):
        begin(name)
        results[name] = guards(parallel, dtype)
    for name, parallel in layouts.compared(processes) if os.environ.get("MATRIX_DEVICE") != "cuda" else ():
        begin(name)
        results[name] = distances(parallel)
    for case in layouts.cases(processes):
        begin(case.name)
        try:
            with pytest.MonkeyPatch.context() as patch:
                if case.dtype == "fp16":
                    allow_fp16_on_a_cpu(patch)
                results[case.name] = run(case)
        except Exception:
            results[case.name] = {"error": traceback.format_exc()}
            print(f"{case.name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            break  # the processes may no longer be in step
    if grid_of({}).is_main:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()
