"""What `python -m tools.benchmark train` trains: this project through its own engine, and the peers at the same size.

Heavy packages are imported by the subject that needs them, because their import is part of its time to the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

OWN = "metalion"
# The project's subjects: the configuration as it is, and with changes. "metalion-bf16" keeps what the peers keep by default.
_ELEMENTWISE = "parallel.activation_checkpointing.mode=elementwise"
OWN_CHANGES: dict[str, tuple[str, ...]] = {
    OWN: (),
    f"{OWN}-elementwise": (_ELEMENTWISE,),
    f"{OWN}-bf16": (_ELEMENTWISE, "precision.dtype=bf16", "precision.optimizer_state=bf16"),
}
PRECISIONS = ("bf16", "mixed")


@dataclass(frozen=True)
class Training:
    """A model with its optimizer.

    Attributes:
        step: tokens [batch, length + 1] on the CPU -> loss in nats a token, after forward, backward, clipping, AdamW.
        parameters: a tied matrix once.
        keeps: number formats of what stays between steps.
        flops_per_token: length -> FLOPs of a training step, a token.
        close: gives the memory back.
    """

    step: Callable[[Tensor], float]
    parameters: int
    keeps: str
    flops_per_token: Callable[[int], float]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Size:
    """Of the model that every peer is given, from the section `model` of the configuration."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_width: int
    tied: bool


@dataclass(frozen=True)
class Settings:
    """How a subject is built.

    Attributes:
        precision: of the peers. "bf16": weights, gradients and moments are bf16. "mixed": all three are float32 and
            products run in bf16 (torch.autocast).
        dtype: "bf16", or "fp32" on a CPU without fast bf16 products.
        peer_loss: of flash-linear-attention's models. "linear": fused with the output projection, in chunks, as their
            trainer flame does; "logits": fused over whole logits, the models' default.
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
    """The subject `name` of `SUBJECTS`. ImportError where its package, or what that needs, is missing here."""
    if SUBJECTS[name] in (_gla, _hgrn2, _retnet) and device.type == "cpu":
        raise ImportError("flash-linear-attention's kernels need a GPU")
    return SUBJECTS[name](settings, device)


def own_config(config: str, overrides: Sequence[str], length: int, batch: int) -> Any:
    """The configuration with one micro batch of `batch` sequences a step. ValueError for one that cannot run."""
    from megatron_lite.config.loader import ConfigError, load_config
    from models.config import ModelConfig

    settings = [
        f"batch.sequence_length={length}",
        f"batch.micro_batch_size={batch}",
        "batch.gradient_accumulation_steps=1",
        "batch.global_batch_size=null",
        *overrides,
    ]
    try:
        loaded = load_config([config], settings, model_type=ModelConfig, world_size=1)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if loaded.data.objective == "masked":
        raise ValueError(f"{config} trains a masked model, which `python -m tools.benchmark masked` measures")
    return loaded


def own_engine(config: Any, device: torch.device, dtype: str) -> Any:
    """What train.py builds for this configuration, of one process."""
    from megatron_lite.parallel.grid import init_grid
    from tools.loading.engine import build_engine

    return build_engine(config, init_grid(device.type), dtype)


def own_batch(tokens: Tensor) -> dict[str, Tensor]:
    """tokens [batch, length + 1] -> the micro batch of a causal model."""
    weight = torch.ones(tokens.shape[0], tokens.shape[1] - 1)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_weight": weight}


def _own(settings: Settings, device: torch.device, *, changes: tuple[str, ...]) -> Training:
    from megatron_lite.planning.flops import training_flops_per_token

    config = own_config(settings.config, (*settings.overrides, *changes), settings.length, settings.batch)
    dtype = settings.dtype if config.precision.dtype == "auto" else config.precision.dtype
    engine = own_engine(config, device, dtype)
    state = next(iter(engine.optimizer_state.fragments())).tensors
    weights = next(engine.layers[0].parameters()).dtype
    kept = [f"{_short(state['exp_avg'].dtype)} moments"]
    if config.precision.optimizer_state == "fp32":
        kept.insert(0, f"{_short(state['weight'].dtype)} master weights")
    if weights != state["weight"].dtype or config.precision.optimizer_state == "bf16":
        kept.insert(0, f"{_short(weights)} weights")
    return Training(
        lambda tokens: engine.train_step([own_batch(tokens)], lr=1e-5).loss,
        sum(torch.Size(shape).numel() for shape in engine.parameter_shapes().values()),
        ", ".join(kept),
        lambda length: training_flops_per_token(engine.model, length),
        engine.close,
    )


def _gla(settings: Settings, device: torch.device) -> Training:
    from fla.models import GLAConfig, GLAForCausalLM

    size, heads = settings.size, 4  # the class's own number, at every width
    config = GLAConfig(**_fla_common(settings), intermediate_size=size.mlp_width, num_heads=heads)
    recurrence = _recurrence_flops(heads, size.hidden_size // 2 // heads, size.hidden_size // heads)
    return _peer(GLAForCausalLM, config, settings, device, recurrence)


def _hgrn2(settings: Settings, device: torch.device) -> Training:
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    size, expansion = settings.size, 128  # the class's own
    config = HGRN2Config(**_fla_common(settings), intermediate_size=size.mlp_width, expand_ratio=expansion)
    recurrence = _recurrence_flops(size.hidden_size // expansion, expansion, expansion)
    return _peer(HGRN2ForCausalLM, config, settings, device, recurrence)


def _retnet(settings: Settings, device: torch.device) -> Training:
    from fla.models import RetNetConfig, RetNetForCausalLM

    # The class's own shape: keys of 256 channels, values of 512, and the smaller MLP that makes up for them.
    heads = settings.size.hidden_size // 256
    config = RetNetConfig(**_fla_common(settings), num_heads=heads)
    return _peer(RetNetForCausalLM, config, settings, device, _recurrence_flops(heads, 256, 512))


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
    """As the mixers of `models` count theirs: in chunks of 64, the backward pass twice the forward pass."""
    return lambda length: 3 * heads * (min(64, length) * (dim_k + dim_v) + 4 * dim_k * dim_v)


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
    """A transformers-style model in a training loop as its users write it; mixer_flops: a layer's, beside its weights."""
    mixed = settings.precision == "mixed" and settings.dtype == "bf16"
    dtype = torch.float32 if mixed or settings.dtype == "fp32" else torch.bfloat16
    with device:
        torch.manual_seed(1)
        model = kind(config).to(dtype).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    # Every shape is compiled for itself: one graph for all lengths is slower than what a user of one length has.
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
    looked_up = 0 if settings.size.tied else model.get_input_embeddings().weight.numel()
    word = _short(dtype)
    return Training(
        step,
        number,
        f"{word} weights, {word} moments",
        lambda length: 6 * (number - looked_up) + settings.size.num_layers * mixer_flops(length),
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))


SUBJECTS: Mapping[str, Callable[[Settings, torch.device], Training]] = {
    **{name: partial(_own, changes=changes) for name, changes in OWN_CHANGES.items()},
    "gla": _gla,
    "hgrn2": _hgrn2,
    "retnet": _retnet,
    "llama": partial(_llama, compiled=False),
    "llama-compiled": partial(_llama, compiled=True),
}
