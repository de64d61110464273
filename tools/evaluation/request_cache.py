"""Cache the answers to requests on disk while an evaluation runs, so that an interrupted one can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.evaluation.data_parallel import Processes


class RequestCache:
    """A folder of files `answers-RANK.jsonl`, with one line per answer.

    Every process reads the files of all ranks, and appends to its own file. An incomplete last line is dropped.

    Args:
        folder: None for a cache that stores nothing.
        model: identifies weights, number format and length. Answers of another model do not match.
    """

    def __init__(self, folder: Path | None, model: str, processes: Processes) -> None:
        self._model, self._known, self._file, self._folder = model, {}, None, folder
        if folder is None:
            return
        self._path = folder / f"answers-{processes.rank}.jsonl"
        self._known = {key: value for file in sorted(folder.glob("answers-*.jsonl")) for key, value in _lines(file)}
        # Every process must read the same answers before one of them appends.
        processes.barrier()

    def __len__(self) -> int:
        return len(self._known)

    def key(self, kind: str, *parts: NDArray | str) -> str:
        """Return the key of a request: a hash of its kind and its parts, arrays with their shape."""
        digest = hashlib.blake2b(f"{self._model}\0{kind}".encode(), digest_size=16)
        for part in parts:
            array = np.frombuffer(part.encode(), np.uint8) if isinstance(part, str) else np.asarray(part)
            digest.update(f"{array.shape}\0".encode() + array.astype("<i8").tobytes())
        return digest.hexdigest()

    def get(self, key: str) -> Any:
        """Return the answer as JSON, or None."""
        return self._known.get(key)

    def add(self, answers: Iterable[tuple[str, Any]]) -> None:
        """Write (key, answer) pairs to the file. They survive the end of the process."""
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            incomplete = self._path.is_file() and self._path.read_bytes()[-1:] != b"\n"
            self._file = self._path.open("a", encoding="utf-8")
            if incomplete:
                self._file.write("\n")
        for key, value in answers:
            self._file.write(json.dumps([key, value], ensure_ascii=False) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """Remove the files. Call it once the results are written."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._folder is not None and self._folder.is_dir():
            for file in self._folder.glob("answers-*.jsonl"):
                file.unlink(missing_ok=True)
            if not any(self._folder.iterdir()):
                self._folder.rmdir()


def _lines(file: Path) -> Iterable[tuple[str, Any]]:
    for text in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            key, value = json.loads(text)
        except ValueError:
            continue
        yield key, value
