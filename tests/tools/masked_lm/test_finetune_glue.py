"""GLUE fine-tuning: metrics, data, recipes, chained tasks, and resumed runs."""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zstandard
from huggingface_hub import constants
from safetensors.torch import load_file

from tools import finetune_glue
from tools.conversion.hf_folder import read_config
from tools.evaluation import glue_training
from tools.evaluation.glue_tasks import TASKS, read_split, score


def write_task(folder: Path, name: str, rows: int, seed: int) -> None:
    """Write rows with label 1 if the last text contains dog."""
    draw = random.Random(seed)
    (folder / name).mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), *((split, 24) for split in TASKS[name].splits)):
        lines = []
        for _ in range(count):
            row = {key: " ".join(draw.choices(["the", "cat", "sat", "mat"], k=4)) for key in TASKS[name].texts}
            label = draw.randrange(2)
            if label:
                row[TASKS[name].texts[-1]] = "dog dog dog"
            lines.append(json.dumps({**row, "label": float(label) if name == "stsb" else label}))
        with gzip.open(folder / name / f"{split}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    for seed, name in enumerate(("mnli", "rte", "stsb")):
        write_task(folder, name, 96, seed)
    return folder


def test_metrics_equal_formulas() -> None:
    labels = np.array([1, 1, 1, 0, 0])
    logits = np.array([[0, 1], [0, 1], [1, 0], [0, 1], [1, 0]])
    actual = score(TASKS["mrpc"], logits, labels)
    assert actual == {"accuracy": pytest.approx(3 / 5), "f1": pytest.approx(2 * 2 / (2 * 2 + 1 + 1))}
    assert score(TASKS["cola"], logits, labels)["matthews"] == pytest.approx((2 * 1 - 1 * 1) / (3 * 3 * 2 * 2) ** 0.5)
    real = score(TASKS["stsb"], np.array([[1.0], [2.0], [4.0]]), np.array([0.0, 1.0, 9.0]))
    assert real["spearman"] == pytest.approx(1)
    assert real["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], [0, 1, 9])[0, 1])


def test_default_recipe_is_that_of_the_paper() -> None:
    recipe = finetune_glue.load_recipe(finetune_glue.RECIPE)
    assert (recipe.lr, recipe.max_length) == (1e-5, 128)
    epochs = {"mnli": 3, "qnli": 10, "qqp": 5, "rte": 2, "sst2": 3, "mrpc": 10, "cola": 10, "stsb": 8}
    assert {name: task.epochs for name, task in recipe.tasks.items()} == epochs
    assert {name for name, task in recipe.tasks.items() if task.start == "mnli"} == {"rte", "mrpc", "stsb"}
    assert {*epochs, "imdb"} == set(TASKS)
    assert {name for name, task in TASKS.items() if task.metrics == ("accuracy", "f1")} == {"qqp", "mrpc"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=-1", "lr = -1"),
        ("rate=1", "rate is an unknown key"),
        ("tasks.rte.start=wnli", "task 'wnli' is unknown"),
        ("tasks.rte.start=mrpc", "tasks.rte.start = mrpc"),
        ("lr", "write key.sub=value"),
    ],
)
def test_wrong_recipes_name_the_key(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        finetune_glue.load_recipe(finetune_glue.RECIPE, [override])


def test_hub_out_of_reach_names_the_option(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=OSError("no route")))
    with pytest.raises(
        ValueError, match=r"sst2, train: the hub \S+ cannot be reached \(no route\).* give --data FOLDER"
    ):
        read_split("sst2", "train", None)


def test_missing_data_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"sst2/train\.jsonl\.gz"):
        read_split("sst2", "train", tmp_path)
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.jsonl").write_text('{"sentence": "a cat"}\n')
    with pytest.raises(ValueError, match="row 1 has no 'label'"):
        read_split("sst2", "train", tmp_path)
    (tmp_path / "sst2" / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="sst2, train, holds no row"):
        read_split("sst2", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.jsonl", b'{"sentence": "a", "label": 0}\n{"sentence": "b", "la', r"train\.jsonl is damaged: line 2"),
        ("train.jsonl", b"5\n", r"train\.jsonl is damaged: line 1"),
        ("train.jsonl.gz", gzip.compress(b'{"sentence": "a", "label": 0}\n')[:-12], r"jsonl\.gz is cut short"),
        ("train.jsonl.gz", b"plain", r"jsonl\.gz is damaged"),
        ("train.jsonl", b'{"sentence": "a", "label": -1}\n', "sst2, train, row 1 has label = -1; allowed: 0 to 1"),
        ("train.jsonl", b'{"sentence": "a", "label": 2}\n', "sst2, train, row 1 has label = 2; allowed: 0 to 1"),
        ("train.jsonl", b'{"sentence": "a", "label": "good"}\n', "row 1 has label = 'good'"),
    ],
    ids=["line cut short", "no object", "gzip cut short", "no gzip", "label below", "label above", "label of words"],
)
def test_damaged_data_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_split("sst2", "train", tmp_path)


def test_zstandard_file_that_is_cut_after_a_block_is_refused(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [json.dumps({"sentence": f"{draw.getrandbits(320):080x}", "label": 0}).ljust(127) for _ in range(4096)]
    content = zstandard.compress("".join(f"{row}\n" for row in rows).encode())
    (tmp_path / "sst2").mkdir()
    file = tmp_path / "sst2" / "train.jsonl.zst"
    file.write_bytes(content)
    assert len(read_split("sst2", "train", tmp_path)) == 4096
    file.write_bytes(content[: len(content) // 2])  # a block is 128 KiB, and ends with a line here
    with pytest.raises(ValueError, match=r"train\.jsonl\.zst is cut short"):
        read_split("sst2", "train", tmp_path)


def test_real_labels_are_read(tmp_path: Path) -> None:
    (tmp_path / "stsb").mkdir()
    row = {"sentence1": "a", "sentence2": "b", "label": 3.25}
    (tmp_path / "stsb" / "train.jsonl").write_text(json.dumps(row))
    assert read_split("stsb", "train", tmp_path) == [row]


def test_imdb_reviews_are_read_and_their_recipe_is_valid(tmp_path: Path) -> None:
    recipe = finetune_glue.load_recipe(finetune_glue.RECIPE.with_name("imdb.yml"))
    assert list(recipe.tasks) == ["imdb"]
    assert glue_training.splits_read("imdb", None) == ["train", "test"]
    (tmp_path / "imdb").mkdir()
    row = {"text": "a review", "label": 1}
    content = zstandard.compress(json.dumps(row).encode())
    (tmp_path / "imdb" / "test.jsonl.zst").write_bytes(content)
    assert read_split("imdb", "test", tmp_path) == [row]
    (tmp_path / "imdb" / "train.jsonl.zst").write_bytes(b"no zstandard")
    with pytest.raises(ValueError, match=r"train\.jsonl\.zst is damaged"):
        read_split("imdb", "train", tmp_path)


def test_hold_out_without_a_training_row_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"--hold-out 0.99: no training row remains of the 24 rows of rte"):
        glue_training.training_rows("rte", data, 0.99)


def test_real_data_are_read(shared: Path) -> None:
    for name, rows in (("sst2", 872), ("mrpc", 408), ("rte", 277)):
        assert len(read_split(name, "validation", shared / "data" / "glue")) == rows


def test_most_frequent_label_of_real_data(shared: Path) -> None:
    folder = shared / "data" / "glue"
    scores = {
        name: glue_training.majority_scores(name, folder, None) for name in ("sst2", "mrpc", "rte", "cola", "stsb")
    }
    assert scores["sst2"]["accuracy"] == pytest.approx(444 / 872)
    # Of MRPC the most frequent label is the positive one: precision 279 / 408, recall 1.
    assert scores["mrpc"] == pytest.approx({"accuracy": 279 / 408, "f1": 2 * 279 / (408 + 279)})
    assert scores["rte"]["accuracy"] == pytest.approx(146 / 277)
    assert scores["cola"] == {"matthews": 0}
    assert scores["stsb"] == {}


def test_labels_may_be_whole_numbers_with_a_point(tmp_path: Path) -> None:
    (tmp_path / "rte").mkdir()
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in (1.0, 1.0, 0.0)]
    for split in ("train", "validation"):
        (tmp_path / "rte" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert glue_training.majority_scores("rte", tmp_path, None) == {"accuracy": pytest.approx(2 / 3)}


def test_task_starts_from_the_weights_of_another(masked_run: Path, data: Path, tmp_path: Path, capsys) -> None:
    arguments = [str(masked_run), "--tasks", "rte,stsb", "--data", str(data), "--output", str(tmp_path / "out")]
    arguments += ["--seeds", "2", "lr=5e-3", "batch_size=8", "tasks.mnli.epochs=2", "tasks.rte.epochs=2"]
    arguments += ["tasks.stsb.epochs=2"]
    assert finetune_glue.main(arguments) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "glue.json").read_text())["runs"]
    assert set(results["mnli"]["pretrained/0"]) == {"accuracy matched", "accuracy mismatched"}
    assert set(results["rte"]) == {"mnli/0", "mnli/1"}
    assert min(values["accuracy"] for values in results["rte"].values()) > 0.9  # the word is learned, 0.5 by chance
    assert min(values["pearson"] for values in results["stsb"].values()) > 0.8
    table = (tmp_path / "out" / "glue.md").read_text()
    assert re.search(r"^\| rte \| mnli \| accuracy \| [\d.]+ \| [\d.]+ \| 2 \| [\d.]+ \|$", table, re.MULTILINE)
    assert "| stsb | mnli | pearson |" in table
    assert re.search(r"^rte +mnli +accuracy +\d", printed, re.MULTILINE)
    assert printed.endswith(f"{tmp_path / 'out' / 'glue.md'}\n")
    # RTE starts from MNLI's blocks, not from the pretrained ones.
    pretrained, saved = (load_file(tmp_path / "out" / name / "model.safetensors") for name in ("pretrained", "mnli"))
    name = "blocks.0.mixer.q_proj.weight"
    assert not pretrained[name].equal(saved[name])
    # No run is repeated, and another recipe is refused.
    assert finetune_glue.main(arguments) == 0
    assert ", seed" not in capsys.readouterr().out
    assert finetune_glue.main([*arguments, "max_length=64"]) == 2
    assert re.search(r"is of another recipe \(recipe.max_length: \d+ there, 64 now\); name", capsys.readouterr().err)


def test_results_may_be_inside_the_export(masked_run: Path, data: Path, tmp_path: Path) -> None:
    """Fine-tune into the folder `glue` of the export, its default output."""
    export = finetune_glue._exported(masked_run, tmp_path)
    arguments = [str(export), "--tasks", "rte", "--data", str(data), "--seeds", "1", "--hold-out", "0.5"]
    assert finetune_glue.main([*arguments, "tasks.mnli.epochs=1", "tasks.rte.epochs=1"]) == 0
    kept = export / "glue" / "mnli"
    assert {path.name for path in kept.glob("*.py")} == {path.name for path in export.glob("*.py")}
    assert not [path for path in kept.iterdir() if path.is_dir()]


def test_recipe_reaches_the_trainer(masked_run: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    from transformers import Trainer

    made = []

    def predict(self, rows) -> SimpleNamespace:
        labels = np.array([row["labels"] for row in rows])
        return SimpleNamespace(predictions=np.zeros((len(rows), self.model.config.num_labels)), label_ids=labels)

    monkeypatch.setattr(Trainer, "train", lambda self: made.append(self))
    monkeypatch.setattr(Trainer, "predict", predict)
    weights = finetune_glue._exported(masked_run, tmp_path)
    recipe = finetune_glue.load_recipe(
        finetune_glue.RECIPE,
        ["lr=3e-4", "batch_size=10", "schedule=cosine", "warmup_fraction=0.5", "weight_decay=0.25", "max_length=8"],
    )
    for name, seed in (("mnli", 5), ("stsb", 6)):
        glue_training.finetune(name, recipe, weights, seed=seed, data=data, scratch=tmp_path)
        trainer = made[-1]
        assert trainer.args.seed == seed
        epochs = recipe.tasks[name].epochs
        assert trainer.args.num_train_epochs == epochs
        assert trainer.args.warmup_steps == int(0.5 * 10 * epochs)  # ten steps of 96 rows
        assert trainer.args.lr_scheduler_type == "cosine"
        assert trainer.args.max_grad_norm == 1
        groups = {(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups}
        assert groups == {(3e-4, 0.25), (3e-4, 0.0)}
        assert trainer.optimizer.defaults["betas"] == (0.9, 0.98)
        assert max(len(row["input_ids"]) for row in trainer.train_dataset) == 8
    assert [one.model.config.num_labels for one in made] == [3, 1]
    assert [type(one.train_dataset[0]["labels"]) for one in made] == [int, float]
    assert [one.model.config.problem_type for one in made] == ["single_label_classification", "regression"]
    assert read_config(weights)["auto_map"], "saved weights load with the folder's source"
    made[0].model.save_pretrained(tmp_path / "saved")
    assert read_config(tmp_path / "saved")["auto_map"] == read_config(weights)["auto_map"]
    (weights / "modeling_metalion.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(ValueError, match=r"differ from this version's \(modeling_metalion\.py\)"):
        glue_training.finetune("mnli", recipe, weights, seed=0, data=data, scratch=tmp_path)


def test_batch_does_not_grow_with_the_number_of_gpus(tmp_path: Path, monkeypatch) -> None:
    from transformers import TrainingArguments

    def two_gpus(arguments: TrainingArguments) -> torch.device:
        arguments._n_gpu = 2
        return torch.device("cpu")

    devices = functools.cached_property(two_gpus)
    devices.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", devices)
    recipe = finetune_glue.load_recipe(finetune_glue.RECIPE, ["batch_size=10"])
    arguments = glue_training.training_arguments(recipe, 1.0, 10.0, 0, tmp_path)
    assert arguments.train_batch_size == 10


def test_deepspeed_does_not_search_for_a_gpu_without_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "")  # so that the previous value comes back
    monkeypatch.delenv("DS_ACCELERATOR")
    recipe = finetune_glue.load_recipe(finetune_glue.RECIPE)
    glue_training.training_arguments(recipe, 1.0, 10.0, 0, tmp_path)
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_weights_of_the_first_seed_are_saved(masked_run: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    saved = []

    def finetune(name: str, *_, seed: int, keep: Path | None, **__) -> dict[str, float]:
        saved.append((name, seed, keep and keep.name))
        if keep is not None:
            keep.mkdir()
            (keep / "config.json").write_text("{}")
        return {"accuracy": 0.5}

    monkeypatch.setattr(finetune_glue, "finetune", finetune)
    arguments = [str(masked_run), "--data", str(data), "--output", str(tmp_path), "--seeds", "2", "--tasks"]
    assert finetune_glue.main([*arguments, "mnli"]) == 0
    assert saved == [("mnli", 0, None), ("mnli", 1, None)]
    # MNLI's weights were not saved: it is trained again before RTE.
    assert finetune_glue.main([*arguments, "rte"]) == 0
    assert saved[2:] == [("mnli", 0, "mnli"), ("rte", 0, None), ("rte", 1, None)]
    saved.clear()
    shutil.rmtree(tmp_path / "mnli")
    (tmp_path / "glue.json").unlink()
    assert finetune_glue.main([*arguments, "mnli,rte"]) == 0
    assert saved == [("mnli", 0, "mnli"), ("mnli", 1, None), ("rte", 0, None), ("rte", 1, None)]


def test_hold_out_trains_on_the_other_rows(data: Path) -> None:
    train, evaluated = glue_training.training_rows("rte", data, 0.25)
    rows = read_split("rte", "validation", data)
    assert (len(train), len(evaluated["validation"])) == (18, 6)
    assert sorted(map(str, train + evaluated["validation"])) == sorted(map(str, rows))
    assert train + evaluated["validation"] != rows[6:] + rows[:6], "in the order of the file"
    assert len(glue_training.training_rows("rte", data, 0.01)[1]["validation"]) == 1


def test_mean_weighs_every_task_equally() -> None:
    runs = {"mrpc": {"pretrained/0": {"accuracy": 0.5, "f1": 0.7}}, "rte": {"pretrained/0": {"accuracy": 0.8}}}
    assert "Mean over 2 tasks: 70.00" in finetune_glue.table(runs, {"mrpc": None, "rte": None}, None, {})


def test_results_of_another_checkpoint_are_refused(masked_run: Path, data: Path, tmp_path: Path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(masked_run, run)
    monkeypatch.setattr(finetune_glue, "finetune", lambda *_, **__: {"accuracy": 0.25})
    arguments = [str(run), "--tasks", "rte", "--data", str(data), "--start", "pretrained"]
    assert finetune_glue.main(arguments) == 0
    latest = run / "checkpoints" / "latest"
    later = run / "checkpoints" / "step_00000999"
    shutil.copytree(latest.parent / latest.read_text().strip(), later)
    manifest = json.loads((later / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name]["sha256"] = "0" * 64
    (later / "manifest.json").write_text(json.dumps(manifest))
    (later / "SHA256SUMS").unlink()
    latest.write_text(later.name)
    assert finetune_glue.main(arguments) == 2
    message = (
        r"is of another checkpoint \(checkpoint: .*run, weights .* there, .* now\); name another folder with --output"
    )
    assert re.search(message, capsys.readouterr().err)


def test_undefined_correlation_is_null_in_the_file_and_nan_in_the_table(
    masked_run: Path, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    scores = iter([{"accuracy": math.nan}, {"accuracy": 0.5}])
    monkeypatch.setattr(finetune_glue, "finetune", lambda *_, **__: next(scores))
    out = tmp_path / "out"
    arguments = [str(masked_run), "--tasks", "rte", "--data", str(data), "--start", "pretrained", "--output", str(out)]
    assert finetune_glue.main([*arguments, "--seeds", "1"]) == 0
    assert json.loads((out / "glue.json").read_text())["runs"] == {"rte": {"pretrained/0": {"accuracy": None}}}
    capsys.readouterr()
    assert finetune_glue.main([*arguments, "--seeds", "2"]) == 0
    assert re.search(r"^rte +pretrained +accuracy +nan", capsys.readouterr().out, re.MULTILINE)
    runs = json.loads((out / "glue.json").read_text())["runs"]["rte"]
    assert runs == {"pretrained/0": {"accuracy": None}, "pretrained/1": {"accuracy": 0.5}}


def test_table_shows_the_requested_start() -> None:
    runs = {"rte": {"mnli/0": {"accuracy": 0.9}, "pretrained/0": {"accuracy": 0.6}, "pretrained/1": {"accuracy": 0.5}}}
    text = finetune_glue.table(runs, {"rte": None}, None, {})
    assert "| rte | pretrained | accuracy | 55.00 | 7.07 | 2 |" in text
    assert "Mean over" not in text
    written = finetune_glue.table(runs, {"rte": "mnli"}, None, {"rte": {"accuracy": 0.53}})
    assert "| rte | mnli | accuracy | 90.00 | - | 1 | 53.00 |" in written


def test_hold_out_is_noted(masked_run: Path, data: Path, tmp_path: Path, capsys) -> None:
    arguments = [str(masked_run), "--tasks", "rte", "--data", str(data), "--output", str(tmp_path / "out")]
    arguments += ["--seeds", "1", "--hold-out", "0.5", "--start", "pretrained", "tasks.rte.epochs=1"]
    assert finetune_glue.main(arguments) == 0
    assert "no GLUE score" in capsys.readouterr().out


def test_help_names_the_models_that_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_glue.main(["--help"])
    assert "Fine-tune a masked or causal model on GLUE" in capsys.readouterr().out
