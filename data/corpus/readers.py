"""Read the documents of the files of a corpus.

Reading has two steps, so that it can run in many processes. ``read_blocks`` (one process) splits files at line ends into
picklable blocks, in a fixed order. ``parse_block`` (any process) parses the documents of a block.
"""

from __future__ import annotations

import functools
import json
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checksum import Checksum
from .decompression import decompressed
from .discovery import SourceFile, named_dataset

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1000
SOURCE_KEY = "meta.pile_set_name"


@dataclass(frozen=True)
class Document:
    """One text and its origin. ``position``: line or row in the file, from 1; 0 for a whole file.

    ``key`` identifies the document for the split; None uses the text. ``source``: the collection that its record names.
    """

    text: str
    path: Path
    position: int = 0
    key: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Block:
    """A part of one file for ``parse_block``.

    first: number of the first line or row; row group of a parquet file.
    lines: about 1 MiB of raw lines; empty for text, parquet and saved data sets, which ``parse_block`` reads itself.
    file_bytes: bytes of the file that the block covers, for progress.
    """

    file: SourceFile
    first: int
    lines: tuple[bytes, ...]
    file_bytes: int


@dataclass
class Parsed:
    """Documents of a block; ``skipped`` counts by reason ("empty", "undecodable"); ``broken`` has file, line and reason."""

    documents: list[Document] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def read_blocks(files: Sequence[SourceFile], checksum: Checksum | None = None) -> Iterator[Block]:
    """Yield the blocks of the files in order, and add the file bytes to ``checksum`` (not for data sets of `datasets`).

    Raises ValueError that names file and position if a compressed file is damaged.
    """
    for file in files:
        if file.format == "json lines":
            yield from _line_blocks(file, checksum)
            continue
        if checksum is not None and not file.format.endswith("dataset"):
            with open(file.path, "rb") as content:
                while piece := content.read(BLOCK_BYTES):
                    checksum.update(piece)
        if file.format == "parquet":
            yield from _parquet_blocks(file)
        elif file.format == "saved dataset":
            yield from _saved_blocks(file)
        elif file.format == "named dataset":
            yield from _named_blocks(file)
        else:
            yield Block(file, 0, (), file.bytes)


def parse_block(block: Block, text_key: str = "text", source_key: str = SOURCE_KEY) -> Parsed:
    """Return the documents of a block. text_key: key or column of the text. source_key: of the source, with dots.

    Raises ValueError if a file of columns has no ``text_key``, and lists the columns that exist. Lines that do not parse or
    have no ``text_key`` are returned in ``broken``. Lone surrogates, which UTF-8 cannot encode, become U+FFFD.
    """
    parsed = Parsed()
    if block.file.format == "python":
        _parse_python(block.file, parsed)
    elif block.file.format == "text":
        _parse_text(block.file, parsed)
    elif block.file.format == "parquet":
        _parse_parquet(block, text_key, source_key, parsed)
    elif block.file.format == "saved dataset":
        _parse_saved(block, text_key, source_key, parsed)
    else:
        _parse_lines(block, text_key, source_key, parsed)
    return parsed


def read_documents(
    files: Sequence[SourceFile], text_key: str = "text", *, progress: Callable[[int], object] | None = None
) -> Iterator[Document]:
    """Yield all documents of the files, in this process. Raises ValueError at the first line that does not parse.

    progress: called with the file bytes of each block, after its documents.
    """
    for block in read_blocks(files):
        parsed = parse_block(block, text_key)
        if parsed.broken:
            raise ValueError(parsed.broken[0])
        yield from parsed.documents
        if progress is not None:
            progress(block.file_bytes)


def _line_blocks(file: SourceFile, checksum: Checksum | None) -> Iterator[Block]:
    first = 1
    lines: list[bytes] = []
    open_line: list[bytes] = []
    size = start = position = 0
    for chunk, position in decompressed(file.path, checksum, BLOCK_BYTES):
        pieces = chunk.split(b"\n")
        if len(pieces) > 1:
            lines.append(b"".join([*open_line, pieces[0]]))
            lines += pieces[1:-1]
            open_line = []
        open_line.append(pieces[-1])
        size += len(chunk)
        if size >= BLOCK_BYTES and lines:
            yield Block(file, first, tuple(lines), position - start)
            first += len(lines)
            lines, size, start = [], 0, position
    last = b"".join(open_line)
    if last:
        lines.append(last)
    if lines:
        yield Block(file, first, tuple(lines), position - start)


def _parquet_blocks(file: SourceFile) -> Iterator[Block]:
    groups = open_parquet(file.path).metadata.num_row_groups
    for group in range(groups):
        yield Block(file, group, (), file.bytes // groups)


def _saved_blocks(file: SourceFile) -> Iterator[Block]:
    rows = len(open_saved(file.path))
    for first in range(0, rows, BLOCK_ROWS):
        yield Block(file, first, (), file.bytes * min(BLOCK_ROWS, rows - first) // rows)


def _named_blocks(file: SourceFile) -> Iterator[Block]:
    """Yield rows from the network as lines of JSON."""
    lines: list[bytes] = []
    size, first = 0, 1
    for row in _named_rows(file):
        lines.append(json.dumps(row, default=str).encode())
        size += len(lines[-1])
        if size >= BLOCK_BYTES:
            yield Block(file, first, tuple(lines), size)
            first += len(lines)
            lines, size = [], 0
    if lines:
        yield Block(file, first, tuple(lines), size)


def _named_rows(file: SourceFile) -> Iterator[dict[str, Any]]:
    import datasets

    name, configuration, split = named_dataset(str(file.path))
    count = 0
    try:
        for row in datasets.load_dataset(name, configuration, split=split, streaming=True):
            yield row
            count += 1
    except Exception as error:  # errors of datasets, of the network and of file formats
        raise ValueError(
            f"{file.path}: the library datasets cannot read it after {count:,} rows: {error}. Give the same command again"
        ) from error


def open_parquet(path: Path) -> Any:
    """Return the opened file. Raises ValueError if it is not a complete parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a complete parquet file: {error}. Copy or download it again") from error


@functools.lru_cache(maxsize=4)
def open_saved(path: Path) -> Any:
    """Return the data set of a folder that `datasets` saved. Raises ValueError if it is not complete."""
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:
        raise ValueError(f"{path} is not a complete saved data set: {error}. Save it again") from error


def _parse_parquet(block: Block, text_key: str, source_key: str, parsed: Parsed) -> None:
    import pyarrow

    parquet = open_parquet(block.file.path)
    names = parquet.schema_arrow.names
    if text_key not in names:
        raise ValueError(_wrong_key(str(block.file.path), text_key, names))
    first_row = sum(parquet.metadata.row_group(group).num_rows for group in range(block.first))
    columns = [text_key, *({source_key.split(".")[0]} & set(names) - {text_key})]
    try:
        rows = _rows(parquet.read_row_group(block.first, columns=columns))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{block.file.path} is damaged in row group {block.first + 1}: {error}. Copy it again"
        ) from error
    _add_rows(rows, block.file, first_row, text_key, source_key, parsed)


def _parse_saved(block: Block, text_key: str, source_key: str, parsed: Parsed) -> None:
    dataset = open_saved(block.file.path)
    if text_key not in dataset.column_names:
        raise ValueError(_wrong_key(str(block.file.path), text_key, dataset.column_names))
    end = min(block.first + BLOCK_ROWS, len(dataset))
    columns = [text_key, *({source_key.split(".")[0]} & set(dataset.column_names) - {text_key})]
    try:
        rows = _rows(dataset.select_columns(columns).with_format("arrow")[block.first : end])
    except Exception as error:  # of datasets and of pyarrow
        raise ValueError(
            f"{block.file.path} is damaged in rows {block.first + 1} to {end}: {error}. Copy it again"
        ) from error
    _add_rows(rows, block.file, block.first, text_key, source_key, parsed)


def _rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table after validation: offsets of a damaged file may point outside of its memory."""
    table.validate(full=True)
    return table.to_pylist()


def _add_rows(
    rows: list[dict[str, Any]], file: SourceFile, first: int, text_key: str, source_key: str, parsed: Parsed
) -> None:
    for number, row in enumerate(rows, first + 1):
        text = row[text_key]
        if isinstance(text, str):
            _add(Document(text, file.path, number, source=_source(row, source_key)), parsed)
        else:
            parsed.broken.append(f"{file.path} row {number}: {text_key!r} holds {_json_name(text)}, not a text")


def _parse_lines(block: Block, text_key: str, source_key: str, parsed: Parsed) -> None:
    unit = "row" if block.file.format == "named dataset" else "line"
    for number, line in enumerate(block.lines, block.first):
        if not line.strip():
            continue
        where = f"{block.file.path} {unit} {number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            parsed.broken.append(f"{where}: not valid UTF-8 at byte {error.start} of the line")
            continue
        except json.JSONDecodeError as error:
            hint = " (a file of JSON lines has one object per line)" if number == 1 else ""
            parsed.broken.append(f"{where}: not valid JSON at character {error.pos}: {error.msg}{hint}")
            continue
        except (ValueError, RecursionError) as error:  # a number or a nesting beyond the limits of Python
            parsed.broken.append(f"{where}: JSON beyond the limits of Python: {error}")
            continue
        if not isinstance(record, dict):
            parsed.broken.append(f"{where}: holds {_json_name(record)}, not an object")
        elif text_key not in record:
            parsed.broken.append(_wrong_key(where, text_key, list(record)))
        elif not isinstance(record[text_key], str):
            parsed.broken.append(f"{where}: {text_key!r} holds {_json_name(record[text_key])}, not a text")
        else:
            source = _source(record, source_key)
            _add(Document(record[text_key], block.file.path, number, source=source), parsed)


def _source(record: Any, key: str) -> str | None:
    for name in key.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return _encodable(record) if isinstance(record, str) else None


def _parse_python(file: SourceFile, parsed: Parsed) -> None:
    try:
        with tokenize.open(file.path) as handle:
            text = handle.read()
    except (SyntaxError, UnicodeDecodeError):
        parsed.skipped["undecodable"] += 1
        return
    _add(Document(text, file.path, key=file.key), parsed)


def _parse_text(file: SourceFile, parsed: Parsed) -> None:
    raw = b"".join(piece for piece, _ in decompressed(file.path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        parsed.broken.append(
            f"{file.path}: not valid UTF-8 at byte {error.start:,} (line {line:,}). Text files must be UTF-8: convert"
            " the file, or remove it from the corpus."
        )
        return
    _add(Document(text, file.path), parsed)


def _add(document: Document, parsed: Parsed) -> None:
    text = document.text
    if not text or text.isspace():
        parsed.skipped["empty"] += 1
        return
    if (encodable := _encodable(text)) is not text:
        document = replace(document, text=encodable)
    parsed.documents.append(document)


def _encodable(text: str) -> str:
    """Return the text with U+FFFD in place of each lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _wrong_key(where: str, text_key: str, keys: Sequence[str]) -> str:
    return (
        f"{where}: no key {text_key!r}; the keys there are {', '.join(keys) or 'none'}; name the one that holds the text"
        " (data.text_key in a configuration; on the command line --jsonl-keys, --jsonl-key or --text-key)"
    )


def _json_name(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    names |= {bytes: "bytes", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
