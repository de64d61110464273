"""Read the data sets of Long Range Arena that are not generated, as token ids.

Source: Tay et al. 2020 (arXiv 2011.04006). Text: IMDb reviews by bytes. Image: CIFAR-10 in grey, one pixel per token. Retrieval:
pairs of papers of the ACL Anthology Network, by bytes.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checksum import DamagedDataError
from .corpus.discovery import check_hub
from .corpus.readers import open_parquet
from .images.reading import decode
from .quiet_datasets import quiet_datasets
from .synthetic.examples import Examples

# Ids of bytes and pixels are their values. PAD fills short texts.
PAD = 256
RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"
_PAIRS = "new_aan_pairs.{split}.tsv"


def reviews(directory: Path | None, split: str, length: int) -> Examples:
    """Return the IMDb reviews of a split ("train" or "test"), cut after `length` bytes and padded with PAD.

    Args:
        directory: folder with `SPLIT.*` in the schema of `stanfordnlp/imdb`; None for the Hugging Face hub.

    Returns tokens [reviews, length] int16 and labels [reviews, 1] int32: 0 negative, 1 positive.

    Raises FileNotFoundError for a missing file, ValueError for a row without text and label.
    """
    rows = _rows(directory, "text", "stanfordnlp/imdb", split, ("text", "label"))
    place = f"{directory or 'stanfordnlp/imdb'}: {split}"
    texts = list(rows["text"])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            problem = "the text is missing" if text is None else f"{json.dumps(text)[:50]} is no text"
            raise ValueError(f"{place}, row {number}: {problem}; write this row again")
    return Examples(_bytes(texts, length), _labels(list(rows["label"]), 2, place))


def grey_images(directory: Path | None, split: str) -> Examples:
    """Return the images of CIFAR-10 in 8-bit grey, row by row.

    Args:
        directory: folder with `SPLIT.*` in the schema of `uoft-cs/cifar10`; None for the Hugging Face hub.

    Returns tokens [images, 1024] uint8 and labels [images, 1] int32, 0 to 9.

    Raises FileNotFoundError for a missing file, ValueError for an image that does not decode or has another size, and for a label
    outside the classes.
    """
    import datasets

    rows = _rows(directory, "image", "uoft-cs/cifar10", split, ("img", "label"))
    rows = rows.cast_column("img", datasets.Image(decode=False))
    place = f"{directory or 'uoft-cs/cifar10'}: {split}"
    tokens = np.empty((len(rows), 1024), np.uint8)
    for number, row in enumerate(rows):
        try:
            pixels = np.asarray(decode(row["img"] or {}).convert("L"))
        except DamagedDataError as error:
            raise ValueError(f"{place}, row {number}: {error}; write this row again") from None
        if pixels.shape != (32, 32):
            raise ValueError(
                f"{place}, row {number}: an image of {pixels.shape} pixels; images of 32 x 32 are required"
            )
        tokens[number] = pixels.reshape(-1)
    return Examples(tokens, _labels(list(rows["label"]), 10, place))


def document_pairs(directory: Path | None, split: str, length: int) -> Examples:
    """Return the pairs of papers of a split ("train", "eval" or "test"), and whether one cites the other.

    Args:
        directory: folder with the files `new_aan_pairs.*.tsv` of Long Range Arena's release.

    Returns tokens [pairs, 2 * length] int16, each text cut after `length` bytes and padded with PAD, and labels [pairs, 1]
    int32.

    Raises FileNotFoundError for a missing file, ValueError for a row that is no pair.
    """
    import csv

    path = (directory or Path()) / _PAIRS.format(split=split)
    if directory is None or not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; the task retrieval needs {_PAIRS.format(split='{train,eval,test}')} of {RELEASE} (folder "
            "lra_release/tsv_data): unpack it and set settings.retrieval.data.directory=FOLDER"
        )
    texts: list[tuple[str, str]] = []
    labels = []
    csv.field_size_limit(1 << 30)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not readable as text with tabs ({error}): unpack {RELEASE} again") from None
    for number, row in enumerate(rows, start=1):
        if not row:  # an empty line
            continue
        if len(row) != 5 or row[0] not in ("0", "1", "0.0", "1.0"):
            raise ValueError(
                f"{path}: line {number} has {len(row)} columns and label {row[0]!r}; label (0 or 1), two ids and two texts "
                f"are required: unpack {RELEASE} again"
            )
        labels.append(float(row[0]))
        texts.append((row[3], row[4]))
    both = [_bytes([pair[side] for pair in texts], length) for side in (0, 1)]
    return Examples(np.concatenate(both, 1), np.array(labels, np.int32)[:, None])


def _rows(directory: Path | None, task: str, name: str, split: str, columns: Sequence[str]) -> Any:
    """Return the rows of a split as a `datasets.Dataset` with these columns. task: of Long Range Arena, for messages."""
    import datasets

    if directory is None:
        advice = f"Save its train.parquet and test.parquet in a folder and set settings.{task}.data.directory=FOLDER"
        check_hub(name, name, advice)
        try:
            with quiet_datasets():
                rows = datasets.load_dataset(name, split=split)
        except Exception as error:  # errors of datasets, of the network and of file formats
            raise ValueError(f"{name}: the library datasets cannot open it: {error}. {advice}") from error
    else:
        files = sorted(directory.glob(f"{split}.*"))
        if not files:
            raise FileNotFoundError(
                f"{directory}: no file {split}.parquet or {split}.jsonl*; save {name} of the Hugging Face hub there, "
                f"or set settings.{task}.data.directory=null to read it from the hub"
            )
        kind = "parquet" if files[0].suffix == ".parquet" else "json"
        for file in files if kind == "parquet" else ():
            if not open_parquet(file).metadata.num_rows:
                raise ValueError(f"{file} has no row; write it again")
        try:
            with quiet_datasets():
                rows = datasets.load_dataset(kind, data_files=[glob.escape(str(file)) for file in files], split="train")
        except (datasets.exceptions.DatasetGenerationError, StopIteration, ValueError) as error:
            # The library raises StopIteration for an empty file.
            reason = error.__cause__ or str(error) or "it has no row"
            raise ValueError(f"{files[0]}: not readable as {kind} ({reason}); write it again") from None
    if missing := [column for column in columns if column not in rows.column_names]:
        raise ValueError(
            f"{directory or name}: {split} has no column {missing[0]!r}, only {', '.join(rows.column_names)}; the columns of "
            f"{name} are required"
        )
    return rows


def _bytes(texts: Sequence[str], length: int) -> NDArray[np.int16]:
    tokens = np.full((len(texts), length), PAD, np.int16)
    for row, text in zip(tokens, texts, strict=True):
        values = np.frombuffer(text.encode()[:length], np.uint8)
        row[: len(values)] = values
    return tokens


def _labels(labels: Sequence[Any], classes: int, place: str) -> NDArray[np.int32]:
    for number, label in enumerate(labels):
        if label not in range(classes):  # None too, for a missing label
            raise ValueError(
                f"{place}, row {number}: label {label!r}; whole numbers from 0 to {classes - 1} are allowed"
            )
    return np.array(labels, np.int32)[:, None]
