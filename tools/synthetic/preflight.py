"""Check every model for a few steps before hours of training: with and without CUDA graphs, with times per step."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch

from tools.cli.devices import use_device

from .batches import batch_size, prepare
from .experiment import Run
from .training import SideBySide
from .workers import error_line, prepare_kernels

STEPS = 20
# Keys of a row of `check_sweep`.
COLUMNS = (
    *("task", "model", "width", "runs", "one by one ms", "together ms", "seconds to prepare", "GiB", "loss"),
    *("difference", "float32", "graph", "problem"),
)
# Relative. Some kernels sum in a varying order; after 20 steps from equal weights the losses differ by less than this.
TOLERANCE = 0.02


def check_sweeps(
    sweeps: Sequence[Sequence[Run]], devices: Sequence[str], *, graph: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the row of `check_sweep` for each sweep, in order of completion.

    devices: one process per entry; a single device is used in this process. A check that raises yields a row with the
    reason as `problem`.
    """
    if len(devices) == 1:
        _use_device(devices[0])
        for sweep in sweeps:
            yield _row(sweep, graph)
        return
    context = multiprocessing.get_context("spawn")
    names = context.SimpleQueue()
    for device in devices:
        names.put(device)
    with ProcessPoolExecutor(len(devices), context, _use_next_device, (names,)) as pool:
        rows = {pool.submit(_row, sweep, graph): sweep for sweep in sweeps}
        for future in as_completed(rows):
            error = future.exception()
            yield future.result() if error is None else _failed(rows[future], error)


_device = torch.device("cpu")


def _use_device(name: str) -> None:
    global _device
    _device = use_device(name)
    prepare_kernels(_device)


def _use_next_device(names: Any) -> None:
    _use_device(names.get())


def _row(sweep: Sequence[Run], graph: bool) -> dict[str, Any]:
    try:
        return check_sweep(sweep, _device, graph=graph)
    except Exception as error:
        return _failed(sweep, error)


def _failed(sweep: Sequence[Run], error: BaseException) -> dict[str, Any]:
    first = sweep[0]
    return {"task": first.task, "model": first.model, "width": first.width, "problem": error_line(error)}


def check_sweep(runs: Sequence[Run], device: torch.device, *, graph: bool = True) -> dict[str, Any]:
    """Train the runs of one sweep for 20 steps, together and alone, with and without graphs, and compare the losses.

    Returns a row of a table with the keys COLUMNS, on a CPU without GiB:
        problem: what differs; empty without a difference.
        difference: largest relative difference of the first run's losses, together with graphs against alone without.
        float32: relative difference of the first loss from plain PyTorch in float32.
    """
    first = runs[0]
    size = batch_size(first)
    counts = {"train_examples": STEPS * size, "validation_examples": 2 * size, "test_examples": 2 * size}
    data = first.data | {key: count for key, count in counts.items() if key in first.data}
    runs = [replace(run, data=data, epochs=1, epoch_steps=None) for run in runs]
    examples = prepare(runs[0], device)
    row: dict[str, Any] = {"task": first.task, "model": first.model, "width": first.width, "runs": len(runs)}
    alone = SideBySide(runs[:1], examples, device, graph=False)
    expected = alone.losses_of_steps(STEPS)
    row["one by one ms"], _ = _speed(alone)
    reference = SideBySide(
        [replace(runs[0], precision="fp32", compile=False)], examples, device, graph=False
    ).losses_of_steps(1)
    begin = time.perf_counter()
    together = SideBySide(runs, examples, device, graph=graph)
    row["graph"] = together.graph
    row["seconds to prepare"] = round(time.perf_counter() - begin, 1)
    losses = together.losses_of_steps(STEPS)
    row["together ms"], accuracies = _speed(together)
    row["loss"] = expected[0][0]
    row["difference"] = max(_relative(a[0], b[0]) for a, b in zip(losses, expected, strict=True))
    row["float32"] = _relative(expected[0][0], reference[0][0])
    if device.type == "cuda":
        row["GiB"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    problems = [f"{key} {row[key]:.3g} > {TOLERANCE}" for key in ("difference", "float32") if not row[key] <= TOLERANCE]
    if not all(loss == losses[0][0] or _relative(losses[0][0], loss) <= TOLERANCE for loss in losses[0]):
        problems.append(f"first losses {losses[0]} differ, although the runs have equal first weights")
    if not all(0 <= accuracy <= 1 for accuracy in accuracies):
        problems.append(f"accuracies {accuracies} are not between 0 and 1")
    row["problem"] = "; ".join(problems)
    return row


def _speed(steps: SideBySide) -> tuple[float, list[float]]:
    """Return milliseconds per step of all runs together, and their accuracies after an epoch."""
    steps.train_epoch(0)
    steps.evaluate()
    begin = time.perf_counter()
    steps.train_epoch(0)
    evaluations, _ = steps.evaluate()
    milliseconds = (time.perf_counter() - begin) / STEPS * 1e3
    return round(milliseconds, 3), [evaluation.accuracy for evaluation in evaluations]


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)
