"""The linear projections of a model: their initial values and those of decays, and several projections of one input."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt
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


def hippo_log_decays(heads: int, head_dim: int, dt_min: float, dt_max: float, *, lin: bool = False) -> Tensor:
    """Return the log decay at the start of every channel, [heads * head_dim] float64, from a diagonal form of HiPPO.

    Channel n of head h has the decay exp(-dt_h (n + 1)): -(n + 1) is the diagonal of HiPPO-LegS, S4D-Real of Gu et al. 2022
    (arXiv 2206.11893). lin: channel c has exp(-dt_c / 2), the real part -1/2 of S4D-Lin and S4D-Inv. The time steps are spaced
    evenly in the logarithm from dt_min to dt_max. Imaginary parts are left out, because the decay mask is positive.
    """
    count = heads * head_dim if lin else heads
    steps = [dt_min * (dt_max / dt_min) ** (i / max(count - 1, 1)) for i in range(count)]
    rates = [step / 2 for step in steps] if lin else [step * (n + 1) for step in steps for n in range(head_dim)]
    return -torch.tensor(rates, dtype=torch.float64)


def decay_logits(log_decay: Tensor) -> Tensor:
    """Return the float32 logits of decays: log decay - log(1 - decay). Precise for decays near 0 and near 1."""
    return (log_decay - (-torch.expm1(log_decay)).log()).float()


def initial_a_log(heads: int, low: float) -> nn.Parameter:
    """Return log U(low, 16) per head, not below log 1e-6."""
    return nn.Parameter(torch.empty(heads).uniform_(low, 16).clamp_min(1e-6).log())


def initial_dt_bias(size: int) -> nn.Parameter:
    """Return the inverse softplus of [size] time steps dt = exp U(log 0.001, log 0.1)."""
    dt = torch.empty(size).uniform_(log(1e-3), log(1e-1)).exp()
    return nn.Parameter(dt + (-torch.expm1(-dt)).log())


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
