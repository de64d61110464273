"""Split sequences into chunks of a fixed number of tokens, and list the chunks of each sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def place_segments(
    bounds: list[int] | None, chunk: int, device: torch.device
) -> tuple[Tensor | None, list[tuple[int, int]] | None]:
    """Place packed segments so that every segment begins with a new chunk.

    bounds: cu_seqlens as a list, or None for unpacked sequences.
    Returns the token in each place of the chunks, [chunks * chunk] int64 (-1 for none), and for each segment its first chunk and
    the one after its last; both None for unpacked sequences.
    """
    if bounds is None:
        return None, None
    tokens: list[Tensor] = []
    runs = []
    first = 0
    for start, end in pairwise(bounds):
        count = -(-(end - start) // chunk)
        tokens += [torch.arange(start, end), torch.full((count * chunk - (end - start),), -1)]
        runs.append((first, first + count))
        first += count
    return torch.cat(tokens).to(device), runs


def to_chunks(x: Tensor, chunk: int, index: Tensor | None) -> Tensor:
    """Return x [batch, length, heads, dim] as [batch, heads, chunks, chunk, dim], zeros where there is no token.

    index: the tokens of `place_segments`.
    """
    if index is None:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    else:
        x = F.pad(x, (0, 0, 0, 0, 0, 1)).index_select(1, torch.where(index < 0, x.shape[1], index))
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def from_chunks(x: Tensor, length: int, index: Tensor | None) -> Tensor:
    """Return x [batch, heads, chunks, chunk, dim] as [batch, length, heads, dim], without the places that hold no token."""
    x = x.movedim(1, 3).flatten(1, 2)
    return x[:, :length] if index is None else x[:, index >= 0]


def chunks_of_sequences(chunks: int, runs: list[tuple[int, int]] | None) -> list[tuple[slice, range]]:
    """Return which rows of a tensor of states belong to which chunks: all rows to all chunks, or one row per packed segment.

    chunks: their number. runs: the second result of `place_segments`.
    """
    if runs is None:
        return [(slice(None), range(chunks))]
    return [(slice(s, s + 1), range(*run)) for s, run in enumerate(runs)]
