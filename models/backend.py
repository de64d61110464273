"""Triton kernels, imported only where a CUDA device (or Triton's interpreter) runs them.

`lion.py` is LION's operator over `lion_tile.py` (short sequences, with `lion_whole.py` for the shortest) and
`lion_chunk.py` (long ones); its plain PyTorch reference is `models/operators/lion/bidirectional_attention.py`.
`vector_decay.py` is the recurrence
with a decay a channel, its reference `models/operators/gla/chunk.py`; `causal_map.py` that with a decay a head, of
short sequences.
`metala_epilogue.py` holds its reference itself and needs no Triton to import; `metala_core.py` is MetaLA's gate, recurrence
and epilogue as one step. The other kernels stand in for the lines of PyTorch beside which they are called.
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


def vector_decay_takes(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, mild: bool = True) -> bool:
    """Whether `vector_decay.py` is for this recurrence: 16 bits, a decay a channel, more tokens than decoding has, and
    heads of sizes for which it was measured to be the fastest, more for mild decays; it takes values of more channels."""
    if log_decay.shape[-1] == 1 or q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return False
    if q.shape[-1] > (128 if mild else 64) or v.shape[-1] > 128 or not can_take(q):
        return False
    # Numbers of a row are counted by 32 bits.
    if not q.numel() or not 0 < v.numel() < 2**31 * v.shape[0]:
        return False
    return q.shape[1] > 16 or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_decay)))


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
