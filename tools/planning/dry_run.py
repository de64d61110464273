"""Print what a configuration costs, from one layer of each kind: `python train.py CONFIG --dry-run`.

The embedding, one block of each mixer and the head are built at full width and run forward and backward on one sample, so
that shapes that do not fit fail here. Memory is the peak of a step as `tools.plan` counts it: on a GPU, unless `run.device`
is cpu. Nothing is saved.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from megatron_lite.config.schema import Config
from megatron_lite.engine.precision import DTYPES, faster_dtype
from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.memory import GIB
from models.config import ModelConfig
from models.language_model import LayerSpec, layer_specs
from tools.cli.devices import device_of
from tools.planning.estimate import layer_flops, memory_of


def dry_run(config: Config[ModelConfig]) -> int:
    """Print parameters, memory by part, FLOPs and length of the run. Returns 0. Raises ValueError as `device_of`."""
    model, batch = config.model, config.batch
    device = device_of(config.run.device)
    tokens = batch.micro_batch_size * batch.sequence_length
    dtype = config.precision.dtype
    if dtype == "auto":
        dtype = faster_dtype(device, model.hidden_size, tokens)
    specs = layer_specs(model)
    with torch.device("meta"):
        layers = [spec.build() for spec in specs]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if specs[-1].tied_to is not None:
        sizes[-1] -= layers[-1].weight.numel()
    parameters = sum(sizes)
    flops = 3 * sum(layer_flops(config))
    seconds = _seconds(config, specs, device, DTYPES[dtype])
    parallel = config.parallel
    cuda = config.run.device != "cpu"  # "auto" on a machine without a GPU: the run's machine may have one
    counted = dtype if config.precision.dtype != "auto" or not cuda else "bf16"
    memory = memory_of(config, counted, cuda=cuda)
    run_tokens = batch.tokens_of(config.schedule.train_steps)
    mixers = Counter(model.mixer_of(index) for index in range(model.num_layers))
    kinds = ", ".join(f"{count} {name}" for name, count in mixers.items())
    print(f"model        {model.num_layers} layers ({kinds}), d = {model.hidden_size}, {model.num_heads} heads")
    print(f"parameters   {parameters:,} ({parameters / 1e6:.1f} M): embedding {sizes[0]:,}, ", end="")
    print(f"blocks {sum(sizes[1:-1]):,}, head {sizes[-1]:,}{' (tied)' if specs[-1].tied_to else ''}")
    print(
        f"batch        {batch.global_batch_size} = {batch.micro_batch_size} x {batch.gradient_accumulation_steps} "
        f"accumulation x {batch.data_ranks} data ranks, sequence {batch.sequence_length}, "
        f"{batch.tokens_per_step:,} tokens per step"
    )
    print(f"run          {config.schedule.train_steps:,} steps, {_scaled(run_tokens)} tokens")
    print(
        f"compute      {_scaled(flops)}FLOP per token forward and backward, {_scaled(flops * run_tokens)}FLOP in total"
    )
    print(
        f"fake sample  ran forward and backward through {len(seconds)} layers of {len(specs)}, {dtype} on {device.type}:"
    )
    for name, value in seconds.items():
        print(f"               {name:<24} {value * 1e3:9.1f} ms")
    layout = Layout(parallel.tensor, parallel.pipeline, parallel.context, parallel.sequence_parallel)
    where = f"the fullest process of {layout}" if layout.model_ranks > 1 else "a process"
    replicas = batch.data_ranks * layout.context
    print(
        f"memory       {where} on a {'GPU' if cuda else 'CPU'}, {counted}, ZeRO {max(1, parallel.zero_stage)} over {replicas}:"
    )
    for name, size in memory.items():
        print(f"               {name:<12} {size / GIB:8.2f} GiB")
    print(f"               {'sum':<12} {sum(memory.values()) / GIB:8.2f} GiB")
    return 0


def _scaled(number: float) -> str:
    for power, unit in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:.3g} "


def _seconds(
    config: Config[ModelConfig], specs: list[LayerSpec], device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the seconds of one sample forward and backward through the embedding, a block of each mixer, and the head."""
    model, length = config.model, config.batch.sequence_length
    tokens = torch.randint(model.vocab_size, (1, length), device=device)
    seconds: dict[str, float] = {}
    known: set[str] = set()
    for index, spec in enumerate(specs):
        mixer = model.mixer_of(index - 1) if 0 < index < len(specs) - 1 else spec.name
        if mixer in known:
            continue
        known.add(mixer)
        with device:
            layer = spec.build().to(dtype)
        arguments: dict[str, Any] = {}
        if index == len(specs) - 1:
            arguments = {"labels": tokens, "loss_weight": torch.ones(1, length, device=device)}
        x = tokens if index == 0 else torch.randn(1, length, model.hidden_size, device=device, dtype=dtype)
        start = time.perf_counter()
        layer(x.requires_grad_(x.is_floating_point()), **arguments).float().sum().backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds[spec.name if mixer == spec.name else f"{spec.name} ({mixer})"] = time.perf_counter() - start
        del layer
    return seconds
