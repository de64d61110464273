"""Export checkpoints that several processes wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import read_manifest, read_weights, resolve
from megatron_lite.config.loader import load_config
from models.config import ModelConfig
from tests.parity.launch import launch_forked
from tests.tools.conversion.layout_worker import LAYOUTS, micro_batches
from tools.conversion.logit_parity import load_export
from tools.convert_hf import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    launch_forked("tests.tools.conversion.layout_worker", 2, str(out), timeout=240)
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_export_and_import_of_each_layout(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / name
    step = resolve(run)
    assert read_manifest(step)["layout"]["world_size"] == 2
    assert len(list(step.glob("weights-*.safetensors"))) == 2
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    difference = float(capsys.readouterr().out.split("difference to the trainer's ")[1].split()[0])
    assert difference <= 1e-5
    # The import keeps layout and batch of the run, and prints the command with its number of processes.
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    processes = math.prod(LAYOUTS[name].get(key, 1) for key in ("tensor", "pipeline"))
    start = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
    assert f"\n{start} train.py {tmp_path}/again/config.yml" in capsys.readouterr().out
    trained, imported = read_weights(step), read_weights(tmp_path / "again")
    assert all(torch.equal(trained[key], imported[key]) for key in trained)
    config = load_config([tmp_path / "again" / "config.yml"], [], model_type=ModelConfig, world_size=2)
    given = load_config([step / "config.yml"], [], model_type=ModelConfig, world_size=2)
    assert (config.parallel, config.batch) == (given.parallel, given.batch)
    model = load_export(tmp_path / "out", causal=True)
    batches = micro_batches(9)
    with torch.no_grad():
        logits = [model(batch["tokens"]).logits.flatten(0, 1) for batch in batches]
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), labels).item()
    assert loss == pytest.approx(json.loads((runs / "losses.json").read_text())[name], rel=1e-6)
