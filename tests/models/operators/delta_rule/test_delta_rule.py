"""The delta rule's chunked form against its token loop and flash-linear-attention's reference loops, and its gradients."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from models.operators.delta_rule.chunked import chunked_form
from models.operators.delta_rule.delta_rule import delta_rule
from models.operators.delta_rule.naive import recurrent_form
from models.operators.delta_rule.select_kernel import initial, operands

VARIANTS: dict[str, dict[str, Any]] = {
    "no decay": {"decay": None},
    "per head": {"decay": "head"},
    "per channel": {"decay": "channel"},
    "vector gates": {"decay": "channel", "erase": "channel", "write": "channel"},
    "removal key": {"decay": "channel", "erase": "channel", "removal": True},
    "removal key per head": {"decay": "head", "removal": True},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
Arguments = dict[str, Tensor | None]


def draw(
    length: int,
    variant: str,
    *,
    decay_factor: float = 0.5,
    dim_k: int = 5,
    dim_v: int = 6,
    batch: int = 2,
    heads: int = 2,
) -> Arguments:
    """Return arguments of the operator in float64, with keys of length one and erase gates up to 2."""
    generator = torch.Generator().manual_seed(length)
    settings = VARIANTS[variant]

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, length, heads, *shape, generator=generator, dtype=torch.float64)

    def key() -> Tensor:
        return torch.nn.functional.normalize(normal(dim_k), dim=-1)

    decay = {"head": (), "channel": (dim_k,)}.get(settings["decay"])
    return {
        "q": normal(dim_k),
        "k": key(),
        "v": normal(dim_v),
        "log_decay": None if decay is None else -decay_factor * normal(*decay).abs(),
        "erase": 2 * normal(*([dim_k] if "erase" in settings else [])).sigmoid(),
        "write": normal(*([dim_v] if "write" in settings else [])).sigmoid(),
        "removal_key": key() if "removal" in settings else None,
    }


def both_forms(arguments: Arguments, state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> list[Any]:
    x = operands(**arguments, scale=0.5)
    state = initial(x, state, cu_seqlens)
    return [form(x, state, cu_seqlens) for form in (recurrent_form, chunked_form)]


@every_variant
def test_states_stay_float32_under_autocast(variant: str) -> None:
    arguments = {name: None if x is None else x.float() for name, x in draw(70, variant).items()}
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results.append([tensor for form in both_forms(arguments) for tensor in form])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


def reference_loops(operator: str) -> ModuleType:
    """Return `fla.ops.<operator>.naive`. The package itself needs Triton, and this file of it does not."""
    pytest.importorskip("einops")
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("flash-linear-attention is not installed")
    path = Path(package.submodule_search_locations[0], "ops", operator, "naive.py")
    spec = importlib.util.spec_from_file_location("naive_loops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@every_variant
@pytest.mark.parametrize("length", [0, 1, 16, 63, 130])
def test_chunked_form_equals_the_token_loop(variant: str, length: int) -> None:
    arguments = draw(length, variant)
    state = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, actual = both_forms(arguments, state)
    assert_equal(actual, expected)


@every_variant
@pytest.mark.parametrize("decay_factor", [3.0, 60.0])
def test_strong_decays_stay_exact(variant: str, decay_factor: float) -> None:
    """Use the form for strong decays, with decays that clear the state among them."""
    arguments = draw(70, variant, decay_factor=decay_factor)
    if arguments["log_decay"] is not None:
        arguments["log_decay"][:, ::9] = -torch.inf
        arguments["log_decay"][:, 5::11] = 0.0
    expected, actual = both_forms(arguments)
    assert_equal(actual, expected)


@every_variant
def test_packed_sequences_equal_separate_runs(variant: str) -> None:
    arguments, bounds = draw(100, variant, batch=1), [0, 3, 3, 70, 99, 100]
    state = torch.randn(5, 2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    o, final = delta_rule(**arguments, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    for s, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: None if x is None else x[:, start:end] for name, x in arguments.items()}
        expected = delta_rule(**part, initial_state=state[s : s + 1], output_final_state=True)
        assert_equal((o[:, start:end], final[s : s + 1]), expected)
    naive, _ = both_forms(arguments, state, torch.tensor(bounds))
    assert_equal((naive[0] / 0.5 * 5**-0.5, naive[1]), (o, final))


@every_variant
@pytest.mark.parametrize("decay_factor", [0.5, 60.0])
def test_gradients_follow_finite_differences(variant: str, decay_factor: float) -> None:
    arguments = draw(18, variant, decay_factor=decay_factor, dim_k=2, dim_v=2, batch=1, heads=1)
    names = [name for name, x in arguments.items() if x is not None]
    state = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(state: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        given = arguments | dict(zip(names, tensors, strict=True))
        return delta_rule(**given, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 1, 18]))

    inputs = [state, *(arguments[name] for name in names)]
    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs], fast_mode=True)


def test_equal_to_the_reference_loops_of_flash_linear_attention() -> None:
    """Compare in float32, the dtype of their loops."""

    def single(variant: str) -> Arguments:
        return {name: None if x is None else x.float() for name, x in draw(40, variant).items()}

    def compare(arguments: Arguments, expected: tuple[Tensor, Tensor], **settings: float) -> None:
        actual = delta_rule(**arguments, output_final_state=True, **settings)
        assert_equal(actual, expected, 2e-5)

    x = single("no decay")
    x["write"] = x["erase"]
    loop = reference_loops("delta_rule").delta_rule_recurrence
    o, state = loop(*(x[name].transpose(1, 2) for name in ("q", "k", "v", "erase")))
    compare(x, (o.transpose(1, 2), state))

    x = single("per head")
    x["write"] = x["erase"]
    inputs = [x[name] for name in ("q", "k", "v", "erase", "log_decay")]
    loop = reference_loops("gated_delta_rule").naive_recurrent_gated_delta_rule
    compare(x, loop(*inputs, output_final_state=True))

    x = single("per channel")
    x["write"] = x["erase"]
    inputs = [x[name] for name in ("q", "k", "v", "log_decay", "erase")]
    compare(x, reference_loops("kda").naive_recurrent_kda(*inputs, output_final_state=True))

    x = single("vector gates")
    inputs = [x[name] for name in ("q", "k", "v", "log_decay", "erase", "write")]
    compare(x, reference_loops("gdn2").naive_recurrent_gdn2(*inputs, output_final_state=True))

    x = single("removal key")
    x["write"] = torch.ones_like(x["write"])
    rows = [x["q"], x["k"], x["v"], -x["removal_key"], x["erase"] * x["removal_key"], x["log_decay"]]
    o, state = reference_loops("generalized_delta_rule/dplr").dplr_recurrence(*(row.transpose(1, 2) for row in rows))
    compare(x, (o.transpose(1, 2), state))


def test_sixteen_bits_keep_their_dtype_and_a_float32_state() -> None:
    x = {name: x.bfloat16() for name, x in draw(20, "per channel").items() if x is not None}
    o, state = delta_rule(**x, output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert delta_rule(**x)[1] is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": (1, 8, 2, 4)}, "q .* k .* v .*: expected .*; repeat q and k for grouped value heads"),
        (
            {"log_decay": (1, 8, 2, 1)},
            r"log_decay \[1, 8, 2, 1\]: expected \[1, 8, 2\], one per head, or \[1, 8, 2, 5\], one per",
        ),
        ({"erase": (1, 8, 2, 6)}, r"erase \[1, 8, 2, 6\]: expected"),
        ({"write": (1, 8, 2, 5)}, r"write \[1, 8, 2, 5\]: expected"),
        (
            {"write": None, "erase": (1, 8, 2, 5)},
            r"write = None with erase \[1, 8, 2, 5\]: .* give write \[1, 8, 2\] or \[1, 8",
        ),
        ({"removal_key": (1, 8, 2)}, r"removal_key \[1, 8, 2\]: expected \[1, 8, 2, 5\]"),
        ({"initial_state": (2, 2, 5, 6)}, r"initial_state \[2, 2, 5, 6\]: expected \[1, 2, 5, 6\]"),
    ],
)
def test_shapes_that_do_not_agree_are_refused(wrong: dict[str, tuple[int, ...] | None], message: str) -> None:
    changed = {name: None if shape is None else torch.zeros(shape) for name, shape in wrong.items()}
    arguments = draw(8, "per channel", batch=1) | changed
    with pytest.raises(ValueError, match=message):
        delta_rule(**arguments)
