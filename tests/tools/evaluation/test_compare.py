"""Paired tests equal the formulas and the enumeration of every swap."""

from __future__ import annotations

import itertools
import re
from math import comb

import numpy as np
import pytest

from tools.evaluation.document_metrics import metric_value, metrics_by_document, metrics_of
from tools.evaluation.results_file import read_results
from tools.evaluation.significance import SWAPS, compare, comparison_rows, difference, excluded_metrics


def results(documents: dict, title: str = "model") -> dict:
    return {"metalion": {"documents": documents, "title": title}}


def entry(values: list, ids: list[str] | None = None) -> dict:
    return {"ids": ids or [str(i) for i in range(len(values))], "values": values}


def test_right_or_wrong_outcomes_take_the_sign_test():
    first = np.array([1.0] * 10 + [0.0] * 10)
    second = np.array([1.0] * 8 + [0.0] * 2 + [1.0] * 9 + [0.0])
    result = difference("t", "acc", first, second)
    n, k = 11, 2  # 2 lost, 9 gained
    assert result.p == pytest.approx(2 * sum(comb(n, i) for i in range(k + 1)) / 2**n)
    assert (result.first, result.second, result.change) == (0.5, 0.85, pytest.approx(0.35))
    assert result.stderr == pytest.approx(np.std(second - first, ddof=1) / np.sqrt(20))


def test_equal_models_have_p_one():
    values = np.array([1.0, 0.0, 1.0])
    assert difference("t", "acc", values, values).p == 1.0
    assert difference("t", "perplexity", -values, -values).p == 1.0


def test_common_documents_are_paired_by_content_in_any_order():
    first = results({"t": {"acc": entry([1, 0, 1, 0, 1], ["0:aa", "1:bb", "2:cc", "3:aa", "4:dd"])}})
    second = results({"t": {"acc": entry([1, 1, 0, 0, 1], ["0:cc", "1:aa", "2:aa", "3:bb", "4:ee"])}})
    (actual,) = compare(first, second)
    assert actual.documents == 4
    assert (actual.first, actual.second, actual.stderr) == (0.5, 0.5, 0.0)


def all_swaps(statistic, first, second) -> float:
    """Return p by enumeration of all swaps."""
    observed = abs(statistic(second) - statistic(first))
    reached = 0
    for swap in itertools.product([False, True], repeat=len(first)):
        mask = np.array(swap).reshape(-1, *([1] * (first.ndim - 1)))
        a, b = np.where(mask, second, first), np.where(mask, first, second)
        reached += abs(statistic(b) - statistic(a)) >= observed - 1e-12
    return reached / 2 ** len(first)


def test_perplexity_is_compared_as_a_perplexity():
    draw = np.random.default_rng(0)
    first = -draw.exponential(3, 9)
    second = first + 0.8 + draw.normal(0, 0.5, 9)
    expected = all_swaps(lambda x: np.exp(-x.mean()), first, second)
    result = difference("lambada_openai", "perplexity", first, second)
    assert result.p == pytest.approx(expected, abs=4 * np.sqrt(expected / SWAPS) + 1e-3)
    assert result.second == pytest.approx(np.exp(-second.mean()))


def macro_f1(pairs: np.ndarray) -> float:
    predicted, true = pairs.T
    scores = []
    for k in range(3):
        hits = float(((predicted == k) & (true == k)).sum())
        positive = float((predicted == k).sum() + (true == k).sum())
        scores.append(2 * hits / positive if positive else 0.0)
    return float(np.mean(scores))


def test_cb_is_compared_by_macro_f1():
    true = np.array([0, 1, 2, 0, 1, 2, 0, 1, 0])
    first = np.stack([np.array([0, 1, 2, 0, 1, 2, 0, 1, 1]), true], 1).astype(float)
    second = np.stack([np.array([0, 0, 1, 0, 0, 2, 1, 1, 0]), true], 1).astype(float)
    from lm_eval.tasks.super_glue.cb.aggregate import cb_multi_fi

    assert macro_f1(first) == pytest.approx(cb_multi_fi(first.tolist())), "the harness's own"
    result = difference("cb", "f1", first, second)
    assert (result.first, result.second) == (pytest.approx(macro_f1(first)), pytest.approx(macro_f1(second)))
    expected = all_swaps(macro_f1, first, second)
    assert result.p == pytest.approx(expected, abs=4 * np.sqrt(expected / SWAPS) + 1e-3)
    assert result.stderr is None


def test_holm_corrects_for_the_number_of_comparisons():
    better = [1.0] * 12 + [0.0] * 12
    tasks = {f"t{i}": {"acc": entry([0.0] * 24 if i == 0 else better)} for i in range(4)}
    others = {name: {"acc": entry(better)} for name in tasks}
    actual = compare(results(tasks), results(others))
    assert actual[0].p == pytest.approx(2 / 2**12)
    assert actual[0].adjusted == pytest.approx(4 * actual[0].p)
    assert actual[1].adjusted == 1.0
    header, rows = comparison_rows(actual)
    assert rows[0][header.index("difference")] == "+50.00"
    assert [row[-1] for row in rows] == ["unknown direction, significant", "", "", ""]


def test_better_model_follows_the_direction_of_the_metric():
    worse, better = [1.0] * 4 + [2.0] * 8, [0.0] * 12
    metrics = {metric: entry(worse) for metric in ("acc", "brier_score", "perplexity", "other")}
    first = results({"t": metrics})
    first["higher_is_better"] = {"t": {"acc": True, "brier_score": False}}
    second = results({"t": dict.fromkeys(metrics, entry(better))})
    actual = {d.metric: (d.higher_is_better, d.better) for d in compare(first, second)}
    assert actual["acc"] == (True, "first")
    assert actual["brier_score"] == (False, "second")
    assert actual["perplexity"] == (False, "first")  # the documents hold log-likelihoods
    assert actual["other"] == (None, "")
    _, rows = comparison_rows(compare(first, second))
    assert [row[1] for row in rows] == ["acc ↑", "brier_score ↓", "perplexity ↓", "other"]
    assert rows[0][-1] == "first, significant"


def test_adjusted_p_values_are_monotone():
    """All of k documents differ: p = 2^(1 - k). The factors are three, two and one; a value is at least its predecessor."""
    tasks = {"a": 6, "b": 8, "c": 6}
    none, all_of_them = ({t: {"acc": entry([x] * k)} for t, k in tasks.items()} for x in (0.0, 1.0))
    actual = {d.task: d.adjusted for d in compare(results(none), results(all_of_them))}
    assert actual == pytest.approx({"a": 2 / 2**5, "b": 3 / 2**7, "c": 2 / 2**5})


def test_p_is_never_zero():
    values = np.linspace(1.0, 2.0, 50)
    assert difference("t", "acc", values, values + 1).p == 1 / (SWAPS + 1)


def test_results_without_common_documents_are_refused():
    with pytest.raises(ValueError, match="share no task and document"):
        compare(results({"piqa": {"acc": entry([1.0])}}), results({"copa": {"acc": entry([1.0])}}))


def sample(number: int, name: str = "none", **metrics) -> dict:
    """Return a logged sample of the harness under a filter."""
    return {"doc_id": number, "doc_hash": f"{number:012d}", "filter": name, "metrics": [*metrics], **metrics}


def test_each_filter_of_a_task_is_a_metric():
    # gsm8k has two filters with one metric name: here all answers are right and none has the strict format.
    shares = {"strict-match": 0.0, "flexible-extract": 1.0}
    logged = [sample(i, name, exact_match=value) for name, value in shares.items() for i in range(24)]
    both = results({"gsm8k": metrics_by_document("gsm8k", logged)})
    assert [(d.metric, d.documents, d.first, d.second, d.p) for d in compare(both, both)] == [
        (f"exact_match,{name}", 24, value, value, 1.0) for name, value in shares.items()
    ]
    entry = {"alias": "gsm8k"}
    for name, value in shares.items():
        entry |= {f"exact_match,{name}": value, f"exact_match_stderr,{name}": 0.01 + value}
    actual = {"results": {"gsm8k": entry, "piqa": {"acc,none": 0.5, "acc_stderr,none": 0.1}}}
    assert metrics_of(actual, "gsm8k") == [f"exact_match,{name}" for name in shares]
    assert metrics_of(actual, "piqa") == ["acc"]
    assert metric_value(actual, "gsm8k", "exact_match,flexible-extract") == (1.0, 1.01)
    assert metric_value(actual, "gsm8k", "exact_match") == (0.0, 0.01), "a column without a filter takes the first"
    plain = {"acc,strict": 0.0, "acc,none": 1.0, "acc_stderr,strict": 0.2, "acc_stderr,none": 0.3}
    assert metric_value({"results": {"piqa": plain}}, "piqa", "acc") == (1.0, 0.3), (
        "or the unfiltered one, if there is one"
    )
    assert metric_value(actual, "piqa", "acc") == (0.5, 0.1)
    assert metric_value(actual, "piqa", "exact") is None


def test_document_metrics_are_numbers_and_pairs():
    logged = [
        sample(
            i,
            acc=np.float32(0.5),
            right=i == 0,
            f1=(np.int64(i), True),
            word_perplexity=(-10.75, 3),
            bleu=(["a text"], ["another"]),
            f1_of_texts=({"id": "a"}, {"id": "b"}),
            sometimes=1.0 if i else None,
        )
        for i in range(2)
    ]
    actual = {metric: entry["values"] for metric, entry in metrics_by_document("t", logged).items()}
    assert actual == {
        "acc": [0.5, 0.5],
        "right": [1.0, 0.0],
        "f1": [[0, 1], [1, 1]],
        "word_perplexity": [[-10.75, 3], [-10.75, 3]],
    }
    assert {type(v) for pair in actual["f1"] for v in pair} == {int}


def test_corpus_perplexities_are_computed_from_pairs():
    draw = np.random.default_rng(0)
    words = draw.integers(5, 50, 8).astype(float)
    first = np.stack([-3.0 * words - draw.exponential(4, 8), words], 1)
    second = np.stack([first[:, 0] + draw.exponential(8, 8), words], 1)

    def nats(x: np.ndarray) -> float:
        return float(-x[:, 0].sum() / x[:, 1].sum())

    for metric, statistic in (
        ("word_perplexity", lambda x: np.exp(nats(x))),
        ("byte_perplexity", lambda x: np.exp(nats(x))),
        ("bits_per_byte", lambda x: nats(x) / np.log(2)),
    ):
        from lm_eval.api.metrics import bits_per_byte, weighted_perplexity

        theirs = bits_per_byte if metric == "bits_per_byte" else weighted_perplexity
        assert statistic(first) == pytest.approx(theirs(first.tolist())), "the harness's own"
        result = difference("wikitext", metric, first, second)
        assert (result.first, result.second) == (pytest.approx(statistic(first)), pytest.approx(statistic(second)))
        expected = all_swaps(statistic, first, second)
        assert result.p == pytest.approx(expected, abs=4 * np.sqrt(expected / SWAPS) + 1e-3)
        assert result.stderr is None
        _, ((_, _, _, shown, *_),) = comparison_rows([result])
        assert shown == f"{result.first:.4g}"


def test_metric_that_is_not_finite_is_excluded():
    # A diverged model has NaN, or null in JSON.
    fine = {"lambada_openai": {"perplexity": entry([-1.0, -2.0])}, "piqa": {"acc": entry([0.0, 1.0])}}
    for none in (float("nan"), None):
        wild = {"lambada_openai": {"perplexity": entry([none, none])}, "piqa": {"acc": entry([0.0, 1.0])}}
        assert [d.task for d in compare(results(fine), results(wild))] == ["piqa"]
        assert excluded_metrics(results(fine), results(wild)) == [
            "lambada_openai: perplexity is not a finite number for every document"
        ]


def test_unsupported_metric_is_excluded_with_its_reason(tmp_path, capsys):
    import json

    from tools.evaluation.command import compare_command

    pairs = entry([[0, 1], [1, 1]])
    unknown = {"mrpc": {"f1": pairs}, "old": {"exact_match": entry([0.0, 1.0], ["a", "a"])}}
    both = results({**unknown, "cb": {"f1": pairs}})
    assert [(d.task, d.metric) for d in compare(both, both)] == [("cb", "f1")]
    reasons = excluded_metrics(both, both)
    assert reasons[0].startswith("mrpc: f1 is no mean over documents")
    assert reasons[1].startswith("old: exact_match has documents twice")
    with pytest.raises(ValueError, match=r"mrpc: f1 is no mean .*; old: exact_match has"):
        compare(results(unknown), results(unknown))
    (tmp_path / "a.json").write_text(json.dumps({**both, "results": {}}))
    assert compare_command([str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "not compared: mrpc: f1 is no mean over documents" in capsys.readouterr().out


def test_file_that_is_no_results_is_refused(tmp_path):
    file = tmp_path / "a.json"
    for content, missing in (
        ("", "is no JSON"),
        ("{}", "'metalion'"),
        ('{"metalion": {}, "results": {}}', "'metalion.title'"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"a\.json .*{missing}.*: give the file of python eval\.py MODEL"):
            read_results(file)
    own = tmp_path / "evaluation" / "step_00000060" / "results.json"
    own.parent.mkdir(parents=True)
    own.touch()
    (tmp_path / "results.json").write_text("{}")  # the scores of a run
    with pytest.raises(ValueError, match=f"has no key 'metalion': give .* such as {re.escape(str(own))}"):
        read_results(tmp_path)
    file.write_text('{"metalion": {"title": "a", "documents": {}}, "results": {}}')
    assert read_results(file)
    with pytest.raises(ValueError, match="has no key 'versions'"):
        read_results(file, tables=True)
