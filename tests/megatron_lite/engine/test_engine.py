"""The engine against the oracle, its guard rails, and its checkpoints."""

from __future__ import annotations

import importlib
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_lite.engine.engine
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.reader import CheckpointError
from megatron_lite.engine.deepspeed import import_deepspeed
from megatron_lite.engine.engine import StepResult
from megatron_lite.engine.precision import faster_dtype
from megatron_lite.fault_tolerance.guards import SpikeGuard
from megatron_lite.optim.lr_schedule import learning_rate
from megatron_lite.optim.zero_state import OptimizerState
from tests import oracle
from tests.megatron_lite.conftest import batches, leave_bf16_steps, model_config

LR, WARMUP = 1e-4, 3  # a higher rate amplifies float32 rounding past the tolerances below


def rate(step: int, total: int) -> float:
    return learning_rate(step, kind="cosine", peak=LR, warmup_steps=WARMUP, decay_steps=total, min_ratio=0.1)


def run(engine, steps) -> list[StepResult]:
    return [engine.train_step(step, lr=rate(index, len(steps))) for index, step in enumerate(steps)]


def assert_equal(results: list[StepResult], expected: list[tuple[float, float]], tolerance: float) -> None:
    for index, (result, (loss, norm)) in enumerate(zip(results, expected, strict=True)):
        assert result.loss == pytest.approx(loss, rel=tolerance), f"loss of step {index}"
        assert result.gradient_norm == pytest.approx(norm, rel=tolerance), f"gradient norm of step {index}"
        assert not result.skipped


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mixers", [("metala",), ("attention",), ("metala", "attention")], ids="-".join)
def test_twenty_steps_equal_the_oracle(build, mixers, tied):
    config = model_config(mixers, tie_embeddings=tied)
    steps = batches(20)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=20)
    assert_equal(run(build(config), steps), expected, 1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_stages_equal_the_oracle(build, stage):
    config = model_config()
    steps = batches(6)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=6)
    assert_equal(run(build(config, zero_stage=stage), steps), expected, 1e-6)


def test_a_closed_engine_leaves_nothing_behind(build):
    linear = torch.nn.functional.linear
    engine = build(model_config(), zero_stage=3)
    assert torch.nn.functional.linear is not linear  # what ZeRO 3 does
    engine.close()
    assert torch.nn.functional.linear is linear


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("others", ["none", "elementwise"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(build, mode, others, stage):
    config = model_config(num_layers=3)  # MetaLA's gate has a bias: see _linear in the engine
    steps = batches(4)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=4)
    engine = build(config, zero_stage=stage, activation_checkpointing={"mode": mode, "every": 2, "others": others})
    assert_equal(run(engine, steps), expected, 1e-6)


def test_selective_checkpointing_goes_with_weights_that_zero_3_gathers_for_every_pass(build, tmp_path):
    """They have more than 100,000 elements. Which are there at a pass depends on the passes before it."""
    config = model_config(intermediate_size=1600)
    steps = batches(4)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=4)
    settings = {"zero_stage": 3, "activation_checkpointing": {"mode": "selective"}}
    engine = build(config, **settings)
    results = [engine.train_step(step, lr=rate(index, 4)) for index, step in enumerate(steps[:3])]
    Checkpointer(engine, tmp_path).save(step=3, state={}, config_yaml="a: 1\n")
    other = build(config, seed=99, **settings)
    Checkpointer(other, tmp_path).load()
    for each in (engine, other):
        each.evaluate(steps[0])
        assert_equal([*results, each.train_step(steps[3], lr=rate(3, 4))], expected, 1e-6)


@pytest.mark.parametrize(
    ("mixer", "stage", "dtype"),
    [("metala", 1, "bf16"), ("metala", 3, "fp32"), ("lion", 2, "fp32"), ("attention", 3, "bf16")],
)
def test_what_is_forgotten_changes_no_bit(build, monkeypatch, mixer, stage, dtype):
    settings = megatron_lite.engine.engine.deepspeed_config

    def none_persists(*args: Any, **words: Any) -> dict[str, Any]:
        """ZeRO 3 takes the small weights away too, which norms and convolutions have."""
        found = settings(*args, **words)
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return found

    monkeypatch.setattr(megatron_lite.engine.engine, "deepspeed_config", none_persists)
    config = model_config((mixer,), mlp="gelu" if mixer == "attention" else "swiglu")
    outcomes = []
    for mode in ("none", "elementwise"):
        engine = build(config, dtype=dtype, zero_stage=stage, activation_checkpointing={"mode": mode})
        results = run(engine, batches(3))
        weights = [fragment.tensors["weight"].clone() for fragment in engine.optimizer_state.fragments()]
        engine.close()
        outcomes.append((repr(results), torch.cat([weight.flatten() for weight in weights])))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_without_clipping_equals_the_oracle(build):
    config = model_config()
    steps = batches(4)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=4, clip=0.0)
    assert_equal(run(build(config, optimizer={"gradient_clipping": 0.0}), steps), expected, 1e-6)


def test_bf16_stays_near_float32(build):
    config = model_config()
    steps = batches(8)
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=8)
    for result, (loss, _) in zip(run(build(config, dtype="bf16"), steps), expected, strict=True):
        assert result.loss == pytest.approx(loss, rel=2e-3)


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_gradients_in_bf16_are_summed_as_deepspeed_sums_them(build, monkeypatch, release):
    config = model_config()
    # Steps of one, three and two micro batches, one of them vetoed: gradients of all kinds lie in the memory before.
    steps = [*batches(2, accumulation=1), *batches(3, accumulation=3), *batches(2)]

    def train() -> tuple[list[StepResult], list[torch.Tensor]]:
        engine = build(config, dtype="bf16")
        vetoes = [lambda loss, index=index: index == 3 for index in range(len(steps))]
        results = [engine.train_step(step, lr=1e-3, should_skip=veto) for step, veto in zip(steps, vetoes, strict=True)]
        weights = [fragment.tensors["weight"].clone() for fragment in engine.optimizer_state.fragments()]
        engine.close()
        return results, weights

    with monkeypatch.context() as patch:
        leave_bf16_steps(patch)
        expected, expected_weights = train()
    spare = megatron_lite.engine.engine.patch_bf16_optimizer
    monkeypatch.setattr(
        megatron_lite.engine.engine, "patch_bf16_optimizer", lambda *args, **_: spare(*args, release=release)
    )
    results, weights = train()
    assert results[3].skipped
    assert repr(results) == repr(expected)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))


def test_accumulation_does_not_change_the_step(build):
    config = model_config()
    steps = batches(4, micro=2, accumulation=2)
    merged = [[{key: torch.cat([step[0][key], step[1][key]]) for key in step[0]}] for step in steps]
    apart = run(build(config), steps)
    together = run(build(config, accumulation=1), merged)
    for a, b in zip(apart, together, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)


def test_a_micro_batch_without_weight_adds_nothing(build):
    config = model_config()
    steps = batches(2)
    for step in steps:
        step[1]["loss_weight"].zero_()
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=2)
    assert_equal(run(build(config), steps), expected, 1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_without_weight_has_no_loss_and_is_skipped(build, dtype):
    steps = batches(2)
    for batch in steps[1]:
        batch["loss_weight"].zero_()
    engine, guard = build(model_config(), dtype=dtype), SpikeGuard(0.0)
    loss = engine.train_step(steps[0], lr=LR, should_skip=guard.should_skip).loss
    before = [fragment.tensors["weight"].clone() for fragment in engine.optimizer_state.fragments()]
    result = engine.train_step(steps[1], lr=LR, should_skip=guard.should_skip)
    assert math.isnan(result.loss)
    assert result.skipped
    assert (guard.mean, guard.seen) == (loss, 1)
    after = [fragment.tensors["weight"] for fragment in engine.optimizer_state.fragments()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_same_seed_is_the_same_model_and_another_is_not(build):
    step = batches(1)[0]
    losses = [build(model_config(), seed=seed).evaluate(step)[0] for seed in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_between_steps_leaves_no_trace(build):
    steps = batches(4)
    plain = run(build(model_config()), steps)
    engine = build(model_config())
    results = []
    for index, step in enumerate(steps):
        results.append(engine.train_step(step, lr=rate(index, 4)))
        nll, weight, _ = engine.evaluate(steps[0])
        assert weight == pytest.approx(sum(batch["loss_weight"].sum().item() for batch in steps[0]))
        assert math.isfinite(nll)
    assert results == plain


def test_correct_predictions_are_those_of_the_call(build):
    config, steps = model_config(), batches(2, micro=16)
    accuracies: list[float] = []
    oracle.train(config, steps, seed=11, lr=LR, warmup=0, total=10**9, accuracies=accuracies)
    assert min(accuracies) > 0
    engine = build(config, count_correct=True)
    for step, accuracy in zip(steps, accuracies, strict=True):
        before = engine.evaluate(step)
        assert before.num_correct / before.weight == pytest.approx(accuracy, abs=1e-9)
        assert engine.train_step(step, lr=LR).accuracy == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 1), ("bf16", 1), ("fp32", 3)])
def test_a_non_finite_gradient_or_a_veto_skips_the_update(build, dtype, stage):
    steps = batches(3)
    engine = build(model_config(), dtype=dtype, zero_stage=stage)
    first = engine.train_step(steps[0], lr=LR)
    before = {f.name: f.tensors["weight"].clone() for f in engine.optimizer_state.fragments()}
    moments = {f.name: f.tensors["exp_avg"].clone() for f in engine.optimizer_state.fragments()}
    vetoed = engine.train_step(steps[1], lr=LR, should_skip=lambda loss: loss > 0)
    broken = [{**batch, "loss_weight": batch["loss_weight"] * math.inf} for batch in steps[1]]
    poisoned = engine.train_step(broken, lr=LR)
    assert not first.skipped
    assert vetoed.skipped
    assert math.isfinite(vetoed.loss)
    assert poisoned.skipped
    for fragment in engine.optimizer_state.fragments():
        assert torch.equal(fragment.tensors["weight"], before[fragment.name])
        assert torch.equal(fragment.tensors["exp_avg"], moments[fragment.name])
    assert not engine.train_step(steps[2], lr=LR).skipped


def test_measuring_the_speed_changes_nothing(build):
    steps = batches(2)
    plain = run(build(model_config()), steps)
    engine = build(model_config())
    assert engine.measure_step_seconds(steps[1]) > 0
    assert run(engine, steps) == plain


@pytest.mark.parametrize(
    ("dtype", "stage", "mode"),
    [
        *((*case, "none") for case in (("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 3))),
        # It compares the operations of a block, ZeRO's own included, with those of its second run.
        ("fp32", 3, "selective"),
    ],
)
def test_resume_is_bit_exact(build, tmp_path, dtype, stage, mode):
    steps = batches(6)
    settings = {"dtype": dtype, "zero_stage": stage, "activation_checkpointing": {"mode": mode}}
    engine = build(model_config(), **settings)
    run(engine, steps[:3])
    # Not the step of the run, which may have begun with the optimizer state of another one.
    Checkpointer(engine, tmp_path).save(step=1, state={"step": 1}, config_yaml="a: 1\n")
    rest = [engine.train_step(step, lr=LR) for step in steps[3:]]
    other = build(model_config(), seed=99, **settings)
    assert Checkpointer(other, tmp_path).load() == {"step": 1}
    assert [other.train_step(step, lr=LR) for step in steps[3:]] == rest


def test_a_checkpoint_loads_under_another_zero_stage(build, tmp_path):
    steps = batches(5)
    engine = build(model_config(), zero_stage=3)
    run(engine, steps[:3])
    Checkpointer(engine, tmp_path).save(step=3, state={}, config_yaml="")
    rest = [engine.train_step(step, lr=LR) for step in steps[3:]]
    other = build(model_config(), zero_stage=1)
    Checkpointer(other, tmp_path).load()
    for a, b in zip(rest, (other.train_step(step, lr=LR) for step in steps[3:]), strict=True):
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
    for change in ({"numel": 6000}, {"start": 144}):  # 96 x 64 in all
        (piece,) = manifest["tensors"]["embedding.weight"]["pieces"]
        whole, piece["numel"] = dict(piece), 6000
        piece.update(change)
        file.write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"weight of embedding\.weight: no piece goes on at element"):
            checkpoint.read_weights(tmp_path)
        piece.update(whole)


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
def test_the_loss_scale_goes_on_where_it_was(grid, sixth):
    """Of fp16, which does not train here: DeepSpeed's scaler by itself."""
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
    state_of(rest).loss_scaler = state_of(whole).loss_scaler
    assert state_of(rest).loss_scale == whole.cur_scale == 2.0**6
    for overflow in overflows[5:]:
        for each in (whole, rest):
            each.update_scale(overflow)
        assert rest.cur_scale == whole.cur_scale


def test_a_checkpoint_holds_the_loss_scale(build, monkeypatch, tmp_path):
    engine, given = build(model_config()), []
    monkeypatch.setattr(
        OptimizerState, "loss_scaler", property(lambda _: {"cur_scale": 64.0}, lambda _, state: given.append(state))
    )
    Checkpointer(engine, tmp_path).save(step=1, state={}, config_yaml="")
    Checkpointer(engine, tmp_path).load()
    assert given == [{"cur_scale": 64.0}]


def test_the_updates_are_counted_by_a_group_that_has_gradients(grid):
    """A stage of a pipeline may have a group of nothing but a filler, whose updates AdamW does not count."""
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


def test_the_faster_dtype_is_one_of_two():
    assert faster_dtype(torch.device("cpu"), 64, 256) in ("bf16", "fp32")


def test_free_memory_of_a_device_that_a_scheduler_names_by_uuid(grid, monkeypatch):
    """As ZeRO 1 and 2 ask for it at the start."""
    import_deepspeed()
    cuda = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f0d2a9e-6b1c-4d3e-8f7a-0123456789ab,MIG-1c2d3e4f")
    monkeypatch.setattr(cuda, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7, 9) if index in (None, 1) else (3, 9))
    accelerator = cuda.CUDA_Accelerator()
    assert [accelerator.available_memory(index) for index in (None, 1, 0)] == [7, 7, 3]
