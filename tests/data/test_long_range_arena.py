"""Readers of Long Range Arena's data sets, on small files of the same schema."""

from __future__ import annotations

import io
import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.long_range_arena import PAD, document_pairs, grey_images, reviews


def write_reviews(path, rows):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))


def write_images(path, images, labels):
    cells = []
    for image in images:
        with io.BytesIO() as file:
            Image.fromarray(image).save(file, "PNG")
            cells.append({"bytes": file.getvalue(), "path": None})
    pq.write_table(pa.table({"img": cells, "label": labels}), path)


def test_folder_name_is_no_pattern(tmp_path):
    folder = tmp_path / "imdb[1]"
    folder.mkdir()
    write_reviews(folder / "train.jsonl", [("a", 1)])
    assert reviews(folder, "train", 1).labels.tolist() == [[1]]


def test_reading_shows_no_progress_bar(tmp_path, capsys):
    write_reviews(tmp_path / "train.jsonl", [("a", 0)])
    reviews(tmp_path, "train", 4)
    assert capsys.readouterr().err == ""


def test_reviews_are_bytes_cut_and_padded(tmp_path):
    write_reviews(tmp_path / "train.jsonl", [("né", 0), ("abcdefgh", 1)])
    tokens, labels = reviews(tmp_path, "train", 5)
    assert tokens.tolist() == [[*"né".encode(), PAD, PAD], list(b"abcde")]
    assert labels.tolist() == [[0], [1]]


def test_images_are_grey_pixels_row_by_row(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    colours[1] = 7
    write_images(tmp_path / "test.parquet", colours, [9, 0])
    tokens, labels = grey_images(tmp_path, "test")
    expected = colours[0].reshape(-1, 3) @ [0.299, 0.587, 0.114]
    assert np.abs(tokens[0] - expected).max() <= 1
    assert set(tokens[1].tolist()) == {7}
    assert labels.tolist() == [[9], [0]]


def test_pairs_hold_two_texts_side_by_side_without_empty_lines(tmp_path):
    (tmp_path / "new_aan_pairs.eval.tsv").write_text('1.0\tA1\tA2\tone\t"two, 2"\n\n0.0\tA3\tA4\tthree\tf\n')
    tokens, labels = document_pairs(tmp_path, "eval", 4)
    assert tokens[:, :4].tolist() == [[*b"one", PAD], list(b"thre")]
    assert tokens[:, 4:].tolist() == [list(b"two,"), [*b"f", PAD, PAD, PAD]]
    assert labels.tolist() == [[1], [0]]


def test_wrong_data_names_file_and_row(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    with pytest.raises(FileNotFoundError, match=r"no file train.parquet or train.jsonl.*stanfordnlp/imdb"):
        reviews(tmp_path, "train", 4)
    with pytest.raises(
        FileNotFoundError, match=r"new_aan_pairs.test.tsv: no such file.*lra_release.gz.*data.directory"
    ):
        document_pairs(tmp_path, "test", 4)
    (tmp_path / "new_aan_pairs.test.tsv").write_text("1\ta\tb\tc\n")
    with pytest.raises(ValueError, match="line 1 has 4 columns and label '1'"):
        document_pairs(tmp_path, "test", 4)
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"1\ta\tb\t\xff\tc\n")
    with pytest.raises(ValueError, match=r"new_aan_pairs.test.tsv: not readable as text .*utf-8.*unpack https"):
        document_pairs(tmp_path, "test", 4)
    write_reviews(tmp_path / "test.jsonl", [("a", 0), ("b", 2)])
    with pytest.raises(ValueError, match="test, row 1: label 2; whole numbers from 0 to 1 are allowed"):
        reviews(tmp_path, "test", 4)
    write_reviews(tmp_path / "test.jsonl", [("a", 0), ("b", None)])
    with pytest.raises(ValueError, match="test, row 1: label None; whole numbers from 0 to 1 are allowed"):
        reviews(tmp_path, "test", 4)
    write_reviews(tmp_path / "test.jsonl", [(None, 0), ("b", 0)])
    with pytest.raises(ValueError, match="test, row 0: the text is missing"):
        reviews(tmp_path, "test", 4)
    write_reviews(tmp_path / "test.jsonl", [(["a"], 0)])
    with pytest.raises(ValueError, match=r'test, row 0: \["a"\] is no text; write this row again'):
        reviews(tmp_path, "test", 4)
    (tmp_path / "test.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"test.jsonl: not readable as json \(it has no row\); write it again"):
        reviews(tmp_path, "test", 4)
    write_images(tmp_path / "train.parquet", np.zeros((1, 28, 28, 3), np.uint8), [0])
    (tmp_path / "test.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"test.jsonl: not readable as json"):
        reviews(tmp_path, "test", 4)
    assert not caplog.records, "one message per problem"
    (tmp_path / "test.jsonl").unlink()
    pq.write_table(pa.table({"img": [{"bytes": b"no image", "path": None}], "label": [0]}), tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"row 0: the image does not decode \(unknown format\); write this row again"):
        grey_images(tmp_path, "test")
    with pytest.raises(ValueError, match=r"row 0: an image of \(28, 28\) pixels; images of 32 x 32"):
        grey_images(tmp_path, "train")
    pq.write_table(pa.table({"img": [{"bytes": None, "path": None}], "label": [0]}), tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="row 0: the image does not decode"):
        grey_images(tmp_path, "test")


@pytest.mark.parametrize(
    ("length", "message"), [(-20, r"is not a complete parquet file: .*footer"), (None, "has no row; write")]
)
def test_parquet_file_that_is_cut_off_or_empty_is_named_once(tmp_path, caplog, length, message, monkeypatch):
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    path = tmp_path / "train.parquet"
    write_images(path, np.zeros((1, 32, 32, 3), np.uint8), [0])
    if length is None:
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    else:
        path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{path}:? {message}"):
        grey_images(tmp_path, "train")
    assert not caplog.records, "the library datasets writes its own line"


def test_hub_that_cannot_be_reached_is_named_with_the_folder_to_set(monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", unreachable)
    with pytest.raises(
        ValueError, match=r"^stanfordnlp/imdb: the hub \S+ cannot be reached .* settings.text.data.directory=FOLDER$"
    ):
        reviews(None, "train", 4)
