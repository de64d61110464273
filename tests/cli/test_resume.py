"""The start point of a run: its own checkpoints, another run's, an earlier one, and restarts by a launcher."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

import train
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.trainer import Trainer
from tests.cli.conftest import train_lines


def test_run_resumes_with_a_smaller_batch(arguments, tmp_path):
    settings = {"batch.sequence_length": 512, "batch.micro_batch_size": 8}  # an epoch is less than 50 samples
    large, small = ({**settings, "batch.global_batch_size": size} for size in (64, 8))
    assert train.main(arguments(**large, **{"schedule.train_steps": 2})) == 0
    assert train.main(arguments(**small, **{"schedule.train_steps": 4})) == 0
    state = checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))["state"]
    assert (state["step"], state["consumed_samples"]) == (4, 2 * 64 + 2 * 8)  # more than 4 * 8


def test_resumed_run_names_changed_values_of_model_and_data(arguments, tmp_path, capsys):
    """Name options of mixers that the first start left at their defaults. Data of another run may differ."""
    assert train.main(arguments(**{"schedule.train_steps": 1})) == 0
    assert "was trained with" not in capsys.readouterr().out
    changed = {"model.mixer_options.metala.preset": "paper", "run.seed": 9}
    assert train.main(arguments(**changed, **{"schedule.train_steps": 2})) == 0
    option = 'model.mixer_options.metala.preset = "released", not "paper"'
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("the checkpoint was trained"))
    assert line.startswith("the checkpoint was trained with ")
    assert set(line.removeprefix("the checkpoint was trained with ").split("; ")) == {"run.seed = 1234, not 9", option}
    stage = {"model.mixer_options.metala.preset": "released", "run.seed": 5, "checkpoint.resume": tmp_path / "run"}
    assert train.main(arguments("stage", **stage, **{"schedule.train_steps": 1})) == 0
    named = 'the checkpoint was trained with model.mixer_options.metala.preset = "paper", not "released"\n'
    assert named in capsys.readouterr().out


def test_resume_never_starts_over_and_archives_the_checkpoints(arguments, tmp_path):
    train.main(arguments())
    assert train.main(arguments(**{"checkpoint.resume": "never", "run.seed": 2})) == 0
    assert checkpoint.resolve(tmp_path / "run" / "checkpoints.1").name == "step_00000008"
    assert (tmp_path / "run" / "metrics.previous.jsonl").is_file()


def test_checkpoints_behind_a_link_are_archived_on_their_disk(arguments, tmp_path):
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk" / "mine")
    assert train.main(arguments()) == 0
    assert train.main(arguments(**{"checkpoint.resume": tmp_path / "run" / "checkpoints" / "step_00000003"})) == 0
    assert checkpoint.resolve(tmp_path / "disk" / "mine.1" / "step_00000006").is_dir()
    assert train.main(arguments(**{"checkpoint.resume": "never"})) == 0
    assert checkpoint.resolve(tmp_path / "disk" / "mine.2").name == "step_00000008"


def test_resumed_run_that_started_from_another_run_equals_the_uninterrupted_one(arguments, tmp_path):
    assert train.main(arguments("source", **{"schedule.train_steps": 4})) == 0
    settings = {"schedule.train_steps": 6, "optimizer.lr": 0.01}
    assert train.main(arguments("uninterrupted", **settings, **{"checkpoint.resume": tmp_path / "source"})) == 0
    copy_stopped_run(tmp_path / "uninterrupted", 3, tmp_path / "resumed")
    assert train.main(arguments("resumed", **settings)) == 0
    assert train_lines(tmp_path / "resumed") == train_lines(tmp_path / "uninterrupted")
    manifests = [checkpoint.read_manifest(checkpoint.resolve(tmp_path / name)) for name in ("uninterrupted", "resumed")]
    assert [manifest["optimizer_steps"] for manifest in manifests] == [10, 10]
    assert [manifest["state"]["losses_seen"] for manifest in manifests] == [6, 6]
    assert manifests[0]["files"] == manifests[1]["files"]


def test_requeued_run_that_started_from_another_run_resumes_from_its_own_checkpoint(arguments, tmp_path, capsys):
    source = tmp_path / "source"
    assert train.main(arguments("source", **{"schedule.train_steps": 4})) == 0
    words = arguments("uninterrupted", **{"schedule.train_steps": 6, "checkpoint.resume": source})
    assert train.main(words) == 0
    copy_stopped_run(tmp_path / "uninterrupted", 3, tmp_path / "resumed")
    shutil.rmtree(source)  # it must not be read again
    capsys.readouterr()
    words = arguments("resumed", **{"schedule.train_steps": 6, "checkpoint.resume": source})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_due", lambda trainer: signal.raise_signal(signal.SIGUSR1))
        assert train.main(words) == 0
    out = capsys.readouterr().out
    assert (
        f"checkpoint.resume = {source} applies to the first start only: resuming from this run's own checkpoints" in out
    )
    assert "step_00000003 at step 3\n" in out
    assert "\nthe same command resumes from there" in out
    assert train.main(words) == 0
    assert train_lines(tmp_path / "resumed") == train_lines(tmp_path / "uninterrupted")
    capsys.readouterr()
    assert train.main(words) == 0
    assert " is complete: 6 steps, " in capsys.readouterr().out
    checkpoints = tmp_path / "resumed" / "checkpoints"
    # A named step of the run itself must exist.
    assert train.main([*words, f"checkpoint.resume={checkpoints / 'step_00000002'}"]) == 2
    step = checkpoints / "step_00000002"
    assert f"error: checkpoint.resume = {step}: {step} does not exist" in capsys.readouterr().err


def test_run_resumes_from_an_earlier_checkpoint_of_its_own(arguments, tmp_path, capsys):
    settings = {"schedule.train_steps": 7, "schedule.decay_steps": 7}
    words = arguments(**settings, **{"checkpoint.interval": 2, "checkpoint.keep_last": 3})
    assert train.main(words) == 0
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    lines, weights = train_lines(folder), checkpoint.read_weights(folder)
    file = checkpoints / "step_00000007" / "weights-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert train.main([*words, "schedule.train_steps=8"]) == 2
    assert "name another step folder, or resume from the newest complete" in capsys.readouterr().err
    back = f"checkpoint.resume={checkpoints.relative_to(tmp_path) / 'step_00000004'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # a relative path must name the run's folder too
        assert train.main([*words, back, "schedule.train_steps=5"]) == 0
    out = capsys.readouterr().out
    assert "step_00000004 at step 4\n" in out
    assert f"later checkpoints and metrics are moved to {folder / 'checkpoints.1'} and " in out
    assert sorted(path.name for path in (folder / "checkpoints.1").iterdir()) == ["step_00000006", "step_00000007"]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000004", "step_00000005"]
    assert len((folder / "metrics.previous.jsonl").read_text().splitlines()) > 7
    assert [line["step"] for line in train_lines(folder)] == [1, 2, 3, 4, 5]
    assert train.main(words) == 0
    assert train_lines(folder) == lines
    again = checkpoint.read_weights(folder)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("count", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_command_restarted_by_a_launcher_resumes(arguments, tmp_path, monkeypatch, capsys, count):
    """Ignore `checkpoint.resume` after a restart by a launcher; follow it at a start by hand."""
    assert train.main(arguments(**{"schedule.train_steps": 4})) == 0
    words = arguments(**{"schedule.train_steps": 6, "checkpoint.resume": "never"})
    monkeypatch.setenv(count, "1")
    assert train.main(words) == 0  # the checkpoints there are of another command
    lines = train_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.resolve(tmp_path / "run" / "checkpoints.1").name == "step_00000004"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 2

    copy_stopped_run(tmp_path / "run", 3, tmp_path / "resumed")
    words.append(f"run.directory={tmp_path / 'resumed'}")
    capsys.readouterr()
    assert train.main(words) == 0
    assert "step_00000003 at step 3\n" in capsys.readouterr().out
    assert train_lines(tmp_path / "resumed") == lines

    monkeypatch.setenv(count, "0")
    assert train.main(words) == 0
    assert "at step 3\n" not in capsys.readouterr().out
    assert checkpoint.resolve(tmp_path / "resumed" / "checkpoints.2").name == "step_00000006"


def test_restart_by_a_launcher_after_resuming_from_an_earlier_checkpoint(arguments, tmp_path, monkeypatch, capsys):
    assert train.main(arguments(**{"schedule.train_steps": 4})) == 0
    earlier = tmp_path / "run" / "checkpoints" / "step_00000003"
    assert train.main(arguments(**{"schedule.train_steps": 6, "checkpoint.resume": earlier})) == 0
    words = arguments(**{"schedule.train_steps": 8, "checkpoint.resume": earlier})
    for restarts, begins in (("1", "step_00000006 at step 6\n"), ("0", "step_00000003 at step 3\n")):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        capsys.readouterr()
        assert train.main(words) == 0
        assert begins in capsys.readouterr().out


def copy_stopped_run(run: Path, step: int, copy: Path) -> None:
    """Copy a complete run into the state after a kill that follows the save of `step`."""
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    (copy / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")
