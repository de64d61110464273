"""Checkpoints of `python train.py`: saves, signals, kills, full disks and damaged files."""

from __future__ import annotations

import errno
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import train
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint import writer
from megatron_lite.fault_tolerance.run_lock import RunLock
from megatron_lite.metrics.logger import MetricsLogger
from megatron_lite.trainer import Trainer
from tests.cli.conftest import ROOT, metrics_lines, run_words, start, train_lines, wait_for


def test_saves_follow_the_configuration(arguments, tmp_path):
    words = arguments(**{"checkpoint.interval": 2, "checkpoint.keep_last": 1, "checkpoint.log_spaced": "true"})
    assert train.main([*words, "checkpoint.extra_steps=[3]"]) == 0
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == [f"step_{step:08d}" for step in (1, 2, 3, 4, 6, 8)]  # 6: the last one of the interval alone
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_00000008"


def test_files_have_the_permissions_of_new_files(arguments, tmp_path):
    """Let another member of a group read a checkpoint on a shared disk."""
    mask = os.umask(0o027)
    try:
        assert train.main(arguments(**{"schedule.train_steps": 1})) == 0
    finally:
        os.umask(mask)
    files = list((tmp_path / "run" / "checkpoints" / "step_00000001").iterdir())
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o640"}


def test_asynchronous_saves_equal_synchronous_saves(arguments, tmp_path):
    settings = {"checkpoint.interval": 2, "checkpoint.keep_last": 2, "schedule.train_steps": 9}
    assert train.main(arguments("synchronous", **settings)) == 0
    assert train.main(arguments("asynchronous", **settings, **{"checkpoint.asynchronous": "true"})) == 0
    assert train_lines(tmp_path / "synchronous") == train_lines(tmp_path / "asynchronous")
    synchronous, asynchronous = (
        {
            path.parent.name: {
                name: entry["sha256"] for name, entry in checkpoint.read_manifest(path.parent)["files"].items()
            }
            for path in (tmp_path / name / "checkpoints").glob("step_*/manifest.json")
        }
        for name in ("synchronous", "asynchronous")
    )
    assert synchronous == asynchronous
    assert set(synchronous) == {"step_00000008", "step_00000009"}
    saves = metrics_lines(tmp_path / "asynchronous", "checkpoint")
    assert [line["step"] for line in saves] == [2, 4, 6, 8, 9]
    assert all(0 < line["stopped_seconds"] <= line["seconds"] for line in saves)
    # A synchronous save is complete before the next step.
    order = [(line["kind"], line["step"]) for line in metrics_lines(tmp_path / "synchronous")]
    for step in (2, 4, 6, 8):
        assert order.index(("checkpoint", step)) < order.index(("train", step + 1))


TWELVE_STEPS = {"schedule.train_steps": 12, "checkpoint.interval": 0, "precision.dtype": "bf16"}


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train.main(run_words(corpus, folder, **TWELVE_STEPS)) == 0
    return folder / "run"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_run_resumed_after_a_signal_equals_the_uninterrupted_one(
    uninterrupted, arguments, tmp_path, capsys, monkeypatch, number
):
    """Send SIGUSR1 during another save, which ends only after the signal."""
    steps, is_sent, step, write_file = dict(TWELVE_STEPS), threading.Event(), Trainer._step, writer.write_file
    if number == signal.SIGUSR1:
        steps |= {"checkpoint.interval": 4, "checkpoint.asynchronous": "true"}

    def signalled(trainer, batches):
        step(trainer, batches)
        if trainer.state.step == 5:
            signal.raise_signal(number)
            is_sent.set()

    def late(path, tensors):
        assert is_sent.wait(60)
        return write_file(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", signalled)
        patch.setattr(writer, "write_file", late)
        assert train.main(arguments("resumed", **steps)) == 0
    assert "stopped after step 5" in capsys.readouterr().out
    assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "resumed"))["step"] == 5
    assert train.main(arguments("resumed", **steps)) == 0
    assert train_lines(tmp_path / "resumed") == train_lines(uninterrupted)
    expected, resumed = (checkpoint.read_weights(folder) for folder in (uninterrupted, tmp_path / "resumed"))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("megatron_lite.parallel.grid.init_grid", 1),
        ("tools.pretraining.text.training_samples", 1),
        ("tools.pretraining.prepare.summary", 3),
    ],
)
def test_pre_timeout_signal_outside_the_loop_does_not_end_the_process(arguments, tmp_path, monkeypatch, place, step):
    """Stop after one saved step for a signal before the loop. Complete the run for a signal after it.

    By default SIGUSR1 ends a process with status 138.
    """
    function = pkgutil.resolve_name(place)

    def signalled(*arguments, **more):
        signal.raise_signal(signal.SIGUSR1)
        return function(*arguments, **more)

    def unhandled(*_):
        raise AssertionError("SIGUSR1 has no handler")

    monkeypatch.setattr(place, signalled)
    previous = signal.signal(signal.SIGUSR1, unhandled)
    try:
        assert train.main(arguments(**{"schedule.train_steps": 3})) == 0
        assert signal.getsignal(signal.SIGUSR1) is unhandled
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))["step"] == step


def test_pre_timeout_signal_during_the_start_saves_one_step(arguments, tmp_path):
    """Send signals from the creation of the run folder to the exit of the interpreter."""
    process = start(arguments(**{"schedule.train_steps": 2}))
    wait_for((tmp_path / "run").is_dir, process)
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.01)
    assert process.returncode == 0, process.communicate()[0]
    assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))["step"] == 1


def test_signal_saves_before_the_validation_of_its_step(arguments, tmp_path):
    settings = {"evaluation.interval": 2, "evaluation.batches": 1, "checkpoint.interval": 0}
    assert train.main(arguments("uninterrupted", **settings)) == 0
    step = Trainer._step

    def signalled(trainer, steps):
        step(trainer, steps)
        if trainer.state.step == 4:
            signal.raise_signal(signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", signalled)
        assert train.main(arguments("resumed", **settings)) == 0

    def killed(trainer, steps):
        step(trainer, steps)
        raise RuntimeError

    assert [line["kind"] for line in metrics_lines(tmp_path / "resumed") if line["step"] == 4] == [
        "train",
        "checkpoint",
        "stop",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", killed)
        with pytest.raises(RuntimeError):
            train.main(arguments("resumed", **settings))
    assert train.main(arguments("resumed", **settings)) == 0
    uninterrupted, resumed = (
        [(line["step"], line["loss"]) for line in metrics_lines(tmp_path / name, "validation")]
        for name in ("uninterrupted", "resumed")
    )
    assert [step for step, _ in uninterrupted] == [2, 4, 6, 8]
    assert resumed == uninterrupted
    assert train_lines(tmp_path / "resumed") == train_lines(tmp_path / "uninterrupted")


def test_second_run_in_the_folder_of_a_live_run_is_refused_and_changes_nothing(arguments, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder)
    lock.acquire()
    (folder / "metrics.jsonl").write_text("{}\n")
    assert train.main(arguments(**{"checkpoint.resume": "never"})) == 1
    error = capsys.readouterr().err
    assert f"is in use by a run that is alive ({socket.gethostname()}, process {os.getpid()})" in error
    assert sorted(path.name for path in folder.iterdir()) == [".running", "metrics.jsonl"]
    lock.close()
    assert train.main(arguments(**{"schedule.train_steps": 1})) == 0
    assert not (folder / ".running").exists()


@pytest.mark.parametrize("name", ["elsewhere", "other/checkpoints"])
def test_second_run_with_the_checkpoint_folder_of_a_live_run_is_refused(arguments, tmp_path, capsys, name):
    """`other/checkpoints` is the default folder of a run in `other`."""
    folder, statuses = tmp_path / name, []
    settings = {} if name.startswith("other") else {"checkpoint.directory": folder}
    second = arguments("second", **{"checkpoint.directory": folder, "checkpoint.resume": "never"})

    def save_due(trainer):
        if not statuses:
            statuses.append(train.main(second))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_due", save_due)
        assert train.main(arguments("other", **settings, **{"schedule.train_steps": 2})) == 0
    assert statuses == [1]
    message = f"checkpoint.directory = {folder} is in use by a run that is alive ({socket.gethostname()}, "
    assert message in capsys.readouterr().err
    assert not (tmp_path / "second").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_00000002"]
    assert train.main(second) == 0
    assert not (folder / ".running").exists()
    assert checkpoint.resolve(folder.with_name(f"{folder.name}.1")).name == "step_00000002"


def test_final_commands_name_the_folder_of_the_checkpoints(arguments, tmp_path, capsys):
    for more, folder in (({}, tmp_path / "run"), ({"checkpoint.directory": tmp_path / "disk"}, tmp_path / "disk")):
        assert train.main(arguments(**more, **{"schedule.train_steps": 1})) == 0
        assert f"python eval.py {folder} " in capsys.readouterr().out
        assert checkpoint.resolve(folder).name == "step_00000001"


def test_checkpoint_folder_that_cannot_be_created_is_refused_before_the_first_step(arguments, tmp_path, capsys):
    assert train.main(arguments(**{"checkpoint.directory": "LICENSE/checkpoints"})) == 2
    assert "checkpoint.directory = LICENSE/checkpoints: Not a directory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_kill_9_during_a_save_leaves_the_previous_checkpoint(arguments, tmp_path, asynchronous):
    settings = {"schedule.train_steps": 1000, "checkpoint.interval": 1, "model.hidden_size": 256}
    words = arguments(**settings, **{"checkpoint.asynchronous": asynchronous})
    process = start(words)
    folder = tmp_path / "run" / "checkpoints"
    wait_for(lambda: (folder / "latest").is_file(), process)
    wait_for(lambda: list(folder.glob(".step_*.writing")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    previous = checkpoint.resolve(tmp_path / "run")
    step = checkpoint.read_manifest(previous)["step"]
    assert len(checkpoint.read_weights(previous)) > 10
    assert train.main([*words, f"schedule.train_steps={step + 2}", "evaluation.sample_tokens=0"]) == 0
    assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))["step"] == step + 2
    assert not list(folder.glob(".step_*.writing"))
    assert [line["step"] for line in train_lines(tmp_path / "run")] == list(range(1, step + 3))


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_full_disk_stops_the_run_and_leaves_the_previous_checkpoint(arguments, tmp_path, asynchronous):
    words = arguments(**{"checkpoint.interval": 5, "checkpoint.asynchronous": asynchronous})
    assert train.main(arguments(**{"schedule.train_steps": 4})) == 0
    previous = checkpoint.read_weights(tmp_path / "run")
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY)); "  # writes fail past this size
        "import train; sys.exit(train.main(sys.argv[1:]))"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, text=True, capture_output=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "could not write the checkpoint" in done.stderr
    assert "GiB free" in done.stderr
    assert "Earlier checkpoints did not change" in done.stderr
    folder = tmp_path / "run" / "checkpoints"
    assert not list(folder.glob(".step_*.writing"))
    assert checkpoint.resolve(tmp_path / "run").name == "step_00000004"
    weights = checkpoint.read_weights(tmp_path / "run")
    assert all(torch.equal(previous[name], weights[name]) for name in previous)


def test_full_disk_at_the_metrics_file_ends_with_a_message(arguments, tmp_path, monkeypatch, capsys):
    def full(metrics, step, values, *, kind="train"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(metrics.path))

    monkeypatch.setattr(MetricsLogger, "log", full)
    assert train.main(arguments()) == 1
    words = (
        f"error: {tmp_path / 'run' / 'metrics.jsonl'}: No space left on device. Finished work is saved: free disk space"
    )
    assert words in capsys.readouterr().err


def test_corrupted_checkpoint_is_named_and_the_newest_readable_one_is_resumed(arguments, tmp_path, capsys):
    train.main(arguments())
    step = checkpoint.resolve(tmp_path / "run")
    file = step / "weights-00000.safetensors"
    content = file.read_bytes()
    longer = arguments(**{"schedule.train_steps": 9})
    file.write_bytes(content[:-5])
    assert train.main(longer) == 2
    assert f"weights-00000.safetensors has {len(content) - 5} of {len(content)} bytes" in capsys.readouterr().err
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert train.main(longer) == 2
    error = capsys.readouterr().err
    assert "weights-00000.safetensors is corrupted" in error
    assert "(checkpoint.resume=newest_readable)" in error
    lines = train_lines(tmp_path / "run")
    again = arguments(**{"checkpoint.resume": "newest_readable"})
    assert train.main(again) == 0
    out, error = capsys.readouterr()
    assert f"unreadable checkpoint: {step}: the file weights-00000.safetensors is corrupted" in error
    assert "step_00000006 at step 6\n" in out
    archive = tmp_path / "run" / "checkpoints.1"
    assert f"later checkpoints and metrics are moved to {archive} and " in out
    assert [path.name for path in archive.iterdir()] == ["step_00000008"]
    assert train_lines(tmp_path / "run") == lines
    assert train.main(again) == 0
    assert " is complete: 8 steps, " in capsys.readouterr().out
