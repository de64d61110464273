"""Elementwise activation recomputation: save less for the backward pass.

A linear layer saves its input for the gradient of its weight. If an elementwise operation or a norm computed that input
from tensors that are saved anyway, the backward pass can compute it again: selective recomputation (Korthikanti et al.
2022, arXiv 2205.05198) of single operations. No matmul and no recurrence is computed twice.

An operation declares with `recomputable` how its result is computed again. Inside `recompute_elementwise` autograd saves the
operation and its inputs instead of that result or a view of it. Everything else is saved as usual. Gradients are the same to
the last bit: the same operation reads the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_ACTIVE: ContextVar[bool] = ContextVar("recompute_elementwise", default=False)


@contextmanager
def recompute_elementwise() -> Iterator[None]:
    """Do not save `recomputable` results for the backward pass inside this context. No effect without gradients."""
    if not torch.is_grad_enabled():
        yield
        return
    token = _ACTIVE.set(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _ACTIVE.reset(token)


def recomputable(results: Tensor | tuple[Tensor, ...], function: Callable[..., Any], *inputs: Any) -> None:
    """Declare that function(*inputs), called without gradients, computes `results` again, bit for bit.

    Tensors among the inputs are saved, or recomputed in their turn. Other inputs, and all other values that the function
    reads, must not change.
    """
    # torch.compile decides about recomputation itself.
    if torch.compiler.is_compiling() or not _ACTIVE.get():
        return
    recomputation = _Recomputation(function, inputs)
    for place, y in enumerate((results,) if isinstance(results, Tensor) else results):
        if y._base is None:  # else the storage holds more than y
            # On the storage, so that views and aliases find it, and it ends with the memory.
            y.untyped_storage()._source = _Source(recomputation, place, y.dtype, y._version)  # type: ignore[attr-defined]


class _Source(NamedTuple):
    """Hold how to compute the tensor of a storage, at one version."""

    recomputation: _Recomputation
    place: int
    dtype: torch.dtype
    version: int


class _Saved(NamedTuple):
    """Hold a saved tensor and its version when it was saved."""

    tensor: Tensor
    version: int


class _View(NamedTuple):
    """Replace a saved tensor: the result of a recomputation and a view of it."""

    recomputation: _Recomputation
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Recomputation:
    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        # Detached: the values of a weight that ZeRO 3 releases stay here.
        self._function = function
        self._inputs = [_pack(x.detach()) if isinstance(x, Tensor) else x for x in inputs]
        self._results: tuple[Tensor, ...] = ()

    def result(self, place: int) -> Tensor:
        """Return one result. The first call computes all; the graph frees them with the last node that needs them."""
        if not self._results:
            inputs = [_unpack(x) if isinstance(x, _Saved | _View) else x for x in self._inputs]
            with torch.no_grad():
                results = self._function(*inputs)
            self._results = (results,) if isinstance(results, Tensor) else tuple(results)
        return self._results[place]


def _pack(x: Tensor) -> _Saved | _View:
    source: _Source | None = getattr(x.untyped_storage(), "_source", None)
    if source is None or (source.dtype, source.version) != (x.dtype, x._version):
        # Detached: an operation that saves its own result must not hold itself through the tensor.
        return _Saved(x if x.is_leaf else x.detach(), x._version)
    return _View(source.recomputation, source.place, x.size(), x.stride(), int(x.storage_offset()))


def _unpack(saved: _Saved | _View) -> Tensor:
    if isinstance(saved, _View):
        return saved.recomputation.result(saved.place).as_strided(saved.size, saved.stride, saved.offset)
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor {list(saved.tensor.shape)} that the backward pass needs was changed in place after it was saved (version "
            f"{saved.version}, now {saved.tensor._version}): work on a copy"
        )
    return saved.tensor


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), computed again in the backward pass instead of keeping its intermediate results."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
