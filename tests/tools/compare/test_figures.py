"""Check tables and figures of a comparison with given results."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.compare.figures import draw
from tools.compare.results import Result, Row, tables
from tools.reporting.style import series_style
from tools.reporting.tables import markdown_table


def test_figures_show_curves_scaling_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw mean and range of the seeds, loss against parameters, and the largest size minus the reference."""
    drawn: dict[str, Any] = {}

    def keep(figure: Any, out: Path) -> None:
        drawn[out.stem] = figure

    monkeypatch.setattr("tools.reporting.style.save_figure", keep)
    rows, results = [], []
    for size, body in (("small", 100), ("large", 400)):
        for model, loss in (("a", 2.0), ("b", 1.0)):
            ends = {1: loss + 0.1, 2: loss + 0.5}
            values = {"loss": ends, "loss/x": {1: loss, 2: 1.2 * loss}, "loss/y": dict.fromkeys(ends, 3 * loss + body)}
            rows.append(Row(model, model.upper(), size, 1000 + body, body, values))
            for seed, end in ends.items():
                run: Any = SimpleNamespace(model=model, size=size)
                curve = [{"tokens": 10, "loss": 9.0 + seed}, {"tokens": 20, "loss": end}]
                results.append(Result(run, curve, curve[-1], 20, 1.0))
    draw(results, rows, Path(), "T", "a")
    (scaling,) = drawn["scaling"].axes
    series = {container.get_label(): container for container in scaling.containers}
    for label, loss in (("A", 2.3), ("B", 1.3)):
        line, _, (bars,) = series[label]
        assert line.get_xdata().tolist() == [100, 400]
        assert line.get_ydata().tolist() == pytest.approx([loss, loss])
        assert [y for _, y in bars.get_segments()[0]] == pytest.approx([loss - 0.2, loss + 0.2])
    assert scaling.get_xscale() == "log"
    assert [label.get_text() for label in scaling.get_xticklabels()] == ["100", "400"]
    label = scaling.xaxis.get_major_formatter()
    assert [label(number) for number in (614_400, 27_310_000)] == ["614 k", "27.3 M"]
    (sources,) = drawn["sources"].axes
    (container,) = sources.containers
    assert container.get_label() == "B"
    assert container[0].get_xdata().tolist() == pytest.approx([-1.1, -3.0])
    assert [round(x, 6) for x, _ in container[2][0].get_segments()[0]] == [-1.2, -1.0]
    assert sources.get_title(loc="left") == "T, large (bars: standard errors over the seeds)"
    assert scaling.get_title(loc="left") == "T (bars: range of the seeds)"
    assert drawn["results"].axes[-1].get_xlabel() == "tokens"
    partial = [
        replace(result, curve=[{**line, "evaluated_fraction": 0.5} for line in result.curve]) for result in results
    ]
    draw(partial, rows, Path(), "T", "a")
    assert drawn["results"].axes[-1].get_xlabel() == "tokens; the last point is of the whole validation set"
    one_seed = [replace(row, values={key: {1: of_seeds[1]} for key, of_seeds in row.values.items()}) for row in rows]
    draw(results, one_seed, Path(), "T", "a")
    assert drawn["sources"].axes[0].get_title(loc="left") == "T, large"
    assert drawn["scaling"].axes[0].get_title(loc="left") == "T"
    # In the large size only A is complete.
    drawn.clear()
    draw(results, [row for row in rows if (row.model, row.size) != ("b", "large")], Path(), "T", "a")
    assert set(drawn) == {"results", "scaling"}
    # A third model is complete only in the large size.
    late = Row("c", "C", "large", 1400, 400, {"loss": {1: 4.0}})
    way = [{"tokens": 5, "loss": 90.0}, {"tokens": 10, "loss": 9.0}, {"tokens": 20, "loss": 4.0}]
    alone: Any = SimpleNamespace(model="c", size="large")
    draw([*results, Result(alone, way, way[-1], 20, 1.0)], [*rows, late], Path(), "T", "a")
    labels = {text.get_text(): text.get_color() for text in drawn["results"].axes[3].texts}
    colors = {line.get_label(): line.get_color() for line in drawn["results"].axes[3].lines}
    assert labels == colors
    assert set(labels) == {"A", "B", "C"}
    assert len(set(colors.values())) == 3
    places = {text.get_text(): text.xyann[1] for text in drawn["results"].axes[3].texts}
    to_axes = drawn["results"].axes[3].transData + drawn["results"].axes[3].transAxes.inverted()
    ends = {line.get_label(): to_axes.transform(line.get_xydata()[-1])[1] for line in drawn["results"].axes[3].lines}
    assert places == pytest.approx(ends, abs=0.05), "the labels are placed after the limits of the axis are set"
    band = drawn["results"].axes[2].collections[0].get_paths()[0].vertices[:, 1]
    low, high = drawn["results"].axes[2].get_ylim()
    assert low < band.min() < band.max() < high, "the band of the seeds is not clipped"
    curve = next(line for line in drawn["results"].axes[2].lines if line.get_label() == "A")
    assert curve.get_xdata().tolist() == [10, 20]
    assert curve.get_ydata().tolist() == pytest.approx([10.5, 2.3])
    top = drawn["results"].axes[0]
    assert [label.get_text() for label in top.get_yticklabels()] == ["B", "A", "C"]
    seeds = {line.get_ydata()[0]: line.get_xdata().tolist() for line in top.lines if line.get_marker() == "o"}
    assert seeds == {0: pytest.approx([1.1, 1.5]), 1: pytest.approx([2.1, 2.5])}


def test_figure_of_runs_with_one_validation_has_no_empty_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("tools.reporting.style.save_figure", lambda figure, out: drawn.update({out.stem: figure}))
    run: Any = SimpleNamespace(model="a", size="small")
    end = {"tokens": 10, "loss": 2.0}
    draw([Result(run, [end], end, 10, 1.0)], [Row("a", "A", "small", 100, 100, {"loss": {1: 2.0}})], Path(), "T", "a")
    (final,) = drawn["results"].axes
    assert final.get_xlabel() == "validation loss (nats per token)"
    assert drawn["results"].get_suptitle() == "T (circles: seeds, bars: means)"


def test_figures_of_masked_models_show_accuracies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw accuracies in percent, the lowest loss on top, and curves at the validations that all complete seeds have."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("tools.reporting.style.save_figure", lambda figure, out: drawn.setdefault(out.stem, figure))
    rows, results = [], []
    for size, more in (("small", 0.0), ("large", 0.2)):
        for model, loss in (("a", 2.0), ("b", 1.0)):
            ends = {1: 0.25 + more, 2: 0.5 + more} if model == "a" else {1: 0.125}
            rows.append(Row(model, model.upper(), size, 1, 1, {"loss": dict.fromkeys(ends, loss), "accuracy": ends}))
            for seed, end in ends.items():
                run: Any = SimpleNamespace(model=model, size=size)
                points = {1: (10, 20, 30), 2: (20, 25, 30)}[seed] if model == "a" else (30,)
                curve = [{"tokens": at, "loss": 9.0, "accuracy": end * at / 30} for at in points]
                results.append(Result(run, curve, curve[-1], 30, 1.0))
            results.append(Result(run, [{"tokens": 20, "accuracy": 0.0}], None, 20, 1.0))
    draw(results, rows, Path(), "T", "a")
    assert set(drawn) == {"results", "scaling"}
    top, way = drawn["results"].axes[0], drawn["results"].axes[2]
    assert [label.get_text() for label in top.get_yticklabels()] == ["B", "A"]
    assert top.get_ylim()[0] > top.get_ylim()[1]
    assert drawn["results"].axes[1].get_xlabel() == "masked-token accuracy, %"
    assert {line.get_ydata()[0]: line.get_xdata()[0] for line in top.lines if line.get_marker() == "|"} == {
        0: 12.5,
        1: 37.5,
    }
    (line,) = way.lines  # b has only its last validation
    assert line.get_xdata().tolist() == [20, 30]
    assert line.get_ydata().tolist() == pytest.approx([25.0, 37.5])
    (band,) = way.collections
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(20, 16.666667), (20, 33.333333), (30, 25.0), (30, 50.0)}
    assert way.xaxis.get_major_formatter()(2.5e6) == "2.5 M"


def test_masked_and_causal_models_are_drawn_by_their_loss(tmp_path: Path) -> None:
    rows = [
        Row("a", "A", "", 1, 1, {"loss": {1: 2.0}, "accuracy": {1: 0.5}}),
        Row("b", "B", "", 1, 1, {"loss": {1: 1.0}}),
    ]
    assert draw([], rows, tmp_path, "T", None) == [tmp_path / "results.png"]


def test_the_table_of_one_size_and_one_source() -> None:
    values = {"loss": {1: 2.0, 2: 3.0}, "accuracy": {1: 0.25, 2: 0.75}, "loss/x": {1: 2.0, 2: 3.0}}
    text = tables([Row("a", "A", "", 4321, 1234, values)])
    head, _, line = (row.split("|") for row in text.splitlines()[:3])
    assert dict(zip(map(str.strip, head), map(str.strip, line), strict=True)) == {
        "": "",
        "model": "A",
        "parameters": "4,321",
        "without embeddings": "1,234",
        "seeds": "2",
        "validation loss": "2.5000 ± 0.7071",
        "minus A": "-",
        "masked-token accuracy, %": "50.00 ± 35.36",
    }
    assert "#" not in text
    assert "by source" not in text


def test_eighteen_models_have_different_styles(tmp_path: Path) -> None:
    styles = [series_style(number) for number in range(18)]
    assert len({(style["color"], style["ls"]) for style in styles}) == 18
    assert len({style["color"] for style in styles}) == 6
    assert len({style["marker"] for style in styles[:12]}) == 12
    # One model has no difference to draw.
    one = Row("a", "A", "", 1, 1, {"loss": {1: 2.0}, "loss/x": {1: 2.0}, "loss/y": {1: 2.0}})
    assert draw([], [one], tmp_path, "T", None) == [tmp_path / "results.png"]


def test_pipe_in_a_name_is_escaped_and_numbers_are_set_to_the_right() -> None:
    head, rule, line = markdown_table(["model", "loss"], [["a|b", "1"]], aligned=True).splitlines()
    assert line == r"| a\|b  |    1 |"
    assert rule == "|-------|-----:|"
    assert len(head) == len(line)


def test_differences_are_paired_by_seed() -> None:
    """Use the seeds that both models have. One pair has no error."""
    one, other, third = (
        Row(name, name, "", 1, 1, {"loss": values})
        for name, values in (("a", {1: 2.0, 2: 3.0, 3: 5.0}), ("b", {1: 1.0, 4: 0.0, 2: 1.0}), ("c", {3: 4.0}))
    )
    assert one.difference(other, "loss") == pytest.approx((1.5, statistics.stdev([1, 2]) / math.sqrt(2)))
    assert other.difference(one, "loss")[0] == -1.5
    change, error = one.difference(third, "loss")
    assert change == 1.0
    assert math.isnan(error)
    assert all(map(math.isnan, other.difference(third, "loss")))


def test_scaling_of_image_classifiers_is_per_image(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("tools.reporting.style.save_figure", lambda figure, out: drawn.setdefault(out.stem, figure))
    values = {"loss": {1: 2.0}, "accuracy": {1: 0.5}, "top5_accuracy": {1: 0.9}}
    rows = [Row("a", "A", size, body, body, values) for size, body in (("small", 100), ("large", 400))]
    draw([], rows, Path(), "T", None)
    assert drawn["scaling"].axes[0].get_ylabel() == "validation loss (nats per image)"
    assert drawn["results"].axes[1].get_xlabel() == "top-1 accuracy, %"
