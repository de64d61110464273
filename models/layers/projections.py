"""The linear projections of a model: their initial values, and several projections of one input."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor, nn

from ..options import ModelShape


def init_std(config: ModelShape, *, output: bool = False) -> float:
    """Return the standard deviation of a matrix's initial values.

    output: the matrix writes into the residual stream.
    normal: `config.init_std`. scaled_normal: `config.init_std` / sqrt(2 layers), as output matrices of GPT-2 and Megatron-LM.
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


def init_normal(weight: Tensor, std: float) -> None:
    """Draw the values of a weight from N(0, std^2). On the device "meta", which has no values, do nothing.

    PyTorch's own `normal_` imports the compiler there, which takes a second.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def linear(config: ModelShape, inputs: int, outputs: int, *, bias: bool = False, output: bool = False) -> nn.Linear:
    """Return an `nn.Linear` with weight N(0, init_std) and bias zero."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    init_normal(layer.weight, init_std(config, output=output))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def head_indices(config: ModelShape) -> Tensor:
    """Return the head numbers 0, ..., num_heads - 1, from which some mixers compute their decays.

    A model on the meta device gets real values too, because no checkpoint holds them.
    """
    device = torch.get_default_device()
    return torch.arange(config.num_heads, device="cpu" if device.type == "meta" else device)


class FusedProjections(Protocol):
    """Apply several projections to one input. A module holds it as an attribute, so that a trainer can replace it.

    A module with `project_inputs_is_entry` computes its whole tensor-parallel region from these projections.
    """

    def __call__(self, x: Tensor, linears: Sequence[nn.Linear], return_input: bool = False) -> tuple[Tensor, ...]:
        """Return linear(x) of every linear, in order.

        return_input: also return x, for one more matmul. Its gradient of x is accumulated in place.
        """


def apply_each(x: Tensor, linears: Sequence[nn.Linear], return_input: bool = False) -> tuple[Tensor, ...]:
    """Apply each linear by itself: the default `FusedProjections`."""
    return (*(linear(x) for linear in linears), *((x,) if return_input else ()))
