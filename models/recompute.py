"""Keep less for the backward pass: what a cheap operation makes is forgotten, and made again where a gradient needs it.

A linear map keeps its input, for the gradient of its weight. Where that input is made by an elementwise operation or a norm
from tensors that are kept anyway, the backward pass can make it once more: selective recomputation (Korthikanti et al. 2022,
arXiv 2205.05198) of single operations, so that no product and no recurrence is computed twice.

An operation says by `forgettable` how its result is made again. Inside `forgetting()` whoever would keep that result for the
backward pass, or a view of it, keeps the operation and its inputs instead. Everything else is kept as ever, and outside of it
nothing changes. Gradients stay the same to the last bit: the same operation reads the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_ACTIVE: ContextVar[bool] = ContextVar("forgetting", default=False)


@contextmanager
def forgetting(active: bool = True) -> Iterator[None]:
    """Inside, results that are `forgettable` are not kept for the backward pass; active=False or no gradients: they are."""
    if not (active and torch.is_grad_enabled()):
        yield
        return
    token = _ACTIVE.set(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_keep, _remember):
            yield
    finally:
        _ACTIVE.reset(token)


def forgettable(results: Tensor | tuple[Tensor, ...], function: Callable[..., Any], *inputs: Any) -> None:
    """Say that function(*inputs), called in the backward pass without gradients, makes `results` again, bit for bit.

    Tensors among the inputs are held, or forgotten in their turn; other inputs, and what the function reads besides, must stay
    as they are.
    """
    # A compiler chooses by itself what it makes again.
    if torch.compiler.is_compiling() or not _ACTIVE.get():
        return
    recipe = _Recipe(function, inputs)
    for place, y in enumerate((results,) if isinstance(results, Tensor) else results):
        if y._base is None:  # else its memory holds more than it
            # Said of the memory, so that it is true of views and aliases too, and no longer than the memory lives.
            y.untyped_storage()._made = _Made(recipe, place, y.dtype, y._version)  # type: ignore[attr-defined]


class _Made(NamedTuple):
    """How the tensor of a memory is made, as it was at a version of it."""

    recipe: _Recipe
    place: int
    dtype: torch.dtype
    version: int


class _Held(NamedTuple):
    """A tensor that is kept, and its version then."""

    tensor: Tensor
    version: int


class _Forgotten(NamedTuple):
    """In place of a tensor: the result of a recipe in whose memory it lay, and where."""

    recipe: _Recipe
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Recipe:
    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        # Detached: a weight that ZeRO 3 takes away has its values here still.
        self._function = function
        self._inputs = [_keep(x.detach()) if isinstance(x, Tensor) else x for x in inputs]
        self._results: tuple[Tensor, ...] = ()

    def result(self, place: int) -> Tensor:
        """One of the results. They are made at the first call, and go when the graph lets go of the last that needs them."""
        if not self._results:
            inputs = [_remember(x) if isinstance(x, _Held | _Forgotten) else x for x in self._inputs]
            with torch.no_grad():
                made = self._function(*inputs)
            self._results = (made,) if isinstance(made, Tensor) else tuple(made)
        return self._results[place]


def _keep(x: Tensor) -> _Held | _Forgotten:
    made: _Made | None = getattr(x.untyped_storage(), "_made", None)
    if made is None or (made.dtype, made.version) != (x.dtype, x._version):
        # An operation that keeps its own result must not hold, by way of the tensor, itself.
        return _Held(x if x.is_leaf else x.detach(), x._version)
    return _Forgotten(made.recipe, made.place, x.size(), x.stride(), int(x.storage_offset()))


def _remember(kept: _Held | _Forgotten) -> Tensor:
    if isinstance(kept, _Forgotten):
        return kept.recipe.result(kept.place).as_strided(kept.size, kept.stride, kept.offset)
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            f"a tensor {list(kept.tensor.shape)} that the backward pass needs was changed in place after it was kept (version "
            f"{kept.version}, now {kept.tensor._version}): work on a copy"
        )
    return kept.tensor


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), computed again in the backward pass instead of keeping its intermediate results."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
