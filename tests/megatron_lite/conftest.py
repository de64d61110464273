"""Tiny models and batches for the trainer's tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_lite.engine.engine
from megatron_lite.config.data_schema import DataConfig
from megatron_lite.config.schema import (
    BatchConfig,
    Config,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.grid import Grid, init_grid
from models.config import ModelConfig
from tools.loading.engine import build_engine

VOCAB, LENGTH = 96, 24


@pytest.fixture(scope="session")
def grid() -> Grid:
    return init_grid("cpu")


def model_config(mixers: tuple[str, ...] = ("metala",), **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 64, "num_heads": 2, "mixers": mixers}
    return ModelConfig(**{**values, **changes})


def run_config(
    model: ModelConfig,
    *,
    seed: int = 11,
    lr: float = 3e-4,
    length: int = LENGTH,
    micro_batch_size: int = 2,
    accumulation: int = 2,
    optimizer: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    counts_correct: bool = False,
    **parallel: Any,
) -> Config[ModelConfig]:
    """Return a configuration without data. `parallel`: values of the section of that name."""
    return Config(
        run=RunConfig(seed=seed),
        model=model,
        # An engine for images counts correct predictions, and all its positions have a label.
        data=DataConfig(objective="classification" if counts_correct else "causal"),
        batch=BatchConfig(
            sequence_length=length,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * accumulation,
            gradient_accumulation_steps=accumulation,
        ),
        optimizer=OptimizerConfig(lr=lr, **(optimizer or {})),
        schedule=ScheduleConfig(train_steps=1, decay_steps=1),
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(**(precision or {})),
    )


def batches(steps: int, *, micro: int = 2, accumulation: int = 2, masked: bool = True) -> list[list[dict[str, Tensor]]]:
    """Random tokens; about a third of the labels carry no loss, unevenly over the micro-batches."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(steps):
        step = []
        for index in range(accumulation):
            tokens = torch.randint(0, VOCAB, (micro, LENGTH + 1), generator=generator)
            weight = torch.ones(micro, LENGTH)
            if masked:
                weight = (torch.rand(micro, LENGTH, generator=generator) < 0.9 - 0.4 * index).float()
            step.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "loss_weight": weight})
        out.append(step)
    return out


def leave_bf16_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have DeepSpeed's bf16 optimizer as it comes, but for its rounding sums over micro-batches to bf16."""

    def as_it_comes(engine: Any, zero: Any, replicas: int, **_: Any) -> None:
        zero.skip_next = lambda: zero.fp32_groups_gradient_flat_partition[0].fill_(math.nan)

    monkeypatch.setattr(megatron_lite.engine.engine, "patch_bf16_optimizer", as_it_comes)
    reduce_in_float32(monkeypatch)


def allow_fp16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines train in fp16 on a CPU, which is slow: its layouts have no other test without a GPU."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(megatron_lite.engine.engine, "check_dtype", lambda *_: None)
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda _: True)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    monkeypatch.setattr(CPU_Accelerator, "supported_dtypes", lambda _: dtypes)


def reduce_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = megatron_lite.engine.engine.deepspeed_config
    exact = {"communication_data_type": "fp32"}
    monkeypatch.setattr(
        megatron_lite.engine.engine, "deepspeed_config", lambda *args, **words: settings(*args, **words) | exact
    )


@pytest.fixture
def build(grid: Grid) -> Iterator[Any]:
    """Return a function that builds an engine of a `run_config`; all engines are closed at the end."""
    engines: list[Engine] = []

    def make(model: ModelConfig, dtype: str = "fp32", **settings: Any) -> Engine:
        engine = build_engine(run_config(model, **settings), grid, dtype)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
