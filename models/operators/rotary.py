"""Rotary positions (arXiv 2104.09864) in the half-split layout of GPT-NeoX, and their extension by YaRN (arXiv 2309.00071)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, floor, inf, log, pi
from typing import Any

import torch
from torch import Tensor

from ..backend import is_supported
from ..options import require_positive


@dataclass(frozen=True)
class Yarn:
    """Hold the settings of YaRN, section 3.4: the context grows from `original_length` tokens by `factor`.

    beta_fast, beta_slow: rotations within `original_length`. Faster channels keep their frequency, slower ones are divided by
    the factor. attention_factor: multiplies cos and sin, sqrt(1 / t) of the paper; None for 0.1 ln(factor) + 1.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @property
    def scale(self) -> float:
        """Return the factor of cos and sin."""
        return 0.1 * log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def frequencies(self, frequency: Tensor, base: float) -> Tensor:
        """Return the extended frequencies, [dim / 2] as the original ones, which fall from 1 to about 1 / base.

        The ramp is linear in the channel between the rounded bounds, as in the models that were released with YaRN.
        """
        dim = 2 * len(frequency)
        fast, slow = (
            dim * log(self.original_length / (2 * pi * rotations)) / (2 * log(base))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        low, high = max(floor(fast), 0), min(ceil(slow), dim - 1)
        channel = torch.arange(len(frequency), dtype=frequency.dtype, device=frequency.device)
        ramp = ((channel - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequency * (1 - ramp) + frequency / self.factor * ramp


def check_yarn(options: Any) -> None:
    """Raise ValueError for wrong settings of YaRN among the options of the attention mixer."""
    prefix = "model.mixer_options.attention."
    factor = options.yarn_factor
    require_positive("attention", options, "yarn_beta_fast", "yarn_beta_slow")
    if not options.yarn_beta_fast > options.yarn_beta_slow:
        raise ValueError(
            f"{prefix}yarn_beta_fast = {options.yarn_beta_fast}: must be greater than yarn_beta_slow = {options.yarn_beta_slow}"
        )
    if options.yarn_attention_factor is not None:
        require_positive("attention", options, "yarn_attention_factor")
    if factor is None:
        for key in fields(options):
            value = getattr(options, key.name)
            if key.name.startswith("yarn_") and value != key.default:
                raise ValueError(f"{prefix}{key.name} = {value} needs yarn_factor: set it, or remove {key.name}")
    elif not 1 <= factor < inf:
        raise ValueError(
            f"{prefix}yarn_factor = {factor}: must be at least 1 and finite; set the new length divided by "
            "yarn_original_length, or null for no YaRN"
        )
    elif options.yarn_original_length is None:
        raise ValueError(
            f"{prefix}yarn_factor = {factor} needs yarn_original_length: set it to the length, in tokens, that the model was "
            "trained with before"
        )
    elif options.rotary_pct == 0:
        raise ValueError(
            f"{prefix}yarn_factor = {factor} scales rotary positions, and rotary_pct = 0: set rotary_pct above 0, or remove "
            "yarn_factor"
        )


def check_pairs(rotary_pct: float, head_dim: int) -> None:
    """Raise ValueError for a fraction above 0 of a head's channels that has no pair of channels to rotate."""
    if 0 < rotary_pct * head_dim < 2:
        fractions = f"at least 2 / {head_dim}, or " if head_dim > 1 else ""
        raise ValueError(
            f"model.mixer_options.attention.rotary_pct = {rotary_pct} rotates no pair of the {head_dim} channels of a head: "
            f"allowed is {fractions}0 for no rotary positions"
        )


def rotary(
    position: Tensor, dim: int, base: float, dtype: torch.dtype, yarn: Yarn | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [batch, length, 1, dim / 2] in `dtype`, for position [batch, length]. With YaRN they are scaled.

    dtype: float32 or float64. The angles are computed in it too; 16 bits cannot count the positions.
    """
    frequency = base ** (-torch.arange(0, dim, 2, dtype=dtype, device=position.device) / dim)
    if yarn is not None:
        frequency = yarn.frequencies(frequency, base)
    angle = position.clamp_min(0)[:, :, None, None].to(dtype) * frequency
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if yarn is None else (cos * yarn.scale, sin * yarn.scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of every head of x [batch, length, heads, head_dim], in pairs (c, c + dim / 2).

    cos, sin: [batch or 1, length, heads or 1, pairs]. Computed in their dtype, returned in x's dtype. On CUDA one kernel does it.
    """
    if is_supported(x):
        from ..kernels.rotary import rotate as kernel

        return kernel(x, cos, sin)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(t.to(x.dtype) for t in rotated), rest], -1)
