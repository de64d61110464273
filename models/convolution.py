"""Depthwise causal convolution along the sequence."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConvolution(nn.Module):
    """y_t = sum_j weight[:, j] x_{t - kernel + 1 + j}, a channel at a time, no bias; before the sequence x is zero.

    weight: [channels, kernel], U(-1/sqrt(kernel), 1/sqrt(kernel)) as torch.nn.Conv1d with groups = channels.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        nn.init.uniform_(self.weight, -(kernel**-0.5), kernel**-0.5)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        history: Tensor | None = None,
        return_history: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """x: [batch, length, channels] -> the same shape, and the last kernel - 1 real inputs when asked for.

        mask: [batch, length] bool, True for real tokens; padding counts as the outside of the sequence.
        cu_seqlens: [segments + 1], batch 1, every segment starts anew. history: [batch or segments, kernel - 1,
        channels], what an earlier call returned.
        """
        if cu_seqlens is not None:
            return self._packed(x, cu_seqlens, history, return_history)
        past = self.weight.shape[1] - 1
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        if history is None:
            padded = F.pad(x, (0, 0, past, 0))
        elif mask is None:
            padded = torch.cat([history.to(x.dtype), x], 1)
        else:
            first = mask.int().argmax(1)
            padded = F.pad(x, (0, 0, past, 0)).scatter(1, _window(first, history), history.to(x.dtype))
        y = self._valid(padded)
        if not return_history:
            return y, None
        if mask is None:
            return y, padded[:, x.shape[1] :]
        end = (mask * torch.arange(1, x.shape[1] + 1, device=x.device)).amax(1)
        return y, padded.gather(1, _window(end, padded[:, :past]))

    def _packed(
        self, x: Tensor, cu_seqlens: Tensor, history: Tensor | None, return_history: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Every segment is laid out behind kernel - 1 places that hold its history."""
        past = self.weight.shape[1] - 1
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        segments = len(starts)
        segment = torch.arange(segments, device=x.device)
        length = x.shape[1]
        token = torch.arange(length, device=x.device)
        token = token + past * (1 + torch.repeat_interleave(segment, ends - starts, output_size=length))
        padded = x.new_zeros(length + segments * past, x.shape[2]).index_copy(0, token, x[0])
        window = torch.arange(past, device=x.device) + (segment * past)[:, None]
        if history is not None:
            padded = padded.index_copy(0, (window + starts[:, None]).flatten(), history.to(x.dtype).flatten(0, 1))
        y = self._valid(padded[None]).index_select(1, token - past)
        return y, padded[window + ends[:, None]] if return_history else None

    def _valid(self, padded: Tensor) -> Tensor:
        channels, _ = self.weight.shape
        return F.conv1d(padded.transpose(1, 2), self.weight.unsqueeze(1), groups=channels).transpose(1, 2)


def _window(start: Tensor, like: Tensor) -> Tensor:
    """Indices start_b, start_b + 1, ... in the shape of `like` [batch, places, channels]."""
    places = start[:, None] + torch.arange(like.shape[1], device=start.device)
    return places.unsqueeze(-1).expand(like.shape)
