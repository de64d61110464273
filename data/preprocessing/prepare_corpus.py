"""Prepare token files from a raw corpus in one call, cached: read, split, train a tokenizer if needed, tokenise.

A document goes to validation if the hash of its key (its path in the standard library, else its text) is below
``validation_fraction``. So the split is deterministic, and documents keep their side when others are added. Exact duplicates
are dropped before the split.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_io import naming_file_in_errors, read_json, write_json
from ..cache import built_folder
from ..corpus.discovery import Corpus, SourceFile, shown_files, source_files
from ..corpus.readers import SOURCE_KEY, Document, parse_block, read_blocks
from ..corpus.source_key import check_source_key
from ..corpus.split import TextSample, split_position, text_digest
from ..indexed import token_dtype
from ..manifest import describe_tokenizer, tokenizer_entry, write_manifest
from ..process_pool import usable_cores
from ..tokenizer import Tokenizer, load_tokenizer
from ..train_sentencepiece import train_sentencepiece
from .encode import encode_documents
from .shards import Output

PREPARE_VERSION = 6
TOKENIZER_SAMPLE = 48 * 2**20
BATCH_CHARACTERS = 4 * 2**20
SIDES = ("train", "validation")  # of the split, in the order of `Encoded.sides`


@dataclass(frozen=True)
class Prepared:
    """Paths of a prepared corpus.

    Prefixes are paths of token files without extension. ``validation_text_path`` is the concatenated raw validation text
    (UTF-8), the input of the gzip and xz baselines; ``manifest["validation"]["bytes"]`` is its size. The validation paths are
    None if validation_fraction is 0.
    """

    train_prefix: Path
    validation_prefix: Path | None
    validation_text_path: Path | None
    tokenizer_type: str
    tokenizer_path: Path | None
    manifest: dict[str, Any]


def prepare_corpus(
    corpus: Corpus,
    *,
    tokenizer_type: str = "sentencepiece",
    tokenizer_path: str | Path | None = None,
    vocab_size: int = 4096,
    text_key: str = "text",
    source_key: str = SOURCE_KEY,
    validation_fraction: float = 0.02,
    cache_directory: str | Path = "runs/cache",
    progress: bool = True,
) -> Prepared:
    """Return the token files of a corpus, from the cache if the same files were prepared with the same settings.

    ``tokenizer_type`` "sentencepiece" without a path trains a model of ``vocab_size`` on the training documents. Every
    document ends with the end-of-document id. The cache folder is written atomically. Call this on one rank while the other
    ranks wait.

    Raises FileNotFoundError for a path that does not exist. Raises ValueError for a corpus without text, a missing text key,
    a line that does not parse (with file and line), or too few documents to split.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"data.validation_fraction {validation_fraction} must be in [0, 1)")
    settings = _CorpusSettings(
        source_files(corpus),
        tokenizer_type,
        tokenizer_path,
        vocab_size,
        text_key,
        source_key,
        validation_fraction,
        progress,
    )
    description = json.dumps(settings.description())
    return _prepared(
        built_folder(cache_directory, "corpus", description, lambda temporary: _build(settings, temporary))
    )


def _prepared(folder: Path) -> Prepared:
    path, remedy = folder / "manifest.json", f"remove {folder}; it is rebuilt at the next start"
    manifest = read_json(path, remedy, "validation")
    validation = manifest["validation"] is not None
    tokenizer = tokenizer_entry(path, manifest, remedy)
    return Prepared(
        train_prefix=folder / "train_text_document",
        validation_prefix=folder / "validation_text_document" if validation else None,
        validation_text_path=folder / "validation.txt" if validation else None,
        tokenizer_type=tokenizer["type"],
        tokenizer_path=None if tokenizer["path"] is None else folder / tokenizer["path"],
        manifest=manifest,
    )


@dataclass(frozen=True)
class _CorpusSettings:
    files: list[SourceFile]
    tokenizer_type: str
    tokenizer_path: str | Path | None
    vocab_size: int
    text_key: str
    source_key: str
    validation_fraction: float
    progress: bool

    @property
    def trains_tokenizer(self) -> bool:
        return self.tokenizer_type == "sentencepiece" and self.tokenizer_path is None

    def description(self) -> dict[str, Any]:
        """Return everything that the result depends on, for the hash of the cache."""
        tokenizer: Any = ["train", self.vocab_size]
        if not self.trains_tokenizer:
            requested = load_tokenizer(self.tokenizer_type, self.tokenizer_path)
            # The hash does not cover the end-of-document id, which another file may set.
            tokenizer = [requested.hash, requested.end_of_document_id] if requested.type == "hf" else requested.hash
        return {
            "version": PREPARE_VERSION,
            "interpreter": sys.version if any(file.format == "python" for file in self.files) else None,
            "files": [file.identity() for file in self.files],
            "tokenizer": tokenizer,
            "text_key": self.text_key,
            "source_key": self.source_key,
            "validation_fraction": self.validation_fraction,
        }


@dataclass
class _Survey:
    """Result of the first pass: the side of each document in reading order ("train", "validation" or "repeat"), skipped
    documents by reason, and a sample of the training text for the tokenizer."""

    sides: list[str] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    sample: TextSample = field(default_factory=lambda: TextSample(TOKENIZER_SAMPLE))


def _build(settings: _CorpusSettings, folder: Path) -> None:
    start = time.perf_counter()
    survey = _survey_documents(settings)
    surveyed = time.perf_counter()
    if settings.trains_tokenizer:
        if settings.progress:
            print(
                f"training a SentencePiece tokenizer of {settings.vocab_size:,} pieces on"
                f" {survey.sample.characters / 1e6:.1f} million characters",
                file=sys.stderr,
            )
        path = folder / "tokenizer.model"
        train_sentencepiece(survey.sample.texts(), path, vocab_size=settings.vocab_size, threads=usable_cores())
        tokenizer = load_tokenizer("sentencepiece", path)
    else:
        tokenizer = load_tokenizer(settings.tokenizer_type, settings.tokenizer_path)
    trained = time.perf_counter()
    counts = _tokenise(settings, folder, tokenizer, survey)
    entry = describe_tokenizer(tokenizer, folder)
    for side, count in counts.items():
        if count is not None:
            write_manifest(folder / f"{side}_text_document", {**count, "tokenizer": entry})
    manifest = {
        "files": len(settings.files),
        "text_key": settings.text_key,
        "validation_fraction": settings.validation_fraction,
        **counts,
        "skipped": dict(survey.skipped),
        "tokenizer": entry,
        "seconds": {
            "reading": round(surveyed - start, 2),
            "training the tokenizer": round(trained - surveyed, 2),
            "tokenising": round(time.perf_counter() - trained, 2),
        },
    }
    write_json(folder / "manifest.json", manifest)


def _survey_documents(settings: _CorpusSettings) -> _Survey:
    check_source_key(settings.source_key, (settings.text_key,), settings.files)
    survey = _Survey()
    seen: set[bytes] = set()
    for document in _documents(settings, "reading", survey.skipped):
        position = split_position(document)
        survey.positions.append(position)
        digest = text_digest(document.text)
        if digest in seen:
            survey.skipped["repeat"] += 1
            survey.sides.append("repeat")
            continue
        seen.add(digest)
        survey.sides.append("validation" if position < settings.validation_fraction else "train")
        if survey.sides[-1] == "train" and settings.trains_tokenizer:
            survey.sample.add(position, document.text)
    _check_sides(settings, survey)
    return survey


def _check_sides(settings: _CorpusSettings, survey: _Survey) -> None:
    unique = [number for number, side in enumerate(survey.sides) if side != "repeat"]
    where = shown_files(settings.files)
    if not unique:
        why = ", ".join(f"{count} {reason}" for reason, count in survey.skipped.items()) or "no documents"
        raise ValueError(
            f"the corpus holds no text: {where} ({why}). Name files that hold text (data.corpus), and the key that"
            f" holds it (data.text_key, now {settings.text_key!r})."
        )
    if settings.validation_fraction == 0:
        return
    if len(unique) == 1:
        raise ValueError(
            f"the corpus holds one document ({where}), and the split into training and validation needs two or more:"
            " add documents, or train without validation (data.validation_fraction=0)."
        )
    # The hashes of few documents may all fall on one side. Each side gets at least its nearest document.
    for side, nearest in (("validation", min), ("train", max)):
        if side not in survey.sides:
            survey.sides[nearest(unique, key=lambda number: survey.positions[number])] = side


def _tokenise(settings: _CorpusSettings, folder: Path, tokenizer: Tokenizer, survey: _Survey) -> dict[str, Any]:
    outputs: dict[str, Output] = {}
    with contextlib.ExitStack() as stack:
        validation_text = stack.enter_context(open(folder / "validation.txt", "wb"))
        for side in SIDES:
            if side in survey.sides:
                outputs[side] = Output(folder / f"{side}_text_document", token_dtype(tokenizer.vocab_size))
                stack.enter_context(outputs[side].writer)
        for batch in _batches(settings, survey.sides):
            documents, sides = [document for document, _ in batch], [SIDES.index(side) for _, side in batch]
            encoded = encode_documents(
                documents, sides, tokenizer, append_eod=True, keep_empty=True, threads=usable_cores()
            )
            for side, output in outputs.items():
                output.add(encoded, np.array(sides) == SIDES.index(side))
            with naming_file_in_errors(folder / "validation.txt"):
                validation_text.writelines(document.text.encode() for document, side in batch if side == "validation")
    return {side: outputs[side].describe() if side in outputs else None for side in SIDES}


def _batches(settings: _CorpusSettings, sides: list[str]) -> Iterator[list[tuple[Document, str]]]:
    """Yield unique documents with their sides, a few MB at a time, so that the tokenizer can use its threads."""
    batch: list[tuple[Document, str]] = []
    size = 0
    for document, side in zip(_documents(settings, "tokenising", Counter()), sides, strict=True):
        if side == "repeat":
            continue
        batch.append((document, side))
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(settings: _CorpusSettings, what: str, skipped: Counter[str]) -> Iterator[Document]:
    """Yield every document, with a progress bar. Raises ValueError at the first line that does not parse."""
    from ..progress import ProgressBar

    total = sum(file.bytes for file in settings.files) or None
    with ProgressBar(
        total=total, desc=what, unit="B", unit_scale=True, disable=not settings.progress, leave=False, mininterval=0.5
    ) as bar:
        for block in read_blocks(settings.files):
            parsed = parse_block(block, settings.text_key, settings.source_key)
            if parsed.broken:
                raise ValueError(parsed.broken[0])
            skipped.update(parsed.skipped)
            yield from parsed.documents
            bar.update(block.file_bytes)
