"""Run train.py with a fault on one rank: `python -m tests.faults.inject FAULT RANK STEP ARGUMENT...`; RANK -1 means all.

`--then` separates the arguments of several consecutive runs.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint import writer as checkpoint_writer
from models.block import Block

SECONDS = {"pace": 0.4, "slow": 0.3, "crawl": 0.02}


def install(fault: str, step: int) -> None:
    """Inject the fault into forward pass number `step` of this process's first block.

    fault: nan, flip, hang and error happen once. pace, slow and crawl sleep in every pass from `step` on; crawl also in
        validation.
    """
    original = Block.forward
    calls, first = 0, None

    def forward(self: Block, x: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls, first
        y = original(self, x, *args, **kwargs)
        first = first or self
        if not (self.training or fault == "crawl") or self is not first:
            return y
        calls += 1
        if fault in SECONDS and calls >= step:
            time.sleep(SECONDS[fault])
        if calls == step:
            if fault == "nan":
                return y * float("nan")
            if fault == "flip":
                self.norm1.weight.data.view(torch.int32)[3] ^= 1 << 20
            if fault == "hang":
                time.sleep(3600)
            if fault == "error":
                raise KeyError("injected")
        return y

    Block.forward = forward  # type: ignore[method-assign]


def install_stuck_save(step: int) -> None:
    """Write no file of this process's checkpoint of `step`."""
    write_file = checkpoint_writer.write_file

    def stuck(path: Path, *args: Any) -> Any:
        if f"step_{step:08d}" in path.parent.name:
            time.sleep(3600)
        return write_file(path, *args)

    checkpoint_writer.write_file = stuck


if __name__ == "__main__":
    import train

    fault, rank, step, *remaining = sys.argv[1:]
    original, status = Block.forward, 0
    while remaining and not status:
        arguments = list(takewhile(lambda word: word != "--then", remaining))
        remaining = remaining[len(arguments) + 1 :]
        Block.forward = original  # type: ignore[method-assign]
        if int(rank) in (-1, int(os.environ.get("RANK", "0"))):
            (install_stuck_save if fault == "stuck-save" else partial(install, fault))(int(step))
        status = train.main(arguments)
    sys.exit(status)
