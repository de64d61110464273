"""A kernel's launch for one case of sizes, prepared once.

Triton looks at every argument of every launch, and then for the device, its stream, hooks and scratch memory, which
takes the host longer than a short kernel takes the device. What it would find is fixed by the case here, so from the
second time on the C function that starts the compiled kernel is called with addresses alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class Launch:
    """kernel[grid](*pointers, *values, **options) with all but the pointers fixed.

    The pointers' dtypes, which of them are None, and the device must be the same at every call, the first one not None:
    whoever keeps a Launch keeps it by what decides these. The kernel starts on that device's current stream. On "meta"
    nothing starts.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        self._kernel, self._grid, self._values, self._options = kernel, (*grid, 1, 1)[:3], values, options
        self._device = -1
        # By the pointers that are no multiples of 16 bytes: Triton reads vectors from those that are. A model's
        # parameters lie one after the other in a trainer's memory, anywhere.
        self._prepared: dict[tuple[int, ...], _Prepared] = {}
        self._hooks: Any = None

    def __call__(self, *pointers: Tensor | None) -> None:
        addresses = [None if x is None else x.data_ptr() for x in pointers]
        low = 0
        for address in addresses:
            if address is not None:
                low |= address
        odd = tuple(i for i, x in enumerate(addresses) if x is not None and x & 15) if low & 15 else ()
        prepared = self._prepared.get(odd)
        if prepared is None:
            self._first(odd, pointers)
        elif torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self(*pointers)
        elif prepared.straight is None or _hooked(self._hooks):
            prepared.ordinary(*addresses, *self._values)
        else:
            start, before, after = prepared.straight
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            start(*before, stream, *after, *addresses, *self._values)

    def _first(self, odd: tuple[int, ...], pointers: tuple[Tensor | None, ...]) -> None:
        assert pointers[0] is not None
        if pointers[0].is_meta:
            return
        self._device = pointers[0].get_device()
        launch = self._kernel[self._grid]
        if self._device < 0:
            launch(*pointers, *self._values, **self._options)
            return
        with torch.cuda.device(self._device):
            compiled = launch(*pointers, *self._values, **self._options)
            # Triton's interpreter compiles nothing.
            if compiled is not None:
                self._hooks = _runtime()
                count = len(pointers) + len(self._values)
                found = None if self._hooks is None else straight(compiled, self._grid, count)
                self._prepared[odd] = _Prepared(compiled[self._grid], found)


@dataclass(frozen=True)
class _Prepared:
    """A compiled kernel: Triton's own launcher, and the C function behind it with what stands around the stream."""

    ordinary: Callable[..., None]
    straight: tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]] | None


def over_elements(*kernels: Any, block: int) -> Callable[[torch.device, torch.dtype, int], tuple[Launch, ...]]:
    """(device, dtype, number of elements) -> a launch of each kernel, kept for the next time.

    The kernels take pointers to tensors of so many elements, that number, and how many of them a program takes.
    """

    @lru_cache(4096)
    def launches(device: torch.device, dtype: torch.dtype, numel: int) -> tuple[Launch, ...]:
        return tuple(Launch(kernel, (-(-numel // block),), numel, block, num_warps=4) for kernel in kernels)

    return launches


def aligned(x: Tensor) -> Tensor:
    """x contiguous and at an address that vectors of 16 bytes may be read from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def straight(
    compiled: Any, grid: tuple[int, ...], count: int
) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]] | None:
    """The C function behind a compiled kernel of `count` arguments, and its own before and after the stream.

    Triton's releases differ in them, so its launcher is called once with that function replaced, to see what it passes
    on. None where that is not a stream among fixed values and then the kernel's arguments one by one (Triton 3.7 packs
    them), or where the kernel wants scratch memory, which every launch has to allocate.
    """
    launcher = compiled.run
    start = getattr(launcher, "launch", None)
    if start is None or any(getattr(launcher, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        return None
    seen: list[Any] = []
    stream, arguments = object(), [object() for _ in range(count)]
    recorder = copy.copy(launcher)
    recorder.launch = lambda *passed: seen.extend(passed)
    try:
        recorder(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    except (AttributeError, TypeError):
        return None
    fixed, last = seen[: len(seen) - count], seen[len(seen) - count :]
    if len(seen) < count or any(x is not y for x, y in zip(last, arguments, strict=True)):
        return None
    places = [i for i, x in enumerate(fixed) if x is stream]
    if len(places) != 1:
        return None
    return start, tuple(fixed[: places[0]]), tuple(fixed[places[0] + 1 :])


def _runtime() -> Any:
    """Where Triton keeps a profiler's hooks; None before 3.4, which kept them elsewhere."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime


def _hooked(runtime: Any) -> bool:
    """Whether a profiler wants to hear of launches; Triton 3.4 has one hook or None, later ones have chains."""
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )
