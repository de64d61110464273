"""Check figures of runs: files, values, and errors without values."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.metrics.logger import MetricsLogger
from tools.plot import main
from tools.reporting import run_curves, style
from tools.reporting.run_curves import distinct_names, plot_loss, plot_runs, smooth
from tools.reporting.style import COLORS


def write_run(directory: Path, steps: int = 60, floor: float = 2.0, broken_step: int | None = None) -> Path:
    metrics = MetricsLogger(directory, total_steps=steps, progress_bar=False)
    for step in range(1, steps + 1):
        loss = floor + 6 / step + 0.05 * math.sin(step)
        values = {
            "loss": math.nan if step == broken_step else loss,
            "learning_rate": 1e-3 * (1 - step / steps),
            "gradient_norm": math.inf if step == broken_step else 0.5 + 1 / step,
            "tokens": 1024 * step,
            "tokens_per_second": 5000.0 + step,
        }
        metrics.log(step, values)
        if step % 20 == 0:
            metrics.log(step, {"loss": loss + 0.1, "tokens": 1024 * step, "bits_per_byte": loss / 2}, kind="validation")
    metrics.close()
    return directory


def colors_in(picture: Path) -> set[tuple[int, int, int]]:
    import matplotlib.image

    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(np.int64)
    packed = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1]))
    return {(int(c) >> 16, int(c) >> 8 & 255, int(c) & 255) for c in packed}


def rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def test_smoothing_keeps_straight_lines_and_skips_gaps() -> None:
    line = np.linspace(5.0, 1.0, 400)
    half = 400 // 100
    np.testing.assert_allclose(smooth(line)[:-half], line[:-half], rtol=1e-12)
    noisy = line.copy()
    noisy[200] = np.nan
    assert np.isfinite(smooth(noisy)).all()
    assert abs(smooth(noisy)[200] - line[200]) < 1e-9
    short = np.array([3.0, np.nan, 1.0])
    np.testing.assert_array_equal(smooth(short), short)


def test_figures_of_one_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "default", broken_step=30)
    assert main([str(run)]) == 0
    assert rgb(COLORS[0]) in colors_in(run / "plot.png")
    assert plot_loss(run) == run / "loss.png"
    assert rgb(COLORS[0]) in colors_in(run / "loss.png")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of figures that a test draws; none is written."""
    drawn_figures: list[Any] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, out: drawn_figures.append(figure))
    return drawn_figures


def drawn(axes: Any) -> list[list[tuple[float, float]]]:
    """Return the points of each line."""
    lines = (zip(*line.get_data(), strict=True) for line in axes.lines)
    return [[(float(x), float(y)) for x, y in line] for line in lines]


def test_panels_hold_their_columns(tmp_path: Path, figures: list[Any]) -> None:
    runs = []
    for name, offset in (("a", 0), ("b", 100)):
        metrics = MetricsLogger(tmp_path / name, total_steps=3, progress_bar=False)
        for step in (1, 2, 3):
            values = {"loss": 9 - step, "learning_rate": step / 1000, "gradient_norm": 2.0**step, "tokens": 64 * step}
            metrics.log(step, {**values, "tokens_per_second": 5000.0 + step + offset})
        for step, loss in ((2, 7.5), (3, 6.5)):
            metrics.log(step, {"loss": loss, "tokens": 64 * step, "bits_per_byte": 1.25}, kind="validation")
            metrics.log(step, {"s/x": 40.0, "s/x ppl": 900.0, "s/average": 50.0 + step + offset}, kind="evaluation")
        metrics.close()
        runs.append(tmp_path / name)
    plot_runs(runs, Path())
    plot_runs(runs[:1], Path())
    panels = {(axes.get_title(loc="left"), axes.get_xlabel()): axes for axes in figures[0].axes}
    loss = [(1, 8), (2, 7), (3, 6)]
    assert drawn(panels["loss (nats per token)", "step"])[:3] == [loss, loss, [(2, 7.5), (3, 6.5)]]
    by_tokens = [[(64 * x, y) for x, y in line] for line in (loss, [(2, 7.5), (3, 6.5)])]
    assert drawn(panels["loss (nats per token)", "tokens"])[:3] == [by_tokens[0], *by_tokens]
    assert drawn(panels["tokens per second", "step"])[2] == [(1, 5101), (2, 5102), (3, 5103)]
    assert panels["tokens per second", "step"].get_ylim() == pytest.approx((0, 1.15 * 5103))
    assert drawn(panels["learning rate", "step"])[0] == [(1, 0.001), (2, 0.002), (3, 0.003)]
    assert drawn(panels["gradient norm", "step"])[0] == [(1, 2), (2, 4), (3, 8)]
    assert drawn(panels["s, average, percent", "step"]) == [[(2, 52), (3, 53)], [(2, 152), (3, 153)]]
    (key,) = figures[0].legends
    words = "   validation loss 6.500, 1.250 bits per byte"
    assert [text.get_text() for text in key.get_texts()] == [f"a{words}", f"b{words}"]
    scores = next(axes for axes in figures[1].axes if axes.get_title(loc="left") == "s, percent")
    assert [text.get_text() for text in scores.texts] == ["x", "average"]  # no perplexity
    assert drawn(scores) == [[(2, 40), (3, 40)], [(2, 52), (3, 53)]]


def test_validations_of_the_whole_set_have_their_own_marker(tmp_path: Path, figures: list[Any]) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=3, progress_bar=False)
    for step, fraction in ((1, 0.1), (2, 0.1), (3, 1.0)):
        metrics.log(step, {"loss": 9.0 - step, "tokens": step})
        metrics.log(step, {"loss": 7.5 - step, "tokens": step, "evaluated_fraction": fraction}, kind="validation")
    metrics.close()
    plot_loss(tmp_path)
    axes = figures[0].axes[0]
    assert drawn(axes)[2:] == [[(1, 6.5), (2, 5.5)], [(3, 4.5)]]
    assert axes.lines[2].get_marker() != axes.lines[3].get_marker()
    assert axes.get_legend().get_frame_on(), "a curve behind the text would cross it"
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[2:] == ["validation, part of the set", "validation, whole set"]


def test_accuracy_of_a_masked_model_is_in_percent(tmp_path: Path, figures: list[Any]) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=2, progress_bar=False)
    for step in (1, 2):
        metrics.log(step, {"loss": 5.0 - step, "accuracy": step / 4, "tokens": step})
    metrics.log(2, {"loss": 4.0, "accuracy": 0.4, "tokens": 2}, kind="validation")
    metrics.close()
    plot_loss(tmp_path, baseline=0.1)
    axes = figures[0].axes[1]
    values = drawn(axes)
    assert values[:3] == [[(1, 0.25), (2, 0.5)], [(1, 0.25), (2, 0.5)], [(2, 0.4)]]
    assert {y for _, y in values[3]} == {0.1}
    assert axes.yaxis.get_major_formatter()(0.25) == "25%"
    assert axes.get_ylim()[0] == 0
    # Ticks of a small range, such as 2.5 %, are not rounded.
    axes.set_ylim(0, 0.2)
    ticks = axes.get_yticks()
    labels = axes.yaxis.get_major_formatter().format_ticks(ticks)
    assert [float(label.rstrip("%")) for label in labels] == pytest.approx(list(100 * ticks))


def test_loss_of_image_classifiers_is_per_image_and_scores_without_average_are_named(
    tmp_path: Path, figures: list[Any]
) -> None:
    for name in ("a", "b"):
        metrics = MetricsLogger(tmp_path / name, total_steps=1, progress_bar=False)
        metrics.log(1, {"loss": 2.0, "tokens": 64, "images_per_second": 4.0})
        metrics.log(1, {"loss": 2.0, "top5_accuracy": 0.5, "tokens": 64}, kind="validation")
        metrics.log(1, {"s/x": 40.0}, kind="evaluation")
        metrics.close()
    plot_runs([tmp_path / "a", tmp_path / "b"], Path())
    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert titles[:2] == ["loss (nats per image)"] * 2
    assert titles[-1] == "s, percent"


def test_axis_numbers_are_plain() -> None:
    numbers = (0.25, 8192, 65536, 15000, 2.5e6, 3e9, 4e12, 2e16)
    assert [style.plain_number(n) for n in numbers] == ["0.25", "8192", "64 Ki", "15 k", "2.5 M", "3 B", "4 T", "20 P"]
    assert [run_curves._scientific(n) for n in (0, 0.25, 3e-4, 1.25e-5)] == ["0", "0.25", "3e-4", "1.25e-5"]


def test_labels_are_beside_the_last_finite_points(figures: list[Any]) -> None:
    with style.saved_figure(Path()) as (_, axes):
        for label, values in (("upper", [1, 3, math.nan]), ("lower", [1, 1, 0]), ("none", [math.nan] * 3)):
            axes.plot([1, 2, 3], values, label=label)
        style.log_axes(axes, "y")
        style.label_lines(axes)
    assert [(text.get_text(), tuple(text.xy)) for text in axes.texts] == [("lower", (3, 0)), ("upper", (2, 3))]
    assert all(0 <= text.xyann[1] <= 1 for text in axes.texts)
    leaders = {text.get_text(): text.arrow_patch.get_linestyle() for text in axes.texts}
    assert leaders == {"lower": "-", "upper": ":"}, "the leader of a line that ends early is no part of the line"


def test_loss_axis_excludes_the_first_two_percent(tmp_path: Path, figures: list[Any]) -> None:
    run = write_run(tmp_path / "run", steps=100)
    plot_loss(run)
    low, high = figures[0].axes[0].get_ylim()
    losses = smooth(np.array([2 + 6 / step + 0.05 * math.sin(step) for step in range(1, 101)]))
    margin = 0.06 * (losses[2] - losses.min())
    assert high == pytest.approx(losses[2] + margin)
    assert low == pytest.approx(losses.min() - margin)


def test_token_axis_follows_the_steps(tmp_path: Path, figures: list[Any]) -> None:
    """Include a growing batch."""
    metrics = MetricsLogger(tmp_path, total_steps=100, progress_bar=False)
    for step in range(10, 101, 10):
        tokens = 100 * step if step <= 50 else 5000 + 900 * (step - 50)
        metrics.log(step, {"loss": 2 + 1 / step, "tokens": tokens})
    metrics.close()
    plot_loss(tmp_path)
    axes = figures[0].axes[0]
    (top,) = axes.child_axes
    for step, tokens in ((5, 500), (50, 5000), (60, 14000), (110, 59000)):
        axes.set_xlim(-10, step)
        figures[0].draw_without_rendering()
        assert top.get_xlim() == pytest.approx((-1000, tokens))


def test_loss_figure_of_an_image_classifier_names_images(tmp_path: Path, figures: list[Any]) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=4, progress_bar=False)
    for step in range(1, 5):
        speed = {"tokens_per_second": 6400.2, "images_per_second": 100.0}
        metrics.log(step, {"loss": 2.0, "accuracy": 0.5, "tokens": 640 * step, **speed})
    metrics.close()
    plot_loss(tmp_path)
    axes = figures[0].axes[0]
    (top,) = axes.child_axes
    assert top.get_xlabel() == "images"
    assert axes.get_ylabel() == "loss (nats per image)", "before the first validation too"
    assert figures[0].axes[1].get_title(loc="left") == "top-1 accuracy"
    axes.set_xlim(0, 4)
    figures[0].draw_without_rendering()
    assert top.get_xlim() == pytest.approx((0, 40))


@pytest.mark.parametrize("steps", [2, 20])
def test_steps_are_whole_numbers(tmp_path: Path, figures: list[Any], steps: int) -> None:
    run = write_run(tmp_path / "short", steps=steps)
    plot_loss(run)
    plot_runs([run], tmp_path / "plot.png")
    ticks = [axes.get_xticks() for figure in figures for axes in figure.axes if axes.get_xlabel() == "step"]
    assert len(ticks) == 5
    assert all((of_one == of_one.round()).all() for of_one in ticks)


def test_several_runs_have_different_colors(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, floor=2 + i / 4) for i, name in enumerate(("a", "b", "c"))]
    out = plot_runs(runs, tmp_path / "pictures" / "all.png")
    shown = colors_in(out)
    assert {rgb(color) for color in COLORS[:3]} <= shown
    assert rgb(COLORS[3]) not in shown


def test_pdf_of_a_metrics_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run / "metrics.jsonl"), "-o", str(tmp_path / "out.pdf")]) == 0
    assert (tmp_path / "out.pdf").read_bytes().startswith(b"%PDF")


def test_figure_of_one_step_without_validation(tmp_path: Path) -> None:
    run = write_run(tmp_path / "short", steps=1)
    assert plot_loss(run).stat().st_size > 5000
    assert plot_runs([run], tmp_path / "short.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/run", "y/run/metrics.jsonl"], ["x/run", "y/run"]),
        (["runs/a"], ["a"]),
    ],
)
def test_distinct_names_of_runs(paths: list[str], names: list[str], tmp_path: Path) -> None:
    (tmp_path / "y" / "run").mkdir(parents=True)
    (tmp_path / "y" / "run" / "metrics.jsonl").touch()
    assert distinct_names([tmp_path / path for path in paths]) == names


def test_runs_without_steps_and_invalid_outputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "b", "c", "d", "e", "present"):
        (runs / name).mkdir(parents=True)
        (runs / name / "metrics.jsonl").touch()
    (runs / "presnt_cache").mkdir()
    assert main([str(runs / "presnt")]) == 2
    assert f"no metrics there (beside it: {runs / 'present'}, {runs / 'e'}, " in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "no training step is logged there yet" in capsys.readouterr().err
    run = write_run(tmp_path / "run", steps=2)
    assert main([str(run), "-o", str(tmp_path / "out.docx")]) == 2
    assert "out.docx: the name must end in an image format" in capsys.readouterr().err
    # Matplotlib would write tmp_path.png.
    assert main([str(run), "-o", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err
