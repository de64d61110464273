"""The configuration keys of a tiny model, and the rows of a CSV file of the benchmark."""

from __future__ import annotations

import csv
from pathlib import Path

TINY = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.intermediate_size=64",
    "model.vocab_size=256",
    "precision.dtype=fp32",
]


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open(encoding="utf-8")))
