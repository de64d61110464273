"""Check logits, padding, losses and embeddings of the Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.hf.configuration_metalion import MetalionConfig
from models.hf.modeling_metalion import (
    MetalionForCausalLM,
    MetalionForMaskedLM,
    MetalionForSequenceClassification,
    MetalionModel,
)
from models.language_model import LanguageModel
from models.mixers import MIXERS

CAUSAL = sorted(name for name in MIXERS if name != "metala_bidirectional")
# A state of every kind: recurrent, a convolution's, positions, keys and values.
MIXED = ["metala", "retnet", "attention"]


def hybrid(linear: str) -> dict[str, Any]:
    """Return a 3:1 hybrid of 8 layers: recurrent states, the keys of a window, and all keys in the last layer."""
    options = {"window": 4, "full_layers": [7], "nope_layers": [7], "qk_norm": True, "output_gate": True}
    return {"mixers": [linear] * 3 + ["attention"], "num_layers": 8, "mixer_options": {"attention": options}}


hybrids = pytest.mark.parametrize("linear", ["metala", "gated_delta_net"])


def config(mixers: list[str], **more: Any) -> MetalionConfig:
    shape = {"vocab_size": 61, "num_layers": len(mixers) + 1, "hidden_size": 32, "num_heads": 4} | more
    return MetalionConfig(**shape, mixers=mixers, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def away_from_zero(model: torch.nn.Module) -> None:
    """Add noise, because parameters with the initial value 0 or 1 may have no effect."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def causal_model(mixers: list[str] = MIXED, **more: Any) -> MetalionForCausalLM:
    torch.manual_seed(1)
    model = MetalionForCausalLM(config(mixers, **more)).eval()
    away_from_zero(model)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Return ids and mask of prompts of unequal lengths."""
    longest = max(map(len, prompts))
    ids, mask = (
        torch.zeros(len(prompts), longest, dtype=torch.long),
        torch.zeros(len(prompts), longest, dtype=torch.long),
    )
    for row, prompt in enumerate(prompts):
        place = slice(longest - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_logits_equal_the_language_models(mixer: str) -> None:
    cfg = config([mixer])
    language_model = LanguageModel(cfg.model_config(), seed=0).eval()
    away_from_zero(language_model)
    kind = MetalionForMaskedLM if cfg.model_config().bidirectional_mixers() else MetalionForCausalLM
    model = kind(cfg).eval()
    missing, unexpected = model.load_state_dict(language_model.state_dict(), strict=False)
    assert not missing
    assert not unexpected
    ids = tokens(2, 19)
    assert torch.equal(model(ids).logits, language_model(ids))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mixers", [*([name] for name in CAUSAL), MIXED], ids="-".join)
def test_padding_does_not_change_logits(mixers: list[str], side: str) -> None:
    model = causal_model(mixers)
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 4, 7)]
    ids, mask = padded(prompts, side)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for row, prompt in enumerate(prompts):
            alone = model(prompt[None]).logits[0]
            torch.testing.assert_close(logits[row][mask[row].bool()], alone, rtol=1e-5, atol=2e-5)


def test_padding_with_learned_positions() -> None:
    model = causal_model(["metala"], positions="learned", max_positions=16)
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 4)]
    for side in ("left", "right"):
        ids, mask = padded(prompts, side)
        logits = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(logits[1][mask[1].bool()], model(prompts[1][None]).logits[0], rtol=1e-5, atol=1e-5)


def test_padding_between_real_tokens() -> None:
    """Pad texts of a batch and append text to each, with and without a cache."""
    model = causal_model()
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, 2:5] = mask[1, :3] = mask[1, 4] = mask[2, 8] = 0
    whole = model(ids, attention_mask=mask, output_hidden_states=True)
    first = model(ids[:, :3], attention_mask=mask[:, :3], use_cache=True)
    rest = model(ids[:, 3:], attention_mask=mask, past_key_values=first.past_key_values)
    embeds = F.embedding(ids, model.get_input_embeddings().weight)
    for row, real in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, real], output_hidden_states=True)
        torch.testing.assert_close(whole.logits[row, real], alone.logits[0])
        torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1)[row, real], alone.logits[0])
        torch.testing.assert_close(whole.hidden_states[1][row, real], alone.hidden_states[1][0])
    torch.testing.assert_close(model(inputs_embeds=embeds, attention_mask=mask).logits, whole.logits)


def test_mask_of_another_length_is_refused() -> None:
    model = causal_model()
    for length in (3, 6):
        with pytest.raises(ValueError, match=rf"attention_mask \[1, {length}\]: expected \[batch, 5\] with 1 for"):
            model(tokens(1, 5), attention_mask=torch.ones(1, length))
    cache = model(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"expected \[batch, 5\] .*, or \[batch, 8\] with the 3 positions"):
        model(tokens(1, 5), attention_mask=torch.ones(1, 7), past_key_values=cache)


def test_loss_equals_the_trainers() -> None:
    model = causal_model()
    language_model = LanguageModel(model.config.model_config(), layers=[model.embedding, *model.blocks, model.head])
    ids = tokens(3, 11)
    labels = ids.clone()
    labels[0, :6] = -100
    total = language_model(ids[:, :-1], labels[:, 1:])
    counted = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(model(ids, labels=labels).loss, total / counted)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=100).loss, total / 100)


@pytest.mark.parametrize(
    "more",
    [{}, {"positions": "learned", "max_positions": 16, "embedding_scale": 2.0}],
    ids=["plain", "positions and scale"],
)
def test_inputs_embeds(more: dict[str, Any]) -> None:
    model = causal_model(**more)
    ids = tokens(2, 7)
    embeds = model.get_input_embeddings()(ids)
    logits = model(inputs_embeds=embeds).logits
    assert torch.equal(logits, model(ids).logits)
    language_model = LanguageModel(model.config.model_config(), seed=0).eval()
    language_model.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits, language_model(ids))
    with pytest.raises(ValueError, match="give exactly one of them"):
        model(ids, inputs_embeds=embeds)
    continued = model.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False)
    assert torch.equal(continued, model.generate(ids, max_new_tokens=4, do_sample=False)[:, 7:])


def test_hidden_states() -> None:
    model = causal_model()
    ids = tokens(2, 7)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == len(model.blocks) + 1
    assert torch.equal(output.hidden_states[0], F.embedding(ids, model.embedding.weight))
    assert torch.equal(output.hidden_states[1], model.blocks[0](output.hidden_states[0]))
    assert torch.equal(F.linear(output.hidden_states[-1], model.head.weight), output.logits)
    base = MetalionModel(model.config).eval()
    base.load_state_dict({k: v for k, v in model.state_dict().items() if k != "head.weight"})
    assert torch.equal(base(ids).last_hidden_state, output.hidden_states[-1])
    loss, logits, *_ = model(ids, labels=ids, return_dict=False)
    assert logits.shape == (2, 7, 61)
    assert loss.shape == ()
    # Without the values that the blocks of a value residual read.
    states = causal_model(["rwkv7"])(ids, output_hidden_states=True).hidden_states
    assert [state.shape for state in states] == 3 * [(2, 7, 32)]


def test_logits_to_keep() -> None:
    model = causal_model()
    ids = tokens(2, 7)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:])
    assert model(ids, logits_to_keep=torch.tensor([1, 4])).logits.shape == (2, 2, 61)


def test_gradient_checkpointing() -> None:
    model = causal_model().train()
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 5)[0]], "right")
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    assert len(calls) == 2, "the forward pass, and its recomputation"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


@pytest.mark.parametrize("rows", [40, 61, 70])
@pytest.mark.parametrize("kind", ["tied", "untied", "masked"])
def test_resized_embeddings(kind: str, rows: int, tmp_path: Path) -> None:
    model = masked_model(head="mlm") if kind == "masked" else causal_model(tie_embeddings=kind == "tied")
    ids, shared = tokens(2, 9).clamp_max(39), min(61, rows)
    before = model(ids).logits
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    after = model(ids).logits
    assert after.shape[-1] == model.config.vocab_size == rows
    # Matrices of other widths may be multiplied in another order.
    torch.testing.assert_close(after[..., :shared], before[..., :shared], rtol=0, atol=1e-5)
    if rows > 61:
        for matrix in (model.embedding.weight, model.head.weight):
            torch.testing.assert_close(matrix[61:], matrix[:61].mean(0).expand(rows - 61, -1))
    assert (model.head.weight is model.embedding.weight) == (kind != "untied")
    model(ids, labels=ids).loss.backward()
    assert model.embedding.weight.grad is not None
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(ids).logits, after)


def test_new_rows_without_mean_resizing_are_initial_values() -> None:
    model = masked_model(head="mlm")
    torch.nn.init.constant_(model.head.bias, 3.0)
    model.resize_token_embeddings(63, mean_resizing=False)
    assert model.head.bias[60:].tolist() == [3.0, 0.0, 0.0]
    assert not torch.equal(model.head.weight[61], model.head.weight[62])


def test_resized_embeddings_and_generation() -> None:
    """Never sample padding rows; sample added tokens."""
    model = causal_model()
    model.generation_config.suppress_tokens = [3, 40, *range(50, 61)]  # an export of a tokenizer of 50 entries
    model.resize_token_embeddings(52, pad_to_multiple_of=64)
    assert model.config.vocab_size == 64
    assert model.generation_config.suppress_tokens == [3, 40, *range(52, 64)]
    model.resize_token_embeddings(30)
    assert model.generation_config.suppress_tokens == [3]
    assert model.generate(tokens(1, 4).clamp_max(29), max_new_tokens=3).max() < 30
    other = MetalionForSequenceClassification(config(**BOTH_WAYS))
    other.resize_token_embeddings(70, mean_resizing=False)
    assert 0.05 < other.embedding.weight[61:].std() < 0.2  # small_init, sqrt(2 / (5 32)) = 0.11
    with pytest.raises(ValueError, match="new_num_tokens = 0: must be at least 1"):
        model.resize_token_embeddings(0)


def test_compiled() -> None:
    model = causal_model(["metala"])
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 5)[0]], "left")
    mask[0, 3:5] = 0  # between real tokens
    expected = model(ids, attention_mask=mask).logits
    compiled = torch.compile(model, backend="aot_eager")  # traced and run; inductor's C++ takes half a minute
    with torch.no_grad():
        actual = compiled(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


BOTH_WAYS = {"mixers": ["lion"], "mixer_options": {"lion": {"causal": False}}}


def masked_model(**more: Any) -> MetalionForMaskedLM:
    torch.manual_seed(1)
    model = MetalionForMaskedLM(config(**{**BOTH_WAYS, **more})).eval()
    away_from_zero(model)
    return model
