"""The vocabulary and the writing rules of docs/reference/glossary.md, counted: a count may fall and never rise.

A package that reaches zero stays there. Lower a limit below when its count has fallen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .test_imports import ROOT

# The private words of earlier versions, which the field's own terms replace.
PRIVATE = re.compile(
    r"\b(forget(?:ting|table)?(?! gate)|forgotten|fan_?outs?|halves|stretch(?:es)?|lying|anew|whoever|veto(?:ed)?|asked|told|"
    r"said|partition words?|own_(?:layers|stretch)|two_sided\w*|poison\w*|spare_gradients|"
    r"an? (?:decay|state|row|byte|number|launch|line|loss)s? an? (?:channel|head|token|sequence|parameter|run|layer|step))\b",
    re.IGNORECASE,
)
NOT_A_VERB = re.compile(
    r"^(The|An?|What|Whether|Which|How|Where|When|If|This|That|It|Its|Of|In|On|With|By|For|As|No)\b"
)
LONGEST_SENTENCE = 35

LIMITS = {
    # package: private words, docstrings of public functions that do not begin with a verb, sentences that are too long
    "data": (0, 0, 0),
    "megatron_lite": (0, 0, 0),
    "models": (0, 0, 0),
    "tools": (0, 0, 0),
    "docs": (1, 0, 0),  # CHANGELOG.md names a former function
    "tests": (0, 0, 0),
}


@cache
def sources(package: str) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield (place, docstring) of every module, class and function."""
    for path, tree in sources(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def private_words(package: str) -> list[str]:
    places = [*pages(), *(ROOT / "configs").rglob("*.yml")] if package == "docs" else (ROOT / package).rglob("*.py")
    return [
        f"{path.relative_to(ROOT)}:{number} {match}"
        for path in sorted(places)
        if path.name != "test_style.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in PRIVATE.findall(line)
    ]


def docstrings_without_verb(package: str) -> list[str]:
    found = []
    for path, tree in sources(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text and NOT_A_VERB.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {text.splitlines()[0]}")
    return found


def long_sentences(package: str) -> list[str]:
    if package == "docs":
        texts = [(str(path.relative_to(ROOT)), _prose(path.read_text())) for path in pages()]
    else:
        texts = [(place, re.sub(r"(?m)^ +.* = .*$", "\n", text)) for place, text in docstrings(package)]  # no equations
    return [
        f"{place} {sentence[:60]} ..."
        for place, text in texts
        for paragraph in re.split(r"\n\s*\n|\n\s*[-*|]|\n\s*\w+: ", text)
        for sentence in re.split(r"(?<=[.!?;:])\s", " ".join(paragraph.split()))
        if len(sentence.split()) > LONGEST_SENTENCE
    ]


def _prose(page: str) -> str:
    """Return a page without code blocks and tables."""
    page = re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL)
    return "\n".join("" if line.startswith(("    ", "|")) else line for line in page.splitlines())


COUNTED = {"private words": private_words, "no verb": docstrings_without_verb, "long sentences": long_sentences}


@pytest.mark.parametrize("package", LIMITS)
@pytest.mark.parametrize("rule", COUNTED)
def test_counts_do_not_rise(package: str, rule: str) -> None:
    limit = LIMITS[package][list(COUNTED).index(rule)]
    found = COUNTED[rule](package)
    assert len(found) <= limit, f"{rule} in {package}, at most {limit}:\n" + "\n".join(found[-20:])
