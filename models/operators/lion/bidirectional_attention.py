"""Bidirectional linear attention, as in LION (arXiv 2502.16249): Y = scale(Q K^T * M) V with M_ij = exp(-|c_i - c_j|).

c is the running sum of the log decay. Three exact forms: "parallel" (the formula, quadratic in length), "recurrent"
(two directions, constant state) and "chunked" (linear in length). With v~ = [v, 1] and b, B a chunk's running sum and
total of the log decay (Eq. 16-17, 61-64, 83-91 of the paper, written without 1/2 terms):

    recurrent   S_i = e^(g_i) S_(i-1) + k_i v~_i     R_i = e^(g_(i+1)) (R_(i+1) + k_(i+1) v~_(i+1))     o_i = q_i (S_i + R_i)
    chunked     F_(n+1) = e^B F_n + sum_j e^(B - b_j) k_j v~_j        G_(n-1) = e^B G_n + sum_j e^(b_j) k_j v~_j
                o_i = e^(b_i) q_i F_n + e^(B - b_i) q_i G_n + sum_(j in chunk) e^(-|b_i - b_j|) (q_i . k_j) v~_j

No exponent is positive and the diagonal is counted once. With a per-channel decay
o_i = sum_j (sum_c q_ic k_jc e^(-|c_ic - c_jc|)) v_j, the bidirectional form of MetaLA and GLA. It has a fourth form, "scans":
two scans of gated linear attention (`scans.py`), on its kernels on CUDA. With one mask per channel of values, as in appendix C.7,
o_ic = sum_j (q_i . k_j) e^(-|c_ic - c_jc|) v_jc, and each channel has a normalizer. "triton_value_channel" is its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import SIXTEEN_BITS, available, on_cuda
from ...precision import NORMALIZER_EPS, to_accumulation_dtype, without_autocast
from ..context_parallel import ContextParallelGroup, context_parallel_group, from_previous_rank, shard_segments
from ..gla.normalized import float16_scale
from ..varlen import check_cu_seqlens, without_padding
from .check import LARGEST_HEAD, LARGEST_PER_VALUE_CHANNEL, check_projection, check_shapes
from .chunk import Segments, chunk_size, chunked, decays, heads_first, recurrent, with_ones_column
from .context_parallel import from_other_ranks
from .feature_map import NORMALIZED, feature_map
from .scans import two_scans

# Largest head -> length up to which the tile kernel is the faster one in 16 bits, for any decays (docs/results/kernels.md).
# For longer sequences the decays decide which one is faster.
_TILE_LENGTHS = {64: 192, 128: 256}
# The same for LION-s, whose backward pass is one kernel (`kernels.lion.single_tile.middle_length`).
_LION_S_TILE_LENGTHS = {128: 256}


class ProjectedDecayLogits(NamedTuple):
    """Hold decay logits that are a projection of the layer's input, x weight^T + bias, as in LION-s.

    x: [batch, length, size], weight: [heads, size], bias: [heads] or None. The kernels compute the projection and its
    gradients in their autograd node.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def logits(self) -> Tensor:
        """Return the logits [batch, length, heads] in float32 (float64 for float64)."""
        logits = to_accumulation_dtype(F.linear(self.x, self.weight))
        return logits if self.bias is None else logits + to_accumulation_dtype(self.bias)


def bidirectional_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_logits: Tensor | ProjectedDecayLogits | None = None,
    phi: str | None = None,
    normalized: bool = True,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask_convention: str = "eq17",
    form: str = "auto",
    per_value_channel: bool = False,
) -> Tensor:
    """Return (Q K^T * M) V, with each row divided by its normalizer when `normalized`.

    q, k: [batch, length, heads, head_dim_k]; v: [batch, length, heads, head_dim_v].
    log_decay: [batch, length, heads] (or a last dimension of 1) for a per-head decay, [..., head_dim_k] for a per-channel
    decay; None for no decay. -inf at a token cuts both directions there.
    per_value_channel: the per-channel decay is [..., head_dim_v], one mask per channel of values.
    decay_logits: an alternative to log_decay = logsigmoid(decay_logits). [batch, length, heads], [heads] for every token,
    or `ProjectedDecayLogits`.
    phi: a name of `models.operators.lion.feature_map`, applied to q and k first and rounded to v's dtype; None for none.
    normalized: y = numerator / (row sum + 1e-6). It needs positive q and k, which the feature maps return.
    mask: [batch, length] bool, True for real tokens. Padding never changes real tokens, and its own output is 0.
    cu_seqlens: [segments + 1], batch 1: no segment sees another; empty segments are legal.
    mask_convention: "eq17", symmetric; "shifted" delays the decay of the forward direction by one token.
    form: see `models.operators.lion.check.FORMS`. "parallel", "recurrent", "chunked" are plain PyTorch, computed in float32
    (float64 for float64 inputs). "scans" is for per-channel decays, "triton_tile" and "triton_chunk" are kernels for short
    and long sequences with a per-head decay, "triton_value_channel" is the kernel for per_value_channel without packed
    segments. "auto": the fastest one (`_select_form`).
    Returns [batch, length, heads, head_dim_v] in v's dtype. Raises ValueError for arguments that do not fit together.

    Under `models.operators.context_parallel.context_parallel` the arguments are the local shard of the sequence, but cu_seqlens
    is that of the whole.
    """
    per_value_channel = per_value_channel and log_decay is not None
    x = _Arguments(
        q, k, v, log_decay, decay_logits, phi, normalized, mask, cu_seqlens, mask_convention, form, per_value_channel
    )
    group = context_parallel_group()
    if group is None:
        return _local(x)
    if per_value_channel and normalized:
        _check(replace(x, cu_seqlens=None))
        return _normalizers_as_values(x, partial(_over_ranks, group))
    return _over_ranks(group, x)


@dataclass(frozen=True)
class _Arguments:
    """Hold the arguments of `bidirectional_linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    decay_logits: Tensor | ProjectedDecayLogits | None
    phi: str | None
    normalized: bool
    mask: Tensor | None
    cu_seqlens: Tensor | None
    mask_convention: str
    form: str
    per_value_channel: bool
    rounded: bool = True

    def to_output_dtype(self, o: Tensor) -> Tensor:
        """Return o in v's dtype if `rounded`, else in the dtype in which sums accumulate."""
        return o.to(self.v.dtype) if self.rounded else to_accumulation_dtype(o)

    @property
    def lion_s(self) -> bool:
        """Return whether these are LION-s' decays and normalized outputs, without packed segments."""
        logits = self.decay_logits
        projected = isinstance(logits, ProjectedDecayLogits) and logits.bias is not None
        return projected and self.normalized and self.cu_seqlens is None

    @property
    def per_channel(self) -> bool:
        """Return whether there is one decay per channel and token."""
        return self.log_decay is not None and self.log_decay.ndim == 4 and self.log_decay.shape[-1] > 1

    def with_features(self) -> _Arguments:
        """Return the arguments with the feature map applied to q and k."""
        if self.phi is None:
            return self
        q, k = (feature_map(x, self.phi, self.v.dtype) for x in (self.q, self.k))
        return replace(self, q=q, k=k, phi=None)

    def token_logits(self) -> Tensor | None:
        """Return decay logits of every token, [batch, length, heads] (or a last dimension of 1)."""
        logits = self.decay_logits
        if isinstance(logits, ProjectedDecayLogits):
            return logits.logits()
        if logits is None or logits.ndim > 1:
            return logits
        return to_accumulation_dtype(logits).expand(self.q.shape[:3])

    def decays(self, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Segments]:
        """Return `models.operators.lion.chunk.decays` of these tokens."""
        return decays(self.q, self.log_decay, self.token_logits(), self.mask, cu_seqlens, self.mask_convention)


def _normalizers_as_values(x: _Arguments, compute: Callable[[_Arguments], Tensor]) -> Tensor:
    """Compute normalizers per channel of values as more channels of values, which are 1."""
    assert x.log_decay is not None
    # Sums over a long sequence may exceed float16, so they are scaled.
    scale = float16_scale(x.v.dtype, 1)
    values = torch.cat([x.v if scale == 1 else x.v * scale, torch.full_like(x.v, scale)], -1)
    decays = torch.cat([x.log_decay, x.log_decay], -1)
    o = compute(replace(x, v=values, log_decay=decays, normalized=False, rounded=False))
    num, den = o.chunk(2, -1)
    return (num / (den + NORMALIZER_EPS * scale)).to(x.v.dtype)


def _local(x: _Arguments) -> Tensor:
    """Compute `bidirectional_linear_attention` of these tokens alone, also if they are a local shard."""
    _check(x)
    form = _select_form(x)
    if form in ("triton_tile", "triton_chunk"):
        return _on_kernels(x, form.removeprefix("triton_"))
    x = x.with_features()
    if form == "triton_value_channel":
        return _on_value_channel_kernels(x)
    if x.per_value_channel and x.normalized:
        return _normalizers_as_values(replace(x, form=form), _local)
    if form == "scans":
        return _scans(x)
    forward, backward, segments = x.decays(x.cu_seqlens)
    q, k, v = heads_first(x.q), heads_first(x.k), with_ones_column(x.v, x.normalized)
    if x.mask is not None:
        q, k = (y.masked_fill(~x.mask[:, None, :, None], 0.0) for y in (q, k))
    with without_autocast(q):
        if form == "recurrent":
            o = recurrent(q, k, v, forward, backward, segments, x.per_value_channel)
        else:
            length = q.shape[2]
            size = length if form == "parallel" else chunk_size(length, forward)
            o = chunked(q, k, v, forward, backward, segments, max(size, 1), x.per_value_channel)
    if x.normalized:
        o = o[..., :-1] / (o[..., -1:] + NORMALIZER_EPS)
    return x.to_output_dtype(o.transpose(1, 2))


def _select_form(x: _Arguments) -> str:
    """Return the form that runs. This is the only place that decides."""
    if not x.q.numel():
        return "chunked"
    if x.form != "auto":
        return x.form
    if x.mask_convention != "eq17":
        return "chunked"
    dim_k, dim_v, dtype = x.q.shape[-1], x.v.shape[-1], x.v.dtype
    if x.per_value_channel and x.cu_seqlens is None and dtype in SIXTEEN_BITS and available(x.v):
        largest_k, largest_v = LARGEST_PER_VALUE_CHANNEL
        if dim_k <= largest_k and dim_v <= largest_v:
            return "triton_value_channel"
    if x.per_value_channel or x.per_channel:
        return "scans"
    largest = max(dim_k, dim_v)
    if not available(x.v) or largest > LARGEST_HEAD:
        return "chunked"
    limits = _LION_S_TILE_LENGTHS if x.lion_s else _TILE_LENGTHS
    longest = next((tokens for channels, tokens in limits.items() if largest <= channels), 0)
    return "triton_tile" if x.q.shape[1] <= longest and dtype != torch.float32 else "triton_chunk"


def _on_value_channel_kernels(x: _Arguments) -> Tensor:
    from ...kernels.lion.value_channel import lion_per_value_channel

    assert x.log_decay is not None
    log_decay, k, q = without_padding(x.mask, x.log_decay.float(), x.k, x.q)
    o = lion_per_value_channel(q.to(x.v.dtype), k.to(x.v.dtype), x.v, log_decay, x.normalized)
    return x.to_output_dtype(o)


def _scans(x: _Arguments) -> Tensor:
    """Compute the operator by two scans. Normalizers are a channel of values that are 1."""
    assert x.log_decay is not None
    v, dim = x.v, x.v.shape[-1]
    log_decay, k, q = without_padding(x.mask, to_accumulation_dtype(x.log_decay), x.k, x.q)
    scale = 1.0
    if x.normalized:
        # The kernels are fastest with rows of 16 bytes. Sums over a long sequence may exceed float16, so they are scaled.
        v = F.pad(F.pad(v, (0, 1), value=1.0), (0, -(dim + 1) % 8 if on_cuda(v) else 0))
        scale = float16_scale(v.dtype, 1)
    o = two_scans(
        q.to(v.dtype),
        k.to(v.dtype) if x.per_value_channel else k,
        v,
        log_decay,
        scale,
        x.cu_seqlens,
        x.per_value_channel,
    )
    if x.normalized:
        num, den = to_accumulation_dtype(o[..., :dim]), to_accumulation_dtype(o[..., dim : dim + 1])
        o = num / (den + NORMALIZER_EPS * scale)
    return x.to_output_dtype(o)


def _on_kernels(x: _Arguments, kernel: str) -> Tensor:
    from ...kernels.lion.lion import lion

    if x.phi not in (None, *NORMALIZED):
        x = x.with_features()
    options: dict[str, Any] = {
        "phi": x.phi, "normalized": x.normalized, "mask": x.mask, "cu_seqlens": x.cu_seqlens, "kernel": kernel
    }  # fmt: skip
    logits = x.decay_logits
    if isinstance(logits, ProjectedDecayLogits):
        # The kernels' autograd node computes the projection in one dtype. Autocast and mixed dtypes need PyTorch.
        if logits.x.dtype == logits.weight.dtype and not torch.is_autocast_enabled():
            return lion(x.q, x.k, x.v, projection=(logits.x, logits.weight), bias=logits.bias, **options)
        logits = logits.logits()
    if logits is None:
        return lion(x.q, x.k, x.v, x.log_decay, **options)
    if logits.ndim == 1:
        return lion(x.q, x.k, x.v, bias=logits, logits=True, **options)
    return lion(x.q, x.k, x.v, logits, logits=True, **options)


def _over_ranks(group: ContextParallelGroup, x: _Arguments) -> Tensor:
    """Add numerators and normalizers of the local shard, by any form, and of the other ranks; then divide."""
    x = x.with_features()
    x = replace(x, decay_logits=x.token_logits())
    q, k, v = x.q, x.k, x.v
    segments = None if x.cu_seqlens is None else shard_segments(x.cu_seqlens, q.shape[1], group)
    # Sums over a long shard, and their gradients, may exceed float16.
    dtype = torch.float32 if x.normalized and v.dtype == torch.float16 else v.dtype
    shard = replace(
        x, q=q.to(dtype), k=k.to(dtype), normalized=False, cu_seqlens=None if segments is None else segments.cu_seqlens
    )
    # On CUDA the normalizers are computed apart, because kernels need head sizes that are powers of two.
    parts = [v, torch.ones_like(v[..., :1])] if x.normalized else [v]
    if x.normalized and not on_cuda(q):
        parts = [torch.cat(parts, -1)]
    o = torch.cat([to_accumulation_dtype(_local(replace(shard, v=part.to(dtype)))) for part in parts], -1)
    forward, backward = (y.transpose(1, 2) for y in x.decays(None)[:2])
    if x.mask_convention == "shifted":
        previous = from_previous_rank(group, backward[:, -1:])
        forward = torch.cat([previous, backward[:, :-1]], 1)
    if x.mask is not None:
        q, k = (y.masked_fill(~x.mask[:, :, None, None], 0.0) for y in (q, k))
    # Rows of 16 bytes for the matmuls.
    values = F.pad(F.pad(v, (0, 1), value=1.0), (0, 7 if on_cuda(v) else 0)) if x.normalized else v
    others = from_other_ranks(group, q, k, values, forward, backward, segments, x.per_value_channel)
    o = o + others[..., : o.shape[-1]]
    if x.normalized:
        o = o[..., :-1] / (o[..., -1:] + NORMALIZER_EPS)
    return x.to_output_dtype(o)


def _check(x: _Arguments) -> None:
    q, logits_shape = x.q.shape, None
    if isinstance(x.decay_logits, ProjectedDecayLogits):
        logits = x.decay_logits
        check_projection(q, logits.x.shape, logits.weight.shape, None if logits.bias is None else logits.bias.shape)
    elif x.decay_logits is not None:
        logits_shape = x.decay_logits.shape
    if x.log_decay is not None and x.decay_logits is not None:
        raise ValueError("log_decay and decay_logits are both given; give one: log_decay = logsigmoid(decay_logits)")
    check_shapes(
        q, x.k.shape, x.v.shape, None if x.log_decay is None else x.log_decay.shape, logits_shape,
        None if x.mask is None else x.mask.shape, x.cu_seqlens is not None, x.mask_convention, x.form, x.v.dtype,
        x.per_value_channel,
    )  # fmt: skip
    if x.cu_seqlens is not None:
        check_cu_seqlens(x.cu_seqlens, q[1])
