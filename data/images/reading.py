"""Read labelled images: Parquet files in Hugging Face's image schema, or a folder with one folder per class."""

from __future__ import annotations

import glob
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ..checksum import DamagedDataError
from ..quiet_datasets import quiet_datasets

IMAGE_KEYS = ("image", "img")


@dataclass(frozen=True)
class ImageFiles:
    """Hold the files that a configuration names: Parquet files, or one folder with one folder of images per class."""

    key: str
    parquet: tuple[Path, ...] = ()
    folder: Path | None = None

    @cached_property
    def row_ends(self) -> NDArray[np.int64]:
        """Return where the rows of each Parquet file end in the rows of all of them."""
        return np.cumsum([self.open(file).metadata.num_rows for file in self.parquet])

    def place_of(self, row: int) -> tuple[Path, int]:
        """Return the Parquet file that holds a row of all of them, and the row in this file."""
        number = int(np.searchsorted(self.row_ends, row, side="right"))
        return self.parquet[number], row - (int(self.row_ends[number - 1]) if number else 0)

    def columns(self, image_key: str | None, label_key: str) -> tuple[str, str]:
        """Return the columns of images and labels; image_key None: the first of `IMAGE_KEYS` that exists. Reads no image.

        Raises ValueError for a column that does not exist. A folder has the columns `image` and `label`.
        """
        label_key = label_key if self.folder is None else "label"
        present = ["image", "label"] if self.folder is not None else self.open(self.parquet[0]).schema_arrow.names
        image_key = image_key or next((name for name in IMAGE_KEYS if name in present), IMAGE_KEYS[0])
        for key, name in (("image_key", image_key), ("label_key", label_key)):
            if name not in present:
                raise ValueError(
                    f"data.images.{key} = {name}: {self.key} has the columns {', '.join(present)}; name one of them"
                )
        return image_key, label_key

    def classes(self, label_key: str, num_classes: int) -> tuple[str, ...]:
        """Return the name of every class, its number if a Parquet file does not name them. Reads no image.

        Raises ValueError for a single class, and for another number of names than `num_classes`, the classes of the model.
        """
        names = self.class_names(label_key) or tuple(map(str, range(num_classes)))
        if len(names) < 2:
            raise ValueError(f"{self.key} has one class, {names[0]}: name images of at least two classes")
        if len(names) != num_classes:
            raise ValueError(
                f"model.vocab_size = {num_classes}: {self.key} has {len(names)} classes; set {len(names)}, or leave it out"
            )
        return names

    def class_names(self, label_key: str) -> tuple[str, ...] | None:
        """Return the names of the classes; None if a Parquet file does not name them. Reads no image."""
        if self.folder is not None:
            return tuple(sorted(path.name for path in self.folder.iterdir() if path.is_dir() and path.name[0] != "."))
        metadata = self.open(self.parquet[0]).schema_arrow.metadata or {}
        try:
            features = json.loads(metadata[b"huggingface"])["info"]["features"]
            return tuple(features[label_key]["names"])
        except (KeyError, TypeError, ValueError):
            return None

    def open(self, file: Path) -> Any:
        """Open a Parquet file. Raises DamagedDataError if it is none."""
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DamagedDataError(f"{self.key}: {file} cannot be read as Parquet ({error}); write it again") from error


def find_images(given: str | Sequence[str], key: str) -> ImageFiles:
    """Return the files of a value of `data.images`: files, folders and globs. key: names it in messages.

    Raises FileNotFoundError if nothing matches, and ValueError for a mixture of Parquet files and a folder of images.
    """
    parquet: list[Path] = []
    folders: list[Path] = []
    for name in [given] if isinstance(given, str) else given:
        path = Path(name).expanduser()
        # An existing path is no pattern, whatever characters it holds.
        matches = [path] if path.exists() else [Path(m) for m in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            raise FileNotFoundError(f"{key}: {name} does not exist; name Parquet files, or a folder of images")
        for match in matches:
            inside = sorted(match.rglob("*.parquet")) if match.is_dir() else [match]
            (parquet.extend(inside) if inside else folders.append(match))
    if len(folders) > 1 or (folders and parquet):
        raise ValueError(f"{key}: {folders[0]} is a folder of images; name it alone, or Parquet files only")
    if folders:
        formats = Image.registered_extensions()
        if not any(path.suffix.lower() in formats for path in folders[0].glob("*/*")):
            raise ValueError(f"{key}: {folders[0]} holds neither Parquet files nor folders of images, one per class")
        return ImageFiles(key, folder=folders[0])
    return ImageFiles(key, parquet=tuple(parquet))


def decode(record: Mapping[str, Any]) -> Image.Image:
    """Return the RGB image of its encoded `bytes`, or of the file `path`. Raises DamagedDataError if it does not decode."""
    try:
        with Image.open(record["path"] if record.get("bytes") is None else io.BytesIO(record["bytes"])) as image:
            return image.convert("RGB")
    except (OSError, KeyError, SyntaxError, ValueError, AttributeError, Image.DecompressionBombError) as error:
        # The message of an unknown format holds the address of a buffer.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is empty" if not record else "unknown format" if unknown else " ".join(str(error).split())
        raise DamagedDataError(f"the image does not decode ({reason})") from error


class LabelledImages:
    """Hold images and labels by row. The rows are memory-mapped from a cache, which is written at the first start.

    Attributes:
        labels: int64 [rows].
        class_names: the name of every class.

    Args:
        num_classes: of the model.
        image_key: None for the first of `IMAGE_KEYS` that exists.

    Raises:
        ValueError: a missing column, another number of classes, or a label outside the classes, with file and row.
        DamagedDataError: a file that cannot be read.
    """

    def __init__(
        self,
        files: ImageFiles,
        *,
        num_classes: int,
        image_key: str | None = None,
        label_key: str = "label",
        cache_directory: str | Path,
    ) -> None:
        self.files = files
        # Refused before the cache is written, which may take long.
        self._image_key, label_key = files.columns(image_key, label_key)
        self.class_names = files.classes(label_key, num_classes)
        self._table = _cached_table(files, Path(cache_directory) / "images")
        self._keep_encoded()
        self._images = self._table.data.column(self._image_key)
        self.labels = self._checked_labels(label_key, num_classes)
        if files.folder is not None:
            # The table numbers only the folders with images.
            present = self._table.features["label"].names
            self.labels = np.array([self.class_names.index(name) for name in present])[self.labels]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, row: int) -> Image.Image:
        """Return the RGB image of a row. Raises DamagedDataError with file and row if it does not decode."""
        try:
            return decode(self._record(row))
        except DamagedDataError as error:
            source = self.files.folder or self.files.place_of(row)[0]
            raise DamagedDataError(
                f"{self._name_of(row)}: {error}; replace the image, or remove the row. This command lists all such images: "
                f"python -m tools.inspect_data {shlex.quote(str(source))} --images"
            ) from error

    def _name_of(self, row: int) -> str:
        if self.files.folder is None:
            file, row = self.files.place_of(row)
            return f"{file}, row {row}"
        return str(self._record(row).get("path") or f"{self.files.folder}, row {row}")

    def _record(self, row: int) -> dict[str, Any]:
        """Return the encoded bytes and the path of a row, without the table's conversion of all columns."""
        return self._images[row].as_py() or {}

    def _keep_encoded(self) -> None:
        """Make the rows of the table return encoded bytes, not decoded images."""
        import datasets

        try:
            self._table = self._table.cast_column(self._image_key, datasets.Image(decode=False))
        # `datasets` raises one of these three, depending on the type of the column.
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{self.files.key}: the column {self._image_key} holds no images ({error}); set "
                "data.images.image_key to a column of images"
            ) from error

    def _checked_labels(self, label_key: str, num_classes: int) -> NDArray[np.int64]:
        import pyarrow

        column = self._table.data.column(label_key)
        values = column.to_numpy()
        if not pyarrow.types.is_integer(column.type):
            raise ValueError(
                f"data.images.label_key = {label_key}: this column of {self.files.key} holds {column.type}; whole numbers from 0 "
                "are needed, such as a ClassLabel"
            )
        wrong = np.flatnonzero((values < 0) | (values >= num_classes) | ~np.isfinite(values))
        if len(wrong):
            row = int(wrong[0])
            label = column[row].as_py()  # `values` holds 3.0 for 3 beside a missing label
            raise ValueError(
                f"{self._name_of(row)}: label {label} (rows with such labels: {len(wrong):,}); whole numbers from 0 to "
                f"{num_classes - 1} are allowed; correct the labels, or remove these rows"
            )
        return values.astype(np.int64)


def _cached_table(files: ImageFiles, cache: Path) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    try:
        if files.folder is None:
            if not files.row_ends[-1]:
                raise ValueError(f"{files.parquet[0]} has no row")
            data_files = [glob.escape(str(file)) for file in files.parquet]
            kind, options = "parquet", dict[str, Any]()
        else:
            data_files = [f"{glob.escape(str(files.folder))}/*/*"]
            kind, options = "imagefolder", {"drop_labels": False}
        with quiet_datasets(cache):
            return datasets.load_dataset(
                kind, data_files={"train": data_files}, split="train", cache_dir=str(cache), **options
            )
    except (DatasetGenerationError, ValueError) as error:
        if isinstance(error, DamagedDataError):
            raise
        cause = error.__cause__ or error
        raise DamagedDataError(f"{files.key}: its images cannot be read ({cause}); write the files again") from error
