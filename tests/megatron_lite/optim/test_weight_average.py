"""The exponential moving average of the weights: its values, its use in evaluation, checkpoints."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.reader import NotFiniteError, TensorSlice, read_manifest, read_weights, resolve
from megatron_lite.checkpoint.storage import rewrite
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.sharding_plan import Shard
from tests.megatron_lite.conftest import batches, model_config
from tests.megatron_lite.engine.test_engine import LR

DECAY = 0.3


def weights_of(engine: Engine, kind: str = "weight") -> dict[str, torch.Tensor]:
    return {one.name: one.tensors[kind].float().clone() for one in engine.optimizer_state.fragments()}


@pytest.mark.parametrize(
    ("dtype", "stage", "optimizer"), [("fp32", 1, "muon"), ("bf16", 1, "adamw"), ("fp32", 3, "adamw")]
)
def test_average_follows_applied_updates_and_training_ignores_it(build, tmp_path, dtype, stage, optimizer):
    steps = batches(5)
    settings = {"dtype": dtype, "zero_stage": stage}
    averaging = {"name": optimizer, "ema_decay": DECAY}
    engine = build(model_config(), **settings, optimizer=averaging)
    expected, plain = weights_of(engine), build(model_config(), **settings, optimizer={"name": optimizer})
    for number, step in enumerate(steps[:3], start=1):
        result = engine.train_step(step, lr=LR)
        assert result == plain.train_step(step, lr=LR)
        share = 1 - min(DECAY, (1 + number) / (10 + number))
        expected = {name: old + share * (weights_of(engine)[name] - old) for name, old in expected.items()}
    engine.train_step(steps[3], lr=LR, should_skip=lambda loss: True)
    plain.train_step(steps[3], lr=LR, should_skip=lambda loss: True)
    for name, average in weights_of(engine, "ema").items():
        # An update moves a weight by about 1e-4: the default tolerance, 1e-5, would hide the share of each update.
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-8)

    with_weights = engine.evaluate(steps[4])
    with engine.optimizer_state.averaged():
        averaged = engine.evaluate(steps[4])
        assert weights_of(engine).keys() == expected.keys()
    assert averaged.nll != with_weights.nll
    assert engine.evaluate(steps[4]) == with_weights

    Checkpointer(engine, tmp_path).save(step=3, state={}, config_yaml="a: 1\n")
    for name, weight in read_weights(tmp_path).items():  # exports and evaluation read the average
        torch.testing.assert_close(weight.flatten(), expected[name].flatten(), rtol=1e-6, atol=1e-8)
    other = build(model_config(), seed=9, **settings, optimizer=averaging)
    Checkpointer(other, tmp_path).load()
    assert other.train_step(steps[4], lr=LR) == engine.train_step(steps[4], lr=LR) == plain.train_step(steps[4], lr=LR)
    for name, average in weights_of(engine, "ema").items():
        assert torch.equal(average, weights_of(other, "ema")[name])


def test_checkpoint_without_an_average_starts_one_at_its_weights(build, tmp_path):
    engine = build(model_config())
    engine.train_step(batches(1)[0], lr=LR)
    Checkpointer(engine, tmp_path).save(step=1, state={}, config_yaml="a: 1\n")
    other = build(model_config(), seed=9, optimizer={"ema_decay": DECAY})
    Checkpointer(other, tmp_path).load()
    for name, weight in weights_of(engine).items():
        assert torch.equal(weights_of(other, "ema")[name], weight)


def test_run_without_an_average_drops_that_of_its_checkpoint(build, tmp_path):
    engine = build(model_config(), optimizer={"ema_decay": DECAY})
    engine.train_step(batches(1)[0], lr=LR)
    Checkpointer(engine, tmp_path / "with").save(step=1, state={}, config_yaml="a: 1\n")
    other = build(model_config(), seed=9)
    Checkpointer(other, tmp_path / "with").load()
    Checkpointer(other, tmp_path / "without").save(step=1, state={}, config_yaml="a: 1\n")
    assert "ema" not in read_manifest(resolve(tmp_path / "without"))
    weights = weights_of(engine)
    for name, weight in read_weights(tmp_path / "without").items():
        assert torch.equal(weight.flatten(), weights[name].flatten())


def test_average_that_is_not_finite_is_not_saved(build, tmp_path):
    engine = build(model_config(), optimizer={"ema_decay": DECAY})
    average = next(one for one in engine.optimizer_state.fragments() if one.name == "embedding.weight").tensors["ema"]
    average.view(-1)[3] = torch.nan
    with pytest.raises(NotFiniteError, match=r"ema of embedding.weight"):
        Checkpointer(engine, tmp_path).save(step=1, state={}, config_yaml="a: 1\n")
    assert not list(tmp_path.iterdir())


def test_resharding_keeps_the_average(build, tmp_path):
    engine = build(model_config(), optimizer={"ema_decay": DECAY})
    engine.train_step(batches(1)[0], lr=LR)
    source = Checkpointer(engine, tmp_path / "a").save(step=1, state={}, config_yaml="a: 1\n")
    shapes = engine.parameter_shapes()
    slices = [TensorSlice(name, Shard(), 0, torch.Size(shape).numel()) for name, shape in shapes.items()]
    rewrite(source, tmp_path / "b", [slices[::2], slices[1::2]], engine.layout)
    assert read_manifest(resolve(tmp_path / "b"))["ema"] is True
    before, after = read_weights(tmp_path / "a"), read_weights(tmp_path / "b")
    assert all(torch.equal(before[name], after[name]) for name in before)
