"""Compute logits of a released MetaLA model by the equations of the paper, token by token in float32.

The code is independent of `models/`, because an import compares the two. Source: Chou et al. 2024 (arXiv 2411.10741), Eq.
13-22 and A35, with the released scale 1/sqrt(head_dim_k) and SiLU after the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)),
    "relu": lambda x: x.clamp(min=0),
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


@torch.no_grad()
def metala_logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Return logits [batch, length, vocab] for tokens [batch, length] int.

    Args:
        config: their config.json, as `metala` of `foreign/metala.py` accepts it.
        tensors: their tensors under their names; read one layer at a time.
    """

    def read(name: str) -> Tensor:
        return tensors[name].float()

    embedding = read("model.embed_tokens.weight")
    x = embedding[tokens]
    if not config["no_scale_embedding"]:
        x = x * config["decoder_embed_dim"] ** 0.5
    activation = _ACTIVATIONS[str(config.get("glu_act", "silu")).lower()]
    for i in range(config["decoder_layers"]):
        layer = f"model.layers.{i}"
        mixer = {name: read(f"{layer}.token_mixer.{name}") for name in _MIXER}
        x = x + _mix(_norm(config, tensors, f"{layer}.token_norm", x), mixer, config["decoder_attention_heads"])
        h = _norm(config, tensors, f"{layer}.channel_norm", x)
        l1, l2, l3 = (read(f"{layer}.channel_mixer.{name}.weight") for name in ("l1", "l2", "l3"))
        x = x + (activation(h @ l1.T) * (h @ l2.T)) @ l3.T
    head = embedding if "lm_head.weight" not in tensors else read("lm_head.weight")
    return _norm(config, tensors, "model.final_norm", x) @ head.T


_MIXER = (
    "conv1d.weight",
    "q_proj.weight",
    "k_gate.weight",
    "v_proj.weight",
    "g_proj.weight",
    "g_proj.bias",
    "aug_balance",
    "out_proj.weight",
)


def _mix(x: Tensor, w: Mapping[str, Tensor], heads: int) -> Tensor:
    """Return the token mixer's output for x [batch, length, d], in x's shape."""
    batch, length, size = x.shape
    taps = w["conv1d.weight"].reshape(size, -1).T
    padded = torch.cat([x.new_zeros(batch, len(taps) - 1, size), x], 1)
    x = sum(padded[:, k : k + length] * tap for k, tap in enumerate(taps))
    x = x * torch.sigmoid(x)
    q, a, v = (x @ w[f"{name}.weight"].T for name in ("q_proj", "k_gate", "v_proj"))
    gate = x @ w["g_proj.weight"].T + w["g_proj.bias"]
    log_alpha = -torch.log1p(torch.exp(-a.abs())) / 16 + a.clamp(max=0) / 16
    alpha, k = log_alpha.exp(), -torch.expm1(log_alpha)
    self_score = (q * w["aug_balance"].reshape(-1) * k).unflatten(-1, (heads, -1)).sum(-1, keepdim=True)
    q, k, v, alpha = (y.unflatten(-1, (heads, -1)) for y in (q, k, v, alpha))
    state = x.new_zeros(batch, heads, q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(length):
        state = alpha[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    # In float64: the sigmoid is near 0.5 in every channel, so that small outputs would lose their last digits in the sum.
    o = torch.stack(outputs, 1).double() * q.shape[-1] ** -0.5 + torch.sigmoid((self_score * v).double())
    centred = o - o.mean(-1, keepdim=True)
    o = (centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(x.dtype)
    return (gate * torch.sigmoid(gate) * o.flatten(2)) @ w["out_proj.weight"].T


def _norm(config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    kind = str(config.get("norm_type", "simplermsnorm")).lower()
    eps = config.get("norm_eps", 1e-5 if kind == "layernorm" else 1e-6)
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if kind != "simplermsnorm":
        x = x * tensors[f"{name}.weight"].float()
    return x + tensors[f"{name}.bias"].float() if kind == "layernorm" else x
