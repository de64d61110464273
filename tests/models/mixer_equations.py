"""The mixers of the linear-attention family as their papers print them: one token after the other, in float64.

Each function takes the parameters by name, the input [length, d], the head count, the layer's index and the number of
layers, and returns [length, d]. Nothing of `models` is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(len(x), heads, -1)


def _linear(p: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _swish(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


def _elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(torch.minimum(x, torch.zeros_like(x))))


def _causal(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """q, k: [length, heads, dk], v: [length, heads, dv], alpha: [length, heads, dk or 1]."""
    state = torch.zeros(*k.shape[1:], v.shape[-1], dtype=torch.float64)
    out = []
    for t in range(len(q)):
        state = alpha[t, :, :, None] * state + k[t, :, :, None] * v[t, :, None, :]
        out.append((q[t, :, :, None] * state).sum(1))
    return torch.stack(out)


def _both(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, shifted: bool = False, per_value_channel: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum over all pairs and the normalizers. A pair's decay is the product of the decays between its tokens."""
    out, rows = torch.zeros_like(v), torch.zeros_like(v if per_value_channel else v[..., :1])
    for i in range(len(q)):
        for j in range(len(q)):
            low, high = min(i, j), max(i, j)
            between = alpha[j:i] if shifted and j < i else alpha[low + 1 : high + 1]
            if per_value_channel:
                weight = (q[i] * k[j]).sum(-1, keepdim=True) * between.prod(0)
            else:
                weight = (q[i] * k[j] * between.prod(0)).sum(-1, keepdim=True)
            out[i] += weight * v[j]
            rows[i] += weight
    return out, rows


def _both_complex(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, angle: Tensor, shifted: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of `_both` per channel of values. Channels c and c + P of a head's 2 P values are a complex number."""
    values = torch.complex(*v.chunk(2, -1))
    out, rows = torch.zeros_like(values), torch.zeros_like(radius)
    for i in range(len(q)):
        for j in range(len(q)):
            between = radius[j:i] if shifted and j < i else radius[min(i, j) + 1 : max(i, j) + 1]
            weight = (q[i] * k[j]).sum(-1, keepdim=True) * between.prod(0)
            out[i] += weight * torch.exp(1j * angle * (i - j)) * values[j]
            rows[i] += weight
    return torch.cat([out.real, out.imag], -1), torch.cat([rows, rows], -1)


def _s4d_lin_angles(offset: Tensor, heads: int, options: dict[str, Any]) -> Tensor:
    """Return (pi n + offset) dt of channel n of every head, with time steps from dt_min to dt_max."""
    low, high = options.get("dt_min", 0.001), options.get("dt_max", 0.1)
    step = low * (high / low) ** (torch.arange(len(offset), dtype=torch.float64) / (len(offset) - 1))
    frequency = math.pi * torch.arange(len(offset) // heads, dtype=torch.float64).repeat(heads) + offset
    return (frequency * step).view(heads, -1)


def _layer_norm(o: Tensor, eps: float = 1e-5) -> Tensor:
    centred = o - o.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)


def _rms_norm(o: Tensor, eps: float = 1e-5) -> Tensor:
    return o / torch.sqrt((o**2).mean(-1, keepdim=True) + eps)


def _head_norm(o: Tensor, norm: str = "layernorm", norm_eps: float = 1e-5) -> Tensor:
    return (_layer_norm if norm == "layernorm" else _rms_norm)(o, norm_eps)


def _convolved(p: Weights, x: Tensor) -> Tensor:
    weight = p["conv.weight"]
    kernel = weight.shape[1]
    convolved = torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(kernel):
            if t - kernel + 1 + j >= 0:
                convolved[t] += weight[:, j] * x[t - kernel + 1 + j]
    return convolved


def linear_attention(p: Weights, x: Tensor, heads: int, layer: int, layers: int, **options: Any) -> Tensor:
    if "conv.weight" in p:
        x = _swish(_convolved(p, x))
    q, k, v = (_heads(_linear(p, name, x), heads) for name in ("q_proj", "k_proj", "v_proj"))
    if options.get("feature_map") == "taylor":
        o = torch.zeros_like(v)
        for i in range(len(x)):
            s = torch.einsum("hc,jhc->jh", q[i], k[: i + 1]) / math.sqrt(q.shape[-1])
            weight = (1 + s + s**2 / 2)[:, :, None]
            o[i] = (weight * v[: i + 1]).sum(0) / (weight.sum(0) + 1e-6)
        return _linear(p, "out_proj", o.flatten(1))
    q, k = _elu1(q), _elu1(k)
    ones = torch.ones_like(q[..., :1])
    o = _causal(q, k, v, ones) / (_causal(q, k, ones, ones) + 1e-6)
    return _linear(p, "out_proj", o.flatten(1))


def normalised_attention(
    p: Weights, x: Tensor, heads: int, layer: int, layers: int, eta: Callable[[Tensor], Tensor] = torch.exp
) -> Tensor:
    q, k, v = (_heads(_linear(p, name, x), heads) for name in ("q_proj", "k_proj", "v_proj"))
    o = _causal(q, k, v, torch.ones_like(q)) / math.sqrt(q.shape[-1])
    return _linear(p, "out_proj", (o / eta(_linear(p, "eta_proj", x))[:, :, None]).flatten(1))


def gla(p: Weights, x: Tensor, heads: int, layer: int, layers: int, **options: Any) -> Tensor:
    if "conv.weight" in p:
        x = _swish(_convolved(p, x))
    q, k, v = (_heads(_linear(p, name, x), heads) for name in ("q_proj", "k_proj", "v_proj"))
    alpha = _heads(_sigmoid(_linear(p, "decay_up", _linear(p, "decay_down", x))) ** (1 / 16), heads)
    norm = {key: value for key, value in options.items() if key in ("norm", "norm_eps")}
    o = _head_norm(_causal(q, k, v, alpha) / math.sqrt(q.shape[-1]), **norm).flatten(1)
    return _linear(p, "out_proj", _swish(_linear(p, "gate_proj", x)) * o)


def retnet(p: Weights, x: Tensor, heads: int, layer: int, layers: int, **options: Any) -> Tensor:
    q, k, v = (_heads(_linear(p, name, x), heads) for name in ("q_proj", "k_proj", "v_proj"))
    half = q.shape[-1] // 2
    # A rotation multiplies by a complex number; the inner product is the real part.
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    phase = torch.exp(1j * torch.arange(len(x), dtype=torch.float64)[:, None] * theta)[:, None]
    q, k = (torch.complex(t[..., :half], t[..., half:]) * phase for t in (q, k))
    o = torch.zeros_like(v)
    for h in range(heads):
        decay = 1 - 2.0 ** (-5 - h)
        for n in range(len(x)):
            for m in range(n + 1):
                o[n, h] += decay ** (n - m) * (q[n, h] * k[m, h].conj()).sum().real * v[m, h]
    o = _head_norm(o / math.sqrt(2 * half), **options).flatten(1)
    return _linear(p, "out_proj", _swish(_linear(p, "gate_proj", x)) * o)


def transnormer(p: Weights, x: Tensor, heads: int, layer: int, layers: int) -> Tensor:
    q, k = (_swish(_heads(_linear(p, name, x), heads)) for name in ("q_proj", "k_proj"))
    v = _heads(_linear(p, "v_proj", x), heads)
    theta = p["theta"].reshape(heads, -1) if "theta" in p else torch.zeros_like(q[0])
    o = torch.zeros_like(v)
    for h in range(heads):
        decay = math.exp(-8 * h / heads * (1 - layer / layers))
        for s in range(len(x)):
            for t in range(s + 1):
                o[s, h] += decay ** (s - t) * (q[s, h] * k[t, h] * torch.cos(theta[h] * (s - t))).sum() * v[t, h]
    o = _rms_norm(o / math.sqrt(q.shape[-1])).flatten(1)
    return _linear(p, "out_proj", o * _linear(p, "gate_proj", x))


def hgrn2(p: Weights, x: Tensor, heads: int, layer: int, layers: int, **options: Any) -> Tensor:
    beta = torch.as_tensor(layer / layers, dtype=torch.float64)
    if "lower_bound" in p:
        free = options.get("lower_bound_range") == "free"
        beta = _sigmoid(p["lower_bound"]) if free else (layer - 0.5 + _sigmoid(p["lower_bound"])) / layers
    f = _heads(beta + (1 - beta) * _sigmoid(_linear(p, "f_proj", x)), heads)
    q, v = _heads(_swish(_linear(p, "q_proj", x)), heads), _heads(_linear(p, "v_proj", x), heads)
    o = _causal(q, 1 - f, v, f)
    if options.get("norm_over") == "all":
        o = o.flatten(1)
    return _linear(p, "out_proj", _rms_norm(o, options.get("norm_eps", 1e-5)).reshape(len(x), -1))


def lion(p: Weights, x: Tensor, heads: int, layer: int, layers: int, **options: Any) -> Tensor:
    variant, phi = options.get("variant", "s"), options.get("phi", "silu")
    q, k, v = (_heads(_linear(p, name, x), heads) for name in ("q_proj", "k_proj", "v_proj"))
    elementwise: dict[str, Callable[[Tensor], Tensor]] = {
        "elu": _elu1,
        "sigmoid": _sigmoid,
        "relu": lambda t: t * (t > 0),
        "softplus": lambda t: torch.log(1 + torch.exp(t)),
    }
    if phi in elementwise:
        q, k = elementwise[phi](q), elementwise[phi](k)
    elif phi == "none":
        k = k / math.sqrt(k.shape[-1])
    else:
        q, k = ((_swish(t) + 0.5 if phi == "silu" else _swish(t + 0.5)) for t in (q, k))
        q, k = (t / torch.sqrt((t**2).sum(-1, keepdim=True)) for t in (q, k))
    logits = torch.full((len(x), heads), torch.inf, dtype=torch.float64)
    if variant != "lit":
        logits = p["decay"].expand(len(x), -1)
    if "decay_weight" in p:
        logits = logits + x @ p["decay_weight"].T
    decay = _heads(_sigmoid(logits), heads)
    if variant == "lstm":
        k = k * _sigmoid(_linear(p, "input_gate", x))[:, :, None]
    if variant == "grfa" and options.get("decay_per") == "value_channel":
        v = v * (1 - (torch.cat([decay, decay], -1) if options.get("complex_decay") else decay))
    elif variant == "grfa":
        k = k * (1 - decay)
    if options.get("causal", True):
        num, den = _causal(q, k, v, decay), _causal(q, k, torch.ones_like(v[..., :1]), decay)
    else:
        shifted, per_value_channel = (
            options.get("mask_convention") == "shifted",
            options.get("decay_per") == "value_channel",
        )
        if options.get("complex_decay"):
            angle = _s4d_lin_angles(p["frequency_offset"], heads, options)
            num, den = _both_complex(q, k, v, decay, angle, shifted)
        else:
            num, den = _both(q, k, v, decay, shifted, per_value_channel)
    if not options.get("scaled", True):
        den = torch.ones_like(den)
    elif variant == "lstm":
        den = torch.maximum(den.abs(), torch.ones_like(den))
    else:
        den = den + 1e-6
    y = _linear(p, "out_proj", (num / den).flatten(1))
    return _layer_norm(y) * p["output_norm.weight"] + p["output_norm.bias"] if "output_norm.weight" in p else y


def _metala(p: Weights, x: Tensor, heads: int, layer: int, layers: int, both: bool, **options: Any) -> Tensor:
    paper = options.get("preset") == "paper"
    if "conv.weight" in p:
        convolved = _convolved(p, x)
        x = convolved if paper else _swish(convolved)
    q, v = _heads(_linear(p, "q_proj", x), heads), _heads(_linear(p, "v_proj", x), heads)
    a = p["decay"].expand(len(x), -1) if "decay" in p else 0.0
    a = a + _linear(p, "a_proj", x) if "a_proj.weight" in p else a
    alpha = _heads(_sigmoid(a) ** (1 / 16), heads)
    k = _heads(_linear(p, "k_proj", x), heads) if "k_proj.weight" in p else 1 - alpha
    if options.get("complex_decay"):
        z = torch.complex(*q.chunk(2, -1))
        q, angle = z.real, _s4d_lin_angles(p["frequency_offset"], heads, options)
        o = torch.zeros_like(v)
        for i, j in itertools.product(range(len(x)), repeat=2):
            between = alpha[min(i, j) + 1 : max(i, j) + 1].prod(0)
            o[i] += ((z[i] * torch.exp(1j * angle * (i - j))).real * k[j] * between).sum(-1, keepdim=True) * v[j]
    else:
        o = _both(q, k, v, alpha)[0] if both else _causal(q, k, v, alpha)
    if not paper:
        o = o / math.sqrt(q.shape[-1])
    if "aug_weight" in p:
        o = o + _sigmoid((q * p["aug_weight"].reshape(heads, -1) * k).sum(-1, keepdim=True) * v)
    return _linear(p, "out_proj", _swish(_linear(p, "gate_proj", x)) * _layer_norm(o).flatten(1))


metala = partial(_metala, both=False)
metala_bidirectional = partial(_metala, both=True)


def _convolved_heads(p: Weights, name: str, x: Tensor, heads: int) -> Tensor:
    y = _convolved({"conv.weight": p[f"conv_{name}.weight"]}, _linear(p, f"{name}_proj", x))
    return _heads(_swish(y), heads)


def _delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """alpha, erase: [length, key heads, dk or 1] or for value heads; write: [length, value heads, dv or 1]."""
    q, k = (y / torch.sqrt((y**2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    group = v.shape[1] // k.shape[1]
    out = torch.zeros_like(v)
    for head in range(v.shape[1]):
        key_head = head // group
        state = torch.zeros(k.shape[-1], v.shape[-1], dtype=torch.float64)
        for t in range(len(q)):
            key = k[t, key_head]
            a, e = (y[t, head if y.shape[1] == v.shape[1] else key_head] for y in (alpha, erase))
            state = (torch.eye(len(key)) - torch.outer(key, e * key)) @ (a[:, None] * state)
            state = state + torch.outer(key, write[t, head] * v[t, head])
            out[t, head] = q[t, key_head] @ state / math.sqrt(len(key))
    return out


def _delta_mixer(name: str, p: Weights, x: Tensor, heads: int, layer: int, layers: int, **options: Any) -> Tensor:
    key_heads = options.get("num_heads", heads)
    value_heads = options.get("num_value_heads", key_heads)
    q, k = (_convolved_heads(p, key, x, key_heads) for key in "qk")
    v = _convolved_heads(p, "v", x, value_heads)
    beta = _sigmoid(_linear(p, "b_proj", x)) * (2 if options.get("allow_negative_eigenvalues") else 1)
    beta = _heads(beta, key_heads if name == "gdn2" else value_heads)
    gate, alpha = torch.ones_like(v), torch.ones_like(beta)
    if name == "gated_delta_net":
        logits, gate = _heads(_linear(p, "a_proj", x) + p["dt_bias"], value_heads), _swish(_linear(p, "gate_proj", x))
    elif name != "delta_net":
        logits = _linear(p, "decay_up", _linear(p, "decay_down", x)) + p["dt_bias"]
        logits = _heads(logits, len(p["a_log"]))
        gate = _sigmoid(_linear(p, "gate_up", _linear(p, "gate_down", x)))
    if name != "delta_net":
        alpha = torch.exp(-torch.exp(p["a_log"])[:, None] * torch.log1p(torch.exp(logits)))
    write = _heads(_sigmoid(_linear(p, "w_proj", x)), value_heads) if name == "gdn2" else beta
    o = p["norm_weight"] * _rms_norm(_delta(q, k, v, alpha, beta, write), options.get("norm_eps", 1e-5))
    return _linear(p, "out_proj", o.flatten(1) * gate.flatten(1))


delta_net, gated_delta_net, kda, gdn2 = (
    partial(_delta_mixer, name) for name in ("delta_net", "gated_delta_net", "kda", "gdn2")
)


def rwkv7(p: Weights, x: Tensor, heads: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output and the values of the first layer. values: None in the first layer."""
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * p[f"mix_{name}"] for name in "rwkvag")
    r, k, v = _linear(p, "r_proj", x_r), _linear(p, "k_proj", x_k), _linear(p, "v_proj", x_v)
    alpha = torch.exp(-math.exp(-0.5) * _sigmoid(_linear(p, "decay_up", torch.tanh(_linear(p, "decay_down", x_w)))))
    rate = _sigmoid(_linear(p, "rate_up", _linear(p, "rate_down", x_a)))
    gate = _linear(p, "gate_up", _sigmoid(_linear(p, "gate_down", x_g)))
    if values is None:
        values = v
    else:
        v = v + (values - v) * _sigmoid(_linear(p, "value_up", _linear(p, "value_down", x_v)))
    kappa = _heads(k * p["removal_scale"], heads)
    kappa = kappa / torch.sqrt((kappa**2).sum(-1, keepdim=True) + 1e-6)
    k = k * (1 + (rate - 1) * p["key_scale"])
    r, k, v, alpha, rate = (_heads(y, heads) for y in (r, k, v, alpha, rate))
    out = torch.zeros_like(v)
    for h in range(heads):
        state = torch.zeros(k.shape[-1], v.shape[-1], dtype=torch.float64)
        for t in range(len(x)):
            removal = torch.outer(rate[t, h] * kappa[t, h], kappa[t, h])
            state = (torch.diag(alpha[t, h]) - removal) @ state + torch.outer(k[t, h], v[t, h])
            out[t, h] = r[t, h] @ state
    normed = _layer_norm(out, 1e-5 * k.shape[-1]).flatten(1) * p["norm_weight"] + p["norm_bias"]
    bonus = ((r * k * p["bonus"].view(heads, -1)).sum(-1, keepdim=True) * v).flatten(1)
    return _linear(p, "out_proj", (normed + bonus) * gate), values
