"""Training of image classifiers through the command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import eval as evaluate
import train
from megatron_lite.checkpoint import reader as checkpoint
from tests.cli.conftest import metrics_lines, train_lines
from tests.cli.test_resume import copy_stopped_run
from tests.made_images import CLASSES, encoded, picture, write_folder, write_parquet
from tools import finetune_glue, generate, image_sizes, inspect_data, masked_forms
from tools.length import __main__ as length
from tools.planning import dry_run
from tools.pretraining import images as pretraining


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def write_images(folder: Path) -> None:
    """Write the Parquet files of training and validation."""
    write_parquet(folder / "train.parquet", [number % 3 for number in range(24)])
    write_parquet(folder / "validation.parquet", [number % 3 for number in range(9)])


def words(images: Path, folder: Path, name: str = "run", **changes) -> list[str]:
    """Return the arguments of a tiny classifier, eight steps of six images."""
    values = {
        "run.directory": folder / name,
        "run.device": "cpu",
        "model.num_layers": 2,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "model.mixers": "[lion]",
        "model.mixer_options": "{lion: {variant: s, causal: false}}",
        "model.image_size": 8,
        "model.patch_order": "both",
        "data.objective": "classification",
        "data.cache_directory": images / "cache",
        "data.images": f"{{train: {images}/train.parquet, validation: {images}/validation.parquet, randaugment_layers: 1}}",
        "classification.label_smoothing": 0.1,
        "batch.micro_batch_size": 3,
        "batch.global_batch_size": 6,
        "optimizer.lr": 0.01,
        "optimizer.ema_decay": 0.9,
        "schedule.train_steps": 8,
        "precision.dtype": "fp32",
        "checkpoint.interval": 3,
        "evaluation.interval": 4,
        **changes,
    }
    base = folder / "empty.yml"
    base.write_text("{}")
    return [str(base), *(f"{key}={value}" for key, value in values.items())]


@pytest.fixture
def arguments(images: Path, tmp_path: Path) -> Callable[..., list[str]]:
    return partial(words, images, tmp_path)


def test_classifier_trains_validates_and_resumes_exactly(arguments, tmp_path, capsys):
    assert train.main(arguments()) == 0
    (out, progress), run = capsys.readouterr(), tmp_path / "run"
    assert "24 images of 3 classes" in out
    assert "(whole set, 9 images)" in out
    assert f"\n  python -m tools.image_sizes {run}   # accuracy at other image sizes\n" in out
    assert re.search(r"^step 1/\d+  loss [\d.]+  accuracy [\d.]+%  images/s [\d,]+  ETA", progress, re.M)
    line = metrics_lines(run, "train")[0]
    assert line["images_per_second"] == pytest.approx(line["tokens_per_second"] / 4)  # an image has four tokens
    assert re.search(r"^\d+ steps, \d+ images in 0:\d\d \([\d,]+ images/s\)$", out, re.M)
    last = metrics_lines(run, "validation")[-1]
    assert last["evaluated_tokens"] == 9
    assert 0 <= last["accuracy"] <= last["top5_accuracy"] == 1.0
    assert "perplexity" not in last | line
    confusion = json.loads((run / "confusion_matrix.json").read_text())
    assert confusion["classes"] == list(CLASSES)
    assert sum(map(sum, confusion["counts"])) == 9
    assert sum(row[i] for i, row in enumerate(confusion["counts"])) == pytest.approx(9 * last["accuracy"])
    assert (run / "predictions.png").stat().st_size > 1000
    assert (run / "confusion_matrix.png").stat().st_size > 1000
    assert json.loads((run / "classes.json").read_text()) == list(CLASSES)
    manifest = checkpoint.read_manifest(checkpoint.resolve(run))
    assert manifest["tensors"]["head.weight"]["shape"] == [3, 16]  # the classes of the data set
    copy_stopped_run(run, 3, tmp_path / "resumed")
    assert train.main(arguments("resumed")) == 0
    assert train_lines(tmp_path / "resumed") == train_lines(run)
    again = metrics_lines(tmp_path / "resumed", "validation")[-1]  # of the average of the weights
    assert {key: again[key] for key in ("loss", "accuracy")} == {key: last[key] for key in ("loss", "accuracy")}


def test_validations_during_training_read_the_set_number_of_global_batches(arguments, tmp_path):
    limited = {"evaluation.interval": 1, "evaluation.batches": 1, "schedule.train_steps": 2, "model.num_layers": 1}
    assert train.main(arguments(**limited)) == 0
    first, last = metrics_lines(tmp_path / "run", "validation")
    assert (first["evaluated_tokens"], first["evaluated_fraction"]) == (6, pytest.approx(2 / 3))
    assert (last["evaluated_tokens"], last["evaluated_fraction"]) == (9, 1)


def test_one_process_writes_the_caches_of_all_images(arguments, images, monkeypatch):
    events, opened = [], pretraining.open_images
    monkeypatch.setattr(
        pretraining, "open_images", lambda data, part, *rest: events.append(part) or opened(data, part, *rest)
    )
    monkeypatch.setattr(
        pretraining, "on_main", lambda grid, work, **_: (events.append("begin"), work(), events.append("end"))
    )
    assert train.main(arguments(**{"schedule.train_steps": 1, "data.images.test": images / "validation.parquet"})) == 0
    assert events[:5] == ["begin", "train", "validation", "test", "end"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.image_size": 10},
            "model.image_size = 10 is no multiple of model.patch_size = 4; nearest multiples: 8 or 12",
        ),
        (
            {"model.image_size": "null", "model.patch_order": "rows"},
            "model.image_size is missing: data.objective = classification needs",
        ),
        ({"data.objective": "masked"}, "data.objective = masked: model.image_size = 8 makes an image classifier"),
        (
            {"data.corpus": "stdlib"},
            'data.corpus = "stdlib" is for text, and data.objective = classification reads data.images',
        ),
        ({"batch.sequence_length": 9}, "batch.sequence_length = 9: an image of model.image_size = 8 has 4 tokens"),
        ({"evaluation.suites": "[superglue]"}, "evaluation.suites is for language models"),
        ({"model.vocab_size": 4}, "model.vocab_size = 4: data.images.train has 3 classes"),
        ({"data.images.train": "absent.parquet"}, "absent.parquet does not exist"),
        ({"classification.teacher": "absent"}, "classification.teacher: absent does not exist"),
        (
            {"data.images.crop": "none", "data.images.padding": 2},
            "data.images.padding = 2 requires data.images.crop = pad; set it, or remove this key",
        ),
        (
            {"data.images.randaugment_layers": 0, "data.images.randaugment_magnitude": 20},
            "data.images.randaugment_magnitude = 20 requires data.images.randaugment_layers of 1 or more",
        ),
        ({"data.images.padding": 9}, "data.images.padding = 9: at most model.image_size = 8 is allowed"),
        (
            {"data.images.validation_crop": 1e-9},
            "data.images.validation_crop = 1e-09: number >= 0.1 and <= 1 is allowed",
        ),
        (
            {"data.images.mean": "[123.7, 116.3, 103.5]"},
            "data.images.mean = [123.7, 116.3, 103.5]: list of 3: number >= 0 and <= 1 is allowed",
        ),
        (
            {"classification.teacher_labels": "soft"},
            "classification.teacher_labels requires classification.teacher: name one, or remove this key",
        ),
        (
            {"classification.teacher": "absent", "classification.temperature": 2},
            "classification.temperature requires classification.teacher_labels = soft",
        ),
    ],
)
def test_classifier_that_cannot_run_is_refused_before_anything_is_written(
    arguments, tmp_path, capsys, changes, message
):
    assert train.main(arguments(**changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.vocab_size": 3, "data.images.image_key": "photo"},
            "data.images.image_key = photo: data.images.train has the columns img, label",
        ),
        (
            {"data.images.label_key": "class"},
            "data.images.label_key = class: data.images.train has the columns img, label",
        ),
        ({"model.vocab_size": 4}, "model.vocab_size = 4: data.images.train has 3 classes"),
        ({"classification.teacher": "absent"}, "classification.teacher: absent does not exist"),
    ],
)
def test_dry_run_refuses_the_images_and_the_teacher_that_a_start_refuses(arguments, capsys, changes, message):
    assert train.main([*arguments(), "--dry-run"]) == 0
    assert train.main([*arguments(**changes), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_sample_of_a_dry_run_on_a_cpu_is_a_whole_image(arguments, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "CPU_TOKENS", 3)
    assert train.main([*arguments(), "--dry-run"]) == 0
    assert "sample       4 tokens forward and backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"pipeline": 2}, "parallel.pipeline = 2 is not supported for image classifiers: 1 is allowed"),
        ({"context": 2}, "parallel.context = 2: an image classifier averages over all patches; 1 is allowed"),
        (
            {"tensor": 2, "sequence_parallel": "true"},
            "parallel.sequence_parallel = true is not supported for image classifiers: false is allowed",
        ),
    ],
)
def test_layouts_that_split_the_sequence_or_the_layers_are_refused(arguments, monkeypatch, capsys, parallel, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    changes = {f"parallel.{key}": value for key, value in parallel.items()}
    assert (
        train.main(arguments(**changes, **{"batch.micro_batch_size": "null", "batch.gradient_accumulation_steps": 1}))
        == 2
    )
    assert message in capsys.readouterr().err


def test_number_of_classes_is_needed_for_images_that_do_not_name_them(arguments, images, tmp_path, capsys):
    path = tmp_path / "numbers.parquet"
    pq.write_table(pq.read_table(images / "train.parquet").replace_schema_metadata(None), path)
    changes = {"data.images": f"{{train: {path}}}", "schedule.train_steps": 1, "evaluation.interval": 0}
    assert train.main(arguments(**changes)) == 2
    message = "do not give it: data.images.train does not name its classes; set model.vocab_size to their number"
    assert message in capsys.readouterr().err
    assert train.main(arguments(**changes, **{"model.vocab_size": 3})) == 0
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == ["0", "1", "2"]


def test_training_images_of_one_class_are_refused(arguments, tmp_path, capsys):
    one_label = write_parquet(tmp_path / "one.parquet", [1, 1])
    changes = {"data.images.train": one_label, "data.cache_directory": tmp_path / "cache"}
    assert train.main(arguments(**changes)) == 2
    assert (
        "data.images.train: all of its 2 images have the label green; name images of at least"
        in capsys.readouterr().err
    )
    write_folder(tmp_path / "folder", 2)
    for name in CLASSES[1:]:
        shutil.rmtree(tmp_path / "folder" / name)
    for word in ([], ["--dry-run"]):
        assert train.main([*arguments(**{"data.images.train": tmp_path / "folder"}), *word]) == 2
        assert "data.images.train has one class, red: name images of at least two classes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_image_that_does_not_decode_ends_the_run_with_file_and_row(arguments, tmp_path, capsys):
    good = encoded(picture(0, 0))
    path = write_parquet(tmp_path / "broken.parquet", [0, 1, 2, 0, 1, 2, 0], images=[*[good] * 5, b"no picture", good])
    changes = {"data.images.train": path, "data.cache_directory": tmp_path / "cache"}
    assert train.main(arguments(**changes)) == 1
    error = capsys.readouterr().err
    assert "broken.parquet, row 5: the image does not decode (unknown format)" in error
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not checkpoints.exists() or not list(checkpoints.glob(".*"))
    command = shlex.split(error.partition("python -m tools.inspect_data ")[2])
    assert inspect_data.main(command) == 1
    assert capsys.readouterr().out.startswith(f"DAMAGED  {path}, row 5: ")


def test_run_resumes_after_a_broken_validation_image_is_replaced(arguments, tmp_path, capsys):
    good = [encoded(picture(number % 3, number)) for number in range(9)]
    path = write_parquet(tmp_path / "held_out.parquet", [0, 1, 2] * 3, images=[*good[:8], good[8][:60]])
    changes = {"data.images.validation": path, "data.cache_directory": tmp_path / "cache", "model.num_layers": 1}
    assert train.main(arguments(**changes)) == 1
    assert "held_out.parquet, row 8: the image does not decode" in capsys.readouterr().err
    run = tmp_path / "run"
    assert checkpoint.resolve(run).name == "step_00000003", "validation was due after step 4"
    write_parquet(path, [0, 1, 2] * 3, images=good)
    assert train.main(arguments(**changes)) == 0
    assert [line["step"] for line in train_lines(run)] == list(range(1, 9))
    assert [line["evaluated_tokens"] for line in metrics_lines(run, "validation")] == [9, 9]


def test_student_learns_from_the_targets_of_a_trained_teacher(arguments, tmp_path):
    short = {"schedule.train_steps": 2, "evaluation.interval": 0, "model.num_layers": 1}
    assert train.main(arguments("teacher", **short)) == 0
    settings = {"classification.teacher": tmp_path / "teacher", "classification.teacher_labels": "soft"}
    assert train.main(arguments("alone", **short, **{"run.seed": 5})) == 0
    taught = {**short, **settings, "run.seed": 5}
    assert train.main(arguments("zero", **taught, **{"classification.teacher_weight": 0.0})) == 0
    assert train.main(arguments("student", **taught)) == 0
    losses = {name: [line["loss"] for line in train_lines(tmp_path / name)] for name in ("alone", "zero", "student")}
    assert losses["zero"] == pytest.approx(losses["alone"])
    assert losses["student"] != pytest.approx(losses["alone"])


def test_classifier_reads_images_of_other_sizes(arguments, tmp_path, capsys):
    short = {"schedule.train_steps": 2, "evaluation.interval": 2, "model.num_layers": 1}
    assert train.main(arguments(**short, **{"model.positions": "learned"})) == 0
    run, out = tmp_path / "run", tmp_path / "sizes.png"
    validated = metrics_lines(run, "validation")[-1]["accuracy"]
    assert (
        image_sizes.main([str(run), "--sizes", "12", "8", "4", "--device", "cpu", "--batch", "4", "-o", str(out)]) == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"^run +pixels +images +top-1 +top-5$", printed, re.M)
    assert re.search(rf"^run +8 +trained +9 +{validated:.2%} +100.00%$", printed, re.M)
    rows = json.loads(out.with_suffix(".json").read_text())
    assert [(row["image_size"], row["trained"], row["images"]) for row in rows] == [
        (4, False, 9),
        (8, True, 9),
        (12, False, 9),
    ]
    assert rows[1]["accuracy"] == pytest.approx(validated)
    assert all(row["top5_accuracy"] == 1.0 for row in rows)
    assert out.stat().st_size > 5000
    assert image_sizes.main([str(run), "--limit", "5", "--batch", "2", "--device", "cpu"]) == 0
    rows = json.loads((run / "image_sizes.json").read_text())
    assert {(row["image_size"], row["images"]) for row in rows} == {(8, 5), (12, 5), (16, 5)}
    copy = shutil.copytree(run, tmp_path / "other" / run.name)
    assert image_sizes.main([str(run), str(copy), "--sizes", "8", "--limit", "5", "--device", "cpu"]) == 0
    names = [row["run"] for row in json.loads((run / "image_sizes.json").read_text())]
    assert names == [f"{tmp_path.name}/run", "other/run"], "folders of one name get the names of their parents too"
    assert image_sizes.main([str(run), "--sizes", "10", "--device", "cpu"]) == 2
    assert "model.image_size = 10 is no multiple of model.patch_size = 4" in capsys.readouterr().err
    assert image_sizes.main([str(run), "--sizes", "8", "1000000", "--batch", "2", "--device", "cpu"]) == 2
    message = r"--sizes 1000000: 2 images take [\d,]+ GiB or more, and this machine has [\d,]+ GiB; give a smaller size"
    assert re.search(message, capsys.readouterr().err)
    assert masked_forms.main([str(run), "--device", "cpu", "--lengths", "8", "16"]) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "form"
    assert "image size  tokens" in header
    assert [line.split()[1:3] for line in lines[:1] + lines[4:5]] == [["8", "4"], ["16", "16"]]
    rows = json.loads((run / "forms.json").read_text())
    assert {(row["image_size"], row["length"]) for row in rows} == {(8, 4), (16, 16)}
    assert all(row["difference"] is None or row["difference"] < 1e-5 for row in rows)
    fine_tuning = ["--tasks", "sst2", "--output", str(tmp_path / "glue")]
    for tool, words in (
        (evaluate, ["--suite", "superglue"]),
        (generate, ["--prompt", "a"]),
        (length, []),
        (finetune_glue, fine_tuning),
    ):
        assert tool.main([str(run), *words]) == 2
        assert (
            "is an image classifier, and this command reads text; python -m tools.image_sizes"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "glue").exists()


def test_unfit_teacher_is_refused(arguments, tmp_path, capsys):
    short = {"schedule.train_steps": 1, "evaluation.interval": 0, "model.num_layers": 1}
    assert train.main(arguments("teacher", **short, **{"model.image_size": 12})) == 0
    settings = {**short, "classification.teacher": tmp_path / "teacher"}
    assert train.main(arguments("student", **settings)) == 2
    assert "its image size is 12, and this run has 8; name another teacher" in capsys.readouterr().err
    changes = {"model.image_size": 12, "data.images.mean": "[0.5, 0.5, 0.5]"}
    assert train.main(arguments("student", **settings, **changes)) == 2
    assert "its mean is [0.485, 0.456, 0.406], and this run has [0.5, 0.5, 0.5]" in capsys.readouterr().err
    assert not (tmp_path / "student" / "checkpoints").exists()


def test_damaged_weights_of_a_teacher_are_refused(arguments, tmp_path, capsys):
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "vit" / "model.safetensors").write_bytes(bytes(range(100)))
    assert train.main(arguments("student", **{"classification.teacher": tmp_path / "vit"})) == 2
    assert f"classification.teacher = {tmp_path / 'vit'} cannot be loaded (" in capsys.readouterr().err


def test_teacher_or_validation_with_another_order_of_the_classes_is_refused(arguments, images, tmp_path, capsys):
    """Folders have sorted classes."""
    short = {"schedule.train_steps": 1, "evaluation.interval": 0, "model.num_layers": 1}
    folder = write_folder(tmp_path / "folder", 2)
    assert train.main(arguments("teacher", **short, **{"data.images": f"{{train: {folder}}}"})) == 0
    assert train.main(arguments("student", **short, **{"classification.teacher": tmp_path / "teacher"})) == 2
    message = "class 0 of the teacher is blue, and that of data.images.train is red; name a teacher with the same order"
    assert message in capsys.readouterr().err
    validation = {"data.images": f"{{train: {images}/train.parquet, validation: {folder}}}"}
    assert train.main(arguments("other", **short, **validation)) == 2
    message = (
        "class 0 of data.images.validation is blue, and that of data.images.train is red: name files with the same"
    )
    assert message in capsys.readouterr().err
