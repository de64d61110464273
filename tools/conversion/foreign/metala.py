"""Import the released MetaLA checkpoints (Chou et al. 2024, arXiv 2411.10741)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from tools.conversion.foreign.mapping import Foreign, Source, only, tied

# Activation of their gate l1 -> MLP here. "swish" is refused: their code uses it for SiLU and for no activation.
_GATES = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu", "none": "bilinear"}
_NORMS = {"layernorm": ("layernorm", True), "rmsnorm": ("rmsnorm", True), "simplermsnorm": ("rmsnorm", False)}

# Keys that `metala` reads, and keys without an effect on the logits of given weights.
_READ = {
    "vocab_size",
    "decoder_embed_dim",
    "decoder_layers",
    "decoder_attention_heads",
    "glu_dim",
    "glu_act",
    "norm_type",
    "norm_eps",
    "no_scale_embedding",
    "no_tie_embed",
    "tie_word_embeddings",
}
_WITHOUT_EFFECT = {
    "model_type",
    "auto_map",
    "torch_dtype",
    "use_cache",
    "is_decoder",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "init_std",
    "initializer_range",
    "add_bos_token",
    "max_position_embeddings",
    "hidden_dim",  # a width, which follows from the shapes of the weights
}
# Keys of the code that theirs is based on, with the values of MetaLA's layer.
_ONLY: dict[str, tuple[Any, ...]] = {
    "bias": (False,),
    "linear_act_fun": ("silu",),
    "linear_use_lrpe_list": ([],),
    "no_scale_embedding": (True, False),
}


def metala(config: Mapping[str, Any]) -> Foreign:
    """Describe a MetaLA model: `k_gate` makes the decay and the key, `aug_balance` weighs self-augmentation.

    Their "simplermsnorm", the default of `norm_type`, has no gain. Its epsilon is `norm_eps`, or 1e-6 if that is absent.

    Raises:
        ValueError: an unknown key.
        KeyError: no `no_scale_embedding`, which has no safe default.
    """
    only(config, _ONLY)
    _refuse_unknown(config)
    norm, affine = _NORMS[_chosen(config, "norm_type", "simplermsnorm", _NORMS)]
    size = config["decoder_embed_dim"]
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["decoder_layers"],
        hidden_size=size,
        num_heads=config["decoder_attention_heads"],
        mixers=("metala",),
        mixer_options={"metala": {"preset": "released"}},
        mlp=_GATES[_chosen(config, "glu_act", "silu", _GATES)],  # type: ignore[arg-type]
        intermediate_size=size if config["glu_dim"] == -1 else config["glu_dim"],
        norm=norm,  # type: ignore[arg-type]
        norm_affine=affine,
        norm_eps=float(config.get("norm_eps", 1e-5 if norm == "layernorm" else 1e-6)),
        embedding_scale=1.0 if config["no_scale_embedding"] else float(size**0.5),
        tie_embeddings=bool(config.get("tie_word_embeddings", not config.get("no_tie_embed", False))),
    )
    norm_names = ["weight"] if affine else []
    norm_names += ["bias"] if affine and norm == "layernorm" else []
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
        # A depthwise Conv1d has [channels, 1, kernel]. The balance may have one dimension per head.
        sources[f"{ours}.mixer.conv.weight"] = Source((f"{theirs}.token_mixer.conv1d.weight",), lambda w: w.flatten(1))
        sources[f"{ours}.mixer.aug_weight"] = Source((f"{theirs}.token_mixer.aug_balance",), lambda w: w.flatten())
        for a, b in (("gate_proj", "l1"), ("up_proj", "l2"), ("down_proj", "l3")):
            sources[f"{ours}.mlp.{a}.weight"] = Source((f"{theirs}.channel_mixer.{b}.weight",))
        for a, b in (("norm1", "token_norm"), ("norm2", "channel_norm")):
            sources |= {f"{ours}.{a}.{k}": Source((f"{theirs}.{b}.{k}",)) for k in norm_names}
    sources |= {f"head.norm.{k}": Source((f"model.final_norm.{k}",)) for k in norm_names}
    if not model.tie_embeddings:
        sources["head.weight"] = Source(("lm_head.weight",))
    return Foreign(model, sources, tied(model))


def _chosen(config: Mapping[str, Any], key: str, default: str, allowed: Mapping[str, Any]) -> str:
    value = str(config.get(key, default)).lower()
    if value not in allowed:
        raise ValueError(f"{key} = {config[key]!r}: allowed are {', '.join(allowed)}")
    return value


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that may change the model. Keys of transformers and of dropout do not."""
    from transformers import PreTrainedConfig

    known = _READ | _WITHOUT_EFFECT | _ONLY.keys() | PreTrainedConfig().to_dict().keys()
    unknown = sorted(k for k in config if k not in known and not k.startswith("_") and not k.endswith("dropout"))
    if unknown:
        words = ", ".join(f"{key} = {config[key]!r}" for key in unknown[:4])
        raise ValueError(
            f"{words}: unknown in MetaLA's configuration, and may change the model. Remove it from config.json if it does not"
        )
