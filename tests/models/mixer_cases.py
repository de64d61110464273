"""The settings of all registered mixers that tests use, and functions that build them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.mixers import MIXERS

SIZE, HEADS, LAYERS, LAYER = 32, 4, 3, 1

COMPLEX = {"decay_per": "value_channel", "causal": False, "decay_init": "s4d_lin", "complex_decay": True}
# Settings in addition to the defaults: (mixer, its options).
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("lion", {"variant": variant, "causal": causal})
        for variant in ("lit", "d", "lstm", "grfa")
        for causal in (True, False)
    ),
    ("lion", {"causal": False}),
    ("lion", {"causal": False, "mask_convention": "shifted"}),
    ("lion", {"scaled": False, "phi": "none", "bias": True}),
    ("lion", {"variant": "d", "causal": False, "scaled": False, "phi": "silu_paper"}),
    ("lion", {"variant": "lit", "phi": "elu", "output_norm": False}),
    ("lion", {"variant": "lstm", "phi": "none", "causal": False, "decay_init": "half_life"}),
    ("lion", {"decay_per": "channel", "decay_init": "hippo", "value_init": "zero_order_hold", "init_std": 0.1}),
    ("lion", {"decay_per": "channel", "causal": False, "phi": "relu"}),
    ("lion", {"decay_per": "channel", "causal": False, "variant": "lstm", "phi": "softplus"}),
    ("lion", {"decay_per": "value_channel", "causal": False, "decay_init": "s4d_lin"}),
    ("lion", {"decay_per": "value_channel", "causal": False, "variant": "d", "phi": "sigmoid", "scaled": False}),
    ("lion", {**COMPLEX, "mask_convention": "shifted"}),
    ("lion", {**COMPLEX, "variant": "d", "value_init": "zero_order_hold"}),
    ("lion", {**COMPLEX, "variant": "grfa", "scaled": False, "phi": "sigmoid"}),
    ("lion", {"decay_per": "channel", "variant": "grfa", "mask_convention": "shifted", "causal": False}),
    ("lion", {"decay_per": "value_channel", "variant": "grfa", "causal": False, "scaled": False}),
    ("normalised_attention", {"normaliser": "softplus"}),
    ("normalised_attention", {"normaliser": "sigmoid"}),
    ("transnormer", {"phase": "first"}),
    ("hgrn2", {"learned_lower_bound": False}),
    ("hgrn2", {"lower_bound_range": "free", "norm_eps": 1e-6}),
    ("hgrn2", {"norm_over": "all"}),
    ("gla", {"norm": "rmsnorm", "norm_eps": 1e-6}),
    ("gla", {"expand_k": 1.0, "conv_kernel": 2}),
    ("linear_attention", {"feature_map": "taylor", "feature_dim": 5, "conv_kernel": 3}),
    ("retnet", {"norm": "rmsnorm", "norm_eps": 1e-6}),
    ("hgrn", {"rotation": True}),
    ("hgrn", {"input_gate": "free"}),
    ("qlstm", {"forget_gate": "reversed"}),
    ("attention", {"num_kv_heads": 2, "bias": True, "rotary_pct": 0.5}),
    ("attention", {"num_kv_heads": 2, "causal": False}),
    (
        "attention",
        {
            "head_dim": 12,
            "window": 5,
            "qk_norm": True,
            "output_gate": True,
            "yarn_factor": 4.0,
            "yarn_original_length": 16,
        },
    ),
    ("gated_delta_net", {"num_heads": 2, "num_value_heads": 4, "head_dim": 6, "allow_negative_eigenvalues": True}),
    ("kda", {"num_value_heads": 8, "head_dim": 4, "expand_v": 1.5}),
    (
        "gdn2",
        {"num_heads": 2, "num_value_heads": 6, "head_dim": 8, "norm_eps": 1e-6, "allow_negative_eigenvalues": True},
    ),
    ("metala", {"preset": "paper", "key_projection": True, "self_augmentation": False}),
    ("metala", {"dynamic_decay": False, "key_projection": True, "expand_k": 1.0, "conv_kernel": 2}),
    ("metala", {"decay_init": "hippo"}),
    ("metala_bidirectional", {"preset": "paper", "convolution": False}),
    ("metala_bidirectional", {"decay_init": "hippo"}),
    ("metala_bidirectional", {"decay_init": "s4d_lin", "complex_decay": True}),
]
CASES = [(name, {}) for name in sorted(MIXERS)] + VARIANTS


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


def both_ways(case: tuple[str, dict[str, Any]]) -> bool:
    return case[0] == "metala_bidirectional" or case[1].get("causal") is False


def build(
    case: tuple[str, dict[str, Any]],
    dtype: torch.dtype = torch.float32,
    size: int = SIZE,
    heads: int = HEADS,
    layer: int | None = None,
) -> nn.Module:
    """Return the mixer with all parameters changed from their initial values: a zero would hide an error.

    layer: None for LAYER, and for the first where others need its values.
    """
    name, options = case
    if layer is None:
        layer = 0 if getattr(MIXERS[name], "value_residual", False) else LAYER
    config = ModelConfig(
        vocab_size=8,
        num_layers=LAYERS,
        hidden_size=size,
        num_heads=heads,
        mixers=(name,),
        mixer_options={name: options} if options else {},
    )
    torch.manual_seed(5)
    mixer = MIXERS[name](config, layer, config.options_of(name))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer.to(dtype)


def tokens(length: int, batch: int = 1, dtype: torch.dtype = torch.float32, size: int = SIZE) -> Tensor:
    return torch.randn(batch, length, size, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(
        dtype
    )


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.abs().max().item()
    assert scale > 0
    assert (got.double() - expected.double()).abs().max().item() <= tolerance * scale
