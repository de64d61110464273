"""Read checkpoints in any layout, whatever layout wrote them.

A checkpoint is a folder `step_00000100/` with

- `manifest.json`: format version, step, trainer state, layout, software versions, command line; shape, sharding spec, pieces
  and optimizer (if it is Muon) of every tensor; size and SHA-256 of every file; `finite`: all tensors were checked to be finite;
- `config.yml`: the resolved configuration;
- `SHA256SUMS`: SHA-256 of all files, the manifest included, as `sha256sum -c` reads it;
- `weights-RRRRR.safetensors`, `optimizer-RRRRR.safetensors`: the flat float32 pieces that rank R owned.
  Keys are `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` with canonical parameter names. Muon has no `exp_avg_sq`. With the
  manifest's key `ema` the optimizer files also hold `ema/NAME`, the average of the weights.

A piece is `numel` elements from `start` on of the flattened tensor, or of its `shard` = [dimension, index, count] under tensor
parallelism. Each process writes the pieces that it owns. The reader assembles any part of any tensor from them. The folder is
written under a temporary name, flushed and renamed. Then the text file `latest` beside it is replaced atomically. A process
killed at any moment leaves the previous checkpoint loadable and `latest` on a complete one.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lite.checkpoint.checksums import CheckpointError, check_files, file_sha256, inside
from megatron_lite.checkpoint.manifest_schema import Manifest
from megatron_lite.config.bounded_yaml import BoundedLoader
from megatron_lite.fault_tolerance.finite_check import is_finite
from megatron_lite.near_folders import near_folders
from megatron_lite.optim.zero_state import AVERAGE, MOMENTS
from megatron_lite.parallel.sharding_plan import Shard
from megatron_lite.plural import counted

FORMAT = "metalion-checkpoint"
VERSION = 2  # version 1 has no shards
MANIFEST, CONFIG = "manifest.json", "config.yml"
_STEP = re.compile(r"step_[0-9]+")
_NEEDED = "a run folder, a checkpoints folder with the file 'latest', or a step folder with manifest.json is needed"
REMEDY = "name another step folder, or resume from the newest complete checkpoint (checkpoint.resume=newest_readable)"


class NotFiniteError(CheckpointError):
    """Weights, moments or a loss that are not finite."""


def not_finite_error(what: str, names: Sequence[str], directory: Path) -> NotFiniteError:
    """Return the error that names the tensors and the newest healthy checkpoint of a folder.

    Args:
        what: begins the sentence: "runs/a/checkpoints/step_00000003 is not finite".
    """
    shown = [*names[:8], *([f"{len(names) - 8} more"] if len(names) > 8 else [])]
    healthy = newest_finite(directory)
    advice = (
        f"The newest healthy checkpoint is {healthy}: name that folder (checkpoint.resume={healthy} rolls the run back)"
        if healthy
        else f"There is no healthy checkpoint in {directory}: start the run over (checkpoint.resume=never)"
    )
    return NotFiniteError(f"{what}{': ' if shown else ''}{', '.join(shown)}. {advice}")


def resolve(path: Path | str) -> Path:
    """Return the step folder for a path: itself, or the newest one of a checkpoints or run folder.

    Raises:
        CheckpointError: there is none; names the folders that are allowed.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if newest := _newest(path):
        return named_by(newest) if newest.name == "latest" else newest
    if not path.exists():
        near = near_folders(path, "checkpoints/latest", "latest", MANIFEST)
        raise CheckpointError(f"{path} does not exist{near}: {_NEEDED}")
    raise CheckpointError(f"{path} is not a checkpoint: {_NEEDED}")


def named_by(latest: Path) -> Path:
    """Return the step folder that the file `latest` names. Raises CheckpointError."""
    try:
        name = latest.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        name = ""
    if not _STEP.fullmatch(name):
        raise CheckpointError(f"{latest} is damaged (it names no folder such as step_00000100); {REMEDY}")
    if not (latest.parent / name / MANIFEST).is_file():
        raise CheckpointError(f"{latest} names {name}, which is incomplete (it has no {MANIFEST}); {REMEDY}")
    return latest.parent / name


def _newest(path: Path) -> Path | None:
    """Return the file `latest` of a checkpoints or run folder; without it the newest complete step folder, or None."""
    for folder in (path, path / "checkpoints"):
        if (folder / "latest").is_file():
            return folder / "latest"
        # A first save that was interrupted before it wrote `latest`.
        if steps := [step for step in step_folders(folder).values() if (step / MANIFEST).is_file()]:
            return steps[-1]
    return None


def step_folders(directory: Path) -> dict[int, Path]:
    """Return the step folders of a checkpoints folder by step, in order, complete or not."""
    folders = {step_of(path): path for path in directory.glob("step_*") if _STEP.fullmatch(path.name)}
    return dict(sorted(folders.items()))


def step_folder(directory: Path, step: int) -> Path:
    """Return the path of the step folder of a step, such as `directory/step_00000100`."""
    return directory / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a step folder."""
    return int(folder.name.removeprefix("step_"))


def exists(path: Path) -> bool:
    """Return whether a run or checkpoints folder has a finished checkpoint."""
    return _newest(path) is not None


def is_own_checkpoint(resume: str, directory: Path) -> bool:
    """Return whether `checkpoint.resume` names the checkpoints of the run in `directory`, or a step folder there.

    Every start rolls the run back to that folder, which may be missing. Another path is read only by a run without checkpoints.
    """
    if resume in ("auto", "never", "newest_readable"):
        return False
    path = Path(resume).resolve()
    return directory.resolve() in (path, path.parent, (path / "checkpoints").resolve())


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a step folder, after a check of its hash, of that of config.yml, and of the size of every file.

    Raises:
        CheckpointError: unreadable, another format or version, or a missing, short or changed file, which is named.
    """
    file = path / MANIFEST
    check_files(path, REMEDY, (MANIFEST, CONFIG))
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); {REMEDY}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file} is damaged (it holds no keys); {REMEDY}")
    if manifest.get("format") != FORMAT or manifest.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{file}: format {manifest.get('format')!r} version {manifest.get('version')!r}; "
            f"{FORMAT!r} up to version {VERSION} is allowed: read it with the program that wrote it"
        )
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, detail["loc"]))
        raise CheckpointError(f"{file} is damaged ({key}: {detail['msg']}); {REMEDY}") from error
    for name, entry in manifest["files"].items():
        stored = inside(path, name, file)
        size = stored.stat().st_size if stored.is_file() else None
        if size != entry["bytes"]:
            problem = "is missing" if size is None else f"has {size} of {entry['bytes']} bytes"
            raise CheckpointError(f"{path}: the file {name} {problem}; {REMEDY}")
    return manifest


def check_hash(path: Path, name: str, entry: Mapping[str, Any] | None) -> None:
    """Compare a file of a step folder with its entry in the manifest. Raises CheckpointError if they differ."""
    if entry is None:
        raise CheckpointError(f"{path / MANIFEST} is damaged (it lists no file {name}); {REMEDY}")
    if file_sha256(path / name) != entry["sha256"]:
        raise CheckpointError(f"{path}: the file {name} is corrupted (its SHA-256 is not the manifest's); {REMEDY}")


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return all weights of a checkpoint at full size: canonical name to float32 tensor on the CPU.

    Raises:
        CheckpointError: as `resolve` and `read_manifest`, or a file whose checksum differs.
    """
    return dict(Weights(path).items())


def optimizer_kinds(manifest: Mapping[str, Any], name: str | None = None) -> tuple[str, ...]:
    """Return the kinds of tensors in the optimizer files of a checkpoint, or of one parameter; none for imported weights."""
    if manifest.get("optimizer") == "none":
        return ()
    moments = MOMENTS if name is None or not is_muon(manifest, name) else MOMENTS[:1]
    return (*moments, *((AVERAGE,) if manifest.get(AVERAGE) else ()))


def is_muon(manifest: Mapping[str, Any], name: str) -> bool:
    """Return whether Muon updated a parameter of a checkpoint, so that it has no second moment."""
    return manifest["tensors"][name].get("optimizer") == "muon"


class Weights(Mapping[str, Tensor]):
    """The weights of a checkpoint by canonical name, at full size in float32 on the CPU: their average if there is one.

    Each is read at its lookup, so that memory never holds a whole large model.

    Raises:
        CheckpointError: as `resolve` and `read_manifest`, or a file whose checksum differs.
        NotFiniteError: a weight is not finite.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = resolve(path)
        manifest = read_manifest(self.path)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in manifest["tensors"].items()}
        self._reader = Reader(self.path, manifest)
        self._kind = AVERAGE if manifest.get(AVERAGE) else "weight"

    def __getitem__(self, name: str) -> Tensor:
        weight = self._read(name)
        if self._reader.not_finite:
            for other in self.shapes:  # the message names all of them
                self._read(other)
            self._reader.require_finite()
        return weight

    def _read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self._reader.read(self._kind, name, Shard(), 0, math.prod(shape)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def read_config_yaml(path: Path | str) -> dict[str, Any]:
    """Return the resolved configuration of a checkpoint as plain YAML values.

    Raises:
        CheckpointError: as `resolve`, or a missing or damaged file.
    """
    import yaml

    file = resolve(path) / CONFIG
    check_files(file.parent, REMEDY, (CONFIG,))
    try:
        config = yaml.load(file.read_text(encoding="utf-8"), BoundedLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file} is damaged ({' '.join(str(error).split())}); {REMEDY}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is damaged (it holds no sections); {REMEDY}")
    if missing := [name for name in ("run", "model", "data", "batch") if not isinstance(config.get(name), dict)]:
        raise CheckpointError(f"{file} is damaged (it has no section {missing[0]}); {REMEDY}")
    return config


@dataclass(frozen=True)
class TensorSlice:
    """The `numel` elements from `start` on of the flattened `shard` of the tensor `name`."""

    name: str
    shard: Shard
    start: int
    numel: int

    def entry(self, rank: int) -> dict[str, Any]:
        """Return the manifest's entry of this piece in the file of `rank`."""
        piece: dict[str, Any] = {"rank": rank, "start": self.start, "numel": self.numel}
        if self.shard.count > 1:
            piece["shard"] = [self.shard.dim, self.shard.index, self.shard.count]
        return piece


def describe_layout(layout: Mapping[str, Any]) -> str:
    """Return a manifest's layout in words: "4 processes: data 2 x tensor 2, ZeRO 1, bf16"."""
    sizes = [f"{key} {layout[key]}" for key in ("data", "tensor", "pipeline", "context") if layout.get(key, 1) > 1]
    words = counted(layout["world_size"], "process", "processes") + (f": {' x '.join(sizes)}" if sizes else "")
    return words + (f", ZeRO {layout['zero_stage']}" if "zero_stage" in layout else "") + f", {layout['dtype']}"


class Reader:
    """Assembles parts of tensors from the pieces of one checkpoint; verifies the checksum of a file when it is first opened.

    Attributes:
        not_finite: tensors that have a non-finite element in the parts read so far ("exp_avg of head.norm.weight").
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._manifest = path, manifest
        self.not_finite: list[str] = []
        self._open: dict[str, Any] = {}
        self._assembled: tuple[tuple[str, str], Tensor] | None = None

    def read(self, kind: str, name: str, shard: Shard, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel) of the flattened shard of a tensor, float32 [numel] on the CPU.

        kind: "weight", "exp_avg", "exp_avg_sq" or "ema". Moments that the checkpoint does not hold are zeros.

        Raises:
            CheckpointError: a changed file, or files that do not match the manifest.
        """
        try:
            return self._read(kind, name, shard, start, numel)
        except (SafetensorError, LookupError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._path / MANIFEST} does not match its files at {kind} of {name} ({error}); {REMEDY}"
            ) from error

    def _read(self, kind: str, name: str, shard: Shard, start: int, numel: int) -> Tensor:
        if kind != "weight" and kind not in optimizer_kinds(self._manifest, name):
            return torch.zeros(numel, dtype=torch.float32)
        entry = self._manifest["tensors"][name]
        size = math.prod(entry["shape"])
        pieces = [(piece, Shard(*piece.get("shard", (0, 0, 1)))) for piece in entry["pieces"]]
        if all(stored.dim == 0 for _, stored in pieces) and shard.dim == 0:
            # Shards along the first dimension are ranges of the flattened tensor.
            placed = [(piece, stored.index * (size // stored.count) + piece["start"]) for piece, stored in pieces]
            return self._range(kind, name, placed, shard.index * (size // shard.count) + start, numel)
        if all((stored.dim, stored.count) == (shard.dim, shard.count) for _, stored in pieces):
            matches = [(piece, piece["start"]) for piece, stored in pieces if stored == shard]
            return self._range(kind, name, matches, start, numel)
        return shard.cut(self._whole(kind, name, pieces)).flatten()[start : start + numel]

    def _whole(self, kind: str, name: str, pieces: list[tuple[dict[str, Any], Shard]]) -> Tensor:
        if self._assembled is None or self._assembled[0] != (kind, name):
            shape = tuple(self._manifest["tensors"][name]["shape"])
            whole = torch.empty(shape, dtype=torch.float32)
            for shard in dict.fromkeys(stored for _, stored in pieces):
                matches = [(piece, piece["start"]) for piece, stored in pieces if stored == shard]
                view = shard.cut(whole)
                view.copy_(self._range(kind, name, matches, 0, view.numel()).reshape(view.shape))
            self._assembled = (kind, name), whole
        return self._assembled[1]

    def _range(self, kind: str, name: str, placed: list[tuple[dict[str, Any], int]], start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel) from pieces, each with the offset of its first element."""
        out = torch.empty(numel, dtype=torch.float32)
        covered, end = start, start + numel
        for piece, offset in sorted(placed, key=lambda entry: entry[1]):
            low, high = max(start, offset), min(end, offset + piece["numel"])
            if low < high:
                if low != covered:
                    break
                stem = "weights" if kind == "weight" else "optimizer"
                file = self._file(f"{stem}-{piece['rank']:05d}.safetensors")
                view = file.get_slice(f"{kind}/{name}")
                out[low - start : high - start] = view[low - offset : high - offset]
                covered = high
        if covered != end:
            raise CheckpointError(
                f"{self._path / MANIFEST} is damaged ({kind} of {name}: no piece holds element {covered}); {REMEDY}"
            )
        if not is_finite(out) and (entry := f"{kind} of {name}") not in self.not_finite:
            self.not_finite.append(entry)
        return out

    def require_finite(self) -> None:
        """Raise NotFiniteError if a part that was read is not finite."""
        if self.not_finite:
            raise not_finite_error(f"{self._path} is not finite", self.not_finite, self._path.parent)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            check_hash(self._path, name, self._manifest["files"].get(name))
            self._open[name] = safe_open(self._path / name, framework="pt")
        return self._open[name]


def newest_finite(directory: Path) -> Path | None:
    """Return the newest step folder in which all weights and moments are finite, or None."""
    for path in reversed(step_folders(directory).values()):
        with contextlib.suppress(CheckpointError):  # damaged
            if not tensors_not_finite(path):
                return path
    return None


def tensors_not_finite(path: Path) -> list[str]:
    """Return the names of the tensors of a step folder that are not finite. Reads them unless the manifest says `finite`.

    Raises CheckpointError as `read_manifest`, or for a file whose checksum differs.
    """
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    if not manifest.get("finite"):
        for kind in ("weight", *optimizer_kinds(manifest)):
            for name, entry in manifest["tensors"].items():
                reader.read(kind, name, Shard(), 0, math.prod(entry["shape"]))
    return reader.not_finite
