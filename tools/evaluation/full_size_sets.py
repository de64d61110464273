"""Fill incomplete data sets of the suites to their whole size.

Added rows have shuffled words, so that no two are alike. Rows of MultiRC share as many paragraphs and questions as in the
whole set: 83 paragraphs, 953 questions, 4,848 answers.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

from tools.evaluation.suites import read_suite

# Data folder and evaluated split -> task, whose suite states the documents of the whole set.
SETS = {
    "super_glue/boolq/validation": "boolq",
    "super_glue/cb/validation": "cb",
    "super_glue/copa/validation": "copa",
    "super_glue/multirc/validation": "multirc",
    "super_glue/rte/validation": "sglue_rte",
    "super_glue/wic/validation": "wic",
    "super_glue/wsc.fixed/validation": "wsc",
    "lambada_openai/test": "lambada_openai",
    "logiqa/test": "logiqa",
    "wsc273/test": "wsc273",
    "piqa/validation": "piqa",
    "hellaswag/validation": "hellaswag",
    "winogrande/validation": "winogrande",
    "ai2_arc/ARC-Easy/test": "arc_easy",
    "ai2_arc/ARC-Challenge/test": "arc_challenge",
    "openbookqa/test": "openbookqa",
}
_DOCUMENTS = {**read_suite("superglue").documents, **read_suite("commonsense").documents}
SIZES = {name: _DOCUMENTS[task] for name, task in SETS.items()}
PARAGRAPHS, QUESTIONS = 83, 953
Row = dict[str, Any]


def write_whole_sets(source: Path, target: Path, scale: float = 1.0) -> int:
    """Write every data set at its whole size (times `scale`), real rows first, and return the number of documents."""
    total = 0
    for name, size in SIZES.items():
        rows = _read(source, name)
        size = max(3, round(size * scale))
        draw = random.Random(f"0/{name}")
        if name == "super_glue/multirc/validation":
            rows = _multirc(rows, size, scale, draw)
        else:
            rows = [*rows[:size], *(_shuffled(draw.choice(rows), draw) for _ in range(size - len(rows)))]
        path = target / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        total += len(rows)
    return total


def _shuffled(value: Any, draw: random.Random) -> Any:
    """Return the row with shuffled words in every text. Labels, indices and single words stay."""
    if isinstance(value, dict):
        return {key: item if key in _UNCHANGED else _shuffled(item, draw) for key, item in value.items()}
    if isinstance(value, list):
        return [_shuffled(item, draw) for item in value]
    if not isinstance(value, str):
        return value
    words = value.split(" ")
    if "_" in words:  # the blank keeps its place
        place = words.index("_")
        rest = words[:place] + words[place + 1 :]
        draw.shuffle(rest)
        return " ".join([*rest[:place], "_", *rest[place:]])
    draw.shuffle(words)
    return " ".join(words)


_UNCHANGED = {"label", "answerKey", "answer", "idx", "id", "pronoun", "span1_text", "span2_text", "word", "text_label"}


def _multirc(rows: list[Row], size: int, scale: float, draw: random.Random) -> list[Row]:
    paragraphs = [_shuffled(draw.choice(rows)["paragraph"], draw) for _ in range(max(1, round(PARAGRAPHS * scale)))]
    questions = [
        (i % len(paragraphs), _shuffled(draw.choice(rows)["question"], draw))
        for i in range(max(1, round(QUESTIONS * scale)))
    ]
    answers = []
    for number in range(size):
        question = number * len(questions) // size
        paragraph, text = questions[question]
        answer = " ".join(
            draw.choice(draw.choice(rows)["paragraph"].split(" "))
            for _ in range(len(draw.choice(rows)["answer"].split(" ")))
        )
        index = {"paragraph": paragraph, "question": question, "answer": number}
        row = {"paragraph": paragraphs[paragraph], "question": text, "answer": answer, "idx": index}
        answers.append({**row, "label": draw.randrange(2)})
    return answers


def _read(source: Path, name: str) -> list[Row]:
    """Return the different rows of the evaluated split, then those of the other split, which complete it."""
    folder, _, evaluated = name.rpartition("/")
    lines: dict[str, None] = {}
    for split in (evaluated, "validation", "test"):
        for suffix in (".jsonl.gz", ".jsonl"):
            path = source / folder / f"{split}{suffix}"
            if path.is_file():
                text = gzip.decompress(path.read_bytes()) if suffix.endswith(".gz") else path.read_bytes()
                lines.update(dict.fromkeys(text.decode().split("\n")))
    rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise FileNotFoundError(f"{source} lacks {name}.jsonl.gz: a few rows of every task are needed; put them there")
    return rows
