"""The linear projections of a model: their initial values, and several projections of one input."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor, nn

from ..options import ModelShape


def init_std(config: ModelShape, *, output: bool = False) -> float:
    """Return the standard deviation of a matrix's initial values; `output` for matrices that write into the residual stream.

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
    """Return an `nn.Linear` with weight N(0, init_std) and bias zero."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=init_std(config, output=output))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def head_numbers(config: ModelShape) -> Tensor:
    """Return 0, ..., num_heads - 1, for decays that depend on the head's number.

    They have values even for a model on the meta device: no checkpoint holds them.
    """
    device = torch.get_default_device()
    return torch.arange(config.num_heads, device="cpu" if device.type == "meta" else device)


class FanOut(Protocol):
    """Several projections of one input. A module holds it as an attribute, so that a trainer can replace it.

    `fan_out_is_entry` of a module declares that the whole tensor-parallel region is computed from its fan-out.
    """

    def __call__(self, x: Tensor, linears: Sequence[nn.Linear], again: bool = False) -> tuple[Tensor, ...]:
        """Return linear(x) of every linear, in order.

        again: also return x, for one more matmul. The other gradients are added in place to its gradient of x.
        """


def apply_each(x: Tensor, linears: Sequence[nn.Linear], again: bool = False) -> tuple[Tensor, ...]:
    """Apply each linear by itself: the fan-out of a model without a trainer."""
    return (*(linear(x) for linear in linears), *((x,) if again else ()))
