"""A Triton kernel with several configurations."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCKS = (128, 256, 512, 1024)


@triton.autotune([triton.Config({"BLOCK": block}) for block in BLOCKS], key=[])
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    """Store y = 2 x for n numbers, by one program."""
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(y + i, 2 * tl.load(x + i, i < n), i < n)
