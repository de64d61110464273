"""train.py with one thing wrong on one rank: `python -m tests.faults.inject WHAT RANK STEP WORD...`; RANK -1 is all of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from models.block import Block

SECONDS = {"pace": 0.05, "slow": 0.1}


def install(what: str, step: int) -> Callable[..., Any]:
    """Let the first block do it in training step `step` (pace and slow: in all from there on). Returns its old forward."""
    whole = Block.forward
    calls = 0

    def forward(self: Block, x: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        y = whole(self, x, *args, **kwargs)
        if not self.training or self.first is not True:
            return y
        calls += 1
        if what in SECONDS and calls >= step:
            time.sleep(SECONDS[what])
        if calls == step:
            if what == "nan":
                return y * float("nan")
            if what == "hang":
                time.sleep(3600)
            if what == "error":
                raise KeyError("injected")
        return y

    built = Block.__init__

    def init(self: Block, config: Any, layer_index: int) -> None:
        built(self, config, layer_index)
        self.first = layer_index == 0

    Block.__init__, Block.forward = init, forward  # type: ignore[method-assign]
    return whole


if __name__ == "__main__":
    import train

    what, rank, step, *words = sys.argv[1:]
    if int(rank) in (-1, int(os.environ.get("RANK", "0"))):
        install(what, int(step))
    sys.exit(train.main(words))
