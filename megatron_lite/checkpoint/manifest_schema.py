"""The required keys of a checkpoint's manifest, checked before anything else is read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field


class Piece(BaseModel):
    """A range of a tensor, or of its `shard`, in the file of a rank."""

    rank: Annotated[int, Field(ge=0)]
    start: Annotated[int, Field(ge=0)]
    numel: Annotated[int, Field(ge=1)]
    shard: tuple[int, int, int] = (0, 0, 1)


class TensorEntry(BaseModel):
    """A tensor's shape and the location of its elements."""

    shape: list[Annotated[int, Field(ge=0)]]
    pieces: list[Piece]


class FileEntry(BaseModel):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class LayoutEntry(BaseModel):
    """The layout that wrote the checkpoint, with sizes of parallelism in processes."""

    world_size: Annotated[int, Field(ge=1)]
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    dtype: str


class Manifest(BaseModel):
    """The required keys. Any other key is allowed."""

    step: int
    state: dict[str, Any]
    optimizer_steps: Annotated[int, Field(ge=0)]
    loss_scale: dict[str, Any]
    layout: LayoutEntry
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
