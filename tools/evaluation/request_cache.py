"""Answers that were already computed, kept on disk while an evaluation runs, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.evaluation.data_parallel import Processes


class AnswerFile:
    """A folder of `answers-RANK.jsonl`, one line an answer, flushed as they come.

    Every process reads what all wrote before and appends to its own file, which the first answer makes. A last line that was
    cut is dropped.

    Args:
        folder: None keeps nothing.
        model: identifies weights, number format and length; answers of another model are never found.
    """

    def __init__(self, folder: Path | None, model: str, processes: Processes) -> None:
        self._model, self._known, self._file, self._folder = model, {}, None, folder
        if folder is None:
            return
        self._path = folder / f"answers-{processes.rank}.jsonl"
        self._known = {key: value for file in sorted(folder.glob("answers-*.jsonl")) for key, value in _lines(file)}
        # Every process has the same knowledge before any of them adds to it: they must share out the same rest.
        processes.wait()

    def __len__(self) -> int:
        return len(self._known)

    def key(self, kind: str, *parts: NDArray | str) -> str:
        """What is asked, as a word."""
        digest = hashlib.blake2b(f"{self._model}\0{kind}".encode(), digest_size=16)
        for part in parts:
            content = part.encode() if isinstance(part, str) else np.asarray(part).astype("<i8").tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()

    def get(self, key: str) -> Any:
        """The answer as JSON, or None."""
        return self._known.get(key)

    def add(self, answers: Iterable[tuple[str, Any]]) -> None:
        """Keeps (key, answer) pairs; a process that is killed after this has lost none of them."""
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            cut = self._path.is_file() and self._path.read_bytes()[-1:] != b"\n"
            self._file = self._path.open("a", encoding="utf-8")
            if cut:
                self._file.write("\n")
        for key, value in answers:
            self._file.write(json.dumps([key, value], ensure_ascii=False) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """The evaluation is complete and its results are written: nothing is kept that could grow stale."""
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
