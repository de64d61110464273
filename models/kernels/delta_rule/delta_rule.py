"""The delta rule on Triton kernels, with its gradients: the host code.

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T.     o_t = scale S_t^T q_t.
`wy.py` computes the effect of a chunk's tokens on each other, `chunk_state.py` the states from chunk to chunk,
`chunk_output.py` the outputs and gradients. The backward pass recomputes everything except P and T of `wy.py`.
Reference: `models/operators/delta_rule/chunked.py`. Equations: arXiv 2406.06484, 2412.06464, 2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gla.gla import CHUNK, chunk_table, edge_states, most_chunks, triangle
from ..launch import Launch, aligned, triton
from .chunk_output import key_gradient_kernel, output_kernel, value_gradient_kernel
from .chunk_state import states_backward_kernel, states_forward_kernel
from .wy import cumulative_decay_kernel, inverse_kernel, scores_kernel, wy_kernel

LARGEST_KEY = 256
# Tokens per diagonal block of the triangular solve, and channels per tile.
_SUB, _TILE = 16, 64


@dataclass(frozen=True, slots=True)
class DeltaRuleCase:
    """Hold everything that decides how the kernels are compiled and launched. segments: 0 for unpacked sequences."""

    device: int
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
        """Return the number of heads of all rows of the batch."""
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return most_chunks(self.length, self.segments)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the initial and of the final states."""
        return self.segments or self.batch, self.heads, self.dim_k, self.dim_v

    @property
    def blocks(self) -> int:
        """Return the tiles of a key's channels."""
        return -(-self.dim_k // _TILE)

    @property
    def factor_dtype(self) -> torch.dtype:
        """Return the dtype of matmul operands. bfloat16 also for float16, whose range ends at 65,504."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    @property
    def flags(self) -> tuple[bool, bool, str]:
        """Return packed, whether every tile lies inside its tensor, and the precision of float32 matmuls."""
        whole = not (self.segments or self.length % CHUNK or self.dim_v % _TILE)
        even = whole and self.dim_k == max(_TILE, triton.next_power_of_2(self.dim_k))
        return self.segments > 0, even, "tf32x3" if self.dtype == torch.float32 else "tf32"


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

    Raises ValueError for head_dim_k above 256, for other dtypes than float16 and bfloat16 (float32 runs in Triton's
    interpreter only), and without tokens.
    """
    supported = (torch.float16, torch.bfloat16) if v.is_cuda else (torch.float16, torch.bfloat16, torch.float32)
    if v.dtype not in supported or q.dtype != v.dtype or k.dtype != v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: q, k and v must have one dtype of {supported}")
    if q.shape[-1] > LARGEST_KEY or not q.numel() or not v.numel():
        raise ValueError(
            f"q {list(q.shape)}, v {list(v.shape)}: the kernels need tokens and head_dim_k <= {LARGEST_KEY}"
        )
    segments = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    batch, length, heads, dim_k = q.shape
    case = DeltaRuleCase(
        q.get_device(), batch, length, heads, dim_k, v.shape[-1], v.dtype, float(scale), log_decay.dim() == 4, segments
    )
    initial = None if initial_state is None else initial_state.float()
    return _DeltaRule.apply(q, k, v, log_decay.float(), beta.float(), initial, cu_seqlens, case)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        case: DeltaRuleCase,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (aligned(x) for x in (q, k, v, g, beta))
        initial = None if initial is None else aligned(initial)
        table = None if cu_seqlens is None else chunk_table(case.chunks, cu_seqlens)
        b, levels = _cumulative_decay(case, g, table)
        scores, inverse = (q.new_empty(case.rows, case.chunks, CHUNK, CHUNK, dtype=case.factor_dtype) for _ in range(2))
        systems = q.new_empty(case.rows, case.chunks, CHUNK, CHUNK, dtype=torch.float32)
        launch = _launches(case)
        launch["scores"](q, k, b, levels, beta, table, systems, scores)
        launch["inverse"](systems, inverse)
        del systems
        final = edge_states(case.state_shape, case.segments > 0, initial, v.device)
        x = _states(case, q, k, v, b, beta, inverse, initial, table, final)
        o = torch.empty_like(v)
        launch["output"](x.q_start, scores, x.updates, x.states, table, o)
        ctx.save_for_backward(q, k, v, g, beta, initial, table, scores, inverse)
        ctx.case = case
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial, table, scores, inverse = ctx.saved_tensors
        case: DeltaRuleCase = ctx.case
        do = torch.zeros_like(v) if do is None else aligned(do)
        d_final = None if d_final is None else aligned(d_final)
        b, levels = _cumulative_decay(case, g, table)
        x = _states(case, q, k, v, b, beta, inverse, initial, table, None)
        d_states, d_updates = torch.empty_like(x.states), torch.empty_like(x.updates)
        d_initial = None if initial is None else edge_states(case.state_shape, case.segments > 0, d_final, v.device)
        states_backward = _scan_launch(case, True, d_final is not None, d_initial is not None)
        states_backward(do, scores, x.q_start, x.k_end, x.w, b, d_final, table, d_states, d_updates, d_initial)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # Per block of key channels, and from the values in the last row.
        d_beta = beta.new_empty(case.blocks + 1, *beta.shape)
        dg = torch.empty_like(g) if case.per_channel else g.new_empty(case.blocks, *g.shape)
        d_scores, d_systems = torch.empty_like(scores), torch.empty_like(inverse)
        launch = _launches(case)
        launch["values"](do, v, beta, inverse, x.updates, d_updates, table, dv, d_scores, d_systems, d_beta[-1])
        launch["keys"](
            do, q, k, b, levels, beta, g, x.updates, d_updates, x.states, d_states, d_scores, d_systems, table,
            triangle(q.device), dq, dk, dg, d_beta,
        )  # fmt: skip
        return dq, dk, dv, dg if case.per_channel else dg.sum(0), d_beta.sum(0), d_initial, None, None


@dataclass(frozen=True)
class _States:
    """Hold the tensors between chunks, in the notation of `wy.py` and `chunk_state.py`."""

    w: Tensor
    q_start: Tensor
    k_end: Tensor
    updates: Tensor
    states: Tensor


def _states(
    case: DeltaRuleCase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    beta: Tensor,
    inverse: Tensor,
    initial: Tensor | None,
    table: Tensor | None,
    final: Tensor | None,
) -> _States:
    w, q_start, k_end = (torch.empty_like(q, dtype=case.factor_dtype) for _ in range(3))
    # The updates replace u.
    updates = torch.empty_like(v, dtype=case.factor_dtype)
    _launches(case)["wy"](q, k, v, b, beta, table, inverse, w, updates, q_start, k_end)
    states = q.new_empty(case.rows, case.chunks, case.dim_k, case.dim_v, dtype=case.factor_dtype)
    scan = _scan_launch(case, False, initial is not None, final is not None)
    scan(w, updates, k_end, b, initial, table, states, updates, final)
    return _States(w, q_start, k_end, updates, states)


def _cumulative_decay(case: DeltaRuleCase, g: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    b = torch.empty_like(g)
    levels = g.new_empty(case.rows, case.chunks, case.blocks, dtype=torch.int32)
    _launches(case)["decay"](g, b, levels, table, triangle(g.device))
    return b, levels


@lru_cache(4096)
def _launches(case: DeltaRuleCase) -> dict[str, Launch]:
    """Return the launches over chunks, by name."""
    chunks, rows, flags = case.chunks, case.rows, case.flags
    sizes = case.length, case.heads, chunks
    per_chunk = chunks, rows
    dim = case.dim_k if case.per_channel else 1
    block = min(_TILE, triton.next_power_of_2(dim))
    exact = case.factor_dtype == torch.float32 or block < 16
    block_v, block_k = (_TILE if size <= _TILE else 128 for size in (case.dim_v, case.dim_k))
    blocks = triton.next_power_of_2(case.blocks)
    return {
        "decay": Launch(
            cumulative_decay_kernel, (chunks, -(-dim // block), rows), *sizes, dim, block, CHUNK, case.segments > 0,
            flags[1] and case.per_channel, exact, num_warps=4,
        ),
        "scores": Launch(
            scores_kernel, per_chunk, *sizes, case.scale, case.dim_k, _TILE, CHUNK, blocks, case.per_channel, *flags,
            num_warps=8, num_stages=1, maxnreg=128,
        ),
        "inverse": Launch(inverse_kernel, (rows * chunks,), CHUNK, _SUB, num_warps=4),
        "wy": Launch(
            wy_kernel, per_chunk, *sizes, case.scale, case.dim_k, case.dim_v, _TILE, _TILE, CHUNK, case.per_channel, *flags,
            num_warps=8, num_stages=1,
        ),
        "output": Launch(
            output_kernel, (chunks, -(-case.dim_v // block_v), rows), *sizes, case.dim_k, case.dim_v, block_k, block_v, CHUNK,
            *flags, num_warps=4, num_stages=2,
        ),
        "values": Launch(
            value_gradient_kernel, per_chunk, *sizes, case.scale, case.dim_v, _TILE, CHUNK, *flags, num_warps=4, num_stages=2,
        ),
        "keys": Launch(
            key_gradient_kernel, (chunks, case.blocks, rows), *sizes, case.scale, case.batch * case.length * case.heads,
            case.dim_k, case.dim_v, _TILE, _TILE, CHUNK, blocks, case.per_channel, *flags, num_warps=8, num_stages=1,
        ),
    }  # fmt: skip


@lru_cache(4096)
def _scan_launch(case: DeltaRuleCase, backward: bool, edge: bool, leave: bool) -> Launch:
    """Return the launch of the states (backward: of their gradients) from chunk to chunk."""
    block = max(_TILE, triton.next_power_of_2(case.dim_k))
    # Larger keys leave no room for a second stage in the memory of a multiprocessor.
    stages = 2 if block <= 128 else 1
    return Launch(
        states_backward_kernel if backward else states_forward_kernel, (-(-case.dim_v // _TILE), case.rows),
        case.length, case.heads, case.chunks, case.dim_k, case.dim_v, block, _TILE, CHUNK, edge, leave, case.per_channel,
        *case.flags, num_warps=4, num_stages=stages,
    )  # fmt: skip
