"""Read and write token files ``.bin`` / ``.idx`` in the format of Megatron-LM and GPT-NeoX (``MMapIndexedDataset``).

Little-endian, no padding. The ``.idx`` file is

- 9 bytes: magic ``MMIDIDX`` and two zero bytes
- uint64: version, 1
- uint8: code of the token type
- uint64: N, the number of sequences
- uint64: D, the number of documents + 1
- int32[N]: number of tokens of each sequence
- int64[N]: byte offset of each sequence in ``.bin``
- int64[D]: sequence at which each document starts; the first is 0, the last is N

and ``.bin`` holds the concatenated tokens of the sequences. A *prefix* is the path without extension.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import struct
import warnings
from array import array
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from .atomic_io import naming_file_in_errors, put_in_place, sync, temporary_path
from .checksum import Checksum, DamagedDataError, Record, difference
from .index_checks import REMEDY, check_documents, check_length, check_sequences
from .manifest import read_manifest

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LONGEST_SEQUENCE = 2**31 - 1

# File identities whose index has been checked, so that a process checks each file once.
_checked: set[str] = set()

# Codes 6 and 7 are floats; Megatron-LM and GPT-NeoX assign them differently.
CODE_TO_DTYPE: dict[int, np.dtype] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
DTYPE_TO_CODE = {dtype: code for code, dtype in CODE_TO_DTYPE.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the token type as GPT-NeoX chooses it: uint16 for a vocabulary under 65,500, otherwise int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index of a prefix."""
    return Path(f"{prefix}.idx")


def file_identity(prefix: str | Path) -> list[list[str | int]]:
    """Return names, sizes and modification times of a pair of token files. Part of the key of cached sample indices."""
    states = [(path, path.stat()) for path in (bin_path(prefix), idx_path(prefix))]
    return [[str(path.resolve()), state.st_size, state.st_mtime_ns] for path, state in states]


class IndexedWriter:
    """Write a pair of token files, one document at a time; memory grows with the number of sequences only.

    Both files are written under temporary names and renamed when the ``with`` block succeeds. After an exception nothing is
    left. ``checksums`` then holds the records of both files, for the manifest.

        with IndexedWriter("corpus/train_text_document", token_dtype(tokenizer.vocab_size)) as writer:
            writer.add_document(tokens)
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).itemsize > 1 else np.dtype(dtype)
        if self.dtype not in DTYPE_TO_CODE:
            allowed = ", ".join(str(d) for d in DTYPE_TO_CODE)
            raise ValueError(f"{self.prefix}: tokens cannot be stored as {dtype}; allowed: {allowed}")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._sizes = array("i")
        self._document_starts = array("q", [0])
        self._temporary_bin = temporary_path(bin_path(self.prefix))
        self._temporary_idx = temporary_path(idx_path(self.prefix))
        self._checksum = Checksum()
        self.checksums: dict[str, Record] = {}
        self._file = open(self._temporary_bin, "wb")  # noqa: SIM115 - closed by finish() or abandon()

    def add_document(self, *sequences: NDArray) -> None:
        """Append one document of one or several sequences (sentences), each of tokens [n].

        Raises ValueError for tokens outside of the range of the type, and for sequences of 2^31 or more tokens.
        """
        for sequence in sequences:
            tokens = np.asarray(sequence)
            self._check_longest(len(tokens))
            self._write(tokens)
            self._sizes.append(len(tokens))
        self._document_starts.append(len(self._sizes))

    def add_documents(self, tokens: NDArray, lengths: NDArray[np.int64]) -> None:
        """Append documents of one sequence each: concatenated tokens [sum of lengths]. Raises as `add_document`."""
        self._check_longest(int(lengths.max(initial=0)))
        self._write(tokens)
        first = len(self._sizes)
        self._sizes.frombytes(lengths.astype(np.int32).tobytes())
        self._document_starts.frombytes(np.arange(first + 1, first + len(lengths) + 1, dtype=np.int64).tobytes())

    def _check_longest(self, length: int) -> None:
        if length > LONGEST_SEQUENCE:
            raise ValueError(
                f"{self.prefix}: document {len(self._document_starts) - 1} has {length:,} tokens; the format holds at"
                f" most {LONGEST_SEQUENCE:,} in one sequence. Split the document in the input."
            )

    def _write(self, tokens: NDArray) -> None:
        limits = np.iinfo(self.dtype)
        if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
            raise ValueError(
                f"{self.prefix}: document {len(self._document_starts) - 1} holds token"
                f" {int(tokens.max() if tokens.max() > limits.max else tokens.min())}, outside of {self.dtype}"
                f" ({limits.min} to {limits.max}): the type was chosen for another vocabulary size; use token_dtype(vocab_size)"
            )
        self._write_bytes(tokens.astype(self.dtype, copy=False).tobytes())

    def _write_bytes(self, content: bytes) -> None:
        self._checksum.update(content)
        with naming_file_in_errors(bin_path(self.prefix)):
            self._file.write(content)

    def add_file(self, prefix: str | Path, record: Record | None = None) -> None:
        """Append all documents of another pair of files with their boundaries.

        record: checksum record of its .bin file. Raises ValueError if the token types differ, and DamagedDataError if the
        content does not match the record.
        """
        other = IndexedTokens(prefix)
        if other.dtype != self.dtype:
            raise ValueError(
                f"{prefix} holds {other.dtype} and {self.prefix} is written as {self.dtype}: files to be merged must"
                " come from one tokenizer"
            )
        first = len(self._sizes)
        if record is not None and (problem := difference(bin_path(prefix), record, whole=True)):
            raise DamagedDataError(f"{problem}. Remove {other.prefix.parent} and run the same command again.")
        if other.is_contiguous:
            with open(bin_path(prefix), "rb") as tokens:
                while piece := tokens.read(1 << 22):
                    self._write_bytes(piece)
        else:
            for sequence in range(len(other)):
                self._write_bytes(other[sequence].tobytes())
        self._sizes.frombytes(other.sizes.tobytes())
        self._document_starts.frombytes((other.document_starts[1:] + first).tobytes())

    @property
    def num_documents(self) -> int:
        return len(self._document_starts) - 1

    def finish(self) -> None:
        """Write the index and put both files in place. Called by the end of the ``with`` block."""
        with naming_file_in_errors(bin_path(self.prefix)):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        sizes = np.frombuffer(self._sizes, dtype=np.int32) if self._sizes else np.zeros(0, np.int32)
        pointers = np.zeros(len(sizes), np.int64)
        np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self.dtype.itemsize
        starts = np.frombuffer(self._document_starts, dtype=np.int64)
        index_checksum = Checksum()
        with naming_file_in_errors(idx_path(self.prefix)), open(self._temporary_idx, "wb") as index:
            for content in (
                HEADER.pack(MAGIC, VERSION, DTYPE_TO_CODE[self.dtype], len(sizes), len(starts)),
                sizes.astype("<i4", copy=False).tobytes(),
                pointers.astype("<i8", copy=False).tobytes(),
                starts.astype("<i8", copy=False).tobytes(),
            ):
                index_checksum.update(content)
                index.write(content)
            index.flush()
            os.fsync(index.fileno())
        # Remove the old index first and flush that: an old index next to a new .bin would look complete.
        if idx_path(self.prefix).exists():
            idx_path(self.prefix).unlink()
            sync(self.prefix.parent)
        os.replace(self._temporary_bin, bin_path(self.prefix))
        put_in_place(self._temporary_idx, idx_path(self.prefix))
        self.checksums = {"bin": self._checksum.record(), "idx": index_checksum.record()}

    def abandon(self) -> None:
        """Close and remove the temporary files."""
        with contextlib.suppress(OSError):  # on a full disk the buffer cannot be flushed
            self._file.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise


class IndexedTokens:
    """Open a pair of token files, memory-mapped. The index is read once and checked.

    sizes: int32 [N], tokens per sequence. pointers: int64 [N], byte offsets. document_starts: int64 [D].
    ``tokens[i]`` is a view of the tokens of sequence i. Without documents in the index (GPT-NeoX's merge_datasets), each
    sequence is a document, with a warning. Files up to `checksum.ALWAYS_CHECKED` bytes are compared with the checksums of
    the manifest. If ``vocab_size`` is set, reading a token outside of it raises DamagedDataError.

    Raises FileNotFoundError if a file is missing, and ValueError if the files do not follow the format or were damaged. The
    message names the byte.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.vocab_size: int | None = None
        index_file, token_file = idx_path(prefix), bin_path(prefix)
        for path in (index_file, token_file):
            if not path.is_file():
                raise FileNotFoundError(_missing(self.prefix, path))
        self.dtype, count, boundaries = _read_header(index_file)
        sizes_at = HEADER.size
        pointers_at = sizes_at + 4 * count
        starts_at = pointers_at + 8 * count
        end = starts_at + 8 * boundaries
        if count and index_file.stat().st_size == end + count:
            raise ValueError(
                f"{index_file} is of a multimodal corpus: after {count:,} sequences and {boundaries:,} boundaries it holds"
                " a mode for each sequence. Only text is supported: write the token files again without modes."
            )
        check_length(index_file, end, f"{count:,} sequences and {boundaries:,} boundaries")
        if count == 0:
            raise ValueError(
                f"{index_file} lists no sequences: its input held no text, usually because of a wrong text key. Write the"
                " token files again (python -m tools.preprocess_data ... --jsonl-keys KEY)."
            )
        self.sizes: NDArray[np.int32] = _mapped(index_file, "<i4", sizes_at, count)
        self.pointers: NDArray[np.int64] = _mapped(index_file, "<i8", pointers_at, count)
        self.document_starts: NDArray[np.int64] = _mapped(index_file, "<i8", starts_at, boundaries)
        self._check_once(pointers_at, starts_at)
        if boundaries == 1:
            warnings.warn(
                f"{index_file} marks no documents (its document index is [0], as GPT-NeoX's merge_datasets writes it):"
                f" each of its {count:,} sequences is taken as a document",
                stacklevel=2,
            )
            self.document_starts = np.arange(count + 1)
        self._tokens: NDArray[np.uint8] = _mapped(token_file, "u1", 0, token_file.stat().st_size)

    def _check_once(self, pointers_at: int, starts_at: int) -> None:
        """Check the index once per process and file identity, and compare both files with the manifest."""
        state = repr(file_identity(self.prefix))
        index_file, token_file = idx_path(self.prefix), bin_path(self.prefix)
        if state not in _checked:
            check_documents(index_file, self.document_starts, len(self.sizes), starts_at)
            check_sequences(
                index_file, token_file, self.sizes, self.pointers, self.dtype.itemsize, HEADER.size, pointers_at
            )
            _checked.add(state)
        checksums = (read_manifest(self.prefix) or {}).get("checksums", {})
        for ending, path in (("bin", token_file), ("idx", index_file)):
            if ending in checksums and (problem := difference(path, checksums[ending])):
                raise DamagedDataError(f"{problem}. {REMEDY} If it was replaced on purpose, remove {self.prefix}.json.")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> NDArray:
        return self.read(sequence)

    def read(self, sequence: int, offset: int = 0, count: int | None = None) -> NDArray:
        """Return a view of the tokens [offset, offset + count) of a sequence, clipped at its end. count None: to the end.

        Raises IndexError for a sequence that does not exist, and DamagedDataError for a token outside of ``vocab_size``.
        """
        if not 0 <= sequence < len(self.sizes):
            raise IndexError(f"{self.prefix}: sequence {sequence} of {len(self.sizes)}")
        size = int(self.sizes[sequence])
        offset = min(offset, size)
        remaining = size - offset
        length = remaining if count is None else min(count, remaining)
        start = int(self.pointers[sequence]) + offset * self.dtype.itemsize
        end = start + length * self.dtype.itemsize
        if not 0 <= start <= end <= len(self._tokens):
            raise ValueError(
                f"{idx_path(self.prefix)} is damaged: it places sequence {sequence} at bytes {start:,} to {end:,} of a"
                f" {len(self._tokens):,}-byte .bin"
            )
        tokens = self._tokens[start:end].view(self.dtype)
        if self.vocab_size is not None and length and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            wrong = int(((tokens < 0) | (tokens >= self.vocab_size)).argmax())
            raise DamagedDataError(
                f"{bin_path(self.prefix)} is damaged at byte {start + wrong * self.dtype.itemsize:,}, or was written with"
                f" another tokenizer: it holds token {int(tokens[wrong]):,}; ids below {self.vocab_size:,} are allowed. Compare"
                f" it with its checksum: python -m tools.inspect_data {self.prefix} --verify"
            )
        return tokens

    @property
    def is_contiguous(self) -> bool:
        """Return whether each sequence begins where the previous one ends, as in every file of this project."""
        ends = self.pointers + self.sizes.astype(np.int64) * self.dtype.itemsize
        return int(self.pointers[0]) == 0 and bool((ends[:-1] == self.pointers[1:]).all())

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head[: len(OLD_MAGIC)] == OLD_MAGIC:
        raise ValueError(
            f"{path} is in the old TNTIDX format (--dataset-impl lazy or cached). Write the token files again with"
            " python -m tools.preprocess_data, or with --dataset-impl mmap in GPT-NeoX."
        )
    _check_at_least(path, len(head), HEADER.size)
    magic, version, code, count, boundaries = HEADER.unpack(head)
    if magic != MAGIC:
        raise ValueError(
            f"{path} is not a token index: it starts with {magic!r}, not with {MAGIC!r}. Write the token files again"
        )
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version} of the format; version {VERSION} alone is allowed. Write the token files again"
        )
    if code in (6, 7):
        raise ValueError(
            f"{path} has type code {code}, a float (Megatron-LM and GPT-NeoX disagree on which one): tokens are"
            " integers. Write the token files again"
        )
    if code not in CODE_TO_DTYPE:
        allowed = ", ".join(f"{c} {d}" for c, d in CODE_TO_DTYPE.items())
        raise ValueError(f"{path} has type code {code}; allowed: {allowed}. Write the token files again")
    return CODE_TO_DTYPE[code], count, boundaries


def _check_at_least(path: Path, have: int, need: int) -> None:
    if have == 0:
        raise ValueError(f"{path} is empty, because its writer was stopped. Write the token files again.")
    if have < need:
        raise ValueError(
            f"{path} is {have:,} bytes long, {need - have:,} bytes short of its header of {need}. Write the token files again."
        )


def _mapped(path: Path, dtype: str, offset: int, count: int) -> NDArray:
    # A plain view, because slicing numpy's memmap class is several times slower.
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def _missing(prefix: Path, path: Path) -> str:
    if prefix.suffix in (".bin", ".idx") and prefix.is_file():
        return f"{path} does not exist. Name the token files without extension: {prefix.with_suffix('')}"
    present = sorted({str(p.with_suffix("")) for p in prefix.parent.glob("*.idx")}) if prefix.parent.is_dir() else []
    similar = difflib.get_close_matches(str(prefix), present, n=3, cutoff=0.4) or present[:3]
    hint = (
        f" Beside it: {', '.join(similar)}."
        if similar
        else f" The folder {prefix.parent.absolute()} holds no token files."
    )
    return (
        f"{path} does not exist.{hint} A prefix names a .bin and an .idx file without extension. Write them with python"
        " -m tools.preprocess_data; for a small sample use make data-pile-sample, data-c4-sample or data-text-sample"
        " (docs/guide/data.md)."
    )
