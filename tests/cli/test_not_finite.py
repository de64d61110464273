"""A model that is not finite is not saved, resumed, completed or loaded."""

from __future__ import annotations

import json
import math

import pytest

import train
from megatron_lite import trainer
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint import writer
from megatron_lite.engine.engine import Engine, EvaluationSums
from tools import generate

NAME = "exp_avg of blocks.0.norm1.weight"


def inject_nan_after_step(monkeypatch, number):
    """Put a NaN into a moment after step `number`."""
    original, steps = Engine.train_step, 0

    def train_step(self, *args, **options):
        nonlocal steps
        result = original(self, *args, **options)
        steps += 1
        if steps == number:
            state = self.optimizer_state.fragments()
            moment = next(f.tensors["exp_avg"] for f in state if f.name == NAME.removeprefix("exp_avg of "))
            moment[3] = math.nan
        return result

    monkeypatch.setattr(Engine, "train_step", train_step)


def steps_of(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_run_ends_when_its_state_is_not_finite(arguments, tmp_path, monkeypatch, capsys, asynchronous):
    settings = {"checkpoint.interval": 2, "checkpoint.keep_last": 1, "checkpoint.asynchronous": asynchronous}
    inject_nan_after_step(monkeypatch, 5)
    assert train.main(arguments(**settings)) == 1
    error, folder = capsys.readouterr().err, tmp_path / "run" / "checkpoints"
    assert "step 6 is not finite and is not saved: " in error
    assert f"{NAME} (rank 0)" in error
    assert "weight of blocks.0.norm1.weight (rank 0)" in error
    assert f"The newest healthy checkpoint is {folder / 'step_00000004'}" in error
    assert steps_of(folder) == [4]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_checkpoint_not_finite_is_refused_everywhere(arguments, tmp_path, monkeypatch, capsys):
    words, folder = arguments(**{"checkpoint.interval": 2}), tmp_path / "run" / "checkpoints"
    with monkeypatch.context() as patch:  # as in versions without the check
        for module in (writer, trainer):
            patch.setattr(module, "state_not_finite", lambda *_: [])
        inject_nan_after_step(patch, 5)
        assert train.main(words) == 1
    assert "the validation loss of step 8 is not finite" in capsys.readouterr().err
    assert steps_of(folder) == [2, 4, 6, 8]
    for manifest in folder.glob("*/manifest.json"):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "finite": None}))
        (manifest.parent / "SHA256SUMS").unlink()
    run, healthy = str(tmp_path / "run"), f"The newest healthy checkpoint is {folder / 'step_00000004'}"
    commands = [
        lambda: train.main(words),
        lambda: generate.main([run, "--prompt", "a"]),
        lambda: len(dict(checkpoint.Weights(run))),  # as an export reads it
    ]
    for command in commands:
        try:
            assert command() != 0
            error = capsys.readouterr().err
        except ValueError as refusal:
            error = str(refusal)
        assert "step_00000008 is not finite: " in error
        assert "blocks.0.norm1.weight" in error
        assert healthy in error
    assert train.main([*words, "checkpoint.resume=newest_readable"]) == 0
    assert "at step 4" in capsys.readouterr().out
    assert checkpoint.newest_finite(folder) == folder / "step_00000008"


def test_held_out_loss_not_finite_ends_the_run(arguments, tmp_path, monkeypatch, capsys):
    words = arguments(**{"schedule.train_steps": 2})
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "evaluate", lambda *_: EvaluationSums(math.nan, 8.0, None))
        assert train.main(words) == 1
    error = capsys.readouterr().err
    assert "the validation loss of step 2 is not finite: all weights and moments are finite" in error
    # Earlier versions wrote a summary here. It does not mark a complete run.
    state = checkpoint.read_manifest(tmp_path / "run" / "checkpoints" / "step_00000002")["state"]
    report = {"steps": 2, "training_seconds": state["seconds"], "validation": {"loss": None, "evaluated_tokens": 8}}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(report))
    assert train.main(words) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]["loss"] > 0
