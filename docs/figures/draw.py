"""Draw the figures of docs/results from the tables of its pages and from docs/results/*.jsonl.

python -m docs.figures.draw [FOLDER]     # default: docs/figures

The figure of the first run comes from tools.plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.benchmark.report import plot_bars, plot_lines
from tools.evaluation.cells import draw_cells
from tools.reporting.style import COLORS, grouped_bars, label_lines, log_axes, saved_figure, series_style
from tools.synthetic.experiment import load_experiment, plan, sweeps
from tools.synthetic.learning_curves import draw_curves
from tools.synthetic.report import draw_results, scores
from tools.synthetic.results import Results

RESULTS = Path(__file__).parents[1] / "results"
H200 = "one H200"
Row = dict[str, str]


def table(page: str, *columns: str) -> list[Row]:
    """Return the rows of the first table of a page that has these columns.

    Raises:
        ValueError: no such table.
    """
    header: list[str] = []
    rows: list[Row] = []
    for line in [*(RESULTS / page).read_text(encoding="utf-8").splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if rows:
                return rows
            header = []
        elif not header:
            header = cells
        elif set(columns) <= set(header) and not line.startswith("|---"):
            rows.append(dict(zip(header, cells, strict=True)))
    raise ValueError(f"{page} has no table with the columns {columns}")


def number(cell: str) -> float | None:
    """Return the first number of a cell, None for a cell without one."""
    text = cell.replace(",", "").split(" ")[0]
    try:
        return float(text)
    except ValueError:
        return None


def lengths(row: Row, suffix: str = "") -> dict[int, float]:
    """Return {length: number} of the columns whose names are lengths."""
    values = {
        column.removesuffix(suffix).replace(",", ""): number(cell)
        for column, cell in row.items()
        if column.endswith(suffix)
    }
    return {int(length): value for length, value in values.items() if length.isdigit() and value is not None}


def train(out: Path) -> None:
    rows = table("training.md", "8 x 2048, tokens/s", "1 x 16384, tokens/s")
    names = {"`metalion`": "MetaLA (metalion)"}
    shapes = ("8 x 2048", "1 x 16384")
    with saved_figure(out, height=3.2) as (figure, axes):
        bars = [
            (
                names.get(row["model"], row["model"]),
                {shape: (number(row[f"{shape}, tokens/s"]), None) for shape in shapes},
            )
            for row in rows
        ]
        grouped_bars(axes, shapes, bars)
        for container in axes.containers:
            axes.bar_label(container, fmt="{:,.0f}", fontsize=8, padding=2)
        axes.set(xlabel="sequences x tokens", ylabel="tokens per second")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.suptitle(f"Training of models with 1.4 billion parameters, {H200}")


def layouts(out: Path) -> None:
    rows = [
        {"method": row["layout"], "tokens": number(row["tokens/s"]), "memory": number(row["GiB per GPU"])}
        for row in table("layouts.md", "layout", "tokens/s")
    ]
    plot_bars(
        out, rows, {"tokens": "tokens per second", "memory": "GiB per GPU"}, "MetaLA 1.4B by layout, up to four H200"
    )


def kernels(out: Path) -> None:
    names = {"SDPA": "softmax attention (SDPA)", "LION-s": "LION-s, kernels", "PyTorch": "LION-s, PyTorch"}
    rows = [
        {
            "method": name,
            "length": int(row["length x batch"].split()[0]),
            "ms": number(row[f"{key} replayed"]),
            "GiB": number(row[f"{key} GiB"]),
        }
        for key, name in names.items()
        for row in table("kernels.md", "SDPA replayed")
    ]
    panels = {"ms": "milliseconds, forward and backward", "GiB": "GiB"}
    plot_lines(out, rows, panels, f"Bidirectional attention, 16 heads of 64 channels, {H200}")


def masked_step(out: Path) -> None:
    """Draw step times of masked models over that of softmax attention; one row per shape, with CUDA graphs where measured."""
    shapes: dict[str, Row] = {}
    for row in table("masked_lm.md", "length x batch", "CUDA graphs"):
        shapes.setdefault(row["length x batch"], row)
    with saved_figure(out, height=3.2) as (figure, axes):
        for index, model in enumerate(("LION-s", "LION-d", "LION-lit")):
            ratios = [number(row[model]) for row in shapes.values()]
            places = [place + 0.16 * (index - 1) for place in range(len(shapes))]
            axes.plot(places, ratios, label=model, **{**series_style(index), "ls": ""})
        axes.axhline(1, color="#555555", lw=1)
        axes.set_xticks(range(len(shapes)), list(shapes))
        axes.set(xlabel="length x batch", ylabel="step time / softmax attention's", ylim=(0, 1.15))
        axes.legend(loc="lower left")
        figure.suptitle(f"Training step in the shape of BERT-large, {H200}")


def masked_forms(out: Path) -> None:
    rows = [
        {"method": row["form"], "length": length, "ms": time, "MiB": lengths(row, ", MiB")[length]}
        for row in table("masked_lm.md", "form", "128, ms")
        for length, time in lengths(row, ", ms").items()
    ]
    panels = {"ms": "milliseconds, forward", "MiB": "MiB"}
    plot_lines(out, rows, panels, f"Forms of LION-s in the shape of BERT-base, float32, {H200}")


def over_length(out: Path, page: str, columns: tuple[str, ...], trained: int, label: str, title: str) -> None:
    """Draw a value per model over the length of the context. A model measured at two lengths has markers only."""
    rows = table(page, "model", *columns)
    with saved_figure(out, height=3.2) as (figure, axes):
        for index, row in enumerate(rows):
            values = lengths(row)
            style = series_style(index) | ({"ls": ""} if len(values) == 2 else {})
            axes.plot(values.keys(), values.values(), label=row["model"], **style)
        log_axes(axes, "x", lengths(dict.fromkeys(rows[0], "1")))
        axes.axvline(trained, color="#555555", lw=1, ls=":")
        axes.set(xlabel="context length, tokens (dotted: trained length)", ylabel=label)
        label_lines(axes)
        figure.suptitle(title)


def needles(out: Path) -> None:
    """Draw the share of needles found per model and depth as a heat map."""
    rows = table("long_context.md", "found, %", "0", "100")
    depths = [*lengths(rows[0])]
    with saved_figure(out, height=2.6, style={"axes.grid": False}) as (figure, axes):
        found = np.array([[*lengths(row).values()] for row in rows])
        draw_cells(axes, found, [row["found, %"] for row in rows], depths, limits=(0, 100), digits=0)
        axes.set(xlabel="depth of the needle, % of the text")
        figure.suptitle("Single needles found in texts of 16,384 tokens, %, models of 31 M parameters")


def language_models(out: Path) -> None:
    rows = table("language_models.md", "model", "27.3 M")
    sizes = ("3.4 M", "10.6 M", "27.3 M")
    with saved_figure(out, 1, 3, height=3.4, sharey=True) as (figure, axes):
        for axis, size in zip(axes, sizes, strict=True):
            for place, row in enumerate(reversed(rows)):
                mean, deviation = (float(part) for part in row[size].split(" ± "))
                color = COLORS["MetaLA" not in row["model"]]
                axis.errorbar(mean, place, xerr=deviation, fmt="o", color=color, capsize=2)
            axis.set(title=f"{size} parameters", xlabel="validation loss, nats per token")
        axes[0].set_yticks(range(len(rows)), [row["model"] for row in reversed(rows)])
        figure.suptitle(
            "Models of equal size, mean and standard deviation over three seeds (blue: MetaLA and its variants)"
        )


def synthetic(out: Path, suite: str, *overrides: str, curves: bool = False) -> None:
    """Draw the results of docs/results/<suite>.jsonl, or the training curves of the best runs."""
    experiment = load_experiment(suite, overrides)
    results = Results(RESULTS / f"{suite}.jsonl")
    grouped = sweeps(plan(experiment, "bf16"))
    if curves:
        draw_curves(experiment, grouped, results, out)
    else:
        draw_results(experiment, scores(experiment, grouped, results), out)


PAIRS_64 = ("tasks=[512x64]", "more_lrs.tasks=[]", "widths=[64,128,256]", "lrs=[1e-4,4.6416e-4,1e-3,2.1544e-3]")
PAIRS_80 = ("tasks=[512x80]", "more_lrs.tasks=[]", "lrs=[2.1544e-4,4.6416e-4,1e-3,2.1544e-3]")
LION_LISTOPS = (
    "weight_decays: [0.01], epochs: 64, epoch_steps: 480, batch_size: 50, warmup_steps: 1920, evaluate_every: 4, "
    "network: {num_layers: 6, intermediate_size: 64, norm: batchnorm, first_weights: pytorch}"
)
LISTOPS = (
    *("tasks=[listops]", "models=[metala,lion_grfa,lion_s_unscaled,lion_s_hippo]"),
    *(f"settings.listops.recipes.metala.{value}" for value in ("epochs=60", "warmup_steps=4500", "evaluate_every=2")),
    *(f"definitions.{model}.mixer_options.lion.decay_init=hippo" for model in ("lion_s_unscaled", "lion_s_hippo")),
    f"settings.listops.recipes.lion_s_unscaled={{widths: [64], lrs: [5e-4,1e-3], {LION_LISTOPS}}}",
    f"settings.listops.recipes.lion_s_hippo={{widths: [64], lrs: [1e-3,2e-3], {LION_LISTOPS}}}",
)
PATH_X = (
    "widths: [64], lrs: [1e-3], batch_size: 32, epochs: 32, evaluate_every: 2, warmup_steps: 500, "
    "network: {intermediate_size: 32, norm: batchnorm, first_weights: pytorch, positions: sinusoidal}"
)
PATHS = (
    *("tasks=[pathfinder,path_x]", "models=[metala_hippo,lion_grfa]"),
    f"settings.path_x.recipes.metala_hippo={{{PATH_X}}}",
    "settings.path_x.data.train_examples=32000",
    *(f"settings.path_x.data.{split}_examples=2000" for split in ("validation", "test")),
)
FIGURES: dict[str, Callable[[Path], None]] = {
    "train_h200.png": train,
    "layouts_h200.png": layouts,
    "kernels_h200.png": kernels,
    "masked_h200.png": masked_step,
    "masked_forms_h200.png": masked_forms,
    "masked_length.png": lambda out: over_length(
        out, "masked_lm.md", ("128", "8192"), 128, "masked-token accuracy, %", "Masked models in the shape of BERT-base"
    ),
    "length_h200.png": lambda out: over_length(
        out, "language_models.md", ("512", "16,384"), 512, "loss, nats per token", "Models of 27.3 M parameters"
    ),
    "ruler_cpu.png": lambda out: over_length(
        out, "long_context.md", ("320", "1,024"), 320, "single needles found, %", "Models of 0.85 M parameters"
    ),
    "ruler.png": needles,
    "compare_lm.png": language_models,
    "mad.png": lambda out: synthetic(out, "mad", "models=[metala]"),
    "mqar.png": lambda out: synthetic(out, "mqar", *PAIRS_64),
    "mqar_learning_curves.png": lambda out: synthetic(out, "mqar", *PAIRS_64, curves=True),
    "mqar_512x64_no_mlp.png": lambda out: synthetic(
        out, "mqar", *PAIRS_64, "widths=[128]", "network.mlp=identity", curves=True
    ),
    "mqar_512x80.png": lambda out: synthetic(out, "mqar", *PAIRS_80, "seeds=[0,1,2]", curves=True),
    "lra_listops.png": lambda out: synthetic(out, "lra", *LISTOPS, curves=True),
    "lra_paths.png": lambda out: synthetic(out, "lra", *PATHS, curves=True),
}


def main(folder: Path) -> None:
    """Write every figure to a folder."""
    for name, draw in FIGURES.items():
        draw(folder / name)
        print(folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m docs.figures.draw", description="Draw the figures of docs/results."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent, help="default: docs/figures")
    main(parser.parse_args().folder)
