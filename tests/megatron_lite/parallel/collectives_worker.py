"""One process of the tests of collectives; rank 0 writes what each rank received."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from megatron_lite.config.files import ConfigError
from megatron_lite.parallel.collectives import any_rank, gather, on_all, on_main
from megatron_lite.parallel.grid import init_grid
from tests.parity.launch import leave

TIMEOUT_SECONDS = 3.0  # of collectives


class LockedError(OSError):
    """An error that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class TwoArgumentsError(Exception):
    """An error that can be pickled, but not read again."""

    def __init__(self, text: str, *, more: str) -> None:
        super().__init__(f"{text} {more}")


ERRORS: dict[str, Exception] = {
    "ValueError": ValueError("a = 1: 2 is allowed"),
    "ConfigError": ConfigError(["a = 1: 2 is allowed", "b = 1: 2 is allowed"]),
    "LockedError": LockedError("cannot read the file"),
    "TwoArgumentsError": TwoArgumentsError("cannot", more="connect"),
}


def fail(error: Exception) -> NoReturn:
    raise error


def received(call: Any) -> tuple[str, str, bool]:
    """Return class and text of the error that the call raises, and whether callers that catch OSError or ValueError get it."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), isinstance(error, OSError | ValueError)
    return "", "", False


def main(out: Path) -> None:
    grid = init_grid("cpu", TIMEOUT_SECONDS / 60)
    results: dict[str, Any] = {}
    for name, error in ERRORS.items():
        results[f"on_main {name}"] = gather(received(lambda error=error: on_main(grid, lambda: fail(error))), grid)
        results[f"on_all {name}"] = gather(
            received(lambda error=error: on_all(grid, lambda: fail(error) if grid.rank == 1 else None)), grid
        )

    results["any_rank"] = gather(any_rank([grid.rank == 0, grid.rank == 1, False, True], grid), grid)

    def slow() -> int:
        time.sleep(2 * TIMEOUT_SECONDS)
        return 7

    results["slow"] = gather(on_main(grid, slow, timeout_hours=1.0), grid)
    if grid.is_main:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    main(Path(sys.argv[1]))
    leave()
