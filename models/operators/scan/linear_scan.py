"""The elementwise recurrence h_t = exp(log_decay_t) h_{t-1} + x_t: one number, real or complex, a channel as state.

The operator of the models whose state is a vector (Mamba, RWKV-4, RG-LRU, HGRN, qLSTM, S5). The recurrent form goes
token by token. The chunked form, linear in length, is the same arithmetic in another order: all chunks advance
together from a zero state, with the product of their decays beside them, and then the true states pass from chunk to
chunk. Only products of decays occur, never a quotient, so it is exact for every decay, -inf included.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..context_parallel import SequenceShards, current_shards, refuse_state
from ..cumulative_decay import decay_from_start
from ..stretches import carried, exchange, packing
from ..varlen import check_packed, last, segment_starts

Form = Literal["auto", "recurrent", "chunked", "kernel"]


def scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t) h_{t-1} + x_t, a channel at a time.

    x, log_decay: [batch, length, channels], real or complex; the real part of log_decay at most 0, -inf allowed.
    initial_state: [batch, channels], zero if None. cu_seqlens: [segments + 1] int with batch 1, every segment starts
    anew; empty ones are legal; states are then [segments, channels].

    Returns h in x's shape and the state after the last token, both in float32 or complex64 (float64 or complex128
    for such inputs). `auto` is one step of the recurrence for one token, flash-linear-attention's kernel (`kernel`) on
    CUDA where compute_dtype (x.dtype if None), the dtype of the model's activations, has 16 bits, else chunked.
    Raises ValueError for shapes that do not fit and for a form that does not exist.

    Inside `models.operators.context_parallel.sequence_shards` the arguments are a stretch of the sequence, but cu_seqlens that of
    the whole. There is no initial state then, and the final states are those of this stretch's segments at its end.
    """
    shards = current_shards()
    if shards is None:
        return local_scan(
            x, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens, form=form, compute_dtype=compute_dtype
        )
    if initial_state is not None:
        refuse_state()
    return _over_shards(shards, x, log_decay, cu_seqlens, form, compute_dtype)


def local_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `scan`, of these tokens alone, also where they are a stretch of a longer sequence."""
    _check(x, log_decay, initial_state, cu_seqlens)
    if form == "auto":
        half = (compute_dtype or x.dtype) in (torch.bfloat16, torch.float16)
        short = x.shape[1] == 1 and cu_seqlens is None
        complex_state = x.is_complex() or log_decay.is_complex()
        form = "recurrent" if short else "kernel" if x.is_cuda and half and not complex_state else "chunked"
    if form not in _FORMS:
        raise ValueError(f"form = {form!r}: allowed are auto, {', '.join(_FORMS)}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, log_decay.dtype), torch.float32)
    x, log_decay = x.to(dtype), log_decay.to(dtype) if log_decay.is_complex() else log_decay.to(dtype.to_real())
    if x.shape[1]:
        x, log_decay = _fold(x, log_decay, initial_state, cu_seqlens)
        h = _FORMS[form](x, log_decay)
    else:
        h = x
    return h, last(h, initial_state, cu_seqlens)


def _over_shards(
    shards: SequenceShards,
    x: Tensor,
    log_decay: Tensor,
    cu_seqlens: Tensor | None,
    form: Form,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The stretch from a zero state, and what the state from the stretches before adds to it."""
    packed = None if cu_seqlens is None else packing(cu_seqlens, x.shape[1], shards)
    inside = None if packed is None else packed.cu_seqlens
    h, _ = local_scan(x, log_decay, cu_seqlens=inside, form=form, compute_dtype=compute_dtype)
    decay = decay_from_start(log_decay, 1).to(h.dtype)
    if packed is not None:
        decay = decay.masked_fill(~packed.from_left[None, :, None], 0.0)
    ends, decays = zip(*exchange(shards, h[:, -1], decay[:, -1]), strict=True)
    h = h + decay * carried(shards.index, ends, decays).unsqueeze(1)
    return h, last(h, None, inside)


def _fold(
    x: Tensor, log_decay: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same recurrence from a zero state: a first token takes up the decayed initial state and forgets the rest."""
    if cu_seqlens is None:
        if initial_state is not None:
            first_token = x[:, :1] + log_decay[:, :1].exp() * initial_state.to(x.dtype).unsqueeze(1)
            x = torch.cat([first_token, x[:, 1:]], 1)
        return x, log_decay
    segment, first = segment_starts(cu_seqlens, x.shape[1])
    first = first.unsqueeze(-1)
    if initial_state is not None:
        x = x + torch.where(first, log_decay.exp() * initial_state.to(x.dtype)[segment], 0.0)
    return x, log_decay.masked_fill(first, -torch.inf)


def _recurrent(x: Tensor, log_decay: Tensor) -> Tensor:
    decay = log_decay.exp()
    states = [x[:, 0]]
    for t in range(1, x.shape[1]):
        states.append(decay[:, t] * states[-1] + x[:, t])
    return torch.stack(states, 1)


def _chunked(x: Tensor, log_decay: Tensor) -> Tensor:
    return _Scan.apply(x, log_decay.exp())


def _kernel(x: Tensor, log_decay: Tensor) -> Tensor:
    from .fla_scan import fla_scan

    return fla_scan(x, log_decay)


_FORMS = {"recurrent": _recurrent, "chunked": _chunked, "kernel": _kernel}


class _Scan(torch.autograd.Function):
    """h_t = decay_t h_{t-1} + x_t from zero. Its backward pass is itself, from the last token to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        h = _solve(x, decay, reverse=False)
        ctx.save_for_backward(h, decay)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor) -> tuple[Tensor, Tensor]:
        h, decay = ctx.saved_tensors
        # What reaches h_t is its own gradient and decay_{t+1} times what reaches h_{t+1}.
        none = torch.zeros_like(decay[:, :1])
        d_x = _solve(d_h, torch.cat([decay[:, 1:], none], 1).conj().resolve_conj(), reverse=True)
        d_decay = torch.zeros_like(d_x)
        torch.mul(d_x[:, 1:], h[:, :-1].conj(), out=d_decay[:, 1:])
        return d_x, d_decay if decay.is_complex() else d_decay.real


def _solve(x: Tensor, decay: Tensor, *, reverse: bool) -> Tensor:
    """h_t = decay_t h_{t-1} + x_t, or h_t = decay_t h_{t+1} + x_t, from zero. x, decay: [batch, length, channels]."""
    batch, length, channels = x.shape
    # Steps within a chunk and steps from chunk to chunk run one after the other: as many of the one as of the other.
    chunk = 1 << max(0, (length - 1).bit_length() + 1) // 2
    count = -(-length // chunk)
    h, product = (t.new_zeros(batch, count * chunk, channels) for t in (x, decay))
    h[:, :length], product[:, :length] = x, decay
    h, product = (t.unflatten(1, (count, chunk)) for t in (h, product))
    inside, chunks = list(range(chunk)), list(range(count))
    if reverse:
        inside.reverse()
        chunks.reverse()
    for before, now in pairwise(inside):
        h[:, :, now] += product[:, :, now] * h[:, :, before]
        product[:, :, now] *= product[:, :, before]
    for before, now in pairwise(chunks):
        h[:, now] += product[:, now] * h[:, before, inside[-1]].unsqueeze(1)
    return h.flatten(1, 2)[:, :length]


def _check(x: Tensor, log_decay: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if x.dim() != 3 or log_decay.shape != x.shape:
        raise ValueError(
            f"x {list(x.shape)}, log_decay {list(log_decay.shape)}: expected [batch, length, channels] for both"
        )
    sequences = x.shape[0]
    if cu_seqlens is not None:
        check_packed(x, cu_seqlens)
        sequences = len(cu_seqlens) - 1
    if initial_state is not None and tuple(initial_state.shape) != (sequences, x.shape[2]):
        raise ValueError(f"initial_state {list(initial_state.shape)}: expected {[sequences, x.shape[2]]}")
