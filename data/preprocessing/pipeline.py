"""Corpora of any size to token files: many processes, one order.

One process reads blocks of lines and writes; workers parse and tokenise. Blocks are taken back in the order in which
they were read, so the files are the same bytes for any number of workers. Some blocks of an input file become a part,
written aside; after a kill the finished parts are not done again (a compressed file is only read past them), and at the
end all parts are joined and removed.
"""

from __future__ import annotations

import contextlib
import glob as globbing
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..atomic_io import is_dead, remove_leftovers, write_whole
from ..checksum import Checksum, DamagedDataError, Record, difference
from ..corpus.discovery import SourceFile
from ..corpus.readers import Block, read_blocks
from ..indexed import bin_path, idx_path, token_dtype
from ..manifest import read_manifest, same_tokenizer
from ..tokenizer import Tokenizer, load_tokenizer
from .encode import Encoded, Recipe, encode_block
from .shards import Part, finished_reports, input_records, join_parts, read_digests

PREPROCESS_VERSION = 2
PART_BLOCKS = 256  # a part is about as many MiB of text
OWNER = "owner"  # the process that writes a folder of parts, as PID@HOST


def preprocess(
    files: Sequence[SourceFile], output_prefix: str | Path, recipe: Recipe, *, workers: int = 1, progress: bool = True
) -> dict[str, dict[str, Any]]:
    """Write ``{output_prefix}_{name}_document.{bin,idx,json}`` and return the manifest of each name.

    Raises ValueError for lines that do not parse beyond ``max_broken``, a key that is not there and a corpus without
    text; each names file and position. DamagedDataError for an input that these settings were applied to before and that has
    other content now, with the same size and time.
    """
    tokenizer = load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path)
    made_from = _made_from(files, recipe, tokenizer)
    known = _known_inputs(output_prefix, recipe, made_from)
    parts = _parts_folder(output_prefix, made_from, tokenizer)
    parts.mkdir(parents=True, exist_ok=True)
    for folder in (parts, parts.parent):
        remove_leftovers(folder)
    try:
        write_whole(parts / OWNER, f"{os.getpid()}@{socket.gethostname()}")
        _write_parts(files, parts, recipe, tokenizer, workers, progress, known)
        manifests = join_parts(files, parts, Path(output_prefix), recipe, tokenizer, made_from)
    except BaseException:
        if not any(parts.glob("*.report")):  # finished parts, which the same command will use, keep it
            shutil.rmtree(parts, ignore_errors=True)
        raise
    # A kill inside the removal must leave no reports of parts that are gone.
    shutil.rmtree(_done(parts), ignore_errors=True)
    shutil.rmtree(parts.rename(_done(parts)))
    _remove_other_parts(output_prefix)
    return manifests


def _known_inputs(output_prefix: str | Path, recipe: Recipe, made_from: str) -> dict[str, Record]:
    """The records of the input files that the outputs there were made from, where these are the same files."""
    known: dict[str, Record] = {}
    for name in recipe.names():
        with contextlib.suppress(DamagedDataError):  # it is written anew
            manifest = read_manifest(f"{output_prefix}_{name}_document")
            if manifest is not None and manifest.get("made_from") == made_from:
                known.update(manifest.get("inputs", {}))
    return known


def _remove_other_parts(output_prefix: str | Path) -> None:
    """Remove the parts of jobs with other settings for these outputs, where their process on this host is dead."""
    prefix = Path(output_prefix)
    for owner in prefix.parent.glob(f"{globbing.escape(prefix.name)}.parts-*/{OWNER}"):
        process, _, host = owner.read_text().partition("@")
        if process.isdigit() and is_dead(int(process), host):
            shutil.rmtree(owner.parent, ignore_errors=True)


def finished(
    files: Sequence[SourceFile], output_prefix: str | Path, recipe: Recipe
) -> dict[str, dict[str, Any]] | None:
    """What `preprocess` returned when it wrote these outputs of the same files and settings; None where it has yet to.

    Raises ValueError for token files under these names that were made from something else, or nobody knows from what.
    """
    tokenizer = load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path)
    made_from = _made_from(files, recipe, tokenizer)
    parts = _parts_folder(output_prefix, made_from, tokenizer)
    shutil.rmtree(_done(parts), ignore_errors=True)  # of a job that was stopped while it removed them
    again = begun = parts.exists()  # of a job that was stopped, perhaps while it joined them
    manifests = {}
    for name in recipe.names():
        prefix = f"{output_prefix}_{name}_document"
        manifest = read_manifest(prefix)
        if not (bin_path(prefix).exists() and idx_path(prefix).exists()):
            again = again or manifest is not None
        elif (
            manifest is not None
            and manifest.get("made_from") == made_from
            and same_tokenizer(manifest.get("tokenizer", {}), tokenizer)
        ):
            manifests[name] = manifest
        elif manifest is not None or not begun:
            raise ValueError(
                f"{bin_path(prefix)} exists, made from other input, with other settings or elsewhere; name another "
                "--output-prefix, or replace it with --overwrite"
            )
    return None if again else manifests or None


def _made_from(files: Sequence[SourceFile], recipe: Recipe, tokenizer: Tokenizer) -> str:
    made_from = {
        "version": PREPROCESS_VERSION,
        "recipe": {**asdict(recipe), "tokenizer_path": None},
        "tokenizer": tokenizer.hash,
        "files": [file.identity() for file in files],
    }
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]


def _parts_folder(output_prefix: str | Path, made_from: str, tokenizer: Tokenizer) -> Path:
    # What ends a document may be named in a file beside the one that the tokenizer's hash is of.
    return Path(f"{output_prefix}.parts-{made_from}-{tokenizer.end_of_document_id}")


def _done(parts: Path) -> Path:
    """Where a job's parts go to be removed."""
    return parts.with_name(f"{parts.name}.done")


def _write_parts(
    files: Sequence[SourceFile],
    parts: Path,
    recipe: Recipe,
    tokenizer: Tokenizer,
    workers: int,
    progress: bool,
    known: Mapping[str, Record],
) -> None:
    from tqdm import tqdm

    reports = finished_reports(parts, len(files))
    for path, recorded in input_records(files, reports).items():
        if problem := difference(Path(path), recorded):
            raise DamagedDataError(_other_input(problem))
    counts = _Counts(recipe)
    seen: set[bytes] = set()
    for file, of_file in enumerate(reports):
        for number, report in enumerate(of_file):
            counts.add(Counter(report["skipped"]), report["broken"], sum(report["documents"]))
            seen.update(read_digests(parts, file, number))
    if all(of_file and of_file[-1]["last"] for of_file in reports):
        counts.check_at_end()
        return
    done = [(sum(report["blocks"] for report in of_file), bool(of_file) and of_file[-1]["last"]) for of_file in reports]
    numbers = [len(of_file) for of_file in reports]
    inputs: dict[int, Record] = {}
    part: Part | None = None
    total = sum(file.bytes for file in files)
    with (
        tqdm(total=total or None, unit="B", unit_scale=True, disable=not progress, mininterval=0.5) as bar,
        _pool(recipe, workers) as pool,
    ):
        speed = _Speed(bar)
        bar.update(sum(file.bytes for file, (_, last) in zip(files, done, strict=True) if last))
        try:
            for file, block, outcomes in _encoded_blocks(files, done, recipe, pool, workers, inputs):
                if part is None:
                    part = Part(parts, file, numbers[file], recipe, token_dtype(tokenizer.vocab_size))
                if block is not None and outcomes is not None:
                    for key, outcome in enumerate(_result(outcomes, block)):
                        counts.add(outcome.skipped, len(outcome.broken), len(outcome.lengths), outcome.broken)
                        part.add(key, outcome, seen)
                        speed.documents += len(outcome.lengths)
                        speed.text_bytes += sum(outcome.sizes)
                    part.blocks += 1
                if block is None or outcomes is None or part.blocks == PART_BLOCKS:
                    record = inputs.get(file)
                    before = known.get(str(files[file].path))
                    if block is None and record and before and record["sha256"] != before["sha256"]:
                        raise DamagedDataError(
                            _other_input(f"{files[file].path} has other content, of the same size and time")
                        )
                    part.finish(last=block is None, input_record=record if block is None else None)
                    numbers[file] += 1
                    part = None
                if block is not None:
                    bar.update(block.file_bytes)
                    speed.show()
        except BaseException:
            if part is not None:
                part.abandon()
            raise
    counts.check_at_end()


def _other_input(problem: str) -> str:
    return (
        f"{problem}, than when token files were made from it with these settings. Copy or download it again; if it was"
        " changed on purpose, touch it."
    )


def _result(outcomes: Future[list[Encoded]], block: Block) -> list[Encoded]:
    try:
        return outcomes.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"a process that tokenises was killed near {block.file.path}, block from {block.first:,} on: too little memory"
            " (take fewer --workers) or a file so damaged that its reader crashes. Finished parts are kept."
        ) from error


@dataclass
class _Counts:
    """What was left out so far, and when that is too much."""

    recipe: Recipe
    documents: int = 0
    broken: int = 0
    empty: int = 0

    def add(self, skipped: Counter[str], broken: int, documents: int, messages: Sequence[str] = ()) -> None:
        """Raises ValueError past the recipe's thresholds."""
        before, allowed = self.broken, self.recipe.max_broken
        self.broken += broken
        self.empty += skipped["empty"]
        self.documents += documents + skipped["empty"]
        if self.broken > allowed:
            raise ValueError(
                f"{messages[allowed - before]} ({allowed} such lines are allowed). Repair the file, or let that many be"
                " left out with --max-broken."
            )
        if self.documents >= 1000:
            self.check_at_end()

    def check_at_end(self) -> None:
        """The share of empty documents, of what was read by now."""
        if self.documents > self.empty > self.recipe.max_empty * self.documents:
            raise ValueError(
                f"{self.empty:,} of {self.documents:,} documents are empty, more than the share {self.recipe.max_empty}"
                " that is allowed: is the text under another key (--jsonl-keys)? Else allow more with --max-empty."
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
    files: Sequence[SourceFile],
    done: Sequence[tuple[int, bool]],
    recipe: Recipe,
    pool: ProcessPoolExecutor,
    workers: int,
    inputs: dict[int, Record],
) -> Iterator[tuple[int, Block | None, Future[list[Encoded]] | None]]:
    """(number of the file, block, its outcome) in reading order, and a None for the block at the end of each file.

    done: for each file the blocks that need not be done again, and whether that is all of it. inputs: takes the record of
    each file that was read to its end. A few blocks more than the workers can hold are read ahead, so memory stays bounded.
    """
    waiting: deque[tuple[int, Block | None, Future[list[Encoded]] | None]] = deque()
    for number, (file, (skip, whole)) in enumerate(zip(files, done, strict=True)):
        if whole:
            continue
        checksum = Checksum(max_blocks=16)
        for block in itertools.islice(read_blocks([file], checksum), skip, None):
            waiting.append((number, replace(block, lines=()), pool.submit(_encode_block, block)))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft()
        if not file.format.endswith("dataset"):
            inputs[number] = checksum.record()
        waiting.append((number, None, None))
    yield from waiting


_worker: tuple[Recipe, Tokenizer]


def _start_worker(recipe: Recipe) -> None:
    global _worker
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # One process a worker is the parallelism; threads inside would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (recipe, load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path))


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """End this worker with its parent: where that is killed, a worker would wait for work without end."""
    parent.join()
    os._exit(1)


def _encode_block(block: Block) -> list[Encoded]:
    recipe, tokenizer = _worker
    return [encode_block(block, key, recipe, tokenizer) for key in recipe.keys]
