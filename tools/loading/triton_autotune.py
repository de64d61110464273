"""Set how Triton selects the configurations of autotuned kernels: one fixed choice, or timing after a parallel compilation."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Milliseconds of warm-up and of timing per configuration. Triton's defaults are 25 and 100.
WARM_UP, TIMED = 5, 30
# Seconds until compiling processes are killed. A missing configuration is compiled when it is timed.
COMPILE_SECONDS = 120.0


def without_tuning() -> None:
    """Make Triton's kernels use one configuration without timing: the first with four warps (Triton's default), or with the
    nearest number of warps."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    prune = Autotuner.prune_configs

    def plain(*args: Any, **kwargs: Any) -> list[Any]:
        return [min(prune(*args, **kwargs), key=lambda config: abs(math.log2(config.num_warps / 4)))]

    Autotuner.prune_configs = plain


def tune_side_by_side() -> None:
    """Compile the configurations of an autotuned Triton kernel in one process per processor before they are timed.

    Triton compiles them sequentially, which takes minutes for one flash-linear-attention layer.
    """
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
    """Compile the configurations in child processes, into Triton's cache on disk, which this process reads."""
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
            # A forked process cannot use CUDA.
            active.get_current_device, active.get_current_stream = lambda: device, lambda _: 0
            active.get_current_target = lambda: target
            for config in configs[number::count]:
                # The parent process reports an error when it times the configuration.
                with suppress(Exception):
                    kernel.run(*args, **{**meta, "warmup": True}, **config.all_kwargs())
        finally:
            os._exit(0)
    end = time.monotonic() + COMPILE_SECONDS
    while children:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        if time.monotonic() > end:
            for child in children:
                os.kill(child, signal.SIGKILL)
            end = math.inf
        time.sleep(0.01)
