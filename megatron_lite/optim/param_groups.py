"""Parameter groups of the optimizer: Muon's matrices, and AdamW's parameters with and without weight decay."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from megatron_lite.optim.muon import Muon, MuonOptions


def build_optimizer(
    parameters: Iterable[tuple[nn.Parameter, str]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    no_weight_decay: Collection[str],
    muon: MuonOptions | None = None,
    filler_device: torch.device | None = None,
) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    """Return fused AdamW (Loshchilov and Hutter 2019), or Muon with AdamW, and the fillers of empty groups.

    Args:
        parameters: each once, with its kind (`parameter_kind`).
        no_weight_decay: kinds without weight decay: "norm", "bias", "decay", "embedding".
        muon: Muon for the kind "matrix"; None: AdamW for all parameters.
        filler_device: fill empty groups. ZeRO has one collective per group, so all pipeline stages need the same groups.
    """
    matrices: list[nn.Parameter] = []
    decay: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for parameter, kind in parameters:
        is_matrix = muon is not None and kind == "matrix"
        (matrices if is_matrix else exempt if kind in no_weight_decay else decay).append(parameter)
    fillers = []
    for group in (decay, exempt) if muon is None else (matrices, decay, exempt):
        if filler_device is not None and not group:
            fillers.append(nn.Parameter(torch.zeros(1, device=filler_device)))
            group.append(fillers[-1])
        # ZeRO stores a group in one buffer. cuBLAS and the kernels are slow at addresses that are no multiples of 16 bytes, so
        # that tensors of other sizes, such as one decay per head, come last.
        group.sort(key=lambda parameter: parameter.numel() % 8 != 0)
    groups = [
        {"params": params, "weight_decay": value, "muon": params is matrices}
        for params, value in ((matrices, weight_decay), (decay, weight_decay), (exempt, 0.0))
        if params  # ZeRO cannot flatten an empty group
    ]
    # fused: one kernel per group, on the CPU too. DeepSpeed's Adam would compile for most of a minute at the start.
    if muon is None:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True), fillers
    return Muon(groups, muon, lr=lr, betas=betas, eps=eps), fillers


def parameter_kind(module: nn.Module, name: str) -> str:
    """Return the kind of a parameter: "norm", "bias", "decay", "embedding", "matrix" or "weight".

    `parameter_kinds` of the parameter's module (local name to kind) decides. Any other name is a bias if it ends in "bias", a
    matrix if it is the weight of an `nn.Linear`, else a weight.
    """
    *path, local = name.split(".")
    owner = module.get_submodule(".".join(path))
    kinds: dict[str, str] = getattr(owner, "parameter_kinds", {})
    if isinstance(owner, nn.Linear) and local == "weight":
        return "matrix"
    return kinds.get(local, "bias" if local.endswith("bias") else "weight")


def head_dim_of(module: nn.Module, name: str) -> int | None:
    """Return the rows per head of the weight of a mixer's `q_proj`, `k_proj` or `v_proj`; None for other parameters.

    The mixer, or its `sizes`, has `head_dim_k` for queries and keys and `head_dim_v` for values, or `head_dim` for all.
    """
    *path, projection, local = ["", *name.split(".")]
    suffix = {"q_proj": "k", "k_proj": "k", "v_proj": "v"}.get(projection)
    if suffix is None or local != "weight":
        return None
    mixer = module.get_submodule(".".join(path[1:]))
    for owner in (mixer, getattr(mixer, "sizes", None)):
        for attribute in (f"head_dim_{suffix}", "head_dim"):
            if hasattr(owner, attribute):
                return int(getattr(owner, attribute))
    return None
