"""From a raw corpus to token files in one call, cached: read, split, train a tokenizer where none is given, tokenise.

A corpus is split by whole documents: a document goes to validation when the hash of its key (its path inside the
standard library, else its text) falls under ``validation_fraction``. So the split is the same every time, documents
keep their side when others are added, and exact repeats are dropped before it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .corpora import Corpus, Document, SourceFile, parse_block, read_blocks, source_files
from .indexed import IndexedWriter, token_dtype
from .tokenizer import Tokenizer, load_tokenizer, train_sentencepiece

PREPARE_VERSION = 1
TOKENIZER_SAMPLE_BYTES = 48 * 2**20
BATCH_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Prepared:
    """Where a prepared corpus lies. Prefixes are token files without extension; the validation ones are None when
    validation_fraction is 0. ``validation_text_path`` is the raw validation text (UTF-8, documents one after another):
    what gzip and xz are measured on, and ``manifest["validation"]["bytes"]`` is its size."""

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
    validation_fraction: float = 0.02,
    cache_directory: str | Path = "runs/cache",
    progress: bool = True,
) -> Prepared:
    """Token files of a corpus, from the cache when the same files were prepared with the same settings before.

    ``tokenizer_type`` "sentencepiece" without a path trains a model of ``vocab_size`` on the training documents. Built
    aside and renamed into place; call it on one rank and let the others wait.

    Raises FileNotFoundError for a path that does not exist and ValueError for a corpus without text, a text key that
    no document has, a line that does not parse (file and line), or too few documents to split.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"data.validation_fraction {validation_fraction} must be in [0, 1)")
    files = source_files(corpus)
    description = _description(files, tokenizer_type, tokenizer_path, vocab_size, text_key, validation_fraction)
    folder = Path(cache_directory) / f"corpus-{hashlib.sha256(json.dumps(description).encode()).hexdigest()[:24]}"
    if not (folder / "manifest.json").is_file():
        aside = folder.with_name(f".{folder.name}.{os.getpid()}.aside")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            _build(files, aside, tokenizer_type, tokenizer_path, vocab_size, text_key, validation_fraction, progress)
            aside.rename(folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            if not (folder / "manifest.json").is_file():
                raise
    return _prepared(folder)


def _prepared(folder: Path) -> Prepared:
    manifest = json.loads((folder / "manifest.json").read_text())
    has_validation = manifest["validation"] is not None
    path = manifest["tokenizer"]["path"]
    return Prepared(
        train_prefix=folder / "train_text_document",
        validation_prefix=folder / "validation_text_document" if has_validation else None,
        validation_text_path=folder / "validation.txt" if has_validation else None,
        tokenizer_type=manifest["tokenizer"]["type"],
        tokenizer_path=None if path is None else folder / path,
        manifest=manifest,
    )


def _description(
    files: Sequence[SourceFile],
    tokenizer_type: str,
    tokenizer_path: str | Path | None,
    vocab_size: int,
    text_key: str,
    validation_fraction: float,
) -> dict[str, Any]:
    """Everything that the outcome depends on."""
    trained = tokenizer_type == "sentencepiece" and tokenizer_path is None
    return {
        "version": PREPARE_VERSION,
        "interpreter": sys.version if any(file.format == "python" for file in files) else None,
        "files": [
            [file.key or str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns]
            for file in files
        ],
        "tokenizer": ["train", vocab_size] if trained else load_tokenizer(tokenizer_type, tokenizer_path).hash,
        "text_key": text_key,
        "validation_fraction": validation_fraction,
    }


def _build(
    files: Sequence[SourceFile],
    folder: Path,
    tokenizer_type: str,
    tokenizer_path: str | Path | None,
    vocab_size: int,
    text_key: str,
    validation_fraction: float,
    progress: bool,
) -> None:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    started = time.perf_counter()
    survey = _survey(files, text_key, validation_fraction, progress)
    surveyed = time.perf_counter()
    stored_path: str | None = None
    if tokenizer_type == "sentencepiece" and tokenizer_path is None:
        if progress:
            size = sum(len(text.encode()) for text in survey.sample) / 1e6
            print(f"training a SentencePiece tokenizer of {vocab_size} on {size:.1f} MB of text", file=sys.stderr)
        stored_path = "tokenizer.model"
        train_sentencepiece(survey.sample, folder / stored_path, vocab_size=vocab_size, threads=threads)
        tokenizer = load_tokenizer("sentencepiece", folder / stored_path)
    else:
        tokenizer = load_tokenizer(tokenizer_type, tokenizer_path)
        stored_path = None if tokenizer.path is None else str(Path(tokenizer.path).resolve())
    survey.sample.clear()
    trained = time.perf_counter()
    counts = _tokenise(files, folder, tokenizer, text_key, survey, threads, progress)
    finished = time.perf_counter()
    manifest = {
        "files": len(files),
        "text_key": text_key,
        "validation_fraction": validation_fraction,
        **counts,
        "skipped": dict(survey.skipped),
        "tokenizer": {
            "type": tokenizer.type,
            "path": stored_path,
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document_id": tokenizer.end_of_document_id,
        },
        "seconds": {
            "reading": round(surveyed - started, 2),
            "training the tokenizer": round(trained - surveyed, 2),
            "tokenising": round(finished - trained, 2),
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


@dataclass
class _Survey:
    """The first pass: which documents are kept, on which side, and a sample of the training text."""

    sides: list[str]  # one of "train", "validation", "repeat" a document, in reading order
    skipped: Counter[str]
    sample: list[str]


def _survey(files: Sequence[SourceFile], text_key: str, validation_fraction: float, progress: bool) -> _Survey:
    seen: set[bytes] = set()
    sides: list[str] = []
    keys: list[float] = []
    skipped: Counter[str] = Counter()
    sample: list[tuple[float, int, str]] = []
    sample_bytes = 0
    for document in _documents(files, text_key, skipped, progress, "reading"):
        digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
        place = split_position(document)
        keys.append(place)
        if digest in seen:
            skipped["repeat"] += 1
            sides.append("repeat")
            continue
        seen.add(digest)
        sides.append("validation" if place < validation_fraction else "train")
        if sides[-1] == "train":
            # The documents of the largest hashes: a sample that does not depend on their order.
            heapq.heappush(sample, (place, len(sides), document.text))
            sample_bytes += len(document.text)
            while sample_bytes > TOKENIZER_SAMPLE_BYTES and len(sample) > 1:
                sample_bytes -= len(heapq.heappop(sample)[2])
    _check_sides(files, sides, keys, validation_fraction, skipped, text_key)
    return _Survey(sides, skipped, [text for _, _, text in sorted(sample)])


def split_position(document: Document) -> float:
    """A number in [0, 1) that depends on the document alone; validation is what falls under its fraction."""
    key = document.text if document.key is None else document.key
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64


def _check_sides(
    files: Sequence[SourceFile],
    sides: list[str],
    keys: list[float],
    validation_fraction: float,
    skipped: Counter[str],
    text_key: str,
) -> None:
    kept = [n for n, side in enumerate(sides) if side != "repeat"]
    where = f"{files[0].path}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if not kept:
        raise ValueError(
            f"the corpus holds no text: {where} ({dict(skipped) or 'no documents'}). Name files that hold text"
            f" (data.corpus), and the key that holds it (data.text_key, now {text_key!r})."
        )
    if validation_fraction == 0:
        return
    if len(kept) < 2:
        raise ValueError(
            f"the corpus holds one document ({where}), and it is split into training and validation by whole"
            " documents: add documents, or train without validation (data.validation_fraction=0)."
        )
    # A small corpus may have all of its hashes on one side; each side gets at least its nearest document.
    for side, nearest in (("validation", min), ("train", max)):
        if side not in sides:
            sides[nearest(kept, key=lambda n: keys[n])] = side


def _tokenise(
    files: Sequence[SourceFile],
    folder: Path,
    tokenizer: Tokenizer,
    text_key: str,
    survey: _Survey,
    threads: int,
    progress: bool,
) -> dict[str, Any]:
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document_id])
    counts: dict[str, Any] = {}
    for side in ("train", "validation"):
        counts[side] = {"documents": 0, "tokens": 0, "bytes": 0} if side in survey.sides else None
    writers = {side: IndexedWriter(folder / f"{side}_text_document", dtype) for side, count in counts.items() if count}
    with open(folder / "validation.txt", "wb") as validation_text:
        documents = _documents(files, text_key, Counter(), progress, "tokenising")
        for batch in _batched(zip(documents, survey.sides, strict=True)):
            encoded = tokenizer.encode_batch([document.text for document, _ in batch], threads)
            for (document, side), tokens in zip(batch, encoded, strict=True):
                raw = document.text.encode()
                writers[side].add_document(np.concatenate([tokens, end]))
                counts[side]["documents"] += 1
                counts[side]["tokens"] += len(tokens) + 1
                counts[side]["bytes"] += len(raw)
                if side == "validation":
                    validation_text.write(raw)
    for side, writer in writers.items():
        writer.finish()
        counts[side]["bytes_per_token"] = round(counts[side]["bytes"] / counts[side]["tokens"], 4)
    return counts


def _batched(documents: Iterator[tuple[Document, str]]) -> Iterator[list[tuple[Document, str]]]:
    batch: list[tuple[Document, str]] = []
    size = 0
    for document, side in documents:
        if side == "repeat":
            continue
        batch.append((document, side))
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(
    files: Sequence[SourceFile], text_key: str, skipped: Counter[str], progress: bool, what: str
) -> Iterator[Document]:
    """Every document, under a progress bar of files. Raises ValueError at the first line that does not parse."""
    from tqdm import tqdm

    with tqdm(total=len(files), desc=what, unit="file", disable=not progress, leave=False) as bar:
        current: SourceFile | None = None
        for block in read_blocks(files):
            if block.file is not current:
                bar.update(0 if current is None else 1)
                current = block.file
            parsed = parse_block(block, text_key)
            if parsed.broken:
                raise ValueError(parsed.broken[0])
            skipped.update(parsed.skipped)
            yield from parsed.documents
        bar.update(0 if current is None else 1)
