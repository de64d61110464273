"""The three forms of the recurrence agree: values, states, gradients, packing, extreme decays."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.operators.gla import chunk_matmul as factorised
from models.operators.gla import select_kernel
from models.operators.gla.gated_linear_attention import gated_linear_attention

FORMS = ("parallel", "chunked")
HEADS, DIM_K, DIM_V = 3, 5, 7


def inputs(length: int, decay: float, *, scalar: bool = False, batch: int = 2, dtype=torch.float64, states: int = 0):
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    q, k = normal(batch, length, HEADS, DIM_K), normal(batch, length, HEADS, DIM_K)
    v = normal(batch, length, HEADS, DIM_V)
    log_decay = -decay * torch.rand(batch, length, HEADS, 1 if scalar else DIM_K, dtype=dtype)
    return q, k, v, log_decay, normal(states or batch, HEADS, DIM_K, DIM_V)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float):
    """Compute the definition without the code under test."""
    outputs = torch.empty_like(v)
    state = state.clone()
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                alpha = log_decay[b, t, h].exp().expand(q.shape[3])
                state[b, h] = torch.diag(alpha) @ state[b, h] + torch.outer(k[b, t, h], v[b, t, h])
                outputs[b, t, h] = scale * (q[b, t, h] @ state[b, h])
    return outputs, state


@pytest.mark.parametrize("scalar", [False, True])
def test_recurrent_form_equals_the_definition(scalar):
    q, k, v, g, s = inputs(9, 1.0, scalar=scalar)
    expected = token_by_token(q, k, v, g, s, 0.3)
    actual = gated_linear_attention(q, k, v, g, scale=0.3, initial_state=s, form="recurrent")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16, 63, 64, 65, 150])
@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0, 5.0, 60.0])
def test_forms_agree_in_float64(form, scalar, length, decay):
    q, k, v, g, s = inputs(length, decay, scalar=scalar)
    expected = gated_linear_attention(q, k, v, g, scale=0.3, initial_state=s, form="recurrent")
    actual = gated_linear_attention(q, k, v, g, scale=0.3, initial_state=s, form=form)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("decay", [0.05, 1.0, 60.0])
def test_forms_agree_in_float32(form, scalar, decay):
    q, k, v, g, s = inputs(150, decay, scalar=scalar)
    expected = gated_linear_attention(q, k, v, g, scale=0.3, initial_state=s, form="recurrent")
    actual = gated_linear_attention(
        q.float(), k.float(), v.float(), g.float(), scale=0.3, initial_state=s.float(), form=form
    )
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert ((a - e).norm() / e.norm()).item() < 1e-6


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
def test_without_initial_state_starts_from_zero(form):
    q, k, v, g, s = inputs(20, 0.1)
    torch.testing.assert_close(
        gated_linear_attention(q, k, v, g, form=form),
        gated_linear_attention(q, k, v, g, initial_state=torch.zeros_like(s), form=form),
    )


@pytest.mark.parametrize("decay", [0.05, 60.0])
@pytest.mark.parametrize("scalar", [False, True])
def test_final_state_continues_the_sequence(decay, scalar):
    q, k, v, g, s = inputs(150, decay, scalar=scalar)
    whole, end = gated_linear_attention(q, k, v, g, initial_state=s)
    first, middle = gated_linear_attention(q[:, :70], k[:, :70], v[:, :70], g[:, :70], initial_state=s)
    second, last = gated_linear_attention(q[:, 70:], k[:, 70:], v[:, 70:], g[:, 70:], initial_state=middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("decay", [0.05, 30.0])
def test_packed_segments_equal_runs_apart(form, scalar, decay):
    bounds = [0, 40, 40, 41, 150, 300, 300]
    q, k, v, g, s = inputs(300, decay, scalar=scalar, batch=1, states=len(bounds) - 1)
    o, final = gated_linear_attention(q, k, v, g, initial_state=s, cu_seqlens=torch.tensor(bounds), form=form)
    for i, (a, b) in enumerate(pairwise(bounds)):
        if a == b:
            torch.testing.assert_close(final[i], s[i])
            continue
        apart, end = gated_linear_attention(
            q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], initial_state=s[i : i + 1], form="recurrent"
        )
        torch.testing.assert_close(o[:, a:b], apart, rtol=0, atol=1e-10)
        torch.testing.assert_close(final[i : i + 1], end, rtol=0, atol=1e-10)


def both_ways_of_chunks(monkeypatch, pairwise: bool) -> None:
    if pairwise:
        monkeypatch.setattr(select_kernel, "_LARGEST_DECAY", -1.0)
    # Small tiles, so that a sequence is several.
    monkeypatch.setattr(factorised, "_TILE_ELEMENTS", 64 * HEADS * DIM_V)


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
def test_gradients_of_the_chunked_form(monkeypatch, pairwise, packed, scalar):
    """All five gradients against the token-by-token form, the final state's part included."""
    both_ways_of_chunks(monkeypatch, pairwise)
    cu_seqlens = torch.tensor([0, 70, 70, 71, 150]) if packed else None
    arguments = inputs(150, 0.1, scalar=scalar, batch=1 if packed else 2, states=4 if packed else 2)
    weights = torch.randn_like(arguments[2]), torch.randn_like(arguments[4])
    gradients = []
    for form in ("recurrent", "chunked"):
        leaves = [x.clone().requires_grad_() for x in arguments]
        *qkvg, s = leaves
        o, final = gated_linear_attention(*qkvg, scale=0.7, initial_state=s, cu_seqlens=cu_seqlens, form=form)
        gradients.append(torch.autograd.grad((o * weights[0]).sum() + (final * weights[1]).sum(), leaves))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pairwise", [False, True])
def test_gradcheck(monkeypatch, pairwise):
    both_ways_of_chunks(monkeypatch, pairwise)
    monkeypatch.setattr(select_kernel, "_CHUNKS", (8, 4))
    q, k, v, g, s = (x[:1, ..., :2, :2].clone().requires_grad_() for x in inputs(11, 0.3))
    s = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)

    def function(*x):
        return gated_linear_attention(*x[:4], scale=0.7, initial_state=x[4], form="chunked")

    assert torch.autograd.gradcheck(function, (q, k, v, g, s), atol=1e-8)


def test_gradcheck_scalar_decay():
    q, k, v, g, s = (x[..., :2, :2].clone().requires_grad_() for x in inputs(5, 0.3, scalar=True, batch=1))
    s = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: gated_linear_attention(*x[:4], initial_state=x[4], form="chunked"), (q, k, v, g, s), atol=1e-8
    )


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kind", ["-inf somewhere", "-inf everywhere", "-60 a step", "-1e30 somewhere", "mild then -60"]
)
@pytest.mark.parametrize("form", ["recurrent", *FORMS])
def test_extreme_decays_stay_finite_and_exact(scalar, dtype, kind, form):
    q, k, v, g, s = inputs(100, 0.05, scalar=scalar, dtype=dtype)
    if kind == "-inf somewhere":
        g[:, ::7] = -torch.inf
    elif kind == "-inf everywhere":
        g[:] = -torch.inf
    elif kind == "-60 a step":
        g[:] = -60.0
    elif kind == "-1e30 somewhere":
        g[:, 3::11] = -1e30
    else:
        g[:, 50:] = -60.0
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, s)]
    o, final = gated_linear_attention(*leaves[:4], initial_state=leaves[4], form=form)
    expected = gated_linear_attention(*(x.double() for x in (q, k, v, g)), initial_state=s.double(), form="recurrent")
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(o.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(final.double(), expected[1], rtol=tolerance, atol=tolerance)
    (o.sum() + final.sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()


def test_infinite_decay_clears_the_state():
    q, k, v, g, s = inputs(80, 0.05)
    g[:, 30] = -torch.inf
    o, _ = gated_linear_attention(q, k, v, g, initial_state=s)
    fresh, _ = gated_linear_attention(q[:, 30:], k[:, 30:], v[:, 30:], g[:, 30:])
    torch.testing.assert_close(o[:, 30:], fresh, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [(0.1, (64, True)), (0.9, (32, True)), (1.9, (16, True)), (60.0, (16, False)), (float("inf"), (16, False))],
)
def test_chunk_length_shrinks_with_the_decay_before_the_exact_form(decay, expected):
    assert select_kernel.plan_chunks(torch.full((1, 200, 2, 4), -decay)) == expected


def test_one_channel_outside_the_matmul_form_is_detected():
    log_decay = torch.full((2, 200, 2, 4), -0.01)
    log_decay[1, 77, 1, 3] = -torch.inf
    assert select_kernel.plan_chunks(log_decay) == (16, False)


def test_bfloat16_is_computed_in_float32():
    q, k, v, g, s = inputs(200, 0.05, dtype=torch.float32)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected, state = gated_linear_attention(q.float(), k.float(), v.float(), g, initial_state=s, form="recurrent")
    o, final = gated_linear_attention(q, k, v, g, initial_state=s)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert ((o - expected).norm() / expected.norm()).item() < 3e-3
    torch.testing.assert_close(final, state, rtol=1e-5, atol=1e-5)


def test_bfloat16_gradients():
    q, k, v, g, s = inputs(200, 0.05, dtype=torch.float32)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)] + [g.clone().requires_grad_()]
        o, _ = gated_linear_attention(*leaves, initial_state=s)
        gradients.append(torch.autograd.grad((o.float() * o.float()).sum(), leaves))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.05, 0.5])
def test_sums_of_decays_stay_float32_under_autocast(dtype, decay):
    q, k, v, g, state = inputs(150, decay, dtype=torch.float32)
    assert select_kernel.plan_chunks(g)[1]
    results = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, state)]
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            o, final = gated_linear_attention(*leaves[:4], initial_state=leaves[4])
            gradients = torch.autograd.grad(o.sum() + final.sum(), leaves)
        results.append([o, final, *gradients])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("decay", [0.05, 60.0])
def test_states_stay_float32_under_autocast(form, scalar, decay):
    q, k, v, g, state = inputs(70, decay, scalar=scalar, dtype=torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results.append(gated_linear_attention(q, k, v, g, initial_state=state, form=form))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_a_sum_above_the_range_of_float16_stays_finite_under_autocast():
    ones = torch.ones(1, 1000, 1, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        o, _ = gated_linear_attention(ones, 100 * ones, ones, torch.zeros(1, 1000, 1, 1))
    assert torch.equal(o[:, -1], torch.full((1, 1, 4), 4e5))


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
def test_empty_sequence_returns_its_state(form):
    q, k, v, g, s = inputs(0, 0.1)
    o, final = gated_linear_attention(q, k, v, g, initial_state=s, form=form)
    assert o.shape == (2, 0, HEADS, DIM_V)
    torch.testing.assert_close(final, s)


@pytest.mark.parametrize("form", ["auto", "recurrent", *FORMS])
@pytest.mark.parametrize("scalar", [False, True])
def test_an_empty_batch(form, scalar):
    leaves = [x.requires_grad_() for x in inputs(9, 0.1, batch=0, scalar=scalar)]
    o, final = gated_linear_attention(*leaves[:4], initial_state=leaves[4], form=form)
    assert o.shape == (0, 9, HEADS, DIM_V)
    assert final.shape == (0, HEADS, DIM_K, DIM_V)
    for gradient, x in zip(torch.autograd.grad(o.sum() + final.sum(), leaves), leaves, strict=True):
        assert gradient.shape == x.shape


def test_inputs_are_not_modified():
    arguments = inputs(70, 0.1)
    copies = [x.clone() for x in arguments]
    *qkvg, s = (x.requires_grad_() for x in arguments)
    o, final = gated_linear_attention(*qkvg, initial_state=s)
    (o.sum() + final.sum()).backward()
    for x, copy in zip(arguments, copies, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 9, 3, 4)}, "q and k alike"),
        ({"v": torch.zeros(2, 8, 3, 7)}, "equal to them except for its last axis"),
        ({"log_decay": torch.zeros(2, 9, 3, 2)}, "last axis of 1"),
        ({"initial_state": torch.zeros(1, 3, 5, 7)}, r"initial_state \[1, 3, 5, 7\]: expected \[2, 3, 5, 7\]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens needs batch 1"),
        ({"form": "fast"}, "form = 'fast': allowed are"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    q, k, v, g, s = inputs(9, 0.1, dtype=torch.float32)
    arguments = {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": s} | change
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**arguments)


def test_cu_seqlens_must_cover_the_sequence():
    q, k, v, g, _ = inputs(9, 0.1, batch=1)
    with pytest.raises(ValueError, match="runs from 0 to 8: must run from 0 to the length 9"):
        gated_linear_attention(q, k, v, g, cu_seqlens=torch.tensor([0, 4, 8]))


def test_gradient_of_queries_alone_costs_half_of_all_and_is_the_same():
    """Skip the gradients that the scans of masks per channel of values do not need."""
    q, k, v, g, _ = inputs(150, 0.05)
    costs, gradients = [], []
    for count in (4, 1):
        leaves = [x.detach().requires_grad_(place < count) for place, x in enumerate((q, k, v, g))]
        o, _ = gated_linear_attention(*leaves)
        with FlopCounterMode(display=False) as counter:
            gradients.append(torch.autograd.grad(o, leaves[:count], v)[0])
        costs.append(counter.get_total_flops())
    assert costs[1] < 0.5 * costs[0]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
