"""Import and export DeltaNet, Gated DeltaNet and KDA in the format of flash-linear-attention (version 0.6)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from models.config import ModelConfig
from models.layers.delta_rule_mixer import DeltaRuleSizes, delta_rule_sizes
from tools.conversion.foreign.fla import linears, model_of, norm_eps, surrounding_sources, tied
from tools.conversion.foreign.mapping import Foreign, Source, only

# model_type there -> mixer here, and the class that transformers loads.
_MIXERS = {
    "delta_net": ("delta_net", "DeltaNetForCausalLM"),
    "gated_deltanet": ("gated_delta_net", "GatedDeltaNetForCausalLM"),
    "kda": ("kda", "KDAForCausalLM"),
}
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish", "silu"),
    "use_short_conv": (True,),
    "conv_bias": (False,),
    "attn": (None,),
    "attnres_block_size": (None,),
}
_ALLOWED_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "delta_net": {
        "use_gate": (False,),
        "use_beta": (True,),
        "use_output_norm": (True,),
        "qk_norm": ("l2",),
        "qk_activation": ("silu",),
    },
    "gated_deltanet": {"use_gate": (True,), "output_gate_activation": ("swish", "silu")},
    "kda": {"safe_gate": (False,), "lower_bound": (None,)},
}
# Settings of their models that have a counterpart or change no logit.
_READ = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "head_dim", "expand_k", "expand_v"),
    *("conv_size", "allow_neg_eigval", "hidden_ratio", "intermediate_size", "norm_eps", "tie_word_embeddings"),
    *("attn_mode", "max_position_embeddings", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
    *("fuse_linear_cross_entropy", "use_l2warp", "initializer_range", "use_cache"),
}
_SOURCES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "b_proj": "b_proj", "out_proj": "o_proj"}
_SOURCES_OF = {
    "delta_net": {},
    "gated_deltanet": {"a_proj": "a_proj", "gate_proj": "g_proj"},
    "kda": {"decay_down": "f_proj.0", "decay_up": "f_proj.1", "gate_down": "g_proj.0", "gate_up": "g_proj.1"},
}


def delta_rule(config: Mapping[str, Any]) -> Foreign:
    """Describe a model of the delta rule (Yang et al. 2024, arXiv 2406.06484, 2412.06464; Kimi Linear, 2510.26692).

    Raises ValueError for a setting without a counterpart, and for one that version 0.6 does not have.
    """
    kind = str(config["model_type"])
    only(config, _ALLOWED | _ALLOWED_OF[kind])
    if unknown := sorted(set(config) - _READ - {*_ALLOWED, *_ALLOWED_OF[kind]} - _of_transformers()):
        raise ValueError(
            f"{unknown[0]} = {config[unknown[0]]!r} is no setting of a {kind} of flash-linear-attention 0.6, the version that "
            f"can be imported; save the model with that version, or remove the key if it changes nothing"
        )
    mixer, size, heads = _MIXERS[kind][0], config["hidden_size"], config["num_heads"]
    # Only the mixer has their number of heads, which need not divide the width.
    model_heads = math.gcd(size, heads)
    if kind == "delta_net":
        head_dim = round(size * config.get("expand_k", 1.0)) // heads
        expand_v = round(size * config.get("expand_v", 1.0)) // heads / head_dim
        value_heads = heads
    else:
        head_dim = config.get("head_dim", 256 if kind == "gated_deltanet" else 128)
        expand_v = float(config.get("expand_v", 2.0 if kind == "gated_deltanet" else 1.0))
        value_heads = config.get("num_v_heads") or heads
    options = {
        "num_heads": heads,
        "num_value_heads": value_heads,
        "head_dim": head_dim,
        "expand_v": expand_v,
        "conv_kernel": config.get("conv_size", 4),
        "allow_negative_eigenvalues": config.get("allow_neg_eigval", False),
        "norm_eps": norm_eps(config),
    }
    model = model_of({**config, "num_heads": model_heads}, mixer, options, ratio=4)
    sources = surrounding_sources(config, model)
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.mixer", f"model.layers.{i}.attn"
        sources |= linears(ours, theirs, _SOURCES | _SOURCES_OF[kind])
        for name in "qkv":
            their_conv = f"{theirs}.{name}_conv1d.weight"
            sources[f"{ours}.conv_{name}.weight"] = Source((their_conv,), _without_group, _with_group)
        sources[f"{ours}.norm_weight"] = Source((f"{theirs}.o_norm.weight",))
        if kind != "delta_net":
            sources[f"{ours}.a_log"] = Source((f"{theirs}.A_log",))
            sources[f"{ours}.dt_bias"] = Source((f"{theirs}.dt_bias",))
        if kind == "kda":
            sources[f"{ours}.gate_up.bias"] = Source((f"{theirs}.g_proj.1.bias",))
    return Foreign(model, sources, tied(model))


def fla_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model in flash-linear-attention's format.

    Raises ValueError naming the keys, their values and the values that the format has.
    """
    kinds = {mixer: kind for kind, (mixer, _) in _MIXERS.items()}
    names = sorted(set(model.mixers))
    if len(names) > 1 or names[0] not in kinds:
        raise ValueError(
            f"model.mixers = {list(model.mixers)} has no counterpart in flash-linear-attention's format; allowed is one of "
            f"{', '.join(kinds)} in every layer; export the project's own format instead (--format metalion)"
        )
    kind, options = kinds[names[0]], model.options_of(names[0])
    sizes = delta_rule_sizes(model, options)
    config = {
        "architectures": [_MIXERS[kind][1]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_heads": sizes.heads,
        "intermediate_size": model.mlp_width,
        "hidden_act": "swish",
        "norm_eps": model.norm_eps,
        "conv_size": options.conv_kernel,
        "allow_neg_eigval": options.allow_negative_eigenvalues,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if kind == "delta_net":
        config |= {"expand_k": sizes.key_dim / model.hidden_size, "expand_v": sizes.value_dim / model.hidden_size}
    else:
        config |= {"head_dim": sizes.head_dim_k, "expand_v": options.expand_v, "num_v_heads": sizes.value_heads}
    _check_same(model, delta_rule(config).model)
    return config


def _check_same(model: ModelConfig, exported: ModelConfig) -> None:
    """Raise ValueError for a setting that the format cannot store, because an import would return another value."""
    mixer = model.mixers[0]
    free = {
        "num_heads",
        "init_method",
        "output_init_method",
        "init_std",
        "mixers",
        "mixer_options",
        "intermediate_size",
    }
    pairs = [
        (f"model.{field.name}", *(getattr(m, field.name) for m in (model, exported)))
        for field in dataclasses.fields(ModelConfig)
        if field.name not in free
    ]
    ours, theirs = (_settings(m) for m in (model, exported))
    pairs += [(f"model.mixer_options.{mixer}.{key}", ours[key], theirs[key]) for key in ours]
    wrong = [f"{key} = {mine} (allowed is {other})" for key, mine, other in pairs if mine != other]
    if wrong:
        raise ValueError(
            f"flash-linear-attention's format of {mixer} cannot hold {', '.join(wrong)}; export the project's own format "
            "instead (--format metalion)"
        )


def _settings(model: ModelConfig) -> dict[str, Any]:
    options = model.options_of(model.mixers[0])
    sizes: DeltaRuleSizes = delta_rule_sizes(model, options)
    names = {"num_heads": sizes.heads, "num_value_heads": sizes.value_heads}
    names |= {"head_dim": sizes.head_dim_k, "expand_v": sizes.head_dim_v / sizes.head_dim_k}
    same = ("conv_kernel", "allow_negative_eigenvalues", "norm_eps")
    return names | {key: getattr(options, key) for key in same}


def _without_group(weight: Tensor) -> Tensor:
    """Return the weight of a convolution, [channels, 1, kernel] there, as [channels, kernel]."""
    return weight.squeeze(1)


def _with_group(weight: Tensor) -> Tensor:
    return weight.unsqueeze(1)


@cache
def _of_transformers() -> set[str]:
    """Return the keys that transformers writes into any config.json."""
    from transformers import PretrainedConfig

    named = {"model_type", "architectures", "transformers_version", "dtype", "auto_map", "torch_dtype", "_name_or_path"}
    return {*PretrainedConfig().to_dict(), *named, *(f"{role}_token_id" for role in ("bos", "eos", "pad"))}
