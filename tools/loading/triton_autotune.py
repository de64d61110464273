"""What Triton's kernels do with their configurations: take one, or time them all, compiled side by side before."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Milliseconds of warming up and of timing a configuration, for Triton's 25 and 100.
WARM_UP, TIMED = 5, 30
# Seconds after which processes that compile are given up; what is missing is compiled when it is timed.
PATIENCE = 120.0


def without_tuning() -> None:
    """From here on Triton's kernels do not time their configurations but take one: the first of four warps, Triton's own
    choice where none is named, or of the nearest number of them."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    prune = Autotuner.prune_configs

    def plain(*args: Any, **kwargs: Any) -> list[Any]:
        return [min(prune(*args, **kwargs), key=lambda config: abs(math.log2(config.num_warps / 4)))]

    Autotuner.prune_configs = plain


def tune_side_by_side() -> None:
    """From here on the configurations of a Triton kernel that times them are compiled by as many processes as there are
    processors. One after the other, Triton's way, those of one flash-linear-attention layer take minutes."""
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        return
    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_and_note(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        self.not_compiled = prune(self, kwargs)
        return list(self.not_compiled)

    def compile_and_bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        configs, self.not_compiled = self.not_compiled, ()
        _compile(self.fn, args, meta, configs)
        if self._do_bench is None:
            self._do_bench = lambda call, quantiles: do_bench(call, WARM_UP, TIMED, quantiles=quantiles)
        return bench(self, *args, config=config, **meta)

    Autotuner.prune_configs, Autotuner._bench = prune_and_note, compile_and_bench


def _compile(kernel: Any, args: Sequence[Any], meta: dict[str, Any], configs: Sequence[Any]) -> None:
    """Into Triton's cache on disk, where this process finds what its children have compiled."""
    count = min(len(os.sched_getaffinity(0)), len(configs))
    if count < 2:
        return
    from triton.runtime.driver import driver

    active = driver.active
    device, target = active.get_current_device(), active.get_current_target()
    children = []
    for number in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            # A fork may not ask CUDA for anything.
            active.get_current_device, active.get_current_stream = lambda: device, lambda _: 0
            active.get_current_target = lambda: target
            for config in configs[number::count]:
                # What cannot be compiled says so to the one who times it.
                with suppress(Exception):
                    kernel.run(*args, **{**meta, "warmup": True}, **config.all_kwargs())
        finally:
            os._exit(0)
    end = time.monotonic() + PATIENCE
    while children:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        if time.monotonic() > end:
            for child in children:
                os.kill(child, signal.SIGKILL)
            end = math.inf
        time.sleep(0.01)
