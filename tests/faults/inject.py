"""train.py with one thing wrong on one rank: `python -m tests.faults.inject WHAT RANK STEP WORD...`; RANK -1 is all of them.

The words of several runs, one after another, stand apart by `--then`.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import takewhile
from typing import Any

import torch

from megatron_lite.checkpoint import writer as checkpoint_writer
from models.block import Block

SECONDS = {"pace": 0.05, "slow": 0.1, "crawl": 0.02}


def install(what: str, step: int) -> None:
    """Let the first block of this process do it in its forward pass number `step` (pace, slow and crawl: in all from
    there on; crawl: also in validation)."""
    whole = Block.forward
    calls, first = 0, None

    def forward(self: Block, x: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls, first
        y = whole(self, x, *args, **kwargs)
        first = first or self
        if not (self.training or what == "crawl") or self is not first:
            return y
        calls += 1
        if what in SECONDS and calls >= step:
            time.sleep(SECONDS[what])
        if calls == step:
            if what == "nan":
                return y * float("nan")
            if what == "flip":
                self.norm1.weight.data.view(torch.int32)[3] ^= 1 << 20
            if what == "hang":
                time.sleep(3600)
            if what == "error":
                raise KeyError("injected")
        return y

    Block.forward = forward  # type: ignore[method-assign]


def install_slow_save(seconds: float = 1.0) -> None:
    """Let every file of this process's checkpoints take so long."""
    write_file = checkpoint_writer.write_file

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return write_file(*args)

    checkpoint_writer.write_file = slow


if __name__ == "__main__":
    import train

    what, rank, step, *words = sys.argv[1:]
    whole, status = Block.forward, 0
    while words and not status:
        own = list(takewhile(lambda word: word != "--then", words))
        words = words[len(own) + 1 :]
        Block.forward = whole  # type: ignore[method-assign]
        if int(rank) in (-1, int(os.environ.get("RANK", "0"))):
            install_slow_save() if what == "slow-save" else install(what, int(step))
        status = train.main(own)
    sys.exit(status)
