"""When blocks are captured and when they run eagerly; tests/gpu/test_cuda_graph.py covers CUDA itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.engine import cuda_graph
from megatron_lite.engine.cuda_graph import GraphedBlocks

SMALL, LARGE = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graphs:
        parameters: tuple[Tensor, ...] = ()

        def __init__(self, _blocks: Any, _layers: Any, like: Tensor) -> None:
            self.rows = len(like)

        def has_moved_parameters(self) -> bool:
            return False

    class Replay:
        @staticmethod
        def apply(graphs: Graphs, *_: Any) -> str:
            return f"replay of {graphs.rows}"

    monkeypatch.setattr(cuda_graph, "_Graphs", Graphs)
    monkeypatch.setattr(cuda_graph, "_Replay", Replay)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)


def build(blocks: Any = lambda _: "eager") -> Any:
    return GraphedBlocks(blocks, lambda _, **__: "fallback", [])


def test_third_call_of_a_shape_is_captured() -> None:
    call = build()
    results = [call(x) for x in (SMALL, LARGE, LARGE, SMALL, SMALL, SMALL, LARGE, SMALL)]
    assert results == ["eager"] * 5 + ["replay of 2", "fallback", "replay of 2"]
    assert call(SMALL, mask=SMALL) == "fallback"
    with torch.no_grad():
        assert call(SMALL) == "fallback"


def test_blocks_that_synchronise_are_not_captured_with_one_warning() -> None:
    def blocks(_: Tensor) -> str:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)
        warnings.warn("something else", stacklevel=2)
        return "eager"

    call = build(blocks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [call(SMALL) for _ in range(4)] == ["eager", "eager", "fallback", "fallback"]
    texts = [str(warning.message) for warning in caught]
    assert len([text for text in texts if text.startswith("parallel.cuda_graph = true: a block synchronises")]) == 1
    assert texts.count("something else") == 2
    assert len(texts) == 3


def test_failed_capture_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "_Graphs", fails)
    call = build()
    assert [call(SMALL), call(SMALL)] == ["eager"] * 2
    with pytest.raises(RuntimeError, match=r"parallel.cuda_graph = true: .* set it to false"):
        call(SMALL)


def test_modules_read_aliases_of_their_parameters_during_the_capture() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    weight, bias = first.weight, first.bias
    with cuda_graph._aliased([first, second]) as pairs:
        assert [parameter for parameter, _ in pairs] == [weight, bias]
        assert first.weight is second.weight is pairs[0][1]
        assert first.weight is not weight
        (gradient,) = torch.autograd.grad(first(torch.ones(1, 2)).sum(), [pairs[0][1]])
        assert gradient.shape == weight.shape
        assert first.weight.data_ptr() == weight.data_ptr()
    assert first.weight is second.weight is weight
    assert weight.grad is None
