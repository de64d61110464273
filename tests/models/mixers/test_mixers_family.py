"""Every registered mixer through the same tests: equations, decoding, padding, packing, gradients, documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from models.config import ModelConfig
from models.language_model import LanguageModel
from models.mixers import MIXERS
from tests.models import mixer_equations as equations
from tests.models.mixer_cases import CASES, HEADS, LAYERS, SIZE, assert_close, both_ways, build, name_of, tokens

ROOT = Path(__file__).parents[3]
# The other tiny configurations are image classifiers.
TINY = [path for path in sorted((ROOT / "configs/model").glob("*_tiny.yml")) if "image_size:" not in path.read_text()]
EQUATIONS = {
    name: getattr(equations, name)
    for name in (
        *("gla", "hgrn2", "linear_attention", "lion", "metala", "metala_bidirectional"),
        *("normalised_attention", "retnet", "transnormer", "delta_net", "gated_delta_net", "gdn2", "kda"),
    )
}
ETA = {"softplus": lambda a: torch.log1p(torch.exp(a)) + 1e-6, "sigmoid": lambda a: 1 / (1 + torch.exp(-a)) + 1e-6}


every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
every_causal_case = pytest.mark.parametrize("case", [case for case in CASES if not both_ways(case)], ids=name_of)
every_two_way_case = pytest.mark.parametrize("case", [case for case in CASES if both_ways(case)], ids=name_of)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in EQUATIONS], ids=name_of)
@pytest.mark.parametrize("layer", [0, 1])
def test_equations_of_the_paper(case: tuple[str, dict[str, Any]], layer: int) -> None:
    """Compare 70 tokens, more than one chunk of the linear-time form."""
    name, options = case
    mixer = build(case, torch.float64, layer=layer)
    x = tokens(70, dtype=torch.float64)
    reference = EQUATIONS[name]
    if name not in ("normalised_attention", "transnormer"):
        reference = partial(reference, **options)
    elif options.get("normaliser"):
        reference = partial(reference, eta=ETA[options["normaliser"]])
    expected = reference({k: v.detach() for k, v in mixer.named_parameters()}, x[0], HEADS, layer, LAYERS)
    assert_close(mixer(x)[0], expected, 1e-9)
    assert_close(mixer.float()(x.float())[0], expected, 1e-5)


def test_small_normalizers_of_normalised_attention_stop_at_1e_6() -> None:
    """Compare logits of eta from -22 to 0, in the range of the limit and beyond it."""
    mixer = build(("normalised_attention", {}), torch.float64)
    x = tokens(12, dtype=torch.float64)
    with torch.no_grad():
        mixer.eta_proj.weight.zero_()
        mixer.eta_proj.weight[:, 0] = 1
        x[0, :, 0] = -2 * torch.arange(12)
    weights = {k: v.detach() for k, v in mixer.named_parameters()}
    expected = equations.normalised_attention(
        weights, x[0], HEADS, 0, LAYERS, eta=lambda a: torch.maximum(torch.exp(a), torch.full_like(a, 1e-6))
    )
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_normalizer_of_lstm_is_an_absolute_value(causal: bool) -> None:
    """Inputs are large enough for normalizers beyond 1, and without a feature map they have both signs."""
    options = {"variant": "lstm", "phi": "none", "causal": causal}
    mixer = build(("lion", options), torch.float64)
    x = 4 * tokens(20, dtype=torch.float64)
    expected = EQUATIONS["lion"](
        {k: v.detach() for k, v in mixer.named_parameters()}, x[0], HEADS, 1, LAYERS, **options
    )
    assert_close(mixer(x)[0], expected, 1e-9)


@every_case
@pytest.mark.parametrize(
    ("batch", "bounds", "words"),
    [
        (2, [0, 8], "cu_seqlens.* batch"),
        (1, [0, 5], "runs from 0 to 5: must run from 0 to the length 8"),
        (1, [0, 9], "runs from 0 to 9: must run from 0 to the length 8"),
        (1, [0, 5, 3, 8], "falls from 5 to 3"),
    ],
)
def test_cu_seqlens_that_do_not_cover_the_input_are_refused(case, batch, bounds, words):
    with pytest.raises(ValueError, match=words):
        build(case)(tokens(8, batch=batch), cu_seqlens=torch.tensor(bounds))


@every_causal_case
def test_decoding_equals_the_full_forward(case: tuple[str, dict[str, Any]]) -> None:
    mixer, x = build(case), tokens(21, batch=2)
    full = mixer(x)
    y, state = mixer(x[:, :17], return_state=True)
    parts = [y]
    for t in range(17, 21):
        y, state = mixer(x[:, t : t + 1], state=state, return_state=True)
        parts.append(y)
    assert all(value.shape[0] == 2 for value in state.values())
    assert_close(torch.cat(parts, 1), full, 1e-5)


@every_causal_case
def test_tokens_do_not_see_the_future(case: tuple[str, dict[str, Any]]) -> None:
    mixer, x = build(case), tokens(12)
    changed = x.clone()
    changed[:, 7:] += 1
    assert_close(mixer(changed)[:, :7], mixer(x)[:, :7], 1e-6)
    assert (mixer(changed) - mixer(x))[:, 7:].abs().amin(1).max() > 1e-4


@every_two_way_case
def test_bidirectional_mixers_see_both_directions_and_refuse_a_state(case: tuple[str, dict[str, Any]]) -> None:
    mixer, x = build(case), tokens(12)
    for place in (0, 11):
        changed = x.clone()
        changed[:, place] += 1
        moved = (mixer(changed) - mixer(x)).abs().amax(-1)[0]
        assert moved[11 - place] > 1e-8
    with pytest.raises(ValueError, match="sees both directions"):
        mixer(x, return_state=True)
    with pytest.raises(ValueError, match="sees both directions"):
        mixer(x, state={})


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(case: tuple[str, dict[str, Any]], side: str) -> None:
    mixer, x = build(case), tokens(13, batch=2)
    lengths = (7, 11)
    place = torch.arange(13)
    mask = torch.stack([place >= 13 - n if side == "left" else place < n for n in lengths])
    padded = torch.where(mask[:, :, None], x, 50 * x)
    decodes = not both_ways(case)
    y, state = mixer(padded, mask=mask, return_state=True) if decodes else (mixer(padded, mask=mask), None)
    assert torch.isfinite(y).all()
    follow = tokens(3, batch=2)
    after = mixer(follow, state=state) if decodes else None
    for row, real in enumerate(mask):
        alone = x[row : row + 1, real]
        assert_close(y[row : row + 1, real], mixer(alone), 1e-5)
        if after is not None:
            whole = mixer(torch.cat([alone, follow[row : row + 1]], 1))
            assert_close(after[row : row + 1], whole[:, -3:], 1e-5)


POSITIONS = [case for case in CASES if case[0] in ("attention", "lion", "transnormer")]


@pytest.mark.parametrize("case", POSITIONS, ids=name_of)
def test_padding_between_tokens_changes_nothing(case: tuple[str, dict[str, Any]]) -> None:
    """Test mixers that count positions or have decays alone. A convolution reads padding between tokens as zeros."""
    mixer, x = build(case), tokens(13)
    mask = (torch.arange(13) % 5 > 1)[None]
    y = mixer(torch.where(mask[:, :, None], x, 50 * x), mask=mask)
    assert_close(y[mask][None], mixer(x[mask][None]), 1e-5)


@every_case
def test_packed_segments_are_separate_runs(case: tuple[str, dict[str, Any]]) -> None:
    """Test empty segments too. Each segment continues from its own state."""
    mixer, x = build(case), tokens(75)
    bounds = [0, 5, 5, 69, 75, 75]
    pieces = [x[:, a:b] for a, b in pairwise(bounds)]
    expected = [mixer(piece) for piece in pieces if piece.shape[1]]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    if both_ways(case):
        assert_close(mixer(x, cu_seqlens=cu_seqlens), torch.cat(expected, 1), 1e-5)
        return
    y, state = mixer(x, cu_seqlens=cu_seqlens, return_state=True)
    assert_close(y, torch.cat(expected, 1), 1e-5)
    follow = tokens(10)
    ends = [0, 2, 3, 5, 9, 10]
    y = mixer(follow, cu_seqlens=torch.tensor(ends), state=state)
    for piece, a, b in zip(pieces, ends[:-1], ends[1:], strict=True):
        assert_close(y[:, a:b], mixer(torch.cat([piece, follow[:, a:b]], 1))[:, piece.shape[1] :], 1e-5)


def _chunks(heads: int, dim_k: int, dim_v: int) -> int:
    """The recurrence in chunks of 64 and its states."""
    return heads * (64 * (dim_k + dim_v) + 4 * dim_k * dim_v)


def _delta_rule(o: dict[str, Any], dim_k: int, dim_v: int) -> int:
    """The recurrence in chunks of 64, two triangles, their inverse and its states."""
    dim_k = o.get("head_dim", dim_k)
    dim_v = int(dim_k * o["expand_v"]) if "expand_v" in o else dim_v
    return o.get("num_value_heads", 4) * (64 * (3 * dim_k + 2 * dim_v) + 6 * dim_k * dim_v)


# FLOPs per token of a sequence of 100 tokens besides the matrices, for d = 32 and 4 heads.
OPERATORS: dict[str, Callable[[dict[str, Any]], int]] = {
    # The case with a window of 5 has 4 heads of 12 and reads 5 - 25 / 200 keys in the mean.
    "attention": lambda o: 936 if "window" in o else (2 if o.get("causal", True) else 4) * 32 * 100,
    "delta_net": lambda o: _delta_rule(o, 8, 8),
    "gated_delta_net": lambda o: _delta_rule(o, 6, 12),
    "gdn2": lambda o: _delta_rule(o, 8, 8),
    "kda": lambda o: _delta_rule(o, 8, 8),
    "gla": lambda o: _chunks(4, int(8 * o.get("expand_k", 0.5)), 8),
    "hgrn": lambda o: (16 if o.get("rotation") else 4) * 32,
    "hgrn2": lambda o: _chunks(4, 8, 8),
    "linear_attention": lambda o: _chunks(4, 32 if o.get("feature_map") == "taylor" else 8, 9),
    "lion": lambda o: (
        (1 if o.get("causal", True) else 2)
        * _chunks(4, 8, 8 + (8 if o.get("decay_per") == "value_channel" else 1) * o.get("scaled", True))
    ),
    # `a_log` has two dimensions, but multiplies elementwise.
    "mamba": lambda o: 64 * (7 * 16 + 2) - 2 * 64 * 16,
    "mamba2": lambda o: _chunks(4, 128, 16),
    "metala": lambda o: _chunks(4, int(8 * o.get("expand_k", 0.5)), 8),
    "metala_bidirectional": lambda o: 2 * _chunks(4, 8 if o.get("complex_decay") else 4, 8),
    "normalised_attention": lambda o: _chunks(4, 8, 8),
    "qlstm": lambda o: 4 * 32,
    "retnet": lambda o: _chunks(4, 8, 16),
    "rg_lru": lambda o: 5 * 32,
    "rwkv4": lambda o: 20 * 32,
    "rwkv7": lambda o: 32 * (7 * 64 + 6 * 8),
    "s5": lambda o: 8 * 32,
    "transnormer": lambda o: _chunks(4, 8 if o.get("phase") == "first" else 16, 8),
}


@pytest.mark.parametrize("case", [*CASES, ("attention", {"causal": False})], ids=name_of)
def test_flops_equal_matrices_and_operator(case: tuple[str, dict[str, Any]]) -> None:
    mixer = build(case)
    matrices = sum(p.numel() for p in mixer.parameters() if p.dim() > 1)
    assert mixer.flops_per_token(100) == 2 * matrices + OPERATORS[case[0]](case[1])


@every_case
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_no_tokens(case: tuple[str, dict[str, Any]], shape: tuple[int, int]) -> None:
    """Return no output, and a state that continues a sequence as its start does."""
    mixer, x, follow = build(case), torch.zeros(*shape, SIZE, requires_grad=True), tokens(6, shape[0])
    mask = torch.ones(shape, dtype=torch.bool)
    packed = torch.zeros(3, dtype=torch.int32)
    for arguments in ({}, {"mask": mask}, *([{"cu_seqlens": packed}] if not shape[0] else [])):
        given = x if "cu_seqlens" not in arguments else x.new_zeros(1, 0, SIZE, requires_grad=True)
        y = mixer(given, **arguments)
        assert y.shape == given.shape
        assert torch.autograd.grad(y.sum(), given)[0].shape == given.shape
        if not both_ways(case):
            y, state = mixer(given, **arguments, return_state=True)
            assert y.shape == given.shape
            if "cu_seqlens" in arguments:
                rows = tokens(12)
                expected = torch.cat([mixer(rows[:, :6]), mixer(rows[:, 6:])], 1)
                assert_close(mixer(rows, cu_seqlens=torch.tensor([0, 6, 12]), state=state), expected, 1e-5)
            elif shape[0]:
                assert_close(mixer(follow, state=state), mixer(follow), 1e-5)


@every_case
def test_padding_in_packed_segments_changes_nothing(case: tuple[str, dict[str, Any]]) -> None:
    """Test padding in front, behind, on both sides, between tokens and in a whole segment; each state continues its segment."""
    mixer, x = build(case, torch.float64), tokens(75, dtype=torch.float64)
    bounds, kept = [0, 6, 6, 40, 44, 75, 75], [(2, 6), (6, 6), (6, 30), (44, 44), (45, 73), (75, 75)]
    mask = torch.zeros(1, 75, dtype=torch.bool)
    for a, b in kept:
        mask[:, a:b] = True
    padded = torch.where(mask.unsqueeze(-1), x, 50 * x)
    packed = {"mask": mask, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    y, state = (mixer(padded, **packed), None) if both_ways(case) else mixer(padded, **packed, return_state=True)
    assert torch.isfinite(y).all()
    # Rotations are in float32.
    tolerance = 1e-6 if case[0] == "attention" else 1e-10
    for a, b in kept:
        if a < b:
            assert_close(y[:, a:b], mixer(x[:, a:b]), tolerance)
    if state is None:
        return
    follow, ends = tokens(16, dtype=torch.float64), [0, 2, 4, 7, 9, 13, 16]
    mask = torch.ones(1, 16, dtype=torch.bool)
    # The third segment continues with padding alone, and keeps its state.
    mask[:, [0, 4, 5, 6, 7, 12]] = False
    y, state = mixer(follow, mask=mask, cu_seqlens=torch.tensor(ends), state=state, return_state=True)
    last = tokens(6, dtype=torch.float64)
    end_of = mixer(last, cu_seqlens=torch.arange(7), state=state)
    for i, ((a, b), (start, end)) in enumerate(zip(kept, pairwise(ends), strict=True)):
        real = mask[:, start:end]
        more = follow[:, start:end][real][None]
        expected = mixer(torch.cat([x[:, a:b], more, last[:, i : i + 1]], 1))[:, b - a :]
        assert_close(torch.cat([y[:, start:end][real][None], end_of[:, i : i + 1]], 1), expected, tolerance)


@every_case
def test_gradients_equal_finite_differences(case: tuple[str, dict[str, Any]]) -> None:
    mixer = build(case, torch.float64, size=16, heads=2)
    names = [name for name, _ in mixer.named_parameters()]
    x = tokens(20, dtype=torch.float64, size=16).requires_grad_()

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *mixer.parameters()), fast_mode=True, atol=1e-6)


@every_case
def test_every_parameter_has_a_finite_gradient(case: tuple[str, dict[str, Any]]) -> None:
    """Test inputs of the usual size, and 100 times as large."""
    mixer = build(case)
    for scale in (1.0, 100.0):
        mixer.zero_grad()
        x = (scale * tokens(70, batch=2)).requires_grad_()
        mixer(x).square().sum().backward()
        for name, parameter in [("x", x), *mixer.named_parameters()]:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert scale > 1 or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_tiny_configurations_learn(path: Path) -> None:
    model = LanguageModel(tiny(path), seed=3)
    batch = torch.randint(0, 512, (2, 17), generator=torch.Generator().manual_seed(1))
    data, labels, weight = batch[:, :-1], batch[:, 1:].contiguous(), torch.full((2, 16), 1 / 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(data, labels, weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_every_mixer_has_a_tiny_configuration() -> None:
    assert {name for path in TINY for name in tiny(path).mixers} == set(MIXERS)


@pytest.mark.parametrize(
    ("name", "mixers"),
    [("lion", ("metala", "attention", "lion")), ("gated_delta_net", ("gated_delta_net",) * 3 + ("attention",))],
)
def test_hybrid_model_decodes(name: str, mixers: tuple[str, ...]) -> None:
    config = tiny(ROOT / f"configs/model/{name}_hybrid_tiny.yml")
    assert config.mixers == mixers
    model = LanguageModel(config, seed=3)
    data = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full = model(data)
        logits, state = model(data[:, :8], return_state=True)
        parts = [logits]
        for t in range(8, 12):
            logits, state = model(data[:, t : t + 1], state=state, return_state=True)
            parts.append(logits)
    assert_close(torch.cat(parts, 1), full, 1e-5)


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_the_documentation_has_a_row_that_counts_the_parameters(name: str) -> None:
    """Parse the column `parameters`, a sum of products of numbers, d (hidden_size) and h (heads), for default options."""
    rows = re.findall(
        r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/reference/mixers.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [row for row, _ in rows].count(name) == 1, f"docs/reference/mixers.md needs one row of {name}"
    cells = [cell.strip() for cell in dict(rows)[name].split("|")]
    formula = " + ".join("*".join(term.split()) for term in cells[2].replace("²", "**2").split("+"))
    assert re.fullmatch(r"[\d.dh+*/ ]+", formula), cells[2]
    for size, heads in ((64, 4), (128, 2)):
        count = sum(p.numel() for p in build((name, {}), size=size, heads=heads).parameters())
        assert count == eval(formula, {"d": size, "h": heads}), cells[2]


def tiny(path: Path) -> ModelConfig:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    return ModelConfig(**{key: value for key, value in values.items() if value is not None})
