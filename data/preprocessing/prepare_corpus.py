"""From a raw corpus to token files in one call, cached: read, split, train a tokenizer where none is given, tokenise.

A corpus is split by whole documents: a document goes to validation when the hash of its key (its path inside the
standard library, else its text) falls under ``validation_fraction``. So the split is the same every time and documents
keep their side when others are added. Exact repeats are dropped before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_io import naming_file_in_errors, read_json, write_whole
from ..cache import built_folder
from ..corpus.discovery import Corpus, SourceFile, source_files
from ..corpus.readers import SOURCE_KEY, Document, parse_block, read_blocks
from ..corpus.split import TextSample, split_position, text_digest
from ..indexed import token_dtype
from ..manifest import describe_tokenizer, write_manifest
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
    """Where a prepared corpus lies.

    Prefixes are token files without extension. ``validation_text_path`` is the raw validation text (UTF-8, documents
    one after another): what gzip and xz are measured on; ``manifest["validation"]["bytes"]`` is its size. The
    validation paths are None when validation_fraction is 0.
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
    """Token files of a corpus; from the cache when the same files were prepared with the same settings before.

    ``tokenizer_type`` "sentencepiece" without a path trains a model of ``vocab_size`` on the training documents. Every
    document ends with the tokenizer's end-of-document id. Built aside and renamed into place; call it on one rank and
    let the others wait.

    Raises FileNotFoundError for a path that does not exist and ValueError for a corpus without text, a text key that
    the documents do not have, a line that does not parse (file and line), or too few documents to split.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"data.validation_fraction {validation_fraction} must be in [0, 1)")
    recipe = _Recipe(
        source_files(corpus),
        tokenizer_type,
        tokenizer_path,
        vocab_size,
        text_key,
        source_key,
        validation_fraction,
        progress,
    )
    description = json.dumps(recipe.description())
    return _prepared(built_folder(cache_directory, "corpus", description, lambda aside: _build(recipe, aside)))


def _prepared(folder: Path) -> Prepared:
    manifest = read_json(folder / "manifest.json", f"remove {folder}, it is built again", "validation", "tokenizer")
    validation = manifest["validation"] is not None
    tokenizer = manifest["tokenizer"]
    return Prepared(
        train_prefix=folder / "train_text_document",
        validation_prefix=folder / "validation_text_document" if validation else None,
        validation_text_path=folder / "validation.txt" if validation else None,
        tokenizer_type=tokenizer["type"],
        tokenizer_path=None if tokenizer["path"] is None else folder / tokenizer["path"],
        manifest=manifest,
    )


@dataclass(frozen=True)
class _Recipe:
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
        """Everything that the outcome depends on."""
        tokenizer: Any = ["train", self.vocab_size]
        if not self.trains_tokenizer:
            given = load_tokenizer(self.tokenizer_type, self.tokenizer_path)
            # What ends a document may be named in a file beside the one that the hash is of.
            tokenizer = [given.hash, given.end_of_document_id] if given.type == "hf" else given.hash
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
    """The first pass: the side of each document in reading order ("train", "validation" or "repeat"), what was skipped
    and why, and a sample of the training text for the tokenizer."""

    sides: list[str] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    sample: TextSample = field(default_factory=lambda: TextSample(TOKENIZER_SAMPLE))


def _build(recipe: _Recipe, folder: Path) -> None:
    start = time.perf_counter()
    survey = _survey_documents(recipe)
    surveyed = time.perf_counter()
    if recipe.trains_tokenizer:
        if recipe.progress:
            print(
                f"training a SentencePiece tokenizer of {recipe.vocab_size:,} pieces on"
                f" {survey.sample.characters / 1e6:.1f} million characters",
                file=sys.stderr,
            )
        path = folder / "tokenizer.model"
        train_sentencepiece(survey.sample.texts(), path, vocab_size=recipe.vocab_size, threads=_threads())
        tokenizer = load_tokenizer("sentencepiece", path)
    else:
        tokenizer = load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path)
    trained = time.perf_counter()
    counts = _tokenise(recipe, folder, tokenizer, survey)
    entry = describe_tokenizer(tokenizer, folder)
    for side, count in counts.items():
        if count is not None:
            write_manifest(folder / f"{side}_text_document", {**count, "tokenizer": entry})
    manifest = {
        "files": len(recipe.files),
        "text_key": recipe.text_key,
        "validation_fraction": recipe.validation_fraction,
        **counts,
        "skipped": dict(survey.skipped),
        "tokenizer": entry,
        "seconds": {
            "reading": round(surveyed - start, 2),
            "training the tokenizer": round(trained - surveyed, 2),
            "tokenising": round(time.perf_counter() - trained, 2),
        },
    }
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _survey_documents(recipe: _Recipe) -> _Survey:
    survey = _Survey()
    seen: set[bytes] = set()
    for document in _documents(recipe, "reading", survey.skipped):
        position = split_position(document)
        survey.positions.append(position)
        digest = text_digest(document.text)
        if digest in seen:
            survey.skipped["repeat"] += 1
            survey.sides.append("repeat")
            continue
        seen.add(digest)
        survey.sides.append("validation" if position < recipe.validation_fraction else "train")
        if survey.sides[-1] == "train" and recipe.trains_tokenizer:
            survey.sample.add(position, document.text)
    _check_sides(recipe, survey)
    return survey


def _check_sides(recipe: _Recipe, survey: _Survey) -> None:
    kept = [number for number, side in enumerate(survey.sides) if side != "repeat"]
    where = str(recipe.files[0].path) + (f" and {len(recipe.files) - 1} more" if len(recipe.files) > 1 else "")
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in survey.skipped.items()) or "no documents"
        raise ValueError(
            f"the corpus holds no text: {where} ({why}). Name files that hold text (data.corpus), and the key that"
            f" holds it (data.text_key, now {recipe.text_key!r})."
        )
    if recipe.validation_fraction == 0:
        return
    if len(kept) == 1:
        raise ValueError(
            f"the corpus holds one document ({where}), and it is split into training and validation by whole"
            " documents: add documents, or train without validation (data.validation_fraction=0)."
        )
    # The hashes of a few documents may all fall on one side; each side gets at least the document nearest to it.
    for side, nearest in (("validation", min), ("train", max)):
        if side not in survey.sides:
            survey.sides[nearest(kept, key=lambda number: survey.positions[number])] = side


def _tokenise(recipe: _Recipe, folder: Path, tokenizer: Tokenizer, survey: _Survey) -> dict[str, Any]:
    outputs: dict[str, Output] = {}
    with contextlib.ExitStack() as stack:
        validation_text = stack.enter_context(open(folder / "validation.txt", "wb"))
        for side in SIDES:
            if side in survey.sides:
                outputs[side] = Output(folder / f"{side}_text_document", token_dtype(tokenizer.vocab_size))
                stack.enter_context(outputs[side].writer)
        for batch in _batches(recipe, survey.sides):
            documents, sides = [document for document, _ in batch], [SIDES.index(side) for _, side in batch]
            encoded = encode_documents(
                documents, sides, tokenizer, append_eod=True, keep_empty=True, threads=_threads()
            )
            for side, output in outputs.items():
                output.add(encoded, np.array(sides) == SIDES.index(side))
            with naming_file_in_errors(folder / "validation.txt"):
                validation_text.writelines(document.text.encode() for document, side in batch if side == "validation")
    return {side: outputs[side].describe() if side in outputs else None for side in SIDES}


def _batches(recipe: _Recipe, sides: list[str]) -> Iterator[list[tuple[Document, str]]]:
    """Kept documents with their sides, some MB at a time, for the tokenizer's threads to share."""
    batch: list[tuple[Document, str]] = []
    size = 0
    for document, side in zip(_documents(recipe, "tokenising", Counter()), sides, strict=True):
        if side == "repeat":
            continue
        batch.append((document, side))
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(recipe: _Recipe, what: str, skipped: Counter[str]) -> Iterator[Document]:
    """Every document, under a progress bar. Raises ValueError at the first line that does not parse."""
    from tqdm import tqdm

    total = sum(file.bytes for file in recipe.files) or None
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, disable=not recipe.progress, leave=False, mininterval=0.5
    ) as bar:
        for block in read_blocks(recipe.files):
            parsed = parse_block(block, recipe.text_key, recipe.source_key)
            if parsed.broken:
                raise ValueError(parsed.broken[0])
            skipped.update(parsed.skipped)
            yield from parsed.documents
            bar.update(block.file_bytes)


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
