"""Pseudo-log-likelihood equals masking one token at a time, and results name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from data.tokenizer import load_tokenizer
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.harness import evaluate, prepare_tasks
from tools.evaluation.pseudo_likelihood import PseudoScorer
from tools.evaluation.request import TaskRequest
from tools.evaluation.suites import read_suite
from tools.evaluation.tables import suite_table

ENCODERS: list[dict[str, Any]] = [
    {"mixers": ("lion",), "mixer_options": {"lion": {"variant": "s", "causal": False}}},
    {"mixers": ("metala_bidirectional",)},
    {"mixers": ("attention",), "mixer_options": {"attention": {"causal": False}}},
]


def encoder(vocab_size: int = 320, **shape: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=vocab_size, num_layers=2, hidden_size=32, num_heads=2, **shape)
    model = LanguageModel(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("shape", ENCODERS)
def test_score_equals_masking_one_token_at_a_time(shape):
    model = encoder(**shape).double()
    assert model.config.bidirectional_mixers()
    draw = np.random.default_rng(0)
    contexts = [draw.integers(0, 256, n) for n in (5, 1, 30, 12)]
    targets = [draw.integers(0, 256, n) for n in (3, 7, 1, 2)]
    expected = []
    for context, target in zip(contexts, targets, strict=True):
        whole, total, right = np.array([300, *context, *target, 301]), 0.0, True
        for place in range(1 + len(context), len(whole) - 1):
            tokens = torch.from_numpy(whole.copy())
            tokens[place] = 257
            scores = model(tokens[None])[0, place].log_softmax(-1)
            total += float(scores[whole[place]])
            right &= int(scores.argmax()) == whole[place]
        expected.append((total, right))
    for batch_tokens in (40, 10_000):
        scorer = PseudoScorer(model, 257, (300,), (301,), batch_tokens)
        answers: list = []
        scorer.score_units(scorer.units(contexts, targets), 4, done=answers.extend)
        actual = dict(answers)
        assert len(answers) == 4, "each score is passed on once"
        assert [actual[i][0] for i in range(4)] == pytest.approx([value for value, _ in expected], abs=1e-9)
        assert [actual[i][1] for i in range(4)] == [right for _, right in expected]


def test_request_has_the_training_tokens_around_it_and_fits_the_length(tmp_path):
    words = ["[UNK]", "[SEP]", "[CLS]", "[MASK]", *"abcdefgh"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = load_tokenizer("wordpiece", tmp_path / "vocab.txt")
    model = encoder(128, **ENCODERS[0]).double()
    lm = ProjectLM(model, tokenizer, max_length=9, progress=False)
    pairs = [("a b c", " d e"), ("a b c d e f g h a b", " c d")]
    actual = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for text, (value, _) in zip(("a b c d e", "f g h a b c d"), actual, strict=True):  # 9 with both ends
        whole = torch.tensor([2, *tokenizer.encode(text), 1])
        total = 0.0
        for place in (len(whole) - 3, len(whole) - 2):
            hidden = whole.clone()
            hidden[place] = 3
            total += float(model(hidden[None])[0, place].log_softmax(-1)[whole[place]])
        assert value == pytest.approx(total, abs=1e-9)
    assert lm.counts.truncated[""] == 1
    long = [Instance("loglikelihood", {}, ("a", " b c d e f g h a"), 0)]
    with pytest.raises(ValueError, match=r"has 8 tokens and .* Give a larger --max-length \(11\)"):
        lm.loglikelihood(long)
    assert ProjectLM(model, tokenizer, max_length=11, progress=False).loglikelihood(long)[0][0] < 0


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_text_without_a_context_has_only_the_training_tokens_around_it(kind):
    model, tokenizer = encoder(**ENCODERS[0]).double(), load_tokenizer("bytes")
    lm = ProjectLM(model, tokenizer, max_length=64, progress=False)
    whole = torch.tensor([*b"the cat", tokenizer.end_of_document_id])
    hidden = whole.repeat(7, 1).fill_diagonal_(tokenizer.mask_id)
    expected = float(model(hidden)[range(7), range(7)].log_softmax(-1)[range(7), whole[:7]].sum())
    texts = ("", "the cat") if kind == "loglikelihood" else ("the cat",)
    (score,) = getattr(lm, kind)([Instance(kind, {}, texts, 0)])
    assert (score[0] if kind == "loglikelihood" else score) == pytest.approx(expected, abs=1e-9)


def test_masked_model_is_noted_and_does_not_generate(eval_data):
    model = encoder(**ENCODERS[0])
    lm = ProjectLM(model, load_tokenizer("bytes"), max_length=64, name="lion", progress=False)
    results = evaluate(lm, prepare_tasks(TaskRequest(suites=("superglue",), data_dir=eval_data)))
    assert results["metalion"]["score"] == results["config"]["score"] == "pseudo-log-likelihood"
    notes = " ".join(suite_table(read_suite("superglue"), [("lion", results)]).notes)
    assert "lion is a masked model: choices are ranked by pseudo-log-likelihood" in notes
    rolled = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("some text " * 12,), 0)])
    assert rolled[0] < 0
    with pytest.raises(ValueError, match="sees both directions and cannot continue a text"):
        lm.generate_until([Instance("generate_until", {}, ("a", {"until": []}), 0)])


def test_tokenizer_without_a_row_for_its_mask_is_refused():
    with pytest.raises(ValueError, match=r"has id 257, and the model has 257 rows: .*; evaluate one"):
        ProjectLM(encoder(257, **ENCODERS[0]), load_tokenizer("bytes"), max_length=64)
