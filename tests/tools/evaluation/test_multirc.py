"""MultiRC's metrics of models that are always right, always say yes and always say no, through the harness."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from lm_eval.api.model import LM

from tests.tools.evaluation.conftest import made_up_rows
from tools.evaluation.harness import evaluate, prepare_tasks
from tools.evaluation.multirc import multirc_metrics
from tools.evaluation.request import TaskRequest

ROWS = made_up_rows()["super_glue/multirc/validation.jsonl"]


class Answering(LM):
    """Answer yes to the rows for which `judge(row)` holds."""

    def __init__(self, judge) -> None:
        super().__init__()
        self.yes = {(row["question"], row["answer"]) for row in ROWS if judge(row)}

    def loglikelihood(self, requests, **kwargs):
        actual = []
        for request in requests:
            context, continuation = request.args
            answer, word = continuation.split("\nIs the answer correct? ")
            question = context.rpartition("Question: ")[2].partition("\n")[0]
            judged = (question, answer.strip()) in self.yes
            actual.append((-1.0 if judged == (word == "yes") else -2.0, False))
        return actual

    def loglikelihood_rolling(self, requests, **kwargs):
        pytest.fail("MultiRC ranks choices only")

    def generate_until(self, requests, **kwargs):
        pytest.fail("MultiRC ranks choices only")


@pytest.fixture(scope="module")
def prepared(eval_data: Path):
    return prepare_tasks(TaskRequest(tasks=("multirc",), data_dir=eval_data))


def scores(prepared, judge) -> dict[str, float]:
    return evaluate(Answering(judge), prepared)["results"]["multirc"]


def test_oracle_scores_one(prepared):
    actual = scores(prepared, lambda row: row["label"] == 1)
    assert (actual["exact_match,none"], actual["answer_acc,none"], actual["f1a,none"]) == (1.0, 1.0, 1.0)
    assert actual["acc,none"] == 0.0, "the harness takes the label as the index of (yes, no)"


def test_always_yes_scores_its_share(prepared):
    actual = scores(prepared, lambda row: True)
    correct = sum(row["label"] for row in ROWS)
    by_question: dict[int, list[int]] = {}
    for row in ROWS:
        by_question.setdefault(row["idx"]["question"], []).append(row["label"])
    assert actual["answer_acc,none"] == correct / len(ROWS)
    assert actual["exact_match,none"] == sum(all(labels) for labels in by_question.values()) / len(by_question)
    assert actual["f1a,none"] == pytest.approx(2 * correct / (len(ROWS) + correct))


def test_always_no_has_f1_zero(prepared):
    assert scores(prepared, lambda row: False)["f1a,none"] == 0.0


def test_exact_match_is_per_question():
    def sample(question: int, label: int, yes: float, paragraph: int = 0) -> dict:
        return {
            "filtered_resps": [(yes, False), (-1.0, False)],
            "doc": {"idx": {"paragraph": paragraph, "question": question}, "label": label},
        }

    samples = [sample(0, 1, -0.5), sample(0, 0, -0.5), sample(1, 1, -0.5), sample(1, 0, -2.0), sample(2, 0, -2.0)]
    actual = multirc_metrics(samples)
    assert actual["exact_match"] == 2 / 3
    assert actual["answer_acc"] == 4 / 5
    assert actual["f1a"] == pytest.approx(2 * 2 / (3 + 2))
    # Standard error of the mean, with n - 1.
    assert actual["exact_match_stderr"] == pytest.approx(statistics.stdev([0, 1, 1]) / 3**0.5)
    assert actual["answer_acc_stderr"] == pytest.approx(statistics.stdev([1, 0, 1, 1, 1]) / 5**0.5)
    two = [sample(0, 1, -0.5), sample(0, 0, -0.5, paragraph=1)]
    assert multirc_metrics(two)["exact_match"] == 1 / 2, "question 0 of another paragraph is another question"
    assert multirc_metrics(two)["exact_match_stderr"] == pytest.approx(statistics.stdev([0, 1]) / 2**0.5)
    alone = multirc_metrics([sample(0, 0, -1.0)])
    assert alone["answer_acc"] == 1.0, "equal likelihoods count as no"
    assert alone["f1a"] == 0.0
    assert math.isnan(alone["exact_match_stderr"])
