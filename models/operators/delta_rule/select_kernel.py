"""The arguments of the delta rule: their one common form, a check of their shapes, and which kernel computes them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from torch import Tensor

from ...backend import SIXTEEN_BITS, available
from ...precision import accumulation_dtype
from ..varlen import check_sequences


class Kernel(Enum):
    """Name the kernel of the operator."""

    RECURRENT = "recurrent"  # naive.py, one token after the other
    CHUNKED = "chunked"  # chunked.py, linear in length
    TRITON = "triton"  # models/kernels/delta_rule


# The largest key per head of the Triton kernels.
_LARGEST_KEY = 256


def select_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor,
    write: Tensor | None,
    removal_key: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Kernel:
    """Return the kernel for these arguments of `models.operators.delta_rule.delta_rule.delta_rule`."""
    if q.shape[1] == 1 and cu_seqlens is None:
        return Kernel.RECURRENT
    one_gate = write is None and erase.dim() == 3 and removal_key is None
    sixteen_bits = q.dtype in SIXTEEN_BITS and q.dtype == k.dtype == v.dtype
    # The kernels index a row with 32 bits.
    addressable = min(q.numel(), v.numel()) > 0 and max(q.numel(), v.numel()) < 2**31 * q.shape[0]
    if one_gate and sixteen_bits and q.shape[-1] <= _LARGEST_KEY and addressable and available(q):
        return Kernel.TRITON
    return Kernel.CHUNKED


@dataclass(frozen=True)
class Operands:
    """Hold a step as S' = Diag(exp(log_decay)) S; S_t = S' - removal (read^T R) + k written^T; o_t = q^T S_t.

    R is S', or S for `read_before_decay`. All tensors are [batch, length, heads, dim] in the accumulation dtype, with
    log_decay [..., 1] for one decay per head. q is scaled. If `removal` is `k`, both have one update k (written - read^T R)^T.
    """

    q: Tensor
    k: Tensor
    written: Tensor
    read: Tensor
    removal: Tensor
    log_decay: Tensor
    read_before_decay: bool

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor,
    write: Tensor | None,
    removal_key: Tensor | None,
    scale: float,
) -> Operands:
    """Return the arguments of the operator in the common form. They were checked."""
    write = erase if write is None else write
    dtype = accumulation_dtype(v)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    erase, write = (_trailing(x.to(dtype)) for x in (erase, write))
    decay = q.new_zeros(*q.shape[:3], 1) if log_decay is None else _trailing(log_decay.to(dtype))
    if removal_key is None:
        return Operands(q * scale, k, write * v, erase * k, k, decay, False)
    read = removal_key.to(dtype)
    return Operands(q * scale, k, write * v, read, erase * read, decay, True)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor,
    write: Tensor | None,
    removal_key: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise ValueError for arguments of the operator whose shapes do not agree."""
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)}: expected [batch, length, heads, head_dim] with q and k alike "
            "and v equal to them except for its last axis; repeat q and k for grouped value heads"
        )
    for name, x, like in (("log_decay", log_decay, q), ("erase", erase, q), ("write", write, v)):
        if x is not None and x.shape not in (like.shape, like.shape[:3]):
            raise ValueError(
                f"{name} {_shape(x)}: expected {list(like.shape[:3])}, one per head, or {_shape(like)}, one per channel"
            )
    if write is None and erase.dim() == 4:
        raise ValueError(
            f"write = None with erase {_shape(erase)}: without a write gate, erase {list(q.shape[:3])} is the gate of both; "
            f"give write {list(v.shape[:3])} or {_shape(v)}"
        )
    if removal_key is not None and removal_key.shape != q.shape:
        raise ValueError(f"removal_key {_shape(removal_key)}: expected {_shape(q)}")
    check_sequences(q, cu_seqlens, initial_state, *q.shape[2:], v.shape[3])


def initial(x: Operands, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the initial state [sequences, heads, head_dim_k, head_dim_v] in the accumulation dtype, zeros for None."""
    if initial_state is not None:
        return initial_state.to(x.q.dtype)
    sequences = x.q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return x.q.new_zeros(sequences, *x.q.shape[2:], x.written.shape[-1])


def _trailing(x: Tensor) -> Tensor:
    """Return a gate of one value per head, [batch, length, heads], with a last axis of 1."""
    return x.unsqueeze(-1) if x.dim() == 3 else x


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
