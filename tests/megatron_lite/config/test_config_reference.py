"""configs/README.md equals the generated reference and describes every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_lite.config.describe import keys_of, leaves
from megatron_lite.config.files import CONFIGS
from megatron_lite.config.loader import Config
from models.config import ModelConfig
from models.mixers import MIXERS
from tools import config_reference as tool

from .stand_in import StandIn


@dataclass(frozen=True)
class Options:
    """Settings of a mixer."""

    width: int | None = field(default=None, metadata={"doc": "Width | of it."})


def test_the_reference_is_not_stale() -> None:
    assert tool.main(["--check"]) == 0, "run: python -m tools.config_reference"


def test_every_key_has_a_meaning() -> None:
    for path, key in leaves(Config[ModelConfig]):
        assert key.doc.endswith("."), ".".join(path)
    for name, mixer in MIXERS.items():
        for option, key in keys_of(mixer.Options).items():
            assert key.doc, f"{name}.{option}"


def test_every_key_is_in_the_reference() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    for path, _ in leaves(Config[ModelConfig]):
        assert f"| `{'.'.join(path)}` |" in text
    for name, mixer in MIXERS.items():
        for option in keys_of(mixer.Options):
            assert f"| `model.mixer_options.{name}.{option}` |" in text
    for file in CONFIGS.rglob("*.yml"):
        assert f"({file.relative_to(CONFIGS)})" in text


def test_rows_hold_type_default_and_meaning() -> None:
    text = tool.config_reference(StandIn, {"metala": Options}, CONFIGS)
    for row in (
        "| `optimizer.lr` | number > 0 | **required** | Peak learning rate. |",
        "| `optimizer.betas` | list of 2: number >= 0 and < 1 | `[0.9, 0.95]` |",
        "| `batch.micro_batch_size` | whole number >= 1 | derived |",
        "| `parallel.compile` | true or false | `false` |",
        '| `evaluation.prompt` | text | `"def "` |',
        "| `model.norm` | one of layernorm, rmsnorm | `layernorm` | Norm. |",
        "| `model.mixer_options.metala.width` | whole number, or null | `null` | Width \\| of it. |",
    ):
        assert f"\n{row}" in text


def test_file_is_described_by_its_first_sentence(tmp_path: Path) -> None:
    for name, text in {
        "long": "# Two lines of one\n# sentence. And another.\nrun: {}\n",
        "short": "# One line.\n# Another.\nrun: {}\n",
        "command": "# A recipe (D.5):\n#   python train.py\n",
        "bare": "# No end\nrun: {}\n",
    }.items():
        (tmp_path / f"{name}.yml").write_text(text)
    text = tool.config_reference(StandIn, {}, tmp_path)
    for name, what in (("long", "Two lines of one sentence."), ("short", "One line."), ("command", "A recipe (D.5)")):
        assert f"| [{name}.yml]({name}.yml) | {what} |\n" in text
    assert "| [bare.yml](bare.yml) | No end |\n" in text


def test_stale_reference_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "CONFIGS", tmp_path)
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
