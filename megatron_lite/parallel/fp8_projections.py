"""FP8 projections, applied from outside to plain modules.

A module names its projections that may run in FP8 in `fp8_projections`. Those of decays and input gates are not among them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.fp8.rowwise import ALIGNMENT
from megatron_lite.parallel.fp8_mlp import fuse_mlp
from megatron_lite.parallel.fused_projections import fp8_linear
from megatron_lite.parallel.sharding_plan import shard_of, sharding_specs
from megatron_lite.parallel.tensor_parallel import TensorGroup


class _Linear(nn.Linear):
    in_fp8 = True  # also read by fused projections, which do not call the linear

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.bias)


def select_projections(layer: nn.Module, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the names of the block's linears that run in FP8, and name -> reason for the others.

    layer: a block at full width. ranks: size of its tensor-parallel group.
    """
    specs = sharding_specs(layer)
    selected: list[str] = []
    others: dict[str, str] = {}
    for owner, module in layer.named_modules():
        allowed = getattr(module, "fp8_projections", ())
        for local, linear in module.named_children():
            name = f"{owner}.{local}".lstrip(".")
            if not isinstance(linear, nn.Linear):
                continue
            full = tuple(linear.weight.shape)
            outputs, inputs = shard_of(specs[f"{name}.weight"], full, 0, ranks).shape(full)
            if local not in allowed:
                others[name] = "not declared for FP8"
            elif outputs % ALIGNMENT or inputs % ALIGNMENT:
                others[name] = f"{inputs} x {outputs} per rank is no multiple of {ALIGNMENT}"
            else:
                selected.append(name)
    return selected, others


def use_fp8(layer: nn.Module, names: Collection[str], tensor: TensorGroup | None = None) -> None:
    """Let the named linears of a sharded layer multiply in FP8. Parameters and their names do not change.

    tensor: the group over which the layer is sharded.
    """
    for name in names:
        linear: Any = layer.get_submodule(name)
        if isinstance(linear, nn.Linear):
            linear.__class__ = _Linear
        else:  # a row linear of tensor parallelism
            linear.matmul = fp8_linear
    fused_mlp = False
    for owner, module in layer.named_modules():
        if all(f"{owner}.{local}".lstrip(".") in names for local in ("gate_proj", "up_proj", "down_proj")):
            fused_mlp = fuse_mlp(module, tensor)
    if names and hasattr(layer, "norm2"):
        _quantize_results(layer, names, fused_mlp, tensor is not None and tensor.sequence)


def _quantize_results(block: Any, names: Collection[str], fused_mlp: bool, sequence: bool) -> None:
    """Let kernels of a block quantise their results, where FP8 linears read these.

    sequence: with sequence parallelism the linears read gathered tensors, which have no rows.
    """
    if hasattr(block.mixer, "fp8_output"):
        block.mixer.fp8_output = "mixer.out_proj" in names
    if not sequence:
        block.norm2.fp8_output = fused_mlp
        block.norm2.fp8_gradient = "mixer.out_proj" in names and not block.parallel_residual
        block.norm1.fp8_gradient = "mlp.down_proj" in names  # the down_proj of the previous block reads this gradient


def check_device(device: torch.device, dtype: str, recipe: str) -> None:
    """Raise ValueError if a device, or the dtype on it, cannot run FP8 matmuls. A CPU emulates them in any dtype."""
    key = f"precision.fp8.recipe = {recipe}"
    if dtype == "fp16" or (dtype != "bf16" and device.type != "cpu"):
        raise ValueError(
            f"{key} needs precision.dtype = bf16, but it is {dtype}; set precision.dtype=bf16, or recipe=none"
        )
    if device.type == "cpu":
        return
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or capability < (9, 0):
        has = "is no CUDA device" if torch.version.cuda is None else f"has {capability[0]}.{capability[1]}"
        raise ValueError(
            f"{key}: {name} {has}; FP8 matmuls need compute capability 9.0 or higher (H100, H200, B200). Set "
            "precision.fp8.recipe=none, which trains in bf16"
        )
