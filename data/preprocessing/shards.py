"""Write the shards of a preprocessing job and join them in order. Finished shards survive a kill."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..atomic_io import atomic_write
from ..checksum import DamagedDataError, Record, difference, read_sealed, record_of, write_sealed
from ..corpus.discovery import SourceFile, shown_files
from ..corpus.document_sources import (
    UNKNOWN,
    SourceTable,
    allowed_sources,
    read_sources_file,
    sources_path,
    write_sources,
)
from ..indexed import IndexedWriter, bin_path, idx_path, token_dtype
from ..manifest import describe_tokenizer, manifest_path, write_manifest
from ..tokenizer import Tokenizer, padded_vocab_size
from .data_card import data_card_path
from .encode import Encoded, PreprocessingSettings
from .filters import DuplicateIndex, excluded


class Output:
    """Write a pair of token files, and collect the sources of its documents and the bytes of text per source."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.writer, self.sources = IndexedWriter(prefix, dtype), SourceTable()
        self.source_bytes: Counter[str] = Counter()

    def add(self, encoded: Encoded, selected: NDArray[np.bool_]) -> None:
        """Append the selected documents. selected: bool [documents]."""
        lengths, sizes = np.array(encoded.lengths, np.int64), np.array(encoded.sizes, np.int64)
        tokens = encoded.tokens if selected.all() else encoded.tokens[np.repeat(selected, lengths)]
        self.writer.add_documents(tokens, lengths[selected])
        for document in np.flatnonzero(selected):
            self.sources.add(encoded.sources[document])
            self.source_bytes[encoded.sources[document] or UNKNOWN] += int(sizes[document])

    def describe(self) -> dict[str, Any]:
        """Write the sources of the finished token files, and return their counts and checksums for the manifest."""
        prefix, checksums = self.writer.prefix, dict(self.writer.checksums)
        if self.sources.names:
            checksums["sources.npy"] = write_sources(prefix, self.sources.ids)
        else:
            sources_path(prefix).unlink(missing_ok=True)
        size = self.source_bytes.total()
        tokens = bin_path(prefix).stat().st_size // self.writer.dtype.itemsize
        return {
            "documents": self.writer.num_documents,
            "tokens": tokens,
            "bytes": size,
            "bytes_per_token": round(size / tokens, 4),
            "sources": self.sources.names,
            "source_bytes": [self.source_bytes[name] for name in self.sources.names],
            "checksums": checksums,
        }


class Shard:
    """Write the outputs of some blocks of one input file: one pair of token files per name, the duplicate records of the
    documents, and a report that marks the shard as finished."""

    def __init__(self, folder: Path, file: int, number: int, settings: PreprocessingSettings, dtype: np.dtype) -> None:
        self.folder, self.name, self.settings = folder, _shard_name(file, number), settings
        self.outputs = [Output(folder / f"{self.name}_{name}", dtype) for name in settings.names()]
        self.skipped: Counter[str] = Counter()
        self.broken = self.blocks = 0
        self.records: list[bytes] = []

    def add(self, key: int, outcome: Encoded, duplicates: DuplicateIndex) -> None:
        """Add the documents of a block for text key number ``key``. duplicates: all documents so far, updated in place."""
        self.skipped.update(outcome.skipped)
        self.broken += len(outcome.broken)
        unique = np.ones(len(outcome.lengths), bool)
        if self.settings.deduplicate or self.settings.filters.near_duplicates:
            signatures = outcome.signatures or [b""] * len(outcome.digests)
            for document, (digest, signature) in enumerate(zip(outcome.digests, signatures, strict=True)):
                record = bytes([key]) + digest + signature
                reason = duplicates.reason(record)
                unique[document] = reason is None
                if reason is None:
                    self.records.append(record)
                else:
                    self.skipped[reason] += 1
        sides = max(1, len(self.settings.split))
        for side in range(sides):
            self.outputs[key * sides + side].add(outcome, unique & (np.array(outcome.sides) == side))

    def finish(self, last: bool, input_record: Record | None = None) -> None:
        """Rename the outputs to their final names and write the report.

        last: this shard ends the input file. input_record: checksum record of that file.
        """
        documents = [output.writer.num_documents for output in self.outputs]
        records: dict[str, Record] = {}
        for output in self.outputs:
            writer = output.writer
            if writer.num_documents:
                writer.finish()
                write_sources(writer.prefix, output.sources.ids)
                for path in (bin_path(writer.prefix), idx_path(writer.prefix), sources_path(writer.prefix)):
                    ending = path.name.removeprefix(f"{writer.prefix.name}.")
                    records[path.name] = writer.checksums.get(ending) or record_of(path)
            else:
                writer.abandon()
        digests = self.folder / f"{self.name}.digests"
        with atomic_write(digests) as file:
            file.write(b"".join(self.records))
        records[digests.name] = record_of(digests)
        report = {
            "documents": documents,
            "source_bytes": [output.source_bytes for output in self.outputs],
            "sources": [output.sources.all_names for output in self.outputs],
            "skipped": dict(self.skipped),
            "broken": self.broken,
            "blocks": self.blocks,
            "last": last,
            "input": input_record,
            "files": records,
        }
        write_sealed(_report_path(self.folder, self.name), report)

    def abandon(self) -> None:
        """Remove the temporary files of all outputs."""
        for output in self.outputs:
            output.writer.abandon()


def finished_reports(parts: Path, files: int) -> list[list[dict[str, Any]]]:
    """Return the reports of the finished shards per input file. files: number of input files.

    From the first damaged shard on, all shards are removed, with a line on stderr. Later shards omit documents that repeat
    those of the damaged shard, so they are removed too.
    """
    reports: list[list[dict[str, Any]]] = []
    problem: str | None = None
    for file in range(files):
        reports.append([])
        number = 0
        while (path := _report_path(parts, _shard_name(file, number))).is_file():
            if problem is None:
                try:
                    reports[-1].append(_intact_report(path))
                except DamagedDataError as error:
                    problem = str(error)
            if problem:
                path.unlink()
            number += 1
    if problem:
        print(f"finished parts are written again: {problem}", file=sys.stderr)
    return reports


def _intact_report(path: Path) -> dict[str, Any]:
    """Return the report of a shard. Raises DamagedDataError; the content of large token files is compared at the join."""
    report = read_sealed(path, "it is written again", "files", "source_bytes")
    for name, record in report["files"].items():
        if problem := difference(path.with_name(name), record):
            raise DamagedDataError(problem)
    return report


def _report_path(parts: Path, name: str) -> Path:
    return parts / f"{name}.report"


def read_records(parts: Path, file: int, number: int, size: int) -> Iterator[bytes]:
    """Return the duplicate records of a finished shard, ``size`` bytes each."""
    content = (parts / f"{_shard_name(file, number)}.digests").read_bytes()
    return (content[at : at + size] for at in range(0, len(content), size))


def join_shards(
    files: Sequence[SourceFile],
    parts: Path,
    output_prefix: Path,
    settings: PreprocessingSettings,
    tokenizer: Tokenizer,
    made_from: str,
) -> dict[str, dict[str, Any]]:
    """Write the outputs and their manifests from the finished shards of all files. Return the manifest per name.

    made_from: hash of the input and the settings. Raises ValueError if no document is left.
    """
    reports = finished_reports(parts, len(files))
    every = [report for of_file in reports for report in of_file]
    skipped: Counter[str] = Counter()
    for report in every:
        skipped.update(report["skipped"])
        skipped["broken"] += report["broken"]
    if not any(sum(report["documents"]) for report in every):
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count) or "no documents"
        shutil.rmtree(parts)
        if set(+skipped) <= {"empty", "broken"}:
            raise ValueError(
                f"the input holds no text: {shown_files(files)} ({why}). Name files that hold text (--input), and the key that"
                f" holds it (--jsonl-keys, now {' '.join(settings.keys)})"
            )
        raise ValueError(
            f"the filters leave no document of {shown_files(files)} (removed: {why}). Change the options of these filters"
        )
    sources = {name for report in every for of_output in report["sources"] for name in of_output}
    _check_excluded(settings.filters.exclude_sources, skipped, every, sources, parts)
    manifests = {}
    for index, name in enumerate(settings.names()):
        by_file = [sum(report["documents"][index] for report in of_file) for of_file in reports]
        prefix = output_prefix.with_name(f"{output_prefix.name}_{name}_document")
        data_card_path(prefix).unlink(missing_ok=True)  # it describes the output of an earlier job
        if sum(by_file) == 0:
            # Remove the output of an earlier input, which would look like an output of this one.
            for path in (idx_path(prefix), bin_path(prefix), manifest_path(prefix), sources_path(prefix)):
                path.unlink(missing_ok=True)
            continue
        output = Output(prefix, token_dtype(tokenizer.vocab_size))
        with output.writer:
            for file, of_file in enumerate(reports):
                for number, report in enumerate(of_file):
                    if report["documents"][index]:
                        part = parts / f"{_shard_name(file, number)}_{name}"
                        output.writer.add_file(part, report["files"][f"{part.name}.bin"])
                        output.sources.extend(report["sources"][index], read_sources_file(sources_path(part)))
                        output.source_bytes.update(report["source_bytes"][index])
        manifests[name] = {
            "made_from": made_from,
            "files": len(files),
            **output.describe(),
            "append_eod": settings.append_eod,
            "skipped": {reason: count for reason, count in sorted(skipped.items()) if count},
            "settings": {
                "split": ",".join(f"{share:g}" for share in settings.split) or "none",
                "min_characters": settings.min_characters,
                "deduplicate": settings.deduplicate,
                "ftfy": settings.ftfy,
                "append_eod": settings.append_eod,
                "source_key": settings.source_key,
                **asdict(settings.filters),
                "languages": ",".join(settings.filters.languages) or "all",
                "exclude_sources": ", ".join(settings.filters.exclude_sources) or "none",
            },
            "tokenizer": describe_tokenizer(tokenizer, prefix.parent),
            "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size),
            "documents_of_files": [[str(file.path), count] for file, count in zip(files, by_file, strict=True)],
            "inputs": input_records(files, reports),
        }
        write_manifest(prefix, manifests[name])
    return manifests


def _check_excluded(
    names: Sequence[str], skipped: Counter[str], reports: Sequence[dict[str, Any]], sources: set[str], parts: Path
) -> None:
    """Remove the shards and raise ValueError for an excluded source that no document has.

    sources: of the documents in the outputs. parts: folder of the shards, which are of no use to a corrected command.
    """
    missing = [name for name in names if not skipped[excluded(name)]]
    if missing:
        documents = sum(sum(report["documents"]) for report in reports) + skipped.total()
        known = sources | (set(names) - set(missing))
        shutil.rmtree(parts)
        raise ValueError(
            f"--exclude-sources {', '.join(map(repr, missing))}: 0 of {documents:,} documents have this source;"
            f" {allowed_sources(missing, known)}"
        )


def input_records(files: Sequence[SourceFile], reports: Sequence[list[dict[str, Any]]]) -> dict[str, Record]:
    """Return path -> checksum record of each input file that was read to its end."""
    ends = ((file, of_file[-1]["input"]) for file, of_file in zip(files, reports, strict=True) if of_file)
    return {str(file.path): record for file, record in ends if record is not None}


def _shard_name(file: int, number: int) -> str:
    return f"{file:06d}.{number:06d}"
