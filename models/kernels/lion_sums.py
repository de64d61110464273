"""Sums over all tokens of the gradients of q, k and v, which the biases of their projections want.

The kernels that form the gradients sum over their own tokens; here the parts are added up. Another pass over the gradients
would read all of them once more. A row of the attention map sums to den / (den + eps), so that
    sum_j dv_j = sum_i den_i / (den_i + eps) dy_i
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .feature_map import summed_tokens
from .launch import Launch
from .lion_common import Case

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("LION's kernels need Triton (pip install triton); form='chunked' works without") from error


def empty_parts(case: Case, like: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """What `feature_map.both_gradients` and the operator's backward pass, in `parts` parts of a sequence, fill."""
    of_qk = like.new_empty((2, _of_feature_map(case), case.heads, case.dim_k), dtype=torch.float32)
    return of_qk, like.new_empty((case.batch * parts, case.heads, case.dim_v), dtype=torch.float32)


def totals(case: Case, of_qk: Tensor, of_v: Tensor) -> tuple[Tensor, ...]:
    """Of q, k [heads * head_dim_k] and v [heads * head_dim_v], in the case's dtype."""
    columns = case.heads * case.dim_k, case.heads * case.dim_v
    out = of_qk.new_empty((2 * columns[0] + columns[1],), dtype=case.dtype)
    _launch(case, of_v.shape[0])(of_qk, of_v, out)
    return out.split((columns[0], *columns))


def _of_feature_map(case: Case) -> int:
    return -(-case.batch * case.length // summed_tokens(case.dim_k))


@lru_cache(4096)
def _launch(case: Case, parts_v: int) -> Launch:
    columns = case.heads * case.dim_k, case.heads * case.dim_v
    grid = triton.cdiv(max(columns), 32), 3
    return Launch(_totals, grid, *columns, _of_feature_map(case), parts_v, 64, 32, num_warps=4)


@triton.jit
def store_value_sums(of_v, dy, scale, bh, d, part, parts, H, eps, V: tl.constexpr):
    """Of the tokens of a tile dy [tokens, channels d]; scale: `lion_common.row_scale`."""
    weight = tl.where(scale != 0.0, 1.0 - eps * scale, 0.0)
    row = ((bh // H) * parts + part) * H + bh % H
    tl.store(of_v + row * V + d, tl.sum(dy.to(tl.float32) * weight[:, None], 0), mask=d < V)


@triton.jit(do_not_specialize=["parts_qk", "parts_v"])
def _totals(of_qk, of_v, out, qk, v, parts_qk, parts_v, BP: tl.constexpr, BC: tl.constexpr):
    """A program of columns of q, k or v, qk, qk and v of them."""
    which, column = tl.program_id(1), tl.program_id(0) * BC + tl.arange(0, BC)
    columns, parts = qk, parts_qk
    if which == 2:
        of_qk, columns, parts = of_v, v, parts_v
    else:
        of_qk += which * parts_qk * qk
    total = tl.zeros([BP, BC], tl.float32)
    for first in range(0, parts, BP):
        row = first + tl.arange(0, BP)
        mask = (row < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(of_qk + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(out + which * qk + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)
