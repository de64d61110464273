"""Run the code paths of CUDA on the device "meta": allocations and saved tensors are the same, and nothing is computed.

The Python of `models/kernels` runs as it is and launches nothing, so a new kernel needs no code here. The kernels of
flash-linear-attention and of PyTorch have stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from models import kernels
from models.backend import cuda_on_meta
from models.operators.gla.select_kernel import GLAArguments, is_fixed


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Let tensors on "meta" take the paths of tensors on a Hopper GPU."""
    import_kernels()
    stand_ins = {
        "fla_form": _fla_form,
        "fla_refuses_scalar_gradient": lambda: True,  # the project's kernels compute the gradients of these decays
        "chunk_form": _chunk_form,  # the original selects its chunks by values
        "fla_scan": _Scan.apply,
        "dot_product": _attention,
    }
    with cuda_on_meta(stand_ins):
        yield


@cache
def import_kernels() -> None:
    """Import `models/kernels` without Triton: a stand-in module defines kernels that refuse to launch."""
    if importlib.util.find_spec("triton") is not None:
        return
    triton: Any = ModuleType("triton")
    triton.language = ModuleType("triton.language")
    triton.language.constexpr = lambda value: value
    triton.jit = _jit
    triton.cdiv = lambda x, y: -(-x // y)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    modules = {"triton": triton, "triton.language": triton.language}
    sys.modules.update(modules)
    try:
        for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            if not module.name.startswith(f"{kernels.__name__}.cpu"):
                importlib.import_module(module.name)
    finally:
        for name in modules:
            del sys.modules[name]


def _jit(kernel: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Stand for `triton.jit`, with and without options."""
    return _jit if kernel is None else _Unlaunchable()


class _Unlaunchable:
    def __getitem__(self, grid: object) -> NoReturn:
        raise ImportError("the kernels of models/kernels need Triton: pip install triton")


def _fla_form(selection: object, x: GLAArguments) -> tuple[Tensor, Tensor]:
    return _chunk_form(x)


def _chunk_form(x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Allocate as `models.operators.gla.fla`, with every decay that is not fixed as one per channel."""
    q, k, v, log_decay = x[:4]
    if log_decay.shape[-1] == 1 and is_fixed(log_decay):
        return _SimpleGla.apply(q, k, v)
    log_decay = log_decay.float().clamp_min(-80.0)
    return _Gla.apply(q, k, v, log_decay.expand(q.shape).contiguous())


def _states(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    batch, length, heads, dim_k = k.shape
    return k.new_empty(batch, -(-length // _CHUNK), heads, dim_k, v.shape[-1], dtype=dtype)


def _final_state(k: Tensor, v: Tensor) -> Tensor:
    batch, _, heads, dim_k = k.shape
    return k.new_empty(batch, heads, dim_k, v.shape[-1], dtype=torch.float32)


_CHUNK = 64


class _Gla(torch.autograd.Function):
    """Stand for fla.ops.gla.chunk (0.6.0), which saves q, k, v, the cumulated decay and float32 products within chunks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        cumulated = torch.empty_like(g)
        states, final = _states(k, v, k.dtype), _final_state(k, v)
        products = q.new_empty(*q.shape[:3], _CHUNK, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, cumulated, products)
        o = torch.empty_like(v)
        del states
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor, d_final: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, products = ctx.saved_tensors
        states = [_states(k, v, torch.float32) for _ in range(2)]
        dv = torch.empty_like(v)
        d_products = torch.empty_like(products)
        first = [torch.empty_like(x, dtype=torch.float32) for x in (q, k)]
        dg = torch.empty_like(g)
        dq, dk = (torch.empty_like(x) for x in first)
        del states, d_products, first
        return dq.to(q.dtype), dk.to(k.dtype), dv, dg


class _SimpleGla(torch.autograd.Function):
    """Stand for fla.ops.simple_gla.chunk (0.6.0) with one fixed decay per head, which saves q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        states, final = _states(k, v, k.dtype), _final_state(k, v)
        ctx.save_for_backward(q, k, v)
        o = torch.empty_like(v)
        del states
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor, d_final: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        states = [_states(k, v, torch.float32) for _ in range(2)]
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        del states
        return gradients


class _Scan(torch.autograd.Function):
    """Stand for fla.ops.hgrn.chunk (0.6.0), which saves the decay and the states."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor) -> Tensor:
        log_decay = log_decay.contiguous()
        cumulated, h = torch.empty_like(log_decay), torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(log_decay, h)
        del cumulated
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
        log_decay, h = ctx.saved_tensors
        cumulated, dx, d_log_decay = torch.empty_like(log_decay), torch.empty_like(h), torch.empty_like(log_decay)
        del cumulated
        return dx, d_log_decay


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Attention.apply(q, k, v)


class _Attention(torch.autograd.Function):
    """Stand for FlashAttention, which saves its inputs, its output and one float32 number per head and token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, y, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
