"""Sums over rows of a gradient that were at hand where it was formed, for the biases of the linears that it goes to.

A linear's bias has for its gradient the sum over all rows of what comes back to the linear. Formed by itself that sum reads
the whole gradient once more. What computed the gradient notes it with the gradient's memory; whoever has no note, or finds
that the gradient has changed since, sums.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class _Note(NamedTuple):
    sums: Tensor
    numel: int
    version: int


def note_sums(x: Tensor, sums: Tensor) -> None:
    """x: [..., heads, head_dim], contiguous and alone in its memory; sums: [heads * head_dim], over the other dimensions."""
    x.untyped_storage()._sums = _Note(sums, x.numel(), x._version)  # type: ignore[attr-defined]


def noted_sums(x: Tensor) -> Tensor | None:
    """[columns] of x: [rows, columns], or None where nothing is noted of x as it is now."""
    note: _Note | None = getattr(x.untyped_storage(), "_sums", None)
    if note is None or not x.is_contiguous() or (note.numel, note.version) != (x.numel(), x._version):
        return None
    return note.sums if note.sums.numel() == x.shape[-1] else None
