"""Describe how a process ended, from its exit status."""

from __future__ import annotations

import signal


def signal_name(status: int) -> str:
    """Return the name of the signal that ended a process; empty if it ended by itself.

    status: the exit status, the negative number of a signal.
    """
    if status >= 0:
        return ""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def describe_status(status: int) -> str:
    """Return the exit status in words; of a process that a signal ended the signal, its likely cause and the next step."""
    name = signal_name(status)
    if name == "SIGKILL":
        return (
            "killed by SIGKILL: most likely the machine had no free host memory (dmesg shows it). Take a smaller model or "
            "batch, or fewer processes at once, or a machine with more memory"
        )
    return f"ended by {name}" if name else f"exit status {status}"
