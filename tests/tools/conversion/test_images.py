"""Image classifiers as Hugging Face folders: logits, image processor, class names, and the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from data.images.augmentation import Augmentation
from megatron_lite.checkpoint.reader import read_weights
from megatron_lite.config.loader import load_config
from megatron_lite.metrics.logger import MetricsLogger
from models.config import ModelConfig
from tests.made_images import CLASSES, picture
from tests.tools.conversion.conftest import write_run
from tools import finetune_glue
from tools.conversion.model_card import model_card
from tools.convert_hf import main
from tools.loading.image_data import CLASSES as CLASSES_FILE
from tools.loading.model import load_model
from tools.pretraining.teacher import Teacher

MODEL = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.vocab_size=3",
    "model.image_size=8",
    "model.pooling=class_token",
    "model.positions=learned",
    "model.patch_order=both",
    "model.mixers=[lion]",
    "model.mixer_options={lion: {variant: s, causal: false}}",
    "data.objective=classification",
    "data.images={train: train.parquet, validation_crop: 0.8, mean: [0.5, 0.4, 0.3], std: [0.2, 0.3, 0.25]}",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    empty = folder / "empty.yml"
    empty.write_text("{}")
    model = write_run(folder / "run", MODEL, [str(empty)])
    (folder / "run" / CLASSES_FILE).write_text(json.dumps(CLASSES))
    assert main(["export", str(folder / "run"), str(folder / "export")]) == 0
    return folder, model


def test_exported_classifier_equals_the_trainers_on_processed_images(run):
    folder, model = run
    exported = AutoModelForImageClassification.from_pretrained(folder / "export", trust_remote_code=True).eval()
    processor = AutoImageProcessor.from_pretrained(folder / "export")
    pictures = [picture(0, 1, 30).resize((30, 20)), picture(1, 2, 10), picture(2, 3, 8)]
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    own = Augmentation(8, validation_crop=0.8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25))
    torch.testing.assert_close(pixels, own.validation([own.read_validation(one) for one in pictures]))
    labels = torch.tensor([0, 1, 1])
    with torch.no_grad():
        out = exported(pixel_values=pixels, labels=labels, output_hidden_states=True)
        torch.testing.assert_close(out.logits, model(pixels))
        torch.testing.assert_close(3 * out.loss, model(pixels, labels))
    assert len(out.hidden_states) == 3
    assert exported.config.id2label == dict(enumerate(CLASSES))
    assert "AutoModelForImageClassification" in json.loads((folder / "export" / "config.json").read_text())["auto_map"]
    assert "pipeline_tag: image-classification" in (folder / "export" / "README.md").read_text()


def test_model_card_of_a_classifier_counts_images_and_has_its_accuracy(tmp_path):
    shape = ModelConfig(vocab_size=3, num_layers=1, hidden_size=16, num_heads=2, image_size=8, pooling="class_token")
    facts: dict[str, Any] = {
        "run": tmp_path,
        "checkpoint": tmp_path / "step_00000004",
        "parameters": 1,
        "dtype": "fp32",
        "licence": "mit",
    }
    config = {"batch": {"sequence_length": 5, "global_batch_size": 6}}
    assert "Not evaluated with this project's tools." in model_card(config, shape, **facts)
    metrics = MetricsLogger(tmp_path, total_steps=4, progress_bar=False)
    for step in (3, 4):
        metrics.log(step, {"loss": 1.0, "tokens": 30 * step})
        values = {"accuracy": step / 8, "top5_accuracy": 0.9, "evaluated_tokens": 1000.0 * step}
        metrics.log(step, values, kind="validation")
        metrics.log(step, values | {"top5_accuracy": 0.8}, kind="test")
    metrics.close()
    card = model_card(config, shape, **facts)
    for line in (
        "| steps | 4 |\n| images | 24 |\n| images per step | 6 |\n| optimizer ",
        "| validation | 50.00% | 90.00% | 4,000 |\n| test | 50.00% | 80.00% | 4,000 |\n",
    ):
        assert line in card, card
    assert "37.50%" not in card


def test_imported_classifier_has_the_same_weights_and_names(run):
    folder, _ = run
    assert main(["import", str(folder / "export"), str(folder / "again")]) == 0
    before, after = (read_weights(folder / name) for name in ("run", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((folder / "again" / CLASSES_FILE).read_text()) == list(CLASSES)


def test_commands_for_text_refuse_an_image_classifier(run, capsys):
    folder, _ = run
    with pytest.raises(
        ValueError, match=r"is an image classifier, and this command reads text; .*tools.convert_hf export"
    ):
        load_model(folder / "run", device="cpu")
    text = folder / "text.txt"
    text.write_text("some text")
    assert main(["export", str(folder / "run"), str(folder / "other"), "--text", str(text)]) == 2
    assert "is an image classifier, which reads no text" in capsys.readouterr().err
    assert not (folder / "other").exists()
    words = [str(folder / "export"), "--tasks", "sst2", "--output", str(folder / "glue")]
    assert finetune_glue.main(words) == 2
    assert "(MetalionForImageClassification) is an image classifier" in capsys.readouterr().err


@pytest.mark.parametrize("names", ['["one"]', '["one"'])
def test_wrong_class_names_are_refused_before_anything_is_written(run, capsys, names):
    folder, _ = run
    file = folder / "run" / CLASSES_FILE
    file.write_text(names)
    try:
        assert main(["export", str(folder / "run"), str(folder / "other")]) == 2
    finally:
        file.write_text(json.dumps(CLASSES))
    assert "3 class names are needed, one per class of the model" in capsys.readouterr().err
    assert not (folder / "other").exists()


def student_of(folder, *settings):
    """Return the configuration of a run whose teacher is the export."""
    overrides = [
        *MODEL,
        "optimizer.lr=1e-3",
        "schedule.train_steps=1",
        "batch.micro_batch_size=2",
        "batch.global_batch_size=2",
        f"classification.teacher={folder / 'export'}",
    ]
    return load_config([folder / "empty.yml"], [*overrides, *settings], model_type=ModelConfig, world_size=1)


def test_teacher_that_is_no_classifier_or_cannot_be_loaded_is_refused_with_its_key(run, masked_export, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    for folder, reason in (
        (masked_export, "image_size = null is a language model"),
        (tmp_path, "model type `unknown`"),
    ):
        config = student_of(run[0], f"classification.teacher={folder}")
        message = rf"classification.teacher = {folder} cannot be loaded \(.*{reason}.*\); name another teacher"
        with pytest.raises(ValueError, match=message):
            Teacher(config, torch.device("cpu"), CLASSES)


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_teacher_of_an_export_gives_deits_targets(run, labels):
    folder, model = run
    config = student_of(folder, f"classification.teacher_labels={labels}")
    batch = {"tokens": torch.randn(4, 3, 8, 8), "targets": torch.eye(3)[[0, 1, 2, 0]]}
    result = Teacher(config, torch.device("cpu"), CLASSES).with_targets(batch)
    logits = model(batch["tokens"]).detach()
    if labels == "hard":
        torch.testing.assert_close(result["targets"], 0.5 * batch["targets"] + 0.5 * torch.eye(3)[logits.argmax(-1)])
    else:
        torch.testing.assert_close(result["targets"], 0.5 * batch["targets"])
        torch.testing.assert_close(result["teacher"], 0.5 * 9 * (logits / 3).softmax(-1))
        assert result["temperature"].tolist() == [3.0] * 4


def test_classes_of_a_teacher_may_have_other_names_but_no_other_number_or_order(run):
    with pytest.raises(ValueError, match="its number of classes is 3, and this run has 4; name another teacher"):
        Teacher(student_of(run[0], "model.vocab_size=4"), torch.device("cpu"), [*CLASSES, "grey"])
    config = student_of(run[0])
    Teacher(config, torch.device("cpu"), [f"{name} photo" for name in CLASSES])
    with pytest.raises(ValueError, match="name a teacher with the same order of classes"):
        Teacher(config, torch.device("cpu"), CLASSES[::-1])
