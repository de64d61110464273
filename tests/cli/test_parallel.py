"""Runs of two processes equal the run of one process, which can resume from their checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import train
from megatron_lite.checkpoint import reader as checkpoint
from tests.cli.conftest import ROOT, assert_same_run, environment, run_words, torchrun
from tests.cli.test_images import words as image_words
from tests.cli.test_images import write_images
from tests.parity.launch import train_in_turn

SETTINGS = {"optimizer.lr": 1e-4, "evaluation.interval": 4}
LONGER = {**SETTINGS, "schedule.train_steps": 12, "schedule.decay_steps": 8}
# Settings, and the layout in the output of the run that resumes from the checkpoint.
LAYOUTS = {
    "data": ({}, "data 2, ZeRO 1"),
    "zero3": ({"parallel.zero_stage": 3}, "data 2, ZeRO 3"),
    "tensor": ({"parallel.tensor": 2, "parallel.sequence_parallel": "true"}, "tensor 2, ZeRO 1"),
    "pipeline": ({"parallel.pipeline": 2}, "pipeline 2, ZeRO 1"),
    "context": ({"parallel.context": 2}, "context 2, ZeRO 1"),
}
# Runs of an image classifier with an average of its weights.
IMAGE_LAYOUTS = {"images_tensor": {"parallel.tensor": 2}, "images_zero3": {"parallel.zero_stage": 3}, "images": {}}
OF_IMAGES = {"optimizer.lr": 1e-4, "data.images.crop": "resized", "data.images.random_erasing": 0.5}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run per layout, of `one` with one process, and of `longer`, which resumes it."""
    folder = tmp_path_factory.mktemp("runs")
    write_images(folder)
    words = [run_words(corpus, folder, name, **SETTINGS, **layout) for name, (layout, _) in LAYOUTS.items()]
    images = {name: image_words(folder, folder, name, **OF_IMAGES, **layout) for name, layout in IMAGE_LAYOUTS.items()}
    alone = images.pop("images")
    train_in_turn([*words, *images.values()])
    assert train.main(alone) == 0
    assert train.main(run_words(corpus, folder, "one", **SETTINGS)) == 0
    shutil.copytree(folder / "one", folder / "longer")
    assert train.main(run_words(corpus, folder, "longer", **LONGER)) == 0
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process_which_resumes_from_its_checkpoint(corpus, runs, capsys, name):
    assert_same_run(runs / name, runs / "one")
    reports = [json.loads((runs / run / "summary.json").read_text())["validation"] for run in ("one", name)]
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-6)
    assert reports[0]["evaluated_tokens"] == reports[1]["evaluated_tokens"]
    step = checkpoint.resolve(runs / name)
    assert sorted(p.name for p in step.glob("weights-*")) == ["weights-00000.safetensors", "weights-00001.safetensors"]
    capsys.readouterr()
    assert train.main(run_words(corpus, runs, name, **LONGER)) == 0
    assert f"written by 2 processes: {LAYOUTS[name][1]}, fp32, resharded to this layout" in capsys.readouterr().out
    assert_same_run(runs / name, runs / "longer")


@pytest.mark.parametrize("name", ["images_tensor", "images_zero3"])
def test_layout_of_an_image_classifier_equals_one_process(runs, name):
    """Samples, augmentation, accuracies, confusions and the average of the weights do not depend on the layout."""
    assert_same_run(runs / name, runs / "images")
    reports = [json.loads((runs / run / "summary.json").read_text())["validation"] for run in ("images", name)]
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-6)
    assert all(reports[0][key] == reports[1][key] for key in ("accuracy", "top5_accuracy", "evaluated_tokens"))
    confusions = [json.loads((runs / run / "confusion_matrix.json").read_text()) for run in ("images", name)]
    assert confusions[0] == confusions[1]


def test_layout_for_more_processes_than_started_is_refused_before_anything_is_written(arguments, tmp_path, capsys):
    assert train.main(arguments(**{"parallel.tensor": 2})) == 2
    assert "start it with torchrun --nproc-per-node 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_error_on_the_main_process_ends_all_processes(arguments):
    command = [*torchrun(2), "train.py", *arguments(**{"data.corpus": "nowhere.jsonl"})]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240, env=environment())
    assert done.returncode != 0
    assert "nowhere.jsonl" in done.stderr
