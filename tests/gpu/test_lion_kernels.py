"""LION's and MetaLA's kernels on a CUDA device: every dtype and head size, compared with float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.lion.bidirectional_attention import ProjectedDecayLogits
from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend
from models.operators.metala import metala_epilogue

# Largest relative error of the output and of a gradient.
TOLERANCES = {torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 4e-3), torch.float32: (3e-5, 5e-5)}
# A gradient of one number per head is a sum over tokens that may cancel. It cannot cancel for all of these heads.
HEADS = 13


def random_inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, bias: float) -> list[Tensor]:
    """Return q and k after LION's feature map, v, decay logits and dy."""
    batch, length, heads, dim = shape
    q, k, v, dy = (torch.randn(batch, length, heads, dim, device="cuda") for _ in range(4))
    q, k = (F.normalize(F.silu(x) + 0.5, dim=-1) for x in (q, k))
    gate = torch.randn(batch, length, heads, device="cuda") + bias
    return [x.to(dtype) for x in (q, k, v)] + [gate, dy.to(dtype)]


def relative_errors(tensors: list[Tensor], **arguments) -> list[float]:
    *inputs, dy = tensors
    form = arguments.pop("form")
    results = []
    for name, dtype in ((form, None), ("chunked", torch.float64)):
        q, k, v, gate = (x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs)
        y = attend(q, k, v, decay_logits=gate, form=name, **arguments)
        y.backward(dy.to(y.dtype))
        results.append([y.detach().double(), *(x.grad.double() for x in (q, k, v, gate))])
    return [((x - y).norm() / y.norm()).item() for x, y in zip(*results, strict=True)]


def check(tensors: list[Tensor], **arguments) -> None:
    forward, backward = TOLERANCES[tensors[0].dtype]
    errors = relative_errors(tensors, **arguments)
    assert errors[0] < forward, errors
    assert max(errors[1:]) < backward, errors


@pytest.mark.parametrize("form", ["triton_tile", "triton_chunk"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_dtype_and_head_size(form: str, dim: int, dtype: torch.dtype) -> None:
    for length in (100, 300):
        check(random_inputs((2, length, 2, dim), dtype, 1.0), form=form)


@pytest.mark.parametrize("form", ["triton_tile", "triton_chunk"])
@pytest.mark.parametrize("length", [1, 32, 64, 65, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lengths(form: str, length: int, dtype: torch.dtype) -> None:
    check(random_inputs((3, length, 2, 64), dtype, 3.0), form=form, normalized=length > 1)


@pytest.mark.parametrize(("length", "dim"), [(1, 32), (100, 32), (1000, 64), (300, 128)])
@pytest.mark.parametrize("kind", ["hippo", "strong", "padded", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("per_value_channel", [False, True])
def test_decays_per_channel(length: int, dim: int, kind: str, dtype: torch.dtype, per_value_channel: bool) -> None:
    """Use the kernels of gated linear attention in 16 bits, or those per channel of values. float32 uses PyTorch."""
    q, k, v, _, dy = random_inputs((1 if kind == "packed" else 2, length, 2, dim), dtype, 0.0)
    rates = torch.outer(torch.tensor([0.002, 0.1], device="cuda"), torch.arange(1, dim + 1, device="cuda"))
    decay = -rates * (20.0 if kind == "strong" else 1.0) * (0.5 + torch.rand(q.shape, device="cuda"))
    arguments: dict[str, object] = {"normalized": length > 1, "per_value_channel": per_value_channel}
    if kind == "padded":
        arguments["mask"] = torch.arange(length, device="cuda") % 7 < torch.tensor([[7], [5]], device="cuda")
    if kind == "packed":
        bounds = [0, 0, length // 3, length // 3, length]
        arguments["cu_seqlens"] = torch.tensor(bounds, device="cuda", dtype=torch.int32)
    results = []
    for form, exact_dtype in (("auto", None), ("chunked", torch.float64)):
        leaves = [x.detach().clone().to(exact_dtype or x.dtype).requires_grad_() for x in (q, k, v, decay)]
        y = attend(*leaves, form=form, **arguments)
        y.backward(dy.to(y.dtype))
        results.append([y.detach().double(), *(x.grad.double() for x in leaves)])
    # The kernels of gated linear attention store states in bfloat16.
    rounded = dtype != torch.float32 and not (per_value_channel and kind != "packed")
    forward, backward = TOLERANCES[torch.bfloat16 if rounded else dtype]
    errors = [((x - y).norm() / y.norm().clamp_min(1e-9)).item() for x, y in zip(*results, strict=True)]
    print(f"{kind} {length} x {dim} {dtype} {per_value_channel}: " + " ".join(f"{error:.1e}" for error in errors))
    assert errors[0] < forward, errors
    # One token has no decay, whose gradient is 0.
    assert max(errors[1 : 4 if length == 1 else 5]) < backward, errors


def errors_per_value_channel(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, rate: float, normalized: bool, form: str = "auto"
) -> list[float]:
    """Return the relative errors of y and all gradients with one mask per channel of values, from weak to strong."""
    batch, length, heads, dim_k, dim_v = shape
    q, k = (torch.randn(batch, length, heads, dim_k, device="cuda") for _ in range(2))
    q, k = (F.normalize(F.silu(x) + 0.5, dim=-1).to(dtype) for x in (q, k))
    v, dy = (torch.randn(batch, length, heads, dim_v, device="cuda").to(dtype) for _ in range(2))
    decay = -rate * torch.logspace(-3, 1, dim_v, device="cuda") * (0.5 + torch.rand(v.shape, device="cuda"))
    results = []
    for name, exact_dtype in ((form, None), ("chunked", torch.float64)):
        leaves = [x.detach().clone().to(exact_dtype or x.dtype).requires_grad_() for x in (q, k, v, decay)]
        y = attend(*leaves, form=name, normalized=normalized, per_value_channel=True)
        y.backward(dy.to(y.dtype))
        results.append([y.detach().double(), *(x.grad.double() for x in leaves)])
    errors = [((x - y).norm() / y.norm().clamp_min(1e-9)).item() for x, y in zip(*results, strict=True)]
    print(f"{shape} {dtype} {rate} {normalized}: " + " ".join(f"{error:.1e}" for error in errors))
    return errors


@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (64, 64), (128, 128), (24, 40), (32, 256), (128, 16)])
@pytest.mark.parametrize("length", [63, 64, 65, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalized", [True, False])
def test_masks_per_channel_of_values(dims: tuple[int, int], length: int, dtype: torch.dtype, normalized: bool) -> None:
    forward, backward = TOLERANCES[dtype]
    for rate in (0.01, 1.0):
        errors = errors_per_value_channel((2, length, 2, *dims), dtype, rate, normalized, "triton_value_channel")
        assert errors[0] < forward, (rate, errors)
        assert max(errors[1:]) < backward, (rate, errors)


@pytest.mark.parametrize("shape", [(50, 400, 8, 32, 32), (512, 64, 3, 64, 64), (1, 16384, 2, 32, 32)])
@pytest.mark.parametrize("rate", [0.001, 1.0])
def test_masks_per_channel_of_values_of_many_or_long_sequences(
    shape: tuple[int, int, int, int, int], rate: float
) -> None:
    errors = errors_per_value_channel(shape, torch.bfloat16, rate, True)
    assert errors[0] < 1e-2, errors
    assert max(errors[1:]) < 2e-2, errors


def test_masks_per_channel_of_values_are_equal_from_run_to_run() -> None:
    """Detect races: the kernels have no atomic additions."""
    q, k, v, _, dy = random_inputs((8, 1000, 4, 32), torch.bfloat16, 0.0)
    decay = -torch.rand(v.shape, device="cuda")
    runs = []
    for _ in range(3):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, decay)]
        y = attend(*leaves, per_value_channel=True)
        runs.append([y, *torch.autograd.grad(y, leaves, dy)])
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("length", [100, 129, 196, 256, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("biased", [True, False])
def test_projected_decay_logits_and_gradients(length: int, dtype: torch.dtype, biased: bool) -> None:
    q, k, v, _, dy = random_inputs((2, length, HEADS, 64), dtype, 0.0)
    x = torch.randn(2, length, 256, device="cuda", dtype=dtype)
    weight, bias = (torch.randn(*size, device="cuda").to(dtype) for size in ((HEADS, 256), (HEADS,)))
    weight = weight / 16
    results = []
    for form, exact_dtype in (("auto", None), ("chunked", torch.float64)):
        leaves = [t.detach().clone().to(exact_dtype or t.dtype).requires_grad_() for t in (q, k, v, x, weight, bias)]
        gate = ProjectedDecayLogits(*leaves[3:5], leaves[5] if biased else None)
        y = attend(*leaves[:3], decay_logits=gate, form=form)
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), *(t.grad for t in leaves[: 6 if biased else 5])])
    # The decay logits are rounded to the dtype, which affects all their gradients.
    limit = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}[dtype]
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert ((actual.double() - expected).norm() / expected.norm()).item() < limit, i


@pytest.mark.parametrize("length", [50, 128, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_feature_map_and_decay_logits_per_token_or_per_head(length: int, dtype: torch.dtype, dim: int) -> None:
    _, _, v, gate, dy = random_inputs((4, length, HEADS, dim), dtype, 3.0)
    for phi, normalized in (("silu", True), ("silu_paper", False)):
        q, k = (torch.randn(4, length, HEADS, dim, device="cuda").to(dtype) for _ in range(2))
        check([q, k, v, gate, dy], form="auto", phi=phi, normalized=normalized)
        check([q, k, v, gate[0, 0].clone(), dy], form="auto", phi=phi, normalized=normalized)


def test_many_short_sequences() -> None:
    """Use more sequences than Triton programs."""
    for length in (64, 100, 128):
        check(random_inputs((300, length, 4, 64), torch.bfloat16, 2.0), form="auto")


@pytest.mark.parametrize("length", [1, 7, 16, 31, 48, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("dim", [32, 40, 64])
def test_short_sequences_by_the_automatic_form(length: int, dim: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(random_inputs((5, length, 3, dim), dtype, 1.0), form="auto", normalized=length > 1)


@pytest.mark.parametrize("length", [129, 512, 700])
@pytest.mark.parametrize("dim", [32, 40, 64])
def test_many_sequences(length: int, dim: int) -> None:
    check(random_inputs((40, length, 8, dim), torch.bfloat16, 2.0), form="triton_chunk")
    check(random_inputs((40, length, 8, dim), torch.bfloat16, 6.0), form="triton_chunk", normalized=False)
    cu_seqlens = torch.tensor([0, 0, 30, 31, 64, length], device="cuda", dtype=torch.int32)
    check(random_inputs((1, length, 256, dim), torch.bfloat16, 2.0), form="triton_chunk", cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("form", ["triton_tile", "triton_chunk"])
def test_segments_and_padding(form: str) -> None:
    cu_seqlens = torch.tensor([0, 0, 30, 31, 64, 64, 420, 600, 600], device="cuda", dtype=torch.int32)
    check(random_inputs((1, 600, 3, 64), torch.bfloat16, 0.0), form=form, cu_seqlens=cu_seqlens)
    mask = torch.rand(3, 200, device="cuda") > 0.3
    check(random_inputs((3, 200, 2, 64), torch.bfloat16, 0.0), form=form, mask=mask)


def test_decay_gradient_over_a_long_sequence() -> None:
    """Use weak decays: the gradient of a token's decay sums over pairs that are thousands of tokens apart."""
    check(random_inputs((1, 16384, 2, 64), torch.bfloat16, 7.0), form="triton_chunk")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_sequences_split_into_segments(dtype: torch.dtype, dim: int) -> None:
    for normalized in (True, False):
        check(random_inputs((1, 3000, 2, dim), dtype, 5.0), form="auto", normalized=normalized)
    cu_seqlens = torch.tensor([0, 500, 501, 1900, 1984, 3000], device="cuda", dtype=torch.int32)
    check(random_inputs((1, 3000, 2, dim), dtype, 5.0), form="auto", cu_seqlens=cu_seqlens)


def test_automatic_form_selects_the_kernels() -> None:
    for length, dim, form in ((192, 64, "tile"), (256, 64, "chunk"), (256, 128, "tile"), (128, 192, "chunk")):
        q, k, v, gate, _ = random_inputs((2, length, 2, dim), torch.bfloat16, 0.0)
        form = f"triton_{form}"
        assert torch.equal(
            attend(q, k, v, decay_logits=gate),
            attend(q, k, v, decay_logits=gate, form=form),
        )


def test_memory_is_linear_in_length() -> None:
    peaks = []
    for length in (8192, 32768):
        tensors = [x.requires_grad_() for x in random_inputs((1, length, 4, 64), torch.bfloat16, 0.0)]
        *inputs, dy = tensors
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        attend(*inputs[:3], decay_logits=inputs[3]).backward(dy)
        peaks.append(torch.cuda.max_memory_allocated() - allocated)
    assert peaks[1] < 4.2 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("shape", [(2, 500, 8, 64, 128), (3, 77, 5, 24, 48)])
def test_metala_epilogue(dtype: torch.dtype, augment: bool, shape: tuple[int, int, int, int, int]) -> None:
    batch, length, heads, dim_k, dim_v = shape

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda").to(dtype)

    o, v = (random(batch, length, heads, dim_v) for _ in range(2))
    q, k = (random(batch, length, heads, dim_k) for _ in range(2))
    weight = torch.randn(heads * dim_k, device="cuda") * 0.3 if augment else None
    gate, dy = (random(batch, length, heads * dim_v) for _ in range(2))
    results = []
    for form in ("triton", "reference"):
        exact_dtype = torch.float64 if form == "reference" else None
        leaves = [
            None if x is None else x.detach().clone().to(exact_dtype or x.dtype).requires_grad_()
            for x in (o, q, k, v, weight, gate)
        ]
        y = metala_epilogue(*leaves, form=form)
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), *(x.grad for x in leaves if x is not None and x.grad is not None)])
    for i, (x, y) in enumerate(zip(*results, strict=True)):
        assert ((x.double() - y).norm() / y.norm()).item() < (1e-5 if dtype == torch.float32 else 4e-3), i
