"""Call the library datasets without its output, and with an error that names its cache on a full disk."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def quiet_datasets(cache: Path | None = None) -> Iterator[None]:
    """Hide the library's progress bars, and its log lines, which repeat its exceptions.

    cache: the folder that it writes; None for its default. Raises OSError with this folder if the disk is full.
    """
    import datasets

    shown, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            folder = cache or datasets.config.HF_DATASETS_CACHE
            raise OSError(cause.errno, cause.strerror or str(cause), str(folder)) from error
        raise
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()
