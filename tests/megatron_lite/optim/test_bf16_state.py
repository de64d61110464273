"""Weights, moments and gradients in bf16 alone (`precision.optimizer_state: bf16`)."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer
from tests.megatron_lite.conftest import batches, model_config

LR = 3e-4
NARROW = {"dtype": "bf16", "precision": {"optimizer_state": "bf16"}}


def state_of(engine) -> dict[str, torch.Tensor]:
    return {
        f"{fragment.name} {kind}": tensor.clone()
        for fragment in engine.optimizer_state.fragments()
        for kind, tensor in fragment.tensors.items()
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_is_adamw_on_bf16(build, stage):
    """Compare with AdamW's first step, computed from the gradients that the moments hold."""
    (step,) = batches(1)
    engine = build(model_config(), zero_stage=stage, **NARROW, optimizer={"gradient_clipping": 0.0})
    before = {name: tensor for name, tensor in state_of(engine).items() if name.endswith(" weight")}
    assert {tensor.dtype for tensor in state_of(engine).values()} == {torch.bfloat16}
    result = engine.train_step(step, lr=LR)
    after = state_of(engine)
    for name, weight in before.items():
        moment = after[name.replace(" weight", " exp_avg")].float()
        # After the first step of AdamW, the gradient is the moment / (1 - beta).
        gradient = moment / 0.1
        decay = 1 - LR * 0.1 * (name.count("norm") + name.count("bias") + name.count("embedding") == 0)
        expected = weight.float() * decay - LR * gradient / (gradient.abs() + 1e-8)
        rounding = 2.0**-8 * expected.abs() + 1e-9
        assert ((after[name].float() - expected).abs() <= rounding + 0.02 * LR).all(), name
    total = sum((after[name].float() / 0.1).square().sum() for name in after if name.endswith("exp_avg")).sqrt()
    assert result.gradient_norm == pytest.approx(total.item(), rel=0.01)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_master_weights_are_the_models(build, stage):
    engine = build(model_config(), zero_stage=stage, **NARROW)
    owned = {p.untyped_storage().data_ptr() for layer in engine.layers for p in layer.parameters()}
    for fragment in engine.optimizer_state.fragments():
        assert fragment.tensors["weight"].untyped_storage().data_ptr() in owned


@pytest.mark.parametrize("stage", [1, 3])
def test_near_float32_and_skipped_step_changes_nothing(build, stage):
    steps = batches(6)
    wide, narrow = (
        build(model_config(), zero_stage=stage, dtype="bf16"),
        build(model_config(), zero_stage=stage, **NARROW),
    )
    for step in steps:
        expected, found = (engine.train_step(step, lr=LR) for engine in (wide, narrow))
        assert found.loss == pytest.approx(expected.loss, rel=4e-3)
    before = state_of(narrow)
    assert narrow.train_step(steps[0], lr=LR, should_skip=lambda _: True).skipped
    after = state_of(narrow)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_is_exact_and_any_state_reads_any_checkpoint(build, tmp_path, stage):
    steps = batches(4)
    engine = build(model_config(), zero_stage=stage, **NARROW)
    for step in steps[:2]:
        engine.train_step(step, lr=LR)
    Checkpointer(engine, tmp_path).save(step=2, state={}, config_yaml="")
    saved = state_of(engine)
    rest = [engine.train_step(step, lr=LR) for step in steps[2:]]
    again = build(model_config(), seed=5, zero_stage=stage, **NARROW)
    Checkpointer(again, tmp_path).load()
    assert [again.train_step(step, lr=LR) for step in steps[2:]] == rest
    wide = build(model_config(), seed=5, zero_stage=1, dtype="bf16")
    Checkpointer(wide, tmp_path).load()
    found = state_of(wide)
    # float32 represents every bf16 number; other stages cut the state elsewhere.
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        both = (
            [tensors[name].float().flatten() for name in sorted(tensors) if name.endswith(f" {kind}")]
            for tensors in (saved, found)
        )
        assert torch.equal(*(torch.cat(flat) for flat in both))
    assert wide.train_step(steps[2], lr=LR).loss == rest[0].loss
