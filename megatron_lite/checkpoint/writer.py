"""Write checkpoints of an engine, in the background if requested. `reader.py` describes the format.

Every process copies its pieces to host memory and writes its files from the copy. When all files are written, rank 0 adds the
manifest, renames the folder and replaces `latest`. Each of the two parts runs in a thread. The ranks agree that all threads have
finished at the end of a later step, in a collective that every step has anyway.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.atomic_io import make_folder, temporary_path
from megatron_lite.checkpoint.checksums import CheckpointError
from megatron_lite.checkpoint.reader import NotFiniteError, TensorSlice, not_finite_error, step_folder, step_folders
from megatron_lite.checkpoint.storage import new_manifest, prune, publish, write_file
from megatron_lite.engine.engine import Engine
from megatron_lite.fault_tolerance.finite_check import state_not_finite
from megatron_lite.optim.zero_state import AVERAGE
from megatron_lite.parallel.collectives import barrier, broadcast, gather
from megatron_lite.parallel.grid import Grid


class Written(NamedTuple):
    """Result of one process: the problem ("" if none), pieces by tensor, and the manifest's entries of its files."""

    problem: str
    pieces: dict[str, list[dict[str, Any]]]
    files: dict[str, dict[str, Any]]


@dataclass
class _Save:
    """A save in progress.

    Attributes:
        work: the current part of this process, in a thread.
        begin: time of `perf_counter`.
        stopped_seconds: time in which training waited.
        is_written: all processes have written their files.
    """

    step: int
    path: Path
    temporary: Path
    manifest: dict[str, Any]
    config_yaml: str
    work: Future[Any]
    begin: float
    stopped_seconds: float = 0.0
    is_written: bool = False


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        seconds: duration of the save.
        stopped_seconds: the part of it in which training waited on this process.
    """

    step: int
    path: Path
    seconds: float
    stopped_seconds: float


class CheckpointWriter:
    """Writes checkpoints, one at a time: `save_async`, then `settle` after every step until it is complete, or `finish`.

    Every process of the run calls the same methods after the same steps.

    Args:
        directory: the checkpoints folder of the run, on a disk that all processes share.
        asynchronous: write in the background, from a copy that stays allocated for the next save.
        timeout_seconds: longest time that `finish` waits for a file; inf: no limit.
        keep_last: number of newest checkpoints to keep; 0: all.
        is_permanent: whether the checkpoint of a step stays in any case, and does not count.

    Attributes:
        directory, asynchronous: as given.
        last: the last complete checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        *,
        asynchronous: bool = False,
        timeout_seconds: float = math.inf,
        keep_last: int = 0,
        is_permanent: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._engine, self.directory, self.asynchronous = engine, directory, asynchronous
        self._timeout_seconds, self._keep_last, self._is_permanent = timeout_seconds, keep_last, is_permanent
        self._save: _Save | None = None
        self._copies: dict[str, Tensor] = {}
        self.last: Saved | None = None

    def save_async(self, *, step: int, state: Mapping[str, Any], config_yaml: str) -> None:
        """Copy the state of this step and start to write its folder, such as `directory/step_00000100`.

        Args:
            state: the trainer's state, as JSON values; returned by `Checkpointer.load`.

        Raises:
            ValueError: the previous save is not complete.
            NotFiniteError: a weight or moment is not finite; on every process, and nothing is written.
        """
        if self._save is not None:
            raise ValueError(f"step {self._save.step} is not written yet: call finish before the next save")
        begin, engine = time.perf_counter(), self._engine
        names = state_not_finite(engine.optimizer_state, engine.grid)
        refuse_not_finite(f"step {step} is not finite and is not saved", names, self.directory, engine.grid)
        path = step_folder(self.directory, step)
        temporary = temporary_path(path)
        problem = self._make_folder(temporary)
        barrier(engine.grid)
        manifest = new_manifest(step, engine.layout, engine.parameter_shapes(), engine.sharding_specs) | {
            "optimizer_steps": engine.optimizer_state.steps,
            "state": dict(state),
            "loss_scale": engine.optimizer_state.loss_scaler_state,
            **({AVERAGE: True} if engine.optimizer_state.has_average else {}),
        }
        for name in engine.muon_parameters:
            manifest["tensors"][name]["optimizer"] = "muon"
        pieces, groups = self._copy_pieces()
        work = self._start(lambda: self._write(temporary, pieces, groups, problem))
        self._save = _Save(step, path, temporary, manifest, config_yaml, work, begin, time.perf_counter() - begin)

    @property
    def is_busy(self) -> bool:
        """Return whether this process is writing."""
        return self._save is not None and not self._save.work.done()

    def settle(self, any_busy: bool) -> bool:
        """Start the next part of a save in progress, without waiting. Return whether the save is complete.

        Args:
            any_busy: whether any process `is_busy`; the same on all of them.

        Raises:
            CheckpointError: on every process, if one of them could not write. Nothing is left behind.
        """
        save = self._save
        if save is None or any_busy:
            return False
        begin = time.perf_counter()
        try:
            return self._publish(save) if not save.is_written else self._end(save)
        finally:
            save.stopped_seconds += time.perf_counter() - begin

    def finish(self) -> bool:
        """Wait until a save in progress is complete. Return whether there was one. Raises as `settle`."""
        complete = False
        while self._save is not None:
            begin = time.perf_counter()
            self._wait(self._save)  # `settle` raises the errors of a save
            self._save.stopped_seconds += time.perf_counter() - begin
            complete = self.settle(any_busy=False)
        return complete

    def _wait(self, save: _Save) -> None:
        """Wait for the current part of a save. Raises CheckpointError after `timeout_seconds`."""
        try:
            save.work.exception(None if math.isinf(self._timeout_seconds) else self._timeout_seconds)
        except TimeoutError:
            raise CheckpointError(
                f"the checkpoint {save.path} was not written within {self._timeout_seconds / 60:g} minutes "
                f"(run.save_timeout_minutes): check the disk, then run the same command again; earlier checkpoints did not change"
            ) from None

    def _publish(self, save: _Save) -> bool:
        """Start to publish the folder, once all processes have written their files. Return that the save is not complete."""
        everyone: list[Written] = gather(save.work.result(), self._engine.grid)
        save.is_written = True
        problem = next((written.problem for written in everyone if written.problem), "")
        main = self._engine.grid.is_main
        save.work = self._start(lambda: self._complete(save, everyone) if main and not problem else problem)
        return False

    def _end(self, save: _Save) -> bool:
        """Record a complete save and return True. Raises its problem as CheckpointError on every process."""
        problem = broadcast(save.work.result(), self._engine.grid)
        self._save = None
        if not problem:
            self.last = Saved(save.step, save.path, time.perf_counter() - save.begin, save.stopped_seconds)
            return True
        if self._engine.grid.is_main:
            shutil.rmtree(save.temporary, ignore_errors=True)
        disk = next(folder for folder in (self.directory, *self.directory.absolute().parents) if folder.exists())
        free = shutil.disk_usage(disk).free / 2**30
        raise CheckpointError(
            f"could not write the checkpoint {save.path}: {problem} ({free:.2f} GiB free on that disk). "
            f"Earlier checkpoints did not change; free space or set another checkpoint.directory, then resume"
        )

    def _start(self, work: Callable[[], Any]) -> Future[Any]:
        """Run a part of a save in a thread."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        # A daemon: a run that ends with an error does not wait, and an incomplete checkpoint has a temporary name.
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        return done

    def _make_folder(self, temporary: Path) -> str:
        """Make the temporary folder, and remove those of killed saves, on the main process. Return the problem, "" if none."""
        if self._engine.grid.is_main:
            try:
                make_folder(self.directory)
                for leftover in self.directory.glob(".step_*.writing"):  # of a save that was killed
                    shutil.rmtree(leftover)
                temporary.mkdir()
            except OSError as error:
                return str(error)
        return ""

    def _copy_pieces(self) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Tensor]]]:
        """Return the pieces of this process by tensor, and copies of them by file."""
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
        pieces: dict[str, list[dict[str, Any]]] = {}
        rank = self._engine.grid.rank
        for fragment in self._engine.optimizer_state.fragments():
            numel = fragment.tensors["weight"].numel()
            if not numel or not fragment.primary:
                continue
            part = TensorSlice(fragment.name, fragment.shard, fragment.start, numel)
            pieces.setdefault(fragment.name, []).append(part.entry(rank))
            for key, tensor in fragment.tensors.items():
                stem, name = "weights" if key == "weight" else "optimizer", f"{key}/{fragment.name}"
                groups[stem][name] = self._copy(name, tensor)
        if self._engine.grid.device.type == "cuda":
            torch.cuda.synchronize(self._engine.grid.device)
        return pieces, groups

    def _copy(self, name: str, view: Tensor) -> Tensor:
        """Return a copy in host memory, float32."""
        # On a CPU too: safetensors refuses tensors that share memory, and fragments are views of one buffer.
        if not self.asynchronous:
            return torch.empty(view.shape, dtype=torch.float32).copy_(view.detach())
        if name not in self._copies:
            self._copies[name] = torch.empty(view.shape, dtype=torch.float32, pin_memory=view.is_cuda)
        return self._copies[name].copy_(view.detach(), non_blocking=True)

    def _write(
        self,
        temporary: Path,
        pieces: dict[str, list[dict[str, Any]]],
        groups: Mapping[str, dict[str, Tensor]],
        problem: str,
    ) -> Written:
        """Write the files of this process, unless there is a problem already."""
        files: dict[str, dict[str, Any]] = {}
        try:
            for stem, group in groups.items() if not problem else ():
                files |= write_file(temporary / f"{stem}-{self._engine.grid.rank:05d}.safetensors", group)
        except Exception as error:  # every process must learn of it: the others wait for this one
            problem = _text(error)
        return Written(problem, pieces, files)

    def _complete(self, save: _Save, everyone: list[Written]) -> str:
        """Publish the folder and delete old checkpoints, on the main process. Return the problem, "" if none."""
        for written in everyone:
            for name, entries in written.pieces.items():
                save.manifest["tensors"][name]["pieces"].extend(entries)
            save.manifest["files"] |= written.files
        try:
            publish(save.temporary, save.path, save.manifest, save.config_yaml)
            if self._keep_last:
                keep = {step for step in step_folders(self.directory) if self._is_permanent(step)}
                prune(self.directory, keep_last=self._keep_last, keep=keep)
        except Exception as error:
            return _text(error)
        return ""


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def refuse_not_finite(what: str, names: Sequence[str], directory: Path, grid: Grid) -> None:
    """Raise NotFiniteError on every process if tensors are named. Rank 0 searches the newest healthy checkpoint.

    Args:
        what: begins the message: "step 3 is not finite".
        names: the same on every process; a name may repeat.
    """
    if tensors := list(dict.fromkeys(names)):
        raise NotFiniteError(broadcast(str(not_finite_error(what, tensors, directory)) if grid.is_main else "", grid))
