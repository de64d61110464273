"""Outputs of preprocessing in parts of an input file: finished parts survive a kill, and are joined in order."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..atomic_io import atomic_write
from ..checksum import DamagedDataError, Record, difference, read_sealed, record_of, write_sealed
from ..corpus.discovery import SourceFile
from ..corpus.document_sources import SourceTable, read_sources_file, sources_path, write_sources
from ..indexed import IndexedWriter, bin_path, idx_path, token_dtype
from ..manifest import describe_tokenizer, manifest_path, write_manifest
from ..tokenizer import Tokenizer, padded_vocab_size
from .encode import Encoded, Recipe

DIGEST_BYTES = 17  # the number of the key, then the digest of the text


class Output:
    """A pair of token files being written, with the sources of its documents and the bytes of their text."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.writer, self.sources, self.bytes = IndexedWriter(prefix, dtype), SourceTable(), 0

    def add(self, encoded: Encoded, chosen: NDArray[np.bool_]) -> None:
        """Append the chosen documents. chosen: [documents]."""
        lengths, sizes = np.array(encoded.lengths, np.int64), np.array(encoded.sizes, np.int64)
        tokens = encoded.tokens if chosen.all() else encoded.tokens[np.repeat(chosen, lengths)]
        self.writer.add_documents(tokens, lengths[chosen])
        self.bytes += int(sizes[chosen].sum())
        for document in np.flatnonzero(chosen):
            self.sources.add(encoded.sources[document])

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the token files, which are in place, and write their sources beside them."""
        prefix, checksums = self.writer.prefix, dict(self.writer.checksums)
        if self.sources.names:
            checksums["sources.npy"] = write_sources(prefix, self.sources.ids)
        else:
            sources_path(prefix).unlink(missing_ok=True)
        tokens = bin_path(prefix).stat().st_size // self.writer.dtype.itemsize
        return {
            "documents": self.writer.num_documents,
            "tokens": tokens,
            "bytes": self.bytes,
            "bytes_per_token": round(self.bytes / tokens, 4),
            "sources": self.sources.names,
            "checksums": checksums,
        }


class Part:
    """The outputs of some blocks of one input file: a pair of token files a name, the digests of the documents, and a
    report that marks it finished."""

    def __init__(self, folder: Path, file: int, number: int, recipe: Recipe, dtype: np.dtype) -> None:
        self.folder, self.name, self.recipe = folder, _part_name(file, number), recipe
        self.outputs = [Output(folder / f"{self.name}_{name}", dtype) for name in recipe.names()]
        self.skipped: Counter[str] = Counter()
        self.broken = self.blocks = 0
        self.digests: list[bytes] = []

    def add(self, key: int, outcome: Encoded, seen: set[bytes]) -> None:
        """What a worker made of a block for one key; ``seen`` are the digests of all documents so far."""
        self.skipped.update(outcome.skipped)
        self.broken += len(outcome.broken)
        kept = np.ones(len(outcome.lengths), bool)
        if self.recipe.deduplicate:
            for document, digest in enumerate(outcome.digests):
                digest = bytes([key]) + digest
                kept[document] = digest not in seen
                if kept[document]:
                    seen.add(digest)
                    self.digests.append(digest)
            self.skipped["repeat"] += int((~kept).sum())
        sides = max(1, len(self.recipe.split))
        for side in range(sides):
            self.outputs[key * sides + side].add(outcome, kept & (np.array(outcome.sides) == side))

    def finish(self, last: bool, input_record: Record | None = None) -> None:
        """Put the outputs in place; ``last``: the file ends here, and this is its record."""
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
            file.write(b"".join(self.digests))
        records[digests.name] = record_of(digests)
        report = {
            "documents": documents,
            "bytes": [output.bytes for output in self.outputs],
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
        for output in self.outputs:
            output.writer.abandon()


def finished_reports(parts: Path, files: int) -> list[list[dict[str, Any]]]:
    """Reports of the finished parts of so many files. From the first damaged part on all parts are removed, with a line.

    Later parts go too, since they leave out repeats of documents of the damaged one.
    """
    reports: list[list[dict[str, Any]]] = []
    problem: str | None = None
    for file in range(files):
        reports.append([])
        number = 0
        while (path := _report_path(parts, _part_name(file, number))).is_file():
            problem = problem or _damage(path)
            if problem:
                path.unlink()
            else:
                reports[-1].append(read_sealed(path, ""))
            number += 1
    if problem:
        print(f"finished parts are written again: {problem}", file=sys.stderr)
    return reports


def _damage(report: Path) -> str | None:
    """What is wrong with a part; the content of its large token files is compared when they are joined."""
    try:
        records = read_sealed(report, "it is written again", "files")["files"]
    except DamagedDataError as error:
        return str(error)
    found = (difference(report.with_name(name), record) for name, record in records.items())
    return next((problem for problem in found if problem), None)


def _report_path(parts: Path, name: str) -> Path:
    return parts / f"{name}.report"


def read_digests(parts: Path, file: int, number: int) -> Iterator[bytes]:
    """Digests of the documents of a finished part, DIGEST_BYTES each."""
    content = (parts / f"{_part_name(file, number)}.digests").read_bytes()
    return (content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))


def join_parts(
    files: Sequence[SourceFile],
    parts: Path,
    output_prefix: Path,
    recipe: Recipe,
    tokenizer: Tokenizer,
    made_from: str,
) -> dict[str, dict[str, Any]]:
    """Write the outputs and their manifests from the finished parts of all files. Returns the manifest of each name.

    made_from: what tells this input and these settings from others.
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
        raise ValueError(f"the input holds no text: {files[0].path} and {len(files) - 1} more files ({why})")
    manifests = {}
    for index, name in enumerate(recipe.names()):
        by_file = [sum(report["documents"][index] for report in of_file) for of_file in reports]
        prefix = output_prefix.with_name(f"{output_prefix.name}_{name}_document")
        if sum(by_file) == 0:
            # What an earlier input had here would be taken for this one's.
            for path in (idx_path(prefix), bin_path(prefix), manifest_path(prefix), sources_path(prefix)):
                path.unlink(missing_ok=True)
            continue
        output = Output(prefix, token_dtype(tokenizer.vocab_size))
        with output.writer:
            for file, of_file in enumerate(reports):
                for number, report in enumerate(of_file):
                    if report["documents"][index]:
                        part = parts / f"{_part_name(file, number)}_{name}"
                        output.writer.add_file(part, report["files"][f"{part.name}.bin"])
                        output.sources.extend(report["sources"][index], read_sources_file(sources_path(part)))
                        output.bytes += report["bytes"][index]
        manifests[name] = {
            "made_from": made_from,
            "files": len(files),
            **output.describe(),
            "append_eod": recipe.append_eod,
            "skipped": {reason: count for reason, count in sorted(skipped.items()) if count},
            "tokenizer": describe_tokenizer(tokenizer, prefix.parent),
            "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size),
            "documents_of_files": [[str(file.path), count] for file, count in zip(files, by_file, strict=True)],
            "inputs": input_records(files, reports),
        }
        write_manifest(prefix, manifests[name])
    return manifests


def input_records(files: Sequence[SourceFile], reports: Sequence[list[dict[str, Any]]]) -> dict[str, Record]:
    """The record of each input file that was read to its end, by its path."""
    ends = ((file, of_file[-1]["input"]) for file, of_file in zip(files, reports, strict=True) if of_file)
    return {str(file.path): record for file, record in ends if record is not None}


def _part_name(file: int, number: int) -> str:
    return f"{file:06d}.{number:06d}"
