"""The last layer in a model: its loss, its gradients, and the head of BERT."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.config import ModelConfig
from models.language_model import LanguageModel

VOCAB = 37


@pytest.mark.parametrize("head", ["linear", "mlm"])
@pytest.mark.parametrize("tied", [True, False])
def test_model_loss_and_gradients_tied_and_untied(tied, head):
    config = ModelConfig(vocab_size=VOCAB, num_layers=1, hidden_size=16, num_heads=2, tie_embeddings=tied, head=head)
    model = LanguageModel(config, seed=1).double()
    if head == "mlm":
        torch.nn.init.normal_(model.head.bias)
    assert (model.head.weight is model.embedding.weight) == tied
    tokens, labels = torch.randint(0, VOCAB, (2, 9)), torch.randint(0, VOCAB, (2, 9))
    loss_weight = torch.rand(2, 9, dtype=torch.float64)
    nll = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    expected = (nll * loss_weight.flatten()).sum()
    actual = model(tokens, labels, loss_weight)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    assert len(parameters) == len(list(model.named_parameters(remove_duplicate=False))) - tied
    wanted = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(torch.autograd.grad(actual, parameters), wanted, rtol=0, atol=1e-11)


def test_mlm_head_equals_its_equation():
    config = ModelConfig(vocab_size=VOCAB, num_layers=1, hidden_size=16, num_heads=2, head="mlm")
    head = LanguageModel(config, seed=1).head.double()
    torch.nn.init.normal_(head.bias)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    h = F.gelu(F.linear(F.layer_norm(x, (16,)), head.transform.dense.weight))
    expected = F.layer_norm(h, (16,)) @ head.weight.t() + head.bias
    torch.testing.assert_close(head(x), expected)
    assert head.flops_per_token(8) == 2 * 16 * (VOCAB + 16)
