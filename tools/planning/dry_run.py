"""Print what a configuration costs and what a start would refuse: `python train.py CONFIG --dry-run`.

Memory is the peak of a step as `tools.plan` counts it: on a GPU, unless `run.device` is cpu. The embedding, one block of each
mixer and the head are built at full width and run forward and backward on one sample, so that shapes that do not fit fail here.
Each line is printed as soon as it is known. Nothing is saved.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import partial
from typing import Any

import torch

from megatron_lite.checkpoint.checkpointer import optimizer_change
from megatron_lite.checkpoint.resume import check_start
from megatron_lite.config.schema import Config
from megatron_lite.dtypes import DTYPES
from megatron_lite.engine.optimizer import check_matrices
from megatron_lite.engine.precision import faster_dtype, fp8_summary
from megatron_lite.optim.param_groups import matrices_of_model
from megatron_lite.parallel.fp8_projections import check_device
from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.memory import GIB
from megatron_lite.plural import counted
from models.config import ModelConfig
from models.language_model import example_batch, layer_specs
from tools.cli.devices import device_of
from tools.loading.model import parameter_shapes
from tools.loading.token_data import check_data
from tools.planning.estimate import layer_flops, memory_of

CPU_TOKENS = 128  # longest sample of text on a CPU: a model of 1.4B parameters then takes seconds

_print = partial(print, flush=True)


def dry_run(config: Config[ModelConfig]) -> int:
    """Print parameters, FLOPs, length of the run, memory by part and the times of one sample. Return 0.

    Raises ValueError and OSError as `device_of`, and for FP8, Muon, data or a checkpoint that a start would refuse.
    """
    if os.environ.get("RANK", "0") != "0":
        return 0
    model, batch, parallel = config.model, config.batch, config.parallel
    try:
        device = device_of(config.run.device)
    except ValueError as error:
        raise ValueError(f"run.device: {error}; run.device=auto counts the memory of a GPU on any machine") from error
    specs = layer_specs(model)
    with torch.device("meta"):
        layers = [spec.build() for spec in specs]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if specs[-1].tied_to is not None:
        sizes[-1] -= layers[-1].weight.numel()
    mixers = Counter(model.mixer_of(index) for index in range(model.num_layers))
    kinds = ", ".join(f"{count} {name}" for name, count in mixers.items())
    shape = f"d = {model.hidden_size}, {counted(model.num_heads, 'head')}"
    _print(f"model        {counted(model.num_layers, 'layer')} ({kinds}), {shape}")
    _print(
        f"parameters   {sum(sizes):,} ({sum(sizes) / 1e6:.1f} M): embedding {sizes[0]:,}, blocks {sum(sizes[1:-1]):,}, "
        f"head {sizes[-1]:,}{' (tied)' if specs[-1].tied_to else ''}"
    )
    _print(
        f"batch        {batch.global_batch_size} = micro-batch {batch.micro_batch_size} x accumulation "
        f"{batch.gradient_accumulation_steps} x data ranks {batch.data_ranks}, sequence {batch.sequence_length}, "
        f"{batch.tokens_per_step:,} tokens per step"
    )
    tokens = batch.tokens_of(config.schedule.train_steps)
    _print(f"run          {counted(config.schedule.train_steps, 'step')}, {_scaled(tokens)} tokens")
    flops = 3 * sum(layer_flops(config))
    _print(f"compute      {_scaled(flops)}FLOP per token forward and backward, {_scaled(flops * tokens)}FLOP in total")

    length = batch.sequence_length
    if device.type != "cuda" and not model.tokens_per_image:  # an image is read as a whole
        length = min(CPU_TOKENS, length)
    dtype = sample_dtype = config.precision.dtype
    if dtype == "auto" or (device.type == "cpu" and dtype != "fp32"):
        sample_dtype = faster_dtype(device, model.hidden_size, length)
    cuda = config.run.device != "cpu"  # "auto" on a machine without a GPU: the run's machine may have one
    if dtype == "auto":
        dtype = "bf16" if cuda else sample_dtype
    matrices = matrices_of_model(zip([spec.name for spec in specs], layers, strict=True))
    check_matrices(config.optimizer, matrices)
    if summary := fp8_summary(config.precision.fp8, layers, parallel.tensor, dtype):
        check_device(device, dtype, config.precision.fp8.recipe)
        _print(f"fp8          {summary}")
    layout = Layout(parallel.tensor, parallel.pipeline, parallel.context, parallel.sequence_parallel)
    where = f"the fullest process of {layout}" if layout.model_ranks > 1 else "per process"
    replicas = batch.data_ranks * layout.context
    _print(
        f"memory       {where} on a {'GPU' if cuda else 'CPU'}, {dtype}, ZeRO {parallel.effective_zero_stage} over "
        f"{counted(replicas, 'rank')}:"
    )
    memory = memory_of(config, dtype, cuda=cuda)
    for name, size in {**memory, "sum": sum(memory.values())}.items():
        _print(f"               {name:<12} {size / GIB:8.2f} GiB")

    _print(
        f"sample       {length} tokens forward and backward, {sample_dtype} on {device.type}, one layer of each kind:"
    )
    _time_layers(model, length, device, DTYPES[sample_dtype])
    if config.data.objective == "classification":
        from tools.loading.image_data import check_images
        from tools.pretraining.teacher import Teacher

        names = check_images(config.data, model.vocab_size)
        if config.classification.teacher is not None:
            Teacher(config, torch.device("cpu"), names)
    else:
        check_data(config.data, model.vocab_size, config.batch.sequence_length)
    manifest = check_start(config.checkpoint, config.batch.sequence_length, parameter_shapes(model))
    muon = matrices if config.optimizer.name == "muon" else ()
    if manifest is not None and (change := optimizer_change(manifest, muon)):
        _print(f"optimizer    {change}")
    _print("start        data and checkpoint are readable")
    return 0


def _scaled(number: float) -> str:
    for power, unit in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:.3g} "


def _time_layers(model: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> None:
    """Print the milliseconds of one sample through the embedding, a block of each mixer, and the head."""
    specs = layer_specs(model)
    with device:
        batch = example_batch(model, 1, length)
    timed: set[str] = set()  # mixers and names of layers
    for index, spec in enumerate(specs):
        mixer = model.mixer_of(index - 1) if 0 < index < len(specs) - 1 else spec.name
        if mixer in timed:
            continue
        timed.add(mixer)
        with device:
            layer = spec.build().to(dtype)
        arguments: dict[str, Any] = {}
        if index == len(specs) - 1:
            arguments = {key: batch[key] for key in ("labels", "loss_weight")}
        width = model.hidden_size * (2 if model.reads_values(index - 1) else 1)
        x = batch["tokens"] if index == 0 else torch.randn(1, length, width, device=device, dtype=dtype)
        start = time.perf_counter()
        layer(x.requires_grad_(x.is_floating_point()), **arguments).float().sum().backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        name = spec.name if mixer == spec.name else f"{spec.name} ({mixer})"
        _print(f"               {name:<24} {1e3 * (time.perf_counter() - start):9.1f} ms")
