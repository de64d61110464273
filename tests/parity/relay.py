"""One process of a relay: each layout makes one step from the checkpoint of the previous layout."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.checksums import CheckpointError
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.collectives import barrier, gather
from tests.parity import layouts
from tests.parity.launch import leave
from tests.parity.worker import engine_of, grid_of, own, rate


def main(folder: Path, model: str, relays: dict[str, list[dict[str, Any]]], first: int) -> None:
    """Make steps `first`, `first` + 1, ... of each relay, one per layout; write histories to `folder/NAME.FIRST.json`."""
    config = layouts.model_config(model)
    whole = {
        "model": asdict(config) | {"mixers": list(config.mixers)},
        "batch": {"sequence_length": 24},
        "data": {},
        "run": {},
    }
    settings = yaml.safe_dump(whole)
    for name, legs in relays.items():
        history, optimizer = [], "muon" if name.startswith("muon") else "adamw"
        for step, parallel in enumerate(legs, first):
            grid = grid_of(parallel)
            engine = engine_of(config, parallel, grid, seed=11 if step == 0 else 99 + step, optimizer=optimizer)
            if step:
                engine.train_step(own(layouts.steps()[0], grid), lr=rate(0))  # the load must undo this step
                assert Checkpointer(engine, folder / name).load() == {"step": step}
            result = engine.train_step(own(layouts.steps()[step], grid), lr=rate(step))
            history.append((result.loss, result.gradient_norm))
            Checkpointer(engine, folder / name).save(step=step + 1, state={"step": step + 1}, config_yaml=settings)
            engine.close()
        if grid_of({}).is_main:
            (folder / f"{name}.{first}.json").write_text(json.dumps(history))
    if first:
        refused_loads(folder, engine_of(config, {"zero_stage": 2}, grid_of({"zero_stage": 2})))


def refused_loads(folder: Path, engine: Engine) -> None:
    """Load a checkpoint of two ranks whose second file is damaged. Write every rank's error to `folder/refused.json`."""
    damaged = folder / "damaged" / "step_00000003"
    if engine.grid.is_main:
        shutil.copytree(folder / "tensor-pipeline-data" / "step_00000003", damaged)
        file = damaged / "weights-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    barrier(engine.grid)
    try:
        Checkpointer(engine, damaged.parent).load(damaged)
        error = ""
    except CheckpointError as refusal:
        error = str(refusal)
    errors = gather(error, engine.grid)
    if engine.grid.is_main:
        (folder / "refused.json").write_text(json.dumps(errors))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
    leave()
