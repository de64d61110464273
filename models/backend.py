"""Which tensors the Triton kernels accept."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def is_supported(x: Tensor) -> bool:
    """Whether the kernels compute with x: where they can, and not while torch.compile, which makes kernels of its own,
    reads the code."""
    return available(x) and not torch.compiler.is_compiling()


def available(x: Tensor) -> bool:
    """Whether x lies on CUDA, where Triton is installed, and is not float64."""
    return x.is_cuda and x.dtype != torch.float64 and _installed()


def vector_decay_takes(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, mild: bool = True) -> bool:
    """Whether `gla.py` is for this recurrence: 16 bits, a decay a channel, more tokens than decoding has, and
    heads of sizes for which it was measured to be the fastest, more for mild decays; it takes values of more channels."""
    if log_decay.shape[-1] == 1 or q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return False
    if q.shape[-1] > (128 if mild else 64) or v.shape[-1] > 128 or not available(q):
        return False
    # Numbers of a row are counted by 32 bits.
    if not q.numel() or not 0 < v.numel() < 2**31 * v.shape[0]:
        return False
    return q.shape[1] > 16 or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_decay)))


def cpu_kernel(name: str) -> ModuleType | None:
    """Return `models.kernels.cpu.<name>`, or None while torch.compile traces the code and in an export, which has none."""
    return None if torch.compiler.is_compiling() else _cpu_module(name)


@cache
def _cpu_module(name: str) -> ModuleType | None:
    try:
        return import_module(f".kernels.cpu.{name}", __package__)
    except ImportError:
        return None


@cache
def _installed() -> bool:
    """Return whether Triton is installed, and whether kernels are there: an export whose mixers use none has none."""
    try:
        import triton  # noqa: F401

        from .kernels.launch import Launch  # noqa: F401
    except ImportError:
        return False
    return True
