"""LION's kernels with one mask per channel of values against the float64 reference, forward and backward, in float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend
from tests.models.kernels.conftest import Replace, apart, check_nan

FORM = "triton_value_channel"


def errors(
    device: str, shape: tuple[int, int, int, int, int], decays: str, normalized: bool = True
) -> dict[str, tuple[float, float]]:
    """Return the norms of the error and of the reference, of y and of every gradient."""
    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length + dim_k)
    q, k = (torch.rand(batch, length, heads, dim_k, generator=generator) + 0.1 for _ in range(2))
    v, dy, gate = (torch.randn(batch, length, heads, dim_v, generator=generator) for _ in range(3))
    log_decay = F.logsigmoid(gate + 2)
    if decays == "weak":
        log_decay = log_decay * 0.01
    if decays == "strong":  # of some channels, and of all
        log_decay = -20.0 * torch.rand(log_decay.shape, generator=generator) * torch.logspace(-3, 0, dim_v)
    if decays == "strongest":
        log_decay = log_decay - 20.0
    if decays == "cut":
        log_decay[:, ::5] = -torch.inf
    mask = None
    if decays == "padded":
        mask = (torch.arange(length) % 7 < torch.tensor([[7], [5]])[:batch]).to(device)
    results = []
    for form, dtype in ((FORM, torch.float32), ("recurrent", torch.float64)):
        leaves = [x.to(device, dtype).detach().requires_grad_() for x in (q, k, v, log_decay)]
        y = attend(*map(apart, leaves), form=form, normalized=normalized, per_value_channel=True, mask=mask)
        y.backward(dy.to(device, dtype))
        results.append([y.detach().double(), *(x.grad.double() for x in leaves)])
    assert all(x.isfinite().all() for x in results[0])
    return {
        name: ((x - y).norm().item(), y.norm().item())
        for name, x, y in zip(("y", "dq", "dk", "dv", "d log_decay"), *results, strict=True)
    }


def check(*arguments, **options) -> None:
    for name, (error, norm) in errors(*arguments, **options).items():
        print(f"{name} {error / max(norm, 1e-9):.1e}", end=" ")
        # The gradients of q and k are nearly 0 where a token sees itself alone.
        assert error <= 1e-5 * (norm + 1.0), (name, error, norm)


@pytest.fixture
def short_chunks(replace: Replace, device: str) -> int:
    """Return the tokens of a short chunk, so that few tokens fill several."""
    from models.kernels.lion import value_channel

    replace(value_channel, [value_channel._launches], CHUNK=16)
    return 16


@pytest.mark.parametrize("chunks", [(0, 1), (1, -1), (1, 0), (1, 1), (3, 5)])
@pytest.mark.parametrize("decays", ["usual", "weak", "strong", "strongest", "cut", "padded"])
@pytest.mark.parametrize("normalized", [True, False])
def test_lengths_and_decays(
    device: str, short_chunks: int, chunks: tuple[int, int], decays: str, normalized: bool
) -> None:
    count, more = chunks
    check(device, (2, count * short_chunks + more, 1, 16, 16), decays, normalized=normalized)


@pytest.mark.parametrize("dims", [(24, 40), (8, 65), (40, 24), (128, 80)])
@pytest.mark.parametrize("normalized", [True, False])
def test_channels_that_do_not_fill_their_tiles(
    device: str, short_chunks: int, dims: tuple[int, int], normalized: bool
) -> None:
    check(device, (2, 37, 1, *dims), "strong", normalized=normalized)


@pytest.mark.parametrize("length", [63, 64, 65, 197])
def test_chunks_of_the_launches(device: str, length: int) -> None:
    check(device, (1, length, 2, 32, 32), "usual")


def test_inference_equals_training(device: str, short_chunks: int) -> None:
    q, k, v, g = (torch.rand(1, 40, 1, 16, device=device) for _ in range(4))
    y = attend(q, k, v, -g.requires_grad_(), form=FORM, per_value_channel=True)
    with torch.inference_mode():
        assert torch.equal(y, attend(q, k, v, -g, form=FORM, per_value_channel=True))


@pytest.mark.parametrize("strength", [1, 30])
@pytest.mark.parametrize("normalized", [True, False])
def test_nan_propagates(device: str, short_chunks: int, normalized: bool, strength: int) -> None:
    def compute(form: str, *inputs: Tensor) -> tuple[Tensor]:
        return (attend(*inputs, form=form, per_value_channel=True, normalized=normalized),)

    q, k, v, g = (torch.rand(1, 40, 1, 16, device=device) for _ in range(4))
    check_nan(partial(compute, "recurrent"), partial(compute, FORM), [q, k, v, -strength * g])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_value_channel": False}, "supports per_value_channel"),
        ({"mask_convention": "shifted"}, "supports per_value_channel"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "no cu_seqlens"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, bool | str | Tensor], message: str) -> None:
    x = torch.ones(1, 4, 1, 16)
    with pytest.raises(ValueError, match=message):
        attend(x, x, x, -x, **{"form": FORM, "per_value_channel": True, **options})


def test_unsupported_head_sizes_are_refused() -> None:
    x = torch.ones(1, 4, 1, 144)
    with pytest.raises(ValueError, match=r"head sizes 144, 144: .* use form='scans'"):
        attend(x, x, x, -x, form=FORM, per_value_channel=True)


def test_sizes_that_overflow_are_refused(device: str) -> None:
    from models.kernels.lion.value_channel import _launches

    with pytest.raises(ValueError, match="overflow 32-bit addresses"):
        _launches(torch.device(device), torch.Size((1, 2**21, 16, 64)), 64, torch.bfloat16, True)
