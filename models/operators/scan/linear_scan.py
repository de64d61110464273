"""The elementwise recurrence h_t = exp(log_decay_t) h_{t-1} + x_t, with one real or complex number per channel as state.

It is the operator of the models whose state is a vector (Mamba, RWKV-4, RG-LRU, HGRN, qLSTM, S5). It has three forms:

recurrent  token by token.
chunked    linear in length. All chunks are scanned in parallel from a zero state, together with their total decays. Then the
           true states go from chunk to chunk. Decays are only multiplied, so the form is exact for every decay, also -inf.
kernel     flash-linear-attention's kernels on CUDA.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...backend import missing_fla_error, on_cuda, replaceable
from ..context_parallel import causal_over_ranks, context_parallel_group
from ..cumulative_decay import decay_from_start
from ..varlen import check_sequences, last, segment_starts

Form = Literal["auto", "recurrent", "chunked", "kernel"]

# Up to this length the token-by-token kernel is faster, forward and backward, than the two kernels by chunks of 128.
_RECURRENT_LENGTH = 256


def scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return h_t = exp(log_decay_t) h_{t-1} + x_t, per channel.

    x, log_decay: [batch, length, channels], real or complex; the real part of log_decay at most 0, -inf allowed.
    initial_state: [batch, channels], zero if None. cu_seqlens: [segments + 1] int with batch 1; every segment has its own
    state; empty segments are legal; states are then [segments, channels].

    Returns h in x's shape and the state after the last token, both in float32 or complex64 (float64 or complex128
    for such inputs). `auto` is one step of the recurrence for one token, flash-linear-attention's kernel (`kernel`) on
    CUDA where compute_dtype (x.dtype if None), the dtype of the model's activations, has 16 bits, else chunked.
    Raises ValueError for shapes that do not fit and for a form that does not exist.

    Under `models.operators.context_parallel.context_parallel` the arguments are the local shard of the sequence, but cu_seqlens
    is that of the whole. There is no initial state then. The final states are those of the shard's segments at its end.
    """
    run = partial(local_scan, x, log_decay, form=form, compute_dtype=compute_dtype)
    group = context_parallel_group()
    if group is None:
        return run(initial_state=initial_state, cu_seqlens=cu_seqlens)
    decay = decay_from_start(log_decay, 1).to(_state_dtype(x, log_decay))

    def local(cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return run(cu_seqlens=cu_seqlens)

    def total_decay(tokens: Tensor | None) -> Tensor:
        if tokens is None:
            return decay[:, -1]
        return decay_from_start(log_decay.masked_fill(~tokens[None, :, None], 0.0), 1)[:, -1].to(decay.dtype)

    def correction(state: Tensor, tokens: Tensor | None) -> Tensor:
        seen = decay if tokens is None else decay.masked_fill(~tokens[None, :, None], 0.0)
        return seen * state.unsqueeze(1)

    return causal_over_ranks(
        group, x.shape[1], cu_seqlens, initial_state, local=local, total_decay=total_decay, correction=correction
    )


def local_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `scan` of these tokens alone, also if they are a local shard."""
    _check(x, log_decay, initial_state, cu_seqlens)
    form = _select_form(form, x, log_decay, cu_seqlens, compute_dtype)
    dtype = _state_dtype(x, log_decay)
    x, log_decay = x.to(dtype), log_decay.to(dtype) if log_decay.is_complex() else log_decay.to(dtype.to_real())
    if x.shape[1]:
        x, log_decay = _fold(x, log_decay, initial_state, cu_seqlens)
        h = {"recurrent": _recurrent, "chunked": _chunked, "kernel": fla_scan}[form](x, log_decay)
    else:
        h = x
    return h, last(h, initial_state, cu_seqlens)


def _select_form(
    form: Form, x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, compute_dtype: torch.dtype | None
) -> Form:
    """Return the form that runs, as documented in `scan`. This is the only place that decides."""
    if form != "auto":
        if form not in ("recurrent", "chunked", "kernel"):
            raise ValueError(f"form = {form!r}: allowed are auto, recurrent, chunked, kernel")
        return form
    # "recurrent" does not read the decay of one token, which would then have no gradient instead of zeros.
    if x.shape[1] == 1 and cu_seqlens is None and not (torch.is_grad_enabled() and log_decay.requires_grad):
        return "recurrent"
    sixteen_bits = (compute_dtype or x.dtype) in (torch.bfloat16, torch.float16)
    real = not (x.is_complex() or log_decay.is_complex())
    return "kernel" if on_cuda(x) and sixteen_bits and real else "chunked"


def _state_dtype(x: Tensor, log_decay: Tensor) -> torch.dtype:
    """Return the dtype of the states: float32 or complex64, float64 or complex128."""
    return torch.promote_types(torch.promote_types(x.dtype, log_decay.dtype), torch.float32)


def _fold(
    x: Tensor, log_decay: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the inputs of the same recurrence from a zero state.

    The decayed initial state is added to the first token of a sequence, whose decay becomes 0.
    """
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


@replaceable
def fla_scan(x: Tensor, log_decay: Tensor) -> Tensor:
    """Run flash-linear-attention's kernels from a zero state. x, log_decay: [batch, length, channels] float32 on CUDA.

    Raises ImportError with the command to run where the package is missing.
    """
    try:
        from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
    except ImportError as error:
        raise missing_fla_error() from error
    # The final states of the kernels are unused: the chunked kernel has no gradient for them.
    kernel = fused_recurrent_hgrn if x.shape[1] <= _RECURRENT_LENGTH else chunk_hgrn
    return kernel(x.contiguous(), log_decay.contiguous())[0]


class _Scan(torch.autograd.Function):
    """Compute h_t = decay_t h_{t-1} + x_t from zero. The backward pass is the same recurrence, from last to first token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        h = _solve(x, decay, reverse=False)
        ctx.save_for_backward(h, decay)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor) -> tuple[Tensor, Tensor]:
        h, decay = ctx.saved_tensors
        # The gradient of h_t is d_h_t plus decay_{t+1} times the gradient of h_{t+1}.
        none = torch.zeros_like(decay[:, :1])
        d_x = _solve(d_h, torch.cat([decay[:, 1:], none], 1).conj().resolve_conj(), reverse=True)
        d_decay = torch.zeros_like(d_x)
        torch.mul(d_x[:, 1:], h[:, :-1].conj(), out=d_decay[:, 1:])
        return d_x, d_decay if decay.is_complex() else d_decay.real


def _solve(x: Tensor, decay: Tensor, *, reverse: bool) -> Tensor:
    """Solve h_t = decay_t h_{t-1} + x_t, or reversed in time, from zero. x, decay: [batch, length, channels]."""
    batch, length, channels = x.shape
    # Steps inside a chunk and steps from chunk to chunk are sequential: their numbers are about equal.
    chunk = 1 << ((length - 1).bit_length() + 1) // 2
    count = -(-length // chunk)
    h, product = (t.new_zeros(batch, count * chunk, channels) for t in (x, decay))
    h[:, :length], product[:, :length] = x, decay
    h, product = (t.unflatten(1, (count, chunk)) for t in (h, product))
    inside, chunks = list(range(chunk)), list(range(count))
    if reverse:
        inside.reverse()
        chunks.reverse()
    for previous, current in pairwise(inside):
        h[:, :, current] += product[:, :, current] * h[:, :, previous]
        product[:, :, current] *= product[:, :, previous]
    for previous, current in pairwise(chunks):
        h[:, current] += product[:, current] * h[:, previous, inside[-1]].unsqueeze(1)
    return h.flatten(1, 2)[:, :length]


def _check(x: Tensor, log_decay: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if x.dim() != 3 or log_decay.shape != x.shape:
        raise ValueError(
            f"x {list(x.shape)}, log_decay {list(log_decay.shape)}: expected [batch, length, channels] for both"
        )
    check_sequences(x, cu_seqlens, initial_state, x.shape[2])
