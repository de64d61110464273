"""The fused elementwise kernels (SwiGLU, gates, feature map, rotation, residual sum with norm) against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.layers.gated_norm import gated_head_norm
from models.layers.mlp import swiglu
from models.layers.norm import Norm
from models.mixers import mamba2
from models.operators.lion.feature_map import feature_map
from models.operators.lion.scans import scan_arguments
from models.operators.metala import decay_and_key
from models.operators.rotary import rotate
from tests.models.kernels.conftest import Replace, apart, check_nan

Function = Callable[..., tuple[Tensor | None, ...]]


def compare(exact: Function, kernels: Function, inputs: list[Tensor | None], bound: float = 1e-6) -> None:
    """Compare outputs and gradients of `kernels` in float32 with those of `exact` in float64, and where NaN is."""
    results = []
    for function, dtype in ((exact, torch.float64), (kernels, torch.float32)):
        leaves = [None if x is None else x.to(dtype).clone().requires_grad_() for x in inputs]
        given = [None if x is None else apart(x) for x in leaves]
        outputs = [apart(y) for y in function(*given) if y is not None]
        # Each output has a different gradient.
        total = sum(
            (y * torch.linspace(-1, 2 + i, y.numel(), device=y.device, dtype=y.dtype).view_as(y)).sum()
            for i, y in enumerate(outputs)
        )
        total.backward()
        results.append([*(y.detach() for y in outputs), *(x.grad for x in leaves if x is not None)])
    for number, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-9)).item() < bound, number
    check_nan(exact, kernels, inputs)


def random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).float().to(device)


@pytest.mark.parametrize("shape", [(3, 7), (2, 1500)])
def test_swiglu(device: str, shape: tuple[int, ...]) -> None:
    from models.kernels.swiglu import swiglu as kernel

    inputs = [3 * random(*shape, seed=1, device=device), random(*shape, seed=2, device=device)]
    compare(lambda a, b: (swiglu(a, b),), lambda a, b: (kernel(a, b),), inputs)


@pytest.mark.parametrize("bounds", [None, (0, 0, 1, 30, 30, 70), (0, 70)])
@pytest.mark.parametrize("dims", [(2, 4, 8), (3, 64, 96)])
def test_arguments_of_both_scans(device: str, bounds: tuple[int, ...] | None, dims: tuple[int, int, int]) -> None:
    from models.kernels.gla.scan_arguments import scan_arguments as kernel

    heads, dim_k, dim_v = dims
    shapes = [(1 if bounds else 2, 70, heads, dim) for dim in (dim_k, dim_k, dim_v, dim_k)]
    q, k, v, g = (random(*shape, seed=i, device=device) for i, shape in enumerate(shapes))
    last = None
    if bounds is not None:
        last = torch.zeros(71, dtype=torch.bool, device=device).index_fill(
            0, torch.tensor(bounds, device=device), True
        )[1:]
    compare(lambda *x: scan_arguments(*x, last), lambda *x: kernel(*x, last), [q, k, v, -g.abs()])


@pytest.mark.parametrize("name", ["silu", "silu_paper"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 70, 24)])
def test_feature_map(device: str, name: str, shape: tuple[int, ...]) -> None:
    from models.kernels.lion.feature_map import normalized_silu

    def kernel(x: Tensor) -> tuple[Tensor]:
        return (normalized_silu(x, name, torch.float32),)

    compare(lambda x: (feature_map(x, name),), kernel, [2 * random(*shape, seed=8, device=device)], 2e-6)


def test_feature_map_of_zero_norm(device: str) -> None:
    """SiLU(x + 1/2) is 0 in all channels."""
    from models.kernels.lion.feature_map import normalized_silu

    x = torch.full((3, 24), -0.5, device=device)
    assert torch.equal(normalized_silu(x, "silu_paper", torch.float32), torch.zeros_like(x))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_decay_and_key(device: str, scale: float) -> None:
    from models.kernels.metala import decay_and_key as kernel

    compare(decay_and_key, kernel, [scale * random(3, 700, seed=3, device=device)], 2e-6)


def test_decay_and_key_are_accurate_near_zero(device: str) -> None:
    from models.kernels.metala import decay_and_key as kernel

    a = torch.linspace(-90, 80, 3001, device=device)
    for actual, expected in zip(kernel(a), decay_and_key(a.double()), strict=True):
        # Below float32's smallest normal number there are no digits to keep.
        sized = expected.abs() > 1e-36
        # exp(-|a|) is computed as a power of 2, whose exponent is rounded to float32.
        assert ((actual.double() / expected - 1).abs()[sized]).max().item() < 1e-5


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("size", [48, 1100])
def test_add_norm(device: str, size: int, kind: str, affine: bool, add: bool, replace: Replace) -> None:
    """Use short rows, many per tile with a partial last tile, and long rows, one per tile."""
    from models.kernels import add_norm as kernel

    replace(kernel, [kernel._backward_launch], _PROGRAMS=5, _PROGRAMS_LONG=5)

    config = ModelConfig(
        vocab_size=8, num_layers=1, hidden_size=size, num_heads=2, norm=kind, norm_affine=affine, norm_eps=1e-5
    )
    norm = Norm(config).double()
    centred = kind == "layernorm"
    shape = (2, 300 if size < 1000 else 30, size)

    def exact(x: Tensor, delta: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        norm.weight, norm.bias = None, None
        h = x if delta is None else x + delta
        y = norm(h)
        if weight is not None:
            y = y * weight
        return h * 1.0, y if bias is None else y + bias

    def kernels(x: Tensor, delta: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return kernel.add_norm(x, delta, weight, bias, 1e-5, centred)

    inputs = [
        2 * random(*shape, seed=4, device=device) + 1,
        random(*shape, seed=5, device=device) if add else None,
        random(size, seed=6, device=device) if affine else None,
        random(size, seed=7, device=device) if affine and centred else None,
    ]
    compare(exact, kernels, inputs, 3e-6)
    # Each output alone. Beside the gradient of h, that of a norm with nearly equal dy is too small to be compared.
    inputs = [x if x is None or x.ndim == 1 else x[:, :10] for x in inputs]
    compare(lambda *x: (exact(*x)[1],), lambda *x: (kernels(*x)[1],), inputs, 1e-4)
    compare(lambda *x: (exact(*x)[0],), lambda *x: (kernels(*x)[0] * 1.0,), [*inputs[:2], None, None], 3e-6)


def test_added_tensors_of_two_dtypes_have_their_own_launches(device: str) -> None:
    """Add 16 bits to a float32 residual stream, as under autocast, then float32. A launch reads the dtypes of its first call."""
    from models.kernels import add_norm as kernel

    x, delta = random(3, 40, seed=1, device=device), random(3, 40, seed=2, device=device).bfloat16()
    kernel._forward_launch.cache_clear()
    for added in (delta, delta.float()):
        h, _ = kernel.add_norm(x, added, None, None, 1e-5, False)
        assert torch.equal(h, x + delta)
    assert kernel._forward_launch.cache_info().currsize == 2


@pytest.mark.parametrize("shape", [(2, 1, 33), (1, 64, 32), (3, 200, 70), (2, 0, 5)])
def test_sums_over_programs(device: str, shape: tuple[int, int, int]) -> None:
    from models.kernels.primitives import sum_parts

    parts = random(*shape, seed=9, device=device)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        actual = sum_parts(parts, dtype)
        assert (actual.dtype, actual.shape) == (dtype, (shape[0], shape[2]))
        torch.testing.assert_close(actual.double(), parts.double().sum(1), rtol=bound, atol=1e-5)


def test_gates_of_two_dtypes_have_their_own_launches(device: str) -> None:
    """Compute Mamba-2's gated norm with u and z in 16 bits, then in float32."""
    from models.kernels.mamba2 import _norm_launches, gated_norm

    o, u, z = (random(2, 5, 3, 16, seed=seed, device=device) for seed in range(3))
    skip, weight = random(3, seed=3, device=device), random(48, seed=4, device=device)
    u, z = u.bfloat16(), z.flatten(2).bfloat16()
    _norm_launches.cache_clear()
    outputs = [gated_norm(o, u.to(dtype), skip, z.to(dtype), weight, 1e-5) for dtype in (u.dtype, o.dtype)]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    assert _norm_launches.cache_info().currsize == 2


@pytest.mark.parametrize("shape", [(2, 50, 3, 16), (1, 1100, 2, 64), (1, 9, 1, 5)])
def test_mamba2_step_and_gated_norm(device: str, shape: tuple[int, int, int, int], replace: Replace) -> None:
    from models.kernels import mamba2 as mamba2_ends
    from models.kernels.mamba2 import apply_time_step, gated_norm

    replace(mamba2_ends, [mamba2_ends._norm_launches], _PROGRAMS=8)
    heads, dim = shape[2:]
    o, u, z = (random(*shape, seed=seed, device=device) for seed in range(3))
    skip, weight = random(heads, seed=3, device=device), random(heads * dim, seed=4, device=device)
    inputs = [o, u, skip, z.flatten(2), weight]
    compare(lambda *x: (mamba2._gated_norm(*x, 1e-5),), lambda *x: (gated_norm(*x, 1e-5),), inputs, bound=2e-6)
    compare(
        lambda *x: (mamba2._apply_time_step(*x),),
        lambda *x: (apply_time_step(*x),),
        [random(*shape[:3], device=device), u],
    )


def test_head_norm(device: str) -> None:
    """GLA's and RetNet's gated norm, by MetaLA's kernels."""
    from models.kernels.metala import epilogue

    o, gate = random(2, 30, 3, 16, device=device), random(2, 30, 48, seed=1, device=device)
    compare(
        lambda *x: (gated_head_norm(*x),), lambda x, z: (epilogue(x, x, x, x, None, z, 1e-5),), [o, gate], bound=2e-6
    )


@pytest.mark.parametrize("pairs", [4, 3])
@pytest.mark.parametrize("angles", [(1, 1), (1, 3), (20, 1), (20, 3)])
def test_rotation(device: str, angles: tuple[int, int], pairs: int) -> None:
    """Rotate with the angles of one or 20 sequences and one or 3 heads, and with channels that are not rotated."""
    from models.kernels.rotary import rotate as kernel

    x = random(20, 7, 3, 9, seed=1, device=device)
    cos, sin = (random(angles[0], 7, angles[1], pairs, seed=seed, device=device) for seed in (2, 3))
    compare(lambda *inputs: (rotate(*inputs),), lambda *inputs: (kernel(*inputs),), [x, cos, sin])


def test_rotation_of_a_part_of_a_projection(device: str) -> None:
    """Rotate tokens that are as far apart as those of the whole projection, without a copy."""
    from models.kernels import rotary

    whole, shape = random(2, 5, 40, device=device), (2, 5, 2, 8)
    x = whole[..., 8:24].unflatten(-1, shape[2:])
    assert rotary._tokens_in_rows(x) is x
    cos, sin = random(1, 5, 1, 4, seed=1, device=device), random(1, 5, 1, 4, seed=2, device=device)
    expected = rotate(x.double(), cos.double(), sin.double())
    assert torch.allclose(rotary.rotate(x, cos, sin).double(), expected, atol=1e-5)


def test_rotation_of_single_tokens(device: str) -> None:
    """Rotate sequences of one token whose memory has heads before tokens, as attention's gradients have it."""
    from models.kernels.rotary import rotate as kernel

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def function(rotation: Callable[..., Tensor]) -> Function:
        return lambda x, cos, sin: (heads_first(rotation(heads_first(x), cos, sin)),)

    x = random(4, 1, 3, 8, seed=1, device=device)
    cos, sin = (random(1, 1, 1, 4, seed=seed, device=device) for seed in (2, 3))
    compare(function(rotate), function(kernel), [x, cos, sin])
