"""The benchmark measures both sides on the same requests, says what each did, and survives being stopped."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from tools.benchmark_evaluation import Timing, main
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.full_size_sets import SIZES, write_whole_sets
from tools.evaluation.progress import TimeUpError, Watch, follow
from tools.loading.model import load_model


def requests() -> list[Instance]:
    pairs = [(f"{n} alpha beta {'gamma ' * n}", f" count {n}") for n in range(60)]
    return [Instance("loglikelihood", {}, pair, i, metadata=("made up", i, 1)) for i, pair in enumerate(pairs)]


@pytest.fixture
def lm(trained_run: Path) -> ProjectLM:
    loaded = load_model(trained_run, device="cpu")
    return ProjectLM(loaded.model, loaded.tokenizer, max_length=96, progress=False, batch_tokens=500)


def test_both_sides_and_what_they_did(trained_run, eval_data, tmp_path, capsys):
    given = ["--data-dir", str(eval_data), "--checkpoint", str(trained_run), "--device", "cpu", "--dtype", "fp32"]
    assert main([*given, "--scale", "0.0005", "--max-length", "1024", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["largest_difference"] < 1e-4
    assert found["metalion"]["requests"] == found["hf"]["requests"] > 100
    assert found["metalion"]["tokens"] == found["hf"]["tokens"]
    assert not found["metalion"]["estimated"]
    assert not found["hf"]["estimated"]
    batches = found["metalion"]["batches"]
    assert 0 < batches["tokens_read"] <= batches["with_padding"]
    assert 0 < batches["shapes"] <= batches["batches"]
    assert found["ratio"]["whole"] == pytest.approx(found["hf"]["total"] / found["metalion"]["total"])
    assert "hf over metalion" in printed
    assert "estimated" not in printed

    # Stopped at once, one side alone.
    assert (
        main([*given, "--scale", "0.0005", "--only", "hf", "--limit-minutes", "1e-6", "--output", str(tmp_path)]) == 0
    )
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found.keys() == {"hf"}
    assert found["hf"]["estimated"]
    assert found["hf"]["requests"] <= 1


def test_a_watch_counts_every_answer_and_stops(lm):
    asked = requests()
    expected = lm.loglikelihood(asked)
    out, now = io.StringIO(), [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    watch = Watch("tiny", out, clock=clock)
    follow(lm, watch)
    watch.start()
    assert lm.loglikelihood(asked) == expected
    assert [watch.answers[request.args] for request in asked] == [value for value, _ in expected]
    assert (watch.answered, watch.share) == (len(asked), 1.0)
    assert watch.answered_tokens == sum(watch.tokens) == lm.counts.asked_tokens // 2
    assert 0 < watch.began < watch.ready < watch.ended
    lines = out.getvalue().splitlines()
    assert "60 requests" in lines[0]
    assert "tokenised in" in lines[1]
    assert "of the tokens" in lines[-1]


def test_a_side_that_is_stopped_says_how_far_it_came(lm):
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    watch = Watch("tiny", io.StringIO(), limit=12.0, clock=clock)
    follow(lm, watch)
    watch.start()
    with pytest.raises(TimeUpError, match="tiny: stopped after"):
        lm.loglikelihood(requests())
    assert 0 < watch.answered < 60
    assert 0 < watch.share < 1
    assert watch.tokens_a_second == pytest.approx(watch.answered_tokens / (watch.ended - watch.ready))


def test_what_a_stopped_side_would_have_taken() -> None:
    """A quarter was answered in 8 of 12 seconds: what is not scoring is done once."""
    stopped = Timing("hf", total=12.0, tokenising=3.0, scoring=8.0, requests=5, tokens=80, share=0.25, answers={})
    assert (stopped.whole, stopped.asking, stopped.tokens_a_second) == (36.0, 35.0, 10.0)
    assert replace(stopped, share=1.0).whole == 12.0


def test_whole_sets_have_the_sizes_of_the_real_ones(eval_data, tmp_path):
    def rows(folder: Path, name: str) -> list[Any]:
        return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]

    assert write_whole_sets(eval_data, tmp_path / "a", 0.01) == sum(max(3, round(n * 0.01)) for n in SIZES.values())
    for name, size in SIZES.items():
        assert len(rows(tmp_path / "a", name)) == max(3, round(size * 0.01))
    multirc = rows(tmp_path / "a", "super_glue/multirc/validation")
    assert {row["idx"]["question"] for row in multirc} == set(range(10))
    assert len({row["paragraph"] for row in multirc}) == 1
    write_whole_sets(eval_data, tmp_path / "b", 0.01)
    assert rows(tmp_path / "a", "hellaswag/validation") == rows(tmp_path / "b", "hellaswag/validation")
