"""Cut sequences into chunks of a fixed number of tokens, and list the chunks of each sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def place_segments(
    bounds: list[int] | None, chunk: int, device: torch.device
) -> tuple[Tensor | None, list[tuple[int, int]] | None]:
    """Place packed segments so that every segment begins with a new chunk.

    Returns the token index of every slot (-1 for none) and the chunks [first, last) of every segment; None for no segments.
    """
    if bounds is None:
        return None, None
    slots: list[Tensor] = []
    runs = []
    first = 0
    for start, end in pairwise(bounds):
        count = -(-(end - start) // chunk)
        slots += [torch.arange(start, end), torch.full((count * chunk - (end - start),), -1)]
        runs.append((first, first + count))
        first += count
    return torch.cat(slots).to(device), runs


def cut(x: Tensor, chunk: int, index: Tensor | None) -> Tensor:
    """Return [batch, length, heads, dim] as [batch, heads, chunks, chunk, dim], zeros where there is no token."""
    if index is None:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    else:
        x = F.pad(x, (0, 0, 0, 0, 0, 1)).index_select(1, torch.where(index < 0, x.shape[1], index))
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def join(x: Tensor, length: int, index: Tensor | None) -> Tensor:
    """Return [batch, heads, chunks, chunk, dim] as [batch, length, heads, dim], without the slots that hold no token."""
    x = x.movedim(1, 3).flatten(1, 2)
    return x[:, :length] if index is None else x[:, index >= 0]


def walk(chunks: int, runs: list[tuple[int, int]] | None) -> list[tuple[slice, range]]:
    """Return the sequences of the state tensor, each with its chunks."""
    if runs is None:
        return [(slice(None), range(chunks))]
    return [(slice(s, s + 1), range(*run)) for s, run in enumerate(runs)]
