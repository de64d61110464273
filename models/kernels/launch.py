"""A kernel's launch for one case of sizes, prepared once.

Triton looks at every argument of every launch, which takes the host longer than a short kernel takes the device. What
it would find is fixed by the case here, so from the second time on the compiled kernel is started with addresses alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Launch:
    """kernel[grid](*pointers, *values, **options) with all but the pointers fixed.

    The pointers' dtypes, which of them are None, and the device must be the same at every call, and addresses multiples
    of 16 bytes: whoever keeps a Launch keeps it by what decides these.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        self._kernel, self._grid, self._values, self._options = kernel, (*grid, 1, 1)[:3], values, options
        self._start: Any = None

    def __call__(self, *pointers: Tensor | None) -> None:
        if self._start is not None:
            self._start(*[None if x is None else x.data_ptr() for x in pointers], *self._values)
            return
        compiled = self._kernel[self._grid](*pointers, *self._values, **self._options)
        # Triton's interpreter compiles nothing.
        if compiled is not None:
            self._start = compiled[self._grid]
