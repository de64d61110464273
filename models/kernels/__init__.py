"""Triton kernels, imported only where a CUDA device (or Triton's interpreter) runs them.

`lion.py` is LION's operator over `lion_tile.py` (short sequences, with `lion_whole.py` for the shortest) and
`lion_chunk.py` (long ones); its plain PyTorch reference is `models/bidirectional.py`. `metala_epilogue.py` holds its
reference itself and needs no Triton to import. The other kernels stand in for the lines of PyTorch beside which they
are called.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def takes(x: Tensor) -> bool:
    """Whether the kernels compute with x: where they can, and not while torch.compile, which makes kernels of its own,
    reads the code."""
    return can_take(x) and not torch.compiler.is_compiling()


def can_take(x: Tensor) -> bool:
    """Whether x lies on CUDA, where Triton is installed, and is not float64."""
    return x.is_cuda and x.dtype != torch.float64 and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
