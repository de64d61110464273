"""DeepSpeed's configuration and import, with what it does silently wrong or needlessly slowly put right.

Its bf16 optimizer: `megatron_lite.optim.bf16_optimizer`."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ParallelConfig, PrecisionConfig
from megatron_lite.parallel.grid import Grid

_TORCH_LINEAR = torch.nn.functional.linear


def deepspeed_config(
    layers: Sequence[nn.Module],
    *,
    grid: Grid,
    dtype: str,
    micro_batch_size: int,
    accumulation: int,
    clipping: float,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
) -> dict[str, Any]:
    """What `deepspeed.initialize` is given for these layers in this layout; accumulation: micro batches of a step on a rank."""
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    # The default bucket is a buffer of 5e8 elements, gigabytes that a small model does not need; odd sizes are refused.
    bucket = min(500_000_000, -(-max(parameters, 1) // 1024) * 1024)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "steps_per_print": sys.maxsize,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # It has the host wait for the device before every forward pass and after every step.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            # Stage 0 clips wrongly in pipelines and starts bf16 with a dummy step; stage 1 costs nothing more.
            "stage": max(1, parallel.zero_stage),
            "overlap_comm": grid.device.type == "cuda",
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
    if grid.pipe_size > 1:
        # The defaults cut activations over the tensor group between stages: with sequence parallelism, a wrong loss.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0}
    if dtype == "bf16":
        # check_grad_overflow: a NaN gradient must skip the step here as it does in fp16 and float32.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if precision.optimizer_state == "bf16":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            # With float32 sums of gradients, ZeRO 1 takes another optimizer, which keeps float32 and does not say so.
            config["data_types"] = {"grad_accum_dtype": "bf16"}
            if (
                grid.replicas == 1 and parallel.zero_stage < 3
            ):  # nothing to reduce, so that buckets to reduce in are memory lost
                config["zero_optimization"] |= {"overlap_comm": False, "contiguous_gradients": False}
    elif dtype == "fp16":
        scale = precision.fp16
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": scale.initial_scale_power,
            "loss_scale_window": scale.scale_window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.min_scale,
        }
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def import_deepspeed() -> Any:
    """The module deepspeed, put right and initialised for this process's group; it may be called again."""
    warnings.filterwarnings("ignore", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
    # Its hooks start collectives inside the backward pass, through which no gradient is to flow.
    warnings.filterwarnings(
        "ignore", message=r".*c10d::\w+: an autograd kernel was not registered", category=UserWarning
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.accelerator.cuda_accelerator
    # While it builds a bf16 optimizer it collects garbage several times, to print the memory in use. What was imported
    # lives as long as the process: without it a start is a second faster, and so are later collections.
    if not gc.get_freeze_count():
        gc.freeze()
    # Its warnings at every skipped step are the trainer's to tell.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On a CPU, DeepSpeed compiles a C++ helper for an inference collective at the first start (a minute). Training
    # never calls it. (`import deepspeed.comm.torch as x` would bind the real torch, hence sys.modules.)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    # It looks for Muon at every start, whose module loads torch's compiler: a third of the time of a start. It is not here.
    muon: Any = ModuleType("deepspeed.runtime.zero.muon.original_muon")
    muon.MuonWithAuxAdam, muon.muon_update, muon.adam_update = type("MuonWithAuxAdam", (), {}), None, None
    sys.modules.setdefault(muon.__name__, muon)
    # It asks NVML about the device whose number is in CUDA_VISIBLE_DEVICES, where schedulers put UUIDs (GPU-..., MIG-...).
    sys.modules["deepspeed.accelerator.cuda_accelerator"].CUDA_Accelerator.available_memory = _free_memory  # type: ignore[attr-defined]
    # ZeRO 3 replaces functional.linear by a function that adds the bias in place. Selective activation checkpointing
    # has kept that very tensor, so the recomputation would add the bias twice: wrong gradients as soon as biases move.
    sys.modules["deepspeed.runtime.zero.linear"].LinearFunctionForZeroStage3.forward = staticmethod(_linear)  # type: ignore[attr-defined]
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def share_weights(zero: Any) -> None:
    """Where ZeRO 1 or 2 keeps its part of the weights twice in bf16, the model's and the master weights, have both be one."""
    if not getattr(zero, "bf16_master_weights_and_gradients", False) or not hasattr(zero, "bit16_groups"):
        return
    masters = zero.single_partition_of_fp32_groups
    for master, partitions, group in zip(
        masters, zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True
    ):
        master.data = partitions[torch.distributed.get_rank(group)].data
    for parameter in (parameter for group in zero.bit16_groups for parameter in group):
        mapping = parameter._hp_mapping
        if mapping is not None:
            at = mapping.hp_fragment_address
            mapping.hp_fragment = masters[mapping.param_group_index].data.narrow(0, at.start, at.numel)


def restore_linear() -> None:
    """Undo what ZeRO 3 leaves behind in the process, so that the next engine computes what it would compute alone."""
    torch.nn.functional.linear = _TORCH_LINEAR


def _free_memory(_accelerator: Any, device_index: int | None = None) -> int:
    """Bytes that CUDA has left on one of its devices, None for the current one."""
    return torch.cuda.mem_get_info(device_index)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x.matmul(weight.t())
    return product if bias is None else product + bias
