"""Parallel compilation of all configurations of a Triton kernel before autotuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.loading import triton_autotune as tuning


def test_all_configurations_are_compiled_before_the_first_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.runtime.autotuner import Autotuner

    from tests.gpu.tuned_kernel import BLOCKS, double

    compiled: list[int] = []

    def compile_and_count(*args: Any) -> None:
        compile_configs(*args)
        compiled.append(len(list(tmp_path.glob("*/*.cubin"))))

    compile_configs = tuning._compile
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_compile", compile_and_count)
    # Restore Triton's functions after the test.
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: list(self.configs))
    monkeypatch.setattr(Autotuner, "_bench", Autotuner._bench)
    tuning.tune_side_by_side()
    x = torch.arange(1000.0, device="cuda")
    y = torch.zeros_like(x)
    double[(1,)](x, y, len(x))
    assert torch.equal(y, 2 * x)
    # All are compiled before the first timing; later calls compile nothing.
    assert compiled == [len(BLOCKS)] * len(BLOCKS)
    assert double.best_config.kwargs["BLOCK"] in BLOCKS
