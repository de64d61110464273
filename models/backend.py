"""Which tensors kernels support, and what torch.compile leaves out of its graphs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

# What `replaceable` calls instead, by name; None but inside `cuda_on_meta`.
_stand_ins: Mapping[str, Callable[..., Any]] | None = None


@contextlib.contextmanager
def cuda_on_meta(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Make tensors on "meta" use the code paths of CUDA tensors, so that a planner counts their allocations.

    The kernels of `models/kernels` launch nothing for such tensors. stand_ins: replaces every `replaceable` function, by
    its name, because these read values or call packages that "meta" does not have.
    """
    global _stand_ins
    previous, _stand_ins = _stand_ins, stand_ins
    try:
        yield
    finally:
        _stand_ins = previous


def replaceable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that has a stand-in inside `cuda_on_meta`."""
    name = function.__name__

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (function if _stand_ins is None else _stand_ins[name])(*args, **kwargs)

    return call


def on_cuda(x: Tensor) -> bool:
    """Return whether x is on CUDA, or on "meta" in its place."""
    return x.is_cuda or (_stand_ins is not None and x.is_meta)


def is_supported(x: Tensor) -> bool:
    """Return whether a Triton kernel is to compute with x: `available`, and torch.compile is not tracing.

    torch.compile generates kernels of its own.
    """
    return available(x) and not torch.compiler.is_compiling()


def available(x: Tensor) -> bool:
    """Return whether x is on CUDA, Triton is installed, and x is not float64."""
    return on_cuda(x) and x.dtype != torch.float64 and (x.is_meta or _installed())


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
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


def missing_fla_error() -> ImportError:
    """Return the error that a missing flash-linear-attention package causes."""
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
