"""Build the optimizer of the configuration for the parameters of a model shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron_lite.config.optimizer_schema import muon_conflict
from megatron_lite.config.schema import OptimizerConfig, ParallelConfig
from megatron_lite.dtypes import DTYPES
from megatron_lite.engine.model_shard import ModelShard
from megatron_lite.optim.muon import MuonOptions
from megatron_lite.optim.param_groups import build_optimizer
from megatron_lite.parallel.grid import Grid


def check_matrices(config: OptimizerConfig, matrices: Mapping[str, int]) -> None:
    """Raise ValueError if Muon has no matrices to update, or with `per_head` none with heads.

    matrices: heads of all matrices of the blocks by name (`matrices_of`).
    """
    if config.name == "muon" and not matrices:
        raise ValueError(
            "optimizer.name = muon: the blocks of this model have no matrices (weights of linear layers); adamw is allowed"
        )
    if config.name == "muon" and config.muon.per_head and not any(matrices.values()):
        raise ValueError(
            "optimizer.muon.per_head = true: no mixer of this model has projections q_proj or r_proj, k_proj and v_proj of "
            "heads; false is allowed"
        )


def optimizer_of(
    config: OptimizerConfig, shard: ModelShard, *, dtype: str, parallel: ParallelConfig, grid: Grid
) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    """Return the optimizer and the fillers of its empty groups, which the trained module must register.

    Raises:
        ValueError: Muon with fp16 or ZeRO 3, or as `check_matrices`.
    """
    muon = None
    if config.name == "muon":
        if problem := muon_conflict(dtype, parallel.zero_stage):
            raise ValueError(f"optimizer.name = muon {problem}")
        check_matrices(config, shard.matrices)
        muon = MuonOptions(
            momentum=config.muon.momentum,
            nesterov=config.muon.nesterov,
            momentum_dtype=DTYPES[config.muon.momentum_dtype],
            compute_dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
            per_head=config.muon.per_head,
        )
    return build_optimizer(
        shard.parameters_with_kind(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        no_weight_decay=config.no_weight_decay,
        muon=muon,
        filler_device=grid.device if grid.pipe_size > 1 else None,
    )
