"""Run the kernels on a GPU if this process sees one, else in Triton's interpreter, which supports float32 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# (module, its cached functions that make launches, constants of it by name)
Replace = Callable[..., None]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replace]:
    """Replace constants of a module's launches: with few programs, each computes several tiles, as in a large batch."""
    cleared: list[Any] = []

    def replaced(module: Any, launches: list[Any], **constants: Any) -> None:
        cleared.extend(launches)
        for cached in launches:
            cached.cache_clear()
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)

    yield replaced
    for cached in cleared:
        cached.cache_clear()


def apart(x: Tensor) -> Tensor:
    """Return x as a view with NaN between its elements. Neither the view nor its gradient is contiguous, as after a split."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


@torch.no_grad()
def check_nan(exact: Callable[..., Sequence[Tensor | None]], kernels: Any, inputs: Sequence[Tensor | None]) -> None:
    """Check that outputs of `kernels` are NaN wherever a NaN in one input makes those of `exact` NaN."""
    for number, x in enumerate(inputs):
        if x is None or not x.numel():
            continue
        spoilt = x.clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[x.numel() // 2] = torch.nan
        given = [*inputs[:number], spoilt, *inputs[number + 1 :]]
        expected = exact(*(None if y is None else y.double() for y in given))
        for actual, reference in zip(kernels(*given), expected, strict=True):
            if actual is not None and reference is not None:
                assert not (reference.isnan() & ~actual.isnan()).any(), f"finite outputs with NaN in input {number}"


@pytest.fixture(autouse=True, scope="session")
def _one_dtype_per_pointer() -> Iterator[None]:
    """Fail if a prepared launch gets another dtype than at its first call. On CUDA it would read the first dtype."""
    try:
        from models.kernels.launch import Launch, dtypes
    except ImportError:  # Triton is not installed
        yield
        return
    first: dict[Launch, tuple[torch.dtype | None, ...]] = {}
    call = Launch.__call__

    def checked(launch: Launch, *pointers: Tensor | None) -> None:
        given = dtypes(*pointers)
        assert first.setdefault(launch, given) == given, launch._kernel
        call(launch, *pointers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", checked)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Return "cuda", or "cpu" with a patched interpreter. Skip the test if Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton runs these in its interpreter")
    if torch.cuda.is_available():
        return "cuda"
    from triton.runtime import interpreter

    # Loop bounds in the interpreter are arrays of one element. NumPy 2.4 no longer converts them to integers.
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    convert = interpreter._convert_float

    # The interpreter truncates float32 to bfloat16. A device rounds.
    def rounding(data, of, to, mode):
        if to.primitive_bitwidth == 32:
            return convert(data, of, to, mode)
        return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy()

    interpreter._convert_float = rounding

    # The interpreter's maximum and minimum keep NaN. Those of a device keep the other number, unless propagate_nan says so.
    for name, keep_number in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        operation = partialmethod(interpreter.InterpreterBuilder.binary_op, op=keep_number)
        setattr(interpreter.InterpreterBuilder, name, operation)
    return "cpu"
