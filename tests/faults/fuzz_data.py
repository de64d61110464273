"""Damage files of the data path at random, use them as a run does, and count the outcomes.

`run` returns these counts:

- cases: damaged files;
- refused: the message names the damaged file or its folder;
- harmless: the samples are the same, possibly from a rebuilt cache;
- found by --verify: accepted at the start like a large file, and found by `tools.inspect_data --verify`;
- accepted: no checksum: other samples, from a file without a checksum (inputs, files of other projects);
- silently accepted: other samples, although a checksum exists;
- file not named: the message does not name the file;
- traceback: any other exception.

The last three must be 0. `failures.jsonl` of the folder describes their cases.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from data import checksum
from data.corpus.discovery import source_files
from data.corpus.document_sources import read_sources
from data.datasets.causal import CausalDataset
from data.indexed import IndexedTokens
from data.manifest import check_tokenizer, manifest_tokenizer
from data.preprocessing import pipeline
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.prepare_corpus import prepare_corpus
from data.tokenizer import load_tokenizer
from tests.data.inline_pool import Inline
from tests.faults.outcomes import FAILURES, HARMLESS, REFUSED, SILENT, TRACEBACK, UNHASHED, UNNAMED, record_failure
from tools import inspect_data

CACHES = ("orders", "corpora")
KINDS = ("flip", "bytes", "zeros", "cut", "extend", "empty")


@dataclass(frozen=True)
class Target:
    """Hold files and the function that reads them and returns a digest of their samples.

    Attributes:
        verify: argument of `inspect_data --verify`; None without a checksum.
    """

    files: list[Path]
    read: Callable[[], str]
    verify: Path | None = None


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Damage `count` files in a new `folder` and return the counts. The same seed damages the same bytes."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter(dict.fromkeys(("cases", *FAILURES), 0))
    with mock.patch.object(pipeline, "_pool", lambda recipe, workers: Inline(recipe)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = _targets(folder)
        expected = [target.read() for target in targets]
        for _ in range(count):
            number = draw.randrange(len(targets))
            target = targets[number]
            path, kind, large = draw.choice(target.files), draw.choice(KINDS), draw.random() < 0.5
            with _damaged(path, kind, draw) as position, _small_limit(large):
                outcome, output = _outcome(target, path, expected[number])
            outcomes["cases"] += 1
            outcomes[outcome] += 1
            if outcome in FAILURES:
                case = {"outcome": outcome, "file": str(path), "kind": kind, "position": position, "large": large}
                record_failure(folder, **case, output=output)
    return dict(outcomes)


def _outcome(target: Target, path: Path, expected: str) -> tuple[str, str]:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            digest = target.read()
            if digest == expected:
                return HARMLESS, ""
            if target.verify is None:
                return UNHASHED, ""
            is_found = inspect_data.main([str(target.verify), "--verify"]) == 1
    except (ValueError, OSError) as error:
        message = f"{error} {getattr(error, 'filename', None) or ''}"
        is_named = path.name in message or (path.parent.parent.name in CACHES and path.parent.name in message)
        return (REFUSED if is_named else UNNAMED), message
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        return TRACEBACK, repr(error)
    return ("found by --verify" if is_found else SILENT), output.getvalue()


@contextlib.contextmanager
def _damaged(path: Path, kind: str, draw: random.Random) -> Iterator[str]:
    """Replace the file by a damaged copy; restore content and modification time at the end. Yield the position."""
    original, state = path.read_bytes(), path.stat()
    content = bytearray(original)
    at = draw.randrange(max(1, len(content)))
    length = min(draw.randrange(1, 9 if kind == "bytes" else 600), len(content) - at)
    if kind == "flip" and content:
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        content[at : at + length] = draw.randbytes(length)
    elif kind == "zeros":
        content[at : at + length] = bytes(length)
    elif kind == "cut":
        del content[at:]
    elif kind == "extend":
        content += draw.randbytes(length) if draw.random() < 0.5 else bytes(length)
    elif kind == "empty":
        content.clear()
    path.unlink()
    path.write_bytes(content)
    try:
        yield f"byte {at} of {len(original)}, {length} bytes"
    finally:
        path.parent.mkdir(exist_ok=True)  # a damaged cache folder may have been removed
        path.unlink(missing_ok=True)
        path.write_bytes(original)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def _small_limit(large: bool) -> contextlib.AbstractContextManager[object]:
    """Let files above 200 bytes count as too large for a comparison at the start, if `large`."""
    return mock.patch.object(checksum, "ALWAYS_CHECKED", 200) if large else contextlib.nullcontext()


def _targets(folder: Path) -> list[Target]:
    inputs = _write_inputs(folder / "inputs")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[UNK]", "[SEP]", "[CLS]", *(f"w{n}" for n in range(40)), ".", "document"]))
    prefix = folder / "out"
    recipe = PreprocessingSettings("wordpiece", str(vocabulary), append_eod=True)
    pipeline.preprocess(source_files(inputs), prefix, recipe, progress=False)
    own = Path(f"{prefix}_text_document")
    foreign = folder / "foreign"
    for ending in ("bin", "idx"):
        shutil.copyfile(f"{own}.{ending}", f"{foreign}.{ending}")
    orders, corpora = (folder / name for name in CACHES)

    def tokens_of(prefix: Path) -> str:
        tokenizer = manifest_tokenizer(prefix)
        if tokenizer is not None:
            check_tokenizer(prefix, tokenizer)
        names, ids = read_sources(prefix, len(IndexedTokens(prefix)))
        return _digest(CausalDataset(prefix, sequence_length=16, num_samples=40, seed=1)) + str((names, ids.tolist()))

    def ordered() -> str:
        settings = {"sequence_length": 16, "num_samples": 40, "seed": 1, "cache_directory": orders}
        return _digest(CausalDataset(own, **settings))

    def prepared() -> str:
        corpus = prepare_corpus(
            inputs[0],
            tokenizer_type="sentencepiece",
            vocab_size=300,
            validation_fraction=0.2,
            cache_directory=corpora,
            progress=False,
        )
        tokenizer = load_tokenizer(corpus.tokenizer_type, corpus.tokenizer_path)
        text = corpus.validation_text_path.read_bytes() if corpus.validation_text_path else b""
        return str([tokens_of(corpus.train_prefix), tokens_of(corpus.validation_prefix or own), text, tokenizer.hash])

    def from_input(path: Path) -> Callable[[], str]:
        def read() -> str:
            target = folder / "again" / path.name
            shutil.rmtree(target.parent, ignore_errors=True)
            target.parent.mkdir()
            pipeline.preprocess(source_files(path), target, recipe, progress=False)
            return tokens_of(Path(f"{target}_text_document"))

        return read

    def encoded() -> str:
        return str(load_tokenizer("hf", folder / "hf").encode("w1 w2 document <eot>"))

    ordered(), prepared()
    written = [Path(f"{own}.{ending}") for ending in ("bin", "idx", "json", "sources.npy")]
    return [
        Target(written, lambda: tokens_of(own), own),
        Target([Path(f"{foreign}.{ending}") for ending in ("bin", "idx")], lambda: tokens_of(foreign)),
        Target(sorted(orders.glob("*/*")), ordered, orders),
        Target(sorted(corpora.glob("*/*")), prepared, corpora),
        Target([vocabulary], lambda: tokens_of(own), own),
        Target(_write_tokenizer(folder / "hf", vocabulary), encoded),
        *(Target([path], from_input(path)) for path in inputs),
    ]


def _write_tokenizer(folder: Path, vocabulary: Path) -> list[Path]:
    """Write a Hugging Face tokenizer. It has no checksum before token files are written with it."""
    import tokenizers

    folder.mkdir()
    tokenizers.BertWordPieceTokenizer(str(vocabulary)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "document"}))
    return sorted(folder.iterdir())


def _write_inputs(folder: Path) -> list[Path]:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder.mkdir()
    draw = random.Random(0)
    records = [
        {
            "text": "document " + " ".join(f"w{draw.randrange(40)}" for _ in range(draw.randrange(5, 60))) + " .",
            "meta": {"pile_set_name": draw.choice("abc")},
        }
        for _ in range(40)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    contents = {"a.jsonl": lines, "b.jsonl.gz": gzip.compress(lines), "c.jsonl.zst": zstandard.compress(lines)}
    contents["d.jsonl.zst"] = zstandard.ZstdCompressor(write_checksum=True).compress(lines)
    contents["e.txt"] = "\n".join(str(record["text"]) for record in records).encode()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, folder / "f.parquet")
    pyarrow.parquet.write_table(table, folder / "g.parquet", write_page_checksum=True, compression="zstd")
    return [*(folder / name for name in contents), folder / "f.parquet", folder / "g.parquet"]


def _digest(dataset: CausalDataset) -> str:
    digest = hashlib.sha256()
    for number in range(len(dataset)):
        digest.update(np.asarray(dataset[number]["tokens"]).tobytes())
    return digest.hexdigest()
