"""The number of files that a reader must open to follow a MetaLA block to its CUDA kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

from models.block import Block
from models.config import ModelConfig
from tools.planning.meta_device import kernels_of_cuda

MODELS = Path(__file__).resolve().parents[2] / "models"
# Leaf helpers: they call no other file of the path.
LEAVES = {"backend.py", "recompute.py", "operators/context_parallel.py"}


def test_metala_mixer_enters_at_most_ten_files_from_block_to_kernels():
    config = ModelConfig(vocab_size=8, num_layers=1, hidden_size=256, num_heads=4, mixers=("metala",))
    with torch.device("meta"):
        block, x = Block(config, 0).bfloat16(), torch.empty(2, 128, 256, dtype=torch.bfloat16)
    entered = {"block.py"}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(MODELS):
            entered.add(path.relative_to(MODELS).as_posix())

    with kernels_of_cuda():
        block.mixer(x)  # imports the kernels
        sys.setprofile(note)
        try:
            block.mixer(x)
        finally:
            sys.setprofile(None)
    assert {"mixers/metala.py", "operators/metala.py", "kernels/metala.py", "kernels/gla/gla.py"} <= entered
    assert len(entered - LEAVES) <= 10, sorted(entered)
