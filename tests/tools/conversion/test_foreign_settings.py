"""Check settings that are absent, redundant or ignored in another codebase: an import reads them as that codebase."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from models.language_model import LanguageModel
from tools.conversion.foreign.fla import _lower_bound
from tools.conversion.foreign.mapping import make
from tools.conversion.foreign.registry import translate

SHAPE = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SHAPE["max_position_embeddings"] = 64
GROUPED = {**SHAPE, "num_key_value_heads": 1, "head_dim": 16}
# The slowest channel turns several times within the context.
YARN = {"type": "yarn", "rope_theta": 6.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPE = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}


def window_of(kind: str, **settings: Any) -> tuple[int | None, tuple[int, ...]]:
    options = translate({"model_type": kind, **GROUPED, **settings}).model.options_of("attention")
    return options.window, tuple(options.full_layers)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama", **GROUPED, "sliding_window": 3},
        {"model_type": "mistral", **GROUPED, "sliding_window": 3, "use_sliding_window": False},
        {"model_type": "mistral", **GROUPED, "sliding_window": 3, "max_window_layers": 1},
        {"model_type": "mistral", **GROUPED, "sliding_window": 3, "layer_types": ["full_attention"] * 2},
        {"model_type": "qwen3", **GROUPED, "sliding_window": 3},
        {"model_type": "qwen3", **GROUPED, "sliding_window": 3, "use_sliding_window": True},
        {"model_type": "qwen3", **GROUPED, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "gpt_neox", **SHAPE, "rotary_pct": 1.0, "rotary_emb_base": 10000, "rope_parameters": ROPE},
        {"model_type": "llama", **GROUPED, "rope_scaling": {**YARN, "original_max_position_embeddings": 64}},
        {"model_type": "llama", **GROUPED, "rope_scaling": YARN, "original_max_position_embeddings": 8},
        {"model_type": "llama", **GROUPED, "rope_scaling": {**YARN, "beta_slow": 2.0}, "rms_norm_eps": 0.1},
        {"model_type": "llama", **GROUPED, "rope_theta": 1e4, "rope_parameters": {**ROPE, "rope_theta": 9.0}},
    ],
)
def test_settings_are_read_as_in_transformers(settings: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    # transformers changes the mappings that it is given
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(copy.deepcopy(settings))
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    foreign = translate(settings)
    name = "embed_out" if settings["model_type"] == "gpt_neox" else "lm_head"
    tensors = {key.replace("lm_head", name): tensor for key, tensor in theirs.state_dict().items()}
    ours = LanguageModel(foreign.model).eval()
    weights = {key: make(foreign, key, tensors, tuple(x.shape)) for key, x in ours.named_parameters()}
    ours.load_state_dict(weights, strict=False)
    tokens = torch.randint(0, 19, (2, 12))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_absent_windows_have_transformers_defaults() -> None:
    assert window_of("mistral") == (4096, ())
    assert window_of("mistral", sliding_window=None) == (None, ())
    assert window_of("llama") == (None, ())
    assert window_of("qwen3") == (None, ())
    assert window_of("qwen3", use_sliding_window=True, max_window_layers=1) == (4096, (0,))


def test_absent_head_sizes_of_flash_linear_attention_have_its_defaults() -> None:
    """Compare with the defaults of its HGRN2Config and RWKV7Config, which come before num_heads."""
    shape = {"vocab_size": 19, "hidden_size": 512, "num_hidden_layers": 2, "num_heads": 2}
    for kind, key, default in (("hgrn2", "expand_ratio", 128), ("rwkv7", "head_dim", 64)):
        heads = [translate({"model_type": kind, **shape, **given}).model.num_heads for given in ({}, {key: None})]
        assert heads == [512 // default, 2]


def test_absent_width_of_rwkv7_is_a_multiple_of_32() -> None:
    shape = {"model_type": "rwkv7", "vocab_size": 19, "hidden_size": 20, "num_hidden_layers": 2, "head_dim": 10}
    assert translate(shape).model.mlp_width == 96
    assert translate({**shape, "hidden_ratio": 3.3}).model.mlp_width == 96
    assert translate({**shape, "intermediate_size": 70}).model.mlp_width == 70


def test_lower_bounds_of_hgrn2_near_zero_and_one_keep_their_digits() -> None:
    matrix = torch.tensor([[0.0, 12.0], [-25.0, 9.0], [3.0, -14.0]])
    shares = matrix.double().softmax(0)
    for layer in (1, 2):
        logit = _lower_bound(matrix, layer).double()
        bound, rest = shares[1 : layer + 1].sum(0), shares[0] + shares[layer + 1 :].sum(0)
        torch.testing.assert_close([torch.sigmoid(logit), torch.sigmoid(-logit)], [bound, rest], rtol=1e-5, atol=0)
