"""The released MetaLA checkpoints (Chou et al. 2024, arXiv 2411.10741)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from tools.conversion.foreign.mapping import Foreign, Source


def metala(config: Mapping[str, Any]) -> Foreign:
    """`k_gate` makes the decay and with it the key; `aug_balance` is the weight of the self-augmentation.

    Their `norm_type` "simplermsnorm" has no gain. The value that it adds to the mean square is not in their
    configuration: `norm_eps` where it is given, else 1e-6.
    """
    kinds = {"layernorm": ("layernorm", True), "rmsnorm": ("rmsnorm", True), "simplermsnorm": ("rmsnorm", False)}
    kind = str(config.get("norm_type", "layernorm")).lower()
    if kind not in kinds:
        raise ValueError(f"norm_type = {config['norm_type']!r}: allowed are {', '.join(kinds)}")
    norm, affine = kinds[kind]
    size = config["decoder_embed_dim"]
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["decoder_layers"],
        hidden_size=size,
        num_heads=config["decoder_attention_heads"],
        mixers=("metala",),
        mixer_options={"metala": {"preset": "released"}},
        mlp="swiglu",
        intermediate_size=config["glu_dim"],
        norm=norm,
        norm_affine=affine,
        norm_eps=float(config.get("norm_eps", 1e-5 if norm == "layernorm" else 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", not config.get("no_tie_embed", False))),
    )
    kept = ["weight"] if affine else []
    kept += ["bias"] if affine and norm == "layernorm" else []
    mixer = {
        "q_proj.weight": "q_proj.weight",
        "a_proj.weight": "k_gate.weight",
        "v_proj.weight": "v_proj.weight",
        "gate_proj.weight": "g_proj.weight",
        "gate_proj.bias": "g_proj.bias",
        "out_proj.weight": "out_proj.weight",
    }
    sources = {"embedding.weight": Source(("model.embed_tokens.weight",))}
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for a, b in mixer.items():
            sources[f"{ours}.mixer.{a}"] = Source((f"{theirs}.token_mixer.{b}",))
        # [channels, 1, kernel] of a depthwise Conv1d; the balance may stand with its heads apart.
        sources[f"{ours}.mixer.conv.weight"] = Source((f"{theirs}.token_mixer.conv1d.weight",), lambda w: w.flatten(1))
        sources[f"{ours}.mixer.aug_weight"] = Source((f"{theirs}.token_mixer.aug_balance",), lambda w: w.flatten())
        for a, b in (("gate_proj", "l1"), ("up_proj", "l2"), ("down_proj", "l3")):
            sources[f"{ours}.mlp.{a}.weight"] = Source((f"{theirs}.channel_mixer.{b}.weight",))
        for a, b in (("norm1", "token_norm"), ("norm2", "channel_norm")):
            sources |= {f"{ours}.{a}.{k}": Source((f"{theirs}.{b}.{k}",)) for k in kept}
    sources |= {f"head.norm.{k}": Source((f"model.final_norm.{k}",)) for k in kept}
    if not model.tie_embeddings:
        sources["head.weight"] = Source(("lm_head.weight",))
    return Foreign(model, sources, ("^lm_head.weight$",) if model.tie_embeddings else ())
