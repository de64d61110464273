"""Import GLA, RetNet and HGRN2 in the format of flash-linear-attention (version 0.6, models/{gla,retnet,hgrn2})."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from tools.conversion.foreign.mapping import Foreign, Source, only, tied

_COMMON: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish",),
    "use_short_conv": (False,),
    "attn": (None,),
    "attnres_block_size": (None,),
}
_WITH_GATE_NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "gate_proj": "g_proj"}


def gla(config: Mapping[str, Any]) -> Foreign:
    """Describe a GLA model (Yang et al. 2023, arXiv 2312.06635).

    Their gate has no bias. The gain of the per-head norm is multiplied into W_O.
    """
    only(config, _COMMON | _WITH_GATE | {"expand_k": (0.5,), "expand_v": (1.0, 1), "clamp_min": (None,)})
    only(config, {"num_kv_heads": (None, config["num_heads"]), "use_gk": (True,), "use_gv": (False,)})
    model = model_of(config, "gla", {"norm": "rmsnorm", "norm_eps": norm_eps(config)}, ratio=4)
    sources = surrounding_sources(model)
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.mixer", f"model.layers.{i}.attn"
        sources |= linears(ours, theirs, _WITH_GATE_NAMES | {"decay_down": "gk_proj.0", "decay_up": "gk_proj.1"})
        sources[f"{ours}.decay_up.bias"] = Source((f"{theirs}.gk_proj.1.bias",))
        sources[f"{ours}.gate_proj.bias"] = None
        width = model.hidden_size // model.num_heads
        sources[f"{ours}.out_proj.weight"] = _output(config, theirs, "g_norm_swish_gate", width)
    return Foreign(model, sources, tied(model))


def retnet(config: Mapping[str, Any]) -> Foreign:
    """Describe a RetNet (Sun et al. 2023, arXiv 2307.08621). The gain of the per-head RMSNorm is multiplied into W_O."""
    only(config, _COMMON | _WITH_GATE | {"expand_k": (1.0, 1), "num_kv_heads": (None, config["num_heads"])})
    expand = config.get("expand_v", 2.0)
    if expand != int(expand):
        raise ValueError(f"expand_v = {expand}: only whole numbers have a counterpart here")
    options = {"norm": "rmsnorm", "norm_eps": norm_eps(config), "expand_v": int(expand)}
    model = model_of(config, "retnet", options, ratio=2)
    sources = surrounding_sources(model)
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.mixer", f"model.layers.{i}.attn"
        sources |= linears(ours, theirs, _WITH_GATE_NAMES)
        width = model.hidden_size * int(expand) // model.num_heads
        sources[f"{ours}.out_proj.weight"] = _output(config, theirs, "g_norm_swish_gate", width)
    return Foreign(model, sources, tied(model))


def hgrn2(config: Mapping[str, Any]) -> Foreign:
    """Describe an HGRN2 model (Qin et al. 2024, arXiv 2404.07904).

    Their norm is over all heads. The lower bounds of all layers are one matrix with a cumulative softmax over layers. Their
    operator divides by sqrt(head_dim); the norm cancels this factor except in its epsilon, which is 1e-5 whatever norm_eps is.
    """
    only(config, _COMMON)
    size = config["hidden_size"]
    head_dim = config.get("expand_ratio", 128) or size // config["num_heads"]
    heads = size // head_dim
    bounded = bool(config.get("use_lower_bound", True))
    if not bounded and config["num_hidden_layers"] > 1:
        raise ValueError("use_lower_bound = False has no counterpart here: layers after the first have a lower bound")
    options = {"norm_over": "all", "norm_eps": 1e-5 * head_dim, "lower_bound_range": "free"}
    model = model_of({**config, "num_heads": heads}, "hgrn2", options, ratio=4)
    sources = surrounding_sources(model)
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.mixer", f"model.layers.{i}.attn"
        sources |= linears(ours, theirs, {"q_proj": "q_proj", "f_proj": "f_proj", "v_proj": "i_proj"})
        sources[f"{ours}.out_proj.weight"] = _output(config, theirs, "g_norm", size)
        if i:
            sources[f"{ours}.lower_bound"] = Source(("model.lower_bounds",), partial(_lower_bound, layer=i))
    # The first layer has none; a model of one layer still stores the matrix.
    return Foreign(model, sources, (r"^model\.lower_bounds$", *tied(model)))


_WITH_GATE: dict[str, tuple[Any, ...]] = {
    "use_output_gate": (True,),
    "feature_map": (None,),
    "fuse_norm": (True, False),
}


def model_of(config: Mapping[str, Any], mixer: str, options: dict[str, Any], *, ratio: int) -> ModelConfig:
    """Return the model with this mixer in every layer.

    ratio: default of `hidden_ratio`. The MLP's width is 2/3 of it times hidden_size, rounded up to a multiple of 256.
    """
    size = config["hidden_size"]
    width = config.get("intermediate_size")
    if width is None:
        width = 256 * -(-int(size * (config.get("hidden_ratio") or ratio) * 2 / 3) // 256)
    return ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        hidden_size=size,
        num_heads=config["num_heads"],
        mixers=(mixer,),
        mixer_options={mixer: options},
        mlp="swiglu",
        intermediate_size=width,
        norm="rmsnorm",
        norm_eps=norm_eps(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def surrounding_sources(model: ModelConfig) -> dict[str, Source | None]:
    """Return the sources of embedding, norms, MLP and head."""
    sources: dict[str, Source | None] = {
        "embedding.weight": Source(("model.embeddings.weight",)),
        "head.norm.weight": Source(("model.norm.weight",)),
    }
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        sources[f"{ours}.norm1.weight"] = Source((f"{theirs}.attn_norm.weight",))
        sources[f"{ours}.norm2.weight"] = Source((f"{theirs}.mlp_norm.weight",))
        sources |= linears(f"{ours}.mlp", f"{theirs}.mlp", {n: n for n in ("gate_proj", "up_proj", "down_proj")})
    if not model.tie_embeddings:
        sources["head.weight"] = Source(("lm_head.weight",))
    return sources


def linears(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, Source | None]:
    """Return the sources of the weights of linear layers, by the names here and there."""
    return {f"{ours}.{a}.weight": Source((f"{theirs}.{b}.weight",)) for a, b in names.items()}


def _output(config: Mapping[str, Any], theirs: str, norm: str, width: int) -> Source:
    """Return W_O with its columns times the gain of the preceding norm, which repeats over the heads.

    width: channels of the norm. Only the gain shows a wrong number of heads: it raises ValueError.
    """
    if not config.get("elementwise_affine", True):
        return Source((f"{theirs}.o_proj.weight",))
    if norm == "g_norm_swish_gate" and not config.get("fuse_norm", True):
        norm = "g_norm"
    name = f"{theirs}.{norm}.weight"

    def scaled(weight: Tensor, gain: Tensor) -> Tensor:
        if len(gain) != width:
            raise ValueError(
                f"{name} has {len(gain)} channels, and config.json needs {width}: correct num_heads and the sizes there, "
                "or take the weights that belong to it"
            )
        return weight * gain.repeat(weight.shape[1] // width)

    return Source((f"{theirs}.o_proj.weight", name), scaled)


def _lower_bound(matrix: Tensor, layer: int) -> Tensor:
    """Return the logit of a layer's bound: the cumulative softmax over layers minus the share of the first layer."""
    shares = matrix.double().softmax(0)
    bound = shares[1 : layer + 1].sum(0)
    # 1 - bound is a sum, not a difference, so that bounds near 1 keep their digits.
    rest = shares[0] + shares[layer + 1 :].sum(0)
    return (torch.log(bound) - torch.log(rest)).clamp(-80, 80).float()


def norm_eps(config: Mapping[str, Any]) -> float:
    """Return the epsilon that their norms add to the mean square."""
    return float(config.get("norm_eps", 1e-6))
