"""The trainer on one CUDA device: float32 and 16 bits compared with the oracle, resume."""

from __future__ import annotations

import pytest

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.schema import ScheduleConfig
from megatron_lite.engine.engine import Engine
from megatron_lite.optim.lr_schedule import learning_rate
from megatron_lite.parallel.grid import Grid, init_grid
from tests import oracle
from tests.megatron_lite.conftest import batches, model_config, run_config
from tools.loading.engine import build_engine

LR, WARMUP = 3e-4, 3


@pytest.fixture(scope="module")
def grid() -> Grid:
    return init_grid("cuda")


def engine_on(grid: Grid, config, dtype: str, stage: int = 1, **settings) -> Engine:
    precision = {"fp16": {"initial_scale_power": 8}}
    return build_engine(run_config(config, lr=LR, precision=precision, zero_stage=stage, **settings), grid, dtype)


def run(engine: Engine, steps) -> list[tuple[float, float]]:
    schedule = ScheduleConfig(train_steps=len(steps), warmup_steps=WARMUP, decay_steps=len(steps))
    out = []
    for index, step in enumerate(steps):
        result = engine.train_step(step, lr=learning_rate(index, LR, schedule))
        assert not result.skipped
        out.append((result.loss, result.gradient_norm))
    return out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_equals_the_oracle(grid, stage):
    config = model_config(("metala", "attention"))
    steps = batches(6)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=6, device="cuda")
    engine = engine_on(grid, config, "fp32", stage)
    for (loss, norm), (loss_there, norm_there) in zip(run(engine, steps), expected, strict=True):
        assert loss == pytest.approx(loss_there, rel=1e-6)
        assert norm == pytest.approx(norm_there, rel=2e-5)
    engine.close()


@pytest.mark.parametrize("mode", ["none", "full", "selective", "elementwise"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 4e-3), ("fp16", 1e-3)])
def test_sixteen_bits_on_kernels_stay_near_float32(grid, dtype, tolerance, mode):
    config = model_config(("metala", "attention"), hidden_size=128)
    steps = batches(8)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=8, device="cuda")
    engine = engine_on(grid, config, dtype, activation_checkpointing={"mode": mode})
    for (loss, norm), (loss_there, norm_there) in zip(run(engine, steps), expected, strict=True):
        assert loss == pytest.approx(loss_there, rel=tolerance)
        assert norm == pytest.approx(norm_there, rel=0.05)
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 1), ("bf16", 3), ("fp16", 1)])
def test_resume_continues_the_same_losses(grid, tmp_path, dtype, stage, asynchronous):
    steps = batches(6)
    engine = engine_on(grid, model_config(), dtype, stage)
    run(engine, steps[:3])
    writer = Checkpointer(engine, tmp_path, asynchronous=asynchronous)
    writer.save_async(step=3, state={}, config_yaml="")
    rest = [engine.train_step(step, lr=LR) for step in steps[3:]]  # during the write
    writer.finish()
    engine.close()
    other = engine_on(grid, model_config(), dtype, stage, seed=5)
    Checkpointer(other, tmp_path).load()
    for a, b in zip(rest, (other.train_step(step, lr=LR) for step in steps[3:]), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-3)
        assert a.loss_scale == b.loss_scale
    other.close()


def test_skipped_step_leaves_the_loss_scale(grid):
    steps = batches(2)
    engine = engine_on(grid, model_config(), "fp16")
    loss_scale = engine.train_step(steps[0], lr=LR).loss_scale
    result = engine.train_step(steps[1], lr=LR, should_skip=lambda loss: True)
    assert result.skipped
    assert result.loss_scale == loss_scale
    engine.close()


def test_float32_gradients_are_freed_between_steps(grid):
    engine = engine_on(grid, model_config(("metala",)), "bf16")
    flats = engine._engine.optimizer.fp32_groups_gradients_flat
    for step in batches(2):
        run(engine, [step])
        assert [flat.untyped_storage().size() for flat in flats] == [0] * len(flats)
    engine.close()
