"""The command that decodes every image before a run: tools.inspect_data --images."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.images import verification
from tests.made_images import encoded, picture, write_folder, write_parquet
from tools.inspect_data import main

GOOD = encoded(picture(0, 0))


def lines(path: Path, capsys: pytest.CaptureFixture[str], status: int) -> list[str]:
    assert main([str(path), "--images"]) == status
    return capsys.readouterr().out.splitlines()


def test_every_broken_image_of_parquet_files_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verification, "_AT_ONCE", 2)
    first = write_parquet(tmp_path / "a.parquet", [0, 1, 2])
    second = write_parquet(tmp_path / "b.parquet", [0] * 5, images=[GOOD, None, GOOD, GOOD, GOOD[:60]])
    renamed = pq.read_table(second).rename_columns(["photo", "label"])
    pq.write_table(renamed, second)
    assert lines(first, capsys, 0) == [f"OK       {first}: all 3 images decode"]
    intact, *damaged = lines(tmp_path, capsys, 1)
    assert intact == f"OK       {first}: all 3 images decode"
    begins = [f"DAMAGED  {second}, row {row}: the image does not decode (" for row in (1, 4)]
    assert [line.startswith(begin) for line, begin in zip(damaged, begins, strict=True)] == [True, True]


def test_every_broken_file_of_a_folder_is_named(tmp_path, capsys):
    folder = write_folder(tmp_path / "train", 2)
    broken = folder / "green" / "1.PNG"
    broken.write_bytes(b"GIF?")
    (folder / "red" / "notes.txt").write_text("no image")
    assert lines(folder, capsys, 1) == [
        f"OK       {folder / 'blue'}: all 2 images decode",
        f"OK       {folder / 'red'}: all 2 images decode",
        f"DAMAGED  {broken}: the image does not decode (unknown format)",
    ]


def test_parquet_file_with_a_damaged_page_is_named(tmp_path, capsys):
    path = write_parquet(tmp_path / "a.parquet", [0, 1, 2])
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)  # the header of the first page
    path.write_bytes(content)
    (line,) = lines(path, capsys, 1)
    assert line.startswith(f"DAMAGED  {path} cannot be read from row 0 on (")


def test_path_without_images_is_refused(tmp_path, capsys):
    pq.write_table(pa.table({"label": [0], "text": ["a"]}), tmp_path / "a.parquet")
    assert main([str(tmp_path / "a.parquet"), "--images"]) == 2
    assert "a.parquet has no column with encoded images, only label, text" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), "--images"]) == 2
    assert "--images: " in capsys.readouterr().err
