"""The delta rule on Triton kernels, with its gradients: the host code.

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T.     o_t = scale S_t^T q_t.
`wy.py` computes the effect of a chunk's tokens on each other, `chunk_state.py` the states from chunk to chunk,
`chunk_output.py` the outputs and gradients. The backward pass recomputes everything except P and T of `wy.py`, and M and
the states between groups of `chunk_state.py`.
Reference: `models/operators/delta_rule/chunked.py`. Equations: arXiv 2406.06484, 2412.06464, 2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gla.gla import CHUNK, chunk_table, edge_states, most_chunks, triangle
from ..launch import Launch, aligned, check_addresses, triton
from ..primitives import sum_parts
from .chunk_output import key_gradient_kernel, output_kernel, state_gradient_kernel, value_gradient_kernel
from .chunk_state import compose_kernel, states_backward_kernel, states_forward_kernel
from .wy import channel_decay_kernel, diagonal_kernel, head_decay_kernel, inverse_kernel, scores_kernel, wy_kernel

if TYPE_CHECKING:
    from ...operators.context_parallel import ShardMaps

LARGEST_KEY = 256
# Tokens per diagonal block of the triangular solve, and channels per tile.
_SUB, _TILE = 16, 64
# Fewer programs than this from chunk to chunk leave multiprocessors idle. The chunks are then divided into up to `_MOST_GROUPS`
# groups of `_GROUP` chunks or more. Fewer than four groups do not pay for the pass that computes their maps.
_PROGRAMS, _MOST_GROUPS, _GROUP = 256, 8, 16


@dataclass(frozen=True, slots=True)
class DeltaRuleCase:
    """Hold everything that decides how the kernels are compiled and launched.

    segments: 0 for unpacked sequences. gate: the dtypes of a_log and bias, None for given log decays. sharded: under context
    parallelism.
    """

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
    gate: tuple[torch.dtype, torch.dtype] | None
    sharded: bool

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
    def groups(self) -> int:
        """Return the groups of chunks that are processed at once."""
        programs = self.rows * -(-self.dim_v // _TILE)
        groups = min(_MOST_GROUPS, _PROGRAMS // programs, self.chunks // _GROUP)
        return max(1, groups) if groups >= 4 or self.sharded else 1

    @property
    def maps(self) -> bool:
        """Return whether the maps of groups are computed: for several groups, or for the map of the local shard."""
        return self.groups > 1 or self.sharded

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
    gate: tuple[Tensor, Tensor] | None = None,
    shards: ShardMaps | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `models.operators.delta_rule.delta_rule.delta_rule` with erase = write = beta, [batch, length, heads].

    q, k and v have one dtype. log_decay: [batch, length, heads], or [..., head_dim_k]; below -20 it counts as -20.
    gate: (a_log [heads], bias [heads, head_dim_k]); `log_decay` then holds logits [batch, length, heads, head_dim_k] of q's
    dtype, whose log decays are -exp(a_log) softplus(log_decay + bias). shards: the arguments are a local shard, without an
    initial state. Returns o and the final state in float32.

    Raises ValueError for head_dim_k above 256, for other dtypes than float16 and bfloat16 (float32 runs in Triton's
    interpreter only), without tokens, and for sequences that overflow 32-bit addresses.
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
    check_addresses(length, heads * max(dim_k, v.shape[-1]))
    case = DeltaRuleCase(
        q.get_device(), batch, length, heads, dim_k, v.shape[-1], v.dtype, float(scale), log_decay.dim() == 4, segments,
        None if gate is None else (gate[0].dtype, gate[1].dtype), shards is not None,
    )  # fmt: skip
    initial = None if initial_state is None else initial_state.float()
    decay = log_decay.float() if gate is None else log_decay.to(q.dtype)
    return _DeltaRule.apply(q, k, v, decay, beta.float(), *(gate or (None, None)), initial, cu_seqlens, shards, case)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor | None,
        bias: Tensor | None,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        shards: ShardMaps | None,
        case: DeltaRuleCase,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (aligned(x) for x in (q, k, v, g, beta))
        a_log, bias, initial = (None if x is None else aligned(x) for x in (a_log, bias, initial))
        table = None if cu_seqlens is None else chunk_table(case.chunks, cu_seqlens)
        b, levels = _cumulative_decay(case, g, a_log, bias, table)
        scores, inverse = (q.new_empty(case.rows, case.chunks, CHUNK, CHUNK, dtype=case.factor_dtype) for _ in range(2))
        systems = q.new_empty(case.rows, case.chunks, CHUNK, CHUNK, dtype=torch.float32)
        launch = _launches(case)
        launch["scores"](q, k, b, levels, beta, table, systems, scores)
        diagonals = systems.new_empty(case.rows, case.chunks, CHUNK, _SUB)
        launch["diagonals"](systems, diagonals)
        launch["inverse"](systems, diagonals, inverse)
        del systems, diagonals
        final = edge_states(case.state_shape, case.segments > 0, initial, v.device)
        x = _states(case, q, k, v, b, beta, inverse, initial, table, final, None, shards)
        o = torch.empty_like(v)
        launch["output"](x.q_start, scores, x.updates, x.states, table, o)
        groups = () if x.groups is None else (x.groups.matrix, x.groups.edge, *x.groups.following)
        ctx.save_for_backward(q, k, v, g, beta, a_log, bias, initial, table, scores, inverse, *groups)
        ctx.case, ctx.shards = case, shards
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, a_log, bias, initial, table, scores, inverse, *saved = ctx.saved_tensors
        case: DeltaRuleCase = ctx.case
        do = torch.zeros_like(v) if do is None else aligned(do)
        d_final = None if d_final is None else aligned(d_final)
        b, levels = _cumulative_decay(case, g, a_log, bias, table)
        groups = _Groups(saved[0], saved[1], saved[2:]) if saved else None
        x = _states(case, q, k, v, b, beta, inverse, initial, table, None, groups, None)
        d_states, d_updates = torch.empty_like(x.states), torch.empty_like(x.updates)
        d_initial = None if initial is None else edge_states(case.state_shape, case.segments > 0, d_final, v.device)
        given = do, scores, x.q_start, x.k_end, x.w, b, d_final
        group_edge = None
        if groups is not None:
            rest = torch.empty_like(groups.edge)
            _scan_launch(case, True, d_final is not None, False, True)(*given, rest, table, None, d_updates, None)
            # The gradients of packed final states are in R'.
            edge = None if case.segments else d_final
            group_edge = _compose(case, True, groups.matrix, rest, edge)
            if ctx.shards is not None:
                d_start = torch.baddbmm(rest[:, 0], groups.matrix[:, 0].mT, group_edge[:, 0])
                d_end = ctx.shards.outgoing_gradient(groups.following, d_start)
                edge = d_end if edge is None else d_end + edge.view_as(d_end)
                group_edge = _compose(case, True, groups.matrix, rest, edge)
        states_backward = _scan_launch(case, True, d_final is not None, d_initial is not None, False)
        states_backward(*given, group_edge, table, d_states, d_updates, d_initial)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # Per block of key channels, and from the values in the last row.
        d_beta = beta.new_empty(case.blocks + 1, *beta.shape)
        dg = torch.empty_like(g) if case.per_channel else g.new_empty(case.blocks, *g.shape)
        passing = b.new_empty(case.rows, case.chunks, case.dim_k)
        # A packed row may have fewer chunks.
        shape = 2, case.batch * case.chunks, case.heads * case.dim_k if bias is not None else 0
        d_gate = b.new_zeros(shape) if case.segments else b.new_empty(shape)
        d_scores, d_systems = torch.empty_like(scores), torch.empty_like(inverse)
        launch = _launches(case)
        launch["values"](do, v, b, beta, inverse, x.updates, d_updates, table, dv, d_scores, d_systems, d_beta[-1])
        # The factors are used no longer; their memory holds what reaches q and k through the states.
        through = x.q_start, x.w, x.k_end, passing
        launch["states"](do, x.updates, d_updates, x.states, d_states, table, *through)
        for name in ("keys", "keys of strong decays") if case.per_channel else ("keys",):
            launch[name](
                q, k, b, levels, beta, g, a_log, bias, *through, d_scores, d_systems, table, triangle(q.device),
                dq, dk, dg, d_beta, d_gate[0], d_gate[1],
            )  # fmt: skip
        d_a_log, d_bias = None, None
        if a_log is not None and bias is not None:
            d_rate, d_bias = sum_parts(d_gate, torch.float32).view(2, *bias.shape)
            d_a_log, d_bias = d_rate.sum(1).to(a_log.dtype), d_bias.to(bias.dtype)
        dg = dg if case.per_channel else dg.sum(0)
        return dq, dk, dv, dg, d_beta.sum(0), d_a_log, d_bias, d_initial, None, None, None


class _Groups(NamedTuple):
    """Hold M of every group of chunks, the state before every group, and M of the following ranks' shards, float32."""

    matrix: Tensor
    edge: Tensor
    following: list[Tensor]


@dataclass(frozen=True)
class _States:
    """Hold the tensors between chunks, in the notation of `wy.py` and `chunk_state.py`."""

    w: Tensor
    q_start: Tensor
    k_end: Tensor
    updates: Tensor
    states: Tensor
    groups: _Groups | None


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
    groups: _Groups | None,
    shards: ShardMaps | None,
) -> _States:
    """Return the tensors between chunks. groups: those of the forward pass, in the backward pass."""
    w, q_start, k_end = (torch.empty_like(q, dtype=case.factor_dtype) for _ in range(3))
    # The updates replace u.
    updates = torch.empty_like(v, dtype=case.factor_dtype)
    _launches(case)["wy"](q, k, v, b, beta, table, inverse, w, updates, q_start, k_end)
    states = q.new_empty(case.rows, case.chunks, case.dim_k, case.dim_v, dtype=case.factor_dtype)
    edge = initial is not None
    if case.maps and groups is None:
        groups = _groups(case, w, updates, k_end, b, initial, table, shards)
    scan = _scan_launch(case, False, edge, final is not None, False)
    scan(w, updates, k_end, b, initial, None if groups is None else groups.edge, None, table, states, updates, final)
    return _States(w, q_start, k_end, updates, states, groups)


def _groups(
    case: DeltaRuleCase,
    w: Tensor,
    u: Tensor,
    k_end: Tensor,
    b: Tensor,
    initial: Tensor | None,
    table: Tensor | None,
    shards: ShardMaps | None,
) -> _Groups:
    shape = case.rows, case.groups, case.dim_k
    matrix, rest = (w.new_empty(*shape, size, dtype=torch.float32) for size in (case.dim_k, case.dim_v))
    maps = _scan_launch(case, False, initial is not None, False, True)
    maps(w, u, k_end, b, initial, rest, matrix, table, None, u, None)
    # Packed initial states are in R.
    edge = _compose(case, False, matrix, rest, None if case.segments else initial)
    if shards is None:
        return _Groups(matrix, edge, [])
    end = torch.baddbmm(rest[:, -1], matrix[:, -1], edge[:, -1])
    state, following = shards.incoming_state(reduce(lambda m, group: group @ m, matrix.unbind(1)), end)
    return _Groups(matrix, _compose(case, False, matrix, rest, state), following)


def _compose(case: DeltaRuleCase, backward: bool, matrix: Tensor, rest: Tensor, edge: Tensor | None) -> Tensor:
    """Return the state before every group (backward: its gradient after it), from M, R and the state at the edge of all."""
    group_edge = torch.empty_like(rest)
    _compose_launch(case, backward, edge is not None)(matrix, rest, edge, group_edge)
    return group_edge


def _cumulative_decay(
    case: DeltaRuleCase, g: Tensor, a_log: Tensor | None, bias: Tensor | None, table: Tensor | None
) -> tuple[Tensor, Tensor]:
    b = torch.empty_like(g, dtype=torch.float32)
    levels = g.new_empty(case.rows, case.chunks, case.blocks, dtype=torch.int32)
    if case.per_channel:
        _launches(case)["decay"](g, a_log, bias, b, levels, table)
    else:
        _launches(case)["decay"](g, b, table)
    return b, levels


@lru_cache(4096)
def _launches(case: DeltaRuleCase) -> dict[str, Launch]:
    """Return the launches over chunks, by name."""
    chunks, rows, flags = case.chunks, case.rows, case.flags
    sizes = case.length, case.heads, chunks
    per_chunk, per_block = (chunks, rows), (chunks, case.blocks, rows)
    block_v, block_k = (_TILE if size <= _TILE else 128 for size in (case.dim_v, case.dim_k))
    blocks = triton.next_power_of_2(case.blocks)
    return {
        "decay": Launch(
            channel_decay_kernel, per_block, *sizes, case.dim_k, _TILE, CHUNK, case.gate is not None,
            case.segments > 0, num_warps=1,
        )
        if case.per_channel
        else Launch(head_decay_kernel, per_chunk, case.length, case.heads, CHUNK, case.segments > 0, num_warps=1),
        "scores": Launch(
            scores_kernel, per_chunk, *sizes, case.scale, case.dim_k, _TILE, CHUNK, blocks, case.per_channel, *flags,
            num_warps=8, num_stages=1, maxnreg=128,
        ),
        "diagonals": Launch(
            diagonal_kernel, (-(-rows * chunks * CHUNK // 128),), rows * chunks * (CHUNK // _SUB), CHUNK, _SUB, 128,
            num_warps=4,
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
            value_gradient_kernel, per_chunk, *sizes, case.scale, case.dim_v, _TILE, CHUNK, case.per_channel, *flags,
            num_warps=4, num_stages=2,
        ),
        # In two stages Triton 3.6 loads the next states over those of matmuls still under way.
        "states": Launch(
            state_gradient_kernel, per_block, *sizes, case.dim_k, case.dim_v, _TILE, _TILE, CHUNK, *flags, num_warps=4,
            num_stages=1,
        ),
        # With tiles of 32 channels ptxas 12.8 computes wrong addresses of the operands of its matmuls.
        **{
            name: Launch(
                key_gradient_kernel, (chunks, 1 if strong else case.blocks, rows), *sizes, case.scale,
                case.batch * case.length * case.heads, case.dim_k, _TILE, CHUNK, strong, case.gate is not None,
                case.per_channel, *flags, num_warps=4, num_stages=1,
            )
            for name, strong in (("keys", False), ("keys of strong decays", True))
        },
    }  # fmt: skip


@lru_cache(4096)
def _scan_launch(case: DeltaRuleCase, backward: bool, edge: bool, leave: bool, maps: bool) -> Launch:
    """Return the launch of the states (backward: of their gradients) from chunk to chunk; maps: of the maps of groups."""
    block = max(_TILE, triton.next_power_of_2(case.dim_k))
    # Larger keys leave no room for a second stage in the memory of a multiprocessor.
    stages = 2 if block <= 128 else 1
    blocks = -(-case.dim_v // _TILE) + (case.blocks if maps and not backward else 0)
    return Launch(
        states_backward_kernel if backward else states_forward_kernel, (blocks, case.rows, case.groups),
        case.length, case.heads, case.chunks, case.dim_k, case.dim_v, block, _TILE, CHUNK, edge, leave, case.groups, maps,
        case.per_channel, *case.flags, num_warps=4, num_stages=stages,
    )  # fmt: skip


@lru_cache(4096)
def _compose_launch(case: DeltaRuleCase, backward: bool, edge: bool) -> Launch:
    """Return the launch of the states at the edges of groups."""
    return Launch(
        compose_kernel, (-(-case.dim_v // 32), case.rows), case.dim_k, case.dim_v, _TILE, 32, edge, case.groups,
        backward, num_warps=4, num_stages=1,
    )  # fmt: skip
