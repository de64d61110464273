"""Loss by position, within and beyond the trained length."""

from __future__ import annotations

import itertools
import json
import math
import re
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

import eval as command
from data.datasets.causal import SequentialDataset
from data.indexed import IndexedTokens
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.loader import load_config
from megatron_lite.parallel.grid import init_grid
from megatron_lite.validation import evaluate
from models.config import ModelConfig
from tools.evaluation.loss_by_position import LossByPosition
from tools.evaluation.request import TextRequest
from tools.loading.engine import build_engine
from tools.loading.model import load_located, load_model
from tools.pretraining.data import validation_set


def test_loss_by_position(trained_run, tmp_path, capsys):
    out = tmp_path / "results.json"
    assert command.main([str(trained_run), "--by-position", "--out", str(out), "--device", "cpu"]) == 0
    assert (tmp_path / "perplexity_by_position.png").is_file()
    printed = capsys.readouterr().out
    assert re.search(r"validation: [\d.]+ bits per byte at positions 17 to 32, [\d.]+ from 33 to 128", printed)
    actual = json.loads(out.read_text())["by_position"]["validation"]
    bins = actual["bins"]
    assert bins[0]["from"] == 1
    assert bins[-1]["to"] == 128
    assert 33 in [b["from"] for b in bins]
    assert all(a["to"] + 1 == b["from"] for a, b in itertools.pairwise(bins))


def test_axis_of_positions_has_ticks_up_to_the_longest_text(tmp_path, monkeypatch):
    from tools.evaluation.loss_by_position import plot_positions

    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    tokens = [np.full(64, 2), np.array([2] * 3 + [0] * 61)]
    results = [LossByPosition(f"t{i}", np.ones(64), counts, 1.0, 32, np.zeros(0)) for i, counts in enumerate(tokens)]
    plot_positions(results, tmp_path / "positions.png")
    assert figures[0].axes[0].get_xticks().tolist() == [2**power for power in range(7)]


def test_a_mean_over_positions_leaves_out_those_without_a_token():
    nll, tokens = np.array([3.0, 1.0, math.nan, math.nan]), np.array([1, 3, 0, 0])
    result = LossByPosition("t", nll, tokens, bytes_per_token=2.0, trained_length=2, changes=np.zeros(0))
    assert result.mean(1, 4) == pytest.approx(1.5 / math.log(2) / 2)
    (span,) = result.bins(1)
    assert span == {"from": 1, "to": 2, "tokens": 4, "loss": 1.5, "bits_per_byte": pytest.approx(1.5 / math.log(2) / 2)}


@pytest.mark.parametrize("short", ["text", "length"])
def test_positions_without_a_token_have_no_loss(trained_run, tmp_path, capsys, short):
    # The pieces end before the second half of the trained length.
    out, text = tmp_path / "results.json", tmp_path / "text.txt"
    text.write_text("def alpha(beta):" if short == "text" else "def alpha(beta):\n" * 40)
    words = ["--data", str(text), *(["--sequence-length", "16"] if short == "length" else [])]
    assert command.main([str(trained_run), "--by-position", *words, "--out", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"{text}: no token at positions 17 to 32: too short a text, or --sequence-length" in printed
    assert "0.0000" not in printed
    assert set(json.loads(out.read_text())["by_position"][str(text)]) == {"bins", "dtype"}


def test_diverged_model_has_null_losses(trained_run, tmp_path, monkeypatch, capsys):
    # The results are valid JSON, and a later command adds to them.

    def diverged(*words, **more):
        loaded = load_located(*words, **more)
        loaded.model.head.norm.weight.data.fill_(float("nan"))
        return loaded

    monkeypatch.setattr("tools.evaluation.texts.load_located", diverged)
    out = tmp_path / "results.json"
    for words in ([], ["--by-position"]):
        assert command.main([str(trained_run), *words, "--out", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "validation: nan bits per byte at positions 17 to 32, nan from 33 to 128\n" in printed
    content = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert content["results"]["perplexity"]["validation"]["loss"] is None
    actual = content["by_position"]["validation"]
    assert {actual["within"], actual["beyond"], *(b["loss"] for b in actual["bins"])} == {None}


def test_loss_by_position_sums_to_the_perplexity(trained_run):
    from tools.evaluation.loss_by_position import loss_by_position
    from tools.evaluation.perplexity import perplexity, validation_text

    loaded = load_model(trained_run, device="cpu")
    text = validation_text(loaded)
    actual = loss_by_position(loaded, text, length=48, progress=False)
    whole = perplexity(loaded, text, sequence_length=48, progress=False)
    total = float(np.nansum(actual.nll * actual.tokens))
    assert total / actual.tokens.sum() == pytest.approx(whole["loss"], rel=1e-6)
    assert actual.mean(1, 48) == pytest.approx(whole["bits_per_byte"], rel=1e-6)


def test_positions_of_a_run_with_resets_count_from_the_start_of_a_document(trained_run):
    from tools.evaluation.loss_by_position import loss_by_position, token_nll
    from tools.evaluation.perplexity import validation_text

    loaded = load_model(trained_run, device="cpu")
    words = ["data.reset_at_documents=true"]
    config = load_config([loaded.checkpoint / "config.yml"], words, model_type=ModelConfig, world_size=1)
    loaded = replace(loaded, config={**loaded.config, "data": {**loaded.config["data"], "reset_at_documents": True}})
    text, grid = validation_text(loaded), init_grid("cpu")
    engine = build_engine(config, grid, "fp32")
    Checkpointer(engine, loaded.checkpoint.parent).load()
    validation = evaluate(engine, validation_set(config, str(text.prefix), None, loaded.tokenizer, grid), None)
    engine.close()
    actual = loss_by_position(loaded, text, length=32, batch_size=3, progress=False)
    assert np.nansum(actual.nll * actual.tokens) / actual.tokens.sum() == pytest.approx(validation["loss"], rel=1e-6)

    file = IndexedTokens(text.prefix)
    documents = [file[number].astype(np.int64) for number in range(len(file))]
    expected = []
    for document, following in itertools.pairwise([*documents, documents[-1][:0]]):
        labels = np.concatenate([document[1:], following[:1]])
        with torch.no_grad():
            tokens = torch.tensor(document[None, : len(labels)])
            expected.append(token_nll(loaded.model, tokens, torch.tensor(labels[None]))[0])
    actual = loss_by_position(loaded, text, length=file.num_tokens, batch_size=1, progress=False)
    assert actual.tokens[40] == sum(len(nll) > 40 for nll in expected) > 1
    assert actual.nll[40] == pytest.approx(np.mean([nll[40] for nll in expected if len(nll) > 40]), rel=1e-5)
    changes = [(nll[32:].mean() - nll[16:32].mean()).item() for nll in expected if len(nll) > 32]
    assert actual.changes == pytest.approx(changes, abs=1e-6)


def test_changes_of_pieces_equal_means_of_their_tokens(trained_run):
    """Check whole pieces, one that ends after the trained length, and one that ends before it."""
    from tools.evaluation.loss_by_position import loss_by_position, token_nll
    from tools.evaluation.perplexity import validation_text

    loaded = load_model(trained_run, device="cpu")
    text = validation_text(loaded)
    tokens = SequentialDataset(text.prefix, sequence_length=1 << 20, first_token=0).num_tokens
    length = next(n for n in range(40, 200) if 32 < tokens % n < n - 3)
    pieces = SequentialDataset(text.prefix, sequence_length=length, first_token=loaded.tokenizer.end_of_document_id)
    expected = []
    for piece in (pieces[i] for i in range(len(pieces))):
        real = int((piece["loss_weight"] > 0).sum())
        with torch.no_grad():
            nll = token_nll(loaded.model, piece["tokens"][None], piece["labels"][None])[0, :real]
        expected.append((nll[32:].mean() - nll[16:32].mean()).item())
    assert loaded.config["batch"]["sequence_length"] == 32
    assert real == tokens % length
    actual = loss_by_position(loaded, text, length=length, progress=False)
    assert actual.changes == pytest.approx(expected, abs=1e-6)
    length = next(n for n in range(40, 400) if 0 < tokens % n < 32)
    assert len(loss_by_position(loaded, text, length=length, progress=False).changes) == tokens // length


@pytest.mark.parametrize(
    ("changes", "verdict"), [((-1.0, -0.9), "falls further"), ((-1.0, 0.9), "stays level"), ((1.0, 0.9), "rises")]
)
def test_verdict_needs_two_standard_errors(tmp_path, monkeypatch, capsys, changes, verdict):
    from tools.evaluation import loss_by_position as positions

    actual = positions.LossByPosition("t", np.ones(8), np.full(8, 2), 1.0, 4, np.array(changes))
    monkeypatch.setattr(positions, "loss_by_position", lambda *_, **__: actual)
    loaded = Namespace(config={"batch": {"sequence_length": 4}}, run=tmp_path)
    positions.run_positions(loaded, [None], TextRequest(sequence_length=8), tmp_path / "positions.png", None)
    assert f": it {verdict} (" in capsys.readouterr().out


def test_change_beyond_the_trained_length_has_a_standard_error():
    from tools.evaluation.loss_by_position import LossByPosition

    nll = np.array([3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    actual = LossByPosition("t", nll, np.full(8, 5), 2.0, 4, np.array([-1.0, -1.2, -0.8, -1.0, -1.0]))
    change, error = actual.change or (0.0, 0.0)
    assert change == pytest.approx(-1.0 / np.log(2) / 2)
    assert error == pytest.approx(np.std([-1.0, -1.2, -0.8, -1.0, -1.0], ddof=1) / np.sqrt(5) / np.log(2) / 2)
    assert [b["loss"] for b in actual.bins(4)][-1] == 1.0
    # The last range holds more than the last position.
    assert [(b["from"], b["to"]) for b in actual.bins(2)] == [(1, 2), (3, 4), (5, 8)]
    assert [(b["from"], b["to"]) for b in LossByPosition("t", nll, np.full(8, 5), 2.0, 8, np.zeros(0)).bins(2)] == [
        (1, 2),
        (3, 8),
    ]
