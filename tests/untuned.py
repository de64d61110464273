"""Kernels of flash-linear-attention as they come."""

from __future__ import annotations


def leave_untuned() -> None:
    """The first configuration of every kernel in this process, where Triton is installed.

    Timing them changes no value and takes minutes: longer than another process of a pipeline waits for an activation.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    prune = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *args, **kwargs: prune(self, *args, **kwargs)[:1]
