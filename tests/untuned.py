"""Triton kernels without autotuning."""

from __future__ import annotations


def leave_untuned() -> None:
    """Use the first configuration of every Triton kernel in this process. Does nothing without Triton.

    Autotuning takes minutes, longer than another process of a pipeline waits for an activation.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    prune = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *args, **kwargs: prune(self, *args, **kwargs)[:1]
