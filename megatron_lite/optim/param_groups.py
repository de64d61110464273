"""Parameter groups of the optimizer: Muon's matrices, and AdamW's parameters with and without weight decay."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron_lite.config.optimizer_schema import OptimizerConfig
from megatron_lite.optim.muon import Muon


def build_optimizer(
    parameters: Iterable[tuple[nn.Parameter, str]],
    config: OptimizerConfig,
    *,
    compute_dtype: torch.dtype = torch.float32,
    filler_device: torch.device | None = None,
) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    """Return fused AdamW (Loshchilov and Hutter 2019), or Muon with AdamW, and the fillers of empty groups.

    Args:
        parameters: each once, with its kind: that of `parameter_kind`, or "matrix" (`matrices_of`).
        config: Muon updates the kind "matrix" only with `name: muon`. Kinds in `no_weight_decay` have no weight decay.
        compute_dtype: of Muon's orthogonalization.
        filler_device: fill empty groups. ZeRO has one collective per group, so all pipeline stages need the same groups.
    """
    has_muon = config.name == "muon"
    matrices: list[nn.Parameter] = []
    decay: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for parameter, kind in parameters:
        is_matrix = has_muon and kind == "matrix"
        (matrices if is_matrix else exempt if kind in config.no_weight_decay else decay).append(parameter)
    fillers = []
    for group in (matrices, decay, exempt) if has_muon else (decay, exempt):
        if filler_device is not None and not group:
            fillers.append(nn.Parameter(torch.zeros(1, device=filler_device)))
            group.append(fillers[-1])
        # ZeRO stores a group in one buffer. cuBLAS and the kernels are slow at addresses that are no multiples of 16 bytes.
        # Therefore tensors of other sizes, for example one decay per head, come last.
        group.sort(key=lambda parameter: parameter.numel() % 8 != 0)
    groups = [
        {"params": params, "weight_decay": value, "muon": params is matrices}
        for params, value in ((matrices, config.weight_decay), (decay, config.weight_decay), (exempt, 0.0))
        if params  # ZeRO cannot flatten an empty group
    ]
    # fused: one kernel per group, on the CPU too. DeepSpeed's Adam would compile for most of a minute at the start.
    if not has_muon:
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True), fillers
    return Muon(groups, config.muon, compute_dtype, lr=config.lr, betas=config.betas, eps=config.eps), fillers


def parameter_kind(module: nn.Module, name: str) -> str:
    """Return the kind of a parameter: "norm", "bias", "decay", "embedding" or "weight".

    `parameter_kinds` of the parameter's module (local name to kind) decides. Any other name is a bias if it ends in "bias",
    else a weight.
    """
    *path, local = name.split(".")
    kinds: dict[str, str] = getattr(module.get_submodule(".".join(path)), "parameter_kinds", {})
    return kinds.get(local, "bias" if local.endswith("bias") else "weight")


def matrices_of(block: nn.Module) -> dict[str, int]:
    """Return the matrices of a block at full width, which Muon updates: parameter name -> heads; 0 without heads.

    The matrices are the weights of linear layers. Those named q_proj, r_proj (queries of RWKV), k_proj and v_proj may have heads.
    The mixer or its `sizes` then has the attribute `head_dim_k` (queries and keys), `head_dim_v`, or `head_dim` for all three.
    """
    matrices = {}
    for owner, module in block.named_modules():
        for local, linear in module.named_children():
            if isinstance(linear, nn.Linear):
                suffix = {"q_proj": "k", "r_proj": "k", "k_proj": "k", "v_proj": "v"}.get(local)
                head_dim = suffix and _head_dim(module, suffix)
                matrices[f"{owner}.{local}.weight".lstrip(".")] = linear.out_features // head_dim if head_dim else 0
    return matrices


def matrices_of_model(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    """Return `matrices_of` of all blocks by canonical name. layers: (name, layer), of which the first and last are no blocks."""
    blocks = list(layers)[1:-1]
    return {f"{name}.{key}": heads for name, block in blocks for key, heads in matrices_of(block).items()}


def _head_dim(mixer: nn.Module, suffix: str) -> int | None:
    for owner in (mixer, getattr(mixer, "sizes", None)):
        for attribute in (f"head_dim_{suffix}", "head_dim"):
            if hasattr(owner, attribute):
                return int(getattr(owner, attribute))
    return None
