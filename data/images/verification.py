"""Find the images that do not decode, before a run reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from ..checksum import DamagedDataError
from ..progress import ProgressBar
from ..verification import Findings
from .reading import ImageFiles, decode

_AT_ONCE = 1024  # images in memory
# (name in messages, record of `decode`)
_Named = tuple[str, Mapping[str, Any]]


def verify_images(files: ImageFiles) -> Findings:
    """Decode every image. Return one sentence per Parquet file or folder of a class, or one per image that does not decode.

    Raises ValueError for a Parquet file without a column of images.
    """
    findings = Findings()
    folder, unit = files.folder, "file" if files.folder is None else "folder"
    parts = files.parquet if folder is None else [folder / name for name in files.class_names("label") or ()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in ProgressBar(parts, desc="decoded", unit=unit, leave=False):
            count, damaged = 0, list[str]()
            try:
                for images in _rows(files, part) if folder is None else _files(part):
                    count += len(images)
                    damaged += filter(None, pool.map(_problem, images))
            except DamagedDataError as error:
                damaged.append(str(error))
            findings.damaged += damaged
            if not damaged:
                findings.compared.append(f"{part}: all {count:,} images decode")
    return findings


def _rows(files: ImageFiles, path: Path) -> Iterator[list[_Named]]:
    """Yield the images of a Parquet file: the columns with encoded `bytes`. Raises DamagedDataError if it cannot be read."""
    import pyarrow

    file, row = files.open(path), 0
    columns = [
        field.name
        for field in file.schema_arrow
        if pyarrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
    ]
    if not columns:
        raise ValueError(f"{path} has no column with encoded images, only {', '.join(file.schema_arrow.names)}")
    try:
        for batch in file.iter_batches(_AT_ONCE, columns=columns):
            for column in batch.columns:
                yield [(f"{path}, row {row + place}", record or {}) for place, record in enumerate(column.to_pylist())]
            row += len(batch)
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())
        raise DamagedDataError(f"{path} cannot be read from row {row} on ({reason}); write it again") from error


def _files(folder: Path) -> Iterator[list[_Named]]:
    """Yield the images of a class."""
    formats = Image.registered_extensions()
    paths = sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in formats)
    yield [(path, {"path": path}) for path in paths]


def _problem(image: _Named) -> str:
    """Return why an image does not decode, with its name, or an empty string."""
    name, record = image
    try:
        decode(record)
    except DamagedDataError as error:
        return f"{name}: {error}"
    return ""
