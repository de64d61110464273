"""Angles of complex decays, diagonal forms of HiPPO (S4D-Lin, arXiv 2206.11893), and rotations by them.

A complex decay is alpha e^(1j angle), with 1j for the imaginary unit. From token j to token i the product of these decays is the
product of the alphas times e^(1j angle (i - j)). So a mixer rotates values by -angle j and outputs by angle i, or keys by angle j
and queries by angle i. Between them it computes with the alphas.
"""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from torch import Tensor

from ..precision import to_accumulation_dtype
from .embedding import token_positions
from .initial_decays import time_steps


def hippo_angles(offset: Tensor, head_index: Tensor, heads: int, options: Any) -> Tensor:
    """Return the angle (pi n + offset) dt of channel n of every head, [local heads, channels] in float32 (float64 for float64).

    offset: [local heads * channels], learned, 0 at the start: pi n is the imaginary part of S4D-Lin. head_index: [local
    heads], the heads' numbers in the whole layer of `heads`. options: the mixer's dt_min and dt_max. Between them are the time
    steps dt, as in `hippo_log_decays` with lin.
    """
    offset = to_accumulation_dtype(offset).unflatten(0, (len(head_index), -1))
    channel = torch.arange(offset.shape[1], dtype=offset.dtype, device=offset.device)
    index = head_index.to(offset.device)[:, None] * len(channel) + channel
    step = time_steps(index, heads * len(channel), options.dt_min, options.dt_max)
    return (pi * channel + offset) * step


def rotation(angle: Tensor, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles times the positions of x's tokens, [batch or 1, length, heads, channels].

    angle: [heads, channels]. x: [batch, length, ...], read for its shape. mask, cu_seqlens: as in `token_positions`.
    """
    position, _ = token_positions(x[:1] if mask is None else x, mask, cu_seqlens, None)
    turned = position[:, :, None, None] * angle
    return turned.cos(), turned.sin()
