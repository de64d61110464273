"""Find the files of a corpus.

A corpus is ``"stdlib"`` (the source of the running interpreter's standard library), a path, a glob, a Hugging Face
dataset ``hf:NAME[:CONFIGURATION][:SPLIT]`` (streamed; the default split is train), or a list of these. The
suffix of a file selects how it is read:

    .jsonl .json            one JSON object per line, the text under a key; plain, .gz or .zst
    .parquet                one row per document, the text in a column
    .txt .md .py ...        any other suffix: the whole file is one document, UTF-8; plain, .gz or .zst

A folder means every .jsonl, .json, .parquet and .txt file in it, compressed or not. A folder that
``datasets.Dataset.save_to_disk`` wrote is read as that data set.
"""

from __future__ import annotations

import glob as globbing
import socket
import sys
import sysconfig
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Corpus = str | Path | Sequence[str | Path]

JSON_SUFFIXES = (".jsonl", ".json")
FOLDER_SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".txt")
COMPRESSED_SUFFIXES = (".gz", ".zst")
_WITHOUT_HUB = (
    "Without the hub, name a folder: save the data set there with datasets.load_dataset(...).save_to_disk(FOLDER) on a machine"
    " with a network."
)


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus.

    path: the file; the folder of a saved data set; ``hf:NAME...`` for a data set by name.
    key: identifies the file independently of the machine, if set.
    """

    path: Path
    format: str  # "json lines", "parquet", "text", "python", "saved dataset" or "named dataset"
    key: str | None = None

    @property
    def bytes(self) -> int:
        """Return the size on disk; 0 for a data set by name."""
        if self.format == "named dataset":
            return 0
        if self.format == "saved dataset":
            return sum(part.stat().st_size for part in self.path.glob("*.arrow"))
        return self.path.stat().st_size

    def identity(self) -> list[str | int]:
        """Return name, size and modification time (or data set version), which identify the content."""
        name = self.key or str(self.path if self.format == "named dataset" else self.path.resolve())
        if self.format == "named dataset":
            return [name, dataset_version(str(self.path))]
        state = self.path / "state.json" if self.format == "saved dataset" else self.path
        return [name, self.bytes, state.stat().st_mtime_ns]


def source_files(corpus: Corpus) -> list[SourceFile]:
    """Return the files of a corpus, in a fixed order and without duplicates.

    Raises FileNotFoundError for a path or glob without files, and ValueError for a folder without text files.
    """
    if not corpus:
        raise ValueError("the corpus names no files: set 'stdlib', a path, a glob or a list of them")
    if isinstance(corpus, (str, Path)):
        corpus = [corpus]
    if "" in corpus:
        raise ValueError("the corpus names an empty path: set 'stdlib', a path, a glob or a list of them")
    files_by_path: dict[Path, SourceFile] = {}
    for entry in corpus:
        for file in _expand(str(entry)):
            files_by_path.setdefault(file.path.resolve(), file)
    return list(files_by_path.values())


def shown_files(files: Sequence[SourceFile]) -> str:
    """Return the first file and the number of further ones, for messages."""
    return str(files[0].path) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def stdlib_files(package: str = "") -> list[SourceFile]:
    """Return the ``.py`` files of the standard library of this interpreter, without installed packages.

    package: limits them to one package (``"json"``). Raises ValueError if there are none.
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


def named_dataset(name: str) -> tuple[str, str | None, str]:
    """Return (name, configuration, split) of ``hf:NAME[:CONFIGURATION][:SPLIT]``. Raises ValueError for other forms."""
    words = name.removeprefix("hf:").split(":")
    if not words[0] or len(words) > 3:
        raise ValueError(f"the data set {name!r} must be hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIGURATION:SPLIT")
    return words[0], (words[1] or None) if len(words) == 3 else None, (words[-1] if len(words) > 1 else "") or "train"


def dataset_version(name: str) -> str:
    """Return the current version of a data set, as the library datasets reports it.

    It needs the network unless NAME is a folder. Raises ValueError if the hub cannot be reached or has no such data set.
    """
    dataset, configuration, _ = named_dataset(name)
    check_hub(name, dataset, _WITHOUT_HUB)
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset, configuration)
    except Exception as error:  # errors of datasets, of the network and of file formats
        raise ValueError(f"{name}: the library datasets cannot open it: {error}. {_WITHOUT_HUB}") from error
    return f"{builder.cache_dir}".removeprefix(str(builder._cache_dir_root))


def check_hub(name: str, dataset: str, advice: str) -> None:
    """Raise ValueError, which ends with the advice, if the hub cannot be reached. The library would retry for a minute.

    name: what the message names. dataset: a data set of the hub; a folder of this name needs no hub.
    """
    from huggingface_hub import constants

    if Path(dataset).exists() or constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"{name}: the hub {hub.netloc} cannot be reached ({error.strerror or error}). {advice}"
        ) from error


def _expand(entry: str) -> list[SourceFile]:
    if entry.startswith("hf:"):
        named_dataset(entry)
        return [SourceFile(Path(entry), "named dataset")]
    if entry == "stdlib" or entry.startswith("stdlib/"):
        return stdlib_files(entry.partition("/")[2])
    path = Path(entry).expanduser()
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        if not splits:
            raise ValueError(f"{path} is a saved data set without a split: save it again")
        raise ValueError(
            f"{path} is a saved data set with the splits {', '.join(splits)}: name one, as {path}/{splits[0]}"
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return [SourceFile(path, "saved dataset")]
    if path.is_dir():
        files = (p for p in path.rglob("*") if p.is_file())
        inside = sorted(p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts))
        chosen = [p for p in inside if _plain_suffix(p) in FOLDER_SUFFIXES]
        if not chosen:
            present = Counter(p.suffix or "(none)" for p in inside).most_common(5)
            seen = ", ".join(f"{count} {suffix}" for suffix, count in present) or "nothing"
            raise ValueError(
                f"the folder {path} holds no {', '.join(FOLDER_SUFFIXES)} file (plain, .gz or .zst); it holds {seen}."
                f" Name other text files by a glob, for example '{path}/**/*.md'."
            )
        return [_source_file(p) for p in chosen]
    if path.is_file():
        return [_source_file(path)]
    if globbing.has_magic(entry):
        matches = sorted(Path(p) for p in globbing.glob(str(path), recursive=True) if Path(p).is_file())
        if matches:
            return [_source_file(p) for p in matches]
        raise FileNotFoundError(f"no file matches the glob {entry}: correct it, and quote it against the shell")
    if path.exists():
        raise ValueError(
            f"the data path {entry} is neither a file nor a folder: write its text to a file, and name that file"
        )
    above = path.parent
    while not above.exists():
        above = above.parent
    raise FileNotFoundError(
        f"the data path {entry} does not exist (nearest existing folder: {above.resolve()}). A corpus is 'stdlib', a path, a"
        " glob or a list of them."
    )


def _source_file(path: Path) -> SourceFile:
    suffix = _plain_suffix(path)
    if suffix in JSON_SUFFIXES:
        return SourceFile(path, "json lines")
    return SourceFile(path, "parquet" if suffix == ".parquet" else "text")


def _plain_suffix(path: Path) -> str:
    name = path.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix
