"""Scores through the tree of shared prefixes equal a forward pass per request."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.evaluation import scoring
from tools.evaluation.prefix_tree import build_forest
from tools.evaluation.scoring import Scorer

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
VOCABULARY = 97


def config_of(name: str) -> ModelConfig:
    text = (CONFIGS / f"{name}.yml").read_text()
    values = {key: value for key, value in yaml.safe_load(text)["model"].items() if value is not None}
    return ModelConfig(**{**values, "vocab_size": VOCABULARY})


TINY = [path.stem for path in CONFIGS.glob("*_tiny.yml") if "vit" not in path.stem]  # not the image classifiers
CAUSAL = sorted(name for name in TINY if not config_of(name).bidirectional_mixers())


def model_of(name: str, seed: int = 0, **changes: Any) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel(dataclasses.replace(config_of(name), **changes), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():  # many mixers have almost no effect at their initial values
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def requests_with_shared_parts(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return paragraphs with questions with endings, equal inputs, and inputs that are a prefix of another."""
    draw = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return draw.integers(0, VOCABULARY, draw.integers(low, high)).tolist()

    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(2):
        paragraph = some(20, 60)
        for _ in range(2):
            question = paragraph + some(1, 25)
            for _ in range(3):
                ending = some(1, 22)
                pairs += [(question, ending), (question, [*ending, *some(1, 4)]), (question + ending[:-1], ending[-1:])]
            pairs += [(question, [token]) for token in (3, 4)]
    pairs += [([5], some(1, 3)), (some(1, 2), some(90, 91)), pairs[0]]
    inputs = [np.array((context + target)[:-1]) for context, target in pairs]
    return inputs, [np.array(target) for _, target in pairs]


def contexts_of(inputs: list[np.ndarray], targets: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    contexts = [ids[: len(ids) - len(wanted) + 1] for ids, wanted in zip(inputs, targets, strict=True)]
    return contexts, targets


def alone(model: LanguageModel, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, bool]:
    logits = model(torch.from_numpy(inputs)[None])[0, -len(targets) :].double()
    wanted = torch.from_numpy(targets)
    chosen = logits.log_softmax(-1).gather(-1, wanted[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == wanted).all())


def score(model: LanguageModel, inputs: list, targets: list, **settings: int) -> tuple[list, Scorer]:
    scorer = Scorer(model, **settings)
    actual: dict[int, tuple[float, bool]] = {}

    def done(answers: list) -> None:
        assert not actual.keys() & dict(answers).keys()
        actual.update(answers)

    scorer.score_units(scorer.units(*contexts_of(inputs, targets)), len(inputs), done=done)
    return [actual[i] for i in range(len(inputs))], scorer


@pytest.mark.parametrize("name", [*CAUSAL, "learned positions"])
def test_every_mixer_scores_as_without_sharing(name):
    if name == "learned positions":
        model = model_of("metala_tiny", positions="learned", max_positions=128).double()
    else:
        model = model_of(name).double()
    inputs, targets = requests_with_shared_parts()
    expected = [alone(model, *request) for request in zip(inputs, targets, strict=True)]
    for settings in ({"batch_tokens": 150}, {"batch_tokens": 1 << 20, "state_bytes": 1}):
        actual, scorer = score(model, inputs, targets, **settings)
        for number, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            assert got[0] == pytest.approx(wanted[0], abs=1e-8), (name, settings, number)
            assert got[1] == wanted[1]
        assert scorer.read < 0.5 * sum(map(len, inputs))


def test_logits_in_parts_give_the_same_scores(monkeypatch):
    model = model_of("metala_tiny").double()
    inputs, targets = requests_with_shared_parts()
    whole, _ = score(model, inputs, targets)
    monkeypatch.setattr(scoring, "_LOGITS_CPU", 3 * VOCABULARY)  # logits of three tokens at a time
    parts, _ = score(model, inputs, targets)
    for got, wanted in zip(parts, whole, strict=True):
        assert got == (pytest.approx(wanted[0], abs=1e-8), wanted[1])


def test_greedy_flag_equals_greedy_decoding():
    model = model_of("metala_tiny")
    context = np.array([3, 1, 4, 1, 5])
    written: list[int] = []
    for _ in range(6):
        logits = model(torch.tensor([[*context.tolist(), *written]]))
        written.append(int(logits[0, -1].argmax()))
    wrong = [*written[:-1], (written[-1] + 1) % VOCABULARY]
    inputs = [np.array([*context, *ids][:-1]) for ids in (written, wrong)]
    actual, _ = score(model, inputs, [np.array(written), np.array(wrong)])
    assert [greedy for _, greedy in actual] == [True, False]


def test_tree_contains_every_target_once():
    inputs, targets = requests_with_shared_parts(1)
    for shortest in (1, 16, 1000):
        forest = build_forest(inputs, targets, shortest=shortest)
        actual: dict[int, list[int]] = {r: [] for r in range(len(inputs))}
        stack = [(root, ()) for root in forest]
        while stack:
            node, prefix = stack.pop()
            path = (*prefix, *node.tokens.tolist())
            assert len(node.tokens) > 0
            for request, first, wanted in node.spans:
                ends = [*prefix, *node.tokens[: first + len(wanted)]]
                assert inputs[request][: len(ends)].tolist() == ends
                actual[request] += wanted.tolist()
            stack.extend((child, path) for child in node.children)
        assert {r: sorted(t) for r, t in actual.items()} == {r: sorted(t.tolist()) for r, t in enumerate(targets)}
    # With shortest=1, each distinct prefix is one token of the tree.
    words = {tuple(ids[: i + 1].tolist()) for ids in inputs for i in range(len(ids))}
    assert sum(root.size for root in build_forest(inputs, targets, shortest=1)) == len(words)


def test_ids_beyond_sixteen_bits_are_distinct():
    inputs = [np.array([1, 2, 3 + (n << 16)]) for n in range(3)]
    roots = build_forest(inputs, [np.array([7])] * 3, shortest=1)
    assert [root.tokens.tolist() for root in roots] == [[1, 2]]
    assert sorted(child.tokens.tolist() for child in roots[0].children) == [[3], [3 + (1 << 16)], [3 + (2 << 16)]]


@pytest.mark.parametrize("name", ["metala_tiny", "transformer_tiny"])
def test_batches_fit_their_memory(name):
    """Check the tokens of a batch and the bytes of its states; attention states grow with each token."""
    scorer = Scorer(model_of(name), batch_tokens=200)
    for length in (1, 9):
        _, state = scorer._forward(torch.zeros(1, length, dtype=torch.long), None, None, True)
        size = sum(value.nbytes for layer in state for value in layer.values())
        assert scorer._bytes_per_row + length * scorer._bytes_per_token == size
    scorer.state_bytes = 5 * (scorer._bytes_per_row + 60 * scorer._bytes_per_token)
    inputs, targets = requests_with_shared_parts()
    scorer.score_units(scorer.units(*contexts_of(inputs, targets)), len(inputs), done=list)
    assert all(rows == 1 or rows * length <= 200 for rows, length in scorer.shapes)
    scorer = Scorer(scorer.model, batch_tokens=1 << 20, state_bytes=scorer.state_bytes)
    inputs = [np.array([n // 40 % 2, *range(20), n % 40, 9]) for n in range(80)]
    scorer.score_units(scorer.units(*contexts_of(inputs, [ids[-2:] for ids in inputs])), 80, done=list)
    size = {length: scorer._bytes_per_row + length * scorer._bytes_per_token for _, length in scorer.shapes}
    assert all(rows * size[length] <= scorer.state_bytes for rows, length in scorer.shapes)


def test_padded_rows_of_a_cache_leave_room_for_their_mask():
    hybrid, recurrent = (Scorer(model_of(name), 100, state_bytes=1 << 30) for name in ("hybrid_tiny", "metala_tiny"))
    assert hybrid.state_rows(16384, 16384) == 1 < hybrid.state_rows(16384)
    assert recurrent.state_rows(16384, 16384) == recurrent.state_rows(16384) > 1000


def test_out_of_memory_halves_the_batch_and_counts_once(monkeypatch):
    model = model_of("metala_tiny").double()
    inputs, targets = requests_with_shared_parts()
    scorer = Scorer(model, batch_tokens=1 << 20)
    forward, tried = Scorer._forward, []

    def limited(self, tokens, *rest):
        tried.append(tokens.numel())
        if tokens.numel() > 150 and len(tokens) > 1:
            raise torch.OutOfMemoryError
        return forward(self, tokens, *rest)

    monkeypatch.setattr(Scorer, "_forward", limited)
    actual: dict = {}
    scorer.score_units(scorer.units(*contexts_of(inputs, targets)), len(inputs), done=actual.update)
    assert max(tried) > 150
    assert scorer.batch_tokens < 1 << 20
    for number, request in enumerate(zip(inputs, targets, strict=True)):
        assert actual[number][0] == pytest.approx(alone(model, *request)[0], abs=1e-8)


def test_rows_of_a_full_batch_have_similar_lengths(monkeypatch):
    scorer = Scorer(model_of("metala_tiny"), batch_tokens=1 << 14)
    draw = np.random.default_rng(0)
    inputs = [draw.integers(0, VOCABULARY, length) for length in range(1, 400)]
    scorer.score_units(scorer.units(*contexts_of(inputs, [ids[-1:] for ids in inputs])), len(inputs), done=list)
    read = scorer.read
    assert read == sum(map(len, inputs))
    assert sum(scorer.shapes.values()) < 60
    assert sum(rows * length * times for (rows, length), times in scorer.shapes.items()) < 1.1 * read
