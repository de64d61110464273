"""Check generation with the Hugging Face model, and its caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from models.hf.modeling_metalion import MetalionForCausalLM
from tests.tools.conversion.test_modeling_metalion import CAUSAL, MIXED, causal_model, hybrid, hybrids, padded, tokens


@torch.no_grad()
def greedy(model: MetalionForCausalLM, ids: Tensor, count: int) -> Tensor:
    """Return ids with `count` greedy tokens, each from the whole text, without a cache."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("mixers", [*([name] for name in CAUSAL), MIXED], ids="-".join)
def test_greedy_generation(mixers: list[str]) -> None:
    model = causal_model(mixers)
    ids = tokens(2, 5)
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(generated, greedy(model, ids, 6))


def test_prompts_of_unequal_lengths() -> None:
    model = causal_model()
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 2, 6)]
    ids, mask = padded(prompts, "left")
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for row, prompt in enumerate(prompts):
        assert torch.equal(generated[row, 9:], greedy(model, prompt[None], 8)[0, len(prompt) :])


@pytest.mark.parametrize(
    "settings", [{"do_sample": True, "top_p": 0.9}, {"num_beams": 4}, {"num_beams": 3, "do_sample": True}]
)
def test_sampling_and_beams_with_and_without_a_cache(settings: dict[str, Any]) -> None:
    model = causal_model()
    ids, mask = padded([tokens(1, 6)[0], tokens(1, 3)[0]], "left")
    results = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        results.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=9,
                use_cache=use_cache,
                eos_token_id=None,
                num_return_sequences=2,
                **settings,
            )
        )
    assert torch.equal(*results)
    assert not torch.equal(results[0][0], results[0][1])


@hybrids
def test_hybrid_with_a_window_generates_from_its_cache(linear: str) -> None:
    """Continue prompts longer and shorter than the window, padded on the left, greedily and by beams."""
    model = causal_model(**hybrid(linear))
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 2, 6)]
    ids, mask = padded(prompts, "left")
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    generated = model.generate(ids, attention_mask=mask, **settings)
    for prompt, continued in zip(prompts, generated[:, 9:], strict=True):
        logits = model(torch.cat([prompt, continued])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert torch.equal(logits.argmax(-1), continued)
    beams = [
        model.generate(ids[:2], attention_mask=mask[:2], num_beams=2, use_cache=use_cache, **settings)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


@hybrids
def test_window_layers_of_a_hybrid_keep_a_window(linear: str) -> None:
    model = causal_model(**hybrid(linear))
    cache = model(tokens(2, 9), use_cache=True).past_key_values
    sizes = [sum(x.nbytes for x in state.values()) for state in cache.states]
    model(tokens(2, 1), past_key_values=cache)
    grown = [sum(x.nbytes for x in state.values()) - size for state, size in zip(cache.states, sizes, strict=True)]
    assert cache.states[4]["key"].shape[1] == 3
    assert cache.states[8]["key"].shape[1] == 10
    assert grown[:8] == [0] * 8
    assert grown[8] == 2 * 2 * 32 * 4, "a key and a value in float32 per sequence; nothing is padded"


@pytest.mark.parametrize("whole_text", [True, False])
def test_generation_continues_from_a_cache(whole_text: bool) -> None:
    """Continue with the whole text, or with the new tokens and the mask of the whole text."""
    model = causal_model()
    ids, mask = padded([tokens(1, 6)[0], tokens(1, 3)[0]], "left")
    settings = {"do_sample": False, "eos_token_id": None}
    first = model.generate(ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **settings)
    cache = first.past_key_values
    assert cache.get_seq_length() == 9, "the last token is sampled and not processed yet"
    more = tokens(2, 3, seed=9)
    text = torch.cat([first.sequences, more], 1)
    text_mask = torch.cat([mask, torch.ones(2, 7, dtype=torch.long)], 1)
    expected = model.generate(text, attention_mask=text_mask, max_new_tokens=5, **settings)
    given = text if whole_text else text[:, 9:]
    second = model.generate(given, attention_mask=text_mask, past_key_values=cache, max_new_tokens=5, **settings)
    assert torch.equal(second[:, -5:], expected[:, -5:])


@pytest.mark.parametrize("mixers", [["metala", "retnet"], ["rwkv7", "kda", "gated_delta_net"]], ids="-".join)
def test_state_size_is_constant(mixers: list[str]) -> None:
    model = causal_model(mixers)
    sizes = set()
    cache = None
    for length in (3, 1, 40, 1):
        output = model(tokens(2, length), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        sizes.add(cache.nbytes())
    assert len(sizes) == 1
    assert cache.get_seq_length() == 45
    assert cache.batch_size == 2
    with pytest.raises(ValueError, match="cannot remove 3 tokens"):
        cache.crop(-3)


def test_cache_rows_are_reordered_and_repeated() -> None:
    model = causal_model()
    ids = tokens(3, 6)
    cache = model(ids, use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    after = model(tokens(1, 1).expand(3, 1), past_key_values=cache).logits
    expected = model(torch.cat([ids[[2, 0, 0]], tokens(1, 1).expand(3, 1)], 1)).logits[:, -1:]
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    again = tokens(1, 1).expand(6, 1)
    expected = model(torch.cat([ids[[2, 2, 0, 0, 0, 0]], again, again], 1)).logits[:, -1:]
    torch.testing.assert_close(model(again, past_key_values=cache).logits, expected, rtol=1e-5, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_assisted_generation_is_refused() -> None:
    model = causal_model()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(tokens(1, 4), assistant_model=causal_model(), max_new_tokens=3)


def test_cache_of_another_class_is_refused() -> None:
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache, expected a RecurrentCache"):
        causal_model()(tokens(1, 4), past_key_values=DynamicCache())
