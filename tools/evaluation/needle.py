"""Measure needle in a haystack: a fact at some depth of a long filler text, and a question about it at the end.

After Kamradt 2023 (github.com/gkamradt/LLMTest_NeedleInAHaystack). An answer is right if greedy decoding writes it: each of
its tokens is the likeliest one. All texts of a table begin with the same filler, so that the text before the needles is
read once.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.evaluation.open_model import OpenedModel, open_model
from tools.evaluation.request import EvaluationRequest, NeedleRequest
from tools.evaluation.results_file import difference, earlier_results, number_format, refuse_others, weights

if TYPE_CHECKING:
    from tools.loading.model import LoadedModel, LocatedCheckpoint

# fmt: off
_CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Delhi", "Tunis", "Accra", "Riga", "Sofia", "Dublin", "Prague",
    "Vienna", "Bern", "Rome", "Madrid", "Paris", "Berlin", "London", "Moscow", "Tokyo", "Seoul", "Beijing", "Manila",
    "Jakarta", "Sydney", "Lagos", "Nairobi", "Havana", "Bogota", "Santiago", "Toronto", "Boston", "Chicago", "Denver",
    "Austin", "Miami", "Seattle", "Dallas",
)
# fmt: on


@dataclass(frozen=True)
class Question:
    """Hold one text of a table: context, right answer, and place of the needle."""

    length: int
    depth: float
    needle: int
    context: str
    answer: str


@dataclass(frozen=True)
class Filler:
    """Hold a text in pieces that end with a sentence or a line, and the tokens of each piece."""

    pieces: list[str]
    tokens: list[int]

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def first(self, tokens: int) -> int:
        """Return the number of first pieces that have at most this many tokens."""
        return sum(1 for so_far in itertools.accumulate(self.tokens) if so_far <= tokens)


def check_needle(request: NeedleRequest, *, huggingface: bool) -> None:
    """Raise ValueError for depths and lengths that are not allowed, and for a Hugging Face model without a filler."""
    if any(not 0 <= depth <= 100 for depth in request.depths):
        depths = ",".join(f"{depth:g}" for depth in sorted(set(request.depths)))
        raise ValueError(f"--depths {depths}: percent of the filler, from 0 to 100")
    if min(request.lengths) < 1:
        raise ValueError("--lengths 0: tokens of a text, 1 or more, are allowed")
    if request.filler is None and huggingface:
        raise ValueError("a Hugging Face model has no validation text: name the filler with --filler FILE")


def run_needle(
    request: EvaluationRequest, needle: NeedleRequest, located: LocatedCheckpoint | None
) -> dict[str, Any] | None:
    """Measure the accuracy by length and depth, print the table, write JSON, Markdown and the heat map.

    located: None for a Hugging Face model. Returns the results, or None on a process other than the main one.

    Raises ValueError for a masked model, and for lengths that the model or the filler does not have; as `open_model`.
    """
    from tools.evaluation.harness import is_main_process

    lengths, depths = sorted(set(needle.lengths)), sorted(set(needle.depths))
    try:
        text = "" if needle.filler is None else needle.filler.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--filler {needle.filler}: no UTF-8 at byte {error.start}") from error
    if located is not None and located.model.bidirectional_mixers():
        raise ValueError(f"{located.checkpoint} is a masked model: it reads both directions and generates no text")
    opened = open_model(request, located, "needle", max_length=max(lengths))
    settings = {
        "dtype": number_format(opened.lm.model),
        "needles": needle.needles,
        "seed": needle.seed,
        "filler": str(needle.filler or "the run's validation text"),
        "filler_sha256": hashlib.sha256(text.encode()).hexdigest() if needle.filler else None,
    }
    cell_settings = _settings({"model": opened.facts, **settings})
    refuse_others(opened.out, _settings(earlier_results(opened.out, "needle")), cell_settings)
    lengths = _supported_lengths(opened, lengths)
    if needle.filler is None and opened.loaded is not None:
        text = _validation_text(opened.loaded, max(lengths))
    filler = split_filler(text, opened.lm.tok_encode, max(lengths))
    every = [
        question
        for length in lengths
        for question in questions(filler, length, depths, needle.needles, needle.seed, opened.lm.tok_encode)
    ]
    answers = _answers(opened, every)
    if not is_main_process(opened.lm):
        return None
    results = {
        "model": opened.facts,
        "title": opened.name,
        "lengths": lengths,
        "depths": depths,
        **settings,
        "cells": cells(every, answers),
    }
    earlier = earlier_results(opened.out, "needle")  # another evaluation may have written since
    if not difference(_settings(earlier), cell_settings):
        results = with_cells(earlier, results)
    text = table(results)
    print(f"\n{text}")
    _write(opened.out, results, text)
    opened.finish()
    return results


def questions(
    filler: Filler, length: int, depths: Sequence[float], needles: int, seed: int, encode: Any
) -> list[Question]:
    """Return the texts of one length, of about `length` tokens: the same `needles` facts at every depth.

    The facts depend on the seed alone. A needle stands between two pieces of the filler, nearest to its depth.

    Raises ValueError if the filler is too short, or if the length leaves no room for a piece of it.
    """
    drawn = random.Random(seed)
    cities = drawn.sample(_CITIES, len(_CITIES))
    facts = []
    for number in range(needles):
        city, secret = cities[number % len(cities)], drawn.randint(10000, 99999)
        sentence = f"The secret number of {city} is {secret}.\n"
        question = f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
        taken = len(encode(sentence)) + len(encode(question + f" {secret}."))
        facts.append((secret, sentence, question, taken))
    least = max(taken for *_, taken in facts) + sum(filler.tokens[:1])
    if length < least and filler.total:
        raise ValueError(
            f"--lengths {length}: the fact, its question and a piece of the filler take {least:,} tokens; name {least} or more"
        )
    texts = []
    for number, (secret, sentence, question, taken) in enumerate(facts):
        room = length - taken
        if filler.total < room:
            raise ValueError(
                f"--lengths {length}: the filler has {filler.total:,} tokens; leave that length out, or name a longer text "
                "with --filler"
            )
        pieces = filler.pieces[: filler.first(room)]
        places = [0, *itertools.accumulate(filler.tokens[: len(pieces)])]
        for depth in depths:
            target = places[-1] * depth / 100
            place = min(range(len(places)), key=lambda i: abs(places[i] - target))
            text = "".join([*pieces[:place], sentence, *pieces[place:]]).rstrip()
            texts.append(Question(length, depth, number, text + question, f" {secret}"))
    return texts


def split_filler(text: str, encode: Any, tokens: int) -> Filler:
    """Return the beginning of a text, of at least this many tokens if it has them, in pieces of sentences and lines."""
    pieces: list[str] = []
    counts: list[int] = []
    total = 0
    for piece in re.findall(r"[^\n]*?(?:[.!?](?=\s)[^\S\n]*|\n+)|[^\n]+$", text):
        if total >= tokens:
            break
        piece = piece if piece.endswith(("\n", " ")) else piece + " "
        pieces.append(piece)
        counts.append(len(encode(piece)))
        total += counts[-1]
    return Filler(pieces, counts)


def cells(texts: Sequence[Question], answers: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Return accuracy and mean log-likelihood of the answers, in nats, of every length and depth."""
    rows = []
    for length, depth in dict.fromkeys((question.length, question.depth) for question in texts):
        scores = [a for q, a in zip(texts, answers, strict=True) if (q.length, q.depth) == (length, depth)]
        correct = [bool(greedy) for _, greedy in scores]
        mean = statistics.mean(value for value, _ in scores)
        rows.append({"length": length, "depth": depth, "accuracy": statistics.mean(correct), "log_likelihood": mean})
        rows[-1]["right"] = correct
    return rows


def _settings(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell besides length and depth; empty for no results."""
    if not results:
        return {}
    settings = {
        "weights": weights(results["model"]),
        "number format": results.get("dtype"),
        "--needles": results["needles"],
        "--seed": results["seed"],
        "filler": results.get("filler_sha256") or results["filler"],
    }
    return {name: value for name, value in settings.items() if value is not None}


def with_cells(earlier: Mapping[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the other cells of an earlier table of the same settings."""
    measured = {(cell["length"], cell["depth"]) for cell in results["cells"]}
    remaining = [cell for cell in earlier.get("cells", ()) if (cell["length"], cell["depth"]) not in measured]
    every = sorted([*remaining, *results["cells"]], key=lambda cell: (cell["length"], cell["depth"]))
    lengths, depths = ([*dict.fromkeys(sorted(cell[key] for cell in every))] for key in ("length", "depth"))
    return {**results, "lengths": lengths, "depths": depths, "cells": every}


def table(results: dict[str, Any]) -> str:
    """Return Markdown tables of accuracy in percent and of log-likelihood, with one row per depth and one column per length.

    A cell that was not measured is a dash.
    """
    from tools.reporting.tables import markdown_table

    lengths, depths = results["lengths"], results["depths"]
    header = ["depth, %", *(f"{length:,}" for length in lengths)]
    right, likely = 100 * _by_place(results, "accuracy"), _by_place(results, "log_likelihood")
    parts = []
    for values, digits, words in (
        (right, 0, f"answers right, percent; {results['needles']} needles per cell, by tokens of text"),
        (likely, 1, "mean log-likelihood of the number, nats"),
    ):
        rows = [
            [f"{depth:g}", *("-" if np.isnan(v) else f"{v:.{digits}f}" for v in row)]
            for depth, row in zip(depths, values, strict=True)
        ]
        rows.append(["mean", *(f"{v:.1f}" for v in np.nanmean(values, 0))])
        parts.append(f"{results['title']}: {words}\n\n{markdown_table(header, rows, aligned=True)}\n")
    return "\n".join(parts)


def heat_map(results: dict[str, Any], out: Path) -> None:
    """Draw accuracy and log-likelihood by length and depth, and name the trained length if it is known."""
    from tools.reporting.style import saved_figure

    lengths, depths = results["lengths"], results["depths"]
    trained = results["model"].get("trained_length")
    right, likely = 100 * _by_place(results, "accuracy"), _by_place(results, "log_likelihood")
    panels = (
        (right, (0, 100), 0, "answers right, %"),
        (likely, (np.nanmin(likely), 0), 1, "log-likelihood of the number, nats"),
    )
    height = 1.5 + 0.3 * len(depths)
    with saved_figure(out, 1, 2, style={"axes.grid": False}, height=height, sharey=True) as (figure, both):
        for axes, (values, (low, high), digits, words) in zip(both, panels, strict=True):
            axes.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
            for row, column in np.argwhere(~np.isnan(values)):
                shade = "black" if values[row, column] > low + 0.6 * (high - low) else "white"
                number = f"{values[row, column]:.{digits}f}"
                axes.text(column, row, number, ha="center", va="center", color=shade, fontsize=8)
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
            axes.set(title=words, xlabel="tokens of text" + (f" (trained at {trained:,})" if trained else ""))
        both[0].set_ylabel("depth of the needle, %")
        figure.suptitle(results["title"])


def _by_place(results: dict[str, Any], value: str) -> Any:
    """Return a value of the cells as [depths, lengths], NaN for a missing cell."""
    cells = {(cell["length"], cell["depth"]): cell[value] for cell in results["cells"]}
    return np.array(
        [[cells.get((length, depth), np.nan) for length in results["lengths"]] for depth in results["depths"]],
        np.float64,  # null becomes NaN
    )


def _answers(opened: OpenedModel, every: Sequence[Question]) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CachingLM

    lm = opened.lm if opened.cache is None else CachingLM(opened.lm, str(opened.cache))
    requests = [
        Instance("loglikelihood", {}, (question.context, question.answer), number, ("needle", number, 1))
        for number, question in enumerate(every)
    ]
    return lm.loglikelihood(requests)


def _supported_lengths(opened: OpenedModel, lengths: Sequence[int]) -> list[int]:
    """Return the lengths that the model's positions allow, and report the others."""
    limit = opened.loaded.model.config.max_positions if opened.loaded is not None else opened.lm.max_length
    supported = [length for length in lengths if limit is None or length <= limit]
    if not supported:
        raise ValueError(f"{opened.name} reads {limit:,} tokens at most; --lengths begins at {lengths[0]:,}")
    if len(supported) < len(lengths):
        print(f"{opened.name} reads {limit:,} tokens at most: skipping longer texts")
    return supported


def _validation_text(loaded: LoadedModel, tokens: int) -> str:
    """Return the beginning of the run's validation text, longest documents first."""
    from data.indexed import IndexedTokens
    from tools.evaluation.perplexity import validation_text

    text, tokenizer = validation_text(loaded), loaded.tokenizer
    sequences = IndexedTokens(text.prefix)
    parts: list[str] = []
    for number in np.argsort(-np.asarray(sequences.sizes), kind="stable"):
        ids = np.asarray(sequences[int(number)])
        parts.append(tokenizer.decode(ids[ids != tokenizer.end_of_document_id].tolist()))
        tokens -= len(ids)
        if tokens <= 0:
            break
    return "\n".join(parts)


def _write(out: Path, results: dict[str, Any], text: str) -> None:
    from data.atomic_io import write_text
    from tools.evaluation.results_file import write_json

    write_json(out, results)
    write_text(out.with_suffix(".md"), text)
    heat_map(results, out.with_suffix(".png"))
    print("\n".join(str(out.with_suffix(suffix)) for suffix in (".json", ".md", ".png")))
