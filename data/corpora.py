"""Raw text: which files a corpus names, and the documents in them.

A corpus is ``"stdlib"`` (the source of the running interpreter's standard library), a path, a glob, or a list of these.
A file's suffix says how it is read:

    .jsonl .json            one JSON object a line, the text under a key
    .txt .md .py ...        any other suffix: the whole file is one document, UTF-8

each plain, ``.gz`` or ``.zst``. A folder stands for every .jsonl, .json and .txt in it, compressed or not.

Reading is in two steps, so that it can be spread over processes: ``read_blocks`` (one process: finds line ends, about
as fast as decompression) yields picklable blocks in a fixed order, and ``parse_block`` turns a block into documents.
"""

from __future__ import annotations

import glob as globbing
import json
import sys
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Corpus = str | Path | Sequence[str | Path]

JSON_SUFFIXES = (".jsonl", ".json")
FOLDER_SUFFIXES = (*JSON_SUFFIXES, ".txt")
COMPRESSED_SUFFIXES = (".gz", ".zst")
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus. ``key`` names it inside the corpus where the folder may differ from machine to machine."""

    path: Path
    format: str  # "json lines", "text" or "python"
    key: str | None = None


@dataclass(frozen=True)
class Document:
    """One text and where it came from: ``position`` is the line of its file (from 1), 0 for a whole file.

    ``key`` identifies the document when it is split into train and validation; without one its text does.
    """

    text: str
    path: Path
    position: int = 0
    key: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Block:
    """About 1 MiB of raw lines of one file, or one whole file (no lines) that ``parse_block`` opens."""

    file: SourceFile
    first_line: int = 0
    lines: tuple[bytes, ...] = ()


@dataclass
class Parsed:
    """What a block held: ``skipped`` counts by reason ("empty", "undecodable"); ``broken`` names file, line, reason."""

    documents: list[Document] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def source_files(corpus: Corpus) -> list[SourceFile]:
    """The files of a corpus, in a fixed order and each once.

    Raises FileNotFoundError for a path or glob that names nothing and ValueError for a folder without text files.
    """
    if isinstance(corpus, (str, Path)):
        corpus = [corpus]
    if not corpus:
        raise ValueError("the corpus names no files: give 'stdlib', a path, a glob or a list of them")
    found: dict[Path, SourceFile] = {}
    for entry in corpus:
        for file in _expand(str(entry)):
            found.setdefault(file.path.resolve(), file)
    return list(found.values())


def read_blocks(files: Sequence[SourceFile]) -> Iterator[Block]:
    """Blocks of the files in order. Raises ValueError naming file and position where a compressed file is cut short."""
    for file in files:
        if file.format == "json lines":
            yield from _line_blocks(file)
        else:
            yield Block(file)


def parse_block(block: Block, text_key: str = "text") -> Parsed:
    """The documents of a block.

    Raises ValueError when no line of the block has the key, listing the keys that are there; single lines that do not
    parse are returned in ``broken``, for the caller to stop at or to count. Lone surrogates, which JSON can spell and
    UTF-8 cannot, become U+FFFD.
    """
    parsed = Parsed()
    if block.file.format == "python":
        _parse_python(block.file, parsed)
    elif block.file.format == "text":
        _parse_text(block.file, parsed)
    else:
        _parse_lines(block, text_key, parsed)
    return parsed


def read_documents(files: Sequence[SourceFile], text_key: str = "text") -> Iterator[Document]:
    """All documents of the files, in this process. Raises ValueError at the first line that does not parse."""
    for block in read_blocks(files):
        parsed = parse_block(block, text_key)
        if parsed.broken:
            raise ValueError(parsed.broken[0])
        yield from parsed.documents


def stdlib_files(package: str = "") -> list[SourceFile]:
    """The ``.py`` files of the running interpreter's standard library, without what pip put there.

    ``package`` limits them to one package (``"json"``). Raises ValueError when there are none, as in interpreters that
    carry compiled files only.
    """
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__"}
    files = [
        SourceFile(path, "python", path.relative_to(root).as_posix())
        for path in (root / package).rglob("*.py")
        if not outside & set(path.relative_to(root).parts)
    ]
    if not files:
        raise ValueError(
            f"there are no .py files in {root / package}: this interpreter ({sys.executable}) has no readable standard"
            " library source. Name text or JSON-lines files instead."
        )
    return sorted(files, key=lambda file: file.key or "")


def _expand(entry: str) -> list[SourceFile]:
    if entry == "stdlib" or entry.startswith("stdlib/"):
        return stdlib_files(entry.partition("/")[2])
    path = Path(entry).expanduser()
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
        chosen = [p for p in inside if _plain_suffix(p) in FOLDER_SUFFIXES]
        if not chosen:
            present = Counter(p.suffix or "(none)" for p in inside).most_common(5)
            seen = ", ".join(f"{count} {suffix}" for suffix, count in present) or "nothing"
            raise ValueError(
                f"the folder {path} holds no {', '.join(FOLDER_SUFFIXES)} file, plain, .gz or .zst; it holds {seen}."
                f" Other text files are taken through a glob, for example '{path}/**/*.md'."
            )
        return [_source_file(p) for p in chosen]
    if path.is_file():
        return [_source_file(path)]
    if globbing.has_magic(entry):
        matches = sorted(Path(p) for p in globbing.glob(str(path), recursive=True) if Path(p).is_file())
        if matches:
            return [_source_file(p) for p in matches]
        raise FileNotFoundError(f"no file matches the glob {entry}")
    above = path.parent
    while not above.exists():
        above = above.parent
    raise FileNotFoundError(
        f"the data path {entry} does not exist (what exists of it: {above.resolve()}). A corpus is 'stdlib', a path, a"
        " glob or a list of them."
    )


def _source_file(path: Path) -> SourceFile:
    return SourceFile(path, "json lines" if _plain_suffix(path) in JSON_SUFFIXES else "text")


def _plain_suffix(path: Path) -> str:
    name = path.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _line_blocks(file: SourceFile) -> Iterator[Block]:
    rest = b""
    line = 1
    lines: list[bytes] = []
    size = 0
    for chunk in _decompressed(file.path):
        pieces = (rest + chunk).split(b"\n") if b"\n" in chunk else [rest + chunk]
        rest = pieces.pop()
        lines += pieces
        size += len(chunk)
        if size >= BLOCK_BYTES and lines:
            yield Block(file, line, tuple(lines))
            line += len(lines)
            lines, size = [], 0
    if rest:
        lines.append(rest)
    if lines:
        yield Block(file, line, tuple(lines))


def _decompressed(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed by its suffix; several gzip members or zstd frames in a row are one stream."""
    if path.suffix.lower() == ".gz":

        def start() -> Any:
            return zlib.decompressobj(wbits=31)

    elif path.suffix.lower() == ".zst":
        import zstandard

        def start() -> Any:
            return zstandard.ZstdDecompressor().decompressobj()

    else:
        with open(path, "rb") as file:
            while chunk := file.read(BLOCK_BYTES):
                yield chunk
        return

    stream = start()
    fed = False
    done = 0
    with open(path, "rb") as file:
        while chunk := file.read(BLOCK_BYTES // 4):
            while chunk:
                if stream.eof:
                    stream, fed = start(), False
                    # gzip files may be padded with zeros after the last member.
                    chunk = chunk.lstrip(b"\0")
                    if not chunk:
                        break
                try:
                    out = stream.decompress(chunk)
                except Exception as error:
                    kind = "gzip" if path.suffix.lower() == ".gz" else "zstd"
                    raise ValueError(
                        f"{path} is damaged: no {kind} data after byte {file.tell() - len(chunk):,} ({error});"
                        f" {done:,} bytes of text came before"
                    ) from error
                fed = True
                chunk = stream.unused_data if stream.eof else b""
                done += len(out)
                if out:
                    yield out
    if fed and not stream.eof:
        raise ValueError(
            f"{path} is cut short: it ends at byte {path.stat().st_size:,} in the middle of its compressed data;"
            f" {done:,} bytes of text came before. Copy or download it again."
        )


def _parse_lines(block: Block, text_key: str, parsed: Parsed) -> None:
    keys_seen: Counter[str] = Counter()
    first_without_key = 0
    for number, line in enumerate(block.lines, block.first_line):
        if not line.strip():
            continue
        where = f"{block.file.path} line {number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            parsed.broken.append(f"{where}: not valid UTF-8 at byte {error.start} of the line")
            continue
        except json.JSONDecodeError as error:
            hint = " (a file of JSON lines has one object a line)" if number == 1 else ""
            parsed.broken.append(f"{where}: not valid JSON at character {error.pos}: {error.msg}{hint}")
            continue
        if not isinstance(record, dict):
            parsed.broken.append(f"{where}: holds {_json_name(record)}, not an object")
        elif text_key not in record:
            keys_seen.update(record.keys())
            first_without_key = first_without_key or number
            parsed.broken.append(f"{where}: no key {text_key!r}; its keys are {', '.join(record) or 'none'}")
        elif not isinstance(record[text_key], str):
            parsed.broken.append(f"{where}: {text_key!r} holds {_json_name(record[text_key])}, not a text")
        else:
            meta = record.get("meta")
            source = meta.get("pile_set_name") if isinstance(meta, dict) else None
            _add(Document(record[text_key], block.file.path, number, source=source), parsed)
    if first_without_key and not parsed.documents and not parsed.skipped:
        raise ValueError(
            f"{block.file.path} line {first_without_key}: no key {text_key!r}; the keys there are"
            f" {', '.join(key for key, _ in keys_seen.most_common(20)) or 'none'}. Set the text key to the one that"
            " holds the text (data.text_key in a config, --jsonl-keys in tools.preprocess_data)."
        )


def _parse_python(file: SourceFile, parsed: Parsed) -> None:
    try:
        with tokenize.open(file.path) as handle:
            text = handle.read()
    except (SyntaxError, UnicodeDecodeError):
        parsed.skipped["undecodable"] += 1
        return
    _add(Document(text, file.path, key=file.key), parsed)


def _parse_text(file: SourceFile, parsed: Parsed) -> None:
    raw = b"".join(_decompressed(file.path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        parsed.broken.append(
            f"{file.path}: not valid UTF-8 at byte {error.start:,} (line {line:,}). Text files must be UTF-8: convert"
            " it, or leave it out."
        )
        return
    _add(Document(text, file.path), parsed)


def _add(document: Document, parsed: Parsed) -> None:
    text = document.text
    if not text or text.isspace():
        parsed.skipped["empty"] += 1
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        document = Document(text, document.path, document.position, document.key, document.source)
    parsed.documents.append(document)


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return names[type(value)]
