"""Checkpoints in any layout: a run that changes its layout at every step equals the oracle."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.parallel.sharding_plan import Shard
from models.language_model import LanguageModel
from tests import oracle
from tests.parity import layouts
from tests.parity.launch import launch_forked
from tools import reshard

# The layout of each step: two steps of four processes, then two steps of two.
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
    "muon": [{"pipeline": 2, "tensor": 2}, {"tensor": 2}, {"zero_stage": 2}, {"tensor": 2}],
}
MODEL = "hybrid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints and histories of every relay."""
    path = tmp_path_factory.mktemp("relay")
    for first, processes in ((0, 4), (2, 2)):
        legs = {name: relay[first : first + 2] for name, relay in RELAYS.items()}
        launch_forked("tests.parity.relay", processes, str(path), MODEL, json.dumps(legs), str(first))
    return path


@pytest.mark.parametrize("name", RELAYS)
def test_run_resumes_in_other_layouts(folder, name):
    history = [pair for first in (0, 2) for pair in json.loads((folder / f"{name}.{first}.json").read_text())]
    config = layouts.model_config(MODEL)
    options = {"lr": layouts.LR, "warmup": layouts.WARMUP, "total": layouts.STEPS, "muon": name == "muon"}
    wanted = oracle.train(config, layouts.steps(), seed=11, **options)
    for step, ((loss, norm), (wanted_loss, wanted_norm)) in enumerate(zip(history, wanted, strict=True)):
        assert loss == pytest.approx(wanted_loss, rel=1e-5), f"loss of step {step}"
        assert norm == pytest.approx(wanted_norm, rel=1e-5), f"gradient norm of step {step}"

    # A checkpoint can be read without the layout that wrote it: the first step's weights give the second step's loss.
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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1), (3, 4, 2), (1, 2, 2)], ids=str)
def test_checkpoint_is_resharded_to_another_layout_bit_for_bit(folder, tmp_path, capsys, sizes):
    source = folder / "tensor-pipeline-data" / "step_00000001"
    data, tensor, pipeline = sizes
    words = [str(source), str(tmp_path), f"--data={data}", f"--tensor={tensor}", f"--pipeline={pipeline}"]
    assert reshard.main(words) == 0
    assert "was for 4 processes: tensor 2 x pipeline 2" in capsys.readouterr().out
    target = checkpoint.resolve(tmp_path)
    assert len(list(target.glob("weights-*"))) == data * tensor * pipeline
    old, new = checkpoint.read_manifest(source), checkpoint.read_manifest(target)
    assert new["layout"] == old["layout"] | {
        "world_size": data * tensor * pipeline, "data": data, "tensor": tensor, "pipeline": pipeline
    }  # fmt: skip
    for name, entry in new["tensors"].items():
        # The rank of a piece follows from the pipeline stage of its layer and from its shard.
        stages = {piece["rank"] // (data * tensor) for piece in entry["pieces"]}
        assert len(stages) == 1, name
        for piece in entry["pieces"]:
            assert piece["rank"] % tensor == piece.get("shard", (0, 0, 1))[1], name
        if sizes == (1, 2, 2):  # as the run that wrote the source
            assert entry["pieces"] == old["tensors"][name]["pieces"], name
    same = ("step", "state", "optimizer_steps", "loss_scale")
    assert {key: new[key] for key in same} == {key: old[key] for key in same}
    readers = [checkpoint.Reader(path, manifest) for path, manifest in ((source, old), (target, new))]
    for name, entry in old["tensors"].items():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            a, b = (reader.read(kind, name, Shard(), 0, math.prod(entry["shape"])) for reader in readers)
            assert torch.equal(a, b), (kind, name)
    assert reshard.main(words) == 2  # an existing folder is not replaced
    assert "exists: name another output folder" in capsys.readouterr().err


def test_layout_that_does_not_divide_is_refused(folder, tmp_path, capsys):
    assert reshard.main([str(folder / "zero3-tensor"), str(tmp_path), "--tensor=3"]) == 2
    error = capsys.readouterr().err
    assert "--tensor = 3 does not divide model.num_heads = 4" in error
    assert "; nearest allowed: --tensor " in error
    assert reshard.main([str(folder / "zero3-tensor"), str(tmp_path), "--pipeline=9"]) == 2
    assert "--pipeline = 9" in capsys.readouterr().err


def test_damaged_file_that_one_rank_reads_is_refused_on_every_rank(folder):
    errors = json.loads((folder / "refused.json").read_text())
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert "step_00000003: the file weights-00001.safetensors is corrupted" in errors[0]


def test_missing_and_corrupted_files_are_named(folder, tmp_path):
    source = folder / "tensor-pipeline-data" / "step_00000001"
    broken = tmp_path / "step_00000001"
    shutil.copytree(source, broken)
    (broken / "weights-00003.safetensors").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"the file weights-00003\.safetensors is missing"):
        checkpoint.read_weights(broken)
    shutil.copyfile(source / "weights-00003.safetensors", broken / "weights-00003.safetensors")
    data = bytearray((broken / "weights-00002.safetensors").read_bytes())
    data[-5] ^= 1
    (broken / "weights-00002.safetensors").write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=r"the file weights-00002\.safetensors is corrupted"):
        checkpoint.read_weights(broken)
