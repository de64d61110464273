"""Initial values of decays: the diagonal of the HiPPO matrix, and logits of given decays."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

# Descriptions of options that several mixers have.
DT_MIN = "Smallest time step of decay_init: hippo, that of the first head."
DT_MAX = "Largest time step of decay_init: hippo, that of the last head."


def hippo_complements(heads: int, head_dim: int, dt_min: float, dt_max: float) -> Tensor:
    """Return 1 - exp(-dt_h (n + 1)), the initial 1 - decay of channel n of head h, [heads * head_dim] float64.

    -(n + 1) is the diagonal of the HiPPO-LegS matrix, S4D-Real of Gu et al. 2022 (arXiv 2206.11893). The time steps dt_h are
    spaced evenly in the logarithm from dt_min to dt_max. Decays are real here: imaginary parts of S4D-Lin and -Inv have no
    place in a positive mask.
    """
    steps = torch.linspace(log(dt_min), log(dt_max), heads, dtype=torch.float64).exp()
    return -torch.expm1(-torch.outer(steps, torch.arange(1, head_dim + 1)).flatten())


def decay_logits(complement: Tensor) -> Tensor:
    """Return the float32 logits of decays, given 1 - decay, which is precise for decays near 1."""
    return (torch.log1p(-complement) - complement.log()).float()


def check_time_steps(mixer: str, dt_min: float, dt_max: float) -> None:
    """Raise ValueError unless 0 < dt_min <= dt_max."""
    if not 0 < dt_min <= dt_max:
        raise ValueError(
            f"model.mixer_options.{mixer}.dt_min = {dt_min:g} with dt_max = {dt_max:g}: set 0 < dt_min <= dt_max"
        )
