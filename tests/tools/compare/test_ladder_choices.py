"""The mixers of a ladder by purpose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from models.config import ModelConfig
from tools.compare.ladder_choices import LatePositions, choices, noise_of_run
from tools.compare.results import Row
from tools.reporting.runs_page import Section


def planned(model: str, *mixers: str, **options: Any) -> Any:
    """Return a run of a model with two layers. options: of softmax attention."""
    more = {"attention": options} if options else {}
    config = ModelConfig(vocab_size=8, num_layers=2, hidden_size=64, num_heads=2, mixers=mixers, mixer_options=more)
    return SimpleNamespace(model=model, config=SimpleNamespace(model=config))


def choices_at_m(rows: Sequence[Row], runs: Sequence[Any], **late: float) -> Section:
    """Return the choices at rung m. late: model -> loss at the last positions of a text."""
    return choices("m", rows, runs, noise_of_run(rows, {"m"}, {}), LatePositions("m", late))


def test_mixers_within_the_noise_share_a_purpose() -> None:
    """Compare three models; a small rung with two seeds gives the noise of a difference of two runs: sqrt(0.0004) = 0.02.

    The losses of A and C differ by 0.03, between one and two standard errors.
    """

    def row(model: str, size: str, *losses: float, **more: float) -> Row:
        values = {metric: {1: value} for metric, value in more.items()}
        return Row(model, model.upper(), size, 9, 9, {"loss": dict(enumerate(losses, 1)), **values})

    runs: list[Any] = [
        planned(model, *mixers) for model, mixers in (("a", ["attention"]), ("b", ["gla"]), ("c", ["gla", "attention"]))
    ]
    small = [row("a", "s", 5.0, 5.0), row("b", "s", 5.1, 5.12), row("c", "s", 4.9, 4.88)]
    large = [
        row("a", "m", 4.02, test=4.5, **{"loss/x": 3.0, "loss/y": 5.0}),
        row("b", "m", 4.20, test=4.6, **{"loss/x": 3.1, "loss/y": 4.9}),
        row("c", "m", 3.99, test=4.7, **{"loss/x": 2.9, "loss/y": 4.8}),
    ]
    section = choices_at_m([*small, *large], runs, a=3.5, b=3.4)
    cells = {row[0]: list(row[1:]) for row in section.rows}
    assert cells["lowest loss"] == ["C", "A", "3.9900", "B", "+0.2100 ± 0.0200"]
    # One model without softmax layers is no choice.
    assert "lowest loss with a state of constant size" not in cells
    assert cells["text of an unseen source"] == ["A", "-", "4.5000", "B", "+0.1000 ± 0.0200"]
    late = cells["last positions of a text (2 of 3 mixers measured)"]
    assert late == ["B", "-", "3.4000", "A", "+0.1000 ± 0.0200"]
    assert cells["lowest loss in most sources"] == ["C", "-", "2 of 2", "-", "-"]
    assert "It comes from the seeds at s (2 degrees of freedom), taken as an upper bound" in section.note
    alone = choices_at_m(large, runs)
    assert alone.rows[0] == ["lowest loss", "C", "-", "3.9900", "A", "+0.0300"]
    assert "the noise of a difference is unknown" in alone.note
    assert choices_at_m(large[:1], runs).note == "A choice needs at least two mixers with a complete run of m."


def test_linear_attention_and_a_window_have_a_state_of_constant_size() -> None:
    runs = [
        planned("softmax", "attention"),
        planned("linear", "linear_attention"),
        planned("normalized", "normalised_attention"),
        planned("window", "attention", window=4),
        planned("mixed", "attention", window=4, full_layers=[1]),
    ]
    rows = [Row(run.model, run.model, "m", 9, 9, {"loss": {1: 4.0 - i}}) for i, run in enumerate(runs)]
    cells = {row[0]: list(row[1:]) for row in choices_at_m(rows, runs).rows}
    assert cells["lowest loss"] == ["mixed", "-", "0.0000", "window", "+1.0000"]
    assert cells["lowest loss with a state of constant size"] == ["window", "-", "1.0000", "normalized", "+1.0000"]


def test_last_positions_have_the_noise_of_one_run() -> None:
    """Compare two models with two seeds each. The noise of a run is 0.05, and the last positions are those of one run."""
    losses = {"a": {1: 4.0, 2: 4.1}, "b": {1: 3.0, 2: 3.0}}
    rows = [Row(model, model, "m", 9, 9, {"loss": values}) for model, values in losses.items()]
    cells = {row[0]: row[-1] for row in choices_at_m(rows, [], a=3.5, b=3.2).rows}
    assert cells == {"lowest loss": "+1.0500 ± 0.0500", "last positions of a text": "+0.3000 ± 0.0707"}
    one_seed = Row("c", "c", "m", 9, 9, {"loss": {1: 5.0}})
    assert choices_at_m([*rows, one_seed], []).rows[0][-1] == "+1.0500 ± 0.0707", "the fewest seeds of a model"


def test_mixers_with_the_lowest_loss_in_most_sources_have_their_numbers_of_sources() -> None:
    sources = {"a": (1, 1, 1, 5, 5, 5), "b": (5, 5, 5, 1, 1, 5), "c": (5, 5, 5, 5, 5, 1)}
    rows = [
        Row(model, model, "m", 9, 9, {"loss": {1: 4.0}, **{f"loss/{i}": {1: x} for i, x in enumerate(losses)}})
        for model, losses in sources.items()
    ]
    cells = {row[0]: list(row[1:]) for row in choices_at_m(rows, []).rows}
    assert cells["lowest loss in most sources"] == ["a", "-", "3 of 6", "b", "2 of 6"]


def test_noise_of_a_run_comes_from_its_own_size_or_from_the_predictions() -> None:
    """Estimate the noise; the order of the models, and the means of models and seeds, change nothing."""

    def row(model: str, size: str, *losses: float) -> Row:
        return Row(model, model, size, 9, 9, {"loss": dict(enumerate(losses, 1))})

    small = [row("a", "s", 6.11, 6.14), row("b", "s", 5.45, 5.41), row("c", "s", 5.55, 5.44), row("d", "s", 6.10, 6.35)]
    change = [0.03, -0.04, -0.11, 0.25]
    expected = statistics.stdev(change) / math.sqrt(2)
    for rows in (small, small[::-1], [*small[1:], row("a", "s", 7.11, 7.14)]):
        noise, source = noise_of_run(rows, {"m"}, {})
        assert noise == pytest.approx(expected)
        assert (
            source == "the seeds at s (3 degrees of freedom), taken as an upper bound, since noise falls with the size"
        )
    # The scatter of the predictions is the other upper bound. Their mean error is no noise.
    misses = {str(number): 1 + number for number in range(5)}
    assert noise_of_run(small, {"m"}, misses)[0] == pytest.approx(expected)
    misses = {str(number): 1 + number / 100 for number in range(5)}
    noise, source = noise_of_run(small, {"m"}, misses)
    assert noise == pytest.approx(statistics.stdev(misses.values()))
    assert source.startswith("the scatter of predicted minus trained loss of 5 mixers, an upper bound")
    # Seeds of the same size are the nearest. A diverged run, and a model with one seed, are left out.
    own = [row("a", "m", 4.0, 4.1), row("b", "m", 3.0, 3.0), row("c", "m", 3.0, math.nan), row("d", "m", 3.0)]
    assert noise_of_run([*small, *own], {"m"}, misses) == (pytest.approx(0.05), "the seeds at m (1 degrees of freedom)")
    assert math.isnan(noise_of_run(own[2:], {"m"}, {})[0])
