"""Checkpoints in any layout: a run that changes its layout at every step is the run left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite import checkpoint
from models.lm import LanguageModel
from tests import oracle
from tests.parallel import layouts
from tests.parallel.launch import launch

# The layout of each step: two in four processes, then two in two.
RELAYS: dict[str, list[dict[str, Any]]] = {
    "tensor-pipeline-data": [
        {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
        {"tensor": 4},
        {"zero_stage": 2},
        {"pipeline": 2},
    ],
    "zero3-tensor": [
        {"tensor": 2, "zero_stage": 3},
        {"pipeline": 4},
        {"tensor": 2, "zero_stage": 2},
        {"zero_stage": 3},
    ],
}
MODEL = "hybrid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of every relay, and their histories."""
    path = tmp_path_factory.mktemp("relay")
    for first, processes in ((0, 4), (2, 2)):
        legs = {name: relay[first : first + 2] for name, relay in RELAYS.items()}
        launch("tests.parallel.relay", processes, str(path), MODEL, json.dumps(legs), str(first))
    return path


@pytest.mark.parametrize("name", RELAYS)
def test_a_run_goes_on_in_other_layouts(folder, name):
    history = [pair for first in (0, 2) for pair in json.loads((folder / f"{name}.{first}.json").read_text())]
    config = layouts.model_config(MODEL)
    wanted = oracle.train(config, layouts.steps(), seed=11, lr=layouts.LR, warmup=layouts.WARMUP, total=layouts.STEPS)
    for step, ((loss, norm), (wanted_loss, wanted_norm)) in enumerate(zip(history, wanted, strict=True)):
        assert loss == pytest.approx(wanted_loss, rel=1e-5), f"loss of step {step}"
        assert norm == pytest.approx(wanted_norm, rel=1e-5), f"gradient norm of step {step}"

    # Any of them is read whole without the layout that wrote it: the first step's weights give the second step's loss.
    step = layouts.steps()[1]
    model_read = LanguageModel(config)
    missing, unexpected = model_read.load_state_dict(
        checkpoint.read_weights(folder / name / "step_00000001"), strict=False
    )
    assert (missing, unexpected) == (["head.weight"], [])
    with torch.no_grad():
        nll = sum(model_read(b["tokens"], b["labels"], b["loss_weight"]).item() for b in step)
    weight = sum(b["loss_weight"].sum().item() for b in step)
    assert nll / weight == pytest.approx(wanted[1][0], rel=1e-5)
    manifest = checkpoint.read_manifest(folder / name / "step_00000001")
    first = RELAYS[name][0]
    assert manifest["layout"]["tensor"] == first.get("tensor", 1)
    assert manifest["layout"]["pipeline"] == first.get("pipeline", 1)
