"""The code and the table of docs/guide/masked_lm.md are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models.language_model import count_parameters
from tests.megatron_lite.config.test_config_examples import CONFIGS, MASKED, load
from tools.conversion.export_hf import export

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "masked_lm.md").read_text(encoding="utf-8")


def test_sentence_embeddings(masked_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    export(masked_run, tmp_path / "export")
    model = AutoModel.from_pretrained(tmp_path / "export", trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=True)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) == 3

    def embed(*sentences: str) -> Any:
        names: dict[str, Any] = {"tokenizer": tokenizer, "model": model, "sentences": list(sentences)}
        with torch.no_grad():
            exec(code, names)
        return names["embeddings"]

    short, long = "the cat sat", "a dog sat on the mat , the cat sat on a dog"
    together = embed(short, long)
    assert together.shape == (2, model.config.hidden_size)
    torch.testing.assert_close(together[:1], embed(short), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[1:], embed(long), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


@pytest.mark.parametrize("name", MASKED)
def test_table_of_models(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line]
    assert f"{count_parameters(load(CONFIGS / f'{name}.yml').model) / 1e6:.1f} M" in row
