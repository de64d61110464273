"""AdamW with the parameter groups that the configuration asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn


def build_optimizer(
    parameters: Iterable[tuple[nn.Parameter, str]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    no_weight_decay: Collection[str],
    filler: nn.Parameter | None = None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), fused, in two groups: with and without weight decay.

    Args:
        parameters: each once, with its kind (`parameter_kind`).
        no_weight_decay: kinds that do not decay, of "norm", "bias", "decay", "embedding".
        filler: makes a group of its own where one of the two would be empty. ZeRO has a collective a group, so pipeline
            stages must agree on their number.
    """
    decay: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for parameter, kind in parameters:
        (exempt if kind in no_weight_decay else decay).append(parameter)
    for group in (decay, exempt):
        if filler is not None and not group:
            group.append(filler)
    groups = [
        {"params": params, "weight_decay": value}
        for params, value in ((decay, weight_decay), (exempt, 0.0))
        if params  # ZeRO cannot flatten an empty group
    ]
    # fused: one kernel a group, on the CPU too; DeepSpeed's own Adam would compile for most of a minute at start.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def parameter_kind(module: nn.Module, name: str) -> str:
    """What a parameter is: "norm", "bias", "decay", "embedding" or "weight".

    The module that owns the parameter says it in `parameter_kinds` (local name to kind); an unlisted name that ends in
    "bias" is a bias, anything else a weight.
    """
    *path, local = name.split(".")
    owner = module.get_submodule(".".join(path))
    kinds: dict[str, str] = getattr(owner, "parameter_kinds", {})
    return kinds.get(local, "bias" if local.endswith("bias") else "weight")
