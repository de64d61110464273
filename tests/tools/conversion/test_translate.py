"""Check that settings of other codebases are translated, and that those without a counterpart are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.tools.conversion.test_import import METALA_SHAPE, YARN, translated
from tools.conversion.foreign.mapping import check_names
from tools.conversion.foreign.registry import translate

SHAPE = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
FLA_SHAPE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}


def test_absent_settings_have_the_other_codebases_defaults() -> None:
    from transformers import GPTNeoXConfig, LlamaConfig, Qwen3Config

    shape = {**SHAPE, "hidden_size": 64}
    ours, theirs = translated("gpt_neox", **shape), GPTNeoXConfig(**shape)
    assert ours.parallel_residual == theirs.use_parallel_residual
    assert (ours.norm_eps, ours.tie_embeddings) == (theirs.layer_norm_eps, theirs.tie_word_embeddings)
    options = ours.options_of("attention")
    assert options.rotary_pct == theirs.rope_parameters["partial_rotary_factor"]
    assert options.rotary_base == theirs.rope_parameters["rope_theta"]
    ours, theirs = translated("llama", **shape), LlamaConfig(**shape)
    assert (ours.norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.options_of("attention").rotary_base == theirs.rope_parameters["rope_theta"]
    assert translated("qwen3", **shape).options_of("attention").head_dim == Qwen3Config(**shape).head_dim
    assert translated("mistral", **shape, sliding_window=None).options_of("attention").window is None
    # flash-linear-attention 0.6: hidden_ratio 4, in RetNet 2, and norm_eps 1e-6; widths are multiples of 256.
    shape = {"vocab_size": 97, "hidden_size": 512, "num_hidden_layers": 2, "num_heads": 4}
    for kind, width in (("gla", 1536), ("retnet", 768), ("hgrn2", 1536)):
        model = translated(kind, **shape)
        assert (model.mlp_width, model.norm_eps, model.tie_embeddings) == (width, 1e-6, False)
        assert translated(kind, **shape, hidden_ratio=8).mlp_width == 2816
    assert translated("metala", **METALA_SHAPE).tie_embeddings
    assert not translated("metala", **METALA_SHAPE, no_tie_embed=True).tie_embeddings


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("gpt_neox", {**SHAPE, "rotary_pct": 0.75}, "rotary_pct = 0.75 rotates 9 channels"),
        ("gpt_neox", {**SHAPE, "hidden_act": "relu"}, "hidden_act = 'relu' has no counterpart"),
        ("llama", {**SHAPE, "rope_scaling": {"type": "linear"}}, "rope_type = 'linear' has no counterpart here"),
        ("llama", {**SHAPE, "rope_parameters": {**YARN, "truncate": False}}, "truncate = False has no counterpart"),
        ("llama", {**SHAPE, "rope_parameters": {**YARN, "factor": 0.5}}, "yarn_factor = 0.5: must be at least 1"),
        (
            "qwen3",
            {**SHAPE, "use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types = 'chunked_attention' has no counterpart",
        ),
        ("retnet", {**FLA_SHAPE, "expand_v": 1.5}, "expand_v = 1.5: only whole numbers"),
        ("hgrn2", {**FLA_SHAPE, "use_lower_bound": False}, "use_lower_bound = False has no counterpart"),
        ("gla", {**FLA_SHAPE, "num_kv_heads": 2}, "num_kv_heads = 2 has no counterpart"),
        ("kda", {**FLA_SHAPE, "lower_bound": -5}, "lower_bound = -5 has no counterpart here; allowed are None"),
        (
            "kda",
            {**FLA_SHAPE, "kda_version": 2},
            "kda_version = 2 is no setting of a kda of flash-linear-attention 0.6",
        ),
        ("gated_deltanet", {**FLA_SHAPE, "num_v_heads": 6}, "num_value_heads = 6 is not a multiple of"),
        ("gated_deltanet", {**FLA_SHAPE, "use_gate": False}, "use_gate = False has no counterpart"),
        ("delta_net", {**FLA_SHAPE, "qk_norm": "sum"}, "qk_norm = 'sum' has no counterpart"),
        ("rwkv7", {**FLA_SHAPE, "value_dim": 128}, "value_dim = 128 has no counterpart"),
        ("rwkv7", {**FLA_SHAPE, "head_dim": 24}, "head_dim = 24 does not divide hidden_size = 64; nearest"),
        ("rwkv7", {**FLA_SHAPE, "tie_word_embeddings": True}, "untie the matrices"),
        (
            "metala",
            {**METALA_SHAPE, "glu_act": "swish"},
            "glu_act = 'swish': allowed are silu, gelu, relu, sigmoid, none",
        ),
        ("metala", {**METALA_SHAPE, "norm_type": "scalenorm"}, "norm_type = 'scalenorm': allowed are layernorm"),
        ("metala", {**METALA_SHAPE, "bias": True}, "bias = True has no counterpart here"),
        ("metala", {**METALA_SHAPE, "no_scale_embedding": "no"}, "no_scale_embedding = 'no' has no counterpart here"),
        ("metala", {**METALA_SHAPE, "use_rope": 1, "window": 2}, "use_rope = 1, window = 2: unknown in MetaLA's"),
    ],
)
def test_settings_without_counterpart_are_refused(kind: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        translated(kind, **settings)


def test_norm_epsilons_are_imported() -> None:
    assert translated("gpt_neox", **SHAPE, rotary_pct=0.5, layer_norm_eps=1e-3).norm_eps == 1e-3
    assert translated("llama", **SHAPE, rms_norm_eps=1e-3).norm_eps == 1e-3
    for kind, of_mixer in (("gla", 1e-3), ("retnet", 1e-3), ("hgrn2", 1e-5 * 16)):
        model = translated(kind, **FLA_SHAPE, norm_eps=1e-3, expand_ratio=None)
        assert (model.norm_eps, model.options_of(kind).norm_eps) == (1e-3, pytest.approx(of_mixer))
    for norm, default in (("layernorm", 1e-5), ("rmsnorm", 1e-6), ("simplermsnorm", 1e-6)):
        assert translated("metala", **METALA_SHAPE, norm_type=norm).norm_eps == default
        assert translated("metala", **METALA_SHAPE, norm_type=norm, norm_eps=1e-3).norm_eps == 1e-3


@pytest.mark.parametrize(
    ("kind", "shape", "head"),
    [
        ("gpt_neox", {**SHAPE, "rotary_pct": 0.5}, "embed_out.weight"),
        ("llama", SHAPE, "lm_head.weight"),
        ("gla", FLA_SHAPE, "lm_head.weight"),
    ],
)
def test_tied_matrix_may_be_stored_twice(kind: str, shape: dict[str, Any], head: str) -> None:
    foreign = translate({"model_type": kind, **shape, "tie_word_embeddings": True})
    names = [name for source in foreign.sources.values() if source is not None for name in source.names]
    check_names(foreign, [*names, head], "a folder")
    with pytest.raises(ValueError, match="more_weight is unknown"):
        check_names(foreign, [*names, "more_weight"], "a folder")


def test_norm_gains_of_fla_are_multiplied_into_the_output_projection() -> None:
    weight, gain = torch.randn(64, 64), torch.randn(16)
    for settings, norm in (({}, "g_norm_swish_gate"), ({"fuse_norm": False}, "g_norm")):
        source = translate({"model_type": "gla", **FLA_SHAPE, **settings}).sources["blocks.0.mixer.out_proj.weight"]
        assert source is not None
        assert source.names == ("model.layers.0.attn.o_proj.weight", f"model.layers.0.attn.{norm}.weight")
        assert torch.equal(source.make(weight, gain), weight * gain.repeat(4))
    plain = translate({"model_type": "gla", **FLA_SHAPE, "elementwise_affine": False})
    source = plain.sources["blocks.0.mixer.out_proj.weight"]
    assert source is not None
    assert source.names == ("model.layers.0.attn.o_proj.weight",)
