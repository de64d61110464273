"""Gated linear attention with one decay per channel on Triton kernels, with its gradients: the host code.

    S_t = diag(exp(g_t)) S_(t-1) + k_t v_t^T      o_t = scale q_t S_t
One pass computes the states between chunks (`chunk_state.py`), a second one the outputs or the gradients of every chunk
(`chunk_output.py`), a third one the part inside chunks that need the exact form (`exact_form.py`). The backward pass saves
inputs and states, or recomputes the states. Reference: `models/operators/gla/chunk.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...recompute import recomputable
from ..launch import Launch, aligned, check_addresses, triton
from .chunk_output import chunk_output_backward_kernel, chunk_output_forward_kernel
from .chunk_state import chunk_states_kernel, merge_splits_kernel
from .exact_form import exact_backward_kernel, exact_forward_kernel
from .tiles import find_chunks

CHUNK = 64
# To base 2: both factors are then at most exp(40).
MATMUL_LIMIT = 115.0


# Chunks per program that merges splits, and tokens per block of the exact form (`exact_form.py`).
_GROUP, _SUB = 8, 16
# Not float32 on CUDA: Triton 3.6 compiles a matmul of the backward pass (the second of dv) for an H200 so that it reads beyond
# its shared memory, with head_dim_k 128 and head_dim_v 16. compute-sanitizer reports no other shape, and none in 16 bits.
# float32 uses the plain form. Triton's interpreter runs the kernels in float32.
_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 128


@dataclass(frozen=True, slots=True)
class GLACase:
    """Hold everything that decides how the kernels are compiled and launched.

    segments: the number of packed segments, 0 for unpacked sequences. initial: whether there is an initial state. aug_weight: its
    dtype, if the backward pass is that of a whole MetaLA layer (`models/kernels/metala.py`).
    """

    device: int
    batch: int
    length: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    scale: float
    segments: int
    initial: bool
    aug_weight: torch.dtype | None = None

    @property
    def layer(self) -> bool:
        """Return whether the backward pass is that of a whole MetaLA layer."""
        return self.aug_weight is not None

    @property
    def rows(self) -> int:
        """Return the number of heads of all rows of the batch."""
        return self.batch * self.heads

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the initial and of the final states."""
        return self.segments or self.batch, self.heads, self.dim_k, self.dim_v

    @property
    def chunks(self) -> int:
        return most_chunks(self.length, self.segments)

    @property
    def block_k(self) -> int:
        """Return the channels of a tile of keys."""
        return max(self._narrowest, triton.next_power_of_2(self.dim_k))

    @property
    def block_v(self) -> int:
        """Return the channels of a tile of values."""
        return max(self._narrowest, triton.next_power_of_2(self.dim_v))

    @property
    def _narrowest(self) -> int:
        # With four warps, Triton 3.6 and 3.7 compile matmuls of 32 columns for Hopper so that they read outside of their memory.
        return 16 if self.dtype == torch.float32 or self.narrow else 64

    @property
    def narrow(self) -> bool:
        """Return whether a head fits into 16 channels. Two warps multiply such tiles: see `_narrowest` for four."""
        return max(self.dim_k, self.dim_v) <= 16

    @property
    def even(self) -> bool:
        """Return whether every tile lies inside its tensor."""
        return not (
            self.segments or self.length % CHUNK or self.dim_k % self.block_k or self.dim_v % self.block_v
        )  # fmt: skip

    @property
    def gradient_strides(self) -> tuple[int, int]:
        """Return the elements from one token to the next in the gradients of keys and of values.

        In a layer the gradients of q, a, v and the output gate are adjacent in memory.
        """
        if self.layer:
            return (self.heads * 2 * (self.dim_k + self.dim_v),) * 2
        return self.heads * self.dim_k, self.heads * self.dim_v

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of stored states: bfloat16, as the tensor cores read them, or float32."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    @property
    def flags(self) -> tuple[bool, bool, str]:
        """Return packed, even, and the precision of float32 matmuls: three TF32 ones."""
        return self.segments > 0, self.even, "tf32x3" if self.dtype == torch.float32 else "tf32"


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `models.operators.gla.gated_linear_attention.gated_linear_attention` for one decay per channel.

    q, k and v have one dtype. Log decays below -80 count as -80.

    Raises ValueError for more channels than the kernels support, for other dtypes than float16 and bfloat16 (float32 runs in
    Triton's interpreter only), without tokens, and for sequences that overflow 32-bit addresses.
    """
    if not scale > 0:
        q, scale = q * scale, 1.0
    case = case_of(q, k, v, scale, initial_state, cu_seqlens)
    initial_state = None if initial_state is None else initial_state.float()
    return _GLA.apply(q, k, v, log_decay.float(), initial_state, cu_seqlens, case)


def case_of(
    q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    aug_weight: torch.dtype | None = None,
) -> GLACase:  # fmt: skip
    """Return the case of these arguments. Raises ValueError as `gla`."""
    batch, length, heads, dim_k = q.shape
    dim_v = v.shape[-1]
    if max(dim_k, dim_v) > LARGEST_HEAD:
        raise ValueError(
            f"head_dim_k {dim_k}, head_dim_v {dim_v}: the kernels support at most {LARGEST_HEAD}; use form='chunked'"
        )
    supported = _DTYPES if v.is_cuda else (*_DTYPES, torch.float32)
    if v.dtype not in supported or q.dtype != v.dtype or k.dtype != v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: q, k and v must have one dtype of {supported}")
    segments = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    if length == 0 or v.numel() == 0:
        raise ValueError(f"v {list(v.shape)} has no tokens: use form='chunked'")
    case = GLACase(
        q.get_device(), batch, length, heads, dim_k, dim_v, v.dtype, float(scale), segments, initial_state is not None,
        aug_weight,
    )  # fmt: skip
    width = heads * max(dim_k, dim_v)
    check_addresses(length, max(width, *case.gradient_strides) if torch.is_grad_enabled() else width)
    return case


class _GLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        case: GLACase,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g = (aligned(x) for x in (q, k, v, g))
        o, final, saved = forward(case, q, k, v, g, initial, cu_seqlens)
        ctx.save_for_backward(q, k, v, g, initial, *saved)
        ctx.case = case
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[2]) if do is None else aligned(do)
        dq, dk, dv, dg = (torch.empty_like(x) for x in saved[:4])
        return dq, dk, dv, dg, backward(ctx.case, do, d_final, dq, dk, dv, dg, (None, None), *saved), None, None


# Saved for `backward`: the states before every chunk, which chunks need the exact form, and the chunks of packed sequences.
Saved = tuple[Tensor, Tensor, Tensor | None]


def forward(
    case: GLACase, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Saved]:
    """Return o, the final states, and the tensors that `backward` needs."""
    initial = None if initial is None else aligned(initial)
    table = None if cu_seqlens is None else chunk_table(case.chunks, cu_seqlens)
    final = edge_states(case.state_shape, case.segments > 0, initial, v.device)
    states = scan(case, False, k, v, g, initial, table, final)
    recomputable(states, scan, case, False, k, v, g, initial, table, None)
    o = torch.empty_like(v)
    needs_exact = torch.empty(case.rows, case.chunks, dtype=torch.int32, device=v.device)
    if table is not None:
        needs_exact.zero_()
    chunk_launches(case)[0](q, k, v, g, table, triangle(v.device), states, o, needs_exact)
    exact_launches(case)[0](needs_exact, q, k, v, g, table, o)
    return o, final, (states, needs_exact, table)


def backward(
    case: GLACase,
    do: Tensor,
    d_final: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    augmentation: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial: Tensor | None,
    states: Tensor,
    needs_exact: Tensor,
    table: Tensor | None,
) -> Tensor | None:
    """Write the gradients of q, k, v and g, and return that of the initial states.

    In a layer, dk receives the gradient of a, dg is scratch, and dv already contains the gradient from the augmentation.
    augmentation: ds, float32 [batch, length, heads], and aug_weight of `models.kernels.metala.epilogue_backward`.
    """
    initial = None if initial is None else aligned(initial)
    d_final = None if d_final is None else aligned(d_final)
    d_initial = None if initial is None else edge_states(case.state_shape, case.segments > 0, d_final, q.device)
    d_strength, weight = augmentation
    d_states = scan(case, True, q, do, g, d_final, table, d_initial)
    chunk_launches(case)[1](
        do, q, k, v, g, table, triangle(q.device), needs_exact, states, d_states, dq, dk, dv, dg, d_strength, weight
    )
    exact_launches(case)[1](needs_exact, do, q, k, v, g, table, dq, dk, dv, dg, d_strength, weight)
    return d_initial


def edge_states(shape: tuple[int, ...], packed: bool, of_empty: Tensor | None, device: torch.device) -> Tensor:
    """Allocate one state per sequence. Empty packed sequences keep `of_empty`, or zeros; the kernels write the others."""
    if not packed:
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.zeros(shape, dtype=torch.float32, device=device) if of_empty is None else of_empty.clone()


def chunk_table(chunks: int, cu_seqlens: Tensor) -> Tensor:
    """Return the table of `tiles.find_chunks` for packed sequences of at most `chunks` chunks."""
    table = torch.empty(chunks + 1, 4, dtype=torch.int32, device=cu_seqlens.device)
    _find(cu_seqlens.get_device(), len(cu_seqlens) - 1, chunks, cu_seqlens.dtype)(aligned(cu_seqlens), table)
    return table


def most_chunks(length: int, segments: int) -> int:
    """Return the largest number of chunks of a row: every packed sequence may end in a partial one."""
    return -(-length // CHUNK) if not segments else length // CHUNK + min(segments, length)


@lru_cache(4096)
def _find(device: int, segments: int, chunks: int, dtype: torch.dtype) -> Launch:
    entries = triton.next_power_of_2(segments)
    rows = max(1, 8192 // entries)
    return Launch(find_chunks, (-(-chunks // rows),), chunks, segments, CHUNK, entries, rows, num_warps=4)


def scan(
    case: GLACase, backward: bool, x: Tensor, y: Tensor, g: Tensor, edge: Tensor | None, table: Tensor | None,
    leave: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the state before (backward: its gradient after) every chunk, [batch * heads, chunks, dk, dv] in state_dtype.

    x, y: k and v, or q and do for `backward`. edge: float32 [sequences, heads, head_dim_k, head_dim_v], the initial states or
    the gradients of the final ones, zero if None. leave: the same shape or None; receives the states at the other end of all
    sequences that have a token.
    """
    splits = splits_of(case)
    states = x.new_empty(case.rows, case.chunks, case.dim_k, case.dim_v, dtype=case.state_dtype)
    between: tuple[Tensor | None, ...] = (None, None, None)
    if splits > 1:
        # Per split: end state and total log decay. Per chunk: the log decay from the split's start; packed, also after the chunk.
        sides = 2 if case.segments else 1
        between = tuple(
            x.new_empty(case.rows, *shape, dtype=torch.float32)
            for shape in (
                (splits, case.dim_k, case.dim_v),
                (splits, case.dim_k),
                (case.chunks, sides, case.dim_k),
            )
        )
    scanned, joined = _state_launches(case, backward, edge is not None, leave is not None)
    scanned(x, y, g, edge, table, triangle(x.device), states, leave, *between)
    if splits > 1:
        joined(*between, table, states, leave)
    return states


@lru_cache(4096)
def splits_of(case: GLACase) -> int:
    """Return the splits per sequence. A second pass is worth its time from four on; 256 programs were fastest on an H200."""
    block_k, _, _ = scan_config(case)
    splits = min(256 // (case.rows * triton.cdiv(case.dim_k, block_k)), case.chunks // 8)
    return splits if splits >= 4 else 1


def scan_config(case: GLACase) -> tuple[int, int, int]:
    """Return block of keys, warps and pipeline stages."""
    return min(case.block_k, 64), 2 if case.narrow else 4, 3 if case.dtype != torch.float32 else 1


@lru_cache(4096)
def _state_launches(case: GLACase, backward: bool, edge: bool, leave: bool) -> tuple[Launch, Launch]:
    """Return the launches of the scan and of the merge of splits."""
    splits = splits_of(case)
    block_k, warps, stages = scan_config(case)
    blocks = triton.cdiv(case.dim_k, block_k)
    sizes = case.chunks, splits, case.dim_k, case.dim_v, block_k, case.block_v
    scanned = Launch(
        chunk_states_kernel, (blocks, splits, case.rows),
        case.length, case.heads, case.scale if backward else 1.0, *sizes, CHUNK, backward, splits > 1, edge, leave,
        *case.flags, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    groups = triton.cdiv(triton.cdiv(case.chunks, splits), _GROUP)
    joined = Launch(
        merge_splits_kernel, (blocks, splits * groups, case.rows),
        case.heads, *sizes, _GROUP, backward, leave, case.segments > 0, num_warps=4,
    )  # fmt: skip
    return scanned, joined


@lru_cache(4096)
def chunk_launches(case: GLACase) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch."""
    sizes = case.length, case.heads, case.chunks, case.scale, case.dim_k, case.dim_v, case.block_k, case.block_v
    options = {"num_warps": 2 if case.narrow else 4 if case.block_k <= 64 else 8, "num_stages": 1}
    forward = Launch(
        chunk_output_forward_kernel, (case.chunks, case.rows),
        *sizes, CHUNK, MATMUL_LIMIT, *case.flags, **options,
    )  # fmt: skip
    backward = Launch(
        chunk_output_backward_kernel, (case.chunks, case.rows),
        *sizes, CHUNK, *case.gradient_strides, case.layer, *case.flags, **options,
    )  # fmt: skip
    return forward, backward


@lru_cache(4096)
def exact_launches(case: GLACase) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch."""
    # Most chunks do not need the exact form. One program per chunk would take longer to start than to run.
    together = min(16, triton.next_power_of_2(max(1, case.chunks * case.rows // 512)))
    grid = -(-case.chunks // together), case.rows
    sizes = case.length, case.heads, case.chunks, case.scale, case.dim_k, case.dim_v, case.block_k, case.block_v
    constants = CHUNK, _SUB, MATMUL_LIMIT, together
    options = {"num_warps": 2 if case.narrow else 8, "num_stages": 1}
    forward = Launch(exact_forward_kernel, grid, *sizes, *constants, *case.flags, **options)
    backward = Launch(
        exact_backward_kernel, grid, *sizes, *constants, *case.gradient_strides, case.layer, *case.flags, **options
    )
    return forward, backward


@lru_cache(64)
def triangle(device: torch.device) -> Tensor:
    """Return the bfloat16 [2, CHUNK, CHUNK] that `load_triangle` reads."""
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bfloat16, device=device)
    return torch.stack([ones.tril(), ones.tril(-1)])
