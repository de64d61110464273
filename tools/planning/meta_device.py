"""The kernels of CUDA on the device "meta": they keep for the backward pass what they keep and allocate what they allocate.

The kernels of `models/kernels` stand for themselves. Their Python is imported once more with a Triton that launches nothing,
so that what a kernel keeps is written in one place, and one that is added needs nothing here. flash-linear-attention's and
PyTorch's own kernels, whose Python is not ours to import so, have stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from models import backend, kernels
from models.operators.gla import fla, gated_linear_attention, select_kernel
from models.operators.scan import linear_scan


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Inside, tensors on "meta" go the ways of tensors on CUDA: `is_cuda` is true of them, Triton is installed."""
    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: x.device.type in ("cuda", "meta"))),
        mock.patch.object(backend, "_installed", return_value=True),
        _imported(unlaunched()),
        mock.patch.object(fla, "fla_form", _fla_form),
        # As on Hopper, where the project's kernels then take these decays.
        mock.patch.object(select_kernel, "fla_refuses_scalar_gradient", return_value=True),
        mock.patch.object(gated_linear_attention, "chunk_form", _chunk_form),  # reads values, to choose its chunks
        mock.patch.object(linear_scan, "fla_scan", _Scan.apply),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
    ):
        yield


@cache
def unlaunched() -> dict[str, ModuleType]:
    """Every module of `models/kernels` by its name, but those of `cpu/`, with kernels that are launched in vain."""
    modules = (module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."))
    names = [name for name in modules if not name.startswith(f"{kernels.__name__}.cpu")]
    # What is imported for use stays in its place, as a module and as an attribute of the package.
    with _imported({**dict.fromkeys(names), **_triton()}), mock.patch.dict(vars(kernels)):
        return {name: importlib.import_module(name) for name in names}


@contextlib.contextmanager
def _imported(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Inside, these are the modules of those names, None for one that is not imported yet. What else is imported stays."""
    before = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update({name: module for name, module in modules.items() if module is not None})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _triton() -> dict[str, ModuleType]:
    triton: Any = ModuleType("triton")
    triton.language = ModuleType("triton.language")
    triton.language.constexpr = lambda value: value
    triton.jit = _jit
    triton.cdiv = lambda x, y: -(-x // y)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    return {"triton": triton, "triton.language": triton.language}


def _jit(kernel: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`triton.jit` of a kernel, or with options what takes the kernel."""
    return _Launches() if kernel is not None else _jit


class _Launches:
    """kernel[grid](...) for a kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def _fla_form(selection: object, *inputs: Any) -> tuple[Tensor, Tensor]:
    return _chunk_form(*inputs)


def _chunk_form(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocate as `models.operators.gla.fla`, with every decay that is not fixed as one per channel."""
    if log_decay.shape[-1] == 1 and select_kernel.is_fixed(log_decay):
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
    """fla.ops.gla.chunk (0.6.0): keeps q, k, v, the cumulated decay and, in float32, the products within chunks."""

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
    """fla.ops.simple_gla.chunk (0.6.0) with one fixed decay a head: keeps q, k and v."""

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
    """fla.ops.hgrn.chunk (0.6.0): keeps the decay and the states."""

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
    """FlashAttention: keeps its inputs, its output and a float32 number a head and token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, y, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
