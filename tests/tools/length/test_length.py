"""The loss of a causal model over length beside plain forward passes, and what cannot be measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.indexed import IndexedTokens, IndexedWriter
from models.config import ModelConfig
from tests.tools.masked_lm.conftest import masked_run
from tools.evaluation.perplexity import TokenText, perplexity, validation_text
from tools.length import plot
from tools.length.__main__ import _lengths, main, measure_run
from tools.length.masked import accuracy_table
from tools.loading.model import LoadedModel, load_model
from tools.reporting import style

__all__ = ["masked_run"]


def test_every_token_at_every_length(trained_run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "length.png"
    words = [str(trained_run), "--device", "cpu", "--lengths", "16", "64", "128", "--tokens", "512", "-o", str(out)]
    assert main(words) == 0
    (result,) = json.loads(out.with_suffix(".json").read_text()).values()
    assert [row["length"] for row in result["by_length"]] == [16, 32, 64, 128]  # the trained one is always there
    loaded = load_model(trained_run, device="cpu")
    file = IndexedTokens(validation_text(loaded).prefix)
    stream = np.concatenate([[loaded.tokenizer.end_of_document_id], *(file[i] for i in range(len(file)))])
    nll = {}
    for length in (16, 32, 64, 128):
        parts = []
        for start in range(0, 512, length):
            piece = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))[None]
            with torch.no_grad():
                logits = loaded.model(piece[:, :-1])[0]
            parts.append(F.cross_entropy(logits, piece[0, 1:], reduction="none"))
        nll[length] = torch.cat(parts).view(4, 128).double()
    for row in result["by_length"]:
        expected = nll[row["length"]]
        assert row["tokens"] == 512
        assert row["loss"] == pytest.approx(expected.mean().item(), abs=1e-5)
        assert row["perplexity"] == pytest.approx(expected.mean().exp().item(), rel=1e-5)
        pieces = (expected - nll[32]).mean(1)
        assert row["change"] == pytest.approx(pieces.mean().item(), abs=1e-5)
        assert row["change_stderr"] == pytest.approx(pieces.std().item() / 2, abs=1e-5)
    assert [(row["from"], row["to"]) for row in result["by_position"]] == [(1, 16), (17, 32), (33, 64), (65, 128)]
    for row in result["by_position"]:
        part = slice(row["from"] - 1, row["to"])
        assert row["loss"] == pytest.approx(nll[128][:, part].mean().item(), abs=1e-5)
        assert row["change"] == pytest.approx((nll[128] - nll[32])[:, part].mean().item(), abs=1e-5)
    assert abs(result["by_position"][1]["change"]) < 1e-6  # the same context
    assert abs(result["by_position"][3]["change"]) > 1e-6
    assert out.stat().st_size > 8000
    assert "| 128            |     4 x |" in capsys.readouterr().out


def with_resets(run: Path) -> LoadedModel:
    loaded = load_model(run, device="cpu")
    return replace(loaded, config={**loaded.config, "data": {**loaded.config["data"], "reset_at_documents": True}})


def test_documents_of_a_run_with_resets_share_no_context(trained_run: Path, masked_run: Path, tmp_path: Path) -> None:
    causal, masked = with_resets(trained_run), with_resets(masked_run)
    tokens = np.random.default_rng(0).integers(5, 18, 1024).astype(np.uint16)
    for name, ends in (("documents", [3, 50, 61, 90, 128]), ("aligned", range(128, 1025, 128))):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for start, end in itertools.pairwise([0, *ends]):
                writer.add_document(tokens[start:end])
    text = TokenText("documents", tmp_path / "documents", 1, 5)
    rows = measure_run(causal, [64, 128], data=str(text.prefix))["by_length"]
    for row in rows:
        expected = perplexity(causal, text, sequence_length=row["length"], progress=False)["loss"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    # Each document fills one row of the shortest length, so longer rows add no context.
    rows = measure_run(masked, [128, 1024], data=str(tmp_path / "aligned"))
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)


def test_defaults_are_multiples_as_far_as_the_text_goes(trained_run: Path) -> None:
    loaded = load_model(trained_run, device="cpu")
    assert IndexedTokens(validation_text(loaded).prefix).num_tokens > 600
    result, size = measure_run(loaded, tokens=600), 600
    assert [row["length"] for row in result["by_length"]] == [n for n in (16, 32, 64, 128, 256, 512, 1024) if n <= size]
    assert result["by_length"][0]["tokens"] == result["by_length"][-1]["length"]


def write_tokens(prefix: Path, count: int) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document((np.arange(count) % 90).astype(np.uint16))
    return str(prefix)


def test_an_odd_length_has_no_half(trained_run: Path, tmp_path: Path) -> None:
    loaded = load_model(trained_run, device="cpu")
    odd = {**loaded.config, "batch": {**loaded.config["batch"], "sequence_length": 25}}
    result = measure_run(replace(loaded, config=odd), data=write_tokens(tmp_path / "text", 120))
    assert [row["length"] for row in result["by_length"]] == [25, 50, 100]


def test_a_text_shorter_than_the_trained_length_says_what_is_needed(trained_run: Path, tmp_path: Path) -> None:
    loaded = load_model(trained_run, device="cpu")
    with pytest.raises(ValueError, match=r"has 20 tokens, and --tokens is [\d,]+: too few for pieces of 32"):
        measure_run(loaded, data=write_tokens(tmp_path / "short", 20))


def test_standard_error_of_one_piece_is_null(trained_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.png"
    assert main([str(trained_run), "--device", "cpu", "--lengths", "64", "--tokens", "64", "-o", str(out)]) == 0

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (result,) = json.loads(out.with_suffix(".json").read_text(), parse_constant=refused).values()
    assert [row["change_stderr"] for row in result["by_length"]] == [None, None]


def test_text_without_masked_tokens_is_refused(masked_run: Path, tmp_path: Path, capsys) -> None:
    words = [str(masked_run), "--device", "cpu", "--lengths", "1", "--tokens", "1", "-o", str(tmp_path / "none.png")]
    assert main(words) == 2
    assert "none of the first 1 tokens is masked; raise --tokens" in capsys.readouterr().err


def test_masked_models_read_whole_pieces_only(masked_run: Path, tmp_path: Path) -> None:
    """Padding is never masked, so a padded piece would make the longest lengths look easy."""
    loaded = load_model(masked_run, device="cpu")
    size = IndexedTokens(validation_text(loaded).prefix).num_tokens
    assert 1024 < size < 2048
    rows = measure_run(loaded)
    assert [row["length"] for row in rows] == [128, 256, 512, 1024]
    masked = int(rows[0]["tokens"])
    # Of 1024 tokens, not of all: the rate is 0.15.
    assert masked == int(rows[-1]["tokens"]) < 1024 * 0.15 * 1.1
    with pytest.raises(ValueError, match=rf"has {size:,} tokens, and --tokens is [\d,]+: too few for pieces of 2,048"):
        measure_run(loaded, [128, 2048])
    with pytest.raises(ValueError, match=r"has 100 tokens, and --tokens is [\d,]+: too few for pieces of 128"):
        measure_run(loaded, data=write_tokens(tmp_path / "short", 100))


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (
            ["runs/a/checkpoints/step_1", "runs/b/checkpoints/step_1"],
            ["a/checkpoints/step_1", "b/checkpoints/step_1"],
        ),
    ],
)
def test_lines_of_equally_named_folders_have_different_labels(
    runs: list[str], labels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, out: figures.append(figure))
    masked = [{"length": n, "accuracy": 0.5, "trained_at": 64} for n in (64, 128)]
    place = {"from": 1, "to": 64, "loss": 2.0, "change": 0.0, "change_stderr": 0.1}
    causal = {"by_length": [{"length": n, "loss": 2.0, "trained_at": 64} for n in (64, 128)], "by_position": [place]}
    plot.plot_accuracy(dict.fromkeys(runs, masked), Path())
    plot.plot_loss(dict.fromkeys(runs, causal), Path())
    for figure in figures:
        assert sorted(text.get_text() for text in figure.axes[-1].texts) == labels


def test_figures_show_values_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, out: figures.append(figure))
    masked = [{"length": n, "accuracy": 16 / n, "trained_at": 32} for n in (32, 64)]
    plot.plot_accuracy({"runs/a": masked}, Path())
    rows = [{"length": n, "loss": 1 + 1 / n, "trained_at": 64} for n in (32, 64, 128)]
    places = [
        {"from": low, "to": high, "loss": 2.0, "change": -1 / high, "change_stderr": 1 / 64}
        for low, high in ((1, 32), (33, 64), (65, 128))
    ]
    plot.plot_loss({"runs/a": {"by_length": rows, "by_position": places}}, Path())
    axes = [figures[0].axes[0], *figures[1].axes]
    points = [[(float(x), float(y)) for x, y in zip(*lines.lines[0].get_data(), strict=True)] for lines in axes]
    assert points == [
        [(32, 50), (64, 25)],
        [(32, 1 + 1 / 32), (64, 1 + 1 / 64), (128, 1 + 1 / 128)],
        [(32, -1 / 32), (64, -1 / 64), (128, -1 / 128)],
    ]
    for here, trained in zip(axes, (32, 64, 64), strict=True):
        assert [line.get_xdata()[0] for line in here.lines if line.get_linestyle() == ":"] == [trained]
    (bars,) = axes[2].containers
    assert bars[2][0].get_segments()[0][:, 1].tolist() == [-1 / 32 - 1 / 64, -1 / 32 + 1 / 64]


def test_accuracies_stand_in_percent_under_their_lengths() -> None:
    rows = [{"length": n, "accuracy": 0.25, "tokens": 1200.0} for n in (64, 128)]
    table = accuracy_table({"runs/a": rows, "runs/b": rows[:1]}, [64, 128])
    assert table.splitlines() == [
        "tokens        64      128",
        "accuracy  25.00%   25.00%   runs/a, 1,200 masked tokens",
        "accuracy  25.00%        -   runs/b, 1,200 masked tokens",
    ]


def test_positions_are_read_up_to_the_last() -> None:
    shape = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 1, "mixers": ("attention",)}
    model = ModelConfig(**shape, positions="learned", max_positions=128)
    config = {"batch": {"sequence_length": 32}}
    assert _lengths(Path("a"), model, config, None) == [16, 32, 64, 128]
    with pytest.raises(ValueError, match=r"a reads at most 128 tokens .*--lengths is 256"):
        _lengths(Path("a"), replace(model, mixer_options={"attention": {"causal": False}}), config, [256])


def test_several_models_are_compared_and_mixed_kinds_refused(
    trained_run: Path, masked_run: Path, tmp_path: Path, capsys
) -> None:
    step = next((trained_run / "checkpoints").glob("step_*"))
    both = [str(trained_run), str(step), "--device", "cpu", "--tokens", "128", "-o", str(tmp_path / "both.png")]
    assert main([*both, "--lengths", "64"]) == 0
    assert len(json.loads((tmp_path / "both.json").read_text())) == 2
    capsys.readouterr()

    def printed(*words: object) -> str:
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "give only one kind of model per command" in printed(trained_run, masked_run)
    assert "--lengths 24: it must divide the longest length, 64" in printed(trained_run, "--lengths", 24, 64)
    assert "too few for pieces of 65,536" in printed(trained_run, "--lengths", 65536)
    assert "is not a checkpoint: a run folder" in printed(tmp_path)
    other = load_model(masked_run, device="cpu").config["data"]["validation"]
    assert "was written with another tokenizer: wordpiece" in printed(trained_run, "--data", other)
