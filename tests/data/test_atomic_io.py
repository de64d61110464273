"""Folders that are there whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.atomic_io import atomic_folder, atomic_write, write_array, write_json


def write(folder: Path, name: str, overwrite: bool = False) -> None:
    with atomic_folder(folder, overwrite=overwrite) as aside:
        (aside / name).touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_json_has_null_for_nan_and_infinity(tmp_path: Path) -> None:
    values = {"a": [1.5, math.nan, {"b": -math.inf}], "c": math.inf, "d": "NaN ä", "e": {1}}
    write_json(tmp_path / "new" / "x.json", values, default=list)
    text = (tmp_path / "new" / "x.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": [1.5, None, {"b": None}],
        "c": None,
        "d": "NaN ä",
        "e": [1],
    }
    assert text.startswith('{\n "a": [\n')
    assert "ä" in text


def test_errors_name_the_file_and_not_its_temporary_file(tmp_path: Path) -> None:
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "absent" / "x", FileNotFoundError)):
        with pytest.raises(error, match=f"'{path}'$"), atomic_write(path) as file:
            file.write(b"x")


def test_target_of_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for name in ("empty", "absent"):
        link = tmp_path / "here" / name
        link.symlink_to(tmp_path / "disk" / name)
        write(link, "first")
        assert names(tmp_path / "disk" / name) == ["first"]
        write(link, "second", overwrite=True)
        assert names(tmp_path / "disk" / name) == ["second"]
        assert link.is_symlink()
    assert names(tmp_path / "here") == names(tmp_path / "disk") == ["absent", "empty"]


def test_a_mounted_disk_is_refused_before_the_work() -> None:
    with pytest.raises(OSError, match="a disk is mounted there") as error, atomic_folder(Path("/proc")):
        pytest.fail("the work was begun")
    assert error.value.filename == "/proc"


def test_stopped_between_the_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = tmp_path / "out", os.replace
    write(folder, "first")

    def stop(source: Any, target: Any) -> None:
        if Path(source).name == ".out.writing":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            write(folder, "second", overwrite=True)
    assert (names(tmp_path), names(folder)) == (["out"], ["first"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_after_a_kill_between_the_two_names(overwrite: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def killed() -> None:
        write(folder, "first")
        folder.rename(tmp_path / ".out.old")

    killed()
    write(folder, "second", overwrite)
    assert (names(tmp_path), names(folder)) == (["out"], ["second"])
    (folder / "second").unlink()
    folder.rmdir()
    killed()
    with pytest.raises(OSError, match="No space") as error, atomic_folder(folder, overwrite=overwrite):
        raise OSError(28, "No space left on device")
    assert error.value.filename == str(folder)
    assert (names(tmp_path), names(folder)) == (["out"], ["first"]), "what was there before"


def test_an_array_is_written_as_by_numpy_and_a_full_disk_has_its_number() -> None:
    for array in (np.arange(7, dtype=np.uint32), np.arange(6).reshape(3, 2), np.zeros(0, np.int16), np.arange(9)[::2]):
        written, expected = io.BytesIO(), io.BytesIO()
        write_array(written, array)
        np.save(expected, array)
        assert written.getvalue() == expected.getvalue()
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left") as error:
        write_array(file, np.arange(10**6))
    assert error.value.errno == errno.ENOSPC
