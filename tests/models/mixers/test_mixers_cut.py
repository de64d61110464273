"""Tensor parallelism of every mixer: its sharding specs, and that its shards together equal the whole mixer."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.optim.param_groups import parameter_kind
from megatron_lite.parallel.sharding_plan import sharding_specs
from models.mixers import MIXERS
from tests.models.mixer_cases import CASES, assert_close, build, name_of, tokens

# Mamba's selection reads all channels of a group: a layer of one group cannot be cut. The same holds for a norm over all
# channels.
CUT = [
    (name, {"groups": 2}) if name == "mamba" else (name, options)
    for name, options in CASES
    if options.get("norm_over") != "all"
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_sharding_specs_and_kinds(case: tuple[str, dict[str, Any]]) -> None:
    mixer = build(case)
    sharding_specs(mixer)
    for name in mixer.tensor_parallel_plan:
        assert hasattr(mixer, name), f"the plan names {name}, which does not exist"
    for name, _ in mixer.named_parameters():
        assert parameter_kind(mixer, name) in ("norm", "bias", "decay", "weight")
    assert mixer.flops_per_token(512) > 2 * sum(p.numel() for p in mixer.parameters() if p.ndim == 2) * 0.9


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_plan_of_a_mixer_overrides_plan_of_its_submodule(name: str) -> None:
    mixer = build((name, {}))
    specs = sharding_specs(mixer)
    for part, spec in mixer.tensor_parallel_plan.items():
        assert {specs[n] for n in specs if n.split(".")[0] == part} <= {spec}, part


@pytest.mark.parametrize("case", CUT, ids=name_of)
def test_mixer_split_by_heads_equals_the_whole(case: tuple[str, dict[str, Any]]) -> None:
    """Two tensor-parallel ranks as two threads, each with the shards that the sharding specs give it."""
    mixer, x = build(case), tokens(20)
    expected = mixer(x)
    exchange = _Exchange()
    results: list[Tensor | BaseException] = [torch.empty(0)] * 2

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = _cut(mixer, rank, exchange)(x)
        except BaseException as error:
            exchange.barrier.abort()
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert_close(result, expected, 1e-5)


class _Exchange:
    """The sum over two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=200)
        self.parts: list[Tensor] = [torch.empty(0)] * 2

    def sum(self, part: Tensor, rank: int) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        total = self.parts[0] + self.parts[1]
        self.barrier.wait()
        return total


class _Row(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, rank: int, exchange: _Exchange) -> None:
        super().__init__()
        self.weight, self.bias, self.rank, self.exchange = weight, bias, rank, exchange

    def forward(self, x: Tensor) -> Tensor:
        total = self.exchange.sum(F.linear(x, self.weight), self.rank)
        return total if self.bias is None else total + self.bias


def _cut(mixer: nn.Module, rank: int, exchange: _Exchange) -> nn.Module:
    specs = sharding_specs(mixer)
    piece = copy.deepcopy(mixer)
    for name, parameter in mixer.named_parameters():
        *path, local = name.split(".")
        if specs[name] in ("column", "heads"):
            half = parameter.detach().chunk(2, 0)[rank].clone()
            setattr(piece.get_submodule(".".join(path)), local, nn.Parameter(half))
    for name, buffer in mixer.named_buffers():
        *path, local = name.split(".")
        owner = piece.get_submodule(".".join(path))
        if owner.tensor_parallel_plan.get(local) == "heads":
            setattr(owner, local, buffer.chunk(2, 0)[rank])
    for name, module in mixer.named_modules():
        if isinstance(module, nn.Linear) and specs[f"{name}.weight"] == "row":
            *path, local = name.split(".")
            bias = None if module.bias is None else module.bias.detach()
            row = _Row(module.weight.detach().chunk(2, 1)[rank], bias, rank, exchange)
            setattr(piece.get_submodule(".".join(path)), local, row)
    return piece
