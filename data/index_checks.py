"""Check the arithmetic of a token index (``.idx``) when it is opened, so that no sample fails during a run."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .checksum import DamagedDataError

REMEDY = "Copy it again, or write the token files again with python -m tools.preprocess_data ... --overwrite."
_AT_ONCE = 2**20  # entries, so that memory stays bounded


def check_length(path: Path, need: int, what: str) -> None:
    """Raise ValueError unless a file has exactly the ``need`` bytes that ``what`` requires."""
    have = path.stat().st_size
    if have == 0 and need > 0:
        raise ValueError(f"{path} is empty; {what} need {need:,} bytes. Write the token files again.")
    if have < need:
        raise ValueError(
            f"{path} is {need - have:,} bytes short: it has {have:,}, {what} need {need:,}. It was truncated while being"
            " written or copied: copy it again, or write the token files again."
        )
    if have > need:
        raise ValueError(
            f"{path} is {have - need:,} bytes too long: it has {have:,}, {what} need {need:,}. The .bin and .idx files"
            " do not belong together."
        )


def check_documents(path: Path, starts: NDArray[np.int64], count: int, at: int) -> None:
    """Raise ValueError unless the document index rises from 0 to ``count``, or is ``[0]``.

    starts: int64 [documents + 1], the first sequence of each document. at: byte offset of the array in the file.
    """
    if not len(starts):
        raise ValueError(f"{path} has no document index. Write the token files again with document boundaries.")
    if len(starts) == 1 and starts[0] == 0:
        return
    for first in range(0, len(starts), _AT_ONCE):
        part = starts[max(0, first - 1) : first + _AT_ONCE]
        falls = part[1:] < part[:-1]
        if first == 0:
            falls = np.concatenate([[part[0] != 0], falls])
        if falls.any():
            number = first + int(falls.argmax())
            what = f"begins document {number:,} at sequence {int(starts[number]):,}"
            raise _damaged(path, at + 8 * number, what)
    if starts[-1] > count:
        what = f"ends the last document at sequence {int(starts[-1]):,} of {count:,}"
        raise _damaged(path, at + 8 * (len(starts) - 1), what)
    if starts[-1] < count:
        raise ValueError(
            f"{path} ends its documents at sequence {int(starts[-1]):,} of {count:,}, so the remaining sequences belong"
            " to no document: its writer did not mark the end of documents, or the file is damaged. Write the token"
            " files again with document boundaries."
        )


def check_sequences(
    index_file: Path,
    token_file: Path,
    sizes: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    sizes_at: int,
    pointers_at: int,
) -> None:
    """Raise ValueError unless the sequences are contiguous in .bin and end where it ends. Warn about a gap.

    Args:
        sizes, pointers: tokens and byte offset of each sequence.
        token_bytes: bytes per token.
        sizes_at, pointers_at: byte offsets of both arrays in the index.
    """
    end = 0
    gap: tuple[int, int] | None = None
    for first in range(0, len(sizes), _AT_ONCE):
        lengths = sizes[first : first + _AT_ONCE].astype(np.int64)
        begins = pointers[first : first + _AT_ONCE]
        if (lengths < 0).any():
            number = int((lengths < 0).argmax())
            what = f"gives sequence {first + number:,} {lengths[number]:,} tokens"
            raise _damaged(index_file, sizes_at + 4 * (first + number), what)
        ends = np.minimum(begins, 2**62) + lengths * token_bytes
        expected = np.concatenate([[end], ends[:-1]])
        if (begins < expected).any():
            number = int((begins < expected).argmax())
            what = (
                f"places sequence {first + number:,} at byte {begins[number]:,} of .bin, but the previous one ends at byte"
                f" {expected[number]:,}"
            )
            raise _damaged(index_file, pointers_at + 8 * (first + number), what)
        if gap is None and (begins > expected).any():
            number = int((begins > expected).argmax())
            gap = (first + number, int(begins[number] - expected[number]))
        end = int(ends[-1])
    if gap is not None:
        what = f"skips {gap[1]:,} bytes of .bin before sequence {gap[0]:,}"
        if end != token_file.stat().st_size:
            raise _damaged(index_file, pointers_at + 8 * gap[0], what)
        warnings.warn(
            f"{index_file} {what}; Megatron-LM and GPT-NeoX never write such gaps. It may be damaged: {REMEDY}",
            stacklevel=5,
        )
    check_length(token_file, end, f"the {len(sizes):,} sequences of {index_file.name}")
    if end == 0:
        raise ValueError(f"{token_file} holds no tokens. Write the token files again from input that holds text.")


def _damaged(path: Path, place: int, what: str) -> DamagedDataError:
    return DamagedDataError(f"{path} is damaged at byte {place:,}: it {what}. {REMEDY}")
