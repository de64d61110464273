"""Products of linears by named algorithms of cuBLASLt: how they are named, and what is left to PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ActivationCheckpointingConfig, CublasLtConfig, ParallelConfig
from megatron_lite.engine import model_shard as own_layers
from megatron_lite.engine import tuned_matmul as module
from megatron_lite.engine.cublaslt import Product
from megatron_lite.engine.tuned_matmul import Products
from megatron_lite.parallel.fused_projections import join_fan_outs
from models.config import ModelConfig
from models.layers.lm_head import Head
from models.layers.mlp import MLPS

NAME = "64x32x48 nt bfloat16"
MADE = CublasLtConfig(device="NVIDIA H200", version=130100, algorithms={NAME: "ab" * 64})


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, shift: int = 0) -> Tensor:
    """At an address that is a multiple of 256, or so many elements after one."""
    memory = torch.randn(rows * columns + 256, dtype=dtype)
    begin = -memory.data_ptr() % 256 // memory.element_size() + shift
    return memory[begin : begin + rows * columns].view(rows, columns)


def test_names() -> None:
    x, weight, bias = matrix(64, 32), matrix(48, 32), matrix(1, 48)[0]
    gradient = matrix(64, 48)
    for a, b, more, addend, name in (
        (x, weight.t(), None, None, NAME),
        (x, weight.t(), bias, None, f"{NAME} bias"),
        (x, weight.t(), None, gradient, f"{NAME} sum"),
        (gradient, weight, None, None, "64x48x32 nn bfloat16"),
        (gradient.t(), x, None, None, "48x64x32 tn bfloat16"),
    ):
        product = Product.of(a, b, more, addend)
        assert product is not None
        assert (product.name, (product.m, product.k, product.n)) == (name, (*a.shape, b.shape[1]))


@pytest.mark.parametrize(
    "operands",
    [
        (matrix(64, 32, torch.float32), matrix(32, 48, torch.float32), None),
        (matrix(64, 32), matrix(32, 48, torch.float16), None),
        (matrix(64, 32), matrix(32, 48), torch.zeros(48)),
        (matrix(64, 64)[:, :32], matrix(32, 48), None),
        (matrix(64, 32, shift=8), matrix(32, 48), None),
        (matrix(64, 32), matrix(32, 48), matrix(1, 48, shift=8)[0]),
        (matrix(64, 32), matrix(32, 48), None, matrix(48, 64).t()),
        (matrix(64, 32), matrix(32, 48), None, None, matrix(64, 48, shift=8)),
    ],
    ids=[
        "float32",
        "two dtypes",
        "a float32 bias",
        "rows apart",
        "another address",
        "another address of the bias",
        "a sum with a transpose",
        "to another address",
    ],
)
def test_what_lies_otherwise_has_no_name(operands: tuple[Tensor | None, ...]) -> None:
    assert Product.of(*operands) is None


def test_on_a_cpu_they_are_pytorchs() -> None:
    layer, x = nn.Linear(32, 48, dtype=torch.bfloat16), matrix(2, 32)[None].requires_grad_()
    wanted = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    join_fan_outs(layer, None, Products(MADE))
    y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert type(y.grad_fn).__name__.startswith("_FanOut") or "ViewBackward" in type(y.grad_fn).__name__
    for found, right in zip(torch.autograd.grad(y.square().sum(), (x, *layer.parameters())), wanted, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_sum_with_the_residual_stream(mlp: str, bias: bool) -> None:
    config = ModelConfig(vocab_size=8, num_layers=1, hidden_size=16, num_heads=2, mlp=mlp, mlp_bias=bias)
    torch.manual_seed(0)
    layer = MLPS[mlp](config).double()
    x, residual = (torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = []
    for joined in (False, True):
        if joined:
            join_fan_outs(layer, None, Products(MADE))
        y = layer(x, residual)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, residual, *layer.parameters()))])
    assert torch.equal(results[0][0], residual + layer(x))
    for found, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_products_of_the_loss(library: _Library, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(vocab_size=24, num_layers=1, hidden_size=16, num_heads=2)
    torch.manual_seed(0)
    head = Head(config)
    hidden, labels = torch.randn(3, 5, 16, requires_grad=True), torch.randint(0, 24, (3, 5))
    shapes = []
    products = Products(MADE)
    mm = products.mm
    monkeypatch.setattr(products, "mm", lambda a, b, out: shapes.append((*a.shape, b.shape[1])) or mm(a, b, out=out))
    results = []
    for joined in (False, True):
        if joined:
            join_fan_outs(head, None, products)
        loss = head(hidden, labels=labels)
        results.append([loss, *torch.autograd.grad(loss, (hidden, head.weight))])
    assert shapes == [(15, 16, 24), (15, 24, 16)]
    for found, wanted in zip(*reversed(results), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, True),
        ({"pipeline": 2, "zero_stage": 2}, True),
        ({"cublaslt": CublasLtConfig()}, False),
        ({"tensor": 2}, False),
        ({"cuda_graph": True}, False),
        ({"activation_checkpointing": ActivationCheckpointingConfig(mode="selective")}, False),
        ({"activation_checkpointing": ActivationCheckpointingConfig(mode="full")}, True),
    ],
)
def test_where_they_are_used(changes: dict[str, Any], chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(own_layers, "join_fan_outs", lambda layer, tensor, products: joined.append(products))
    own_layers.place_layer(nn.Linear(4, 4), None, ParallelConfig(cublaslt=MADE).model_copy(update=changes))
    assert [products is not None for products in joined] == [chosen]


class _Library:
    """In place of cuBLASLt: says what it was asked for."""

    version = 130100

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.more: tuple[Tensor | None, ...] = ()

    def __call__(self, product: Product, algorithm: bytes, a: Tensor, b: Tensor, *more: Tensor | None) -> Tensor:
        self.asked.append((product.name, algorithm))
        self.more = more
        if algorithm == b"\0" * 64:
            raise RuntimeError("cublasLtMatmul failed with status 15")
        return a @ b


class _OnCuda(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Library:
    made = _Library()
    monkeypatch.setattr(module, "library", lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    return made


def _operands() -> tuple[Any, Any]:
    return matrix(64, 32).as_subclass(_OnCuda), matrix(48, 32).t().as_subclass(_OnCuda)


def test_a_named_product_is_computed_by_its_algorithm_and_no_other(library: _Library) -> None:
    a, b = _operands()
    products = Products(MADE)
    products.mm(a, b)
    products.mm(b.t().contiguous(), a.t().contiguous())
    assert library.asked == [(NAME, b"\xab" * 64)]
    out = matrix(64, 48)
    products.mm(a, b, out=out)
    assert library.more == (None, None, out)
    products.mm(a, b, out=matrix(64, 48, shift=8))
    assert len(library.asked) == 2


def test_what_pytorch_computes_goes_where_it_is_to_go() -> None:
    x, weight = matrix(64, 32), matrix(48, 32)
    out = torch.empty(64, 48, dtype=x.dtype)
    assert Products(MADE).mm(x, weight.t(), out=out) is out
    assert torch.equal(out, x @ weight.t())


def test_another_device_or_version_is_told_and_left_to_pytorch(library: _Library) -> None:
    a, b = _operands()
    for change in ({"device": "NVIDIA A100"}, {"version": 120900}):
        products = Products(MADE.model_copy(update=change))
        with pytest.warns(UserWarning, match=r"made for .*this is NVIDIA H200 with 130100.*tools.benchmark matmul"):
            assert torch.equal(products.mm(a, b), a @ b)
        products.mm(a, b)
    assert not library.asked


def test_a_refused_algorithm_is_named(library: _Library) -> None:
    products = Products(MADE.model_copy(update={"algorithms": {NAME: "00" * 64}}))
    with pytest.raises(RuntimeError, match=rf"algorithms: {NAME}: cublasLtMatmul failed with status 15"):
        products.mm(*_operands())
