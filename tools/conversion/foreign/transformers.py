"""Import GPT-NeoX (Pythia), Llama, Mistral and Qwen3 in the format of transformers, and this project's exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from tools.conversion.foreign.mapping import Foreign, Source, only, tied


def metalion(config: Mapping[str, Any]) -> Foreign:
    """Describe an export of this project. The names of the tensors are equal."""
    from models.hf.configuration_metalion import MetalionConfig
    from models.language_model import LanguageModel

    MetalionConfig.from_dict(dict(config))  # transformers checks its own keys
    fields = {f.name for f in dataclasses.fields(ModelConfig)}
    shape = {key: config[key] for key in ("vocab_size", "num_layers", "hidden_size", "num_heads")}
    model = ModelConfig(**shape | {key: value for key, value in config.items() if key in fields})
    with torch.device("meta"):
        names = [name for name, _ in LanguageModel(model).named_parameters()]
    return Foreign(model, {name: Source((name,)) for name in names})


def gpt_neox(config: Mapping[str, Any]) -> Foreign:
    """Describe a GPT-NeoX model (Black et al. 2022, arXiv 2204.06745; Pythia: Biderman et al. 2023).

    Rotary embeddings pair channel i with channel i + n / 2 of the n rotated channels.
    """
    only(config, {"hidden_act": ("gelu",), "attention_bias": (True,)})
    rope, yarn = _rope(config)
    heads = config["num_attention_heads"]
    rotary_pct = float(rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25)))
    if (rotated := int(config["hidden_size"] // heads * rotary_pct)) % 2:
        raise ValueError(
            f"rotary_pct = {rotary_pct} rotates {rotated} channels of a head: only pairs have a counterpart here"
        )
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        mixers=("attention",),
        mixer_options={
            "attention": {
                "bias": True,
                "rotary_pct": rotary_pct,
                "rotary_base": float(rope.get("rope_theta", config.get("rotary_emb_base", 10000.0))),
                **yarn,
            }
        },
        mlp="gelu",
        mlp_bias=True,
        intermediate_size=config["intermediate_size"],
        norm="layernorm",
        norm_eps=float(config.get("layer_norm_eps", 1e-5)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        parallel_residual=bool(config.get("use_parallel_residual", True)),
    )
    sources = {"embedding.weight": _one("gpt_neox.embed_in.weight")}
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"gpt_neox.layers.{i}"
        for kind in ("weight", "bias"):
            sources |= {
                f"{ours}.norm1.{kind}": _one(f"{theirs}.input_layernorm.{kind}"),
                f"{ours}.norm2.{kind}": _one(f"{theirs}.post_attention_layernorm.{kind}"),
                f"{ours}.mixer.out_proj.{kind}": _one(f"{theirs}.attention.dense.{kind}"),
                f"{ours}.mlp.up_proj.{kind}": _one(f"{theirs}.mlp.dense_h_to_4h.{kind}"),
                f"{ours}.mlp.down_proj.{kind}": _one(f"{theirs}.mlp.dense_4h_to_h.{kind}"),
            }
            for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
                fused = f"{theirs}.attention.query_key_value.{kind}"
                sources[f"{ours}.mixer.{name}.{kind}"] = Source((fused,), partial(_of_fused, part=part, heads=heads))
    sources |= {f"head.norm.{kind}": _one(f"gpt_neox.final_layer_norm.{kind}") for kind in ("weight", "bias")}
    if not model.tie_embeddings:
        sources["head.weight"] = _one("embed_out.weight")
    unused = (r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$", *tied(model, "embed_out.weight"))
    return Foreign(model, sources, unused)


def llama(config: Mapping[str, Any]) -> Foreign:
    """Describe a Llama (arXiv 2302.13971), Mistral (arXiv 2310.06825) or Qwen3 model (arXiv 2505.09388).

    Rotary pairs channel i with i + head_dim / 2. Qwen3 has QK-norm.
    """
    only(config, {"hidden_act": ("silu",), "pretraining_tp": (1,)})
    rope, yarn = _rope(config)
    heads, size = config["num_attention_heads"], config["hidden_size"]
    qk_norm = config["model_type"] == "qwen3"
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        hidden_size=size,
        num_heads=heads,
        mixers=("attention",),
        mixer_options={
            "attention": {
                "head_dim": config.get("head_dim") or (128 if qk_norm else None),
                "num_kv_heads": config.get("num_key_value_heads") or heads,
                "bias": bias,
                "rotary_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
                "qk_norm": qk_norm,
                **yarn,
                **_window(config),
            }
        },
        mlp="swiglu",
        mlp_bias=mlp_bias,
        intermediate_size=config["intermediate_size"],
        norm="rmsnorm",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    sources = {"embedding.weight": _one("model.embed_tokens.weight"), "head.norm.weight": _one("model.norm.weight")}
    attention = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        sources[f"{ours}.norm1.weight"] = _one(f"{theirs}.input_layernorm.weight")
        sources[f"{ours}.norm2.weight"] = _one(f"{theirs}.post_attention_layernorm.weight")
        for kind in ("weight", *(["bias"] if bias else [])):
            sources |= {
                f"{ours}.mixer.{a}.{kind}": _one(f"{theirs}.self_attn.{b}.{kind}") for a, b in attention.items()
            }
        if qk_norm:
            sources |= {f"{ours}.mixer.{x}_norm_weight": _one(f"{theirs}.self_attn.{x}_norm.weight") for x in "qk"}
        for kind in ("weight", *(["bias"] if mlp_bias else [])):
            for name in ("gate_proj", "up_proj", "down_proj"):
                sources[f"{ours}.mlp.{name}.{kind}"] = _one(f"{theirs}.mlp.{name}.{kind}")
    if not model.tie_embeddings:
        sources["head.weight"] = _one("lm_head.weight")
    return Foreign(model, sources, (r"rotary_emb\.inv_freq$", *tied(model)))


def _rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the rotary settings and the keys of YaRN.

    The settings are rope_parameters in transformers 5, and rope_scaling in earlier versions. With both, rope_scaling counts.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(
            f"rope_type = {kind!r} has no counterpart here; allowed are 'default' and 'yarn': other wavelengths differ"
        )
    if kind == "default":
        return rope, {}
    only(rope, {"mscale": (None, 0), "mscale_all_dim": (None, 0), "truncate": (True,)})
    given = {name: rope.get(name) for name in ("beta_fast", "beta_slow", "attention_factor")}
    # transformers takes the key beside the rotary settings first
    key = "original_max_position_embeddings"
    original = config.get(key) or rope.get(key) or config["max_position_embeddings"]
    return rope, {
        "yarn_factor": float(rope["factor"]),
        "yarn_original_length": original,
        **{f"yarn_{name}": float(value) for name, value in given.items() if value is not None},
    }


def _window(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a sliding window, with transformers' defaults of the `model_type`.

    Llama reads no window, and Mistral has it in every layer. In Qwen3 `layer_types` names its layers, or else those from
    `max_window_layers` on.
    """
    window, count = config.get("sliding_window", 4096), config["num_hidden_layers"]
    if config["model_type"] == "llama" or window is None:
        return {}
    if config["model_type"] == "mistral":
        return {"window": window}
    if not config.get("use_sliding_window", False):
        return {}
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (count - first)
    for kind in kinds:
        only({"layer_types": kind}, {"layer_types": ("full_attention", "sliding_attention")})
    full = [layer for layer in range(count) if kinds[layer] == "full_attention"]
    return {} if len(full) == count else {"window": window, "full_layers": full}


def _of_fused(fused: Tensor, part: int, heads: int) -> Tensor:
    """Return the queries, keys or values of GPT-NeoX's fused matrix [heads, 3, head_dim, ...]."""
    return fused.unflatten(0, (heads, 3, -1))[:, part].flatten(0, 1)


def _one(name: str) -> Source:
    return Source((name,))
