"""LION's operator with one mask per channel of values, on Triton: chunks on tensor cores, linear in length.

    y_ic = sum_j (q_i . k_j) W_ijc v_jc / (sum_j (q_i . k_j) W_ijc + eps)        W_ijc = exp(-|c_ic - c_jc|)

c is the running sum of the log decay. Let b and B be a chunk's running sum and total of it:

    F_(n+1) = F_n e^B + sum_j k_j (e^(B - b_j) v_j)^T     G_(n-1) = G_n e^B + sum_j k_j (e^(b_j) v_j)^T
    o_i = e^(b_i) (q_i F_n) + e^(B - b_i) (q_i G_n) + the sum inside the chunk (`value_channel_kernels.py`)

A normalizer is the same sum with 1 in the place of v. The masks are equal, so one program computes both.

Backward, let r be the reciprocal of the normalizer, u = r dy the gradient of the numerator and w = -u y that of the normalizer.
The gradient of v is the same operator with k, q and u in the places of q, k and v, and F' and G' are its states. The gradients
of q, k and the log decay are:

    dA_ij = sum_c (u_ic v_jc + w_ic) W_ijc inside a chunk, for A_ij = q_i . k_j

    dq_i = sum_j dA_ij k_j + F_n (e^(b_i) u_i) + G_n (e^(B - b_i) u_i)

    dk_j = sum_i dA_ij q_i + F'_n (e^(b_j) v_j) + G'_n (e^(B - b_j) v_j)

    d c_t = u_t (o_t from the left - o_t from the right) + v_t (dv_t from the left - dv_t from the right)

    d log_decay_t = sum of d c_s over s >= t in the chunk, and sum_k F_(n+1) G'_n + F'_(n+1) G_n for later chunks

The states of normalizers and of w are added where those of v and u are. Sums are float32. In memory, states are bfloat16 if the
inputs are, and everything else is float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...backend import disable_compile
from ...precision import NORMALIZER_EPS
from ..gla.gla import MATMUL_LIMIT
from ..launch import Launch, aligned, check_addresses, triton
from .common import block
from .value_channel_kernels import (
    output_kernel,
    running_sum_kernel,
    score_gradient_kernel,
    states_kernel,
    value_gradient_kernel,
)

# Tokens per chunk (a power of two, at least 16), channels of values per tile, columns per tile of the running sums.
CHUNK, VALUES, COLUMNS = 64, 32, 64
# Warps and the register limit per thread of the kernels.
STATES = OUTPUT = VALUE_GRADIENT = SCORE_GRADIENT = (4, None)


@disable_compile
def lion_per_value_channel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, normalized: bool) -> Tensor:
    """Return the sum of both directions, [batch, length, heads, head_dim_v], in v's dtype if normalized, else in float32.

    q, k: [batch, length, heads, head_dim_k]; v: [..., head_dim_v]. They have one dtype, float32, float16 or bfloat16.
    log_decay: as v, in float32; values below -80 count as -80. k and log_decay are 0 at padding. Raises ValueError for sizes that
    overflow 32-bit addresses.
    """
    return _LionPerValueChannel.apply(q, k, v, log_decay, normalized)


class _LionPerValueChannel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, normalized: bool) -> Tensor:
        q, k, v, g = (aligned(x) for x in (q, k, v, log_decay))
        launches = _launches(q.device, q.shape, v.shape[-1], v.dtype, normalized)
        b, o = torch.empty_like(g), torch.empty_like(v, dtype=v.dtype if normalized else torch.float32)
        launches.running_sum(g, b)
        states = launches.scan(False, k, v, None, None, b)
        y = r = e = None
        saves = any(ctx.needs_input_grad)
        if saves:
            e = torch.empty_like(g)
            if normalized:
                y, r = torch.empty_like(g), torch.empty_like(g)
        launches.output[saves](q, k, v, b, states, o, y, r, e)
        ctx.save_for_backward(q, k, v, g, b, y, r, e, states)
        ctx.launches = launches
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, b, y, r, e, states = ctx.saved_tensors
        launches, dy = ctx.launches, aligned(dy)
        d_states = launches.scan(True, q, dy, y, r, b)
        dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
        launches.value_gradient(dy, q, k, v, g, b, y, r, e, states, d_states, dv, dg)
        launches.score_gradient(dy, q, k, v, b, y, r, states, d_states, dq, dk)
        return dq, dk, dv, dg, None


class _Launches(NamedTuple):
    """Hold the launches of one case of sizes and dtypes. `output` has one without and one with the backward pass's tensors."""

    state_shape: tuple[int, ...]
    state_dtype: torch.dtype
    running_sum: Launch
    states: tuple[Launch, Launch]
    output: tuple[Launch, Launch]
    value_gradient: Launch
    score_gradient: Launch

    def scan(
        self, backward: bool, x: Tensor, u: Tensor, y: Tensor | None, r: Tensor | None, b: Tensor
    ) -> Tensor | None:
        """Return the states at the edges of every chunk, or None if there is one chunk, whose states are 0.

        Their shape is [batch * heads, 2, 1 or 2, chunks, head_dim_k, head_dim_v]: from the left and from the right, of u and
        (normalized) of w.
        """
        if self.state_shape[3] == 1:
            return None
        states = b.new_empty(self.state_shape, dtype=self.state_dtype)
        self.states[backward](x, u, y, r, b, states)
        return states


@lru_cache(4096)
def _launches(device: torch.device, shape: torch.Size, dim_v: int, dtype: torch.dtype, normalized: bool) -> _Launches:
    batch, length, heads, dim_k = shape
    check_addresses(length, heads * max(dim_k, dim_v))
    chunks, rows, parts = triton.cdiv(length, CHUNK), batch * heads, 2 if normalized else 1
    block_v = block(dim_v, VALUES)
    tiles, width = triton.cdiv(dim_v, block_v), heads * dim_v
    # float32 inputs need float32 matmuls.
    precision = "ieee" if dtype == torch.float32 else "tf32"
    sizes = dim_k, dim_v, block(dim_k), block_v, CHUNK
    options = *sizes, CHUNK.bit_length() - 1, MATMUL_LIMIT, parts, precision

    def launch(config: tuple[int, int | None], kernel: Any, grid: tuple[int, ...], *values: Any) -> Launch:
        return Launch(kernel, grid, length, *values, num_warps=config[0], num_stages=1, maxnreg=config[1])

    def states(backward: bool) -> Launch:
        grid = tiles, 2, rows
        return launch(STATES, states_kernel, grid, chunks, heads, *sizes, parts, backward, precision)

    grid = chunks, tiles, rows
    output = [launch(OUTPUT, output_kernel, grid, chunks, heads, NORMALIZER_EPS, *options) for _ in range(2)]
    return _Launches(
        (rows, 2, parts, chunks, dim_k, dim_v),
        # float16 is too small for sums over a long sequence.
        torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        launch((4, None), running_sum_kernel, (chunks, triton.cdiv(width, COLUMNS), batch), width, CHUNK, COLUMNS),
        (states(False), states(True)),
        (output[0], output[1]),
        launch(VALUE_GRADIENT, value_gradient_kernel, grid, chunks, heads, *options),
        launch(SCORE_GRADIENT, score_gradient_kernel, (chunks, rows), chunks, heads, *options),
    )
