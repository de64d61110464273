"""The symmetric matmul alpha X X^T + beta X + diagonal I of a batch of matrices, as a kernel that computes the lower half only.

Newton-Schulz steps consist of such matmuls: the Gram matrix, and its square, since a Gram matrix is symmetric. The kernel stores
every tile and its transpose, so that it needs about half the FLOPs of a general matmul.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


def symmetric_matmul(x: Tensor, *, alpha: float = 1.0, beta: float = 0.0, diagonal: float = 0.0) -> Tensor:
    """Return alpha X X^T + beta X + diagonal I, [batch, m, m], accumulated in float32.

    Args:
        x: [batch, m, n], contiguous, 16-bit; with beta m = n, and X is symmetric.
    """
    batch, rows, columns = x.shape
    out = torch.empty(batch, rows, rows, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, TILE)
    # Programs of one matrix follow one another, so that the matrix stays in the L2 cache.
    _symmetric_matmul[(tiles * (tiles + 1) // 2, batch)](
        x,
        out,
        alpha,
        beta,
        diagonal,
        ROWS=rows,
        COLUMNS=columns,
        ADD=beta != 0.0,
        TILE=TILE,
        BLOCK=64,
        num_warps=8,
        num_stages=3,
    )
    return out


@triton.jit
def _symmetric_matmul(
    x,
    out,
    alpha,
    beta,
    diagonal,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Tile (i, j) with j <= i has the number i (i + 1) / 2 + j.
    number = tl.program_id(0)
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    x += batch * ROWS * COLUMNS
    out += batch * ROWS * ROWS
    at_i, at_j, inner = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    # Rows beyond the last one repeat others; their results are not stored.
    from_i = x + (at_i % ROWS)[:, None] * COLUMNS + inner[None, :]
    from_j = x + (at_j % ROWS)[:, None] * COLUMNS + inner[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        if COLUMNS % BLOCK == 0:
            left, right = tl.load(from_i), tl.load(from_j)
        else:
            inside = (start + inner < COLUMNS)[None, :]
            left, right = tl.load(from_i, mask=inside, other=0.0), tl.load(from_j, mask=inside, other=0.0)
        total = tl.dot(left, right.T, total)
        from_i += BLOCK
        from_j += BLOCK
    total *= alpha
    inside = (at_i < ROWS)[:, None] & (at_j < ROWS)[None, :]
    at = at_i[:, None] * ROWS + at_j[None, :]
    if ADD:
        total += beta * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if i == j:
        total += tl.where(at_i[:, None] == at_j[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    if i != j:
        # The upper half.
        inside = (at_j < ROWS)[:, None] & (at_i < ROWS)[None, :]
        tl.store(out + at_j[:, None] * ROWS + at_i[None, :], result.T, mask=inside)
