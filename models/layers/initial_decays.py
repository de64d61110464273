"""Initial values of decays: diagonal forms of HiPPO (arXiv 2206.11893), their zero-order hold, logits and time steps."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn


def hippo_log_decays(heads: int, head_dim: int, dt_min: float, dt_max: float, *, lin: bool = False) -> Tensor:
    """Return the log decay at the start of every channel, [heads * head_dim] float64, from a diagonal form of HiPPO.

    Channel n of head h has the decay exp(-dt_h (n + 1)): -(n + 1) is the diagonal of HiPPO-LegS, S4D-Real of Gu et al. 2022
    (arXiv 2206.11893). lin: channel c has exp(-dt_c / 2), the real part -1/2 of S4D-Lin and S4D-Inv. The time steps are spaced
    evenly in the logarithm from dt_min to dt_max. `layers.complex_decay` has the imaginary part of S4D-Lin.
    """
    count = heads * head_dim if lin else heads
    step = time_steps(torch.arange(count, dtype=torch.float64), count, dt_min, dt_max)
    return -step / 2 if lin else -torch.outer(step, torch.arange(1, head_dim + 1, dtype=torch.float64)).flatten()


def time_steps(index: Tensor, count: int, dt_min: float, dt_max: float) -> Tensor:
    """Return the time steps of these indices, any shape, of `count` time steps spaced evenly in the logarithm."""
    return dt_min * (dt_max / dt_min) ** (index / max(count - 1, 1))


def decay_logits(log_decay: Tensor) -> Tensor:
    """Return the float32 logits of decays: log decay - log(1 - decay). Precise for decays near 0 and near 1."""
    return (log_decay - (-torch.expm1(log_decay)).log()).float()


def initial_log_decays(options: Any, heads: int, channels: int) -> Tensor:
    """Return the log decay at the start in float64, [heads], or [heads * channels] with decays per channel.

    options: those of LION, or of MetaLA with decay_init: hippo or s4d_lin.
    """
    if options.decay_init in ("hippo", "s4d_lin"):
        return hippo_log_decays(heads, channels, options.dt_min, options.dt_max, lin=options.decay_init == "s4d_lin")
    if options.decay_init == "half":
        log_decay = torch.full((heads,), -log(2), dtype=torch.float64)
    elif options.decay_init == "retnet":
        log_decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64)))
    else:
        log_decay = torch.full((heads,), -log(2) / options.half_life, dtype=torch.float64)
    return log_decay if options.decay_per == "head" else log_decay.repeat_interleave(channels)


def zero_order_hold(name: str, log_decay: Tensor, angle: Tensor | None, heads: int, head_dim: int) -> Tensor:
    """Return the initial weight of values, L^-1 (exp(L dt) - I) for decays exp(L dt), [heads * head_dim, heads * head_dim].

    log_decay, angle: of `initial_log_decays` and `complex_decay.hippo_angles`, [heads] or one per channel. L dt is log_decay +
    1j angle. dt is 1 unless `decay_init` has time steps. With an angle, channels c and c + head_dim / 2 of a head are one complex
    number.
    """
    step = torch.ones_like(log_decay)
    if name == "s4d_lin":
        step = -2 * log_decay
    elif name == "hippo":
        step = -log_decay / torch.arange(1, head_dim + 1, dtype=log_decay.dtype).repeat(len(log_decay) // head_dim)
    if angle is None:
        held = torch.expm1(log_decay) / log_decay * step
        return torch.diag(held.repeat_interleave(heads * head_dim // len(held)))
    exponent = torch.complex(log_decay, angle)
    held = (exponent.exp() - 1) / exponent * step
    real = torch.arange(heads * head_dim).view(heads, 2, -1)[:, 0].flatten()
    imaginary = real + head_dim // 2
    weight = torch.zeros(heads * head_dim, heads * head_dim, dtype=log_decay.dtype)
    weight[real, real] = weight[imaginary, imaginary] = held.real
    weight[real, imaginary], weight[imaginary, real] = -held.imag, held.imag
    return weight


def initial_a_log(heads: int, low: float) -> nn.Parameter:
    """Return log U(low, 16) per head, not below log 1e-6."""
    return nn.Parameter(torch.empty(heads).uniform_(low, 16).clamp_min(1e-6).log())


def initial_dt_bias(size: int) -> nn.Parameter:
    """Return the inverse softplus of [size] time steps dt = exp U(log 0.001, log 0.1)."""
    dt = torch.empty(size).uniform_(log(1e-3), log(1e-1)).exp()
    return nn.Parameter(dt + (-torch.expm1(-dt)).log())
