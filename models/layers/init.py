"""Weight initialisation. One standard deviation a matrix, from the model's shape."""

from __future__ import annotations

from math import sqrt

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
