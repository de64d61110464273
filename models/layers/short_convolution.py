"""Depthwise causal convolution along the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..backend import cpu_kernel, is_supported
from ..operators.context_parallel import (
    ContextParallelGroup,
    context_parallel_group,
    from_previous_rank,
    refuse_state,
    shard_segments,
)
from ..operators.varlen import check_packed, real_bounds
from ..precision import to_accumulation_dtype
from ..recompute import recomputable

# Elements of a tile on a CPU: 2^17 float32 are 512 KiB, and about four such tensors live at a time.
_TILE_ELEMENTS = 1 << 17
# Longest kernel that the Triton kernels support.
_LONGEST = 4


class CausalConvolution(nn.Module):
    """Compute y_t = f(sum_j weight[:, j] x_{t - kernel + 1 + j}) per channel; before the sequence x is zero.

    weight: [channels, kernel], U(-1/sqrt(kernel), 1/sqrt(kernel)) as torch.nn.Conv1d with groups = channels; no bias.
    f is SiLU or the identity. The mixer's tensor-parallel plan has the sharding spec of the weight.
    """

    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, channels: int, kernel: int, *, silu: bool) -> None:
        super().__init__()
        self.silu = silu
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
        """Convolve x [batch, length, channels]. Return the same shape, and with return_history the last kernel - 1 real inputs.

        mask: [batch, length] bool, True for real tokens; padding counts as the outside of the sequence.
        cu_seqlens: [segments + 1], batch 1, each segment starts from zero. history: [batch or segments, kernel - 1,
        channels], the second result of an earlier call. Under context parallelism x is the local shard of the sequence, at least
        kernel - 1 tokens, but cu_seqlens is that of the whole, and there is no history.
        Raises ValueError for cu_seqlens that do not cover x, a history of another shape or under context parallelism, and a
        local shard that is too short.
        """
        group = context_parallel_group()
        if group is not None:
            if history is not None or return_history:
                refuse_state()
            return self._over_ranks(group, x, mask, cu_seqlens), None
        if cu_seqlens is not None:
            check_packed(x, cu_seqlens)
        past = self.weight.shape[1] - 1
        expected = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, past, x.shape[2]
        if history is not None and tuple(history.shape) != expected:
            raise ValueError(
                f"history {list(history.shape)}: expected [batch or segments, kernel - 1, channels] = {list(expected)}; give the "
                "history that an earlier call for the same sequences returned"
            )
        if cu_seqlens is not None:
            return self._packed(x, mask, cu_seqlens, history, return_history)
        if x.shape[1] == 0:
            mask = None  # without tokens there is no first and no last one
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        previous = None if history is None else history.to(x.dtype)
        if mask is not None and previous is not None:
            # The history belongs directly before the first real token.
            padded = F.pad(x, (0, 0, past, 0)).scatter(1, _window(mask.int().argmax(1), previous), previous)
            previous, x = padded[:, :past], padded[:, past:]
        y = _convolve(previous, x, self.weight, self.silu)
        if not return_history:
            return y, None
        padded = _behind(previous, x, past)
        if mask is None:
            return y, padded[:, x.shape[1] :]
        end = (mask * torch.arange(1, x.shape[1] + 1, device=x.device)).amax(1)
        return y, padded.gather(1, _window(end, padded[:, :past]))

    def _over_ranks(
        self, group: ContextParallelGroup, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Convolve the local shard behind the last kernel - 1 inputs of the previous rank."""
        past = self.weight.shape[1] - 1
        if x.shape[1] < past:
            raise ValueError(
                f"a local shard of {x.shape[1]} tokens is shorter than the {past} tokens before it that the convolution "
                "reads: use fewer context-parallel ranks"
            )
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        previous = from_previous_rank(group, x[:, x.shape[1] - past :]) if past else x[:, :0]
        if cu_seqlens is None:
            return _convolve(previous, x, self.weight, self.silu)
        segments = shard_segments(cu_seqlens, x.shape[1], group)
        # Only tokens of the segment in which the shard begins.
        same_segment = torch.arange(past, 0, -1, device=x.device) <= segments.age
        history = x.new_zeros(len(cu_seqlens) - 1, past, x.shape[2])
        history = history.index_copy(0, segments.first, previous * same_segment[None, :, None])
        return self._packed(x, None, segments.cu_seqlens, history, False)[0]

    def _packed(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor, history: Tensor | None, return_history: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve packed segments, each laid out behind kernel - 1 places that hold its history."""
        past = self.weight.shape[1] - 1
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        segments = len(starts)
        segment = torch.arange(segments, device=x.device)
        length = x.shape[1]
        token = torch.arange(length, device=x.device)
        token = token + past * (1 + torch.repeat_interleave(segment, ends - starts, output_size=length))
        padded = x.new_zeros(length + segments * past, x.shape[2]).index_copy(0, token, x[0])
        window = torch.arange(past, device=x.device) + (segment * past)[:, None]
        if mask is not None:
            # Histories belong directly before the first real token and end with the last.
            starts, ends = real_bounds(mask, cu_seqlens)
        if history is not None:
            padded = padded.index_copy(0, (window + starts[:, None]).flatten(), history.to(x.dtype).flatten(0, 1))
        y = _convolve(padded[None, :past], padded[None, past:], self.weight, self.silu).index_select(1, token - past)
        return y, padded[window + ends[:, None]] if return_history else None


def convolve_input(
    conv: CausalConvolution | None,
    x: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Mapping[str, Tensor],
    return_state: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Convolve a mixer's input, if it has a convolution; also return the entry "conv" of its new state with return_state."""
    if conv is None:
        return x, {}
    x, history = conv(x, mask, cu_seqlens, state.get("conv"), return_state)
    return x, {} if history is None else {"conv": history}


def _window(start: Tensor, like: Tensor) -> Tensor:
    """Return the indices start_b, start_b + 1, ... in the shape of `like` [batch, places, channels]."""
    places = start[:, None] + torch.arange(like.shape[1], device=start.device)
    return places.unsqueeze(-1).expand(like.shape)


def _behind(previous: Tensor | None, x: Tensor, past: int) -> Tensor:
    """Return x behind the inputs before it (None: zeros), [batch, past + length, channels]."""
    return F.pad(x, (0, 0, past, 0)) if previous is None else torch.cat([previous, x], 1)


def _convolve(previous: Tensor | None, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """Convolve x [batch, length, channels] behind `previous` [batch, kernel - 1, channels], None for zeros.

    This is the only place that decides which kernel runs.
    """
    if is_supported(x) and weight.shape[1] <= _LONGEST:
        from ..kernels.causal_conv1d import causal_convolution as form
    elif (native := cpu_kernel("causal_conv1d")) is not None and native.supports_convolution(x, weight):
        form = native.causal_convolution
    elif x.device.type == "cpu" and not torch.compiler.is_compiling():
        form = _in_tiles
    else:
        form = _by_torch
    y = form(previous, x, weight, silu)
    recomputable(y, form, previous, x, weight, silu)
    return y


def _by_torch(previous: Tensor | None, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    padded = _behind(previous, x, weight.shape[1] - 1).transpose(1, 2)
    y = F.conv1d(padded, weight.unsqueeze(1), groups=weight.shape[0]).transpose(1, 2)
    return F.silu(y) if silu else y


def _in_tiles(previous: Tensor | None, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    past = weight.shape[1] - 1
    return _Convolve.apply(x.new_zeros(x.shape[0], past, x.shape[2]) if previous is None else previous, x, weight, silu)


class _Convolve(torch.autograd.Function):
    """Convolve on a CPU, where torch's depthwise convolution is slow and needs the channels first.

    It works on tiles of tokens that stay in the cache: several short rows, or a part of a long one. It computes in float32
    (float64 for float64). The backward pass recomputes the sum before the activation.
    """

    @staticmethod
    def forward(ctx: Any, previous: Tensor, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(previous, x, weight)
        ctx.silu = silu
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        taps = to_accumulation_dtype(weight).t().contiguous()
        for rows, tile in _tiles_of(x, taps):
            total = _weighted(_window_of(previous, x, rows, tile, taps), taps)
            y[rows, tile] = F.silu(total, inplace=True) if silu else total
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        previous, x, weight = ctx.saved_tensors
        # Without tokens no tile writes it.
        d_previous = torch.empty_like(previous) if x.shape[1] else torch.zeros_like(previous)
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        taps = to_accumulation_dtype(weight).t().contiguous()
        d_taps = torch.zeros_like(taps)
        past = len(taps) - 1
        carry = None
        for rows, tile in reversed(list(_tiles_of(x, taps))):
            window = _window_of(previous, x, rows, tile, taps)
            size = window.shape[1] - past
            d_total = to_accumulation_dtype(d_y[rows, tile])
            if ctx.silu:
                d_total = torch.ops.aten.silu_backward(d_total, _weighted(window, taps))
            d_window = torch.zeros_like(window)
            if carry is not None:
                # The gradient that the next tile gave to the tokens before it.
                d_window[:, size:] = carry
            for j, tap in enumerate(taps):
                d_window[:, j : j + size].addcmul_(d_total, tap)
                d_taps[j] += (d_total * window[:, j : j + size]).sum((0, 1))
            d_x[rows, tile] = d_window[:, past:]
            carry = d_window[:, :past]
            if tile.start == 0:
                d_previous[rows] = carry
                carry = None
        return d_previous, d_x, d_taps.t().to(weight.dtype), None


def _tiles_of(x: Tensor, taps: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield tiles of the batch's rows. Only the last tile of a row may be shorter than the convolution's past."""
    batch, length, channels = x.shape
    step = max(len(taps), _TILE_ELEMENTS // channels)
    together = max(1, step // max(1, length))
    for row in range(0, batch, together):
        for start in range(0, length, step):
            yield slice(row, min(row + together, batch)), slice(start, min(start + step, length))


def _window_of(previous: Tensor, x: Tensor, rows: slice, tile: slice, taps: Tensor) -> Tensor:
    """Return the inputs that the tile's outputs read, [rows, past + tile, channels], in the dtype of taps."""
    past = len(taps) - 1
    window = torch.empty(rows.stop - rows.start, past + tile.stop - tile.start, x.shape[2], dtype=taps.dtype)
    window[:, :past] = x[rows, tile.start - past : tile.start] if tile.start else previous[rows]
    window[:, past:] = x[rows, tile]
    return window


def _weighted(window: Tensor, taps: Tensor) -> Tensor:
    size = window.shape[1] - len(taps) + 1
    total = window[:, :size] * taps[0]
    for j in range(1, len(taps)):
        total.addcmul_(window[:, j : j + size], taps[j])
    return total
