"""The delta rule on Triton kernels, with its gradients: the host code.

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T      o_t = scale S_t^T q_t
`wy.py` computes what the tokens of a chunk do to each other, `chunk_state.py` the states from chunk to chunk, `chunk_output.py`
the outputs and gradients. The backward pass saves the inputs and recomputes the rest.
Reference: `models/operators/delta_rule/chunked.py`. Equations: arXiv 2406.06484, 2412.06464, 2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gla.gla import CHUNK, chunk_table, most_chunks, triangle
from ..launch import aligned
from .chunk_output import key_gradient_kernel, output_kernel, value_gradient_kernel
from .chunk_state import states_backward_kernel, states_forward_kernel
from .wy import cumulative_decay_kernel, inverse_kernel, scores_kernel, wy_kernel

try:
    import triton
except ImportError as error:
    raise ImportError("the delta rule kernels need Triton: pip install triton") from error

LARGEST_KEY = 256
# Tokens per diagonal block of the triangular solve, and channels per tile.
_SUB, _TILE = 16, 64


@dataclass(frozen=True, slots=True)
class _Case:
    """Hold the sizes of a call. segments: the number of packed segments, 0 for unpacked sequences."""

    batch: int
    length: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    scale: float
    per_channel: bool
    segments: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return most_chunks(self.length, self.segments)

    @property
    def blocks(self) -> int:
        """Return the blocks of channels of a key."""
        return -(-self.dim_k // _TILE)

    @property
    def factor_dtype(self) -> torch.dtype:
        """Return the dtype of matmul operands. bfloat16 also for float16, whose range ends at 65,504."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    @property
    def stages(self) -> int:
        """Return the pipeline stages of the scans over chunks, whose tiles share the memory of a multiprocessor."""
        return 2 if self.dim_k <= 128 else 1

    @property
    def flags(self) -> dict[str, Any]:
        even = not (self.segments or self.length % CHUNK or self.dim_k % _TILE or self.dim_v % _TILE)
        even = even and self.dim_k == triton.next_power_of_2(self.dim_k)
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        return {"C": CHUNK, "PACKED": self.segments > 0, "EVEN": even, "PRECISION": precision}


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `models.operators.delta_rule.delta_rule.delta_rule` with erase = write = beta, [batch, length, heads].

    q, k and v have one dtype. log_decay: [batch, length, heads], or [..., head_dim_k]; below -20 it counts as -20.
    Returns o and the final state in float32.

    Raises ValueError for head_dim_k above 256, dtypes other than float16 and bfloat16 (float32 runs in Triton's interpreter
    only), and without tokens.
    """
    supported = (torch.float16, torch.bfloat16) if v.is_cuda else (torch.float16, torch.bfloat16, torch.float32)
    if v.dtype not in supported or q.dtype != v.dtype or k.dtype != v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: q, k and v must have one dtype of {supported}")
    if q.shape[-1] > LARGEST_KEY or not q.numel() or not v.numel():
        raise ValueError(f"q {list(q.shape)}, v {list(v.shape)}: the kernels need tokens and head_dim_k <= {LARGEST_KEY}")
    segments = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    case = _Case(*q.shape, v.shape[-1], v.dtype, float(scale), log_decay.dim() == 4, segments)
    initial = None if initial_state is None else initial_state.float()
    return _DeltaRule.apply(q, k, v, log_decay.float(), beta.float(), initial, cu_seqlens, case)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
        cu_seqlens: Tensor | None, case: _Case,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v, g, beta = (aligned(x) for x in (q, k, v, g, beta))
        initial = None if initial is None else aligned(initial)
        table = None if cu_seqlens is None else chunk_table(case.chunks, cu_seqlens)
        final = _edge_states(case, initial, v)
        x = _Chunks(case, q, k, v, g, beta, initial, table, final)
        o = torch.empty_like(v)
        block_v = _TILE if v.shape[-1] <= _TILE else 128
        output_kernel[(case.chunks, -(-case.dim_v // block_v), case.rows)](
            x.q_start, x.scores, x.updates, x.states, table, o, case.length, case.heads, case.chunks,
            case.dim_k, case.dim_v, min(128, _block(case.dim_k)), block_v, **case.flags, num_warps=4, num_stages=2,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, g, beta, initial, table)
        ctx.case = case
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial, table = ctx.saved_tensors
        case: _Case = ctx.case
        do = torch.zeros_like(v) if do is None else aligned(do)
        d_final = None if d_final is None else aligned(d_final)
        x = _Chunks(case, q, k, v, g, beta, initial, table, None)
        d_states, d_updates = torch.empty_like(x.states), torch.empty_like(x.updates)
        d_initial = None if initial is None else _edge_states(case, d_final, v)
        states_backward_kernel[(-(-case.dim_v // _TILE), case.rows)](
            do, x.scores, x.q_start, x.k_end, x.w, x.b, d_final, table, d_states, d_updates, d_initial, case.length, case.heads,
            case.chunks, case.dim_k, case.dim_v, _block(case.dim_k), _TILE, EDGE=d_final is not None,
            LEAVE=d_initial is not None, PER_CHANNEL=case.per_channel, **case.flags, num_warps=4, num_stages=case.stages,
        )  # fmt: skip
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        blocks = case.blocks
        d_beta = beta.new_empty(1 + blocks, *beta.shape)
        dg = torch.empty_like(g) if case.per_channel else g.new_empty(blocks, *g.shape)
        # The gradients of scores and systems replace those, which are not needed any more.
        value_gradient_kernel[(case.chunks, case.rows)](
            do, v, beta, x.inverse, x.updates, d_updates, table, dv, x.scores, x.inverse, d_beta[blocks], case.length,
            case.heads, case.chunks, case.scale, case.dim_v, _TILE, **case.flags, num_warps=4, num_stages=2,
        )  # fmt: skip
        key_gradient_kernel[(case.chunks, blocks, case.rows)](
            do, q, k, x.b, x.levels, beta, g, x.updates, d_updates, x.states, d_states, x.scores, x.inverse, table, triangle(q.device),
            dq, dk, dg, d_beta, case.length, case.heads, case.chunks, case.scale, beta.numel(), case.dim_k, case.dim_v, _TILE,
            _TILE, BLOCKS=triton.next_power_of_2(blocks), PER_CHANNEL=case.per_channel, **case.flags, num_warps=8, num_stages=1,
        )  # fmt: skip
        return dq, dk, dv, dg if case.per_channel else dg.sum(0), d_beta.sum(0), d_initial, None, None


class _Chunks:
    """Hold everything that both passes need of every chunk: see `wy.py` and `chunk_state.py` for the notation."""

    def __init__(
        self, case: _Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
        table: Tensor | None, final: Tensor | None,
    ) -> None:  # fmt: skip
        rows, chunks, dtype = case.rows, case.chunks, case.factor_dtype
        sizes = case.length, case.heads, case.chunks
        dim = case.dim_k if case.per_channel else 1
        block = min(_TILE, triton.next_power_of_2(dim))
        flags = case.flags
        self.b = torch.empty_like(g)
        self.levels = g.new_empty(rows, chunks, case.blocks, dtype=torch.int32)
        cumulative_decay_kernel[(chunks, -(-dim // block), rows)](
            g, self.b, self.levels, table, triangle(g.device), *sizes, dim, block, CHUNK, case.segments > 0,
            flags["EVEN"] and case.per_channel, dtype == torch.float32 or block < 16, num_warps=4,
        )  # fmt: skip
        self.scores, self.inverse = (q.new_empty(rows, chunks, CHUNK, CHUNK, dtype=dtype) for _ in range(2))
        systems = q.new_empty(rows, chunks, CHUNK, CHUNK, dtype=torch.float32)
        scores_kernel[(chunks, rows)](
            q, k, self.b, self.levels, beta, table, systems, self.scores, *sizes, case.scale, case.dim_k, _TILE,
            BLOCKS=triton.next_power_of_2(case.blocks), PER_CHANNEL=case.per_channel, **flags, num_warps=8, num_stages=1,
            maxnreg=128,
        )  # fmt: skip
        inverse_kernel[(rows * chunks,)](systems, self.inverse, CHUNK, _SUB, num_warps=4)
        self.w, self.q_start, self.k_end = (torch.empty_like(q, dtype=dtype) for _ in range(3))
        # The updates replace u.
        self.updates = torch.empty_like(v, dtype=dtype)
        wy_kernel[(chunks, rows)](
            q, k, v, self.b, beta, table, self.inverse, self.w, self.updates, self.q_start, self.k_end, *sizes, case.scale,
            case.dim_k, case.dim_v, _TILE, _TILE, PER_CHANNEL=case.per_channel, **flags, num_warps=8, num_stages=1,
        )  # fmt: skip
        self.states = q.new_empty(rows, chunks, case.dim_k, case.dim_v, dtype=dtype)
        states_forward_kernel[(-(-case.dim_v // _TILE), rows)](
            self.w, self.updates, self.k_end, self.b, initial, table, self.states, self.updates, final, *sizes, case.dim_k,
            case.dim_v, _block(case.dim_k), _TILE, EDGE=initial is not None, LEAVE=final is not None,
            PER_CHANNEL=case.per_channel, **flags, num_warps=4, num_stages=case.stages,
        )  # fmt: skip


def _block(dim: int) -> int:
    return max(_TILE, triton.next_power_of_2(dim))


def _edge_states(case: _Case, of_empty: Tensor | None, like: Tensor) -> Tensor:
    """Allocate one state per sequence. Empty sequences keep `of_empty`, or zeros; the kernels write the others."""
    shape = case.segments or case.batch, case.heads, case.dim_k, case.dim_v
    if not case.segments:
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    return of_empty.clone() if of_empty is not None else torch.zeros(shape, dtype=torch.float32, device=like.device)
