"""Non-finite tensors, states before a save, and losses that are recomputed."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.reader import NotFiniteError
from megatron_lite.checkpoint.safetensors_stream import write_tensors
from megatron_lite.fault_tolerance.finite_check import fault_of_loss, is_finite
from tests.megatron_lite.conftest import batches, model_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_that_is_not_finite_is_seen(dtype):
    x = torch.tensor([-3e38, 3e38, 0.0]).repeat(300).to(dtype)  # their difference is no float32
    assert is_finite(x)
    assert is_finite(x[:0])
    for value in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[500] = value
        assert not is_finite(y)


def test_tensors_not_finite_in_the_dtype_of_a_file_are_refused(tmp_path):
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 1e6])}
    shapes = dict.fromkeys(tensors, (2,))
    write_tensors(tmp_path / "float32", shapes, tensors.items())
    with pytest.raises(
        ValueError, match=r"not finite as float16, and not written: b\. Use .* a dtype with a larger range"
    ):
        write_tensors(tmp_path / "float16", shapes, tensors.items(), dtype=torch.float16)


def test_infinite_second_moment_is_not_saved(build, tmp_path):
    engine = build(model_config())
    engine.train_step(batches(1)[0], lr=3e-4)
    writer = Checkpointer(engine, tmp_path)
    writer.save_async(step=1, state={}, config_yaml="")
    writer.finish()
    fragment = list(engine.optimizer_state.fragments())[3]
    fragment.tensors["exp_avg_sq"][0] = math.inf
    with pytest.raises(NotFiniteError) as refusal:
        writer.save_async(step=2, state={}, config_yaml="")
    assert f"step 2 is not finite and is not saved: exp_avg_sq of {fragment.name} (rank 0). " in str(refusal.value)
    assert f"The newest healthy checkpoint is {tmp_path / 'step_00000001'}" in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_fault_that_stays_is_persistent(build):
    engine, (step, empty) = build(model_config()), batches(2)

    def loss_of(micro_batches):
        return engine.train_step(micro_batches, lr=3e-4, should_skip=lambda loss: not math.isfinite(loss)).loss

    assert math.isnan(loss_of([{**batch, "loss_weight": batch["loss_weight"] * 0} for batch in empty]))
    assert fault_of_loss(engine, [{**batch, "loss_weight": batch["loss_weight"] * 0} for batch in empty]) is None
    weight = next(engine.layers[1].parameters())
    saved = weight.detach().clone()
    weight.data.fill_(math.nan)
    assert math.isnan(loss_of(step))
    fault = fault_of_loss(engine, step)
    assert fault.kind == "persistent_fault"
    assert fault.text.startswith("the loss of rank 0 (")
    weight.data.copy_(saved)
    assert fault_of_loss(engine, step).kind == "transient_fault"
    assert math.isfinite(loss_of(step))
