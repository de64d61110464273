"""Plot the curves of one or several runs: loss, throughput, learning rate, gradient norm and suite scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.metrics.logger import read_metrics
from tools.reporting.style import COLORS, GRAY, label_lines, log_axes, plain_number, saved_figure, series_style


@dataclass(frozen=True)
class Run:
    """Hold the lines of one run's metrics by kind."""

    name: str
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    evaluation: list[dict[str, Any]]
    sample: list[dict[str, Any]]


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run's folder or `metrics.jsonl`. Raises FileNotFoundError, or ValueError if no step is logged."""
    lines = read_metrics(path)
    kinds = ("train", "validation", "evaluation", "sample")
    run = Run(name or path.name, *([line for line in lines if line.get("kind") == kind] for kind in kinds))
    if not run.train:
        raise ValueError(f"{path}: no training step is logged there yet; wait for the first ones")
    return run


def column(lines: Sequence[dict[str, Any]], key: str) -> NDArray[np.float64]:
    """Return the values of one key, one per line; NaN if a line does not have the key."""
    return np.array([line.get(key, math.nan) for line in lines], dtype=np.float64)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moving average over 2 % of the points, at least five, without NaN.

    The window is centred. At the start, where the loss falls fast, the window shrinks on both sides, which avoids a shift. At
    the end only its later half shrinks, so that the last value is an average too.
    """
    half = max(2, len(values) // 100) if len(values) > 20 else 0
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    reach = np.minimum(half, index)
    low, high = index - reach, np.minimum(index + reach + 1, len(values))
    known = count[high] - count[low]
    return np.where(known > 0, (total[high] - total[low]) / np.maximum(known, 1), np.nan)


def plot_loss(run: Path, *, baseline: float | None = None) -> Path:
    """Plot the loss of one run against steps, with tokens or images on the upper axis, to `run/loss.png`.

    A second panel shows the accuracy, which masked models and image classifiers log. baseline: accuracy of the unigram
    model, drawn as a dotted line. Raises FileNotFoundError and ValueError as `read_run`.
    """
    from scipy.interpolate import make_interp_spline

    data = read_run(run)
    out = run / "loss.png"
    has_accuracy = any("accuracy" in line for line in data.train)
    with saved_figure(out, 1, 1 + has_accuracy, squeeze=False) as (_, panels):
        axes = panels[0, 0]
        if has_accuracy:
            _draw_accuracy(panels[0, 1], data, baseline)
        _draw_loss(axes, data, COLORS[0], "step", faint=0.25)
        _limit_loss(axes, [data])
        axes.set(xlabel="step", ylabel=_loss_label([data]), title=f"{data.name}{_result(data)}")
        steps, tokens = (np.concatenate([[0.0], column(data.train, key)]) for key in ("step", "tokens"))
        if (np.diff(tokens) > 0).all() and (np.diff(steps) > 0).all():
            last, unit = data.train[-1], "tokens"
            if _classifies(data):
                unit, tokens = "images", tokens / round(last["tokens_per_second"] / last["images_per_second"])
            # Lines through the points, which continue at both ends.
            ways = [make_interp_spline(x, y, k=1) for x, y in ((steps, tokens), (tokens, steps))]
            top = axes.secondary_xaxis("top", functions=tuple(ways))
            top.xaxis.set_major_formatter(plain_number)
            top.set_xlabel(unit)
        for panel in panels.flat:
            panel.xaxis.set_major_locator(_whole_numbers())
        _legend_of_styles(axes, [data])
    return out


def plot_runs(runs: Sequence[Path], out: Path) -> Path:
    """Plot all curves of all runs to `out`, whose suffix selects the format (png, pdf, svg).

    Raises FileNotFoundError and ValueError as `read_run`.
    """
    from matplotlib.lines import Line2D

    data = [read_run(path, name) for path, name in zip(runs, distinct_names(runs), strict=True)]
    suites = dict.fromkeys(key.partition("/")[0] for run in data for key in _scores(run))
    score_rows = -(-len(suites) // 2)
    with saved_figure(out, 0, height=6.6 + 3.0 * score_rows) as (figure, _):
        grid = figure.add_gridspec(2 + score_rows, 6, height_ratios=[1.5, 1.0, *[1.2] * score_rows])
        by_step, by_tokens = figure.add_subplot(grid[0, :3]), figure.add_subplot(grid[0, 3:])
        speed, rate, norm = (figure.add_subplot(grid[1, 2 * i : 2 * i + 2]) for i in range(3))
        faint = 0.25 if len(data) == 1 else 0.12
        for number, run in enumerate(data):
            color = series_style(number)["color"]
            _draw_loss(by_step, run, color, "step", faint)
            _draw_loss(by_tokens, run, color, "tokens", faint)
            _draw(speed, run, color, "tokens_per_second", faint)
            _draw(norm, run, color, "gradient_norm", faint)
            rate.plot(column(run.train, "step"), column(run.train, "learning_rate"), color=color)
        for axes in (by_step, by_tokens):
            _limit_loss(axes, data)
        for axes in (by_step, by_tokens, speed, rate, norm):
            axes.xaxis.set_major_locator(_whole_numbers())
            axes.xaxis.set_major_formatter(plain_number)
        speed.yaxis.set_major_formatter(plain_number)
        _limit_robust(speed, [column(run.train, "tokens_per_second") for run in data])
        rate.set_ylim(bottom=0)
        rate.yaxis.set_major_formatter(_scientific)
        if any((column(run.train, "gradient_norm") > 0).any() for run in data):
            log_axes(norm, "y")
        by_step.set(xlabel="step", title=_loss_label(data))
        by_tokens.set(xlabel="tokens", title=_loss_label(data))
        speed.set(xlabel="step", title="tokens per second")
        rate.set(xlabel="step", title="learning rate")
        norm.set(xlabel="step", title="gradient norm")
        _legend_of_styles(by_tokens, data)
        for i, suite in enumerate(suites):
            _draw_scores(figure.add_subplot(grid[2 + i // 2, 3 * (i % 2) : 3 * (i % 2) + 3]), data, suite)
        handles = [Line2D([], [], color=series_style(i)["color"], lw=2.5) for i in range(len(data))]
        labels = [run.name + _result(run) for run in data]
        figure.legend(handles, labels, loc="outside upper left", ncols=1 if len(data) == 1 else 2, fontsize=9.5)
    return out


def run_folder(run: Path) -> Path:
    """Return the folder of a run that is named by its folder or its metrics.jsonl."""
    return run.parent if run.is_file() else run


def distinct_names(runs: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the runs, without `metrics.jsonl`."""
    parts = [run_folder(run).resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return names


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True)


def _draw_loss(axes: Any, run: Run, color: str, x: str, faint: float) -> None:
    _draw(axes, run, color, "loss", faint, x=x)
    _draw_validation(axes, run, color, "loss", x)


def _draw_validation(axes: Any, run: Run, color: str, key: str, x: str) -> None:
    for name in validation_names([run]):
        lines = [line for line in run.validation if _validation_name(line) == name]
        axes.plot(column(lines, x), column(lines, key), color=color, **_marker(name, color), zorder=4)


def _validation_name(line: dict[str, Any]) -> str:
    fraction = line.get("evaluated_fraction")
    return "validation" + ("" if fraction is None else ", whole set" if fraction == 1 else ", part of the set")


def validation_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the validation sets that the runs used: the whole set, a part of it, or unknown."""
    return sorted({_validation_name(line) for run in runs for line in run.validation})


def _marker(name: str, color: str) -> dict[str, Any]:
    whole = name.endswith("whole set")
    return {"lw": 0, "marker": "D" if whole else "o", "ms": 4.5, "mfc": color if whole else "white", "mew": 1.4}


def _draw_accuracy(axes: Any, run: Run, baseline: float | None) -> None:
    from matplotlib.ticker import PercentFormatter

    _draw(axes, run, COLORS[0], "accuracy", 0.25)
    _draw_validation(axes, run, COLORS[0], "accuracy", "step")
    if baseline is not None and math.isfinite(baseline):
        axes.axhline(baseline, color=GRAY, ls=":", lw=1.2, label="the most frequent token")
        axes.legend(loc="lower right")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="step", title="top-1 accuracy" if _classifies(run) else "masked-token accuracy")


def _classifies(run: Run) -> bool:
    """Return whether the run trained an image classifier."""
    return "images_per_second" in run.train[-1]


def _loss_label(runs: Sequence[Run]) -> str:
    return f"loss (nats per {'image' if all(map(_classifies, runs)) else 'token'})"


def _draw(axes: Any, run: Run, color: str, key: str, faint: float, x: str = "step") -> None:
    position, values = column(run.train, x), column(run.train, key)
    if np.isfinite(values).any():
        axes.plot(position, values, color=color, alpha=faint, lw=0.7, zorder=2)
        axes.plot(position, smooth(values), color=color, zorder=3)


def _scores(run: Run) -> list[str]:
    """Return the names of the scores, "suite/label". Perplexities are left out, because their unit differs."""
    keys = dict.fromkeys(key for line in run.evaluation for key in line if "/" in key)
    return [key for key in keys if not key.endswith(("ppl", "perplexity"))]


def _draw_scores(axes: Any, runs: Sequence[Run], suite: str) -> None:
    """Plot a suite against steps: all scores of one run; for several runs the average, or all scores without one."""
    for number, run in enumerate(runs):
        keys = [key for key in _scores(run) if key.partition("/")[0] == suite]
        averages = [key for key in keys if key.endswith("/average")]
        for i, key in enumerate((averages or keys) if len(runs) > 1 else keys):
            style = series_style(i) if len(runs) == 1 else {"color": series_style(number)["color"], "marker": "o"}
            style |= {"lw": 1.0, "ms": 2.5}
            if key in averages:
                style |= {"lw": 2.4, "ls": "-"} | ({"color": "black"} if len(runs) == 1 else {})
            axes.plot(column(run.evaluation, "step"), column(run.evaluation, key), label=key.partition("/")[2], **style)
    axes.xaxis.set_major_formatter(plain_number)
    shows_average = len(runs) > 1 and any(f"{suite}/average" in _scores(run) for run in runs)
    axes.set(xlabel="step", title=f"{suite}, average, percent" if shows_average else f"{suite}, percent")
    if len(runs) == 1:
        label_lines(axes, size=7)


def _limit_loss(axes: Any, runs: Sequence[Run]) -> None:
    """Limit the loss axis to the values after the first 2 % of each run, where the loss falls from its initial value."""
    late = [smooth(column(run.train, "loss"))[len(run.train) // 50 :] for run in runs]
    points = [column(run.validation, "loss") for run in runs if run.validation]
    shown = np.concatenate([*late, *points])
    shown = shown[np.isfinite(shown)]
    if shown.size and shown.max() > shown.min():
        margin = 0.06 * (shown.max() - shown.min())
        axes.set_ylim(shown.min() - margin, shown.max() + margin)


def _limit_robust(axes: Any, values: Sequence[NDArray[np.float64]]) -> None:
    """Set the axis from zero to 1.15 times the highest smoothed value, so that outliers do not matter."""
    tops = [np.nanmax(smooth(v)) for v in values if np.isfinite(v).any()]
    if tops:
        axes.set_ylim(0, 1.15 * max(tops))


def _legend_of_styles(axes: Any, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=GRAY, lw=0.8, alpha=0.4), Line2D([], [], color=GRAY, lw=1.5)]
    labels = ["training, every logged step", "training, smoothed"]
    for name in validation_names(runs):
        handles.append(Line2D([], [], color=GRAY, **_marker(name, GRAY)))
        labels.append(name)
    # A background, because the curve of a short or noisy run passes behind the text.
    axes.legend(handles, labels, loc="upper right", fontsize=8, frameon=True, framealpha=0.85, edgecolor="none")


def _result(run: Run) -> str:
    if not run.validation:
        return ""
    last = run.validation[-1]
    text = f"   validation loss {last.get('loss', math.nan):.3f}"
    if _classifies(run):
        text += f", top-1 accuracy {last.get('accuracy', math.nan):.2%}"
    return text + (f", {last['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in last else "")


def _scientific(value: float, _position: int | None = None) -> str:
    if value == 0 or abs(value) >= 0.1:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
