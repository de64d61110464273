"""DeepSpeed's configuration and import, with fixes of silent errors and of slow starts.

`megatron_lite.optim.bf16_optimizer` patches its bf16 optimizer.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.parallel.grid import Grid
from megatron_lite.planning.memory import BUCKET

_TORCH_LINEAR = torch.nn.functional.linear


def deepspeed_config(config: Config[Any], layers: Sequence[nn.Module], grid: Grid, dtype: str) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    Args:
        config: the configuration of the run.
        layers: the sharded layers of this process. Their size bounds the buckets.
        dtype: "bf16", "fp16" or "fp32", the resolved `precision.dtype`.
    """
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    # DeepSpeed's default bucket takes gigabytes, which a small model does not need. DeepSpeed refuses odd sizes.
    bucket = min(BUCKET, -(-max(parameters, 1) // 1024) * 1024)
    stage = config.parallel.effective_zero_stage
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": config.batch.gradient_accumulation_steps,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "steps_per_print": sys.maxsize,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # The timer synchronises with the device before every forward pass and after every step.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": grid.device.type == "cuda",
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
    if grid.pipe_size > 1:
        # By default activations are sharded over the tensor group between stages: a wrong loss with sequence parallelism.
        settings["pipeline"] = {
            "pipe_partitioned": False,
            "grad_partitioned": False,
            "activation_checkpoint_interval": 0,
        }
    if dtype == "bf16":
        # check_grad_overflow: a NaN gradient skips the step, as in fp16 and float32.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if config.precision.optimizer_state == "bf16":
            settings["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            # With float32 gradient accumulation, ZeRO 1 silently uses another optimizer, with float32 state.
            settings["data_types"] = {"grad_accum_dtype": "bf16"}
            if grid.replicas == 1 and stage < 3:  # without a reduction the buckets only use memory
                settings["zero_optimization"] |= {"overlap_comm": False, "contiguous_gradients": False}
    elif dtype == "fp16":
        scale = config.precision.fp16
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": scale.initial_scale_power,
            "loss_scale_window": scale.scale_window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.min_scale,
        }
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


@cache
def _freeze_imported_objects() -> None:
    """Exempt imported objects, which live as long as the process, from garbage collection, once per process.

    DeepSpeed collects garbage several times while it builds a bf16 optimizer; a start is a second faster.
    """
    gc.freeze()


@cache
def leave_compiler_unloaded() -> None:
    """Let optimizers run without torch's compiler, whose import takes more than a second, once per process.

    PyTorch wraps these methods so that torch.compile leaves them out. The trainer compiles blocks, but no optimizer.
    """
    optimizer, adam = torch.optim.Optimizer, torch.optim.Adam
    for method in (optimizer.add_param_group, optimizer.load_state_dict, optimizer.state_dict, optimizer.zero_grad):
        unwrapped = inspect.unwrap(method)
        vars(unwrapped)["__dynamo_disable"] = unwrapped
    adam.step = torch.no_grad()(inspect.unwrap(adam.step))  # type: ignore[method-assign]


def import_deepspeed() -> Any:
    """Import deepspeed, apply the fixes, initialise its process group and return the module. May be called again."""
    warnings.filterwarnings("ignore", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
    # DeepSpeed's hooks start collectives inside the backward pass, which need no gradient.
    warnings.filterwarnings(
        "ignore", message=r".*c10d::\w+: an autograd kernel was not registered", category=UserWarning
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.accelerator.cuda_accelerator
    _freeze_imported_objects()
    leave_compiler_unloaded()
    # The trainer reports skipped steps itself.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On a CPU, DeepSpeed compiles a C++ helper for an inference collective at the first start, for a minute. Training does not
    # call it. (`import deepspeed.comm.torch as x` would bind the real torch, hence sys.modules.)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    # DeepSpeed imports Muon at every start, which loads torch's compiler: a third of the time of a start. A stub replaces it.
    muon: Any = ModuleType("deepspeed.runtime.zero.muon.original_muon")
    muon.MuonWithAuxAdam, muon.muon_update, muon.adam_update = type("MuonWithAuxAdam", (), {}), None, None
    sys.modules.setdefault(muon.__name__, muon)
    # DeepSpeed queries NVML with the number in CUDA_VISIBLE_DEVICES, where schedulers put UUIDs (GPU-..., MIG-...).
    sys.modules["deepspeed.accelerator.cuda_accelerator"].CUDA_Accelerator.available_memory = _free_memory  # type: ignore[attr-defined]
    # ZeRO 3 replaces functional.linear by a function that adds the bias in place. Selective activation checkpointing has
    # stored that tensor, so the recomputation would add the bias twice.
    sys.modules["deepspeed.runtime.zero.linear"].LinearFunctionForZeroStage3.forward = staticmethod(_linear)  # type: ignore[attr-defined]
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def share_weights(zero: Any) -> None:
    """Let the master weights of ZeRO 1 and 2 in bf16 share memory with the model's weights, which are equal."""
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
    """Restore torch's linear, which ZeRO 3 has replaced, for the next engine of this process."""
    torch.nn.functional.linear = _TORCH_LINEAR


def _free_memory(_accelerator: Any, device_index: int | None = None) -> int:
    """Return the free bytes of a CUDA device; None is the current one."""
    return torch.cuda.mem_get_info(device_index)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.matmul(weight.t())
    return y if bias is None else y + bias
