"""Train two steps in each layout of two processes, save, and write the losses of a further batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.loader import dump_config, load_config
from megatron_lite.parallel.grid import init_grid
from models.config import ModelConfig
from tests.parity.launch import leave
from tests.parity.worker import engine_of, own

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero3": {"zero_stage": 3},
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
}
OVERRIDES = [
    "model.vocab_size=260",
    "model.num_layers=2",
    "data.corpus=stdlib",
    "data.tokenizer.type=bytes",
    "batch.micro_batch_size=2",
    "batch.gradient_accumulation_steps=4",
    "batch.sequence_length=24",
    "optimizer.lr=1e-3",
    "schedule.train_steps=2",
]


def micro_batches(seed: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 257, (4, 2, 25), generator=torch.Generator().manual_seed(seed))
    weight = torch.ones(2, 24)
    return [{"tokens": t[:, :-1], "labels": t[:, 1:].contiguous(), "loss_weight": weight} for t in tokens]


def main(out: Path) -> None:
    losses = {}
    for name, parallel in LAYOUTS.items():
        sizes = {key: parallel[key] for key in ("tensor", "pipeline") if key in parallel}
        config = load_config(
            ["configs/model/hybrid_tiny.yml"],
            [*OVERRIDES, f"run.directory={out / name}", *(f"parallel.{k}={v}" for k, v in parallel.items())],
            model_type=ModelConfig,
            world_size=2,
        )
        grid = init_grid("cpu", 2.0, **sizes)
        engine = engine_of(config.model, parallel, grid)
        for step in range(2):
            engine.train_step(own(micro_batches(step), grid), lr=1e-3)
        Checkpointer(engine, out / name / "checkpoints").save(
            step=2, state={"step": 2}, config_yaml=dump_config(config)
        )
        nll, weight, _ = engine.evaluate(own(micro_batches(9), grid))
        losses[name] = nll / weight
        engine.close()
        if grid.is_main:
            (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
