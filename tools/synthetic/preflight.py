"""Before hours of training: every model's steps as they are and as CUDA graphs, and what a step takes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch

from .batches import batch_size, prepare
from .experiment import Run
from .training import SideBySide, training_device
from .workers import prepare_kernels

STEPS = 20
# Sums are formed in another order in every run of some kernels; over 20 steps from the same start this is what is left.
TOLERANCE = 0.02


def check_sweeps(
    sweeps: Sequence[Sequence[Run]], devices: Sequence[str], *, graph: bool = True
) -> Iterator[dict[str, Any]]:
    """`check_sweep` of each, a process a device named there, as they are ready; one device alone is used by this process.

    What fails is a row with its reason as `problem`.
    """
    if len(devices) == 1:
        _take_device(devices[0])
        for sweep in sweeps:
            yield _row(sweep, graph)
        return
    context = multiprocessing.get_context("spawn")
    names = context.SimpleQueue()
    for device in devices:
        names.put(device)
    with ProcessPoolExecutor(len(devices), context, _take_device_of, (names,)) as pool:
        rows = {pool.submit(_row, sweep, graph): sweep for sweep in sweeps}
        for future in as_completed(rows):
            error = future.exception()
            yield future.result() if error is None else _failed(rows[future], error)


_device = torch.device("cpu")


def _take_device(name: str) -> None:
    global _device
    _device = training_device(name)
    prepare_kernels(_device)


def _take_device_of(names: Any) -> None:
    _take_device(names.get())


def _row(sweep: Sequence[Run], graph: bool) -> dict[str, Any]:
    try:
        return check_sweep(sweep, _device, graph=graph)
    except Exception as error:
        return _failed(sweep, error)


def _failed(sweep: Sequence[Run], error: BaseException) -> dict[str, Any]:
    first, text = sweep[0], (str(error).strip() or "no message").splitlines()[0]
    return {
        "task": first.task,
        "model": first.model,
        "width": first.width,
        "problem": f"{type(error).__name__}: {text}",
    }


def check_sweep(runs: Sequence[Run], device: torch.device, *, graph: bool = True) -> dict[str, Any]:
    """One sweep for 20 steps, side by side and alone, as graphs and not, and in float32: the losses should agree.

    Returns a row of a table; `problem` says what is wrong, or is empty. `difference`: largest relative difference of a loss
    with graphs from the same run alone without. `float32`: of the first loss from the one that plain PyTorch computes.
    """
    first = runs[0]
    size = batch_size(first)
    data = {**first.data, "train_examples": STEPS * size, "test_examples": 2 * size}
    runs = [replace(run, data=data, epochs=1) for run in runs]
    examples = prepare(runs[0], device)
    row: dict[str, Any] = {"task": first.task, "model": first.model, "width": first.width, "runs": len(runs)}
    alone = SideBySide(runs[:1], examples, device, graph=False)
    expected = alone.losses_of_steps(STEPS)
    row["one by one ms"], _ = _speed(alone)
    reference = SideBySide([replace(runs[0], precision="fp32")], examples, device, graph=False).losses_of_steps(1)
    begin = time.perf_counter()
    together = SideBySide(runs, examples, device, graph=graph)
    row["graph"] = together.graph
    row["seconds to prepare"] = round(time.perf_counter() - begin, 1)
    got = together.losses_of_steps(STEPS)
    row["together ms"], accuracies = _speed(together)
    row["loss"] = expected[0][0]
    row["difference"] = max(_relative(a[0], b[0]) for a, b in zip(got, expected, strict=True))
    row["float32"] = _relative(expected[0][0], reference[0][0])
    if device.type == "cuda":
        row["GiB"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    wrong = [f"{key} {row[key]:.3g}" for key in ("difference", "float32") if not row[key] <= TOLERANCE]
    if any(got[0][0] != got[0][i] for i in range(1, len(runs))) and not all(
        _relative(got[0][0], other) <= TOLERANCE for other in got[0]
    ):
        wrong.append(f"first losses {got[0]} of runs that begin alike")
    if not all(0 <= accuracy <= 1 for accuracy in accuracies):
        wrong.append(f"accuracies {accuracies}")
    row["problem"] = "; ".join(wrong)
    return row


def _speed(steps: SideBySide) -> tuple[float, list[float]]:
    """Milliseconds of a step of all lanes, and their accuracies after an epoch."""
    steps.train_epoch(0)
    steps.evaluate()
    begin = time.perf_counter()
    steps.train_epoch(0)
    found, _ = steps.evaluate()
    return round((time.perf_counter() - begin) / STEPS * 1e3, 3), [evaluated.accuracy for evaluated in found]


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)
