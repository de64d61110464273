"""Step folders that are published, pruned and archived."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron_lite.atomic_io import make_folder
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint import safetensors_stream
from megatron_lite.checkpoint.storage import (
    archive_all,
    prune,
    publish,
    rewrite,
    rollback_to,
    write_file,
    write_weights,
)
from megatron_lite.parallel.sharding_plan import Shard


def make_steps(directory: Path, *steps: int) -> None:
    """Make step folders with an empty manifest."""
    for step in steps:
        folder = directory / f"step_{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")


def test_pruning_keeps_the_newest_and_permanent_checkpoints(tmp_path):
    make_steps(tmp_path, 1, 2, 4, 100, 200, 300)
    (tmp_path / "step_notes").mkdir()
    deleted = prune(tmp_path, keep_last=2, keep={1, 2})
    assert [folder.name for folder in deleted] == ["step_00000004", "step_00000100"]
    remaining = sorted(p.name for p in tmp_path.iterdir())
    assert remaining == ["step_00000001", "step_00000002", "step_00000200", "step_00000300", "step_notes"]
    assert prune(tmp_path, keep_last=0, keep=set()) == []
    (tmp_path / "latest").write_text("step_00000300\n")
    assert prune(tmp_path, keep_last=1, keep={1, 2, 300}) == []  # 200 is the newest of those that are counted
    deleted = prune(tmp_path, keep_last=1, keep=set())
    assert [folder.name for folder in deleted] == ["step_00000001", "step_00000002", "step_00000200"]


def test_pruning_keeps_latest_and_removes_leftovers(tmp_path):
    make_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step_00000001" / "manifest.json").unlink()  # by an interrupted deletion
    (tmp_path / "latest").write_text("step_00000002\n")
    deleted = prune(tmp_path, keep_last=1, keep=set())
    assert [folder.name for folder in deleted] == ["step_00000001"]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000002", "step_00000003"]


def test_checkpoints_after_latest_are_not_pruned_and_do_not_count(tmp_path):
    make_steps(tmp_path, 10, 20, 30, 40)
    (tmp_path / "latest").write_text("step_00000020\n")
    assert prune(tmp_path, keep_last=2, keep=set()) == []
    assert [folder.name for folder in prune(tmp_path, keep_last=1, keep=set())] == ["step_00000010"]
    (tmp_path / "latest").write_text("step_00000040\n")
    first, second = (tmp_path.with_name(f"{tmp_path.name}.{number}") for number in (1, 2))
    assert rollback_to(tmp_path / "step_00000020") == first
    assert sorted(path.name for path in first.iterdir()) == ["step_00000030", "step_00000040"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000020"]
    assert checkpoint.resolve(tmp_path).name == "step_00000020"
    assert rollback_to(tmp_path / "step_00000020") is None
    assert archive_all(tmp_path) == second
    assert checkpoint.resolve(second).name == "step_00000020"
    assert list(tmp_path.iterdir()) == []
    assert archive_all(tmp_path) is None


def test_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    """Simulate a network disk, where an open file keeps its folder from being removed."""
    make_steps(tmp_path, 10, 20, 30, 40)
    rmtree = shutil.rmtree

    def busy(folder):
        if folder.name == "step_00000010":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rmtree(folder)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.warns(UserWarning, match=r"step_00000010 cannot be deleted, and stays: .*Directory not empty"):
            deleted = prune(tmp_path, keep_last=2, keep=set())
    assert [folder.name for folder in deleted] == ["step_00000020"]
    assert not (tmp_path / "step_00000010" / "manifest.json").exists()  # the rest of the folder is no checkpoint
    assert [folder.name for folder in prune(tmp_path, keep_last=2, keep=set())] == ["step_00000010"]


def test_step_saved_again_stays_until_it_is_replaced(tmp_path, monkeypatch):
    final, temporary = tmp_path / "step_00000001", tmp_path / ".step_00000001.writing"
    for content in ("old", "new"):
        temporary.mkdir()
        (temporary / "weights").write_text(content)
        publish(temporary, final, {}, "")
    assert (final / "weights").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    temporary.mkdir()
    replaced = tmp_path / ".step_00000001.former.writing"

    def killed(source, target):
        if source == temporary:
            assert (replaced / "weights").read_text() == "new"
            raise OSError("killed")
        source.rename(target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(OSError, match="killed"):
        publish(temporary, final, {}, "")
    assert (replaced / "weights").read_text() == "new"


def test_order_of_flushes(tmp_path, monkeypatch):
    """Flush files before their folder, the folder's name before `latest`, then `latest`: a power cut keeps flushed data."""
    events: list[str] = []

    def fsync(descriptor: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    replace = os.replace

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        events.append(f"-> {os.path.relpath(target, tmp_path)}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    temporary, final = tmp_path / "run" / "checkpoints" / ".step_00000001.writing", "run/checkpoints/step_00000001"
    make_folder(temporary)
    assert events == [".", "run", "run/checkpoints"]
    files = write_file(temporary / "weights-00000.safetensors", {"a": torch.ones(2)})
    publish(temporary, tmp_path / final, {"files": files}, "")
    needed = [
        "run/checkpoints/.step_00000001.writing/weights-00000.safetensors",
        *(
            f"-> run/checkpoints/.step_00000001.writing/{name}"
            for name in ("config.yml", "manifest.json", "SHA256SUMS")
        ),
        "run/checkpoints/.step_00000001.writing",
        f"-> {final}",
        "run/checkpoints",
        "-> run/checkpoints/latest",
        "run/checkpoints",
    ]
    later_events = iter(events[3:])
    assert [event for event in needed if event in later_events] == needed


def test_resharding_refuses_a_tensor_that_is_not_finite(tmp_path, monkeypatch):
    weights = [("w", torch.tensor([1.0, torch.inf, 3.0]))]
    with monkeypatch.context() as patched:
        patched.setattr(safetensors_stream, "is_finite", lambda x: True)  # as earlier versions, which did not check
        source = write_weights(tmp_path / "a", weights, {"w": (3,)}, specs={"w": "replicated"}, config_yaml="a: 1\n")
    slices = [[checkpoint.TensorSlice("w", Shard(), 0, 1)], [checkpoint.TensorSlice("w", Shard(), 1, 2)]]
    with pytest.raises(checkpoint.NotFiniteError, match=r"step_00000000 is not finite: weight of w\."):
        rewrite(source, tmp_path / "b", slices, {"world_size": 2})
    assert not list((tmp_path / "b").iterdir())
