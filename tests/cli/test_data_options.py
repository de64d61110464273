"""Runs on token files: blends, resets, batch ramp, loss per source, masked samples, a test set."""

from __future__ import annotations

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

import train
from data.indexed import IndexedTokens
from megatron_lite.config.loader import load_config
from megatron_lite.validation import ValidationSet
from models.config import ModelConfig
from tests.cli.conftest import metrics_lines, train_lines
from tools.preprocess_data import main as preprocess
from tools.pretraining.data import validation_set


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Return the token files of two corpora, the first with two sources, and of a validation set."""
    folder = tmp_path_factory.mktemp("token_files")
    draw = random.Random(1)
    words = ["state", "decay", "query", "key", "value"]
    for name, sources in (("pile", ["Github", "ArXiv"]), ("web", [None]), ("valid", ["Github", "ArXiv"])):
        records = []
        for number in range(40):
            record: dict[str, object] = {"text": " ".join(draw.choices(words, k=draw.randint(1, 30)))}
            if sources[0]:
                record["meta"] = {"pile_set_name": sources[number % 2]}
            records.append(json.dumps(record))
        (folder / f"{name}.jsonl").write_text("\n".join(records))
        words_of_tool = (
            f"--input {folder}/{name}.jsonl --tokenizer-type bytes --append-eod --output-prefix {folder}/{name}"
        )
        assert preprocess([*words_of_tool.split(), "--workers", "1", "--no-progress"]) == 0
    return {name: f"{folder}/{name}_text_document" for name in ("pile", "web", "valid")}


def test_resumed_run_on_a_blend_with_all_data_options_equals_the_uninterrupted_one(arguments, files, tmp_path, capsys):
    changes = {
        "data.corpus": "null",
        "data.train": f"[{files['pile']}, {files['web']}, {files['pile']}]",
        "data.validation": files["valid"],
        "data.test": files["web"],
        "data.blend": "{by: weights, weights: [3, 2, 1], min_tokens: [0, 0, 100]}",
        "data.order": "reshuffle",
        "data.packing": "best_fit",
        "data.reset_at_documents": "true",
        "data.mask_boundaries": "true",
        "batch.ramp": "{start: 2, increment: 2, samples: 6}",
        "logging.loss_by_source": "true",
        "evaluation.interval": 4,
        "schedule.decay_steps": 8,
        "schedule.kind": "constant",
    }
    assert train.main(arguments("uninterrupted", **changes)) == 0
    for steps in (4, 8):
        assert train.main(arguments("resumed", **{**changes, "schedule.train_steps": steps})) == 0
    assert train_lines(tmp_path / "uninterrupted") == train_lines(tmp_path / "resumed")

    steps = metrics_lines(tmp_path / "uninterrupted", "train")
    assert [line["tokens"] for line in steps] == [64, 128, 192, *range(320, 900, 128)]
    assert {key for line in steps for key in line if key.startswith("loss/")} == {
        "loss/Github",
        "loss/ArXiv",
        "loss/web",
    }
    assert all(0 <= line["data_share"] < 1 for line in steps)
    (first, *_, last) = metrics_lines(tmp_path / "uninterrupted", "validation")
    assert {"loss/Github", "loss/ArXiv"} <= set(last) & set(first)
    assert min(last["loss/Github"], last["loss/ArXiv"]) <= last["loss"] <= max(last["loss/Github"], last["loss/ArXiv"])
    assert last["loss"] < first["loss"]
    (test,) = metrics_lines(tmp_path / "uninterrupted", "test")
    assert "loss/web" in test
    report = json.loads((tmp_path / "uninterrupted" / "summary.json").read_text())
    assert report["test"]["loss"] == test["loss"]
    assert f"test loss {test['loss']:.4f} nats/token" in capsys.readouterr().out


def test_filter_that_leaves_no_document_is_refused_by_a_dry_run_and_by_a_start(arguments, files, capsys, monkeypatch):
    monkeypatch.setattr("tools.planning.dry_run._time_layers", lambda *_: None)
    changes = {"data.corpus": "null", "data.train": files["web"], "data.blend": "{min_tokens: [5000]}"}
    for more in (["--dry-run"], []):
        assert train.main([*arguments(**changes), *more]) == 2
        error = capsys.readouterr().err
        assert f"data.blend.min_tokens = 5000: the longest document of {files['web']} has " in error


def test_loss_per_source_covers_all_steps_since_the_last_line_after_a_resume(arguments, files, tmp_path):
    changes = {
        "data.corpus": "null",
        "data.train": files["pile"],
        "data.order": "reshuffle",
        "logging.loss_by_source": "true",
        "logging.interval": 3,
        "schedule.kind": "constant",
    }
    for name, ends in (("uninterrupted", [6]), ("resumed", [2, 6])):
        for steps in ends:
            assert train.main(arguments(name, **changes, **{"schedule.train_steps": steps})) == 0
    uninterrupted, resumed = (
        [{key: line[key] for key in line if key.startswith("loss")} for line in metrics_lines(tmp_path / name, "train")]
        for name in ("uninterrupted", "resumed")
    )
    assert len(uninterrupted) == 2
    assert {"loss/Github", "loss/ArXiv"} <= set(uninterrupted[0])
    assert uninterrupted == resumed


def test_limited_validation_is_spaced_evenly_over_each_source(files):
    """Check that the ranks read the whole set once, and that a limited set has the share of each source."""
    words = [
        "batch.micro_batch_size=2",
        "batch.sequence_length=16",
        "logging.loss_by_source=true",
        "model.vocab_size=4096",
    ]
    config = load_config(["default.yml"], words, model_type=ModelConfig, world_size=1)
    tokenizer: Any = SimpleNamespace(end_of_document_id=0)

    def validation(rank: int, size: int) -> ValidationSet:
        grid: Any = SimpleNamespace(data_rank=rank, data_size=size)
        data = validation_set(config, files["valid"], 1000, tokenizer, grid)
        assert data is not None
        return data

    def samples(part: str, limit: int | None, data: ValidationSet) -> list[tuple[list[int], list[float]]]:
        rows = [zip(batch["tokens"], batch["loss_weight"], strict=True) for batch in data.batches(part, limit)]
        return [(tokens.tolist(), weight.tolist()) for row in rows for tokens, weight in row]

    alone, ranks = validation(0, 1), [validation(rank, 2) for rank in (0, 1)]
    weights = {part: sum(sum(weight) for _, weight in samples(part, None, alone)) for part in alone.parts}
    sizes = IndexedTokens(files["valid"]).sizes  # the sources take turns
    assert weights == {"Github": sizes[::2].sum(), "ArXiv": sizes[1::2].sum()}
    assert alone.total_tokens == sizes.sum()
    assert alone.parts == {part: weight / alone.total_tokens for part, weight in weights.items()}
    assert alone.total_bytes == 1000
    count = sum(len(samples(part, None, alone)) for part in alone.parts)
    read = sum(min(len(samples(part, None, alone)), round(5 * 4 * alone.parts[part])) for part in alone.parts)
    assert [data.fraction(5) for data in (alone, *ranks)] == [read / count] * 3
    assert alone.fraction(10**6) == 1
    for part, weight in weights.items():
        assert sum(sum(row) for data in ranks for _, row in samples(part, None, data)) == weight
        every = samples(part, None, alone)
        limited = samples(part, 5, alone)[: round(5 * 4 * alone.parts[part])]  # of four samples a batch
        four = [validation(rank, 4) for rank in range(4)]
        for layout in (ranks, four):  # the rest are fillers
            assert sorted(s for data in layout for s in samples(part, 5, data) if sum(s[1])) == sorted(limited)
        places = [every.index(sample) for sample in limited]
        assert places[0] == 0
        assert not any(sum(weight) for _, weight in every[places[-1] + 1 :])
        steps = {after - before for before, after in itertools.pairwise(places)}
        assert max(steps) - min(steps) <= 1
        assert len(samples(part, 1, alone)) == 2
        assert samples(part, round(0.75 * len(every) / alone.parts[part]), alone) == every
        assert all(len(batch["tokens"]) == 2 for data in ranks for batch in data.batches(part, None))
    count = sum(1 for part in weights for _ in alone.batches(part, None))
    assert alone.micro_batches == count
    assert ranks[0].micro_batches == sum(1 for part in weights for _ in ranks[0].batches(part, None))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_masked_language_model(arguments, files, tmp_path, layout, capsys):
    changes = {
        "data.corpus": "null",
        "data.train": files["pile"],
        "data.validation": files["valid"],
        "data.objective": "masked",
        "data.masked": f"{{layout: {layout}, whole_word: true}}",
        "data.reset_at_documents": str(layout == "packed").lower(),
        "model.mixers": "[lion]",
        "model.mixer_options": "{lion: {causal: false}}",
        "model.head": "mlm",
        "logging.loss_by_source": "true",
        "schedule.train_steps": 12,
        "optimizer.lr": 1e-2,
    }
    assert train.main(arguments(layout, **changes)) == 0
    out = capsys.readouterr().out
    steps = metrics_lines(tmp_path / layout, "train")
    losses = [line["loss"] for line in steps]
    assert losses[-1] < losses[0] - 0.5
    assert all(0 <= line["accuracy"] <= 1 for line in steps)
    (validation,) = metrics_lines(tmp_path / layout, "validation")
    assert {"loss/Github", "loss/ArXiv"} <= set(validation)
    assert "bits_per_byte" not in validation
    assert f"masked-token accuracy: {validation['accuracy']:.2%}" in out
    unigram = json.loads((tmp_path / layout / "summary.json").read_text())["unigram"]
    assert f"{unigram['accuracy']:.2%} (loss {unigram['loss']:.4f})" in out
    assert train.main(arguments(layout, **changes)) == 0
    again = capsys.readouterr().out
    assert "is complete: 12 steps" in again
    for text in (out, again):
        assert f"tools.length {tmp_path / layout}" in text
        assert "tools.generate" not in text
    tokens = 40 * 32
    assert 0.02 * tokens < validation["evaluated_tokens"] < 3 * tokens
