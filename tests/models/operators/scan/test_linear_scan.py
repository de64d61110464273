"""The elementwise recurrence: its forms against a loop written here, gradients, states, packed segments, extremes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models.operators.scan.linear_scan import _select_form, scan

FORMS = ("recurrent", "chunked")


def inputs(batch: int, length: int, channels: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, channels)
    x, angle = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    log_decay = -torch.rand(shape, generator=generator, dtype=torch.float64) * 2
    if kind == "complex":
        return torch.complex(x, angle), torch.complex(log_decay, 3 * angle)
    if kind == "complex decay":
        return x, torch.complex(log_decay, 3 * angle)
    return x, log_decay


def loop(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, length, channels], one number at a time."""
    h = torch.zeros(x.shape, dtype=torch.complex128)
    final = state.to(torch.complex128).clone()
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            final[b] = torch.exp(log_decay[b, t].to(torch.complex128)) * final[b] + x[b, t]
            h[b, t] = final[b]
    return h, final


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a.to(torch.complex128), b.to(torch.complex128), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["real", "complex", "complex decay"])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 100])
@pytest.mark.parametrize("form", FORMS)
def test_equals_a_python_loop(form: str, length: int, kind: str) -> None:
    x, log_decay = inputs(2, length, 3, kind)
    state = inputs(1, 2, 3, kind, seed=1)[0][0]
    for initial in (None, state):
        h, final = scan(x, log_decay, initial_state=initial, form=form)
        expected, expected_final = loop(x, log_decay, torch.zeros_like(state) if initial is None else initial)
        close(h, expected)
        close(final, expected_final)


@pytest.mark.parametrize("form", FORMS)
def test_sixteen_bits_are_computed_in_float32(form: str) -> None:
    x, log_decay = (t.bfloat16() for t in inputs(2, 40, 3, "real"))
    got, expected = scan(x, log_decay, form=form), scan(x.float(), log_decay.float(), form=form)
    assert [t.dtype for t in got] == [torch.float32, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_packed_segments_equal_separate_runs(form: str) -> None:
    x, log_decay = inputs(1, 40, 3, "real")
    bounds = [0, 0, 7, 8, 8, 40, 40]
    state = inputs(1, len(bounds) - 1, 3, "real", seed=1)[0][0]
    for initial in (None, state):
        h, final = scan(x, log_decay, initial_state=initial, cu_seqlens=torch.tensor(bounds), form=form)
        for s, (start, end) in enumerate(pairwise(bounds)):
            begin = torch.zeros_like(state[s : s + 1]) if initial is None else initial[s : s + 1]
            expected, expected_final = loop(x[:, start:end], log_decay[:, start:end], begin)
            close(h[:, start:end], expected)
            close(final[s : s + 1], expected_final)


@pytest.mark.parametrize("form", FORMS)
def test_state_continues_a_sequence(form: str) -> None:
    x, log_decay = inputs(2, 50, 3, "real")
    whole, final = scan(x, log_decay, form=form)
    state, parts = None, []
    for start, end in ((0, 33), (33, 33), (33, 34), (34, 50)):
        h, state = scan(x[:, start:end], log_decay[:, start:end], initial_state=state, form=form)
        parts.append(h)
    close(torch.cat(parts, 1), whole)
    close(state, final)


@pytest.mark.parametrize("kind", ["real", "complex", "complex decay"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str, kind: str) -> None:
    x, log_decay = (t.requires_grad_() for t in inputs(1, 9, 2, kind))
    state = inputs(1, 3, 2, kind, seed=1)[0][0].requires_grad_()
    cu_seqlens = torch.tensor([0, 4, 4, 9])

    def packed(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return scan(x, log_decay, initial_state=state, cu_seqlens=cu_seqlens, form=form)

    def plain(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return scan(x, log_decay, initial_state=state[:1], form=form)

    assert torch.autograd.gradcheck(packed, (x, log_decay, state))
    assert torch.autograd.gradcheck(plain, (x, log_decay, state))


def test_extreme_decays_stay_exact() -> None:
    x, log_decay = inputs(1, 200, 4, "real")
    log_decay[..., 0] = -1e4
    log_decay[..., 1] = -torch.inf
    log_decay[..., 2] = 0.0
    log_decay[:, ::7, 3] = -torch.inf
    results = []
    for form in FORMS:
        leaves = [t.clone().requires_grad_() for t in (x, log_decay)]
        h, _ = scan(*leaves, form=form)
        results.append([h.detach(), *torch.autograd.grad(h.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        close(a, b, 1e-10 * float(b.abs().max()))
    close(results[0][0][..., :2], x[..., :2])
    # In float32 a state that is kept for long must not lose digits to the order of the sums.
    single, _ = scan(x.float(), log_decay.float())
    close(single, results[0][0], 1e-5 * float(results[0][0].abs().max()))


def test_result_dtypes() -> None:
    x, log_decay = inputs(1, 5, 2, "real")
    h, final = scan(x.bfloat16(), log_decay.float())
    assert h.dtype == final.dtype == torch.float32
    assert scan(*inputs(1, 5, 2, "complex decay"))[0].dtype == torch.complex128
    assert scan(x.float(), inputs(1, 5, 2, "complex")[1].to(torch.complex64))[0].dtype == torch.complex64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": torch.zeros(1, 4, 3)}, r"log_decay \[1, 4, 3\]"),
        ({"initial_state": torch.zeros(2, 3)}, r"initial_state \[2, 3\]: expected \[1, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "must run from 0 to the length 5"),
        (
            {"cu_seqlens": torch.tensor([0.0, 5.0])},
            r"cu_seqlens torch.float32 \[2\]: expected integers \[segments \+ 1\]",
        ),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, r"cu_seqlens torch.int64 \[1, 2\]: expected integers"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens torch.int32 \[0\]: expected integers"),
        ({"form": "parallel"}, "allowed are auto, recurrent, chunked, kernel"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    arguments = {"x": torch.zeros(1, 5, 3), "log_decay": torch.zeros(1, 5, 3)} | change
    with pytest.raises(ValueError, match=message):
        scan(**arguments)


def test_the_form_is_selected_by_length_and_device() -> None:
    x = torch.zeros(1, 1, 2)
    assert _select_form("auto", x, x, None, torch.bfloat16) == "recurrent"
    decay = torch.zeros(1, 1, 2, requires_grad=True)
    assert _select_form("auto", x, decay, None, torch.bfloat16) == "chunked"
    scan(x, decay)[0].sum().backward()
    assert torch.equal(decay.grad, torch.zeros(1, 1, 2))
    assert _select_form("auto", x, x, torch.tensor([0, 1]), torch.bfloat16) == "chunked"
    assert _select_form("kernel", x, x, None, None) == "kernel"
    with pytest.raises(ValueError, match="form = 'fast': allowed are auto, recurrent, chunked, kernel"):
        scan(x, x, form="fast")  # type: ignore[arg-type]
