"""No mixer copies a number from the host to the device or back in a layer, which a CUDA graph cannot record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models.mixers import MIXERS
from tests.models.mixer_cases import CASES, build, name_of
from tools.planning.meta_device import kernels_of_cuda

COPIES = [torch.tensor, torch.as_tensor, Tensor.new_tensor, Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.__bool__]


class CopiesOfHost(TorchFunctionMode):
    """Record calls of `COPIES`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in COPIES:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("layer", [0, 1])
def test_layers_copy_nothing_from_the_host(case: tuple[str, dict[str, Any]], layer: int) -> None:
    """Call the kernels of CUDA on the meta device, twice: the first call may make tables that stay."""
    layer = 0 if getattr(MIXERS[case[0]], "value_residual", False) else layer
    with torch.device("meta"):
        mixer = build(case, torch.bfloat16, size=128, heads=2, layer=layer)
        x = torch.empty(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    with kernels_of_cuda():
        mixer(x)
        with CopiesOfHost() as copies:
            mixer(x).sum().backward()
    assert not copies.names
