"""Build the optimizer of the configuration for the parameters of a model shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron_lite.config.optimizer_schema import muon_conflict
from megatron_lite.config.schema import Config, OptimizerConfig
from megatron_lite.engine.model_shard import ModelShard
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
    config: Config[Any], shard: ModelShard, grid: Grid, dtype: str
) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    """Return the optimizer and the fillers of its empty groups, which the trained module must register.

    Args:
        config: the configuration of the run.
        dtype: "bf16", "fp16" or "fp32", the resolved `precision.dtype`.

    Raises:
        ValueError: Muon with fp16 or ZeRO 3, or as `check_matrices`.
    """
    if config.optimizer.name == "muon":
        if problem := muon_conflict(dtype, config.parallel.zero_stage):
            raise ValueError(f"optimizer.name = muon {problem}")
        check_matrices(config.optimizer, shard.matrices)
    return build_optimizer(
        shard.parameters_with_kind(),
        config.optimizer,
        compute_dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
        filler_device=grid.device if grid.pipe_size > 1 else None,
    )
