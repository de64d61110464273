"""The benchmark measures both sides on the same requests and estimates the rest of a stopped side."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from tools.benchmark_evaluation import Timing, main, report
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.full_size_sets import SIZES, _read, write_whole_sets
from tools.evaluation.progress import ProgressMonitor, TimeUpError, attach_monitor
from tools.loading.model import load_model


def requests() -> list[Instance]:
    pairs = [(f"{n} alpha beta {'gamma ' * n}", f" count {n}") for n in range(60)]
    return [Instance("loglikelihood", {}, pair, i, metadata=("made up", i, 1)) for i, pair in enumerate(pairs)]


@pytest.fixture
def lm(trained_run: Path) -> ProjectLM:
    loaded = load_model(trained_run, device="cpu")
    return ProjectLM(loaded.model, loaded.tokenizer, max_length=96, progress=False, batch_tokens=500)


def test_both_sides_answer_the_same_requests(trained_run, eval_data, tmp_path, capsys):
    words = ["--data-dir", str(eval_data), "--checkpoint", str(trained_run), "--device", "cpu", "--dtype", "fp32"]
    assert main([*words, "--scale", "0.0005", "--max-length", "1024", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    actual = json.loads((tmp_path / "evaluation.json").read_text())
    assert actual["largest_difference"] < 1e-4
    assert actual["metalion"]["requests"] == actual["hf"]["requests"] > 100
    assert actual["metalion"]["tokens"] == actual["hf"]["tokens"]
    assert not actual["metalion"]["estimated"]
    assert not actual["hf"]["estimated"]
    batches = actual["metalion"]["batches"]
    assert 0 < batches["tokens_read"] <= batches["with_padding"]
    assert 0 < batches["shapes"] <= batches["batches"]
    assert actual["ratio"]["whole"] == pytest.approx(actual["hf"]["total"] / actual["metalion"]["total"])
    assert "hf over metalion" in printed
    assert "estimated" not in printed

    # One side, stopped at once.
    assert (
        main([*words, "--scale", "0.0005", "--only", "hf", "--limit-minutes", "1e-6", "--output", str(tmp_path)]) == 0
    )
    actual = json.loads((tmp_path / "evaluation.json").read_text())
    assert actual.keys() == {"hf"}
    assert actual["hf"]["estimated"]
    assert actual["hf"]["requests"] <= 1


def test_time_of_a_side_without_answers_is_null(tmp_path):
    report([Timing("hf", 2.0, 1.0, 1.0, requests=0, tokens=0, share=0.0, answers={})], tmp_path)
    content = json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert content["hf"]["whole"] is None


def test_monitor_records_every_answer(lm):
    instances = requests()
    expected = lm.loglikelihood(instances)
    out, now = io.StringIO(), [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monitor = ProgressMonitor("tiny", out, clock=clock)
    attach_monitor(lm, monitor)
    monitor.start()
    assert lm.loglikelihood(instances) == expected
    assert [monitor.answers[request.args] for request in instances] == [value for value, _ in expected]
    assert (monitor.answered, monitor.share) == (len(instances), 1.0)
    assert monitor.answered_tokens == sum(monitor.tokens) == lm.counts.tokens // 2
    assert 0 < monitor.received < monitor.tokenised < monitor.ended
    lines = out.getvalue().splitlines()
    assert "60 requests" in lines[0]
    assert "tokenised in" in lines[1]
    assert "of the tokens" in lines[-1]


def test_stopped_side_has_its_share(lm):
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monitor = ProgressMonitor("tiny", io.StringIO(), limit=12.0, clock=clock)
    attach_monitor(lm, monitor)
    monitor.start()
    with pytest.raises(TimeUpError, match="tiny: stopped after"):
        lm.loglikelihood(requests())
    assert 0 < monitor.answered < 60
    assert 0 < monitor.share < 1
    assert monitor.tokens_per_second == pytest.approx(monitor.answered_tokens / (monitor.ended - monitor.tokenised))


def test_time_of_a_stopped_side_is_estimated() -> None:
    # A quarter was answered in 8 of 12 seconds. Only the scoring takes longer for all requests.
    stopped = Timing("hf", total=12.0, tokenising=3.0, scoring=8.0, requests=5, tokens=80, share=0.25, answers={})
    assert (stopped.whole, stopped.model_time, stopped.tokens_per_second) == (36.0, 35.0, 10.0)
    assert replace(stopped, share=1.0).whole == 12.0


def test_filled_sets_have_the_sizes_of_the_whole_sets(eval_data, tmp_path):
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


def test_real_rows_of_an_incomplete_set_are_used_once(tmp_path):
    def written(texts: list[str], folder: Path) -> None:
        folder.mkdir()
        (folder / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    texts = [f"alpha beta {n}" for n in range(60)]
    written(texts, tmp_path / "lambada_openai")
    (tmp_path / "lambada_openai" / "validation.jsonl").write_text('{"text": "alpha beta 7"}\n{"text": "gamma"}\n')
    assert [row["text"] for row in _read(tmp_path, "lambada_openai/test")] == [*texts, "gamma"]
