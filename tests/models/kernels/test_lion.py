"""LION's Triton kernels against the float64 reference, forward and backward, in float32."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.lion.bidirectional_attention import ProjectedDecayLogits
from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend
from tests.models.kernels.conftest import Replace, apart, check_nan

KERNELS = ("triton_tile", "triton_chunk")


def outputs(tensors: list[Tensor], dy: Tensor, dtype: torch.dtype, **arguments) -> list[Tensor]:
    """Return y and the gradients of q, k, v and the decay."""
    q, k, v, gate = (x.detach().clone().to(dtype).requires_grad_() for x in tensors)
    decays = {"gate": {"decay_logits": apart(gate)}, "log_decay": {"log_decay": F.logsigmoid(gate)}, None: {}}
    # One logit per head for all tokens.
    decays["head"] = {"decay_logits": apart(gate[0, 0])}
    decay = decays[arguments.pop("decay")]
    y = attend(*(apart(x) for x in (q, k, v)), **decay, **arguments)
    apart(y).backward(dy.to(dtype))
    return [y.detach().double(), *(x.grad.double() for x in (q, k, v, gate) if x.grad is not None)]


def check(device: str, form: str, shape: tuple[int, int, int, int, int], tolerance: float = 2e-5, **arguments) -> None:
    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length + dim_k)
    draw = torch.randn if "phi" in arguments else torch.rand
    q, k = (draw(batch, length, heads, dim_k, generator=generator) + 0.1 for _ in range(2))
    v, dy = (torch.randn(batch, length, heads, dim_v, generator=generator) for _ in range(2))
    gate = torch.randn(batch, length, heads, generator=generator) * 2 + 2
    tensors = [x.to(device) for x in (q, k, v, gate)]
    arguments = {"decay": "gate", **arguments}
    expected = outputs(tensors, dy.to(device), torch.float64, form="recurrent", **arguments)
    actual = outputs(tensors, dy.to(device), torch.float32, form=form, **arguments)
    assert len(actual) == len(expected)
    for name, x, y in zip(("y", "dq", "dk", "dv", "d decay"), actual, expected, strict=False):
        assert ((x - y).norm() / y.norm()).item() < tolerance, name


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("decay", [None, "log_decay", "gate", "head"])
@pytest.mark.parametrize("normalized", [True, False])
def test_every_decay(device: str, form: str, decay: str | None, normalized: bool, replace: Replace) -> None:
    from models.kernels.lion import tile as lion_tile

    # The gradient of the gate in three iterations.
    replace(lion_tile, [lion_tile._backward_launches], _DECAY_BLOCK=32)
    check(device, form, (2, 70, 2, 16, 16), decay=decay, normalized=normalized)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 16, 16), (1, 64, 1, 32, 32), (1, 150, 2, 24, 40), (1, 33, 1, 8, 65), (1, 40, 1, 128, 80)]
)
def test_shapes_that_do_not_fill_their_tiles(device: str, form: str, shape: tuple[int, int, int, int, int]) -> None:
    check(device, form, shape)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("decay", [None, "log_decay", "gate", "head"])
@pytest.mark.parametrize("normalized", [True, False])
def test_single_tile_kernel(
    device: str,
    decay: str | None,
    normalized: bool,
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Run the kernels of short 16-bit sequences in float32, the only dtype of the interpreter."""
    if device == "cuda":
        pytest.skip("float32, which the kernels refuse on CUDA; tests/gpu/test_lion_kernels.py runs them in 16 bits")
    from models.kernels.lion import single_tile
    from models.kernels.lion import tile as lion_tile

    request.addfinalizer(single_tile.single_tile_backward.cache_clear)
    monkeypatch.setattr(lion_tile, "supports_single_tile", lambda _: True)
    monkeypatch.setattr(single_tile, "all_pairs_at_once", lambda _: at_once)
    single_tile.single_tile_backward.cache_clear()
    for length in (2, 20, 50, 64):
        check(device, "triton_tile", (2, length, 2, 16, 24), decay=decay, normalized=normalized)
    check(device, "triton_tile", (3, 64, 1, 16, 32), decay=decay, normalized=normalized)
    # Keys alone do not fill their tiles; the second sequence is all padding.
    mask = torch.tensor([[True], [False]]).expand(2, 64)
    check(device, "triton_tile", (2, 64, 1, 24, 32), decay=decay, normalized=normalized, mask=mask)
    check(device, "triton_tile", (1, 60, 2, 16, 16), decay=decay, cu_seqlens=torch.tensor([0, 7, 40, 40, 60]))


@pytest.mark.parametrize("decay", [None, "gate", "head"])
def test_middle_length_kernels(device: str, decay: str | None, replace: Replace) -> None:
    """Run the kernels of LION-s for 129 to 256 tokens in float32, the only dtype of the interpreter."""
    if device == "cuda":
        pytest.skip("float32, which the kernels refuse on CUDA; tests/gpu/test_lion_kernels.py runs them in 16 bits")
    from models.kernels.lion import single_tile
    from models.kernels.lion import tile as lion_tile

    # Several tiles of queries and of keys, the last ones not full.
    replace(
        single_tile,
        [single_tile.single_tile_backward],
        LONGEST=32,
        _MIDDLE=(16, 16, None),
    )
    replace(lion_tile, [lion_tile._forward_launches], _MIDDLE=(32, 16, 8, 1), middle_length=lambda _: True)
    for length in (33, 64):
        check(device, "triton_tile", (1, length, 2, 16, 24), decay=decay, normalized=length < 64)
    bounds = torch.tensor([0, 7, 40, 40, 50])
    check(device, "triton_tile", (1, 50, 1, 24, 16), decay=decay, cu_seqlens=bounds)


@pytest.mark.parametrize(
    ("length", "dim", "at_once"),
    [
        (32, 32, True),
        (64, 32, False),
        (128, 32, False),
        (32, 64, True),
        (64, 64, True),
        (65, 64, False),
        (128, 64, False),
    ],
)
def test_all_pairs_kernel_is_selected_where_measured_faster(
    device: str, length: int, dim: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the launched kernel, not the function that selects it. docs/results/kernels.md has the measurements."""
    from models.kernels.lion import single_tile
    from models.kernels.lion.common import LOGITS, LionCase

    monkeypatch.setattr(single_tile, "_device", lambda _: (132, 227 * 1024))
    case = LionCase(0, 2, length, 2, dim, dim, torch.bfloat16, torch.bfloat16, LOGITS, True, False)
    launch = single_tile.single_tile_backward(case)
    assert launch._kernel is (single_tile._lion_whole_backward if at_once else single_tile._lion_whole_backward_by_keys)


@pytest.mark.parametrize(
    ("length", "dim", "dtype", "whole"),
    [
        (128, 64, torch.bfloat16, True),
        (128, 64, torch.float16, True),
        (129, 64, torch.bfloat16, False),
        (128, 65, torch.bfloat16, False),
        (128, 64, torch.float32, False),
    ],
)
def test_single_tile_kernel_is_selected_where_measured_correct(
    device: str, length: int, dim: int, dtype: torch.dtype, whole: bool
) -> None:
    from models.kernels.lion.common import LOGITS, LionCase
    from models.kernels.lion.single_tile import supports_single_tile

    for dims in ((dim, 64), (64, dim)):
        assert supports_single_tile(LionCase(0, 2, length, 2, *dims, dtype, dtype, LOGITS, True, False)) is whole


@pytest.mark.parametrize(
    ("length", "dim", "change", "middle"),
    [
        (129, 64, {}, True),
        (256, 40, {}, True),
        (128, 64, {}, False),
        (257, 64, {}, False),
        (196, 65, {}, False),
        (196, 64, {"mode": 4}, False),
        (196, 64, {"normalized": False}, False),
        (196, 64, {"packed": True}, False),
        (196, 64, {"dtype": torch.float32}, False),
    ],
)
def test_middle_length_kernels_are_selected_where_measured_correct(
    device: str, length: int, dim: int, change: dict[str, object], middle: bool
) -> None:
    from models.kernels.lion.common import BIASED_LOGITS, LionCase
    from models.kernels.lion.single_tile import middle_length

    case = LionCase(0, 2, length, 2, dim, 64, torch.bfloat16, torch.bfloat16, BIASED_LOGITS, True, False)
    assert middle_length(dataclasses.replace(case, **change)) is middle


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("phi", ["silu", "silu_paper", "elu"])
@pytest.mark.parametrize("masked", [True, False])
def test_the_feature_map(device: str, form: str, phi: str, masked: bool) -> None:
    """Run the feature map in the operator's autograd node, and before it if there is padding."""
    # The feature map as printed in the paper is not always positive: normalizers may be close to 0.
    arguments = {"phi": phi, "normalized": phi != "silu_paper"}
    if masked:
        arguments["mask"] = (torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) > 0.3).to(device)
    check(device, form, (2, 40, 1, 24, 16), **arguments)


@pytest.mark.parametrize(("decay", "normalized"), [(None, True), ("gate", True), ("gate", False)])
def test_sequences_in_several_splits(
    device: str, decay: str | None, normalized: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Scan 5 chunks in splits of two. The fourth split is empty."""
    from models.kernels.lion import chunk_state as lion_states

    request.addfinalizer(lion_states._scan.cache_clear)
    monkeypatch.setattr(lion_states, "_splits", lambda *_: 4)
    lion_states._scan.cache_clear()
    cu_seqlens = torch.tensor([0, 30, 31, 64, 150], device=device) if normalized else None
    check(device, "triton_chunk", (1, 150, 1, 16, 24), decay=decay, normalized=normalized)
    check(device, "triton_chunk", (1, 150, 1, 16, 16), decay=decay, normalized=normalized, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("decay", [None, "gate"])
def test_packed_segments(device: str, form: str, decay: str | None) -> None:
    # Segments begin at the last token of a tile of 32 or of 64 tokens, or end after the first one.
    cu_seqlens = torch.tensor([0, 0, 30, 31, 65, 65, 96, 127, 161, 161], device=device)
    check(device, form, (1, 161, 1, 16, 16), decay=decay, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("decay", ["gate", "log_decay", "head"])
def test_padding(device: str, form: str, decay: str) -> None:
    mask = torch.rand(2, 75, generator=torch.Generator().manual_seed(1)) > 0.3
    check(device, form, (2, 75, 1, 16, 16), decay=decay, mask=mask.to(device))


@pytest.mark.parametrize("form", KERNELS)
def test_gradients_of_16_bit_gates_have_their_dtype(device: str, form: str) -> None:
    q, k, v = (torch.rand(1, 40, 1, 16, device=device) for _ in range(3))
    gate = torch.randn(1, 40, 1, device=device, dtype=torch.bfloat16).requires_grad_()
    attend(q, k, v, decay_logits=gate, form=form).square().sum().backward()
    exact = gate.detach().double().requires_grad_()
    attend(q.double(), k.double(), v.double(), decay_logits=exact, form="parallel").square().sum().backward()
    assert gate.grad is not None
    assert gate.grad.dtype == torch.bfloat16
    assert ((gate.grad - exact.grad).norm() / exact.grad.norm()).item() < 1e-2


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_projected_decay_logits_and_gradients(
    device: str, form: str, biased: bool, masked: bool, replace: Replace
) -> None:
    from models.kernels.lion import decay_logits

    replace(decay_logits, [decay_logits._project_launch, decay_logits._backward_launches], _CHANNELS=16, _PROGRAMS=2)
    generator = torch.Generator().manual_seed(3)
    q, k, v, x = (torch.rand(2, 70, *size, generator=generator) + 0.1 for size in [(3, 16)] * 3 + [(24,)])
    weight, bias = 0.3 * torch.randn(3, 24, generator=generator), torch.randn(3, generator=generator)
    mask = (torch.rand(2, 70, generator=generator) > 0.3).to(device) if masked else None
    results = []
    for kind, dtype in ((form, torch.float32), ("parallel", torch.float64)):
        leaves = [t.detach().clone().to(device, dtype).requires_grad_() for t in (q, k, v, x, weight, bias)]
        gate = ProjectedDecayLogits(*map(apart, leaves[3 : 6 if biased else 5]))
        y = attend(*leaves[:3], decay_logits=gate, mask=mask, form=kind)
        (y * torch.linspace(-1, 1, y.numel(), device=device).view_as(y)).sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves[: 6 if biased else 5])])
    # The gradient of the logits is a running sum of differences that nearly cancel: up to 4.3e-5 on a GPU.
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert ((actual.double() - expected).norm() / expected.norm()).item() < 1e-4, i


@pytest.mark.parametrize("form", KERNELS)
def test_projected_decay_logits_of_more_heads_than_a_tile(device: str, form: str) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, 3, 257, 2)] * 3 + [(1, 3, 4), (257, 4), (257,)]
    inputs = [torch.rand(*shape, generator=generator).to(device) + 0.1 for shape in shapes]
    results = []
    for kind, dtype in ((form, torch.float32), ("parallel", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        y = attend(*leaves[:3], decay_logits=ProjectedDecayLogits(*leaves[3:]), form=kind)
        (y * torch.linspace(-1, 1, y.numel(), device=device).view_as(y)).sum().backward()
        results.append([y.detach(), *(x.grad for x in leaves)])
    for actual, expected in zip(*results, strict=True):
        assert ((actual.double() - expected).norm() / expected.norm()).item() < 2e-5


@pytest.mark.parametrize("form", KERNELS)
def test_biases_of_two_dtypes_have_their_own_launches(device: str, form: str) -> None:
    """Read the bias in its own dtype. A prepared launch reads it in the dtype of its first call."""
    from models.kernels.lion.decay_logits import _project_launch

    generator = torch.Generator().manual_seed(4)
    q, k, v, x = (torch.rand(1, 40, *size, generator=generator).to(device) for size in [(2, 16)] * 3 + [(16,)])
    weight, bias = torch.randn(2, 16, generator=generator).to(device), torch.tensor([1.5, -2.0], device=device)
    _project_launch.cache_clear()
    expected, actual = (
        attend(q, k, v, decay_logits=ProjectedDecayLogits(x, weight, b), form=form) for b in (bias, bias.bfloat16())
    )
    assert torch.equal(actual, expected)
    assert _project_launch.cache_info().currsize == 2


@pytest.mark.parametrize("form", KERNELS)
def test_second_derivatives_are_refused(device: str, form: str) -> None:
    """Refuse them as all kernels do. The gradients would have no graph, and a penalty on them would change nothing."""
    q, k, v = (torch.rand(1, 20, 1, 16, device=device, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(attend(q, k, v, form=form).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.square().sum().backward()


def test_skipping_far_tiles_does_not_change_results(device: str) -> None:
    """Large decays bring most tiles below e^-20, where they are skipped."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(1, 600, 1, 16, generator=generator).to(device) + 0.1 for _ in range(4)]
    log_decay = torch.full((1, 600, 1), -0.5, device=device)
    log_decay[:, 128:192] = log_decay[:, 450:590] = -1e-4
    log_decay[:, 192:450] = -0.1  # reaches over several tiles
    results = []
    for form, dtype in (("triton_tile", torch.float32), ("parallel", torch.float64)):
        *leaves, dy = (x.to(dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (*leaves, log_decay.to(dtype))]
        y = attend(*leaves, form=form)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for actual, expected in zip(*results, strict=True):
        # Running sums of several hundred have errors of 2e-5. Differences of them, in the gradient, have larger ones.
        assert ((actual.double() - expected).norm() / expected.norm()).item() < 5e-4


def test_nan_reaches_far_tiles(device: str) -> None:
    """Spoil token 320, the first of a tile."""
    q, k, v, g = (torch.rand(1, 640, 1, dim, device=device) for dim in (16, 16, 16, 1))
    check_nan(
        lambda *x: (attend(*x, form="recurrent"),),
        lambda *x: (attend(*x, form="triton_tile"),),
        [q, k, v, -0.01 * g[..., 0]],
    )


@pytest.mark.parametrize("form", KERNELS)
def test_infinite_log_decay(device: str, form: str) -> None:
    """Log decays of -inf count as -100, a factor of 0. They may have a last dimension of 1."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, dy = (torch.rand(1, 70, 1, 16, generator=generator).to(device) + 0.1 for _ in range(4))
    log_decay = -torch.rand(1, 70, 1, generator=generator).to(device)
    log_decay[:, 10:60:20] = -torch.inf
    results = []
    cases = (form, torch.float32, log_decay[..., None]), ("parallel", torch.float64, log_decay.double().clamp_min(-100))
    for kind, dtype, decay in cases:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        y = attend(*leaves, decay, form=kind)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    for actual, expected in zip(*results, strict=True):
        assert ((actual.double() - expected).norm() / expected.norm()).item() < 4e-5


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("decay", ["log_decay", "gate", "head"])
@pytest.mark.parametrize("phi", [None, "silu"])
@pytest.mark.parametrize("normalized", [True, False])
def test_nan_propagates(device: str, form: str, decay: str, phi: str | None, normalized: bool) -> None:
    def compute(form: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor]:
        options = {"log_decay": F.logsigmoid(gate)} if decay == "log_decay" else {"decay_logits": gate}
        return (attend(q, k, v, form=form, normalized=normalized, phi=phi, **options),)

    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.rand(1, 70, 2, 16, generator=generator).to(device) + 0.1 for _ in range(3))
    gate = torch.randn(*(() if decay == "head" else (1, 70)), 2, generator=generator).to(device) + 2
    check_nan(partial(compute, "recurrent"), partial(compute, form), [q, k, v, gate])


def test_sizes_that_overflow_are_refused(device: str) -> None:
    from models.kernels.lion.lion import _case

    shape = torch.Size((1, 2**21, 16, 64))
    with pytest.raises(ValueError, match="overflow 32-bit addresses"):
        _case("chunk", -1, shape, 64, torch.bfloat16, None, False, None, False, True, False)


def test_unsupported_sizes_are_refused(device: str) -> None:
    q = torch.ones(1, 4, 1, 300, device=device)
    with pytest.raises(ValueError, match=r"300, 300: at most 256; use form='chunked'"):
        attend(q, q, q, form="triton_chunk")
