"""Leave out slow parts of runs and evaluations that tests start. Other tests check these parts."""

from __future__ import annotations

import lzma
import os
import sys
from functools import cache

import pytest


def take_shortcuts(patch: pytest.MonkeyPatch) -> None:
    """Apply the shortcuts in this process.

    - fsync does nothing, since files of tests need not survive a power cut.
    - `loss.png` takes half a second. tests/tools/test_plot.py draws it.
    - The validation text of a tiny run is compressed once per process.
    - `pip list` takes a second per evaluation. The harness adds its output to the results.
    """
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr("tools.reporting.run_curves.plot_loss", lambda run, **_: run / "loss.png")
    patch.setattr(lzma, "compress", cache(lzma.compress))
    if "torch" in sys.modules:
        patch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_, **__: ("pip", ""))
