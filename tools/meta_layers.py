"""What the layers of a model cost on one process, without computing: on the device "meta", in place of CUDA.

The kernels of CUDA do not run there. Stand-ins take their places and keep what the kernels keep for the backward pass and
allocate what they allocate on the way: the recurrence (`fla.ops.gla.chunk_gla`), LION, MetaLA's epilogue and attention. Other
sequence operators (Mamba's scan, RWKV, S5, HGRN) run their plain forms, which keep more than their kernels do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite import grid, tensor_parallel
from megatron_lite.activation_checkpointing import checkpointed
from megatron_lite.config_schema import ParallelConfig
from megatron_lite.layout import Layout
from megatron_lite.memory import LayerCost, layer_cost
from models import bidirectional, recurrence
from models.config import ModelConfig
from models.kernels import metala_epilogue
from models.lm import build_layer, layer_specs


def layer_costs(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    micro_batch_size: int,
    sequence_length: int,
    layout: Layout,
    parallel: ParallelConfig,
    device: str = "meta",
) -> list[LayerCost]:
    """The cost of every layer, in order, cut for `layout`; equal blocks are run once.

    Args:
        device: "meta" stands for CUDA; "cpu" computes, with the forms of a CPU.
    """
    specs = layer_specs(model)
    length = sequence_length // layout.context
    outside = length // layout.tensor if layout.sequence_parallel else length  # of the parallel regions
    tensor = _Alone(None, 0, layout.tensor, layout.sequence_parallel)  # type: ignore[arg-type]
    tokens = torch.zeros(micro_batch_size, length, dtype=torch.int64, device=device)
    weight = torch.ones(micro_batch_size, length, device=device)
    costs: list[LayerCost] = []
    known: dict[str, LayerCost] = {}
    stand_ins = kernels_of_cuda() if device == "meta" else contextlib.nullcontext()
    alone = [mock.patch.object(module, "dist", _NoCollectives) for module in (tensor_parallel, grid)]
    with stand_ins, alone[0], alone[1]:
        for index, spec in enumerate(specs):
            block = 0 < index < len(specs) - 1
            recomputed = (index - 1) % parallel.activation_checkpointing.every == 0
            kind = f"{model.mixer_of(index - 1)} {recomputed}" if block else spec.name
            if kind not in known:
                with torch.device(device):
                    layer = build_layer(spec, index, None if device == "meta" else 0)
                if layout.tensor > 1:
                    tensor_parallel.cut_layer(layer, tensor)
                    for parameter in layer.parameters():
                        parameter._backward_hooks = None  # sums over the tensor group
                layer = layer.to(dtype)
                shape = (micro_batch_size, outside, model.hidden_size)
                x = tokens if index == 0 else torch.zeros(shape, dtype=dtype, device=device)
                call = checkpointed(layer, index, len(specs), parallel)
                extra = {"labels": tokens, "loss_weight": weight} if index == len(specs) - 1 else {}
                own = sum(p.numel() for p in layer.parameters())
                if spec.tied_to is not None:
                    own -= layer.weight.numel()  # type: ignore[union-attr,operator]
                known[kind] = layer_cost(layer, call, x, parameters=own, **extra)
            costs.append(known[kind])
    return costs


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """The plain forms that a tensor on "meta" would take, replaced by stand-ins of the kernels."""

    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        log_decay = log_decay.float().clamp_min(-80.0)
        if log_decay.shape[-1] == 1:
            log_decay = log_decay.expand(q.shape)
        return _Gla.apply(q, k, v, log_decay)

    def lion(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, **options: Any) -> Tensor:
        gate = options.get("gate")
        if isinstance(gate, bidirectional.ProjectedGate):
            gate = gate.logits()
        gate = gate if log_decay is None else log_decay
        return _Keeps.apply(v, q, k, q if gate is None else gate)

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return _Keeps.apply(v, q, k, q)

    with (
        mock.patch.object(recurrence, "chunked_recurrence", chunk_gla),
        mock.patch.object(bidirectional, "local_bidirectional", lion),
        mock.patch.object(metala_epilogue, "reference", _epilogue),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
    ):
        yield


def _epilogue(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float = 1e-5
) -> Tensor:
    return _Epilogue.apply(o, q, k, v, aug_weight, gate)


class _Gla(torch.autograd.Function):
    """fla.ops.gla.chunk: keeps q, k, v, the cumulated decay and the products within chunks of 64."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, heads, dim_k = q.shape
        cumulated, products = torch.empty_like(g), q.new_empty(batch, length, heads, 64)
        states = q.new_empty(batch, -(-length // 64), heads, dim_k, v.shape[-1])
        ctx.save_for_backward(q, k, v, cumulated, products)
        final = q.new_empty(batch, heads, dim_k, v.shape[-1], dtype=torch.float32)
        del states
        return torch.empty_like(v), final

    @staticmethod
    def backward(ctx: Any, do: Tensor, _final: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, _ = ctx.saved_tensors
        batch, length, heads, dim_k = q.shape
        chunks = (batch, -(-length // 64), heads, dim_k, v.shape[-1])
        states = [q.new_empty(chunks, dtype=torch.float32) for _ in range(2)]
        gradients = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, g)]
        dv = torch.empty_like(v)
        del states
        return gradients[0].to(q.dtype), gradients[1].to(k.dtype), dv, gradients[2]


class _Keeps(torch.autograd.Function):
    """An operator that keeps its inputs, its output and a float32 number a head and token."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, *inputs: Tensor) -> Tensor:
        y = torch.empty_like(v)
        ctx.save_for_backward(v, *inputs, y, v.new_empty(v.shape[:-1], dtype=torch.float32))
        ctx.count = len(inputs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[: ctx.count + 1])


class _Epilogue(torch.autograd.Function):
    """models/kernels/metala_epilogue_triton.py: keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        gate = inputs[-1]
        assert gate is not None
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


class _Alone(tensor_parallel.TensorGroup):
    """A tensor group of which this process plays one member."""


class _NoCollectives:
    """torch.distributed for one process that plays a member of a group: the shapes are right, nothing is sent."""

    @staticmethod
    def all_reduce(*_: Any, **__: Any) -> None: ...

    @staticmethod
    def all_gather_into_tensor(*_: Any, **__: Any) -> None: ...

    @staticmethod
    def reduce_scatter_tensor(*_: Any, **__: Any) -> None: ...
