"""Prepare data in several processes. Python's part of the work holds the interpreter's lock, so threads do not help."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def usable_cores() -> int:
    """Return the processor cores that this process may use: a container or a scheduler may allow a part of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_pool(workers: int, initializer: Callable[..., None] | None = None, *arguments: Any) -> ProcessPoolExecutor:
    """Return a pool of `workers` processes. Each calls initializer(*arguments) first, and ends when this process ends."""
    # Spawn, because forking a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(initializer, arguments))


def _start(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if initializer is not None:
        initializer(*arguments)


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """End this worker when its parent ends; otherwise it would wait for work forever."""
    parent.join()
    os._exit(1)
