"""The values of a log line."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.config.data_schema import DataConfig
from megatron_lite.engine.engine import StepResult
from megatron_lite.metrics import step_metrics
from megatron_lite.metrics.step_metrics import StepMetrics
from tests.megatron_lite.conftest import model_config, run_config


def values_of(monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], *, dtype: str = "bf16") -> dict[str, float]:
    """Return the values of a step of 64 tokens in two seconds, on two devices of 1000 FLOP/s."""
    layers = [SimpleNamespace(flops_per_token=lambda length, factor=factor: factor * length) for factor in (1, 2)]
    grid = SimpleNamespace(world_size=2, is_main=True, device=torch.device("cpu"))
    engine: Any = SimpleNamespace(model=layers, grid=grid, dtype=dtype)
    monkeypatch.setattr(step_metrics, "peak_flops", lambda device, name: {"bf16": 1000.0, "fp16": 2000.0}[name])
    config = run_config(model_config(), length=16).model_copy(update={"data": DataConfig(**data)})
    result = StepResult(loss=1.0, gradient_norm=2.0, skipped=False, loss_scale=8.0)
    totals = {"consumed_tokens": 640, "skipped_steps": 3}
    return StepMetrics(engine, config).values(
        result, lr=0.1, tokens=64, seconds=2.0, data_seconds=0.5, stragglers=None, **totals
    )


def test_mfu_counts_three_forward_passes_on_all_devices(monkeypatch):
    values = values_of(monkeypatch, {})
    assert values["mfu"] == pytest.approx(64 / 2.0 * 3 * (1 + 2) * 16 / (2 * 1000))
    assert values_of(monkeypatch, {}, dtype="fp16")["mfu"] == pytest.approx(values["mfu"] / 2)
    # The head of a masked model runs at the masked positions only.
    masked = values_of(monkeypatch, {"objective": "masked", "masked": {"rate": 0.25}})
    assert masked["mfu"] == pytest.approx(values["mfu"] * (1 + 2 * 0.25) / 3)


def test_values_that_only_some_runs_have(monkeypatch):
    plain = values_of(monkeypatch, {})
    assert values_of(monkeypatch, {}, dtype="fp16").keys() - plain.keys() == {"loss_scale"}
    images = values_of(monkeypatch, {"objective": "classification"})
    assert images.keys() - plain.keys() == {"images_per_second"}
    assert images["images_per_second"] == 64 / 2.0 / 16


def test_values_of_a_step(monkeypatch):
    values = values_of(monkeypatch, {})
    # On a CPU the largest resident size so far, in kilobytes of 1024 bytes.
    assert values["memory_gib"] == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30)
    assert (values["tokens"], values["tokens_per_second"], values["skipped_steps"]) == (640, 32, 3)
    assert (values["step_seconds"], values["data_seconds"], values["data_share"]) == (2.0, 0.5, 0.25)
