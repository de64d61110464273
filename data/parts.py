"""Outputs of preprocessing by input file: finished parts survive a kill, and are joined in the order of the files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .corpora import SourceFile
from .encode import Encoded, Recipe
from .indexed import IndexedWriter, bin_path, token_dtype
from .manifest import describe_tokenizer, write_manifest
from .tokenizer import Tokenizer

DIGEST_BYTES = 17  # the number of the key, then the digest of the text


class Part:
    """The outputs of one input file: a pair of token files a name, the digests, and a report that marks it finished."""

    def __init__(self, folder: Path, number: int, recipe: Recipe, dtype: np.dtype) -> None:
        self.folder, self.number, self.recipe = folder, number, recipe
        self.writers = [IndexedWriter(folder / f"{number:06d}_{name}", dtype) for name in recipe.names()]
        self.bytes = [0] * len(self.writers)
        self.skipped: Counter[str] = Counter()
        self.broken = 0
        self.digests: list[bytes] = []

    def add(self, key: int, outcome: Encoded, seen: set[bytes]) -> None:
        sides = max(1, len(self.recipe.split))
        start = 0
        for length, side, digest, size in zip(
            outcome.lengths, outcome.sides, outcome.digests, outcome.sizes, strict=True
        ):
            tokens = outcome.tokens[start : start + length]
            start += length
            if self.recipe.deduplicate:
                digest = bytes([key]) + digest
                if digest in seen:
                    self.skipped["repeat"] += 1
                    continue
                seen.add(digest)
                self.digests.append(digest)
            name = key * sides + side
            self.writers[name].add_document(tokens)
            self.bytes[name] += size
        self.skipped.update(outcome.skipped)
        self.broken += len(outcome.broken)

    def finish(self) -> None:
        documents = [writer.num_documents for writer in self.writers]
        for writer in self.writers:
            if writer.num_documents:
                writer.finish()
            else:
                writer.abandon()
        (self.folder / f"{self.number:06d}.digests").write_bytes(b"".join(self.digests))
        report = {
            "documents": documents,
            "bytes": self.bytes,
            "skipped": dict(self.skipped),
            "broken": self.broken,
        }
        aside = self.folder / f"{self.number:06d}.aside"
        aside.write_text(json.dumps(report))
        os.replace(aside, self.folder / f"{self.number:06d}.report")

    def abandon(self) -> None:
        for writer in self.writers:
            writer.abandon()

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()


def part_report(parts: Path, number: int) -> dict[str, Any] | None:
    path = parts / f"{number:06d}.report"
    return json.loads(path.read_text()) if path.is_file() else None


def read_digests(parts: Path, number: int) -> Iterator[bytes]:
    content = (parts / f"{number:06d}.digests").read_bytes()
    return (content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))


def join_parts(
    files: Sequence[SourceFile], parts: Path, output_prefix: Path, recipe: Recipe, tokenizer: Tokenizer
) -> dict[str, dict[str, Any]]:
    reports = [json.loads((parts / f"{number:06d}.report").read_text()) for number in range(len(files))]
    skipped: Counter[str] = Counter()
    for report in reports:
        skipped.update(report["skipped"])
        skipped["broken"] += report["broken"]
    if not any(sum(report["documents"]) for report in reports):
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count) or "no documents"
        raise ValueError(f"the input holds no text: {files[0].path} and {len(files) - 1} more files ({why})")
    manifests = {}
    for index, name in enumerate(recipe.names()):
        documents = sum(report["documents"][index] for report in reports)
        if documents == 0:
            continue
        prefix = output_prefix.with_name(f"{output_prefix.name}_{name}_document")
        with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
            for number, report in enumerate(reports):
                if report["documents"][index]:
                    writer.add_file(parts / f"{number:06d}_{name}")
        tokens = bin_path(prefix).stat().st_size // token_dtype(tokenizer.vocab_size).itemsize
        size = sum(report["bytes"][index] for report in reports)
        manifests[name] = {
            "files": len(files),
            "documents": documents,
            "tokens": tokens,
            "bytes": size,
            "bytes_per_token": round(size / tokens, 4),
            "append_eod": recipe.append_eod,
            "skipped": {reason: count for reason, count in sorted(skipped.items()) if count},
            "tokenizer": describe_tokenizer(tokenizer, prefix.parent),
        }
        write_manifest(prefix, manifests[name])
    return manifests
