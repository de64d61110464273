"""MetaLA's epilogue: the reference against the equations, and the kernels against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.metala import metala, metala_epilogue
from tests.models.kernels.conftest import Replace, apart

SHAPES = [
    (2, 7, 3, 8, 16),
    (1, 33, 2, 24, 48),
    (1, 70, 4, 64, 128),
    (1, 1, 1, 4, 4),
    (2, 37, 16, 4, 8),
    (1, 40, 12, 3, 5),
]


def inputs(shape: tuple[int, int, int, int, int], augment: bool) -> list[Tensor | None]:
    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    keys, values = (batch, length, heads, dim_k), (batch, length, heads, dim_v)
    weight = 0.3 * random(heads * dim_k) if augment else None
    # Outputs of the recurrence are far smaller than the augmentation when decays are near 1.
    return [
        0.01 * random(*values),
        random(*keys),
        random(*keys).abs(),
        random(*values),
        weight,
        random(*values).flatten(2),
    ]


def outputs(tensors: list[Tensor | None], form: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    leaves = [None if x is None else x.detach().clone().to(device, dtype).requires_grad_() for x in tensors]
    y = apart(metala_epilogue(*(None if x is None else apart(x) for x in leaves), form=form))
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=device).view_as(y).to(dtype))
    return [y.detach(), *(x.grad for x in leaves if x is not None and x.grad is not None)]


@pytest.mark.parametrize("augment", [True, False])
def test_reference_equals_the_equations(augment: bool) -> None:
    o, q, k, v, weight, gate = inputs(SHAPES[1], augment)
    x = o
    if weight is not None:
        x = x + torch.sigmoid((q * weight.view(2, 24) * k).sum(-1, keepdim=True) * v)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    expected = F.silu(gate) * x.flatten(2)
    torch.testing.assert_close(metala_epilogue(o, q, k, v, weight, gate), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(
    device: str, shape: tuple[int, int, int, int, int], augment: bool, replace: Replace
) -> None:
    from models.kernels import metala as kernels

    replace(kernels, [kernels._launches], _FORWARD=(512, 8, 1), _BACKWARD=(128, 8, 1))
    tensors = inputs(shape, augment)
    if shape[1] == 1:
        # A tiny augmentation keeps its digits.
        tensors[0], tensors[3] = 1e-6 * tensors[0], 1e-4 * tensors[3]
    expected = outputs(tensors, "reference", torch.float64, device)
    actual = outputs(tensors, "triton", torch.float32, device)
    assert len(actual) == len(expected) == (7 if augment else 3)
    for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert ((x.double() - y).norm() / y.norm()).item() < 1e-5, i


@pytest.mark.parametrize("dim", [4, 16])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gate", lambda gate: gate[:, :1], r"gate \[2, 1, {0}\]: expected .* = \[2, 3, {0}\]"),
        ("aug_weight", lambda weight: weight[:1], r"aug_weight \[1\]: expected .* = \[{0}\]"),
    ],
)
def test_shapes_that_pytorch_would_repeat_are_refused(dim: int, name: str, change: Any, words: str) -> None:
    """Test heads of 4 channels, which PyTorch computes, and of 16, which the C++ kernel computes."""
    o, q, k, v, weight, gate = (None if x is None else x.float() for x in inputs((2, 3, 2, dim, dim), True))
    arguments = {"aug_weight": weight, "gate": gate}
    arguments[name] = change(arguments[name])
    for function, given in ((metala_epilogue, (o, q, k, v)), (metala, (q, k, v))):
        with pytest.raises(ValueError, match=words.format(2 * dim)):
            function(*given, **arguments)


def test_unknown_form_is_named() -> None:
    with pytest.raises(ValueError, match="'fast': allowed are auto, reference, triton"):
        metala_epilogue(*inputs(SHAPES[0], True), form="fast")
