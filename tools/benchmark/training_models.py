"""Build the models under test of `python -m tools.benchmark train`: the project's model, and other models of its size.

Each model imports its packages itself, because the import is part of its time to the first step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.dtypes import torch_name

PROJECT = "metalion"
# The project's models under test -> changes to the configuration. "metalion-bf16" stores the same number formats as the peers.
_ELEMENTWISE = "parallel.activation_checkpointing.mode=elementwise"
_BF16_STATE = ("precision.dtype=bf16", "precision.optimizer_state=bf16")
PROJECT_CHANGES: dict[str, tuple[str, ...]] = {
    PROJECT: (),
    f"{PROJECT}-elementwise": (_ELEMENTWISE,),
    f"{PROJECT}-bf16": (_ELEMENTWISE, *_BF16_STATE),
    f"{PROJECT}-fp8": (*_BF16_STATE, "precision.fp8.recipe=rowwise"),
}
PRECISIONS = ("bf16", "mixed")


@dataclass(frozen=True)
class Training:
    """Hold a model with its optimizer.

    Attributes:
        step: tokens [batch, length + 1] on the CPU -> loss in nats per token. Runs forward, backward, clipping and AdamW.
        parameters: number of parameters; a tied matrix counts once.
        keeps: number formats of weights and optimizer state between steps.
        flops_per_token: length -> FLOPs per token of a training step.
        close: releases the memory.
        micro_batches: per step. Each one holds the same tokens, the argument of `step`.
    """

    step: Callable[[Tensor], float]
    parameters: int
    keeps: str
    flops_per_token: Callable[[int], float]
    close: Callable[[], None] = lambda: None
    micro_batches: int = 1


@dataclass(frozen=True)
class Size:
    """Hold the size of all models, from the section `model` of the configuration."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_width: int
    tied: bool


@dataclass(frozen=True)
class Settings:
    """Hold the settings with which a model under test is built.

    Attributes:
        precision: of the other models. "bf16": weights, gradients and moments are bf16. "mixed": all three are float32 and
            matmuls run in bf16 (torch.autocast).
        dtype: "bf16", or "fp32" on a CPU without fast bf16 matmuls.
        longest: longest sequence of all shapes, in tokens.
        peer_loss: of flash-linear-attention's models. "linear": fused with the output projection, in chunks, as in their
            trainer flame. "logits": fused cross entropy of the logits, the models' default.
    """

    size: Size
    config: str
    overrides: tuple[str, ...]
    precision: str
    dtype: str
    peer_loss: str
    longest: int
    length: int
    batch: int


def build(name: str, settings: Settings, device: torch.device) -> Training:
    """Build the model `name` of `MODELS_UNDER_TEST`. Raises ImportError if its package or a dependency is missing."""
    if MODELS_UNDER_TEST[name] in (_gla, _hgrn2, _retnet, _kda, _gated_delta_net) and device.type == "cpu":
        raise ImportError("flash-linear-attention's kernels need a GPU; leave its models out of --subjects")
    return MODELS_UNDER_TEST[name](settings, device)


def step_config(config: str | Path, overrides: Sequence[str], batch: int, world_size: int = 1) -> Any:
    """Return the configuration with micro-batches of `batch` samples. An override may set several per step.

    Raises ConfigError if it is invalid.
    """
    from megatron_lite.config.loader import load_config
    from models.config import ModelConfig

    settings = [
        f"batch.micro_batch_size={batch}",
        "batch.gradient_accumulation_steps=1",
        "batch.global_batch_size=null",
    ]
    return load_config([config], [*settings, *overrides], model_type=ModelConfig, world_size=world_size)


def project_config(config: str, overrides: Sequence[str], length: int, batch: int, world_size: int = 1) -> Any:
    """Return the configuration with sequences of `length` tokens. Raises as `step_config`, and ValueError for a masked model."""
    loaded = step_config(config, [f"batch.sequence_length={length}", *overrides], batch, world_size)
    if loaded.data.objective == "masked":
        raise ValueError(f"{config} trains a masked model: use `python -m tools.benchmark masked`")
    return loaded


def project_engine(config: Any, device: torch.device, dtype: str) -> Any:
    """Build the engine of train.py for this configuration on this process's device."""
    from megatron_lite.parallel.grid import init_grid
    from tools.loading.engine import build_engine

    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)  # the trainer and DeepSpeed select the GPU by it
    sizes = {name: getattr(config.parallel, name) for name in ("tensor", "pipeline", "context")}
    return build_engine(config, init_grid(device.type, **sizes), dtype)


def project_batch(tokens: Tensor) -> dict[str, Tensor]:
    """Return the micro-batch of a causal model for tokens [batch, length + 1]."""
    weight = torch.ones(tokens.shape[0], tokens.shape[1] - 1)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_weight": weight}


def _project(settings: Settings, device: torch.device, *, changes: tuple[str, ...]) -> Training:
    from megatron_lite.planning.flops import training_flops_per_token

    config = project_config(settings.config, (*settings.overrides, *changes), settings.length, settings.batch)
    dtype = settings.dtype if config.precision.dtype == "auto" else config.precision.dtype
    engine = project_engine(config, device, dtype)
    state = next(iter(engine.optimizer_state.fragments())).tensors
    weights = next(engine.layers[0].parameters()).dtype
    stored = [f"{_short(state['exp_avg'].dtype)} moments"]
    if config.precision.optimizer_state == "fp32":
        stored.insert(0, f"{_short(state['weight'].dtype)} master weights")
    if weights != state["weight"].dtype or config.precision.optimizer_state == "bf16":
        stored.insert(0, f"{_short(weights)} weights")
    micro_batches = config.batch.gradient_accumulation_steps
    return Training(
        lambda tokens: engine.train_step([project_batch(tokens)] * micro_batches, lr=1e-5).loss,
        sum(torch.Size(shape).numel() for shape in engine.parameter_shapes().values()),
        ", ".join(stored),
        lambda length: training_flops_per_token(engine.model, length),
        engine.close,
        micro_batches,
    )


def _gla(settings: Settings, device: torch.device) -> Training:
    from fla.models import GLAConfig, GLAForCausalLM

    size, heads = settings.size, 4  # the class's default at every hidden size
    config = GLAConfig(**_fla_common(settings), intermediate_size=size.mlp_width, num_heads=heads)
    recurrence = _recurrence_flops(heads, size.hidden_size // 2 // heads, size.hidden_size // heads)
    return _peer(GLAForCausalLM, config, settings, device, recurrence)


def _hgrn2(settings: Settings, device: torch.device) -> Training:
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    size, expansion = settings.size, 128  # the class's default
    config = HGRN2Config(**_fla_common(settings), intermediate_size=size.mlp_width, expand_ratio=expansion)
    recurrence = _recurrence_flops(size.hidden_size // expansion, expansion, expansion)
    return _peer(HGRN2ForCausalLM, config, settings, device, recurrence)


def _retnet(settings: Settings, device: torch.device) -> Training:
    from fla.models import RetNetConfig, RetNetForCausalLM

    # The class's defaults: head dimension 256 for keys and 512 for values, and a smaller MLP.
    heads = settings.size.hidden_size // 256
    config = RetNetConfig(**_fla_common(settings), num_heads=heads)
    return _peer(RetNetForCausalLM, config, settings, device, _recurrence_flops(heads, 256, 512))


def _kda(settings: Settings, device: torch.device) -> Training:
    from fla.models import KDAConfig, KDAForCausalLM

    size, heads = settings.size, settings.size.num_heads
    dim = size.hidden_size // heads
    config = KDAConfig(**_fla_common(settings), intermediate_size=size.mlp_width, head_dim=dim, num_heads=heads)
    return _peer(KDAForCausalLM, config, settings, device, _recurrence_flops(heads, dim, dim))


def _gated_delta_net(settings: Settings, device: torch.device) -> Training:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    # The paper: heads of 256 channels, 3/4 of the width for keys, twice as much for values.
    size, dim = settings.size, 256
    heads = size.hidden_size * 3 // 4 // dim
    config = GatedDeltaNetConfig(
        **_fla_common(settings), intermediate_size=size.mlp_width, head_dim=dim, num_heads=heads, expand_v=2
    )
    return _peer(GatedDeltaNetForCausalLM, config, settings, device, _recurrence_flops(heads, dim, 2 * dim))


def _fla_common(settings: Settings) -> dict[str, Any]:
    size, linear = settings.size, settings.peer_loss == "linear"
    return {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "tie_word_embeddings": size.tied,
        "max_position_embeddings": settings.longest,
        "fuse_linear_cross_entropy": linear,
        "fuse_cross_entropy": not linear,
        "use_cache": False,
    }


def _recurrence_flops(heads: int, dim_k: int, dim_v: int) -> Callable[[int], float]:
    """Return FLOPs per token as the mixers of `models` count them, with a backward pass of twice the forward pass."""

    def flops_per_token(length: int) -> float:
        from models.operators.gla.gated_linear_attention import flops_per_head

        return 3 * heads * flops_per_head(length, dim_k, dim_v)

    return flops_per_token


def _llama(settings: Settings, device: torch.device, *, compiled: bool) -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = settings.size
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        intermediate_size=size.mlp_width,
        max_position_embeddings=settings.longest,
        tie_word_embeddings=size.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    causal_half = lambda length: 6 * size.hidden_size * length  # noqa: E731
    return _peer(LlamaForCausalLM, config, settings, device, causal_half, compiled=compiled)


def _peer(
    kind: Any,
    config: Any,
    settings: Settings,
    device: torch.device,
    mixer_flops: Callable[[int], float],
    *,
    compiled: bool = False,
) -> Training:
    """Build a transformers-style model in a plain training loop. mixer_flops: FLOPs per layer and token without weights."""
    mixed = settings.precision == "mixed" and settings.dtype == "bf16"
    dtype = torch.float32 if mixed or settings.dtype == "fp32" else torch.bfloat16
    with device:
        torch.manual_seed(1)
        model = kind(config).to(dtype).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    # Compile each shape separately: one graph for all lengths would be slower.
    call = torch.compile(model, dynamic=False) if compiled else model

    def step(tokens: Tensor) -> float:
        tokens = tokens[:, :-1].to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    number = sum(p.numel() for p in parameters)
    embedding = 0 if settings.size.tied else model.get_input_embeddings().weight.numel()
    dtype_name = _short(dtype)
    return Training(
        step,
        number,
        f"{dtype_name} weights, {dtype_name} moments",
        lambda length: 6 * (number - embedding) + settings.size.num_layers * mixer_flops(length),
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, torch_name(dtype))


MODELS_UNDER_TEST: Mapping[str, Callable[[Settings, torch.device], Training]] = {
    **{name: partial(_project, changes=changes) for name, changes in PROJECT_CHANGES.items()},
    "gla": _gla,
    "hgrn2": _hgrn2,
    "retnet": _retnet,
    "kda": _kda,
    "gated_delta_net": _gated_delta_net,
    "llama": partial(_llama, compiled=False),
    "llama-compiled": partial(_llama, compiled=True),
}
