"""LION's operator: three forms against each other, the formula, and numerical gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.lion import bidirectional_attention as module
from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend
from models.operators.lion.check import CONVENTIONS
from models.operators.lion.feature_map import feature_map
from tests.models.rank_threads import over_ranks

PLAIN = ("parallel", "recurrent", "chunked")
# The form "scans" is for per-channel decays and the symmetric mask.
EACH = [*itertools.product(PLAIN, (True, False)), ("scans", True)]
each_form = pytest.mark.parametrize(("form", "vector"), EACH)
each_mask = pytest.mark.parametrize(
    ("form", "vector", "convention"),
    [
        (*each, convention)
        for each in EACH
        for convention in CONVENTIONS
        if (each[0], convention) != ("scans", "shifted")
    ],
)


def inputs(
    length: int = 150, batch: int = 2, heads: int = 2, k: int = 5, v: int = 3, vector: bool = False, dtype=torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (batch, length, heads)
    decay = F.logsigmoid(random(*shape, k if vector else 1) + 1)
    return random(*shape, k).abs() + 0.1, random(*shape, k).abs() + 0.1, random(*shape, v), decay


def formula(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, normalized: bool, convention: str) -> Tensor:
    """Compute the formula entry by entry, multiplying the decays between two tokens."""
    y = torch.zeros_like(v)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        for i in range(q.shape[1]):
            total = q.new_zeros(())
            for j in range(q.shape[1]):
                if j <= i:
                    between = decay[b, j + 1 : i + 1, h] if convention == "eq17" else decay[b, j:i, h]
                else:
                    between = decay[b, i + 1 : j + 1, h]
                weight = (q[b, i, h] * k[b, j, h] * between.sum(0).exp()).sum()
                total = total + weight
                y[b, i, h] += weight * v[b, j, h]
            if normalized:
                y[b, i, h] /= total + 1e-6
    return y


@each_mask
@pytest.mark.parametrize("normalized", [True, False])
def test_forms_equal_the_formula(form: str, convention: str, normalized: bool, vector: bool) -> None:
    q, k, v, decay = inputs(length=19, batch=1, vector=vector)
    y = attend(q, k, v, decay, normalized=normalized, mask_convention=convention, form=form)
    torch.testing.assert_close(y, formula(q, k, v, decay, normalized, convention), rtol=1e-10, atol=1e-12)


def test_elu_feature_map_keeps_its_digits_below_zero() -> None:
    x = torch.tensor([-80.0, -20.0, -1.0, 0.0, 2.0], requires_grad=True)
    y = feature_map(x, "elu")
    (slope,) = torch.autograd.grad(y.sum(), x)
    below = x.detach().double().exp()
    torch.testing.assert_close(y.double(), torch.where(x > 0, x.double() + 1, below), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope.double(), torch.where(x > 0, 1.0, below), rtol=1e-6, atol=0)


@each_form
@pytest.mark.parametrize("per_value_channel", [False, True])
def test_normalizers_stay_float32_under_autocast(form: str, vector: bool, per_value_channel: bool) -> None:
    q, k, v, decay = inputs(length=70, v=5, vector=vector, dtype=torch.float32)
    decay = decay.expand_as(v) if per_value_channel else decay
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results.append(attend(q, k, v, decay, form=form, per_value_channel=per_value_channel))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("form", "convention"), [*itertools.product(PLAIN, CONVENTIONS), ("scans", "eq17"), ("auto", "eq17")]
)
@pytest.mark.parametrize("normalized", [True, False])
def test_one_mask_per_channel_of_values(form: str, convention: str, normalized: bool) -> None:
    """Compare with one head per channel of values, with the decays of that channel."""
    q, k, v, _ = inputs(length=39, heads=2)
    decay = F.logsigmoid(torch.randn(v.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 1)
    options = {"normalized": normalized, "mask_convention": convention, "form": form}
    of_head = {**options, "form": "chunked" if form == "scans" else form}
    one = [attend(q, k, v[..., c : c + 1], decay[..., c], **of_head) for c in range(v.shape[-1])]
    y = attend(q, k, v, decay, per_value_channel=True, **options)
    torch.testing.assert_close(y, torch.cat(one, -1), rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x, per_value_channel=True, **options),
        [x[:1, :9].detach().requires_grad_() for x in (q, k, v, decay)],
        fast_mode=True,
        atol=1e-7,
    )
    with torch.inference_mode():
        torch.testing.assert_close(attend(q, k, v, decay, per_value_channel=True, **options), y)
    for wrong in (torch.zeros_like(k), torch.zeros(2, 39, 2)):
        with pytest.raises(ValueError, match=r"log_decay \(2, 39, 2.*\): expected \(2, 39, 2, 3\)$"):
            attend(q, k, v, wrong, per_value_channel=True)
    logits = torch.randn(q.shape[:3], dtype=q.dtype)
    for decays in ({}, {"decay_logits": logits}):  # the same for every channel
        assert torch.equal(attend(q, k, v, per_value_channel=True, **decays), attend(q, k, v, **decays))


@pytest.mark.parametrize("per_value_channel", [False, True])
def test_float16_gradients_of_normalizers_are_finite(per_value_channel: bool) -> None:
    """Strong decays leave small normalizers, whose gradients grow with the factor that keeps sums inside float16."""
    q, k, v, decay = inputs(length=70, k=128, v=128, vector=True, dtype=torch.float32)
    leaves = [F.normalize(x, dim=-1) for x in (q, k)] + [v, 20 * decay]
    results = []
    for dtype in (torch.float16, torch.float64):
        x = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        y = attend(*x, per_value_channel=per_value_channel)
        results.append(torch.autograd.grad((y * v.to(dtype)).sum(), x[:3]))
    for got, exact in zip(*results, strict=True):
        assert (got.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("tokens", ["all", "padded", "packed"])
def test_bfloat16_gradients_of_masks_per_channel_of_values(tokens: str) -> None:
    """Use strong decays: gradients of queries and keys nearly cancel between numerators and normalizers."""
    q, k, v, decay = inputs(length=100, k=32, v=32, vector=True, dtype=torch.float32)
    leaves = [F.normalize(x, dim=-1) for x in (q, k)] + [v, decay * torch.logspace(0, 2, 32)]
    options: dict[str, Tensor] = {}
    if tokens == "padded":
        options["mask"] = torch.arange(100) % 7 < torch.tensor([[7], [5]])
    if tokens == "packed":
        leaves, options["cu_seqlens"] = [x[:1] for x in leaves], torch.tensor([0, 0, 30, 31, 31, 100])
    leaves = [x.bfloat16() for x in leaves[:3]] + leaves[3:]
    results = []
    for dtype in (None, torch.float64):
        x = [leaf.detach().to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
        y = attend(*x, per_value_channel=True, form="scans" if dtype is None else "chunked", **options)
        results.append([y, *torch.autograd.grad((y * leaves[2].flip(1)).sum(), x)])
    errors = [((got.double() - exact).norm() / exact.norm()).item() for got, exact in zip(*results, strict=True)]
    assert max(errors) < 8e-3, errors


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_forms_agree_over_chunks(dtype: torch.dtype, tolerance: float, vector: bool, convention: str) -> None:
    q, k, v, decay = inputs(vector=vector, dtype=dtype)
    forms = ("scans", *PLAIN) if vector and convention == "eq17" else PLAIN
    y = [attend(q, k, v, decay, mask_convention=convention, form=form) for form in forms]
    for other in y[1:]:
        torch.testing.assert_close(other, y[0], rtol=tolerance, atol=tolerance)


def test_float32_stays_exact_over_a_long_sequence() -> None:
    q, k, v, decay = inputs(length=4000, batch=1, heads=1, dtype=torch.float32)
    exact = attend(q.double(), k.double(), v.double(), decay.double(), form="chunked")
    for form in ("parallel", "chunked"):
        torch.testing.assert_close(attend(q, k, v, decay, form=form).double(), exact, rtol=1e-5, atol=1e-5)


@each_form
@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("is_cuda", [False, True])
def test_float32_stays_exact_after_closed_gates(
    monkeypatch: pytest.MonkeyPatch, form: str, vector: bool, length: int, is_cuda: bool
) -> None:
    """Keep the digits of small differences after closed gates, whose running sums are thousands of times larger."""
    monkeypatch.setattr(Tensor, "is_cuda", is_cuda)
    q, k, v, decay = inputs(length=length, batch=1, vector=vector)
    decay = 0.1 * decay
    decay[:, :50], decay[:, 60::9] = -torch.inf, -torch.inf
    results = []
    for dtype, how in ((torch.float64, "recurrent"), (torch.float32, form)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, decay)]
        y = attend(*leaves, form=how)
        results.append([y.detach(), *torch.autograd.grad((y * v.detach()).sum(), leaves)])
    for exact, got in zip(*results, strict=True):
        assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_missing_decay_equals_decay_one_and_logits_equal_log_decay() -> None:
    q, k, v, decay = inputs(length=70)
    torch.testing.assert_close(attend(q, k, v), attend(q, k, v, torch.zeros_like(decay)))
    gate = torch.randn(2, 70, 2, dtype=torch.float64)
    torch.testing.assert_close(
        attend(q, k, v, decay_logits=gate),
        attend(q, k, v, F.logsigmoid(gate)),
    )
    everywhere_the_mean = attend(torch.ones_like(q), torch.ones_like(k), v)
    torch.testing.assert_close(everywhere_the_mean, v.mean(1, keepdim=True).expand_as(v), rtol=1e-6, atol=1e-6)


@each_form
def test_padding_changes_nothing(form: str, vector: bool) -> None:
    q, k, v, decay = inputs(length=70, vector=vector)
    real = attend(q, k, v, decay, form=form)
    for left, right in ((9, 0), (0, 80), (3, 2)):
        garbage = [F.pad(x, (0, 0, 0, 0, left, right), value=7.0) for x in (q, k, v)]
        mask = F.pad(torch.ones(2, 70, dtype=torch.bool), (left, right), value=False)
        padded_decay = F.pad(decay, (0, 0, 0, 0, left, right), value=-3.0)
        y = attend(*garbage, padded_decay, mask=mask, form=form)
        torch.testing.assert_close(y[:, left : left + 70], real, rtol=1e-10, atol=1e-12)
        assert (y[~mask] == 0).all()


@each_mask
def test_padding_between_tokens_has_no_decay(form: str, convention: str, vector: bool) -> None:
    q, k, v, decay = inputs(length=70, vector=vector)
    mask = torch.arange(70).expand(2, 70) % 7 != torch.tensor([[0], [4]])
    y = attend(q, k, v, decay, mask=mask, mask_convention=convention, form=form)
    alone = (x[mask].unflatten(0, (2, -1)) for x in (q, k, v, decay))
    expected = attend(*alone, mask_convention=convention, form=form)
    torch.testing.assert_close(y[mask].unflatten(0, (2, -1)), expected, rtol=1e-10, atol=1e-12)


@each_mask
def test_segments_are_separate_sequences(form: str, convention: str, vector: bool) -> None:
    q, k, v, decay = inputs(batch=1, vector=vector)
    bounds = [0, 0, 30, 31, 64, 64, 120, 150, 150]
    y = attend(q, k, v, decay, cu_seqlens=torch.tensor(bounds), mask_convention=convention, form=form)
    for a, b in itertools.pairwise(bounds):
        if a < b:
            parts = (x[:, a:b] for x in (q, k, v, decay))
            alone = attend(*parts, mask_convention=convention, form=form)
            torch.testing.assert_close(y[:, a:b], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", ["auto", *PLAIN])
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize(("batch", "length", "bounds"), [(2, 0, None), (0, 5, None), (1, 0, [0, 0, 0])])
def test_no_tokens(form: str, convention: str, vector: bool, batch: int, length: int, bounds: list[int] | None) -> None:
    leaves = [x.requires_grad_() for x in inputs(length=length, batch=batch, vector=vector)]
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    y = attend(*leaves, cu_seqlens=cu_seqlens, mask_convention=convention, form=form)
    assert y.shape == (batch, length, 2, 3)
    assert [x.shape for x in torch.autograd.grad(y.sum(), leaves)] == [x.shape for x in leaves]


@pytest.mark.parametrize("form", PLAIN)
def test_infinite_decay_cuts_both_directions(form: str) -> None:
    q, k, v, decay = inputs(length=100, batch=1)
    decay[:, 70] = -torch.inf
    y = attend(q, k, v, decay, form=form)
    cut = attend(q, k, v, decay, cu_seqlens=torch.tensor([0, 70, 100]), form=form)
    torch.testing.assert_close(y, cut, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float32, -60.0), (torch.float64, -300.0)])
@pytest.mark.parametrize("form", PLAIN)
def test_large_decays_are_exact(form: str, dtype: torch.dtype, decay: float) -> None:
    """Use keys of zero: such a token receives only the decayed value of the other token."""
    one = torch.ones(1, 2, 1, 1, dtype=dtype)
    for own in (0, 1):
        k = one.clone()
        k[:, own] = 0
        y = attend(one, k, one, decay * one, normalized=False, form=form)[0, own]
        torch.testing.assert_close(y, (decay * one[0, own]).exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("normalized", [True, False])
@each_mask
@pytest.mark.parametrize("bounds", [None, [0, 20, 60, 61, 61, 100, 120]])
def test_local_shards_of_a_sequence(
    normalized: bool, vector: bool, form: str, convention: str, bounds: list[int] | None
) -> None:
    """Compare outputs and all gradients. Some packed sequences begin or end at the bounds of shards."""
    whole = inputs(length=120, batch=1, vector=vector)
    options = {"normalized": normalized, "form": form, "mask_convention": convention}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds)

    def run(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in arguments]
        y = attend(*leaves, **options)
        return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)

    parts = over_ranks(3, lambda index: run([x.chunk(3, 1)[index] for x in whole]))
    for pieces, expected in zip(zip(*parts, strict=True), run(whole), strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-9, atol=1e-10)


def test_sums_over_shards_may_exceed_float16() -> None:
    """300 values of 300 sum to more than 65504, but the result is their mean."""
    q, v = torch.ones(1, 900, 1, 1, dtype=torch.float16), torch.full((1, 900, 1, 2), 300.0, dtype=torch.float16)
    parts = over_ranks(3, lambda index: attend(*(x.chunk(3, 1)[index] for x in (q, q, v))))
    torch.testing.assert_close(torch.cat(parts, 1), v)


@each_form
@pytest.mark.parametrize("normalized", [True, False])
def test_gradients(form: str, vector: bool, normalized: bool) -> None:
    q, k, v, decay = inputs(length=18 if vector else 70, batch=1, heads=1, k=2, v=2, vector=vector)
    arguments = [x.requires_grad_() for x in (q, k, v, decay)]
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x, normalized=normalized, form=form), arguments, fast_mode=True, atol=1e-7
    )


@pytest.mark.parametrize("form", PLAIN)
def test_low_precision_is_computed_in_float32(form: str) -> None:
    q, k, v, decay = inputs(length=70, dtype=torch.bfloat16)
    y = attend(q, k, v, decay, form=form)
    exact = attend(q.double(), k.double(), v.double(), decay.double(), form=form)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).norm() / exact.norm()).item() < 3e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.ones(1, 4, 2, 4)}, ["k (1, 4, 2, 4)"]),
        (
            {"log_decay": torch.ones(1, 4, 2, 5)},
            ["log_decay (1, 4, 2, 5): expected (1, 4, 2) or (1, 4, 2, 1) or (1, 4, 2, 3)"],
        ),
        (
            {"log_decay": torch.ones(1, 4, 2), "decay_logits": torch.ones(1, 4, 2)},
            ["log_decay and decay_logits", "give one"],
        ),
        ({"mask": torch.ones(1, 5, dtype=torch.bool)}, ["mask (1, 5)", "(1, 4)"]),
        ({"mask_convention": "eq18"}, ["'eq18'", "eq17, shifted"]),
        ({"form": "fast"}, ["'fast'", "parallel, recurrent, chunked"]),
        ({"form": "scans"}, ["'scans'", "a per-channel decay", "form='chunked'"]),
        ({"log_decay": torch.ones(1, 4, 2, 3), "form": "triton_tile"}, ["a per-head decay", "form='chunked'"]),
    ],
)
def test_wrong_arguments_are_refused(change: dict, words: list[str]) -> None:
    arguments = {"q": torch.ones(1, 4, 2, 3), "k": torch.ones(1, 4, 2, 3), "v": torch.ones(1, 4, 2, 3), **change}
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
        attend(**arguments)
    assert all(word in str(error.value) for word in words)


def test_the_form_is_selected_once_by_device_length_and_head_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the limits of docs/results/kernels.md."""

    def selected(length: int, dim: int, dtype: torch.dtype = torch.bfloat16, form: str = "auto") -> str:
        q = torch.empty(1, length, 2, dim, dtype=dtype, device="meta")
        arguments = module._Arguments(
            q, q, q, log_decay, logits, None, True, None, None, convention, form, per_value_channel=False
        )
        return module._select_form(arguments)

    log_decay, logits, convention = None, None, "eq17"
    assert selected(64, 64) == "chunked", "there is no kernel for this device"
    monkeypatch.setattr(module, "available", lambda x: x.dtype != torch.float64)
    for dim, longest in ((64, 192), (65, 256), (128, 256)):
        assert [selected(length, dim) for length in (longest, longest + 1)] == ["triton_tile", "triton_chunk"]
    logits = module.ProjectedDecayLogits(torch.empty(1, 256, 8), torch.empty(2, 8), torch.empty(2))
    assert selected(256, 64) == "triton_tile", "LION-s"
    logits = None
    assert selected(20, 129) == selected(20, 64, torch.float32) == "triton_chunk"
    assert selected(20, 257) == selected(20, 64, torch.float64) == selected(0, 64, form="recurrent") == "chunked"
    assert selected(20, 64, form="parallel") == "parallel"
    convention = "shifted"
    assert selected(20, 64) == "chunked"
    log_decay = torch.zeros(1, 20, 2, 64)
    assert selected(20, 64) == "chunked"
    convention = "eq17"
    assert selected(20, 64) == "scans", "a per-channel decay"


def test_packed_segments_need_batch_one() -> None:
    q, k, v, _ = inputs(length=4)
    with pytest.raises(ValueError, match="batch 1"):
        attend(q, k, v, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("bounds", [[0, 2, 3], [0, 5], [1, 4]])
def test_cu_seqlens_must_cover_the_sequence(bounds: list[int]) -> None:
    q, k, v, _ = inputs(length=4, batch=1)
    words = f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}: must run from 0 to the length 4"
    for form in ("auto", *PLAIN):
        with pytest.raises(ValueError, match=words):
            attend(q, k, v, cu_seqlens=torch.tensor(bounds), form=form)


def test_cu_seqlens_must_not_decrease() -> None:
    """Check all bounds, not only the ends: kernels do not check them."""
    q, k, v, _ = inputs(length=4, batch=1)
    with pytest.raises(ValueError, match="cu_seqlens falls from 7 to 2: no segment ends before it begins"):
        attend(q, k, v, cu_seqlens=torch.tensor([0, 7, 2, 4]))
