"""Small labelled images in the formats that a run reads."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CLASSES = ("red", "green", "blue")


def picture(label: int, number: int, size: int = 8) -> Image.Image:
    """Return noise in which one colour is brighter: the class can be learned."""
    pixels = np.random.default_rng([label, number]).integers(0, 100, (size, size, 3), dtype=np.uint8)
    pixels[..., label % 3] += 120
    return Image.fromarray(pixels)


def encoded(image: Image.Image) -> bytes:
    """Return the PNG of an image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_parquet(
    path: Path, labels: Sequence[Any], *, images: Sequence[bytes | None] | None = None, size: int = 8
) -> Path:
    """Write rows in Hugging Face's image schema, with `CLASSES` as names; `images` replaces the pictures."""
    content = images or [encoded(picture(int(label), number, size)) for number, label in enumerate(labels)]
    rows = [{"bytes": one, "path": f"{number}.png"} for number, one in enumerate(content)]
    types = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"img": pa.array(rows, types), "label": pa.array(labels, pa.int64())})
    features = {"img": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def write_folder(path: Path, count: int) -> Path:
    """Write `count` images per class as files, in one folder per class."""
    for label, name in enumerate(CLASSES):
        (path / name).mkdir(parents=True)
        for number in range(count):
            picture(label, number).save(path / name / f"{number}.png")
    return path
