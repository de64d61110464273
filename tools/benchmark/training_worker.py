"""Measure one model of `python -m tools.benchmark train` in its own process: print one line of JSON per shape.

python -m tools.benchmark.training_worker '{"launched": ..., "subject": ..., "shapes": [[length, batch], ...], ...}'
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import torch

from ..loading.triton_autotune import tune_side_by_side, without_tuning
from .timing import timed
from .training_models import Settings, Size, Training, build

WARM_UP = 2  # untimed steps after the first


def main(task: dict[str, Any]) -> None:
    """Measure the shapes of a task. Without `subject`, print the properties of the machine.

    task: `launched` (time.time() at the start), `subject` (model under test), `shapes` (length, batch), `steps`,
    `first_only`, `tuned`, `settings` (of `Settings` without length and batch), `device`.
    """
    device = torch.device(task["device"])
    cuda = device.type == "cuda"
    if "subject" not in task:
        _send({"machine": _machine(device, task)})
        return
    if task["tuned"]:
        tune_side_by_side()
    else:
        without_tuning()
    shapes = [tuple(shape) for shape in task["shapes"]]
    fields = {**task["settings"], "size": Size(**task["settings"]["size"])}
    fields["overrides"] = tuple(fields["overrides"])
    training: Training | None = None
    launched: float | None = task["launched"]
    for length, batch in shapes:
        key = {"length": length, "batch": batch}
        _send({"begun": key})
        try:
            if training is None:
                training = build(task["subject"], Settings(**fields, length=length, batch=batch), device)
            row = _measure(training, length, batch, task, launched, device)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            row = {"error": "out of memory"}
        except ImportError as error:
            _send({"row": {**key, "error": f"not available: {error}"}})
            continue
        _send({"row": {**key, **row}})
        launched = None
        if "error" in row:
            # The state after a failed step is unknown: build the model again.
            if training is not None:
                training.close()
            training = None
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
                if torch.cuda.memory_allocated() > 1 << 30:
                    break  # the parent continues in a new process
        if cuda:
            torch.cuda.empty_cache()


def _measure(
    training: Training, length: int, batch: int, task: dict[str, Any], launched: float | None, device: torch.device
) -> dict[str, Any]:
    cuda = device.type == "cuda"
    vocabulary = task["settings"]["size"]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    times: list[float] = []
    loss = first_step = None
    for number in range(1 if task["first_only"] else 1 + WARM_UP + task["steps"]):
        tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
        if number == 1 + WARM_UP and cuda:
            torch.cuda.reset_peak_memory_stats()
        value, seconds = timed(lambda tokens=tokens: training.step(tokens), cuda=cuda)
        times.append(seconds)
        if number == 0:
            loss, first_step = value, None if launched is None else time.time() - launched
        _send({"step": number + 1})
    # Imported after the first step, whose time counts the imports of the model under test only.
    from megatron_lite.planning.memory import idle_bytes_in_graph_pools

    in_graphs = idle_bytes_in_graph_pools() if cuda else 0
    return {
        "parameters": training.parameters,
        "keeps": training.keeps,
        "micro batches": training.micro_batches,
        "flops a token": training.flops_per_token(length),
        "to first step s": first_step,
        "first step s": times[0],
        "steps s": times[1 + WARM_UP :],
        "peak GiB": (torch.cuda.max_memory_allocated() + in_graphs) / 2**30 if cuda else None,
        "held GiB": (torch.cuda.memory_allocated() + in_graphs) / 2**30 if cuda else None,
        "first loss": loss,
    }


def _machine(device: torch.device, task: dict[str, Any]) -> dict[str, Any]:
    """Return the machine's name and versions, the number format for training and the FLOP/s of a matmul in it."""
    from importlib.metadata import PackageNotFoundError, version

    from megatron_lite.engine.precision import faster_dtype
    from megatron_lite.planning.flops import measure_peak_flops

    from .report import machine

    dtype = task["dtype"]
    if dtype == "auto":
        dtype = faster_dtype(device, task["hidden_size"], task["tokens"])
    packages = {}
    for name in ("transformers", "flash-linear-attention", "deepspeed"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "absent"
    return {"name": machine(), "dtype": dtype, "peak": measure_peak_flops(device, dtype, 1.0), "packages": packages}


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "out of memory" in text or "Out of memory" in text


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # skip the interpreter's shutdown, which takes seconds in a large process
