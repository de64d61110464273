"""Masked accuracy by length, and the forms of one checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.datasets.masked import MaskedDataset
from data.datasets.masking import masking_for
from data.indexed import IndexedWriter
from tools import masked_forms
from tools.length import __main__ as length_tool
from tools.loading.model import load_model


def test_accuracy_over_length(masked_run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "length.png"
    assert length_tool.main([str(masked_run), "--lengths", "16", "64", "-o", str(out)]) == 0
    assert "accuracy" in capsys.readouterr().out
    (rows,) = json.loads(out.with_suffix(".json").read_text()).values()
    assert out.stat().st_size > 5000
    assert [row["length"] for row in rows] == [16, 64]
    assert rows[0]["tokens"] == rows[1]["tokens"] > 50
    assert rows[0]["loss"] != rows[1]["loss"]
    loaded = load_model(masked_run, device="cpu")
    with torch.no_grad():  # an untrained model predicts these words, some of which are right
        loaded.model.head.bias[loaded.tokenizer.encode("the cat sat")] += 10.0
    rows = length_tool.measure_run(loaded, [16, 64])
    prefix = loaded.config["data"]["validation"]
    masking = masking_for(loaded.tokenizer, 0.15)
    data = MaskedDataset(
        prefix, masking, loaded.tokenizer, sequence_length=64, num_samples=None, seed=0, layout="packed"
    )
    assert data.num_tokens % 64
    for row, length in zip(rows, (16, 64), strict=True):
        right, count, nll = 0, 0, 0.0
        for i in range(len(data) - 1):  # the last one is padded
            sample = data[i]
            with torch.no_grad():
                logits = loaded.model(sample["tokens"].view(-1, length)).flatten(0, 1)
            predicted = sample["labels"] != -100
            right += (logits.argmax(-1) == sample["labels"])[predicted].sum().item()
            nll += torch.nn.functional.cross_entropy(logits, sample["labels"], reduction="sum").item()
            count += predicted.sum().item()
        assert 0 < right < count
        assert (row["accuracy"], row["tokens"]) == (pytest.approx(right / count), count)
        assert row["loss"] == pytest.approx(nll / count, rel=1e-5)


def test_whole_words_are_masked_as_in_training(masked_run: Path, tmp_path: Path) -> None:
    # The visible part of a word would reveal the masked part.
    loaded = load_model(masked_run, device="cpu")
    word = loaded.tokenizer.encode("catsing")
    assert len(word) == 3
    with IndexedWriter(tmp_path / "words", np.uint16) as writer:
        writer.add_document(np.array(word * 320))
    data = {**loaded.config["data"], "masked": {**loaded.config["data"]["masked"], "whole_word": True}}
    words = replace(loaded, config={**loaded.config, "data": data})
    (row,) = length_tool.measure_run(words, [48], data=str(tmp_path / "words"))
    masking = masking_for(loaded.tokenizer, 0.15, whole_word=True)
    settings = {"sequence_length": 48, "num_samples": None, "seed": 0, "layout": "packed"}
    samples = MaskedDataset(tmp_path / "words", masking, loaded.tokenizer, **settings)
    hidden = torch.cat([samples[i]["labels"] != -100 for i in range(len(samples))]).view(-1, 3)
    assert (hidden.all(1) == hidden.any(1)).all()
    assert row["tokens"] == hidden.sum() > 50


def test_length_that_does_not_divide_is_refused(masked_run: Path, capsys) -> None:
    assert length_tool.main([str(masked_run), "--lengths", "24", "64"]) == 2
    assert "--lengths 24: it must divide the longest length, 64" in capsys.readouterr().err


@pytest.mark.parametrize(("tool", "name"), [(length_tool, "length"), (masked_forms, "forms")])
def test_pictures_of_a_step_are_in_the_run_folder(masked_run: Path, tmp_path: Path, tool, name: str) -> None:
    """Old step folders are deleted during training."""
    run = shutil.copytree(masked_run, tmp_path / "run")
    (run / "metrics.jsonl").touch()
    (step,) = (run / "checkpoints").glob("step_*")
    assert tool.main([str(step), "--lengths", "16"]) == 0
    assert {file.name for file in run.glob(f"{name}.*")} == {f"{name}.png", f"{name}.json"}
    assert not list(step.glob(f"{name}.*"))


def test_form_with_nan_outputs_fails(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    differences = {"parallel": 0.0, "chunked": 1e-6, "recurrent": math.nan, masked_forms.SOFTMAX: math.nan}
    rows = [{"form": form, "length": 8, "ms": 1.0, "mib": 1.0, "difference": d} for form, d in differences.items()]
    monkeypatch.setattr(masked_forms, "compare", lambda *_, **__: rows)
    assert masked_forms.main(["run", "-o", str(tmp_path / "forms.png")]) == 1
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:6]] == [
        "0.0e+00",
        "1.0e-06",
        "nan",
        "-",
    ]


def test_forms_agree(masked_run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "forms.png"
    assert masked_forms.main([str(masked_run), "--lengths", "32", "256", "-o", str(out)]) == 0
    rows = json.loads(out.with_suffix(".json").read_text())
    assert {row["form"] for row in rows} == {*masked_forms.FORMS, masked_forms.SOFTMAX}
    by_form = {(row["form"], row["length"]): row for row in rows}
    for form in ("chunked", "recurrent"):
        assert 0 < by_form[form, 256]["difference"] < 1e-5
    assert by_form["softmax attention", 32]["difference"] is None
    # For 8 times the length, the parallel form's matrix grows 64 times, the chunked form's memory 8 times.
    assert by_form["parallel", 256]["mib"] > 2 * by_form["chunked", 256]["mib"]
    assert by_form["chunked", 256]["mib"] < 12 * by_form["chunked", 32]["mib"]
    assert out.stat().st_size > 5000
