"""Every mixer on local shards of a sequence, one thread per rank, equals itself on the whole: outputs and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config import ModelConfig
from models.language_model import LanguageModel
from models.layers.embedding import LearnedPositions
from models.layers.short_convolution import CausalConvolution
from models.mixers import MIXERS
from models.operators.context_parallel import context_parallel, context_parallel_group, shard_maps
from models.operators.delta_rule import chunked
from models.operators.delta_rule.delta_rule import delta_rule
from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.scan.linear_scan import scan
from models.operators.scan.selective_scan import selective_scan
from tests.models.mixer_cases import CASES, assert_close, build, name_of, tokens
from tests.models.rank_threads import Meeting, Threads, over_ranks

SPLIT = [case for case in CASES if MIXERS[case[0]].supports_context_parallel]
every_case = pytest.mark.parametrize("case", SPLIT, ids=name_of)


def compare(
    module: nn.Module,
    x: Tensor,
    count: int,
    tolerance: float,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    meeting: Meeting | None = None,
) -> None:
    """Compare outputs, the gradient of x and of every parameter. The gradient of the output differs per token."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(x.dtype)
    if mask is not None:
        weight = weight * mask.unsqueeze(-1)
    whole = x.clone().requires_grad_()
    expected = module(whole, mask=mask, cu_seqlens=cu_seqlens)
    module.zero_grad()
    (expected * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    copies = [copy.deepcopy(module) for _ in range(count)]
    shards = [t.clone().requires_grad_() for t in x.chunk(count, 1)]
    masks = [None] * count if mask is None else mask.chunk(count, 1)

    def work(index: int) -> Tensor:
        copies[index].zero_grad()
        y = copies[index](shards[index], mask=masks[index], cu_seqlens=cu_seqlens)
        (y * weight.chunk(count, 1)[index]).sum().backward()
        return y.detach()

    y = torch.cat(over_ranks(count, work, meeting), 1)
    if mask is not None:
        y, expected = y[mask], expected[mask]
    assert_close(y, expected.detach(), tolerance)
    assert_close(torch.cat([t.grad for t in shards], 1), whole.grad, tolerance)
    for name, gradient in gradients.items():
        parts = [dict(piece.named_parameters())[name].grad for piece in copies]
        assert_close(sum(parts), gradient, tolerance)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two levels of running sums for the few tokens of these tests."""
    monkeypatch.setattr("models.operators.cumulative_decay._CHUNK", 4)


@every_case
@pytest.mark.parametrize("count", [2, 4])
def test_local_shards_equal_the_whole(case: tuple[str, dict[str, Any]], count: int) -> None:
    compare(build(case, torch.float64), tokens(36, batch=2, dtype=torch.float64), count, 1e-9)


@every_case
def test_local_shards_equal_the_whole_in_float32(case: tuple[str, dict[str, Any]]) -> None:
    compare(build(case), tokens(120, batch=2), 3, 1e-4)


def test_rwkv4_keys_of_any_size() -> None:
    compare(build(("rwkv4", {}), torch.float64), 200 * tokens(24, batch=2, dtype=torch.float64), 3, 1e-9)


@every_case
def test_sixteen_bit_shards_follow_the_whole_in_float32(case: tuple[str, dict[str, Any]]) -> None:
    mixer, x = build(case).bfloat16(), tokens(48, batch=2).bfloat16()
    got = torch.cat(over_ranks(3, lambda index: mixer(x.chunk(3, 1)[index])), 1)
    expected = mixer.float()(x.float())
    assert got.dtype == torch.bfloat16
    assert ((got.float() - expected).norm() / expected.norm()).item() < 0.05


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_across_ranks(case: tuple[str, dict[str, Any]], side: str) -> None:
    """One row is padded beyond the first (last) shard, the other within it."""
    place = torch.arange(24)
    mask = torch.stack([place >= 11, place >= 3])
    mask = mask if side == "left" else mask.flip(1)
    compare(build(case, torch.float64), tokens(24, batch=2, dtype=torch.float64), 3, 1e-9, mask=mask)


@every_case
def test_packed_sequences_across_ranks(case: tuple[str, dict[str, Any]]) -> None:
    """Pack sequences inside one shard, over two or three, with bounds of shards as bounds, and empty ones."""
    mixer, x = build(case, torch.float64), tokens(16, dtype=torch.float64)
    for bounds in ([0, 1, 3, 3, 7, 12, 16], [0, 4, 4, 5, 16, 16]):
        compare(mixer, x, 4, 1e-9, cu_seqlens=torch.tensor(bounds))


WINDOWED = [case for case in SPLIT if "window" in case[1]]


@pytest.mark.parametrize("case", WINDOWED, ids=name_of)
def test_window_beyond_the_previous_shard(case: tuple[str, dict[str, Any]]) -> None:
    for bounds in (None, torch.tensor([0, 1, 7, 12])):
        compare(build(case, torch.float64), tokens(12, dtype=torch.float64), 4, 1e-9, cu_seqlens=bounds)


@pytest.mark.parametrize("case", WINDOWED, ids=name_of)
def test_padding_between_real_tokens_does_not_shorten_a_window(case: tuple[str, dict[str, Any]]) -> None:
    place = torch.arange(24)
    mask = ((place < 6) | (place > 9))[None]
    compare(build(case, torch.float64), tokens(24, dtype=torch.float64), 3, 1e-9, mask=mask)


@pytest.mark.parametrize("case", [*(case for case in SPLIT if case[0] != "attention"), *WINDOWED], ids=name_of)
def test_exchanged_elements_do_not_grow_with_the_sequence(case: tuple[str, dict[str, Any]]) -> None:
    sent = []
    for length in (16, 64):
        meeting = Meeting(2)
        compare(build(case), tokens(length), 2, 1e-4, meeting=meeting)
        sent.append(meeting.gathers)
    assert sent[0] == sent[1]
    assert sent[0]


def _selective(x: Tensor, b: Tensor, dt: Tensor, decay: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    a = -torch.linspace(0.1, 2.0, 2 * 4 * 3, dtype=x.dtype).view(2, 4, 3)
    return selective_scan(x, dt.abs(), a, b[..., :3], x[..., 1:], cu_seqlens=cu_seqlens)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    decay = decay.squeeze(-1) if decay.shape[-1] == 1 else decay
    gate = v[..., 0].sigmoid()
    return delta_rule(
        q, F.normalize(k, dim=-1), v, decay, 2 * gate, gate, output_final_state=True, cu_seqlens=cu_seqlens
    )


OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]] = {
    "recurrence": lambda q, k, v, decay, cu_seqlens: gated_linear_attention(q, k, v, decay, cu_seqlens=cu_seqlens),
    "scan": lambda q, k, v, decay, cu_seqlens: scan(q[:, :, 0], decay.expand_as(q)[:, :, 0], cu_seqlens=cu_seqlens),
    "selective scan": _selective,
    "delta rule": _delta_rule,
}


@pytest.mark.parametrize(
    "bounds", [None, [0, 1, 3, 3, 14, 24, 32], [0, 8, 8, 9, 32], [0, 32], [0, 7, 26, 32, 32], [0, 0, 15, 17, 32]]
)
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("operator", OPERATORS)
def test_final_states(operator: str, bounds: list[int] | None, scalar: bool) -> None:
    """Final states of a shard equal those of the sequences that end in it."""
    inputs = operands(32, torch.float64, scalar)
    run, cu_seqlens = OPERATORS[operator], None if bounds is None else torch.tensor(bounds)
    y, final = run(*inputs, cu_seqlens)
    results = over_ranks(4, lambda index: run(*(x.chunk(4, 1)[index] for x in inputs), cu_seqlens))
    assert_close(torch.cat([y for y, _ in results], 1), y, 1e-12)
    for segment, (start, end) in enumerate(pairwise(bounds or [0, 32])):
        if start < end:
            assert_close(results[(end - 1) // 8][1][segment], final[segment], 1e-12)


def test_gradient_of_outgoing_states_equals_autograd() -> None:
    """Compare with a loop over the shards; kernels use this function in place of autograd."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(4, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    transitions, ends, weights = draw(1, 2, 3, 3), draw(1, 2, 3, 5).requires_grad_(), draw(1, 2, 3, 5)
    state, loss = torch.zeros_like(weights[0]), torch.zeros((), dtype=torch.float64)
    for transition, end, weight in zip(transitions, ends, weights, strict=True):
        loss = loss + (weight * state).sum()
        state = transition @ state + end
    (expected,) = torch.autograd.grad(loss, ends)

    def work(index: int) -> Tensor:
        maps, _ = shard_maps(8, None, None)
        assert maps is not None
        _, following = maps.incoming_state(transitions[index], ends[index].detach())
        return maps.outgoing_gradient(following, weights[index])

    assert_close(torch.stack(over_ranks(4, work)), expected, 1e-12)


def test_delta_rule_computes_the_wy_form_once_per_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share it between the map of the shard and the outputs."""
    calls, wy = [], chunked._wy
    monkeypatch.setattr(chunked, "_wy", lambda *arguments: calls.append(arguments) or wy(*arguments))
    inputs = operands(32, torch.float64, False)
    over_ranks(4, lambda index: _delta_rule(*(x.chunk(4, 1)[index] for x in inputs)))
    assert len(calls) == 4


def operands(length: int, dtype: torch.dtype, scalar: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, length, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = -torch.rand(1, length, 2, 1 if scalar else 4, generator=generator, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (q, k, v, decay))


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("operator", [gated_linear_attention, _delta_rule])
def test_infinite_decays_stay_exact(operator: Callable[..., tuple[Tensor, Tensor]], scalar: bool) -> None:
    q, k, v, decay = operands(32, torch.float64, scalar)
    decay = decay * 30
    decay[:, 11] = decay[:, 16] = -torch.inf
    leaves = [x.clone().requires_grad_() for x in (q, k, v, decay)]
    expected, _ = operator(*leaves)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)

    def work(index: int) -> tuple[Tensor, ...]:
        parts = [x.chunk(4, 1)[index].clone().requires_grad_() for x in (q, k, v, decay)]
        y, _ = operator(*parts)
        return y.detach(), *torch.autograd.grad(y.square().sum(), parts)

    for got, wanted in zip(zip(*over_ranks(4, work), strict=True), (expected, *gradients), strict=True):
        assert_close(torch.cat(got, 1), wanted.detach(), 1e-12)


def test_float32_stays_exact_over_long_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scan 20000 tokens per shard with slow decays and complex phases: running sums lose no digits."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 40000, 3, 2, generator=generator, dtype=torch.float64)
    decay = torch.tensor([[-1e-4, 3.0], [-1e-3, 0.7], [-3e-5, 6.1]], dtype=torch.float64).expand_as(x)
    x, decay = torch.view_as_complex(x), torch.view_as_complex(decay.contiguous())
    single = x.to(torch.complex64), decay.to(torch.complex64)
    exact = scan(*(t.to(torch.complex128) for t in single))[0]

    def work(index: int) -> Tensor:
        return scan(*(t.chunk(2, 1)[index] for t in single))[0]

    error = (torch.cat(over_ranks(2, work), 1) - exact).abs().max()
    assert error < 2 * (scan(*single)[0] - exact).abs().max()


@pytest.mark.parametrize("recompute", [False, True])
def test_language_model_with_positions(recompute: bool) -> None:
    """Run embedding, hybrid blocks with and without activation checkpointing, and the loss."""
    config = ModelConfig(
        vocab_size=31,
        num_layers=4,
        hidden_size=32,
        num_heads=4,
        mixers=("metala", "lion", "rwkv4", "mamba"),
        positions="learned",
        max_positions=24,
        intermediate_size=48,
    )
    lm = LanguageModel(config, seed=5).double()
    ids = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1, 1)
    expected = lm(ids, labels)
    expected.backward()
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    copies = [copy.deepcopy(lm) for _ in range(3)]

    def work(index: int) -> Tensor:
        model = copies[index]
        model.zero_grad()
        x = model.embedding(ids.chunk(3, 1)[index])
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        loss = model.head(x, labels=labels.chunk(3, 1)[index])
        loss.backward()
        return loss.detach()

    assert_close(sum(over_ranks(3, work)), expected.detach(), 1e-12)
    for name, gradient in gradients.items():
        assert_close(sum(dict(piece.named_parameters())[name].grad for piece in copies), gradient, 1e-9)


def test_positions_are_those_of_the_whole_sequence() -> None:
    """Refuse a sequence with more tokens than positions on every rank. Padding and other packed sequences use no position."""
    sizes = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 1}
    layer = LearnedPositions(ModelConfig(**sizes, positions="learned", max_positions=10), 10)

    def run(length: int, mask: Tensor | None = None, bounds: list[int] | None = None) -> list[Any]:
        ids = torch.zeros(2 if bounds is None else 1, length, dtype=torch.long)
        masks = [None] * 4 if mask is None else mask.chunk(4, 1)
        cu_seqlens = None if bounds is None else torch.tensor(bounds)

        def work(index: int) -> Any:
            try:
                return layer(ids.chunk(4, 1)[index], masks[index], cu_seqlens, None)[0]
            except ValueError as error:
                return str(error)

        actual = over_ranks(4, work)
        if not isinstance(actual[0], str):
            assert torch.equal(torch.cat(actual, 1), layer(ids, mask, cu_seqlens, None)[0])
        return actual

    run(8)
    for arguments, longest in (((12,), 12), ((40,), 40), ((16, None, [0, 4, 15, 16]), 11)):
        words = f"a sequence of {longest} tokens has more positions than model.max_positions = 10"
        assert all(words in actual for actual in run(*arguments))
    run(16, None, [0, 4, 14, 16])
    mask = torch.arange(16).expand(2, 16) >= torch.tensor([[6], [9]])
    run(16, mask)
    mask = mask.index_fill(1, torch.tensor([0]), True)
    assert all("a sequence of 11 tokens" in actual for actual in run(16, mask))


def test_context_belongs_to_the_thread_that_set_it() -> None:
    assert context_parallel_group() is None
    group = Threads(1, 2, Meeting(2))
    with context_parallel(group):
        assert context_parallel_group() is group
        with context_parallel(None):
            assert context_parallel_group() is None
        assert context_parallel_group() is group
    assert context_parallel_group() is None


def config(*mixers: str, **options: Any) -> ModelConfig:
    given = {mixers[0]: options} if options else {}
    return ModelConfig(vocab_size=8, num_layers=2, hidden_size=32, num_heads=4, mixers=mixers, mixer_options=given)


def test_models_name_mixers_without_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not config("metala", "attention").context_parallel_error()
    assert config("kda", "attention", conv_kernel=7).conv_kernels() == {"model.mixer_options.kda.conv_kernel": 7}
    assert config("metala", "attention", conv_kernel=7, convolution=False).conv_kernels() == {}
    monkeypatch.setattr(MIXERS["attention"], "supports_context_parallel", False)
    error = config("metala", "attention").context_parallel_error()
    assert error.startswith("model.mixers: 'attention' does not support context parallelism; supported are delta_net,")


def test_unsupported_splits_are_refused_in_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = LanguageModel(config("metala", "attention"), seed=1), torch.zeros(1, 8, dtype=torch.long)

    def group() -> Threads:
        return Threads(0, 1, Meeting(1))

    x = lm.embedding(ids)
    monkeypatch.setattr(MIXERS["attention"], "supports_context_parallel", False)
    with (
        context_parallel(group()),
        pytest.raises(ValueError, match="mixer Attention does not support context parallelism"),
    ):
        lm.blocks[1](x)
    with context_parallel(group()), pytest.raises(ValueError, match="a state belongs to a whole sequence"):
        lm.blocks[0](x, return_state=True)
    _, state = lm.blocks[0](x, return_state=True)
    with context_parallel(group()):
        with pytest.raises(ValueError, match="a state belongs to a whole sequence"):
            lm.blocks[0](x, state=state)
        with pytest.raises(ValueError, match="a state belongs to a whole sequence"):
            gated_linear_attention(*operands(4, torch.float32, True), initial_state=torch.zeros(1, 2, 4, 4))
        with pytest.raises(ValueError, match="a local shard of 2 tokens is shorter than the 3 tokens before it"):
            CausalConvolution(32, 4, silu=True)(x[:, :2])
        with pytest.raises(ValueError, match=r"runs from 0 to 6: .* from 0 to 8"):
            lm.blocks[0](x, cu_seqlens=torch.tensor([0, 6]))
