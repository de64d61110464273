"""One process of consecutive runs of train.py, whose arguments are given as JSON."""

from __future__ import annotations

import json
import sys

import train
from tests.parity.launch import leave

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        if status := train.main(words):
            sys.exit(status)
    leave()
