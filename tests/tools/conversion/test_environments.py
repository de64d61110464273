"""Use exports as their users do, in this environment and in environments with only torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tools.conversion.environments import VERSIONS, environment, python_of
from tools.inference.generation import generate
from tools.loading.model import load_model

SESSION = Path(__file__).with_name("session.py")
# With these variables of an earlier training in this process, a Trainer would search for other processes.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TEXT = "def alpha(beta, gamma):\n    total = naïve + 12\n"


@pytest.fixture(scope="session")
def reference(trained_run: Path, masked_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write logits and tokens of the trainer's models."""
    loaded, masked = load_model(trained_run), load_model(masked_run)
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    steps = generate(loaded.model, ids.tolist(), max_tokens=12, vocab_size=loaded.tokenizer.vocab_size, temperature=0.0)
    masked_ids = torch.tensor([masked.tokenizer.encode("the cat sat on the mat.")])
    path = tmp_path_factory.mktemp("reference") / "reference.safetensors"
    tensors = {
        "ids": ids,
        "logits": loaded.model(ids),
        "continuation": torch.tensor([[step[0] for step in steps]]),
        "masked_ids": masked_ids,
        "masked_logits": masked.model(masked_ids),
    }
    save_file(tensors, path, metadata={"text": TEXT})
    return path


@pytest.mark.parametrize("name", ["own", *VERSIONS])
def test_export_works_with_torch_and_transformers(
    name: str, exported: Path, masked_export: Path, reference: Path, tmp_path: Path
) -> None:
    python = Path(sys.executable) if name == "own" else python_of(name)
    if python is None:
        pytest.skip(f"{environment(name)} does not exist: make test-huggingface builds it")
    more = [] if name == "own" else ["--clean"]
    if os.environ.get("METALION_COMPILE"):
        more.append("--compile")
    user = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
    result = subprocess.run(
        [str(python), str(SESSION), str(exported), str(masked_export), str(reference), *more],
        cwd=tmp_path,
        env={**user, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    assert '"passed": true' in result.stdout
