"""Training and evaluation steps of the engine equal the oracle's."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_lite.engine.engine
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.schema import ScheduleConfig
from megatron_lite.engine.engine import StepResult
from megatron_lite.fault_tolerance.guards import SpikeGuard
from megatron_lite.optim.lr_schedule import learning_rate
from models.block import Block
from tests import oracle
from tests.megatron_lite.conftest import allow_fp16_on_a_cpu, batches, leave_bf16_steps, model_config

LR, WARMUP = 1e-4, 3  # a higher rate amplifies float32 rounding past the tolerances below


def rate(step: int, total: int) -> float:
    return learning_rate(step, LR, ScheduleConfig(train_steps=total, warmup_steps=WARMUP, decay_steps=total))


def run(engine, steps) -> list[StepResult]:
    return [engine.train_step(step, lr=rate(index, len(steps))) for index, step in enumerate(steps)]


def oracle_steps(config, steps, **options) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step of the oracle."""
    return oracle.train(config, steps, seed=11, lr=LR, warmup=WARMUP, total=len(steps), **options)


def assert_equal(results: list[StepResult], expected: list[tuple[float, float]]) -> None:
    for index, (result, (loss, norm)) in enumerate(zip(results, expected, strict=True)):
        assert result.loss == pytest.approx(loss, rel=1e-6), f"loss of step {index}"
        assert result.gradient_norm == pytest.approx(norm, rel=1e-6), f"gradient norm of step {index}"
        assert not result.skipped


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mixers", [("metala",), ("attention",), ("metala", "attention")], ids="-".join)
def test_twenty_steps_equal_the_oracle(build, mixers, tied):
    config, steps = model_config(mixers, tie_embeddings=tied), batches(20)
    assert_equal(run(build(config), steps), oracle_steps(config, steps))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_stages_equal_the_oracle(build, stage):
    config, steps = model_config(), batches(6)
    engine = build(config, zero_stage=stage)
    assert_equal(run(engine, steps), oracle_steps(config, steps))
    assert engine.layout["zero_stage"] == max(1, stage)


def test_closed_engine_frees_its_memory(build):
    linear = torch.nn.functional.linear
    engine = build(model_config(), zero_stage=3)
    assert torch.nn.functional.linear is not linear  # ZeRO 3 replaces it
    engine.close()
    assert torch.nn.functional.linear is linear


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("others", ["none", "elementwise"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(build, mode, others, stage):
    config = model_config(num_layers=3)  # MetaLA's gate has a bias: see `_linear` in engine/deepspeed.py
    steps = batches(4)
    expected = oracle_steps(config, steps)
    engine = build(config, zero_stage=stage, activation_checkpointing={"mode": mode, "every": 2, "others": others})
    assert_equal(run(engine, steps), expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layer_with_a_gradient_in_its_forward_pass_is_recomputed_once(build, monkeypatch, mode):
    """Test LION with one decay per channel of values: its forward pass is a gradient of gated linear attention."""
    config = model_config(("lion",), mixer_options={"lion": {"causal": False, "decay_per": "value_channel"}})
    steps, passes = batches(2), []
    plain = run(build(config), steps)
    forward = Block.forward
    monkeypatch.setattr(
        Block, "forward", lambda block, *args, **words: passes.append(1) or forward(block, *args, **words)
    )
    assert_equal(
        run(build(config, activation_checkpointing={"mode": mode}), steps),
        [(result.loss, result.gradient_norm) for result in plain],
    )
    micro_batches = sum(map(len, steps))
    assert len(passes) == 2 * micro_batches * config.num_layers


def test_selective_checkpointing_with_zero_3(build, tmp_path):
    """Train weights of more than 100,000 elements, which ZeRO 3 gathers in an order that depends on earlier passes."""
    config = model_config(intermediate_size=1600)
    steps = batches(4)
    expected = oracle_steps(config, steps)
    settings = {"zero_stage": 3, "activation_checkpointing": {"mode": "selective"}}
    engine = build(config, **settings)
    results = [engine.train_step(step, lr=rate(index, 4)) for index, step in enumerate(steps[:3])]
    Checkpointer(engine, tmp_path).save(step=3, state={}, config_yaml="a: 1\n")
    other = build(config, seed=99, **settings)
    Checkpointer(other, tmp_path).load()
    for each in (engine, other):
        each.evaluate(steps[0])
        assert_equal([*results, each.train_step(steps[3], lr=rate(3, 4))], expected)


@pytest.mark.parametrize(
    ("mixer", "stage", "dtype"),
    [("metala", 1, "bf16"), ("metala", 3, "fp32"), ("lion", 2, "fp32"), ("attention", 3, "bf16")],
)
def test_elementwise_recomputation_is_bitwise_equal(build, monkeypatch, mixer, stage, dtype):
    settings = megatron_lite.engine.engine.deepspeed_config

    def shard_all(*args: Any, **options: Any) -> dict[str, Any]:
        """Let ZeRO 3 also shard small weights, those of norms and convolutions."""
        config = settings(*args, **options)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    monkeypatch.setattr(megatron_lite.engine.engine, "deepspeed_config", shard_all)
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
    config, steps = model_config(), batches(4)
    assert_equal(run(build(config, optimizer={"gradient_clipping": 0.0}), steps), oracle_steps(config, steps, clip=0.0))


def test_bf16_stays_near_float32(build):
    config = model_config()
    steps = batches(8)
    expected = oracle_steps(config, steps)
    for result, (loss, _) in zip(run(build(config, dtype="bf16"), steps), expected, strict=True):
        assert result.loss == pytest.approx(loss, rel=2e-3)


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_bf16_accumulation_equals_that_of_deepspeed(build, monkeypatch, release):
    config = model_config()
    # Steps of one, three and two micro-batches, one of them skipped, so that the buffers hold various old gradients.
    steps = [*batches(2, accumulation=1), *batches(3, accumulation=3), *batches(2)]

    def train() -> tuple[list[StepResult], list[torch.Tensor]]:
        engine = build(config, dtype="bf16")
        results = [
            engine.train_step(step, lr=1e-3, should_skip=lambda _, skip=index == 3: skip)
            for index, step in enumerate(steps)
        ]
        weights = [fragment.tensors["weight"].clone() for fragment in engine.optimizer_state.fragments()]
        engine.close()
        return results, weights

    with monkeypatch.context() as patch:
        leave_bf16_steps(patch)
        expected, expected_weights = train()
    original = megatron_lite.engine.engine.patch_bf16_optimizer
    monkeypatch.setattr(
        megatron_lite.engine.engine, "patch_bf16_optimizer", lambda *args, **_: original(*args, release=release)
    )
    results, weights = train()
    assert results[3].skipped
    assert repr(results) == repr(expected)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))


def test_accumulation_does_not_change_the_step(build):
    config = model_config()
    steps = batches(4, micro=2, accumulation=2)
    merged = [[{key: torch.cat([step[0][key], step[1][key]]) for key in step[0]}] for step in steps]
    accumulated = run(build(config), steps)
    in_one = run(build(config, accumulation=1), merged)
    for a, b in zip(accumulated, in_one, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)


def test_a_micro_batch_without_weight_adds_nothing(build):
    config = model_config()
    steps = batches(2)
    for step in steps:
        step[1]["loss_weight"].zero_()
    assert_equal(run(build(config), steps), oracle_steps(config, steps))


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


def test_steps_are_skipped_at_the_minimum_loss_scale(build, monkeypatch):
    """Skip a step on request and one whose gradient overflows; DeepSpeed would end the run."""
    allow_fp16_on_a_cpu(monkeypatch)
    scale = {"initial_scale_power": 3, "min_scale": 8.0, "hysteresis": 1}
    engine = build(model_config(), dtype="fp16", precision={"fp16": scale})
    steps = batches(3)
    assert engine.train_step(steps[0], lr=LR, should_skip=lambda _: True).skipped
    handle = next(engine.layers[1].parameters()).register_hook(lambda gradient: gradient * math.inf)
    assert engine.train_step(steps[1], lr=LR).skipped
    handle.remove()
    result = engine.train_step(steps[2], lr=LR)
    assert (result.skipped, result.loss_scale) == (False, 8.0)


def test_seed_decides_the_model(build):
    step = batches(1)[0]
    losses = [build(model_config(), seed=seed).evaluate(step)[0] for seed in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_between_steps_changes_nothing(build):
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


def test_accuracies_of_evaluation_and_training_equal_the_oracle(build):
    config, steps = model_config(), batches(3, micro=16)
    accuracies: list[float] = []
    oracle.train(config, steps, seed=11, lr=LR, warmup=0, total=10**9, accuracies=accuracies)
    assert min(accuracies) > 0
    engine = build(config, counts_correct=True)
    for number, (step, accuracy) in enumerate(zip(steps, accuracies, strict=True)):
        if number != 1:  # an evaluation between two steps would reset a count that the first one left
            before = engine.evaluate(step)
            assert before.num_correct / before.weight == pytest.approx(accuracy, abs=1e-9)
        assert engine.train_step(step, lr=LR).accuracy == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 1), ("bf16", 1), ("fp32", 3)])
def test_non_finite_gradient_and_should_skip_skip_the_update(build, dtype, stage):
    steps = batches(3)
    engine = build(model_config(), dtype=dtype, zero_stage=stage)
    first = engine.train_step(steps[0], lr=LR)
    before = {f.name: f.tensors["weight"].clone() for f in engine.optimizer_state.fragments()}
    moments = {f.name: f.tensors["exp_avg"].clone() for f in engine.optimizer_state.fragments()}
    skipped = engine.train_step(steps[1], lr=LR, should_skip=lambda loss: loss > 0)
    broken = [{**batch, "loss_weight": batch["loss_weight"] * math.inf} for batch in steps[1]]
    not_finite = engine.train_step(broken, lr=LR)
    assert not first.skipped
    assert skipped.skipped
    assert math.isfinite(skipped.loss)
    assert not_finite.skipped
    for fragment in engine.optimizer_state.fragments():
        assert torch.equal(fragment.tensors["weight"], before[fragment.name])
        assert torch.equal(fragment.tensors["exp_avg"], moments[fragment.name])
    assert not engine.train_step(steps[2], lr=LR).skipped


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_measuring_the_speed_changes_nothing(build, optimizer, monkeypatch):
    steps = batches(2)
    # A clock whose steps take a second, because the measurement ends after three seconds.
    monkeypatch.setattr("megatron_lite.engine.engine.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    plain = run(build(model_config(), optimizer={"name": optimizer}), steps)
    engine = build(model_config(), optimizer={"name": optimizer})
    assert engine.measure_step_seconds(steps[1]) == 1
    assert run(engine, steps) == plain


def test_rank_zero_decides_how_long_the_speed_is_measured(build, monkeypatch):
    engine = build(model_config())
    decisions, steps = iter([True, True, True, True, True, True, False]), []
    monkeypatch.setattr("megatron_lite.engine.engine.broadcast", lambda own, grid: next(decisions))
    monkeypatch.setattr(engine, "train_step", lambda *_, **__: steps.append(1))
    engine.measure_step_seconds(batches(1)[0])
    assert len(steps) == 6
