"""Which tensors kernels support, and what torch.compile leaves out of its graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def is_supported(x: Tensor) -> bool:
    """Return whether a Triton kernel is to compute with x: `available`, and torch.compile is not tracing.

    torch.compile generates kernels of its own.
    """
    return available(x) and not torch.compiler.is_compiling()


def available(x: Tensor) -> bool:
    """Return whether x is on CUDA, Triton is installed, and x is not float64."""
    return x.is_cuda and x.dtype != torch.float64 and _installed()


def leave_out_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that torch.compile must call as it is, because tracing it fails or takes minutes.

    `torch.compiler.disable` would import the compiler with this file, which takes as long as importing torch.
    """
    eager: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal eager
        if eager is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            eager = torch.compiler.disable(function)
        return eager(*args, **kwargs)

    return call


def missing_fla() -> ImportError:
    """Return the error for a kernel of flash-linear-attention when the package is not installed."""
    return ImportError(
        "CUDA training in 16 bits needs flash-linear-attention and Triton: pip install flash-linear-attention "
        "(or train with precision.dtype=fp32, which uses plain PyTorch)"
    )


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
