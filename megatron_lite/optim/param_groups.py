"""AdamW with one parameter group with weight decay and one without."""

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
    """Return fused AdamW (Loshchilov and Hutter 2019) with two groups: with and without weight decay.

    Args:
        parameters: each once, with its kind (`parameter_kind`).
        no_weight_decay: kinds without weight decay: "norm", "bias", "decay", "embedding".
        filler: fills a group that would be empty. ZeRO has one collective per group, so all pipeline stages need both groups.
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
    # fused: one kernel per group, on the CPU too. DeepSpeed's Adam would compile for most of a minute at the start.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def parameter_kind(module: nn.Module, name: str) -> str:
    """Return the kind of a parameter: "norm", "bias", "decay", "embedding" or "weight".

    `parameter_kinds` of the parameter's module (local name to kind) decides. Any other name is a bias if it ends in "bias",
    else a weight.
    """
    *path, local = name.split(".")
    owner = module.get_submodule(".".join(path))
    kinds: dict[str, str] = getattr(owner, "parameter_kinds", {})
    return kinds.get(local, "bias" if local.endswith("bias") else "weight")
