"""Sums over all tokens of the gradients of q, k and v, which the biases of their projections want.

The kernels that form the gradients sum over their own tokens: another pass would read all of them once more. A row of the
attention map sums to den / (den + eps), so that
    sum_j dv_j = sum_i den_i / (den_i + eps) dy_i
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
from torch import Tensor

from .feature_map import summed_tokens
from .lion_common import Case
from .sum_parts import sum_parts

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("LION's kernels need Triton (pip install triton); form='chunked' works without") from error


def empty_parts(case: Case, like: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """What `feature_map.both_gradients` and the operator's backward pass, in `parts` parts of a sequence, fill."""
    of_feature_map = -(-case.batch * case.length // summed_tokens(case.dim_k))
    of_qk = like.new_empty((2, of_feature_map, case.heads * case.dim_k), dtype=torch.float32)
    return of_qk, like.new_empty((1, case.batch * parts, case.heads * case.dim_v), dtype=torch.float32)


def totals(case: Case, of_qk: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k [heads * head_dim_k] and v [heads * head_dim_v], in the case's dtype."""
    of_q, of_k = sum_parts(of_qk, case.dtype)
    return of_q, of_k, sum_parts(of_v, case.dtype)[0]


@triton.jit
def store_value_sums(of_v, dy, scale, bh, d, part, parts, H, eps, V: tl.constexpr):
    """Of the tokens of a tile dy [tokens, channels d]; scale: `lion_common.row_scale`."""
    weight = tl.where(scale != 0.0, 1.0 - eps * scale, 0.0)
    row = ((bh // H) * parts + part) * H + bh % H
    tl.store(of_v + row * V + d, tl.sum(dy.to(tl.float32) * weight[:, None], 0), mask=d < V)
