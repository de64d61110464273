"""A trained run and small data sets of the suites."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import trained_run

__all__ = ["trained_run"]

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "naïve",
    "größe",
    "値",
    "total",
    "count",
    "index",
    "state",
    "decay",
    "query",
    "key",
    "value",
]


@pytest.fixture(scope="session")
def eval_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write eight rows of every task of the suites. Some are longer than the length of a tiny model."""
    root = tmp_path_factory.mktemp("eval_data")
    for path, rows in made_up_rows().items():
        write_rows(root / path, rows)
    return root


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines, compressed for the suffix .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def made_up_rows(count: int = 8, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Return file -> rows."""
    draw = random.Random(seed)

    def text(low: int = 2, high: int = 7) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))

    def sentence(low: int = 3, high: int = 8) -> str:
        return text(low, high).capitalize() + "."

    def rows(make: Any) -> list[dict[str, Any]]:
        return [make(number) for number in range(count)]

    def choices(number: int, size: int = 4) -> dict[str, Any]:
        labels = list("ABCD"[:size])
        return {
            "choices": {"text": [text() for _ in labels], "label": labels},
            "answerKey": labels[number % size],
        }

    def wsc273(number: int) -> dict[str, Any]:
        start = f"The {text()} because "
        pronoun = draw.choice(["they", "his"])
        return {
            "text": f"{start}{pronoun} {text()}.",
            "pronoun": pronoun,
            "pronoun_loc": len(start),
            "quote": "",
            "quote_loc": 0,
            "options": [f"The {text(1, 2)}", f"The {text(1, 2)}"],
            "label": number % 2,
            "source": "",
        }

    def wsc(number: int) -> dict[str, Any]:
        words = text(8, 8).split()
        return {
            "text": " ".join(words),
            "span1_index": 0,
            "span2_index": 4,
            "span1_text": words[0],
            "span2_text": words[4],
            "idx": number,
            "label": number % 2,
        }

    def wic(number: int) -> dict[str, Any]:
        return {
            "word": "state",
            "sentence1": f"state {text()}",
            "sentence2": f"state {text()}",
            "start1": 0,
            "end1": 5,
            "start2": 0,
            "end2": 5,
            "idx": number,
            "label": number % 2,
        }

    paragraph = sentence(20, 40)
    return {
        "super_glue/boolq/validation.jsonl.gz": rows(
            lambda n: {"question": text(), "passage": sentence(5, 40), "idx": n, "label": n % 2}
        ),
        "super_glue/cb/validation.jsonl": rows(
            lambda n: {"premise": sentence(), "hypothesis": text(), "idx": n, "label": n % 3}
        ),
        "super_glue/copa/validation.jsonl": rows(
            lambda n: {
                "premise": sentence(),
                "choice1": sentence(),
                "choice2": sentence(),
                "question": ["cause", "effect"][n % 2],
                "idx": n,
                "label": n // 2 % 2,
            }
        ),
        "super_glue/multirc/validation.jsonl": rows(
            lambda n: {
                "paragraph": paragraph,
                "question": f"{WORDS[n // 3]}?",
                "answer": text(1, 3),
                "idx": {"paragraph": 0, "question": n // 3, "answer": n},
                "label": n % 2,
            }
        ),
        "super_glue/rte/validation.jsonl": rows(
            lambda n: {"premise": sentence(), "hypothesis": sentence(), "idx": n, "label": n % 2}
        ),
        "super_glue/wic/validation.jsonl": rows(wic),
        "super_glue/wsc.fixed/validation.jsonl": rows(wsc),
        "lambada_openai/test.jsonl": rows(lambda n: {"text": text(6, 30)}),
        "logiqa/test.jsonl": rows(
            lambda n: {
                "label": "abcd"[n % 4],
                "context": sentence(10, 20),
                "question": sentence(),
                "options": [sentence() for _ in range(4)],
            }
        ),
        "wsc273/test.jsonl": rows(wsc273),
        "piqa/validation.jsonl": rows(
            lambda n: {"goal": text(), "sol1": sentence(), "sol2": sentence(), "label": n % 2}
        ),
        "hellaswag/validation.jsonl": rows(
            lambda n: {
                "ind": n,
                "activity_label": text(1, 2),
                "ctx_a": sentence(),
                "ctx_b": text(),
                "ctx": "",
                "endings": [f"{text()} [title] {text()}" for _ in range(4)],
                "source_id": "",
                "split": "val",
                "split_type": "",
                "label": str(n % 4),
            }
        ),
        "winogrande/validation.jsonl": rows(
            lambda n: {
                "sentence": f"{text().capitalize()} _ {text()}.",
                "option1": text(1, 2),
                "option2": text(1, 2),
                "answer": "12"[n % 2],
            }
        ),
        "ai2_arc/ARC-Easy/test.jsonl": rows(lambda n: {"id": str(n), "question": sentence(), **choices(n)}),
        "ai2_arc/ARC-Easy/validation.jsonl": rows(lambda n: {"id": str(n), "question": sentence(), **choices(n)}),
        "ai2_arc/ARC-Challenge/test.jsonl": rows(lambda n: {"id": str(n), "question": sentence(), **choices(n)}),
        "openbookqa/test.jsonl": rows(lambda n: {"id": str(n), "question_stem": text(), **choices(n)}),
    }
