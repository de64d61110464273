"""Generated tasks on a GPU: graphed steps of several parallel runs equal the steps of each run alone."""

from __future__ import annotations

import pytest
import torch

from tests.tools.synthetic.test_lra import SMALL_PATHS
from tools.synthetic.batches import prepare
from tools.synthetic.experiment import load_experiment, plan
from tools.synthetic.preflight import check_sweep
from tools.synthetic.training import SideBySide, train_together

MQAR = ("tasks=[64x4]", "batch_size=64", "widths=[64]", "lrs=[1e-3,1e-2]")


def losses_of_epochs(suite: str, words: list[str], epochs: int, graph: bool) -> list[list[float]]:
    """Return the losses of all runs after each epoch, trained with or without a graph."""
    device = torch.device("cuda", 0)
    runs = plan(load_experiment(suite, words), "bf16")
    row = check_sweep(runs, device)
    assert (row["graph"], row["problem"]) == (True, "")
    steps = SideBySide(runs, prepare(runs[0], device), device, graph=graph)
    losses = []
    for epoch in range(epochs):
        steps.train_epoch(epoch)
        losses.append(steps.evaluate()[1])
    return losses


@pytest.mark.parametrize("model", sorted(load_experiment("mqar").definitions))
def test_graphs_and_bf16_differ_by_rounding_alone(model: str) -> None:
    runs = plan(load_experiment("mqar", [*MQAR, f"models=[{model}]"]), "bf16")
    row = check_sweep(runs, torch.device("cuda", 0))
    assert (row["graph"], row["problem"]) == (True, "")


def test_float32_residual_stream() -> None:
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
def test_dropout_in_a_graph_equals_eager_dropout(words: list[str]) -> None:
    """Seed the graph's generators per epoch, as without a graph."""
    words = [*MQAR, *words, "epochs=2", "data.train_examples=1280", "data.vocabulary=64", "target=null"]
    graphed, eager = (losses_of_epochs("mqar", words, 2, graph) for graph in (True, False))
    assert graphed == [pytest.approx(losses, rel=0.01) for losses in eager]


def test_batch_norm_in_a_graph_equals_eager_batch_norm() -> None:
    """Evaluate with moving averages, which the graph's replays update."""
    words = [
        *SMALL_PATHS,
        "network.norm=batchnorm",
        "settings.pathfinder.lrs=[1e-3,1e-2]",
        "settings.pathfinder.epochs=3",
    ]
    words += ["settings.pathfinder.epoch_steps=4", "settings.pathfinder.data.train_examples=128"]
    graphed, eager = (losses_of_epochs("lra", words, 3, graph) for graph in (True, False))
    assert graphed == [pytest.approx(losses, rel=0.02) for losses in eager]
    assert graphed[0] != pytest.approx(graphed[2], rel=1e-3)


@pytest.mark.parametrize("task", sorted(load_experiment("mad").mad))
def test_every_task_of_mad(task: str) -> None:
    runs = plan(load_experiment("mad", ["models=[metala]", f"tasks=[{task}/baseline]", "batch_size=16"]), "bf16")
    row = check_sweep(runs, torch.device("cuda", 0))
    assert (row["graph"], row["problem"]) == (True, "")


def test_graph_follows_learning_rate_and_order() -> None:
    """Compare three epochs, which have different learning rates and batches, with and without graphs."""
    device = torch.device("cuda", 0)
    words = [*MQAR, "models=[attention]", "epochs=3", "data.train_examples=1280", "data.vocabulary=64", "target=null"]
    runs = plan(load_experiment("mqar", words), "bf16")
    results = [train_together(runs, prepare(runs[0], device), device, graph=graph) for graph in (True, False)]
    for graphed, eager in zip(*results, strict=True):
        assert graphed["graph"] is True
        assert eager["graph"] == "disabled"
        assert graphed["loss"] == pytest.approx(eager["loss"], rel=0.03)
    assert results[0][0]["loss"] != pytest.approx(results[0][1]["loss"], rel=1e-3)


def test_metala_learns_mqar() -> None:
    device = torch.device("cuda", 0)
    words = ["tasks=[16x4]", "batch_size={16: 64}", "models=[metala]", "widths=[64]", "lrs=[1e-3,5e-3]", "epochs=10"]
    words += ["data.train_examples=5000", "data.vocabulary=32", "network.init_method=small_init"]
    runs = plan(load_experiment("mqar", words), "bf16")
    results = train_together(runs, prepare(runs[0], device), device)
    assert max(result["accuracy"] for result in results) >= 0.99
    assert results[0]["stopped"] == "99 % was reached"


def test_float32_runs_without_a_graph() -> None:
    device = torch.device("cuda", 0)
    runs = plan(load_experiment("mqar", [*MQAR, "models=[metala]", "data.train_examples=640"]), "fp32")
    steps = SideBySide(runs, prepare(runs[0], device), device)
    assert steps.graph == "float32"
    first, again = (torch.tensor(steps.losses_of_steps(10)) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=1e-4, atol=0)
    # Two rates from the same weights.
    assert first[0, 0] == first[0, 1]
    assert first[9, 0] != first[9, 1]
