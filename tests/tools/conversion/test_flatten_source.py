"""Check that an export has only the files of its mixers, and that a model without kernels runs without them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.conversion.flatten_source import flat_source


@pytest.mark.parametrize(("mixers", "most"), [(["metala"], 41), (["attention"], 21), (["metala", "attention"], 45)])
def test_export_has_only_the_files_of_its_mixers(mixers: list[str], most: int) -> None:
    files = flat_source(mixers)
    assert len(files) <= most
    kernels = [name for name in files if name.startswith("kernels_")]
    assert bool(kernels) == ("metala" in mixers)
    assert not any(name.startswith("kernels_cpu") for name in files)
    assert "operators_cross_entropy.py" not in files


@pytest.fixture
def flat_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], Any]]:
    """Return a function that writes the source of an export with these mixers and imports its modeling file."""

    def package(mixers: list[str]) -> Any:
        folder = tmp_path / "flat_export"
        folder.mkdir()
        for name, text in flat_source(mixers).items():
            (folder / name).write_text(text)
        (folder / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module("flat_export.modeling_metalion")

    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "flat_export"]:
        del sys.modules[name]


def test_export_without_kernels_runs(flat_package: Callable[[list[str]], Any]) -> None:
    modeling = flat_package(["attention"])
    shape = {"vocab_size": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "mixers": ["attention"]}
    model = modeling.MetalionForCausalLM(modeling.MetalionConfig(**shape))
    tokens = torch.arange(12).view(1, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert not importlib.import_module("flat_export.backend")._installed(), "no kernel is installed"


@pytest.mark.parametrize("linear", ["metala", "gated_delta_net"])
def test_exported_hybrid_with_a_window_generates(linear: str, flat_package: Callable[[list[str]], Any]) -> None:
    """Compare greedy tokens with those of the trained layers, without a cache."""
    mixers, options = [linear] * 3 + ["attention"], {"window": 4, "qk_norm": True, "output_gate": True}
    config = {"vocab_size": 32, "num_layers": 4, "hidden_size": 32, "num_heads": 2, "mixers": mixers}
    config |= {"mixer_options": {"attention": options}, "norm": "rmsnorm"}
    modeling = flat_package(mixers)
    model = modeling.MetalionForCausalLM(modeling.MetalionConfig(**config)).eval()
    trained = LanguageModel(ModelConfig(**config), seed=3).eval()
    model.load_state_dict(trained.state_dict())
    tokens = model.generate(torch.arange(9)[None], max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        assert torch.equal(trained(tokens[:, :-1])[:, 8:].argmax(-1), tokens[:, 9:])
