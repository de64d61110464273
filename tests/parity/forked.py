"""Fork the processes of `launch_forked` after their imports: `python -m tests.parity.forked MODULE ARGUMENT...`."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys

import pytest

from tests.shortcuts import take_shortcuts

PRELOADED = ("megatron_lite.engine.engine", "tools.pretraining.run", "deepspeed", "torch._dynamo")


def start(rank: int, words: list[str]) -> int:
    """Run `python -m *words` as this rank in a fork and return its process id."""
    if child := os.fork():
        return child
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


def main(words: list[str]) -> int:
    """Run all ranks; return 1 if one failed, else 0."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise the import searches for a GPU
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        take_shortcuts(patch)
        children = [start(rank, words) for rank in range(int(os.environ["WORLD_SIZE"]))]
        statuses = [os.waitpid(child, 0)[1] for child in children]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
