"""Two length stages: a run with longer samples starts from the weights and optimizer state of a shorter one."""

from __future__ import annotations

from pathlib import Path

import torch

import train
from data.datasets.causal import CausalDataset, Packing
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.config.loader import load_config
from megatron_lite.engine.engine import Engine
from models.config import ModelConfig
from tests.cli.conftest import ROOT, train_lines
from tests.cli.test_resume import copy_stopped_run
from tools.loading.token_data import prepared_data

STAGE_2 = ROOT / "configs" / "default_long.yml"


def test_each_stage_reads_its_own_order_and_resumes_exactly(arguments, tmp_path, monkeypatch, capsys):
    batches: list[torch.Tensor] = []

    def recorded(engine, micro_batches, *rest, step=Engine.train_step, **more):
        batches.extend(batch["tokens"].reshape(-1, width) for batch in micro_batches)
        return step(engine, micro_batches, *rest, **more)

    monkeypatch.setattr(Engine, "train_step", recorded)
    changes = {"schedule.train_steps": 4, "run.seed": 3, "evaluation.sample_tokens": 0}
    width = 32
    assert train.main([str(ROOT / "configs" / "default.yml"), *arguments("short", **changes)]) == 0
    longer = {**changes, "batch.sequence_length": 128, "schedule.train_steps": 6}
    words = [str(STAGE_2), *arguments("long", **longer, **{"checkpoint.resume": tmp_path / "short"})]
    first_stage, width = torch.cat(batches), 128
    batches.clear()
    assert train.main(words) == 0
    assert [line["tokens"] for line in train_lines(tmp_path / "long")] == [512 * step for step in range(1, 7)]
    assert torch.cat(batches).equal(order_of(words, 24))
    assert first_stage.equal(order_of(arguments("short", **changes), 16))

    copy_stopped_run(tmp_path / "long", 3, tmp_path / "resumed")
    batches.clear()
    assert train.main([*words, f"run.directory={tmp_path / 'resumed'}"]) == 0
    assert torch.cat(batches).equal(order_of(words, 24)[12:])
    assert train_lines(tmp_path / "resumed") == train_lines(tmp_path / "long")
    ends = [checkpoint.read_manifest(checkpoint.resolve(tmp_path / name)) for name in ("long", "resumed")]
    assert ends[0]["files"] == ends[1]["files"]
    assert ends[0]["optimizer_steps"] == 10

    capsys.readouterr()
    monkeypatch.setattr("tools.planning.dry_run._time_layers", lambda *_: None)
    back = arguments("back", **{"checkpoint.resume": tmp_path / "long", "batch.sequence_length": 64})
    for more in ([], ["--dry-run"]):
        assert train.main([*back, *more]) == 2
        error = capsys.readouterr().err
        assert "batch.sequence_length = 64: a length stage cannot start from a longer one" in error
        assert "was trained with 128; at least 128 is allowed. Set batch.sequence_length=128, or name" in error
    assert not (tmp_path / "back" / "checkpoints").exists()
    assert train.main([*words, "schedule.train_steps=8", "batch.sequence_length=256"]) == 2
    error = capsys.readouterr().err
    assert "batch.sequence_length = 256: " in error
    assert "set batch.sequence_length=128, or start another length stage as a run of its own: run.name=NAME" in error
    assert f"checkpoint.resume={tmp_path / 'long'}" in error


def order_of(words: list[str], samples: int) -> torch.Tensor:
    """Return the tokens of the first samples that the data set of a configuration gives: [samples, T]."""
    files: list[str | Path] = [word for word in words if "=" not in word]
    config = load_config(files or ["default.yml"], words[len(files) :], model_type=ModelConfig, world_size=1)
    dataset = CausalDataset(
        prepared_data(config.data, 320).train[0],
        sequence_length=config.batch.sequence_length,
        num_samples=samples,
        seed=config.run.seed,
        order=config.data.order,
        packing=Packing(method=config.data.packing),
    )
    return torch.stack([dataset[number]["tokens"] for number in range(samples)])
