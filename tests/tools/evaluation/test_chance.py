"""On real data a random model scores at chance if the choices are balanced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from data.tokenizer import load_tokenizer
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.document_metrics import chance_level, majority_scores, metric_value
from tools.evaluation.harness import evaluate, prepare_tasks
from tools.evaluation.request import TaskRequest


def test_chance_level_with_different_numbers_of_choices():
    samples = [{"metrics": ["acc"], "filtered_resps": [()] * n} for n in (2, 4, 4)]
    assert chance_level(samples) == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 3)
    twice = {"metrics": ["acc", "acc_mutual_info"], "filtered_resps": [()] * 8}  # with and without context
    assert chance_level([twice]) == pytest.approx(1 / 4)
    assert chance_level([{"metrics": ["acc"], "filtered_resps": [()]}]) is None
    assert chance_level([{"metrics": ["f1"], "filtered_resps": [()] * 2}]) is None


def test_scores_of_the_most_frequent_answer():
    task = SimpleNamespace(multiple_input=0)
    three = {"metrics": ["acc", "f1"], "filtered_resps": [()] * 3}
    scores = majority_scores("cb", task, [{**three, "target": label} for label in (1, 1, 0, 2)])
    # Precision 1/2 and recall 1 of one class; the F1 of the two others is 0.
    assert scores == pytest.approx({"acc": 1 / 2, "acc_norm": 1 / 2, "f1": (2 / 3) / 3})

    def of_multirc(*labels: tuple[int, int]) -> dict[str, float]:
        """Return the scores for pairs of (question, label)."""
        two = {"metrics": ["acc"], "filtered_resps": [()] * 2}
        docs = [{"idx": {"paragraph": 0, "question": question}} for question, _ in labels]
        samples = [{**two, "doc": doc, "target": label} for doc, (_, label) in zip(docs, labels, strict=True)]
        return majority_scores("multirc", task, samples)

    # A question counts if all of its answers have the label, in any order.
    yes = of_multirc((0, 1), (0, 1), (1, 0), (1, 1))
    assert yes == pytest.approx({"exact_match": 1 / 2, "answer_acc": 3 / 4, "f1a": 6 / 7})
    no = of_multirc((0, 0), (0, 0), (1, 1), (1, 0))
    assert no == pytest.approx({"exact_match": 1 / 2, "answer_acc": 3 / 4, "f1a": 0.0})


def test_random_model_scores_at_chance(shared):
    tokenizer = load_tokenizer("bytes")
    config = ModelConfig(vocab_size=320, num_layers=1, hidden_size=32, num_heads=2, intermediate_size=32)
    model = LanguageModel(config, seed=0).eval().requires_grad_(False)
    # Choices of equal length and frequency: a random model prefers none.
    balanced = ("wsc273", "copa", "winogrande")
    prepared = prepare_tasks(TaskRequest(tasks=balanced, data_dir=shared / "data/eval"))
    results = evaluate(ProjectLM(model, tokenizer, max_length=512, progress=False), prepared)
    for task in balanced:
        value, error = metric_value(results, task, "acc")
        assert value == pytest.approx(0.5, abs=3 * error), task
