"""Corpora of any size to token files: many processes, one order.

One process reads blocks of lines and writes; workers parse and tokenise. Blocks are taken back in the order in which
they were read, so the files are the same bytes for any number of workers. Every input file becomes a part, written
aside; parts that are finished are not done again after a kill, and at the end they are joined and removed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .corpora import SourceFile
from .encode import Encoded, Recipe, encode_block
from .indexed import token_dtype
from .parts import Part, join_parts, part_report, read_digests
from .readers import Block, read_blocks
from .tokenizer import Tokenizer, load_tokenizer

PREPROCESS_VERSION = 1


def preprocess(
    files: Sequence[SourceFile], output_prefix: str | Path, recipe: Recipe, *, workers: int = 1, progress: bool = True
) -> dict[str, dict[str, Any]]:
    """Write ``{output_prefix}_{name}_document.{bin,idx,json}`` and return the manifest of each name.

    Raises ValueError for lines that do not parse beyond ``max_broken``, a key that is not there and a corpus without
    text; each names file and position.
    """
    tokenizer = load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path)
    made_from = {
        "version": PREPROCESS_VERSION,
        "recipe": {**asdict(recipe), "tokenizer_path": None},
        "tokenizer": tokenizer.hash,
        "files": [[str(f.path.resolve()), f.path.stat().st_size, f.path.stat().st_mtime_ns] for f in files],
    }
    digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    parts = Path(f"{output_prefix}.parts-{digest}")
    parts.mkdir(parents=True, exist_ok=True)
    _write_parts(files, parts, recipe, tokenizer, workers, progress)
    manifests = join_parts(files, parts, Path(output_prefix), recipe, tokenizer)
    shutil.rmtree(parts)
    return manifests


def _write_parts(
    files: Sequence[SourceFile], parts: Path, recipe: Recipe, tokenizer: Tokenizer, workers: int, progress: bool
) -> None:
    from tqdm import tqdm

    reports = [part_report(parts, number) for number in range(len(files))]
    todo = [file for file, report in zip(files, reports, strict=True) if report is None]
    total = sum(file.path.stat().st_size for file in files)
    seen: set[bytes] = set()
    broken = 0
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=not progress, mininterval=0.5) as bar,
        _pool(recipe, workers) as pool,
    ):
        speed = _Speed(bar)
        by_file = itertools.groupby(_encoded_blocks(todo, recipe, pool, workers), key=lambda pair: pair[0].file)
        group = next(by_file, None)
        for number, (file, report) in enumerate(zip(files, reports, strict=True)):
            if report is not None:
                broken += report["broken"]
                seen.update(read_digests(parts, number))
                bar.update(file.path.stat().st_size)
                continue
            with Part(parts, number, recipe, token_dtype(tokenizer.vocab_size)) as part:
                if group is None or group[0] != file:
                    continue  # an empty file has no blocks
                for block, outcomes in group[1]:
                    for key, outcome in enumerate(outcomes.result()):
                        _check_broken(outcome, broken, recipe.max_broken)
                        broken += len(outcome.broken)
                        part.add(key, outcome, seen)
                        speed.documents += len(outcome.lengths)
                        speed.text_bytes += sum(outcome.sizes)
                    bar.update(block.file_bytes)
                    speed.show()
                group = next(by_file, None)


def _check_broken(outcome: Encoded, before: int, allowed: int) -> None:
    if before + len(outcome.broken) > allowed:
        raise ValueError(
            f"{outcome.broken[allowed - before]} ({allowed} such lines are allowed). Repair the file, or let that many"
            " be left out with --max-broken."
        )


@dataclass
class _Speed:
    """Documents and text a second of this run, beside the bar's ETA."""

    bar: Any
    documents: int = 0
    text_bytes: int = 0

    def show(self) -> None:
        seconds = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(
            f"{self.documents / seconds:,.0f} documents/s, {self.text_bytes / seconds / 1e6:.1f} MB of text/s",
            refresh=False,
        )


def _pool(recipe: Recipe, workers: int) -> ProcessPoolExecutor:
    # Spawned and not forked: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(recipe,))


def _encoded_blocks(
    files: Sequence[SourceFile], recipe: Recipe, pool: ProcessPoolExecutor, workers: int
) -> Iterator[tuple[Block, Future[list[Encoded]]]]:
    """Blocks in reading order; a few more than the workers can hold are read ahead, so memory stays bounded."""
    waiting: deque[tuple[Block, Future[list[Encoded]]]] = deque()
    for block in read_blocks(files):
        waiting.append((replace(block, lines=()), pool.submit(_encode_block, block)))
        if len(waiting) >= 4 * workers:
            yield waiting.popleft()
    yield from waiting


_worker: tuple[Recipe, Tokenizer]


def _start_worker(recipe: Recipe) -> None:
    global _worker
    # One process a worker is the parallelism; threads inside would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (recipe, load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path))


def _encode_block(block: Block) -> list[Encoded]:
    recipe, tokenizer = _worker
    return [encode_block(block, key, recipe, tokenizer) for key in recipe.keys]
