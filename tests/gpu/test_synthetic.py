"""Generated tasks on a GPU: a step as a graph, of several runs side by side, is the step of each alone."""

from __future__ import annotations

import pytest
import torch

from tools.synthetic.batches import prepare
from tools.synthetic.experiment import load_experiment, plan
from tools.synthetic.preflight import check_sweep
from tools.synthetic.training import SideBySide, train_together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MQAR = ("tasks=[64x4]", "batch_size=64", "widths=[64]", "lrs=[1e-3,1e-2]")


@pytest.mark.parametrize("model", sorted(load_experiment("mqar").definitions))
def test_graphs_and_bf16_change_nothing_but_rounding(model: str) -> None:
    runs = plan(load_experiment("mqar", [*MQAR, f"models=[{model}]"]), "bf16")
    row = check_sweep(runs, torch.device("cuda", 0))
    assert (row["graph"], row["problem"]) == (True, "")


def test_a_float32_residual_stream() -> None:
    words = [*MQAR, "models=[metala]", "network.fp32_residual_connection=true"]
    row = check_sweep(plan(load_experiment("mqar", words), "bf16"), torch.device("cuda", 0))
    assert (row["graph"], row["problem"]) == (True, "")


@pytest.mark.parametrize(
    "words",
    [
        ["models=[metala]", "network.embedding_dropout=0.5"],
        ["models=[attention]", "network.embedding_dropout=0", "definitions.attention.attention_dropout=0.5"],
    ],
)
def test_a_graph_draws_what_steps_without_one_draw(words: list[str]) -> None:
    """Dropout's generators are a graph's too, and follow the epoch's seed."""
    device = torch.device("cuda", 0)
    words = [*MQAR, *words, "epochs=2", "data.train_examples=1280", "data.vocabulary=64", "target=null"]
    runs = plan(load_experiment("mqar", words), "bf16")
    row = check_sweep(runs, device)
    assert (row["graph"], row["problem"]) == (True, "")
    examples = prepare(runs[0], device)
    losses = []
    for graph in (True, False):
        steps = SideBySide(runs, examples, device, graph=graph)
        for epoch in (0, 1):
            steps.train_epoch(epoch)
            losses.append(steps.evaluate()[1])
    assert losses[:2] == [pytest.approx(loss, rel=0.01) for loss in losses[2:]]


@pytest.mark.parametrize("task", sorted(load_experiment("mad").mad))
def test_every_task_of_mad(task: str) -> None:
    runs = plan(load_experiment("mad", ["models=[metala]", f"tasks=[{task}/baseline]", "batch_size=16"]), "bf16")
    row = check_sweep(runs, torch.device("cuda", 0))
    assert (row["graph"], row["problem"]) == (True, "")


def test_a_graph_follows_the_rate_and_the_order() -> None:
    """Three epochs with another rate and other batches each, as graphs and without."""
    device = torch.device("cuda", 0)
    words = [*MQAR, "models=[attention]", "epochs=3", "data.train_examples=1280", "data.vocabulary=64", "target=null"]
    runs = plan(load_experiment("mqar", words), "bf16")
    found = [train_together(runs, prepare(runs[0], device), device, graph=graph) for graph in (True, False)]
    for captured, plain in zip(*found, strict=True):
        assert captured["graph"] is True
        assert plain["graph"] == "disabled"
        assert captured["loss"] == pytest.approx(plain["loss"], rel=0.03)
    assert found[0][0]["loss"] != pytest.approx(found[0][1]["loss"], rel=1e-3)


def test_it_learns() -> None:
    device = torch.device("cuda", 0)
    words = ["tasks=[16x4]", "batch_size={16: 64}", "models=[metala]", "widths=[64]", "lrs=[1e-3,5e-3]", "epochs=10"]
    words += ["data.train_examples=5000", "data.vocabulary=32", "network.init_method=small_init"]
    runs = plan(load_experiment("mqar", words), "bf16")
    found = train_together(runs, prepare(runs[0], device), device)
    assert max(one["accuracy"] for one in found) >= 0.99
    assert found[0]["stopped"] == "99 % was reached"


def test_float32_is_without_a_graph() -> None:
    device = torch.device("cuda", 0)
    runs = plan(load_experiment("mqar", [*MQAR, "models=[metala]", "data.train_examples=640"]), "fp32")
    steps = SideBySide(runs, prepare(runs[0], device), device)
    assert steps.graph == "float32"
    first, again = (torch.tensor(steps.losses_of_steps(10)) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=1e-4, atol=0)
    # Two rates from the same weights.
    assert first[0, 0] == first[0, 1]
    assert first[9, 0] != first[9, 1]
