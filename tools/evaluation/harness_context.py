"""Context managers around a call of the harness: less output, less time, and an unchanged random state."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import sys
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from data.progress import ProgressBar

# The harness's modules with progress bars.
_WITH_BARS = ("lm_eval.api.model", "lm_eval.api.task", "lm_eval.models.huggingface")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the harness's notes off the terminal, replace its progress bars, and keep its bootstrap in this process."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    previous = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # the bootstrap takes seconds, and would fork a process that may hold a GPU
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    modules = [sys.modules[name] for name in _WITH_BARS if name in sys.modules]
    for module in modules:
        module.tqdm = ProgressBar  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.setLevel(level)
        for module in modules:
            module.tqdm = tqdm  # type: ignore[attr-defined]
        if not bars:
            datasets.enable_progress_bars()
        del os.environ["DISABLE_MULTIPROC"]
        if previous is not None:
            os.environ["DISABLE_MULTIPROC"] = previous


@contextlib.contextmanager
def fast() -> Iterator[None]:
    """Compile each template once and collect garbage rarely.

    The harness compiles a template per document, which takes longer than a small model. The collector takes a quarter of
    the harness's time.
    """
    from lm_eval import utils

    previous = gc.get_threshold()
    gc.set_threshold(max(previous[0], 200_000), *previous[1:])
    utils.env.from_string = functools.cache(utils.env.from_string)
    try:
        yield
    finally:
        del utils.env.from_string
        gc.set_threshold(*previous)


@contextlib.contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the random state afterwards. The harness seeds every generator."""
    import torch

    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
