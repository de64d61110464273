"""Muon on one CUDA device: its matmuls and Newton-Schulz steps in bf16 against float64, and training against the oracle."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.optim import muon
from megatron_lite.parallel.grid import Grid, init_grid
from tests import oracle
from tests.gpu.test_trainer import LR, WARMUP, engine_on, run
from tests.megatron_lite.conftest import batches, model_config


@pytest.fixture(scope="module")
def grid() -> Grid:
    return init_grid("cuda")


@pytest.mark.parametrize("shape", [(5, 512, 512), (2, 1024, 2816), (3, 640, 1000)])
@pytest.mark.parametrize("rows", [0, 10**6], ids=["kernel", "matmul"])
def test_newton_schulz_in_bf16_is_near_float64(monkeypatch, shape, rows):
    monkeypatch.setattr(muon, "_KERNEL_ROWS", rows)
    x = torch.randn(shape, device="cuda")
    gram = muon.gram_matrices(x.bfloat16())
    exact = x.bfloat16().double() @ x.bfloat16().double().mT
    assert ((gram.double() - exact).norm() / exact.norm()).item() < 4e-3
    exact = (gram := gram / shape[2]).double()
    exact = 3.4445 * torch.eye(shape[1], device="cuda") - 4.775 * exact + 2.0315 * exact @ exact
    found = muon.polynomial(gram, *muon.COEFFICIENTS)
    assert ((found.double() - exact).norm() / exact.norm()).item() < 5e-3
    exact = muon.orthogonalize(x.double(), scale=3.0)
    found = muon.orthogonalize(x.bfloat16(), scale=3.0)
    values = torch.linalg.svdvals(found.float()) / 3.0
    assert values.max() < 1.3
    assert values.median() > 0.6
    assert ((found.double() - exact).norm() / exact.norm()).item() < 0.05


@pytest.mark.parametrize(("dtype", "stage", "tolerance"), [("fp32", 1, 1e-5), ("bf16", 1, 4e-3), ("bf16", 2, 4e-3)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_is_near_the_oracle(grid, monkeypatch, dtype, stage, tolerance, accumulation):
    monkeypatch.setattr(muon, "_KERNEL_ROWS", 0)
    config = model_config(("metala", "attention"), hidden_size=128)
    steps = batches(8, accumulation=accumulation)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=8, device="cuda", muon=True)
    engine = engine_on(grid, config, dtype, stage, optimizer={"name": "muon"})
    for (loss, norm), (wanted_loss, wanted_norm) in zip(run(engine, steps), expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=0.05 if dtype == "bf16" else 1e-4)
    engine.close()
