"""Training side by side: learning, equality with a plain loop, resumed sweeps, and scores against their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.synthetic.examples import UNLABELLED, Examples
from tools.cli.devices import use_device
from tools.synthetic.batches import generate, prepare, to_device
from tools.synthetic.experiment import Run, load_experiment, plan
from tools.synthetic.model_run import ModelRun, _macro_accuracy
from tools.synthetic.network import Network
from tools.synthetic.run_checkpoint import Evaluation
from tools.synthetic.training import SideBySide, train_together

CPU = torch.device("cpu")
Runs = Callable[..., list[Run]]


def test_metala_learns_and_stops_at_the_target(runs: Runs) -> None:
    (run,) = runs("epochs=8")
    reported: list[int] = []
    (result,) = train_together([run], prepare(run, CPU), CPU, progress=lambda steps, text: reported.append(steps))
    assert result["accuracy"] == result["best_accuracy"] == result["history"][-1] >= 0.99
    assert result["history"][0] < 0.9
    assert result["stopped"] == "99 % was reached"
    assert result["epochs"] == len(result["history"]) < 8
    assert result["steps"] == 40 * result["epochs"] == sum(reported)
    assert result["graph"] == "CPU"


def test_runs_trained_together_equal_runs_alone(runs: Runs) -> None:
    every = runs("lrs=[1e-3,5e-3]", "epochs=2", "data.train_examples=640", "target=null")
    examples = prepare(every[0], CPU)
    together = train_together(every, examples, CPU)
    alone = [train_together([run], examples, CPU)[0] for run in every]
    for one, other in zip(together, alone, strict=True):
        assert one["history"] == other["history"]
        assert one["loss"] == other["loss"]
    assert together[0]["loss"] != together[1]["loss"]


def test_diverging_run_does_not_change_the_others(runs: Runs) -> None:
    """Continue the other runs unchanged; each model run has its own dropout masks."""
    words = ["epochs=3", "data.train_examples=320", "target=null", "network.embedding_dropout=0.1"]
    wild, good = runs(*words, "lrs=[1e30,5e-3]")[::-1]
    examples = prepare(good, CPU)
    (alone,) = train_together([good], examples, CPU)
    for order in ((wild, good), (good, wild)):
        result = {run.id: one for run, one in zip(order, train_together(order, examples, CPU), strict=True)}
        assert (result[wild.id]["loss"], result[wild.id]["epochs"]) == (None, 3)
        for key in ("history", "loss", "perplexity", "epochs", "stopped"):
            assert result[good.id][key] == alone[key]


class _StopError(Exception):
    pass


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_sweep_equals_uninterrupted_sweep(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    for name in ("SECONDS_BETWEEN", "_MIN_TRAINING_PER_WRITING"):  # save after every epoch
        monkeypatch.setattr(f"tools.synthetic.run_checkpoint.{name}", 0.0)
    both = runs("lrs=[1e-3,5e-3]", "epochs=4", "data.train_examples=640", "target=null")
    both = [replace(run, precision=precision) for run in both]
    examples = prepare(both[0], CPU)
    expected = train_together(both, examples, CPU)
    reported: list[int] = []
    saved: list[bytes] = []

    def until(epoch: int) -> Callable[[int, str], None]:
        def progress(steps: int, text: str) -> None:
            reported.append(steps)
            if f"epoch {epoch} " in text:
                raise _StopError

        return progress

    for epoch in (2, 4):  # the saved state is that of the epoch before
        with pytest.raises(_StopError):
            train_together(both, examples, CPU, progress=until(epoch), checkpoint_folder=tmp_path)
        saved.append((tmp_path / f"{both[1].id}.pt").read_bytes())
    reported.clear()
    result = train_together(both, examples, CPU, progress=until(0), checkpoint_folder=tmp_path)
    assert reported == [2 * 10 * 3, 2 * 10]
    for one, other in zip(result, expected, strict=True):
        for key in ("history", "loss", "accuracy", "perplexity", "epochs", "steps"):
            assert one[key] == other[key]
    # Runs with checkpoints of different epochs start together from the beginning.
    (tmp_path / f"{both[1].id}.pt").write_bytes(saved[0])
    reported.clear()
    result = train_together(both, examples, CPU, progress=until(0), checkpoint_folder=tmp_path)
    assert reported == [2 * 10] * 4
    assert [one["history"] for one in result] == [one["history"] for one in expected]
    # One run resumes alone, and its seconds include those before. A file that cannot be read is named.
    file = tmp_path / f"{both[1].id}.pt"
    assert torch.load(file)["seconds"] > 0
    torch.save({**torch.load(file), "seconds": 1000.0}, file)
    (alone,) = train_together(both[1:], examples, CPU, checkpoint_folder=tmp_path)
    assert alone["history"] == expected[1]["history"]
    assert 1000 < alone["seconds"] < 1100
    assert alone["preparation_seconds"] >= 0
    assert alone["steps_per_second"] <= 0.1
    (tmp_path / f"{both[0].id}.pt").write_bytes(b"PK")
    with pytest.raises(ValueError, match=rf"{both[0].id}\.pt cannot be read .*: remove it, and the run starts from"):
        train_together(both, examples, CPU, checkpoint_folder=tmp_path)


def test_training_equals_a_plain_loop(runs: Runs) -> None:
    """Compare five losses with those of whole logits, torch's cross entropy and AdamW."""
    (run,) = runs("data.train_examples=320", "epochs=1")
    examples = generate(run)
    losses = SideBySide([run], prepare(run, CPU), CPU).losses_of_steps(5)
    model = Network(run).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=0.1)
    tokens, labels = (torch.from_numpy(x).long() for x in examples[0])
    for step, (loss,) in enumerate(losses):
        batch = slice(64 * step, 64 * step + 64)
        expected = F.cross_entropy(model(tokens[batch]).flatten(0, 1), labels[batch].flatten(), ignore_index=UNLABELLED)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs("data.train_examples=320", "epochs=2")
    losses: list[float] = []
    loss = Network.loss

    def watched(*arguments: Any) -> torch.Tensor:
        result = loss(*arguments)
        losses.append(result.item())
        return result

    monkeypatch.setattr(Network, "loss", watched)
    steps = SideBySide([run], prepare(run, CPU), CPU)
    for epoch in range(2):
        losses.clear()
        steps.train_epoch(epoch)
        assert len(losses) == 5
        assert steps.evaluate()[1] == pytest.approx([sum(losses) / 5], rel=1e-6)


def test_each_epoch_is_a_new_permutation(runs: Runs) -> None:
    (run,) = runs("data.train_examples=320", "epochs=1")
    steps = SideBySide([run], prepare(run, CPU), CPU)
    orders = []
    for epoch in range(2):
        steps.train_epoch(epoch)
        orders.append(steps._order.flatten().tolist())
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(320))
    assert orders[0] != orders[1]
    (other,) = runs("data.train_examples=320", "epochs=1", "seeds=[1]")
    steps = SideBySide([other], prepare(other, CPU), CPU)
    steps.train_epoch(0)
    assert steps._order.flatten().tolist() not in orders, "another seed has other orders"
    (run,) = runs("data.train_examples=350", "epochs=1")
    steps = SideBySide([run], prepare(run, CPU), CPU)
    steps.train_epoch(0)
    taken = steps._order.flatten().tolist()
    # The examples beyond whole batches are left out of this epoch.
    assert len(set(taken)) == len(taken) == 320
    assert set(taken) < set(range(350))


def test_short_epochs_together_read_every_example_once(runs: Runs) -> None:
    (run,) = runs("data.train_examples=350", "epochs=4", "epoch_steps=2")  # five steps per pass
    steps = SideBySide([run], prepare(run, CPU), CPU)
    orders = []
    for epoch in range(4):
        steps.train_epoch(epoch)
        orders.append(steps._order.flatten().tolist())
    passes = [orders[0] + orders[1], orders[2] + orders[3]]
    assert [len(set(taken)) for taken in passes] == [4 * 64] * 2
    assert passes[0] != passes[1]
    run = replace(run, drop_last=False, epoch_steps=3)  # six steps per pass
    steps = SideBySide([run], prepare(run, CPU), CPU)
    taken = []
    for epoch in range(2):
        steps.train_epoch(epoch)
        taken += steps._order.flatten().tolist()
    assert sorted(taken) == list(range(6 * 64)), "the examples, then the rows that fill the last batch"


def test_learning_rate_is_a_cosine_over_epochs(runs: Runs) -> None:
    (run,) = runs("epochs=4", "min_lr=1e-4")
    model_run = ModelRun(run, CPU)
    rates = []
    for epoch in range(4):
        model_run.begin_epoch(epoch)
        rates += [group["lr"] for group in model_run._optimizer.param_groups]
    assert rates == pytest.approx([1e-4 + (5e-3 - 1e-4) * (1 + math.cos(math.pi * e / 4)) / 2 for e in range(4)])
    model_run = ModelRun(replace(run, schedule="constant"), CPU)
    model_run.begin_epoch(3)
    assert {group["lr"] for group in model_run._optimizer.param_groups} == {5e-3}


def test_smaller_last_batch(runs: Runs) -> None:
    """Use every example once per epoch; the last step equals a step on the remaining examples."""
    run = replace(runs("data.train_examples=70", "epochs=2", "target=null")[0], drop_last=False)
    assert (run.steps_per_epoch, run.steps) == (2, 4)
    steps = SideBySide([run], prepare(run, CPU), CPU)
    steps.train_epoch(0)
    assert sorted(steps._order[0].tolist() + steps._order[1, :6].tolist()) == list(range(70))
    (whole, rest) = (loss for (loss,) in steps.losses_of_steps(2))
    order = steps._order.clone()
    train = steps._train
    assert train.labels[order[1, 6:]].eq(UNLABELLED).all()
    plain = Network(run).model
    optimizer = torch.optim.AdamW(plain.parameters(), lr=run.lr, weight_decay=0.1)
    tokens, labels = (torch.from_numpy(x).long() for x in generate(run)[0])
    for rows, expected in ((order[0], whole), (order[1, :6], rest)):
        loss = F.cross_entropy(plain(tokens[rows]).flatten(0, 1), labels[rows].flatten(), ignore_index=UNLABELLED)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_weight_decay_of_all_or_of_matrices(runs: Runs) -> None:
    def decays(run: Run) -> dict[float, int]:
        model_run = ModelRun(run, CPU)
        assert [g["weight_decay"] for g in model_run._optimizer.param_groups] == [
            flat.decay for flat in model_run.flats
        ]
        return {flat.decay: len(flat) for flat in model_run.flats}

    (run,) = runs()
    count = len(list(Network(run).parameters()))
    vectors = sum(p.ndim < 2 for p in Network(run).parameters())
    assert decays(run) == {0.1: count}
    assert decays(replace(run, decayed="matrices")) == {0.1: count - vectors, 0.0: vectors}
    assert vectors > 5


def test_diverging_run_ends_early(runs: Runs) -> None:
    (run,) = runs("lrs=[1e30]", "epochs=5", "data.train_examples=128")
    (result,) = train_together([run], prepare(run, CPU), CPU)
    assert (result["loss"], result["stopped"], result["epochs"]) == (None, "no loss was finite", 1)


def test_bf16_keeps_float32_weights(runs: Runs) -> None:
    run = replace(runs("data.train_examples=640", "epochs=1")[0], precision="bf16")
    steps = SideBySide([run], prepare(run, CPU), CPU)
    exact = SideBySide([replace(run, precision="fp32")], prepare(run, CPU), CPU).losses_of_steps(10)
    rounded = steps.losses_of_steps(10)
    assert rounded != exact
    assert np.allclose(rounded, exact, rtol=0.03)
    (model_run,) = steps.model_runs
    assert {p.dtype for p in model_run.network.parameters()} == {torch.bfloat16}
    assert {flat.master.dtype for flat in model_run.flats} == {torch.float32}
    exact_start = Network(replace(run, precision="fp32")).state_dict()
    for name, weight in model_run.network.state_dict().items():
        assert torch.equal(weight, exact_start[name].bfloat16()), name
        assert weight.data_ptr() % 16 == 0


def test_test_examples_differ_from_training_examples(runs: Runs) -> None:
    words = ["models=[metala]", "tasks=[fuzzy_recall/baseline,selective_copying/baseline,compression/baseline]"]
    for run in (runs()[0], *plan(load_experiment("mad", words), "fp32")):
        train, test = generate(run)
        assert [len(train.tokens), len(test.tokens)] == [run.data["train_examples"], run.data["test_examples"]]
        # Sets of equal size must not be equal.
        train, test = generate(replace(run, data={**run.data, "train_examples": 200, "test_examples": 200}))
        assert (train.tokens != test.tokens).any(1).mean() > 0.5


@pytest.mark.parametrize("task", ["in_context_recall", "noisy_recall", "fuzzy_recall"])
def test_recall_is_trained_on_every_token_and_tested_on_queries(task: str) -> None:
    words = ["models=[metala]", f"tasks=[{task}/baseline]", "data.train_examples=50", "data.test_examples=50"]
    (run, *_) = plan(load_experiment("mad", words), "fp32")
    train, test = generate(run)
    assert (train.labels != UNLABELLED).all()
    assert 0 < (test.labels != UNLABELLED).mean() < 0.5


def test_memorization_table_depends_on_the_seed_only() -> None:
    words = ["models=[metala]", "tasks=[memorization/baseline]", "seeds=[0,1]"]
    sets = {run.seed: generate(run) for run in plan(load_experiment("mad", words), "fp32")}
    values = {}
    for seed, number in itertools.product((0, 1), repeat=2):
        tokens, labels = sets[seed][number]
        # A key, then the place at which its value is predicted.
        values[seed, number] = dict(zip(tokens[:, ::2].flatten(), labels[:, 1::2].flatten(), strict=True))
    assert len(values[0, 0]) == 127
    assert values[0, 0] == values[0, 1] != values[1, 0] == values[1, 1]


def test_selected_positions_are_the_labelled_ones(runs: Runs) -> None:
    (run,) = runs("tasks=[16x2]", "data.train_examples=6")
    examples = generate(run)[0]
    few = to_device(examples, CPU, multiple=4)
    assert few.positions is not None
    assert few.labels.shape == few.positions.shape == (8, 2)
    assert (few.labels[6:] == UNLABELLED).all()
    for row in range(6):
        positions = np.nonzero(examples.labels[row] != UNLABELLED)[0]
        assert few.positions[row].tolist() == positions.tolist()
        assert few.labels[row].tolist() == examples.labels[row, positions].tolist()
    everywhere = to_device(Examples(examples.tokens, examples.tokens), CPU)
    assert everywhere.positions is None
    network = Network(run)
    dense = network.loss(torch.from_numpy(examples.tokens).long(), None, torch.from_numpy(examples.labels).long())
    assert network.loss(*few.batch(torch.arange(8))).item() == pytest.approx(dense.item(), rel=1e-6)


def test_score_of_perfect_and_random_models(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs("tasks=[64x4]", "data.vocabulary=64", "data.test_examples=3000")
    steps = SideBySide([run], prepare(run, CPU), CPU)

    def look_up(network: Network, tokens: Tensor, positions: Tensor | None) -> Tensor:
        assert positions is not None
        query = tokens.gather(1, positions)
        same = tokens[:, None, :8:2] == query[:, :, None]
        return 9.0 * F.one_hot(tokens[:, 1:8:2].gather(1, same.int().argmax(-1)), 64)

    def guess(network: Network, tokens: Tensor, positions: Tensor | None) -> Tensor:
        assert positions is not None
        return torch.rand(*positions.shape, 64, generator=generator) + 50.0 * (torch.arange(64) >= 32)

    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(Network, "logits", look_up)
    (result,), _ = steps.evaluate()
    assert result.accuracy == result.test_accuracy == 1.0
    assert result.perplexity == pytest.approx(1 + 63 * math.exp(-9))
    monkeypatch.setattr(Network, "logits", guess)
    (result,), _ = steps.evaluate()
    assert result.accuracy == pytest.approx(1 / 32, abs=0.006)
    assert 32 < result.perplexity < 34


def test_macro_accuracy_is_the_mean_over_classes() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 6, (4, 10), generator=generator)
    labels[labels == 5] = UNLABELLED
    labels[labels == 3] = 2
    answers = torch.where(torch.rand(4, 10, generator=generator) < 0.5, labels.clamp_min(0), 7)
    counted = labels != UNLABELLED
    mean, batches = _macro_accuracy(answers, labels, (answers == labels) & counted, counted, 9).tolist()
    expected = [((answers == c) & (labels == c)).sum() / (labels == c).sum() for c in (0, 1, 2, 4)]
    # Class 7 is predicted and never right; 3, 5, 6 and 8 do not occur.
    assert mean == pytest.approx(float(sum(expected)) / 5)
    assert batches == 1


def test_mad_trains_and_averages_batches() -> None:
    words = ["models=[metala]", "widths=[32]", "lrs=[5e-3]", "weight_decays=[0]", "epochs=60", "evaluate_every=20"]
    words += ["tasks=[memorization/baseline]", "data.test_examples=256", "mad.memorization.baseline.vocabulary=16"]
    (run,) = plan(load_experiment("mad", words), "fp32")
    (result,) = train_together([run], prepare(run, CPU), CPU)
    assert result["history"][-1] >= 0.999
    assert result["stopped"] == "99.9 % was reached"


@pytest.mark.parametrize(("scored", "epoch", "accuracy"), [("last", 8, 0.7), ("least_perplexity", 6, 0.6)])
def test_scored_evaluation_is_the_last_or_of_least_perplexity(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, scored: str, epoch: int, accuracy: float
) -> None:
    """Score the first evaluation with the least perplexity on the first set by its accuracy on the last set."""
    of_epochs = [(0.8, math.nan, 0.4), (0.9, 3.0, 0.5), (0.1, 2.0, 0.6), (0.2, math.nan, 0.7)]
    result = iter([Evaluation(*one) for one in of_epochs])
    monkeypatch.setattr(SideBySide, "evaluate", lambda steps: ([next(result)], [1.0]))
    words = ["epochs=8", "evaluate_every=2", "data.train_examples=64", "target=null", f"scored={scored}"]
    (run,) = runs(*words)
    (line,) = train_together([run], prepare(run, CPU), CPU)
    assert (line["scored_epoch"], line["accuracy"], line["best_accuracy"]) == (epoch, accuracy, 0.9)
    assert line["perplexity"] == (2.0 if epoch == 6 else None)
    (short,) = runs(*words, "epochs=3")
    result = iter([Evaluation(0.1, 2.0, 0.3), Evaluation(0.2, 1.0, 0.6)])
    (last,) = train_together([short], prepare(short, CPU), CPU)
    assert (len(last["history"]), last["scored_epoch"], last["accuracy"]) == (2, 3, 0.6), "the last epoch too"
    assert (run.id == runs(*words[:-1])[0].id) is (scored == "last"), "results of the last weights stay what they are"


def test_missing_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the device .cuda:99. is not here: allowed are auto, cpu"):
        use_device("cuda:99")
