"""No timing of launches: it takes minutes for some of flash-linear-attention's kernels and changes no value."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first configuration of every kernel."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, *args, **kwargs: prune(self, *args, **kwargs)[:1])
