"""The tables of docs/results/synthetic.md agree with the runs in docs/results/*.jsonl."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "results" / "synthetic.md").read_text(encoding="utf-8")
MODELS = {
    "attention": "attention",
    "MetaLA": "metala",
    "MetaLA, no self-augmentation": "metala_no_augmentation",
    "MetaLA, no convolution": "metala_no_convolution",
    "MetaLA with keys, fixed decay": "metala_fixed_decay",
    "GLA": "gla",
    "Mamba-2": "mamba2",
    "Based's linear attention": "based",
    "LION-s, causal": "lion_s",
}


def lines(suite: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DOCS / "results" / f"{suite}.jsonl").read_text().splitlines()]


def table(after: str) -> list[list[str]]:
    """Return the cells of the first table after a text, without the header."""
    rows = re.search(r"^\|.*?(?=\n\n)", PAGE[PAGE.index(after) :], re.MULTILINE | re.DOTALL)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def rate(lr: float) -> str:
    return re.sub(r"(\.0)?e-0", "e-", f"{lr:.1e}")


@pytest.mark.parametrize(
    ("after", "task", "mlp", "widths"),
    [
        ("### Length 512, 64 pairs", "512x64", "gelu", (64, 128, 256)),
        ("**Without MLPs**", "512x64", "identity", (128,)),
        ("### Length 256, 16 pairs", "256x16", "gelu", (64, 128, 256)),
    ],
)
def test_mqar(after: str, task: str, mlp: str, widths: tuple[int, ...]) -> None:
    runs = [run for run in lines("mqar") if run["task"] == task and run["network"]["mlp"] == mlp]
    for name, *cells in table(after):
        model, _, dropout = name.partition(", without dropout")
        dropped = 0.1 if model == "attention" and not dropout else 0
        for width, cell in zip(widths, cells, strict=False):
            matches = [
                run
                for run in runs
                if (run["model"], run["width"]) == (MODELS[model], width)
                and len(run["network"]["mixers"]) == 1
                and run["network"].get("attention_dropout", 0) == dropped
            ]
            if "cut at" in cell:
                assert not matches, f"{name}, {width}: has completed runs"
                continue
            best = max(matches, key=lambda run: run["accuracy"])
            assert cell == f"{100 * best['accuracy']:.1f} ({rate(best['lr'])}, {best['epochs']})", f"{name}, {width}"


def test_mad() -> None:
    best: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for run in lines("mad"):
        as_configured = run["network"]["num_heads"] == 2 and not run["network"].get("mixer_options")
        if run["model"] == "metala" and run["precision"] == "bf16" and as_configured:
            settings = best[run["task"].partition("/")[0]]
            settings[run["task"]] = max(settings[run["task"]], 100 * run["accuracy"])
    tasks = ("in_context_recall", "noisy_recall", "memorization", "compression", "selective_copying", "fuzzy_recall")
    means = [mean(best[task].values()) for task in tasks]
    _, *shown = table("## MAD\n")[0]
    assert shown == [f"{value:.1f}" for value in [*means, mean(means)]]


def test_documented_drops_of_selective_copying() -> None:
    falls: defaultdict[str, list[int]] = defaultdict(list)
    for run in lines("mad"):
        accuracies = run["history"]
        many = sum(a - b > 0.25 for a, b in pairwise(accuracies))
        falls[run["model"] if run["task"].startswith("selective_copying") else "elsewhere"].append(many)
    match = re.search(r"in (\d+) of MetaLA's (\d+) runs of selective copying .*?\((\d+) of GLA's (\d+)\)", PAGE)
    assert match is not None
    of = [(sum(many > 0 for many in falls[model]), len(falls[model])) for model in ("metala", "gla")]
    assert [int(number) for number in match.groups()] == [*of[0], *of[1]]
    assert not any(falls["elsewhere"])


def run_of_lra(task: str, model: str) -> dict[str, Any]:
    """Return the last run of a model."""
    return [run for run in lines("lra") if (run["task"], run["model"]) == (task, model)][-1]


@pytest.mark.parametrize(
    ("task", "model", "start"),
    [
        ("listops", "metala", "MetaLA, causal: **"),
        ("pathfinder", "metala_hippo", "MetaLA with HiPPO's decays: **"),
        ("pathfinder", "lion_grfa", "LION with the gate of GRFA: **"),
    ],
)
def test_curves_of_long_range_arena(task: str, model: str, start: str) -> None:
    run, section = run_of_lra(task, model), PAGE.index(start)
    header, values = (
        [cell.strip() for cell in row.strip("|").split("|")[1:]]
        for row in re.findall(r"^\| (?:epoch|validation) .*", PAGE[section:], re.MULTILINE)[:2]
    )
    every = run["epochs"] // len(run["history"])
    shown = {int(epoch): value for epoch, value in zip(header, values, strict=True)}
    assert shown == {epoch: f"{100 * run['history'][epoch // every - 1]:.1f}" for epoch in shown}
    assert f"**{100 * run['accuracy']:.1f} %**" in PAGE[section:][:100]


def test_scored_epoch_of_listops() -> None:
    run = run_of_lra("listops", "metala")
    assert f"{run['scored_epoch']} of {run['epochs']} (paper" in PAGE


def test_rates_of_lion_in_listops() -> None:
    models = {"no normalizers": "lion_s_unscaled", "normalizers": "lion_s_hippo", "1 - decay on values": "lion_grfa"}
    runs = {
        (run["model"], f"{run['width']}, {run['network']['num_layers']}", rate(run["lr"])): run
        for run in lines("lra")
        if run["task"] == "listops"
    }
    rows = table("LION-s with HiPPO's decays")
    assert len(rows) == len(runs) - 1  # MetaLA's run
    for name, shape, lr, *cells in rows:
        run = runs[models[name], shape, lr]
        curve = ", ".join(f"{100 * value:.1f}" for value in run["history"])
        assert cells == [f"{100 * run['accuracy']:.1f}", curve], f"{name}, {shape}, {lr}"
    best = runs["lion_grfa", "128, 8", "1e-3"]
    assert (
        f"**{100 * best['accuracy']:.1f} %** of the test set after epoch {best['scored_epoch']} of {best['epochs']} (goal"
        in PAGE
    )


def test_other_runs_of_long_range_arena() -> None:
    s5, real = (run for run in lines("lra") if (run["task"], run["model"]) == ("image", "s5"))
    path_x = run_of_lra("path_x", "metala_hippo")
    assert real["network"]["mixer_options"]["s5"] == {"max_phase": 1e-12}
    assert f"real decays it has {100 * real['accuracy']:.1f} % after {real['epochs']} epochs" in PAGE
    twelve = [f"{100 * run['history'][5]:.1f} %" for run in (s5, real)]
    assert "{} of the validation images after 12 epochs, without them {}.".format(*twelve) in PAGE
    grfa = run_of_lra("image", "lion_grfa")
    assert f"LION has {100 * grfa['accuracy']:.1f} % after {grfa['epochs']} epochs" in PAGE
    short, long, shorter, per_token, wide, longest, strong, best, wider = (
        run for run in lines("lra") if run["model"] == "lion_complex"
    )
    metala, metala_complex = run_of_lra("image", "metala"), run_of_lra("image", "metala_complex")
    for subject, run in (("it has", short), ("LION has", long), ("weight decay 0.5 it has", metala)):
        assert f"{subject} {100 * run['accuracy']:.1f} % after {run['epochs']} epochs" in PAGE
    losses = [f"{run['loss']:.2f} after {run['epochs']}" for run in (long, s5)]
    assert "The training loss is {} epochs, S5's {}.".format(*losses) in PAGE
    assert "the test perplexity is {:.1f}, S5's {:.1f}.".format(long["perplexity"], s5["perplexity"]) in PAGE
    text = " ".join(PAGE.split())
    assert f"LION has {100 * shorter['accuracy']:.1f} % after {shorter['epochs']} epochs" in text
    assert f"The training loss is {shorter['loss']:.2f} and the test perplexity is {shorter['perplexity']:.1f}." in text
    assert f"With all {best['epochs']} epochs they are {best['loss']:.2f} and {best['perplexity']:.1f}." in text
    assert wide["network"]["head_dim"] == 64
    assert f"{wide['epochs']} epochs give {100 * wide['accuracy']:.1f} %" in text
    falls = [f"{100 * run:.1f} %" for run in longest["history"] if run < 0.4]
    log = " ".join((DOCS / "dev_log.md").read_text(encoding="utf-8").split())
    assert "falls to {} at epoch 24 and to {} at epoch 38,".format(*falls) in log
    assert [2 * number for number, value in enumerate(longest["history"], 1) if value < 0.4] == [24, 38]
    assert f"the test accuracy is {100 * longest['accuracy']:.1f} %" in log
    assert f"With {per_token['epochs']} epochs nothing falls, and it is {100 * per_token['accuracy']:.1f} %" in log
    assert f"raise LION to {100 * best['accuracy']:.1f} %" in text
    assert f"In {best['epochs']} epochs the accuracy never falls by more than one point" in text
    assert all(later > earlier - 0.01 for earlier, later in pairwise(best["history"]))
    assert best["loss"] < longest["loss"] / 10
    assert f"Width {wider['width']} gives {100 * wider['accuracy']:.1f} % after {wider['epochs']} epochs" in text
    assert f"give {100 * strong['accuracy']:.1f} % after {strong['epochs']} epochs." in text
    assert f"The training loss is {strong['loss']:.2f} and the test perplexity is {strong['perplexity']:.1f}." in text
    fall = [f"{100 * strong['history'][number]:.1f}" for number in (11, 12)]
    assert "The accuracy falls from {} to {} % at epoch 26.".format(*fall) in log
    numbers = f"{metala['loss']:.2f} and its test perplexity is {metala['perplexity']:.1f}."
    assert f"Its training loss is {numbers}" in text
    assert f"they are {metala_complex['loss']:.2f} and {metala_complex['perplexity']:.1f}." in text
    for name, run in (("S5", s5), ("LION, complex decays", best), ("MetaLA, complex decays", metala_complex)):
        step = 4 * len(run["history"]) // run["epochs"]
        curve = ", ".join(f"{100 * value:.1f}" for value in run["history"][step - 1 :: step])
        row = [
            f"{run['epochs']} ({run['epochs']})",
            f"{run['seconds'] / 60:.1f}",
            f"{100 * run['accuracy']:.1f}",
            curve,
        ]
        assert f"| {name}, positions, BatchNorm | {' | '.join(row)} |" in PAGE
    assert f"after {path_x['steps']:,} steps: {100 * path_x['accuracy']:.1f} % of the test images" in PAGE


def test_runs_of_lion_in_pathfinder() -> None:
    runs = [run for run in lines("lra") if run["task"] == "pathfinder" and run["model"].startswith("lion")]
    rows = [row for row in table("All runs with HiPPO's decays are at chance") if "of" not in row[4]]
    shown = [
        [
            "yes" if run["model"] == "lion_grfa" else "no",
            run["network"].get("positions", "none"),
            {"hippo": "HiPPO", "s4d_lin": "S4D-Lin, long range"}[run["network"]["mixer_options"]["lion"]["decay_init"]],
            rate(run["lr"]),
            str(run["epochs"]),
            f"{100 * run['accuracy']:.1f}",
            f"{run['loss']:.3f}",
        ]
        for run in reversed(runs)
    ]
    assert [row[:-1] for row in rows] == shown
