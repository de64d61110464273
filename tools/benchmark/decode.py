"""Measure decoding speed and memory of a recurrent model and of Hugging Face's Llama with its cache, by context."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from megatron_lite.config.files import ConfigError, read_sources
from megatron_lite.config.other_program import other_program
from megatron_lite.dtypes import torch_name
from models.config import ModelConfig
from tools.cli.devices import use_device

from .report import table, write_csv
from .timing import timed

PREFILL = 512  # tokens read at a time before decoding
WARM_UP, PARTS = 5, 5  # steps before the measurement; parts of the measured steps


@dataclass(frozen=True)
class Row:
    """Hold the result of one decoding method at one context.

    Attributes:
        milliseconds: median time per step of the whole batch.
        tokens_per_second: batch / seconds per step.
        memory: peak GiB during the steps, weights included; None on a CPU.
        state: GiB of the recurrent state or the cache at the context.
    """

    method: str
    context: int
    batch: int
    milliseconds: float
    tokens_per_second: float
    memory: float | None
    state: float


def run(output: Path, config: Path, contexts: list[int], batch: int, steps: int, device: str, llama: bool) -> list[Row]:
    """Measure, print a table and ratios, and write decode.csv after each row. Raises as `model_of` and `device_of`."""
    place = use_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    model = model_of(config)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        speed = f"{row.milliseconds:.3f} ms per step, {row.tokens_per_second:,.0f} tokens/s"
        print(f"{row.method:>6} at context {row.context}: {speed}", flush=True)
        write_csv(output / "decode.csv", [asdict(row) for row in rows])

    with torch.inference_mode():
        project_model = _project_model(model, place, dtype)
        for context in contexts:
            add(_measure_project(project_model, context, batch, steps, graph=False))
            if place.type == "cuda":
                add(_measure_project(project_model, context, batch, steps, graph=True))
        del project_model
        if llama:
            peer = _llama(model, place, dtype)
            for context in contexts:
                add(_measure_llama(peer, context, batch, steps))
    print(table([asdict(row) for row in rows], f"{config.stem}, {torch_name(dtype)}, decoding"))
    print("\n" + "\n".join(ratios(rows)))
    return rows


def model_of(config: Path) -> ModelConfig:
    """Read the section `model` of a configuration file and ignore its other sections. Raises ConfigError."""
    sources = read_sources([config])
    if sources.problems:
        raise ConfigError(sources.problems)
    section = sources.tree.get("model")
    if not isinstance(section, dict):
        missing = f"{config} has no section `model`: give a configuration file such as configs/metala_1.4b.yml"
        raise ConfigError(other_program(sources, ("model",)) or [missing])
    known = [item.name for item in fields(ModelConfig)]
    if unknown := [key for key in section if key not in known]:
        raise ConfigError([f"model.{key} is an unknown key; allowed are {', '.join(known)}" for key in unknown])
    try:
        values = {key: value for key, value in section.items() if value is not None}
        return TypeAdapter(ModelConfig).validate_python(values)
    except ValidationError as error:
        raise ConfigError(
            [f"{'.'.join(('model', *map(str, problem['loc'])))}: {problem['msg']}" for problem in error.errors()]
        ) from error


def ratios(rows: list[Row]) -> list[str]:
    """Return lines with the ratios of speed and memory at the longest and shortest context, and of the speed to Llama's."""
    lines = []
    methods = list(dict.fromkeys(row.method for row in rows))
    longest = {method: max((r for r in rows if r.method == method), key=lambda r: r.context) for method in methods}
    for method in methods:
        first, last = min((r for r in rows if r.method == method), key=lambda r: r.context), longest[method]
        speed = last.tokens_per_second / first.tokens_per_second
        line = f"{method}: context {last.context} / {first.context}: {speed:.3f} of the tokens/s"
        if first.memory and last.memory:
            line += f", {last.memory / first.memory:.3f} of the memory"
        lines.append(line)
    peer = longest.get("llama")
    if peer is not None:
        for method in methods[:-1]:
            share = longest[method].tokens_per_second / peer.tokens_per_second
            lines.append(f"{method} / Hugging Face's Llama with its cache at context {peer.context}: {share:.2f} x")
    return lines


def _project_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    from models.hf.configuration_metalion import MetalionConfig
    from models.hf.modeling_metalion import MetalionForCausalLM

    with device:
        model = MetalionForCausalLM(
            MetalionConfig(**{field.name: getattr(config, field.name) for field in fields(config)})
        )
    return model.to(dtype).eval()


def _llama(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_width,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=config.tie_embeddings,
        dtype=dtype,
    )
    with device:
        return LlamaForCausalLM(llama).to(dtype).eval()


def _measure_project(model: Any, context: int, batch: int, steps: int, *, graph: bool) -> Row:
    from tools.inference.cuda_graph import graphed_step

    device = model.device
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    cache = None
    for start in range(0, context, PREFILL):
        output = model(ids[:, start : start + PREFILL], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    token = output.logits[:, -1].argmax(-1, keepdim=True)
    del output
    state = cache.nbytes()
    if graph:
        step = graphed_step(model, cache.states, batch, WARM_UP + steps + PARTS)
        return _row("graph", context, step, token, state, steps)
    return _row("eager", context, _eager_step(model, cache), token, state, steps)


def _measure_llama(model: Any, context: int, batch: int, steps: int) -> Row:
    """Measure Llama with a cache of random numbers: only the size of the cache matters."""
    from transformers import DynamicCache

    config, device = model.config, model.device
    cache = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, device=device, dtype=model.dtype) for _ in range(2)), layer)
    state = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    return _row("llama", context, _eager_step(model, cache), token, state, steps)


def _eager_step(model: Any, cache: Any) -> Callable[[Tensor], Tensor]:
    return lambda token: model(token, past_key_values=cache, use_cache=True).logits[:, -1]


def _row(
    method: str, context: int, step: Callable[[Tensor], Tensor], token: Tensor, state_bytes: int, steps: int
) -> Row:
    """Decode greedily from token [batch, 1]. The time per step is the median over `PARTS` equal parts of `steps`."""
    cuda, batch = token.is_cuda, len(token)

    def decode(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = step(token).argmax(-1, keepdim=True)

    decode(WARM_UP)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    count = max(1, steps // PARTS)
    seconds = statistics.median(timed(partial(decode, count), cuda=cuda)[1] for _ in range(PARTS)) / count
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return Row(method, context, batch, 1e3 * seconds, batch / seconds, memory, state_bytes / 2**30)
