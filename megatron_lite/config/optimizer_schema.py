"""Define the section `optimizer` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_lite.config.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class MuonConfig(Section):
    """Muon's update of the matrices inside the blocks, with `name: muon`."""

    momentum: Decay = Field(default=0.95, description="Decay rate of the momentum.")
    nesterov: bool = Field(default=True, description="Nesterov momentum.")
    momentum_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Number format of the momentum: 4 or 2 bytes per parameter."
    )
    per_head: bool = Field(
        default=False, description="Orthogonalize the projections of queries, keys and values one head at a time."
    )


def muon_conflict(dtype: str, zero_stage: int) -> str:
    """Return the setting that rules out Muon, as a clause with what is allowed; empty if it is supported."""
    if dtype == "fp16":
        return (
            "is not supported with precision.dtype = fp16, in which it was not shown to be stable: bf16 and fp32 are "
            "allowed, or optimizer.name = adamw"
        )
    if zero_stage == 3:
        return (
            "is not supported with parallel.zero_stage = 3, which cuts every matrix: 0, 1 and 2 are allowed, or "
            "optimizer.name = adamw"
        )
    return ""


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) or Muon, and gradient clipping."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="The optimizer. muon: matrices inside the blocks by orthogonalized momentum, all other parameters by AdamW. "
        "Learning rate and weight decay of AdamW carry over.",
    )
    lr: float = Field(description="Peak learning rate.", gt=0)
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    gradient_clipping: float = Field(default=1.0, ge=0, description="Maximum global gradient norm; 0: no clipping.")
    ema_decay: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, which validations, exports and other commands use. "
        "It needs 4 bytes per parameter, sharded as the optimizer state. 0: none.",
    )
    no_weight_decay: tuple[Literal["norm", "bias", "decay", "embedding"], ...] = Field(
        default=("norm", "bias", "decay", "embedding"), description="Parameter groups without weight decay."
    )
    muon: MuonConfig = Field(default=MuonConfig(), description=MuonConfig.__doc__)
