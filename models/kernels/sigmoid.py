"""The logistic function, for kernels that are bound by their instructions."""

# Kernels take values that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton: pip install triton") from error


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of float32, to 1e-6 of it. The square of a root is two instructions, a quotient seven, and they are most
    of `tl.sigmoid`."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root
