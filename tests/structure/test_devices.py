"""Which tests see a GPU: `tests/conftest.py` hides it from all others, on every machine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import TESTS, pytest_collection_modifyitems, runs_only_gpu_tests


@pytest.mark.parametrize(
    ("paths", "marks", "visible"),
    [
        (["tests"], "", False),
        (["tests"], "not gpu", False),
        (["tests/gpu", "tests/megatron_lite/optim"], "", False),
        (["tests"], "gpu", True),
        (["tests/gpu/test_muon.py::test_engine", "tests/models/kernels"], "", True),
    ],
)
def test_gpu_is_visible_to_its_own_tests_only(
    monkeypatch: pytest.MonkeyPatch, paths: list[str], marks: str, visible: bool
) -> None:
    monkeypatch.chdir(TESTS.parent)
    assert runs_only_gpu_tests(paths, marks) == visible


def test_other_tests_and_their_child_processes_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


def test_mark_of_gpu_tests_follows_from_folder_and_fixture() -> None:
    marks: dict[str, list[str]] = {
        "gpu/test_muon.py": [],
        "megatron_lite/optim/test_muon.py": [],
        "models/test_a.py": [],
    }
    fixtures = {"models/test_a.py": ["device"]}
    pytest_collection_modifyitems(
        [
            SimpleNamespace(path=TESTS / name, fixturenames=fixtures.get(name, []), add_marker=found.append)  # type: ignore[misc]
            for name, found in marks.items()
        ]
    )
    assert list(marks.values()) == [["gpu"], [], ["gpu"]]
