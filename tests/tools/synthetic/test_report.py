"""Check the tables and the figures of `python eval.py --suite mqar`, mad and lra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.tools.synthetic.conftest import one_space
from tools.synthetic.experiment import Experiment, load_experiment, plan, sweeps
from tools.synthetic.learning_curves import _draw_model, draw_curves
from tools.synthetic.report import Cell, cells_of, draw_results, mad_scores, markdown, model_label
from tools.synthetic.results import Results, result_line


@pytest.fixture
def measured(small: Callable[..., Experiment], tmp_path: Path) -> Callable[..., tuple[Experiment, Results]]:
    def fill(experiment: Experiment, accuracy: Callable[[int], float], without: int = 0) -> tuple[Experiment, Results]:
        results = Results(tmp_path / "results.jsonl")
        runs = plan(experiment, "fp32")
        for number, run in enumerate(runs[: len(runs) - without]):
            value = accuracy(number)
            results.add(result_line(run, {"accuracy": value, "best_accuracy": value, "history": [value]}, {}))
        return experiment, results

    return fill


def test_table_shows_the_papers_numbers(small: Callable[..., Experiment], measured, tmp_path: Path) -> None:
    experiment = small(
        "tasks=[512x80]", "widths=[64,128]", "batch_size={512: 64}", "lrs=[1e-3]", "more_lrs.lrs=[]", "seeds=[0,1]"
    )
    _, results = measured(experiment, lambda number: [0.2, 0.4, 0.9, 0.95][number], without=1)
    cells = cells_of(sweeps(plan(experiment, "fp32")), results)
    assert cells["512x80", "metala", 64].accuracy == pytest.approx(30)
    assert cells["512x80", "metala", 64].deviation == pytest.approx(14.142, abs=1e-3)
    text = one_space(markdown(experiment, cells))
    assert "| MetaLA | 30.0 ± 14.1 (0.001) | 90.0 * (0.001) |" in text
    assert "| MetaLA (paper) | 28.5 | 90.4 |" in text
    assert "runs of the sweep are not finished" in text
    draw_results(experiment, cells, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("metala", "MetaLA"),
        ("metala_no_convolution", "MetaLA, no convolution"),
        ("mamba2", "Mamba-2"),
        ("lion_s", "LION-s"),
        ("lion_grfa", "LION with the gate of GRFA"),
        ("lion_complex", "LION with complex decays"),
        ("my_mixer", "my mixer"),
        ("glass", "glass"),
    ],
)
def test_tables_and_figures_show_published_names(model: str, label: str) -> None:
    assert model_label(model) == label


def test_last_point_of_a_curve_is_at_the_last_epoch(small: Callable[..., Experiment]) -> None:
    axes = Figure().subplots()
    _draw_model(axes, [[0.1, 0.2, 0.4], [0.3, 0.4, 0.8]], small("epochs=5", "evaluate_every=2"), 0, "metala")
    assert axes.lines[0].get_xdata().tolist() == [2, 4, 5]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([20, 30, 60])
    # A seed that reached the target early does not cut the others short.
    _draw_model(axes, [[0.2, 0.9], [0.1, 0.2, 0.5]], small("epochs=5", "evaluate_every=2"), 1, "gla")
    assert axes.lines[1].get_xdata().tolist() == [2, 4, 5]
    assert axes.lines[1].get_ydata().tolist() == pytest.approx([15, 55, 70])


def test_figures_show_the_cells(
    small: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MQAR: accuracy against width with the deviation over seeds, and the paper's points. MAD: one bar per model and task."""
    figures: list[Figure] = []
    monkeypatch.setattr("tools.reporting.style.save_figure", lambda drawn, out: figures.append(drawn))
    experiment = small("tasks=[512x80]", "models=[metala,gla]", "batch_size={512: 64}")
    cells = {
        ("512x80", "metala", 64): Cell(30.0, 14.0, 1e-3, True),
        ("512x80", "metala", 128): Cell(90.0, None, 1e-3, True),
        ("512x80", "gla", 128): Cell(5.0, None, 1e-3, True),
    }
    draw_results(experiment, cells, tmp_path / "a.png")
    (axes,) = figures[0].axes
    series = {container.get_label(): container for container in axes.containers}
    line, _, (bars,) = series["MetaLA"]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([64, 128], [30.0, 90.0])
    assert [y for _, y in bars.get_segments()[0]] == [16.0, 44.0]
    assert (series["GLA"][0].get_xdata().tolist(), series["GLA"][0].get_ydata().tolist()) == ([128], [5.0])
    paper = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_marker() == "x"]
    assert paper == [(64, 28.5), (128, 90.4), (64, 0.0), (128, 0.0)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["MetaLA", "GLA"]
    of_d = ["LION-d with HiPPO (paper)", "LION-d (paper)"]
    of_lion = [
        "LION-s with HiPPO (paper)",
        "LION-s, sigmoid, no normalizer (paper)",
        of_d[0],
        "LION-s (paper)",
        of_d[1],
    ]
    for model, label, papers in (
        ("metala", "MetaLA", ["MetaLA (paper)"]),
        ("metala_complex", "MetaLA with complex decays", ["MetaLA (paper)"]),
        ("lion_d_hippo", "LION-d, hippo", of_d),
        ("lion_complex", "LION with complex decays", [*of_lion, "LION-lit (paper)"]),
    ):
        lra = load_experiment("lra", ["tasks=[image]", f"models=[{model}]"])
        draw_results(lra, {("image", model, 512): Cell(80.0, None, None, True)}, tmp_path / "c.png")
        labels = [text.get_text() for text in figures.pop().axes[0].get_legend().get_texts()]
        assert labels == [label, *papers, "Transformer (paper)"]
    mad = load_experiment("mad", ["models=[metala,gla]"])
    cells = {
        ("compression", "metala", 128): Cell(41.0, None, None, True),
        ("compression", "gla", 128): Cell(42.0, None, None, True),
        ("average", "gla", 128): Cell(43.0, None, None, True),
    }
    draw_results(mad, cells, tmp_path / "b.png")
    (axes,) = figures[1].axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights["MetaLA"] == [41.0]
    assert heights["GLA"] == [42.0, 43.0]
    assert heights["MetaLA (paper)"] == [45.55, 73.98]
    places: dict[int, list[float]] = {0: [], 1: []}
    for bars in axes.containers:
        for bar in bars:
            place = bar.get_x() + bar.get_width() / 2
            places[round(place)].append(place)
    for tick, centres in places.items():
        assert sum(centres) / len(centres) == pytest.approx(tick), "the bars of a label are centred on its tick"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["compression", "average"]


def test_training_curves_show_the_best_runs(
    small: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small("lrs=[1e-3,2e-3]", "seeds=[0,1]", "epochs=3")
    results = Results(tmp_path / "results.jsonl")
    with results.writing():
        for run in plan(experiment, "fp32"):
            value = run.lr * 100 + run.seed / 10
            result = {"accuracy": value, "best_accuracy": value, "history": [value / 4, value / 2, value]}
            results.add(result_line(run, result, {}))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_curves(experiment, sweeps(plan(experiment, "fp32")), results, tmp_path / "learning_curves.png")
    (axes,) = drawn[0].axes
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([6.25, 12.5, 25.0])
    last = [y for x, y in axes.collections[0].get_paths()[0].vertices if x == 3]
    assert (min(last), max(last)) == pytest.approx((20.0, 30.0))


@pytest.mark.parametrize(
    ("scored", "words"), [("last", "the last epoch"), ("best_validation", "the epoch of best validation accuracy")]
)
def test_caption_of_long_range_arena_names_the_scored_epoch(scored: str, words: str) -> None:
    cells = {("listops", "metala", 32): Cell(50.0, None, 1e-3, True)}
    page = markdown(load_experiment("lra", ["tasks=[listops]", f"scored={scored}"]), cells)
    assert f"learning rate, after {words}." in page


def test_mad_score_is_the_mean_over_settings(measured, tmp_path: Path) -> None:
    """Average the best runs of all settings; average over the tasks if all are complete."""
    words = ["models=[metala]", "lrs=[1e-3,2e-3]", "weight_decays=[0]"]
    experiment = load_experiment("mad", words)
    tasks = [list(experiment.mad).index(run.task.partition("/")[0]) for run in plan(experiment, "fp32")]
    _, results = measured(experiment, lambda number: (3 + tasks[number]) / 10 if number % 2 else 0.1)
    grouped = sweeps(plan(experiment, "fp32"))
    scores = mad_scores(experiment, cells_of(grouped, results), grouped)
    for place, task in enumerate(experiment.mad):
        assert scores[task, "metala", 128].accuracy == pytest.approx(30 + 10 * place)
    assert scores["average", "metala", 128].accuracy == pytest.approx(55)
    text = one_space(markdown(experiment, scores))
    assert "| MetaLA | 30.0 | 40.0 | 50.0 | 60.0 | 70.0 | 80.0 | 55.0 |" in text
    assert "| MetaLA (paper) | 99.87 | 15.18 |" in text
    assert "*" not in text.replace("**", "")
    draw_results(experiment, scores, tmp_path / "b.png")
    part = load_experiment("mad", [*words, "tasks=[compression]"])
    few = sweeps(plan(part, "fp32"))
    scores = mad_scores(part, cells_of(few, results), few)
    assert list(scores) == [("compression", "metala", 128)]
