"""Check that an export has only the files of its mixers, and that a model without kernels runs without them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tools.conversion.flatten_source import flat_source


@pytest.mark.parametrize(("mixers", "most"), [(["metala"], 40), (["attention"], 21), (["metala", "attention"], 44)])
def test_export_has_only_the_files_of_its_mixers(mixers: list[str], most: int) -> None:
    files = flat_source(mixers)
    assert len(files) <= most
    kernels = [name for name in files if name.startswith("kernels_")]
    assert bool(kernels) == ("metala" in mixers)
    assert not any(name.startswith("kernels_cpu") for name in files)
    assert "operators_cross_entropy.py" not in files


def test_export_without_kernels_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "flat_export"
    folder.mkdir()
    for name, text in flat_source(["attention"]).items():
        (folder / name).write_text(text)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        modeling = importlib.import_module("flat_export.modeling_metalion")
        shape = {"vocab_size": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "mixers": ["attention"]}
        model = modeling.MetalionForCausalLM(modeling.MetalionConfig(**shape))
        tokens = torch.arange(12).view(1, 12)
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert not importlib.import_module("flat_export.backend")._installed(), "no kernel is installed"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flat_export"]:
            del sys.modules[name]
