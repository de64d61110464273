"""Checkpoints of an engine, its loss scale and its limits."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.reader import CheckpointError
from megatron_lite.engine.deepspeed import import_deepspeed
from megatron_lite.engine.precision import faster_dtype
from megatron_lite.optim.zero_state import OptimizerState
from tests import oracle
from tests.megatron_lite.conftest import batches, model_config
from tests.megatron_lite.engine.test_engine import LR, run


@pytest.mark.parametrize(
    ("dtype", "stage", "mode"),
    [
        *((*case, "none") for case in (("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 3))),
        # Selective checkpointing compares the operations of a block, ZeRO's included, with those of its recomputation.
        ("fp32", 3, "selective"),
    ],
)
def test_resume_is_bit_exact(build, tmp_path, dtype, stage, mode):
    steps = batches(6)
    settings = {"dtype": dtype, "zero_stage": stage, "activation_checkpointing": {"mode": mode}}
    engine = build(model_config(), **settings)
    run(engine, steps[:3])
    # The step of the run is not the step of the optimizer, whose state may come from another run.
    Checkpointer(engine, tmp_path).save(step=1, state={"step": 1}, config_yaml="a: 1\n")
    expected = [engine.train_step(step, lr=LR) for step in steps[3:]]
    resumed = build(model_config(), seed=99, **settings)
    assert Checkpointer(resumed, tmp_path).load() == {"step": 1}
    assert [resumed.train_step(step, lr=LR) for step in steps[3:]] == expected


def test_a_checkpoint_loads_under_another_zero_stage(build, tmp_path):
    steps = batches(5)
    engine = build(model_config(), zero_stage=3)
    run(engine, steps[:3])
    Checkpointer(engine, tmp_path).save(step=3, state={}, config_yaml="")
    expected = [engine.train_step(step, lr=LR) for step in steps[3:]]
    resumed = build(model_config(), zero_stage=1)
    Checkpointer(resumed, tmp_path).load()
    for a, b in zip(expected, (resumed.train_step(step, lr=LR) for step in steps[3:]), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)


def test_weights_are_read_without_an_engine(build, tmp_path):
    config = model_config()
    engine = build(config)
    step = batches(1)[0]
    engine.train_step(step, lr=LR)
    sections = {"run": {}, "model": {}, "data": {}, "batch": {}}
    Checkpointer(engine, tmp_path / "checkpoints").save(step=1, state={}, config_yaml=json.dumps(sections))
    weights = checkpoint.read_weights(tmp_path)
    model = oracle.LanguageModel(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert checkpoint.exists(tmp_path)
    assert missing == ["head.weight"]  # tied
    assert not unexpected
    batch = step[0]
    nll = model(batch["tokens"], batch["labels"], batch["loss_weight"])
    assert nll.item() == pytest.approx(engine.evaluate([batch])[0], rel=1e-6)
    assert checkpoint.read_config_yaml(tmp_path) == sections


def test_a_checkpoint_that_lacks_a_piece_is_refused(build, tmp_path):
    Checkpointer(build(model_config()), tmp_path).save(step=1, state={}, config_yaml="")
    assert checkpoint.exists(tmp_path)
    assert not checkpoint.exists(tmp_path.parent)
    file = checkpoint.resolve(tmp_path) / "manifest.json"
    (file.parent / "SHA256SUMS").unlink()
    manifest = json.loads(file.read_text())
    for start in (0, 144):  # without the last or the first elements of 96 x 64
        manifest["tensors"]["embedding.weight"]["pieces"][0].update(start=start, numel=6000)
        file.write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"weight of embedding\.weight: no piece holds element"):
            checkpoint.read_weights(tmp_path)


def test_another_architecture_is_refused_with_the_first_differing_shapes(build, tmp_path):
    Checkpointer(build(model_config()), tmp_path).save(step=1, state={}, config_yaml="")
    other = build(model_config(hidden_size=48))
    with pytest.raises(CheckpointError, match=r"another architecture.*embedding\.weight: \(96, 64\).*\(96, 48\)"):
        Checkpointer(other, tmp_path).load()


def test_parameter_without_sharding_spec_is_refused(build):
    import torch.nn as nn

    from megatron_lite.parallel.sharding_plan import sharding_specs

    class WithoutSpec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match="WithoutSpec parameter scale: no plan names it"):
        sharding_specs(WithoutSpec())


@pytest.mark.parametrize("sixth", [False, True])
def test_loss_scaler_resumes(grid, sixth):
    """Resume DeepSpeed's loss scaler alone, because fp16 does not train on a CPU."""
    import_deepspeed()
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def scaler() -> Any:
        return DynamicLossScaler(2.0**8, 4, 1.0, delayed_shift=2, consecutive_hysteresis=False)

    def state_of(scaler: Any) -> OptimizerState:
        zero = SimpleNamespace(fp32_groups_flat_partition=[], loss_scaler=scaler, loss_scale=scaler.cur_scale)
        return OptimizerState(zero, SimpleNamespace(state={}), [], stage=1, dtype="fp16", grid=grid)

    whole, rest = scaler(), scaler()
    overflows = [False, True, False, True, True, sixth, False, False, False, False, True, False]
    for overflow in overflows[:5]:
        whole.update_scale(overflow)
    state_of(rest).loss_scaler_state = state_of(whole).loss_scaler_state
    assert state_of(rest).loss_scale == whole.cur_scale == 2.0**6
    for overflow in overflows[5:]:
        for each in (whole, rest):
            each.update_scale(overflow)
        assert rest.cur_scale == whole.cur_scale


def test_a_checkpoint_holds_the_loss_scale(build, monkeypatch, tmp_path):
    engine, given = build(model_config()), []
    monkeypatch.setattr(
        OptimizerState,
        "loss_scaler_state",
        property(lambda _: {"cur_scale": 64.0}, lambda _, state: given.append(state)),
    )
    Checkpointer(engine, tmp_path).save(step=1, state={}, config_yaml="")
    Checkpointer(engine, tmp_path).load()
    assert given == [{"cur_scale": 64.0}]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_of_fp16_loads_in_another_dtype(build, monkeypatch, tmp_path, dtype):
    engine = build(model_config(), dtype=dtype)
    loss_scaler = {"cur_scale": 65536.0, "cur_iter": 5, "last_overflow_iter": -1, "cur_hysteresis": 2}
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerState, "loss_scaler_state", loss_scaler)
        Checkpointer(engine, tmp_path).save(step=1, state={}, config_yaml="")
    Checkpointer(engine, tmp_path).load()
    assert getattr(engine.optimizer_state._zero, "loss_scale", 1.0) == 1.0


def test_the_updates_are_counted_by_a_group_that_has_gradients(grid):
    """Count by groups with gradients: a pipeline stage may have a group with only a filler, which AdamW does not count."""
    adamw = SimpleNamespace(state={})
    zero = SimpleNamespace(fp32_groups_flat_partition=[torch.zeros(1), torch.zeros(4)], update_lp_params=lambda: None)
    state = OptimizerState(zero, adamw, [], stage=1, dtype="bf16", grid=grid)
    assert state.steps == 0
    state.finish_load(3)
    adamw.state[zero.fp32_groups_flat_partition[1]]["step"] += 1
    assert state.steps == 4


def test_fp16_on_a_cpu_is_refused(build):
    with pytest.raises(ValueError, match="fp16 does not train on a CPU"):
        build(model_config(), dtype="fp16")


def test_faster_dtype_is_bf16_or_fp32():
    assert faster_dtype(torch.device("cpu"), 64, 256) in ("bf16", "fp32")


def test_free_memory_of_a_device_that_a_scheduler_names_by_uuid(grid, monkeypatch):
    """Return the free memory that ZeRO 1 and 2 query at the start."""
    import_deepspeed()
    cuda = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f0d2a9e-6b1c-4d3e-8f7a-0123456789ab,MIG-1c2d3e4f")
    monkeypatch.setattr(cuda, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7, 9) if index in (None, 1) else (3, 9))
    accelerator = cuda.CUDA_Accelerator()
    assert [accelerator.available_memory(index) for index in (None, 1, 0)] == [7, 7, 3]
