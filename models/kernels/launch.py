"""Kernel launches with fixed arguments, prepared once.

For every launch Triton inspects all arguments, the device, its stream, hooks and scratch memory. On the host this takes longer
than a short kernel takes on the device. A `Launch` fixes all of these. From its second call on it calls the C function that
starts the compiled kernel, with addresses only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# The kernels' files import both names from here.
try:
    import triton
    import triton.language as tl  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the kernels of models/kernels need Triton: pip install triton; forms of plain PyTorch work without"
    ) from error

_LARGEST_GRID = 65_535  # of the second and third axis


class Launch:
    """Call kernel[grid](*pointers, *values, **options) with everything fixed except the pointers.

    The device, the pointers' dtypes and which of them are None must be the same at every call. The first pointer must not be
    None. A cache of launches therefore needs all of these in its key. The kernel starts on the current stream of the device.
    On "meta" no kernel starts.

    Raises ValueError for a grid that CUDA cannot start.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        self._kernel, self._grid, self._values, self._options = kernel, (*grid, 1, 1)[:3], values, options
        if max(self._grid[1:]) > _LARGEST_GRID:
            raise ValueError(
                f"{kernel.__name__} needs a grid of {self._grid} programs. CUDA starts at most {_LARGEST_GRID} along the second "
                "and third axis, which count sequences times heads: use a smaller batch (batch.micro_batch_size in training)"
            )
        self._device = -1
        # The key is the pointers that are not multiples of 16 bytes: Triton reads vectors from the others. A parameter in a
        # trainer's flat memory may have any address.
        self._prepared: dict[tuple[int, ...], _Prepared] = {}

    def __call__(self, *pointers: Tensor | None) -> None:
        addresses = [None if x is None else x.data_ptr() for x in pointers]
        low = 0
        for address in addresses:
            if address is not None:
                low |= address
        unaligned = tuple(i for i, x in enumerate(addresses) if x is not None and x & 15) if low & 15 else ()
        prepared = self._prepared.get(unaligned)
        if prepared is None:
            self._first(unaligned, pointers)
        elif torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self(*pointers)
        elif prepared.direct is None or _profiled():
            prepared.launcher(*addresses, *self._values)
        else:
            start, before, after = prepared.direct
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            start(*before, stream, *after, *addresses, *self._values)

    def _first(self, unaligned: tuple[int, ...], pointers: tuple[Tensor | None, ...]) -> None:
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
                count = len(pointers) + len(self._values)
                direct = direct_launch(compiled, self._grid, count)
                self._prepared[unaligned] = _Prepared(compiled[self._grid], direct)


@dataclass(frozen=True)
class _Prepared:
    """Hold Triton's launcher of a compiled kernel, and the result of `direct_launch`."""

    launcher: Callable[..., None]
    direct: tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]] | None


def over_elements(*kernels: Any, block: int) -> Callable[[torch.device, torch.dtype, int], tuple[Launch, ...]]:
    """Return a cached function (device, dtype, number of elements) -> one launch per kernel.

    The kernels' arguments are pointers to tensors of this number of elements, the number, and the elements per program.
    """

    @lru_cache(4096)
    def launches(device: torch.device, dtype: torch.dtype, numel: int) -> tuple[Launch, ...]:
        return tuple(Launch(kernel, (-(-numel // block),), numel, block, num_warps=4) for kernel in kernels)

    return launches


def dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """Return the tensors' dtypes, None for None, as the key of a cache of launches."""
    return tuple(None if x is None else x.dtype for x in tensors)


def check_addresses(length: int, width: int) -> None:
    """Raise ValueError if a kernel cannot address one sequence, or one row of packed ones: `length` tokens of `width` numbers.

    For kernels with 32-bit offsets inside a sequence.
    """
    if length * width >= 2**31:
        raise ValueError(
            f"{length:,} tokens of {width:,} numbers in one row of the batch overflow 32-bit addresses: use shorter sequences, "
            "parallel.context in training, or form='chunked'"
        )


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy that is contiguous and begins at a multiple of 16 bytes, for vector loads."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def packed(x: Tensor) -> Tensor:
    """Return `aligned` with the strides of its shape. A contiguous tensor may have any stride in an axis of one element."""
    return aligned(x).view(x.shape)


def direct_launch(
    compiled: Any, grid: tuple[int, ...], count: int
) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the C function that starts a compiled kernel, and its fixed arguments before and after the stream.

    count: the number of the kernel's arguments. Triton's releases pass different fixed arguments, so this calls Triton's
    launcher once with a recorder in place of the C function. Returns None if the recorded call is not fixed values around one
    stream, followed by the kernel's arguments (Triton 3.7 packs them). Returns None also for a kernel with scratch memory,
    which every launch must allocate.
    """
    launcher = compiled.run
    start = getattr(launcher, "launch", None)
    if start is None or any(getattr(launcher, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        return None
    recorded: list[Any] = []
    stream, arguments = object(), [object() for _ in range(count)]
    recorder = copy.copy(launcher)
    recorder.launch = lambda *passed: recorded.extend(passed)
    try:
        recorder(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    except (AttributeError, TypeError):
        return None
    fixed, last = recorded[: len(recorded) - count], recorded[len(recorded) - count :]
    if len(recorded) < count or any(x is not y for x, y in zip(last, arguments, strict=True)):
        return None
    places = [i for i, x in enumerate(fixed) if x is stream]
    if len(places) != 1:
        return None
    return start, tuple(fixed[: places[0]]), tuple(fixed[places[0] + 1 :])


def _profiled() -> bool:
    """Return whether a profiler has set launch hooks. Triton's launcher calls them, the C function does not."""
    return bool(triton.knobs.runtime.launch_enter_hook.calls or triton.knobs.runtime.launch_exit_hook.calls)
