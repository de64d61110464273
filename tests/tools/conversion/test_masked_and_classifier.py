"""Check masked models, classifiers and refused configurations in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models.hf.configuration_metalion import MetalionConfig
from models.hf.modeling_metalion import (
    MetalionForCausalLM,
    MetalionForMaskedLM,
    MetalionForSequenceClassification,
    MetalionModel,
)
from models.language_model import LanguageModel
from tests.tools.conversion.test_modeling_metalion import (
    BOTH_WAYS,
    away_from_zero,
    config,
    masked_model,
    padded,
    tokens,
)


def test_masked_model() -> None:
    model = masked_model()
    prompts = [tokens(1, 9)[0], tokens(1, 5)[0]]
    ids, mask = padded(prompts, "right")
    labels = torch.where(mask.bool(), ids, -100)
    labels[:, ::2] = -100
    output = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.logits[1, :5], model(prompts[1][None]).logits[0], rtol=1e-5, atol=1e-5)
    expected = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected)
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        MetalionForCausalLM(model.config)


def test_only_the_masked_model_has_the_bert_head(tmp_path: Path) -> None:
    """Export, and load as each kind of model without missing or unexpected keys."""
    model = masked_model(head="mlm")
    x = tokens(2, 9)
    lm = LanguageModel(model.config.model_config(), layers=[model.embedding, *model.blocks, model.head])
    assert torch.equal(lm(x), model(x).logits)
    model.save_pretrained(tmp_path)
    for kind in (MetalionForMaskedLM, MetalionModel, MetalionForSequenceClassification):
        loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert report["unexpected_keys"] in ([], set())
        assert set(report["missing_keys"]) == ({"score.weight"} if "score" in dict(loaded.named_children()) else set())
        if kind is not MetalionForMaskedLM:
            assert {name for name, _ in loaded.head.named_parameters()} == {"norm.weight", "norm.bias"}
    hidden = MetalionModel.from_pretrained(tmp_path).eval()(x).last_hidden_state
    embedded = model.head.project(model.head.transform(hidden), model.head.weight, model.head.bias)
    torch.testing.assert_close(embedded, model(x).logits)


@pytest.mark.parametrize("how", ["last", "first", "mean", None])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_sequence_classification(kind: str, how: str | None) -> None:
    shape = {"mixers": ["metala"]} if kind == "causal" else BOTH_WAYS
    model = MetalionForSequenceClassification(config(**shape, num_labels=3, classifier_pooling=how)).eval()
    away_from_zero(model)
    prompts = [tokens(1, 9)[0], tokens(1, 5)[0]]
    for side in ("left", "right"):
        ids, mask = padded(prompts, side)
        output = model(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(output.logits[row], model(prompt[None]).logits[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([2, 0])))
    hidden = model(prompts[0][None], output_hidden_states=True).hidden_states[-1][0]
    pooled = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}
    place = how or ("last" if kind == "causal" else "first")
    torch.testing.assert_close(model(prompts[0][None]).logits[0], F.linear(pooled[place], model.score.weight))


def test_mean_of_many_float16_vectors() -> None:
    """Test sums above float16's largest number, 65504: 8,000 tokens with values near 9, one of them padding."""
    model = MetalionForSequenceClassification(config(["metala"], num_labels=3, classifier_pooling="mean"))
    torch.nn.init.constant_(model.head.norm.bias, 9.0)
    ids, mask = tokens(1, 8000), torch.ones(1, 8000, dtype=torch.bool)
    mask[0, -1] = False
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(model.half()(ids, attention_mask=mask).logits.float(), expected, rtol=0.02, atol=0.02)


def test_regression_and_several_labels() -> None:
    ids = tokens(2, 5)
    one = MetalionForSequenceClassification(config(["metala"], num_labels=1))
    torch.testing.assert_close(
        one(ids, labels=torch.tensor([0.5, -1.0])).loss, F.mse_loss(one(ids).logits[:, 0], torch.tensor([0.5, -1.0]))
    )
    several = MetalionForSequenceClassification(config(["metala"], num_labels=3))
    targets = torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    expected = F.binary_cross_entropy_with_logits(several(ids).logits, targets)
    torch.testing.assert_close(several(ids, labels=targets).loss, expected)
    many = MetalionForSequenceClassification(config(["metala"], num_labels=200))
    assert many.score.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_configuration_errors() -> None:
    with pytest.raises(ValueError, match="classifier_pooling = 'max': allowed are null, last, first, mean"):
        config(["metala"], classifier_pooling="max")
    with pytest.raises(ValueError, match="unknown mixer 'metalla'; did you mean metala"):
        config(["metalla"])
    assert config(["metala"]).num_hidden_layers == 2
    assert MetalionConfig(num_hidden_layers=3).num_layers == 3
