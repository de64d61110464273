"""Simulate power cuts: record the file operations of a command, cut them at a random moment, repeat the command.

A recording holds creations, renames, removals and syncs, in order. A cut keeps the operations on names up to a random moment
after the last sync of a folder, as journaling file systems do. It keeps the content of a file up to its last sync. Later
content is lost, wholly or from a random byte on. `run` returns these counts:

- cuts: power cuts;
- restarted: the repeated command ended with status 0 and the result of the uninterrupted one;
- by hand: it ended with another status;
- other result: it ended with status 0 and another result.

The last two must be 0. `failures.jsonl` of the folder describes their cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from data.datasets.causal import CausalDataset
from data.preprocessing import pipeline
from data.preprocessing.prepare_corpus import prepare_corpus
from tests.data.inline_pool import Inline
from tests.faults.outcomes import record_failure
from tools import preprocess_data

Command = Callable[[Path], int]  # works in a folder and returns an exit status
Result = Callable[[Path], str]  # returns a digest of the command's files
NAMES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")


@dataclass(eq=False)
class Node:
    """Hold a file or folder, independent of its name: content at each sync, size at each operation, last content."""

    is_folder: bool = False
    synced: dict[int, bytes] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    last: bytes = b""
    time: int = 0

    def content_after_cut(self, at: int, draw: random.Random) -> bytes:
        """Return the content on disk after a cut behind operation `at`."""
        synced = next((content for index, content in reversed(self.synced.items()) if index <= at), b"")
        size = next((size for index, size in reversed(self.sizes.items()) if index <= at), 0)
        written = self.last[:size]
        if len(written) <= len(synced) or not written.startswith(synced):
            return synced
        return written[: draw.choice([len(synced), draw.randint(len(synced), len(written)), len(written)])]


class Recording:
    """Record the operations of this process on the files below a folder that is empty at first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[tuple[Any, ...]] = []
        self.live: dict[str, Node] = {}
        self._lock = threading.RLock()
        self._inside = threading.local()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the operations of the block."""
        global _recording
        _add_hook()
        _recording = self
        try:
            with mock.patch.object(os, "fsync", self._sync):
                yield
        finally:
            _recording = None
            for path, node in self.live.items():
                self._read(path, node)

    def event(self, name: str, words: tuple[Any, ...]) -> None:
        """Record an event of Python's audit hook, which precedes the operation."""
        if name not in NAMES or getattr(self._inside, "flag", False):
            return
        self._inside.flag = True
        try:
            with self._lock:
                self._event(name, words)
        finally:
            self._inside.flag = False

    def _event(self, name: str, words: tuple[Any, ...]) -> None:
        if name == "open":
            path, _, flags = words
            if not isinstance(path, (str, bytes, os.PathLike)) or not flags & (os.O_CREAT | os.O_TRUNC):
                return
            self._note("create", self._path(path, -1))
        elif name == "os.rename":
            source, target, source_folder, target_folder = words
            self._note("rename", self._path(source, source_folder), self._path(target, target_folder))
        else:
            self._note({"os.mkdir": "mkdir"}.get(name, "remove"), self._path(words[0], words[-1]))

    def _note(self, what: str, path: str | None, target: str | None = None) -> None:
        if path is None:
            return
        at = len(self.operations)
        for known, node in self.live.items():
            if not node.is_folder:
                with contextlib.suppress(OSError):
                    node.sizes[at - 1] = os.stat(known).st_size
        if what == "create":
            if path in self.live:
                return  # written over in place, or appended to
            self.live[path] = Node()
        elif what == "mkdir":
            if path in self.live:
                return
            self.live[path] = Node(is_folder=True)
        elif path not in self.live:
            return
        elif what == "remove":
            if any(known.startswith(path + "/") for known in self.live):
                return  # a folder that is not empty stays
            self._read(path, self.live[path])
            del self.live[path]
        elif target is not None:
            moved = [known for known in self.live if known == path or known.startswith(path + "/")]
            for known in moved:
                self._read(known, self.live[known])
            if target in self.live and not self.live[target].is_folder:
                self._read(target, self.live[target])
            for known in moved:
                self.live[target + known[len(path) :]] = self.live.pop(known)
        node = self.live.get(path)
        self.operations.append((what, path, target if what == "rename" else node))

    def _sync(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        with self._lock:
            node = self.live.get(path)
            if os.path.isdir(path):
                self.operations.append(("sync", path, None))
            elif node is not None:
                self._inside.flag = True
                self._read(path, node)
                self._inside.flag = False
                node.synced[len(self.operations)] = node.last

    def _read(self, path: str, node: Node) -> None:
        if node.is_folder:
            return
        with contextlib.suppress(OSError), open(path, "rb") as file:
            node.last, node.time = file.read(), os.fstat(file.fileno()).st_mtime_ns
            node.sizes[len(self.operations)] = len(node.last)

    def _path(self, path: str | bytes | os.PathLike[str], folder: int) -> str | None:
        words = os.fsdecode(path)
        if not os.path.isabs(words):
            words = os.path.join(os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}"), words)
        words = os.path.normpath(words)
        return words if words.startswith(f"{self.root}/") else None

    def moment(self, draw: random.Random) -> int:
        """Return the index of the operation to cut behind: any operation, a rename, or the last one."""
        renames = [at for at, operation in enumerate(self.operations) if operation[0] == "rename"]
        last = len(self.operations) - 1
        return draw.choice([draw.randint(0, last), draw.choice(renames), last])

    def write_image(self, at: int, draw: random.Random) -> None:
        """Write the folder as it is on disk after a cut behind operation `at`."""
        synced = max((i for i in range(at + 1) if self.operations[i][0] == "sync"), default=0)
        names: dict[str, Node] = {}
        for what, path, other in self.operations[: draw.choice([at, draw.randint(synced, at)]) + 1]:
            if what in ("create", "mkdir"):
                names[path] = other
            elif what == "remove":
                names.pop(path, None)
            elif what == "rename":
                for known in [name for name in names if name == path or name.startswith(path + "/")]:
                    names[other + known[len(path) :]] = names.pop(known)
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        for name, node in sorted(names.items()):
            if node.is_folder:
                os.makedirs(name, exist_ok=True)
            else:
                Path(name).write_bytes(node.content_after_cut(at, draw))
                os.utime(name, ns=(node.time, node.time))


_recording: Recording | None = None
_has_hook = False


def _add_hook() -> None:
    global _has_hook
    if not _has_hook:  # an audit hook cannot be removed
        sys.addaudithook(lambda name, words: None if _recording is None else _recording.event(name, words))
        _has_hook = True


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Cut `count` commands in a new `folder`, in turns for caches, token files and checkpoints; return the counts."""
    folder.mkdir(parents=True)
    folder = folder.resolve()
    draw = random.Random(seed)
    outcomes = Counter({"cuts": 0, "restarted": 0, "by hand": 0, "other result": 0})
    commands = _commands(folder)
    recordings: dict[str, tuple[Recording, str]] = {}
    with mock.patch.object(pipeline, "_pool", lambda recipe, workers: Inline(recipe)):
        for number in range(count):
            name, (command, result) = list(commands.items())[number % len(commands)]
            root = folder / name
            if name not in recordings:
                root.mkdir()
                recording = Recording(root)
                output = io.StringIO()
                with recording.recorded(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    assert command(root) == 0, output.getvalue()
                recordings[name] = recording, result(root)
            recording, expected = recordings[name]
            at = recording.moment(draw)
            recording.write_image(at, draw)
            outcome, output = _restart(command, result, root, expected)
            outcomes["cuts"] += 1
            outcomes[outcome] += 1
            if outcome != "restarted":
                case = {"cut": number, "outcome": outcome, "command": name, "output": output}
                record_failure(folder, **case, at=at, after=str(recording.operations[at]))
                shutil.copytree(root, folder / f"cut{number}")
    return dict(outcomes)


def _restart(command: Command, result: Result, root: Path, expected: str) -> tuple[str, str]:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = command(root)
            if status != 0:
                return "by hand", f"status {status}: {output.getvalue()[-600:]}"
            is_same = result(root) == expected
    except Exception as error:
        return "by hand", repr(error)
    return ("restarted" if is_same else "other result"), output.getvalue()[-600:]


def _commands(folder: Path) -> dict[str, tuple[Command, Result]]:
    """Return the commands by name, each with the function that returns its result."""
    import train
    from tests.cli.conftest import run_words

    corpus = folder / "toy.jsonl"
    draw = random.Random(0)
    texts = (" ".join(draw.choices(["state", "decay", "query", "key"], k=draw.randint(20, 60))) for _ in range(60))
    corpus.write_text("".join(json.dumps({"text": text, "meta": {"pile_set_name": "a"}}) + "\n" for text in texts))

    def caches(root: Path) -> int:
        prepared = prepare_corpus(
            corpus, tokenizer_type="bytes", validation_fraction=0.2, cache_directory=root / "cache", progress=False
        )
        settings = {"sequence_length": 16, "num_samples": 90, "seed": 1, "cache_directory": root / "cache"}
        dataset = CausalDataset(prepared.train_prefix, **settings)
        digest = hashlib.sha256(b"".join(dataset[n]["tokens"].numpy().tobytes() for n in range(len(dataset))))
        digest.update(json.dumps(prepared.manifest["validation"]["documents"]).encode())
        (folder / "caches.digest").write_text(digest.hexdigest())
        return 0

    def token_files(root: Path) -> int:
        words = ["--input", str(corpus), "--tokenizer-type", "bytes", "--split", "80,20", "--no-progress"]
        return preprocess_data.main([*words, "--output-prefix", str(root / "out")])

    def checkpoints(root: Path) -> int:
        settings = {"data.cache_directory": folder / "train_cache", "schedule.train_steps": 4, "checkpoint.interval": 1}
        return train.main(
            run_words(corpus, root, **settings, **{"checkpoint.keep_last": 2, "evaluation.sample_tokens": 0})
        )

    def weights(root: Path) -> str:
        from megatron_lite.checkpoint.reader import read_weights, resolve

        checkpoint = resolve(root / "run")
        digest = hashlib.sha256(checkpoint.name.encode())
        for name, tensor in sorted(read_weights(checkpoint).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def files(root: Path) -> str:
        return str([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(root.iterdir())])

    return {
        "caches": (caches, lambda root: (folder / "caches.digest").read_text()),
        "token_files": (token_files, files),
        "checkpoints": (checkpoints, weights),
    }
