"""The linear projections of a model: their initial values, and several projections of one input."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor, nn

from ..options import ModelShape


def init_std(config: ModelShape, *, output: bool = False) -> float:
    """Standard deviation of a matrix; `output` for the ones that write into the residual stream.

    normal: `config.init_std`. scaled_normal: that over sqrt(2 layers), as GPT-2 and Megatron-LM have it for outputs.
    small_init: sqrt(2 / (5 d)), Nguyen and Salazar 2019 (arXiv 1910.05895), section 2.2.
    wang_init: 2 / (layers sqrt(d)), Wang and Komatsuzaki 2021 (mesh-transformer-jax, GPT-J).
    """
    method = config.output_init_method if output else config.init_method
    if method == "normal":
        return config.init_std
    if method == "scaled_normal":
        return config.init_std / sqrt(2 * config.num_layers)
    if method == "small_init":
        return sqrt(2 / (5 * config.hidden_size))
    return 2 / (config.num_layers * sqrt(config.hidden_size))


def linear(config: ModelShape, inputs: int, outputs: int, *, bias: bool = False, output: bool = False) -> nn.Linear:
    """`nn.Linear` with weight N(0, init_std) and bias zero."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=init_std(config, output=output))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def head_numbers(config: ModelShape) -> Tensor:
    """0, ..., num_heads - 1, for decays that follow from a head's number.

    They have values also where a model is built without any (on the device meta): no checkpoint brings them.
    """
    device = torch.get_default_device()
    return torch.arange(config.num_heads, device="cpu" if device.type == "meta" else device)


class FanOut(Protocol):
    """An attribute of the modules that use it, so that a trainer can put its own in place. A module in which all that
    tensor parallelism cuts is computed from its fan-out says so by `fan_out_is_entry`."""

    def __call__(self, x: Tensor, linears: Sequence[nn.Linear], again: bool = False) -> tuple[Tensor, ...]:
        """linear(x) for every linear, in order; `again`: and x, for one more product, whose gradient of x the others
        are added to, in place."""


def apply_each(x: Tensor, linears: Sequence[nn.Linear], again: bool = False) -> tuple[Tensor, ...]:
    """The fan-out of a model by itself."""
    return (*(linear(x) for linear in linears), *((x,) if again else ()))
