"""The parity matrix over NCCL: every layout of the available GPUs, compared with the oracle in float32."""

from __future__ import annotations

import json
from subprocess import TimeoutExpired

import pytest
import torch

from tests.parity import layouts
from tests.parity.launch import launch
from tests.parity.test_parity import expected

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [2, 4])
def test_layouts_over_nccl_equal_one_process(tmp_path, processes):
    if processes > GPUS:
        pytest.skip(f"needs {processes} GPUs, has {GPUS}")
    out = tmp_path / "results.json"
    try:
        launch("tests.parity.worker", processes, str(processes), str(out), device="cuda")
    except (RuntimeError, TimeoutExpired) as error:
        reached = [out.with_suffix(f".{rank}") for rank in range(processes)]
        names = [file.read_text() if file.exists() else "none" for file in reached]
        pytest.fail(f"cases that the processes were in: {names}\n{error}")
    results = json.loads(out.read_text())
    wrong = []
    for case in layouts.cases(processes):
        # Weights are drawn on the device, whose generator differs from the CPU's. So the oracle draws there too.
        options = {"masked": case.masked, "packed": case.packed, "optimizer": case.optimizer}
        wanted, _ = expected(case.model, tuple(case.changes.items()), "cuda", **options)
        result = results.get(case.name, {"error": "not reached"})
        if "error" in result:
            wrong.append((case.name, result["error"][-500:]))
            continue
        bounds = {"fp32": (1e-5, 1e-3), "fp16": (2e-3, 5e-3), "bf16": (2e-3, 2e-2)}[case.dtype]
        if case.fp8 != "none":  # in bf16, beside an oracle without FP8
            bounds = (1e-2, 1e-1)
        for step, (got, of) in enumerate(zip(result["history"], wanted[: case.num_steps], strict=True)):
            if any(abs(x / y - 1) > bound for x, y, bound in zip(got, of, bounds, strict=True)):
                wrong.append((case.name, step, got, of))
    assert not wrong, "\n".join(map(str, wrong))
