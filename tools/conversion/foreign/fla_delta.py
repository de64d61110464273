"""Import and export DeltaNet, Gated DeltaNet and KDA in the format of flash-linear-attention (version 0.6)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.layers.delta_rule_mixer import DeltaRuleOptions, DeltaRuleSizes, delta_rule_sizes
from models.options import require_divisor
from tools.conversion.foreign.fla import linears, model_of, norm_eps, surrounding_sources
from tools.conversion.foreign.mapping import Foreign, Source, only, tied

# model_type there -> mixer here, and the class that transformers loads.
_MIXERS = {
    "delta_net": ("delta_net", "DeltaNetForCausalLM"),
    "gated_deltanet": ("gated_delta_net", "GatedDeltaNetForCausalLM"),
    "kda": ("kda", "KDAForCausalLM"),
    "rwkv7": ("rwkv7", "RWKV7ForCausalLM"),
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
    "rwkv7": {"hidden_act": ("sqrelu",), "norm_bias": (True,)},
}
# Settings of their models that have a counterpart or change no logit. fuse_norm of RWKV-7 moves an epsilon of 1e-6.
_READ = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "head_dim", "expand_k", "expand_v"),
    *("conv_size", "allow_neg_eigval", "hidden_ratio", "intermediate_size", "norm_eps", "tie_word_embeddings"),
    *("attn_mode", "max_position_embeddings", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
    *("fuse_linear_cross_entropy", "use_l2warp", "initializer_range", "use_cache"),
    *("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "norm_first", "value_dim"),
}
# Rank here, its key there, and its default there.
_RANKS = (
    ("decay_low_rank", "decay_low_rank_dim", 64),
    ("rate_low_rank", "a_low_rank_dim", 64),
    ("value_low_rank", "v_low_rank_dim", 16),
    ("gate_low_rank", "gate_low_rank_dim", 128),
)
_SOURCES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "b_proj": "b_proj", "out_proj": "o_proj"}
_SOURCES_OF = {
    "delta_net": {},
    "gated_deltanet": {"a_proj": "a_proj", "gate_proj": "g_proj"},
    "kda": {"decay_down": "f_proj.0", "decay_up": "f_proj.1", "gate_down": "g_proj.0", "gate_up": "g_proj.1"},
}


def check_settings(config: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError for a setting without a counterpart, and for one that version 0.6 does not have."""
    only(config, _ALLOWED | _ALLOWED_OF[kind])
    if unknown := sorted(set(config) - _READ - {*_ALLOWED, *_ALLOWED_OF[kind]} - _of_transformers()):
        raise ValueError(
            f"{unknown[0]} = {config[unknown[0]]!r} is no setting of a {kind} of flash-linear-attention 0.6, the version that "
            f"can be imported; save the model with that version, or remove the key if it changes nothing"
        )


def delta_rule(config: Mapping[str, Any]) -> Foreign:
    """Describe a DeltaNet, Gated DeltaNet (Yang et al. 2024, arXiv 2406.06484 and 2412.06464) or KDA (arXiv 2510.26692).

    Raises ValueError as `check_settings`.
    """
    kind = str(config["model_type"])
    check_settings(config, kind)
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
    sources = surrounding_sources(model)
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.mixer", f"model.layers.{i}.attn"
        sources |= linears(ours, theirs, _SOURCES | _SOURCES_OF[kind])
        for name in "qkv":  # the weight of a convolution is [channels, 1, kernel] there
            convolution = Source((f"{theirs}.{name}_conv1d.weight",), lambda w: w.squeeze(1), lambda w: w.unsqueeze(1))
            sources[f"{ours}.conv_{name}.weight"] = convolution
        sources[f"{ours}.norm_weight"] = Source((f"{theirs}.o_norm.weight",))
        if kind != "delta_net":
            sources[f"{ours}.a_log"] = Source((f"{theirs}.A_log",))
            sources[f"{ours}.dt_bias"] = Source((f"{theirs}.dt_bias",))
        if kind == "kda":
            sources[f"{ours}.gate_up.bias"] = Source((f"{theirs}.g_proj.1.bias",))
    return Foreign(model, sources, tied(model))


def rwkv7(config: Mapping[str, Any]) -> Foreign:
    """Describe an RWKV-7 (Peng et al. 2025, arXiv 2503.14456). The norm after their embedding is applied to its rows.

    Raises ValueError as `check_settings`.
    """
    check_settings(config, "rwkv7")
    size, eps = config["hidden_size"], float(config.get("norm_eps", 1e-5))
    head_dim = config.get("head_dim", 64) or size // config["num_heads"]
    require_divisor("head_dim", head_dim, "hidden_size", size)
    layers = config["num_hidden_layers"]
    only(config, {"value_dim": (None, size, [size] * layers)})
    first_norm, tie = config.get("norm_first", True), bool(config.get("tie_word_embeddings", False))
    if first_norm and tie:
        raise ValueError(
            "norm_first = True with tie_word_embeddings = True has no counterpart here: untie the matrices"
        )
    width = config.get("intermediate_size") or 32 * -(-int(size * (config.get("hidden_ratio") or 4)) // 32)
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=layers,
        hidden_size=size,
        num_heads=size // head_dim,
        mixers=("rwkv7",),
        mixer_options={"rwkv7": {ours: config.get(theirs, rank) for ours, theirs, rank in _RANKS} | {"norm_eps": eps}},
        mlp="rwkv7",
        intermediate_size=width,
        norm="layernorm",
        norm_eps=eps,
        tie_embeddings=tie,
    )
    sources: dict[str, Source | None] = {"embedding.weight": Source(("model.embeddings.weight",))}
    if first_norm:
        norm = ("model.layers.0.pre_norm.weight", "model.layers.0.pre_norm.bias")
        sources["embedding.weight"] = Source(
            ("model.embeddings.weight", *norm), lambda rows, weight, bias: F.layer_norm(rows, [size], weight, bias, eps)
        )
    if not tie:
        sources["head.weight"] = Source(("lm_head.weight",))
    norms = {"head.norm": "model.norm"}
    for i in range(layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        norms |= {f"{ours}.norm1": f"{theirs}.attn_norm", f"{ours}.norm2": f"{theirs}.ffn_norm"}
        sources |= _rwkv7_layer(f"{ours}.mixer", f"{theirs}.attn", head_dim, first=i == 0)
        sources[f"{ours}.mlp.mix"] = Source((f"{theirs}.ffn.x_k",))
        sources |= linears(f"{ours}.mlp", f"{theirs}.ffn", {"up_proj": "key", "down_proj": "value"})
    for ours, theirs in norms.items():
        sources |= {f"{ours}.{part}": Source((f"{theirs}.{part}",)) for part in ("weight", "bias")}
    return Foreign(model, sources, tied(model))


def _rwkv7_layer(ours: str, theirs: str, head_dim: int, *, first: bool) -> dict[str, Source | None]:
    sources = linears(ours, theirs, {f"{n}_proj": f"{n}_proj" for n in "rkv"} | {"out_proj": "o_proj"})
    for name in "rwkvag":
        sources[f"{ours}.mix_{name}"] = Source((f"{theirs}.x_{name}",), torch.flatten, lambda mix: mix.view(1, 1, -1))
    for name, lora in (("decay", "w"), ("rate", "a"), ("value", "v"), ("gate", "g")):
        if first and name == "value":
            continue
        lora = f"{lora}_lora.lora"
        sources |= linears(ours, theirs, {f"{name}_down": f"{lora}.0", f"{name}_up": f"{lora}.2"})
        if name != "gate":
            sources[f"{ours}.{name}_up.bias"] = Source((f"{theirs}.{lora}.2.bias",))
    sources[f"{ours}.removal_scale"] = Source((f"{theirs}.k_k",))
    sources[f"{ours}.key_scale"] = Source((f"{theirs}.k_a",))

    def bonus(per_head: Tensor) -> Tensor:
        if per_head.shape[-1] != head_dim:
            raise ValueError(
                f"{theirs}.r_k has {per_head.shape[-1]} channels per head, and config.json has head_dim = {head_dim}: correct "
                "head_dim and num_heads, or take the weights that belong to them"
            )
        return per_head.flatten()

    sources[f"{ours}.bonus"] = Source((f"{theirs}.r_k",), bonus, lambda y: y.view(-1, head_dim))
    return sources | {f"{ours}.norm_{part}": Source((f"{theirs}.g_norm.{part}",)) for part in ("weight", "bias")}


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
    shape = {
        "architectures": [_MIXERS[kind][1]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.mlp_width,
        "norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if kind == "rwkv7":
        heads = {"head_dim": model.hidden_size // model.num_heads, "num_heads": model.num_heads}
        ranks = {theirs: getattr(options, ours) for ours, theirs, _ in _RANKS}
        config = {**shape, **heads, **ranks, "hidden_act": "sqrelu", "norm_first": False}
        _check_same(model, rwkv7(config).model)
        return config
    sizes = delta_rule_sizes(model, options)
    config = {
        **shape,
        "num_heads": sizes.heads,
        "hidden_act": "swish",
        "conv_size": options.conv_kernel,
        "allow_neg_eigval": options.allow_negative_eigenvalues,
    }
    if kind == "delta_net":
        keys, values = (_fraction(dim, model.hidden_size) for dim in (sizes.key_dim, sizes.value_dim))
        config |= {"expand_k": keys, "expand_v": values}
    else:
        expand_v = _fraction(sizes.head_dim_v, sizes.head_dim_k)
        config |= {"head_dim": sizes.head_dim_k, "expand_v": expand_v, "num_v_heads": sizes.value_heads}
    _check_same(model, delta_rule(config).model)
    return config


def _fraction(part: int, whole: int) -> float:
    """Return part / whole, rounded up where int(whole * fraction), their width, would be below `part`."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, math.inf)


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
    if not isinstance(options, DeltaRuleOptions):
        return dataclasses.asdict(options)
    sizes: DeltaRuleSizes = delta_rule_sizes(model, options)
    names = {"num_heads": sizes.heads, "num_value_heads": sizes.value_heads}
    names |= {"head_dim": sizes.head_dim_k, "expand_v": sizes.head_dim_v / sizes.head_dim_k}
    same = ("conv_kernel", "allow_negative_eigenvalues", "norm_eps")
    return names | {key: getattr(options, key) for key in same}


@cache
def _of_transformers() -> set[str]:
    """Return the keys that transformers writes into any config.json."""
    from transformers import PretrainedConfig

    named = {"model_type", "architectures", "transformers_version", "dtype", "auto_map", "torch_dtype", "_name_or_path"}
    return {*PretrainedConfig().to_dict(), *named, *(f"{role}_token_id" for role in ("bos", "eos", "pad"))}
