"""Exports of checkpoints that several processes wrote, each holding a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import read_manifest, resolve
from tests.hf.layout_worker import LAYOUTS, micro_batches
from tests.parallel.launch import launch
from tools.conversion.compare import load_export
from tools.convert_hf import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    launch("tests.hf.layout_worker", 2, str(out), timeout=240)
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_of_any_layout(name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / name
    step = resolve(run)
    assert read_manifest(step)["layout"]["world_size"] == 2
    assert len(list(step.glob("weights-*.safetensors"))) == 2
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    difference = float(capsys.readouterr().out.split("difference to the trainer's ")[1].split()[0])
    assert difference <= 1e-5
    model = load_export(tmp_path / "out", causal=True)
    batches = micro_batches(9)
    with torch.no_grad():
        logits = [model(batch["tokens"]).logits.flatten(0, 1) for batch in batches]
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), labels).item()
    assert loss == pytest.approx(json.loads((runs / "losses.json").read_text())[name], rel=1e-6)
