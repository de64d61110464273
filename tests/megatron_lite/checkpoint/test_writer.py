"""Checkpoints that are written during training."""

from __future__ import annotations

import threading

import pytest

from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint import writer as checkpoint_writer
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.reader import CheckpointError
from tests.megatron_lite.conftest import batches, model_config

LR = 3e-4


@pytest.fixture
def gate(monkeypatch):
    """Return an event that every file waits for before it is written."""
    event, write_file = threading.Event(), checkpoint_writer.write_file

    def late(path, tensors):
        assert event.wait(60)
        return write_file(path, tensors)

    monkeypatch.setattr(checkpoint_writer, "write_file", late)
    yield event
    event.set()


def content(folder):
    """Return the bytes of every file, and the manifest without its command."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    return files, {**checkpoint.read_manifest(folder), "command": []}


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 1), ("bf16", 1), ("fp32", 3)])
def test_steps_during_a_save_change_nothing_in_it(build, gate, tmp_path, dtype, stage):
    steps = batches(5)
    engine = build(model_config(), dtype=dtype, zero_stage=stage)
    engine.train_step(steps[0], lr=LR)
    gate.set()
    Checkpointer(engine, tmp_path / "synchronous").save(step=1, state={"step": 1}, config_yaml="a: 1\n")
    gate.clear()
    writer = Checkpointer(engine, tmp_path / "asynchronous", asynchronous=True)
    for step in (1, 2):  # the second save reuses the memory of the first
        writer.save_async(step=step, state={"step": step}, config_yaml="a: 1\n")
        engine.train_step(steps[step], lr=LR)
        assert writer.is_busy
        assert not writer.settle(any_busy=True)
        assert not (tmp_path / "asynchronous" / f"step_{step:08d}").exists()
        gate.set()
        assert writer.finish()
        gate.clear()
        assert writer.last.path == checkpoint.resolve(tmp_path / "asynchronous")
    assert content(tmp_path / "asynchronous" / "step_00000001") == content(tmp_path / "synchronous" / "step_00000001")
    assert writer.last.stopped_seconds <= writer.last.seconds
    other = build(model_config(), seed=99, dtype=dtype, zero_stage=stage)
    assert Checkpointer(other, tmp_path / "asynchronous").load() == {"step": 2}
    assert other.train_step(steps[2], lr=LR) == third_step(build, steps, dtype, stage)


def third_step(build, steps, dtype, stage):
    """Return the result of the third step of a run without saves."""
    engine = build(model_config(), dtype=dtype, zero_stage=stage)
    return [engine.train_step(step, lr=LR) for step in steps[:3]][-1]


def test_latest_moves_when_all_have_written_and_the_next_save_waits(build, gate, tmp_path):
    engine = build(model_config())
    writer = Checkpointer(engine, tmp_path, asynchronous=True)
    writer.save_async(step=1, state={}, config_yaml="")
    with pytest.raises(ValueError, match="step 1 is not written yet"):
        writer.save_async(step=2, state={}, config_yaml="")
    gate.set()
    writer._save.work.result(60)
    assert not checkpoint.exists(tmp_path)
    assert not writer.settle(any_busy=True)  # another process still writes
    assert not writer.settle(any_busy=False)
    writer._save.work.result(60)
    assert checkpoint.resolve(tmp_path).name == "step_00000001"
    assert writer.settle(any_busy=False)
    assert not writer.settle(any_busy=False)
    writer.save_async(step=2, state={}, config_yaml="")
    assert writer.finish()
    assert checkpoint.resolve(tmp_path).name == "step_00000002"


@pytest.mark.parametrize("what", ["write_file", "publish"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("No space left on device"), "No space left on device"),
        (MemoryError("too large"), "MemoryError: too large"),
    ],
)
def test_failure_is_raised_at_a_later_step_and_the_previous_checkpoint_stays(
    build, monkeypatch, tmp_path, what, error, text
):
    engine = build(model_config())
    writer = Checkpointer(engine, tmp_path, asynchronous=True)
    writer.save_async(step=1, state={}, config_yaml="")
    writer.finish()

    def full(*_):
        raise error

    monkeypatch.setattr(checkpoint_writer, what, full)
    writer.save_async(step=2, state={}, config_yaml="")

    def later_steps():
        while True:
            writer._save.work.result(60)
            writer.settle(any_busy=False)

    with pytest.raises(CheckpointError, match=rf"step_00000002: {text} .* Earlier checkpoints did"):
        later_steps()
    assert checkpoint.resolve(tmp_path).name == "step_00000001"
    assert not list(tmp_path.glob(".step_*"))
    monkeypatch.undo()
    writer.save_async(step=2, state={}, config_yaml="")
    assert writer.finish()


def test_disk_that_does_not_answer_ends_the_run_after_the_timeout(build, gate, tmp_path):
    writer = Checkpointer(build(model_config()), tmp_path, timeout_seconds=0.06)
    writer.save_async(step=1, state={"step": 1}, config_yaml="a: 1\n")
    with pytest.raises(
        CheckpointError, match=r"step_00000001 was not written within 0\.001 minutes \(run\.save_timeout"
    ):
        writer.finish()


def test_folder_that_cannot_be_made_is_reported_with_the_free_space(build, tmp_path):
    (tmp_path / "file").touch()
    writer = Checkpointer(build(model_config()), tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"could not write the checkpoint .* \(\d+\.\d\d GiB free on that disk\)"):
        writer.save(step=1, state={}, config_yaml="")
