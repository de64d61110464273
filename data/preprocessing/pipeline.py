"""Tokenise corpora of any size with many processes, resumably.

One process reads blocks of lines and writes; workers parse and tokenise. Results are written in reading order, so the files
do not depend on the number of workers. Every `SHARD_BLOCKS` blocks become a temporary shard. After a kill, finished shards
are reused. At the end all shards are joined and removed.
"""

from __future__ import annotations

import contextlib
import glob as globbing
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_io import is_dead, remove_leftovers, write_text
from ..checksum import Checksum, DamagedDataError, Record, difference
from ..corpus.discovery import SourceFile
from ..corpus.readers import Block, read_blocks
from ..corpus.source_key import check_source_key
from ..indexed import bin_path, idx_path, token_dtype
from ..manifest import read_manifest, same_tokenizer
from ..process_pool import process_pool
from ..tokenizer import Tokenizer, load_tokenizer
from .encode import Encoded, PreprocessingSettings, encode_block
from .filters import DuplicateIndex
from .shards import Shard, finished_reports, input_records, join_shards, read_records

PREPROCESS_VERSION = 3
SHARD_BLOCKS = 256  # a block is about 1 MiB of text
OWNER = "owner"  # file that names the writing process as PID@HOST


def preprocess(
    files: Sequence[SourceFile],
    output_prefix: str | Path,
    settings: PreprocessingSettings,
    *,
    workers: int = 1,
    progress: bool = True,
) -> dict[str, dict[str, Any]]:
    """Write ``{output_prefix}_{name}_document.{bin,idx,json}`` and return the manifest of each name.

    Raises ValueError for more than ``max_broken`` lines that do not parse, a missing text key, a wrong source key (before
    anything is written) and a corpus without text. The message names file and position. Raises DamagedDataError if an input
    file changed since an earlier job with these settings, but not its size and time.
    """
    tokenizer = load_tokenizer(settings.tokenizer_type, settings.tokenizer_path)
    check_source_key(settings.source_key, settings.keys, files)
    made_from = _made_from(files, settings, tokenizer)
    known = _known_inputs(output_prefix, settings, made_from)
    parts = _parts_folder(output_prefix, made_from, tokenizer)
    parts.mkdir(parents=True, exist_ok=True)
    for folder in (parts, parts.parent):
        remove_leftovers(folder)
    try:
        write_text(parts / OWNER, f"{os.getpid()}@{socket.gethostname()}")
        _write_parts(files, parts, settings, tokenizer, workers, progress, known)
        manifests = join_shards(files, parts, Path(output_prefix), settings, tokenizer, made_from)
    except BaseException:
        if not any(parts.glob("*.report")):  # finished shards are kept for the next attempt
            shutil.rmtree(parts, ignore_errors=True)
        raise
    # Rename first: a kill during the removal must not leave reports of removed shards.
    shutil.rmtree(_done(parts), ignore_errors=True)
    shutil.rmtree(parts.rename(_done(parts)))
    _remove_other_parts(output_prefix)
    return manifests


def _known_inputs(output_prefix: str | Path, settings: PreprocessingSettings, made_from: str) -> dict[str, Record]:
    """Return the records of the input files from the manifests of existing outputs with the same settings."""
    known: dict[str, Record] = {}
    for name in settings.names():
        with contextlib.suppress(DamagedDataError):  # it is rewritten
            manifest = read_manifest(f"{output_prefix}_{name}_document")
            if manifest is not None and manifest.get("made_from") == made_from:
                known.update(manifest.get("inputs", {}))
    return known


def _remove_other_parts(output_prefix: str | Path) -> None:
    """Remove the shards of jobs with other settings for these outputs whose process on this host is dead."""
    prefix = Path(output_prefix)
    for owner in prefix.parent.glob(f"{globbing.escape(prefix.name)}.parts-*/{OWNER}"):
        process, _, host = owner.read_text().partition("@")
        if process.isdigit() and is_dead(int(process), host):
            shutil.rmtree(owner.parent, ignore_errors=True)


def finished(
    files: Sequence[SourceFile], output_prefix: str | Path, settings: PreprocessingSettings
) -> dict[str, dict[str, Any]] | None:
    """Return the manifests if `preprocess` has written these outputs from the same files and settings; else None.

    Raises ValueError for token files under these names with another or unknown origin.
    """
    tokenizer = load_tokenizer(settings.tokenizer_type, settings.tokenizer_path)
    made_from = _made_from(files, settings, tokenizer)
    parts = _parts_folder(output_prefix, made_from, tokenizer)
    shutil.rmtree(_done(parts), ignore_errors=True)  # a job was stopped during their removal
    remove_leftovers(parts.parent)  # or while it wrote a data card
    unfinished = interrupted = parts.exists()  # a job was stopped before or during the join
    manifests = {}
    for name in settings.names():
        prefix = f"{output_prefix}_{name}_document"
        manifest = read_manifest(prefix)
        if not (bin_path(prefix).exists() and idx_path(prefix).exists()):
            unfinished = unfinished or manifest is not None
        elif (
            manifest is not None
            and manifest.get("made_from") == made_from
            and same_tokenizer(manifest.get("tokenizer", {}), tokenizer)
        ):
            manifests[name] = manifest
        elif manifest is not None or not interrupted:
            raise ValueError(
                f"{bin_path(prefix)} exists, but was made from other input, with other settings or by an earlier version; "
                "name another --output-prefix, or replace it with --overwrite"
            )
    return None if unfinished else manifests or None


def _made_from(files: Sequence[SourceFile], settings: PreprocessingSettings, tokenizer: Tokenizer) -> str:
    made_from = {
        "version": PREPROCESS_VERSION,
        "recipe": {**asdict(settings), "tokenizer_path": None},
        "tokenizer": tokenizer.hash,
        "files": [file.identity() for file in files],
    }
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]


def _parts_folder(output_prefix: str | Path, made_from: str, tokenizer: Tokenizer) -> Path:
    # The hash of the tokenizer does not cover the end-of-document id, which another file may set.
    return Path(f"{output_prefix}.parts-{made_from}-{tokenizer.end_of_document_id}")


def _done(parts: Path) -> Path:
    """Return the path to which the shards are renamed before their removal."""
    return parts.with_name(f"{parts.name}.done")


def _write_parts(
    files: Sequence[SourceFile],
    parts: Path,
    settings: PreprocessingSettings,
    tokenizer: Tokenizer,
    workers: int,
    progress: bool,
    known: Mapping[str, Record],
) -> None:
    from ..progress import ProgressBar

    reports = finished_reports(parts, len(files))
    for path, recorded in input_records(files, reports).items():
        if problem := difference(Path(path), recorded):
            raise DamagedDataError(_other_input(problem))
    shards = _ShardWriter(parts, settings, token_dtype(tokenizer.vocab_size), reports)
    complete = [bool(of_file) and of_file[-1]["last"] for of_file in reports]
    if all(complete):
        shards.counts.check_at_end()
        return
    blocks = [sum(report["blocks"] for report in of_file) for of_file in reports]
    total = sum(file.bytes for file in files)
    with (
        ProgressBar(total=total or None, unit="B", unit_scale=True, disable=not progress, mininterval=0.5) as bar,
        _pool(settings, workers) as pool,
    ):
        speed = _Speed(bar)
        bar.update(sum(file.bytes for file, whole in zip(files, complete, strict=True) if whole))
        try:
            for item in _encoded_blocks(files, blocks, complete, pool, workers):
                if isinstance(item, _EndOfFile):
                    path = str(files[item.file].path)
                    if item.record and path in known and item.record["sha256"] != known[path]["sha256"]:
                        raise DamagedDataError(_other_input(f"{path} has changed with the same size and time"))
                    shards.end_file(item.file, item.record)
                else:
                    outcomes = item.outcomes()
                    shards.add(item.file, outcomes)
                    bar.update(item.block.file_bytes)
                    speed.show(outcomes)
        except BaseException:
            shards.abandon()
            raise
    shards.counts.check_at_end()


class _ShardWriter:
    """Write encoded blocks as shards of `SHARD_BLOCKS` blocks, in reading order. Continue after the finished shards.

    reports: of the finished shards per input file.
    """

    def __init__(
        self, folder: Path, settings: PreprocessingSettings, dtype: np.dtype, reports: Sequence[list[dict[str, Any]]]
    ) -> None:
        self.counts = _Counts(settings)
        self._folder, self._settings, self._dtype = folder, settings, dtype
        self._numbers = [len(of_file) for of_file in reports]
        self._shard: Shard | None = None
        self._duplicates = DuplicateIndex(settings)
        for file, of_file in enumerate(reports):
            for number, report in enumerate(of_file):
                self.counts.add(Counter(report["skipped"]), report["broken"], sum(report["documents"]))
                for record in read_records(folder, file, number, self._duplicates.record_bytes):
                    self._duplicates.add(record)

    def add(self, file: int, outcomes: Sequence[Encoded]) -> None:
        """Append a block. outcomes: one per text key. Raises ValueError as `_Counts.add`."""
        shard = self._shard_of(file)
        broken: set[str] = set()  # a line that no key can read is counted once
        for key, outcome in enumerate(outcomes):
            outcome.broken = [line for line in outcome.broken if line not in broken]
            broken.update(outcome.broken)
            self.counts.add(outcome.skipped, len(outcome.broken), len(outcome.lengths), outcome.broken)
            shard.add(key, outcome, self._duplicates)
        shard.blocks += 1
        if shard.blocks == SHARD_BLOCKS:
            self._finish(file, shard, last=False)

    def end_file(self, file: int, record: Record | None) -> None:
        """Finish the last shard of an input file. record: the checksum record of the file."""
        self._finish(file, self._shard_of(file), last=True, record=record)

    def abandon(self) -> None:
        """Remove the temporary files of the unfinished shard."""
        if self._shard is not None:
            self._shard.abandon()

    def _shard_of(self, file: int) -> Shard:
        if self._shard is None:
            self._shard = Shard(self._folder, file, self._numbers[file], self._settings, self._dtype)
        return self._shard

    def _finish(self, file: int, shard: Shard, *, last: bool, record: Record | None = None) -> None:
        shard.finish(last, record)
        self._numbers[file] += 1
        self._shard = None


def _other_input(problem: str) -> str:
    return (
        f"{problem}. Token files with these settings were made from its previous content. Copy or download it again; if"
        " it was changed on purpose, update its time with touch."
    )


@dataclass(frozen=True)
class _EncodedBlock:
    """Hold a block, without its lines, and the future of its outcomes. file: number of its input file."""

    file: int
    block: Block
    future: Future[list[Encoded]]

    def outcomes(self) -> list[Encoded]:
        """Wait for the outcomes, one per text key. Raises ChildProcessError if a worker was killed."""
        try:
            return self.future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"a worker process was killed near {self.block.file.path}, block from {self.block.first:,} on: too little memory"
                " (use fewer --workers), or a damaged file that crashes its reader. Finished parts are kept."
            ) from error


@dataclass(frozen=True)
class _EndOfFile:
    """Mark the end of an input file. record: its checksum record; None for a data set."""

    file: int
    record: Record | None


@dataclass
class _Counts:
    """Count skipped documents and broken lines, and stop the job above the limits."""

    settings: PreprocessingSettings
    documents: int = 0
    broken: int = 0
    empty: int = 0

    def add(self, skipped: Counter[str], broken: int, documents: int, messages: Sequence[str] = ()) -> None:
        """Add the counts of a block. Raises ValueError above the limits of the settings."""
        previous, allowed = self.broken, self.settings.max_broken
        self.broken += broken
        self.empty += skipped["empty"]
        self.documents += documents + skipped.total()
        if self.broken > allowed:
            raise ValueError(
                f"{messages[allowed - previous].rstrip('.')} (broken lines allowed: {allowed}). Repair the file, or skip broken"
                " lines with --max-broken."
            )
        if self.documents >= 1000:
            self.check_at_end()

    def check_at_end(self) -> None:
        """Raise ValueError if the fraction of empty documents so far is above the limit."""
        if self.documents > self.empty > self.settings.max_empty * self.documents:
            raise ValueError(
                f"{self.empty:,} of {self.documents:,} documents are empty, more than the share {self.settings.max_empty}"
                " that is allowed: is the text under another key (--jsonl-keys)? Otherwise allow more with --max-empty."
            )


@dataclass
class _Speed:
    """Show documents and text per second of this run in the progress bar."""

    bar: Any
    documents: int = 0
    text_bytes: int = 0

    def show(self, outcomes: Sequence[Encoded]) -> None:
        """Count the documents of a block and show the speed so far."""
        self.documents += sum(len(outcome.lengths) for outcome in outcomes)
        self.text_bytes += sum(sum(outcome.sizes) for outcome in outcomes)
        seconds = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(
            f"{self.documents / seconds:,.0f} documents/s, {self.text_bytes / seconds / 1e6:.1f} MB of text/s",
            refresh=False,
        )


def _pool(settings: PreprocessingSettings, workers: int) -> ProcessPoolExecutor:
    return process_pool(workers, _start_worker, settings)


def _encoded_blocks(
    files: Sequence[SourceFile],
    blocks: Sequence[int],
    complete: Sequence[bool],
    pool: ProcessPoolExecutor,
    workers: int,
) -> Iterator[_EncodedBlock | _EndOfFile]:
    """Yield the blocks and the ends of the files in reading order. The workers encode up to 4 blocks each ahead.

    blocks, complete: per file the number of finished blocks, and whether all of the file is finished.
    """
    waiting: deque[_EncodedBlock | _EndOfFile] = deque()
    for number, (file, skip, whole) in enumerate(zip(files, blocks, complete, strict=True)):
        if whole:
            continue
        checksum = Checksum(max_blocks=16)
        for block in itertools.islice(read_blocks([file], checksum), skip, None):
            waiting.append(_EncodedBlock(number, replace(block, lines=()), pool.submit(_encode_block, block)))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft()
        waiting.append(_EndOfFile(number, None if file.format.endswith("dataset") else checksum.record()))
    yield from waiting


_worker: tuple[PreprocessingSettings, Tokenizer]


def _start_worker(settings: PreprocessingSettings) -> None:
    global _worker
    # The processes are the parallelism; threads inside them would compete for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (settings, load_tokenizer(settings.tokenizer_type, settings.tokenizer_path))


def _encode_block(block: Block) -> list[Encoded]:
    settings, tokenizer = _worker
    return [encode_block(block, key, settings, tokenizer) for key in settings.keys]
