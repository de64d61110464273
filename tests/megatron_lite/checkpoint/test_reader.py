"""Damaged checkpoints are refused with the file's name, and the newest complete one is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from megatron_lite.checkpoint import reader
from megatron_lite.checkpoint.checksums import CheckpointError, check_files, inside
from megatron_lite.checkpoint.storage import new_manifest, publish, write_file, write_weights
from megatron_lite.checkpoint.verify import newest_verified, verify
from megatron_lite.config.bounded_yaml import BoundedLoader
from megatron_lite.config.files import read_sources
from megatron_lite.parallel.sharding_plan import Shard

SECTIONS = "run: {}\nmodel: {}\ndata: {}\nbatch: {}\n"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + former] * 10)}]\n" for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def save(directory: Path, step: int = 0) -> Path:
    """Write a step folder with two tensors."""
    weights = {"embedding.weight": torch.arange(6.0).reshape(3, 2), "head.norm.weight": torch.ones(2)}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    specs = dict.fromkeys(shapes, "replicated")
    folder = write_weights(directory, weights.items(), shapes, specs=specs, config_yaml=SECTIONS)
    if step:
        folder = folder.rename(folder.with_name(f"step_{step:08d}"))
        (directory / "latest").write_text(f"{folder.name}\n")
    return folder


def change(file: Path, place: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["manifest.json", "config.yml", "SHA256SUMS", "weights-00000.safetensors"])
def test_a_changed_file_is_refused_by_name(tmp_path, name):
    folder = save(tmp_path)
    assert verify(folder) == 3
    change(folder / name, 3)
    with pytest.raises(CheckpointError, match=name) as problem:
        reader.read_weights(tmp_path)
    assert "checkpoint.resume=newest_readable" in str(problem.value)
    with pytest.raises(CheckpointError, match=name):
        verify(folder)


def test_consumed_samples_cannot_be_changed(tmp_path):
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"state": {"consumed_samples": 5}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: its SHA-256"):
        reader.read_manifest(folder)


def test_sha256sum_checks_a_step_folder(tmp_path):
    folder = save(tmp_path)
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    assert [line[64:] for line in lines] == ["  config.yml", "  manifest.json", "  weights-00000.safetensors"]
    assert check_files(folder, "") == 3
    (folder / "SHA256SUMS").write_text("\n".join(lines[1:]))
    with pytest.raises(
        CheckpointError, match=r"SHA256SUMS is damaged \(it has no hash of config\.yml\); copy it again"
    ):
        check_files(folder, "copy it again", ["config.yml"])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("step",), "x", "step: Input should be a valid integer"),
        (("optimizer_steps",), None, "optimizer_steps: Input should be a valid integer"),
        (("loss_scale",), 1.0, "loss_scale: Input should be a valid dictionary"),
        (("layout",), {"dtype": "fp32"}, r"layout\.world_size: Field required"),
        (("tensors", "head.norm.weight"), [], r"tensors\.head\.norm\.weight: Input should be"),
        (("files", "../../x"), {"bytes": 1, "sha256": ""}, r"names '../../x': only names of files inside"),
        (("files", "/etc/hostname"), {"bytes": 1, "sha256": ""}, r"names '/etc/hostname': only names"),
        (("tensors", "head.norm.weight", "pieces", 0, "rank"), 7, r"it lists no file weights-00007"),
        (("tensors", "head.norm.weight", "pieces", 0, "start"), 1, "no piece holds element 0"),
        (("tensors", "head.norm.weight", "shape"), [3], "no piece holds element 2"),
    ],
)
def test_a_wrong_manifest_of_an_earlier_version_is_refused(tmp_path, path, value, message):
    """Read a checkpoint without SHA256SUMS, whose manifest must have the required keys."""
    folder = save(tmp_path)
    (folder / "SHA256SUMS").unlink()
    assert len(reader.read_weights(tmp_path)) == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    section = manifest
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message) as problem:
        reader.read_weights(tmp_path)
    assert "manifest.json" in str(problem.value)


def test_pieces_that_overlap_beside_a_gap_are_refused(tmp_path):
    folder = save(tmp_path)
    (folder / "SHA256SUMS").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    piece = {"rank": 0, "start": 0, "numel": 3}
    manifest["tensors"]["embedding.weight"]["pieces"] = [piece, piece]  # six elements in all
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no piece holds element 3"):
        reader.read_weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../step_00000000", "/step_00000000", "", "step_0000000x", "step_00000000/..", b"\xff"]
)
def test_latest_names_a_step_folder_beside_it(tmp_path, name):
    save(tmp_path)
    (tmp_path / "latest").write_bytes(name if isinstance(name, bytes) else name.encode())
    with pytest.raises(CheckpointError, match=r"latest is damaged .*newest_readable"):
        reader.resolve(tmp_path)


def test_without_latest_the_newest_step_folder_is_taken(tmp_path):
    """Lose nothing after a kill between the rename of the first checkpoint and `latest`."""
    save(tmp_path, 9)
    newest = save(tmp_path, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "step_00000011").mkdir()
    assert reader.exists(tmp_path)
    assert reader.resolve(tmp_path) == newest


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "", ".", "a\0b", 3, None])
def test_names_that_lead_outside_a_folder_are_refused(name):
    with pytest.raises(
        CheckpointError, match=r"description\.json names .*: only names of files inside here are allowed"
    ):
        inside(Path("here"), name, Path("description.json"))
    assert inside(Path("here"), "a/b", Path("description.json")) == Path("here/a/b")


def test_newest_complete_checkpoint(tmp_path):
    assert newest_verified(tmp_path) == (None, [])
    first, second, third = (save(tmp_path, step) for step in (1, 2, 3))
    assert newest_verified(tmp_path) == (third, [])
    change(third / "weights-00000.safetensors")
    newest, problems = newest_verified(tmp_path)
    assert newest == second
    assert len(problems) == 1
    assert f"{third}: the file weights-00000.safetensors is corrupted" in problems[0]
    (tmp_path / "latest").write_text("nothing")
    newest, problems = newest_verified(tmp_path)
    assert newest == second
    assert len(problems) == 2
    (tmp_path / "latest").write_text("step_00000001\n")  # later folders do not count
    assert newest_verified(tmp_path) == (first, [])
    (first / "config.yml").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete; checkpoint\.resume=never starts over"):
        newest_verified(tmp_path)


def test_alias_bomb_is_refused(tmp_path):
    folder = save(tmp_path)
    (folder / "SHA256SUMS").unlink()
    (folder / "config.yml").write_text(BOMB)
    with pytest.raises(
        CheckpointError, match=r"config\.yml is damaged \(its aliases expand to more than 100,000 values"
    ):
        reader.read_config_yaml(tmp_path)
    assert "its aliases expand to more than" in read_sources([folder / "config.yml"]).problems[0]
    for text in ("[" * 400, "a: &a [*a]"):
        with pytest.raises(yaml.YAMLError):
            yaml.load(text, BoundedLoader)
    assert yaml.load("a: &a [1]\nb: *a\n", BoundedLoader) == {"a": [1], "b": [1]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a checkpoint: a run folder"),
        (lambda folder: (folder / "latest").write_text("step_00000009\n"), "names step_00000009, which is incomplete"),
    ],
)
def test_folder_without_checkpoint_names_allowed_folders(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        reader.resolve(tmp_path)


def test_message_of_missing_path_names_only_checkpoints(tmp_path):
    step = save(tmp_path / "runs" / "first" / "checkpoints", 3)
    (tmp_path / "runs" / "cache").mkdir()
    with pytest.raises(CheckpointError, match=r"frst does not exist \(beside it: \S*/runs/first\): a run folder"):
        reader.resolve(tmp_path / "runs" / "frst")
    with pytest.raises(CheckpointError, match=r"step_9 does not exist \(beside it: \S*/step_00000003\): a run folder"):
        reader.resolve(step.with_name("step_9"))


def test_paths_of_own_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "run" / "checkpoints"
    for resume in ("run", "run/checkpoints", "run/checkpoints/step_00000004", str(own), str(tmp_path / "run")):
        assert reader.is_own_checkpoint(resume, own), resume
    for resume in ("auto", "never", "other", "run/checkpoints.1", "run/checkpoints.1/step_00000004", "."):
        assert not reader.is_own_checkpoint(resume, own), resume


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_in_any_order_make_every_kind_of_tensor(tmp_path, dim):
    """Two tensor ranks with two data ranks each, whose ranks are not in the order of their elements."""
    names = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {kind: torch.arange(16.0).reshape(4, 4) + 100 * number for number, kind in enumerate(names)}
    manifest = new_manifest(1, {"world_size": 4, "data": 2, "tensor": 2, "dtype": "fp32"}, {"w": (4, 4)}, {"w": "row"})
    folder = tmp_path / ".writing"
    folder.mkdir()
    for rank, (start, index) in enumerate([(4, 1), (4, 0), (0, 1), (0, 0)]):
        piece = reader.TensorSlice("w", Shard(dim, index, 2), start, 4)
        manifest["tensors"]["w"]["pieces"].append(piece.entry(rank))
        for stem, kinds in (("weights", names[:1]), ("optimizer", names[1:])):
            flat = {f"{kind}/w": piece.shard.cut(tensors[kind]).flatten()[start : start + 4].clone() for kind in kinds}
            manifest["files"] |= write_file(folder / f"{stem}-{rank:05d}.safetensors", flat)
    publish(folder, tmp_path / "step_00000001", manifest, SECTIONS)
    stored = reader.Reader(tmp_path / "step_00000001", reader.read_manifest(tmp_path / "step_00000001"))
    for shard in (Shard(), Shard(0, 1, 2), Shard(1, 0, 2)):
        for kind, whole in tensors.items():
            wanted = shard.cut(whole).flatten()
            assert stored.read(kind, "w", shard, 0, wanted.numel()).equal(wanted), (shard, kind)
            assert stored.read(kind, "w", shard, 3, 4).equal(wanted[3:7]), (shard, kind)


@pytest.mark.parametrize(("form", "version"), [("other", 1), (reader.FORMAT, 3)])
def test_a_foreign_manifest_is_refused(tmp_path, form, version):
    (tmp_path / "manifest.json").write_text(json.dumps({"format": form, "version": version, "files": {}}))
    with pytest.raises(CheckpointError, match=f"format '{form}' version {version}; "):
        reader.read_manifest(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_supported_versions(tmp_path, version):
    manifest = {"step": 1, "state": {}, "optimizer_steps": 0, "loss_scale": {}, "tensors": {}, "files": {}}
    manifest["layout"] = {"world_size": 1, "data": 1, "dtype": "fp32"}
    manifest |= {"format": reader.FORMAT, "version": version}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert reader.read_manifest(tmp_path) == manifest
