"""On real data a random model is at chance where the choices are balanced."""

from __future__ import annotations

import pytest

from data.tokenizer import load_tokenizer
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.harness import _chance, evaluate, metric_value, prepare_tasks
from tools.evaluation.request import TaskRequest


def test_documents_may_have_different_numbers_of_choices():
    samples = [{"metrics": ["acc"], "filtered_resps": [()] * n} for n in (2, 4, 4)]
    assert _chance(samples) == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 3)
    assert _chance([{"metrics": ["acc"], "filtered_resps": [()]}]) is None
    assert _chance([{"metrics": ["f1"], "filtered_resps": [()] * 2}]) is None


def test_a_random_model_guesses(shared):
    tokenizer = load_tokenizer("bytes")
    config = ModelConfig(vocab_size=320, num_layers=1, hidden_size=32, num_heads=2, intermediate_size=32)
    model = LanguageModel(config, seed=0).eval().requires_grad_(False)
    # Choices of one length and without a favourite: a random model has nothing to prefer.
    balanced = ("wsc273", "copa", "winogrande")
    prepared = prepare_tasks(TaskRequest(tasks=balanced, data_dir=shared / "data/eval"))
    results = evaluate(ProjectLM(model, tokenizer, max_length=512, progress=False), prepared)
    for task in balanced:
        value, error = metric_value(results, task, "acc")
        assert value == pytest.approx(0.5, abs=3 * error), task
