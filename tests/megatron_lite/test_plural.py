"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from megatron_lite.plural import counted


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((0, "run"), "0 runs"),
        ((1, "run"), "1 run"),
        ((2000, "run"), "2,000 runs"),
        ((1, "process", "processes"), "1 process"),
        ((2, "process", "processes"), "2 processes"),
    ],
)
def test_noun_follows_its_number(words, text):
    assert counted(*words) == text
