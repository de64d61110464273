"""Measure needle in a haystack: a fact at some depth of a long filler text, and a question about it at the end.

After Kamradt 2023 (github.com/gkamradt/LLMTest_NeedleInAHaystack). An answer is right if greedy decoding writes it: each of
its tokens is the likeliest one. All texts of a table begin with the same filler, so that the text before the needles is
read once.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.evaluation.cells import by_place, draw_cells, formatted, length_label, with_cells, write_cells
from tools.evaluation.haystack import (
    Filler,
    position_limit,
    read_filler,
    refuse_masked,
    split_filler,
    validation_text,
)
from tools.evaluation.open_model import OpenedModel, open_model
from tools.evaluation.request import EvaluationRequest, NeedleRequest
from tools.evaluation.results_file import matching_results, number_format, refuse_others, weights

if TYPE_CHECKING:
    from tools.loading.model import LocatedCheckpoint

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


def check_needle(request: NeedleRequest, *, huggingface: bool) -> None:
    """Raise ValueError for depths and lengths that are not allowed, and for a Hugging Face model without a filler."""
    if any(not 0 <= depth <= 100 for depth in request.depths):
        depths = ",".join(f"{depth:g}" for depth in sorted(set(request.depths)))
        raise ValueError(f"--depths {depths}: percent of the filler, from 0 to 100")
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
    text, digest = read_filler(needle.filler)
    refuse_masked(located)
    opened = open_model(request, located, "needle", max_length=max(lengths))
    settings = {
        "dtype": number_format(opened.lm.model),
        "needles": needle.needles,
        "seed": needle.seed,
        "filler": str(needle.filler or "the run's validation text"),
        "filler_sha256": digest,
    }
    description = {"model": opened.facts, "title": opened.name, **settings}
    cell_settings = _settings(description)
    refuse_others(opened.out, "needle", _settings, cell_settings)
    lengths = _supported_lengths(opened, lengths)
    if needle.filler is None and opened.loaded is not None:
        text = validation_text(opened.loaded, max(lengths))
    filler = split_filler(text, opened.lm.tok_encode, max(lengths))
    every = [
        question
        for length in lengths
        for question in questions(filler, length, depths, needle.needles, needle.seed, opened.lm.tok_encode)
    ]
    answers = _answers(opened, every)
    if not is_main_process(opened.lm):
        return None
    earlier = matching_results(opened.out, "needle", _settings, cell_settings)  # the file may have changed since
    results = with_cells(earlier, {**description, "cells": cells(every, answers)}, "depth")
    write_cells(opened.out, results, table(results), heat_map)
    opened.finish()
    return results


def questions(
    filler: Filler, length: int, depths: Sequence[float], needles: int, seed: int, encode: Any
) -> list[Question]:
    """Return the texts of one length, of about `length` tokens: the same `needles` facts at every depth.

    The facts depend on the seed alone. A needle stands between two pieces of the filler, nearest to its depth.

    Raises ValueError if the filler is too short, or if the length is too short for a piece of it.
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
        remaining = length - taken
        if filler.total < remaining:
            raise ValueError(
                f"--lengths {length}: the filler has {filler.total:,} tokens; leave that length out, or name a longer text "
                "with --filler"
            )
        pieces = filler.pieces[: filler.first(remaining)]
        places = [0, *itertools.accumulate(filler.tokens[: len(pieces)])]
        for depth in depths:
            target = places[-1] * depth / 100
            place = min(range(len(places)), key=lambda i: abs(places[i] - target))
            text = "".join([*pieces[:place], sentence, *pieces[place:]]).rstrip()
            texts.append(Question(length, depth, number, text + question, f" {secret}"))
    return texts


def cells(texts: Sequence[Question], answers: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Return accuracy and mean log-likelihood of the answers, in nats, of every length and depth."""
    rows = []
    for length, depth in dict.fromkeys((question.length, question.depth) for question in texts):
        scores = [a for q, a in zip(texts, answers, strict=True) if (q.length, q.depth) == (length, depth)]
        correct = [bool(greedy) for _, greedy in scores]
        mean = statistics.mean(value for value, _ in scores)
        accuracy = statistics.mean(correct)
        rows.append({"length": length, "depth": depth, "accuracy": accuracy, "log_likelihood": mean, "right": correct})
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


def table(results: dict[str, Any]) -> str:
    """Return Markdown tables of accuracy in percent and of log-likelihood, with one row per depth and one column per length.

    A cell that was not measured is a dash.
    """
    from tools.reporting.tables import markdown_table

    header = ["depth, %", *(f"{length:,}" for length in results["lengths"])]
    right, likely = _values(results)
    parts = []
    for values, digits, words in (
        (
            right,
            0,
            f"answers right, percent; {results['needles']} needle{'s' * (results['needles'] > 1)} per cell, by tokens of text",
        ),
        (likely, 1, "mean log-likelihood of the number, nats"),
    ):
        rows = [[f"{depth:g}", *formatted(row, digits)] for depth, row in zip(results["depths"], values, strict=True)]
        rows.append(["mean", *formatted(np.nanmean(values, 0), 1)])
        parts.append(f"{results['title']}: {words}\n\n{markdown_table(header, rows, aligned=True)}\n")
    return "\n".join(parts)


def heat_map(results: dict[str, Any], out: Path) -> None:
    """Draw accuracy and log-likelihood by length and depth, and name the trained length if it is known."""
    from tools.reporting.style import saved_figure

    right, likely = _values(results)
    panels = (
        (right, (0, 100), 0, "answers right, %"),
        (likely, (np.nanmin(likely, initial=0), 0), 1, "log-likelihood of the number, nats"),
    )
    depths = [f"{depth:g}" for depth in results["depths"]]
    height = 1.5 + 0.3 * len(depths)
    with saved_figure(out, 1, 2, style={"axes.grid": False}, height=height, sharey=True) as (figure, both):
        for axes, (values, limits, digits, words) in zip(both, panels, strict=True):
            draw_cells(axes, values, depths, results["lengths"], limits=limits, digits=digits)
            axes.set(title=words, xlabel=length_label(results))
        both[0].set_ylabel("depth of the needle, %")
        figure.suptitle(results["title"])


def _values(results: dict[str, Any]) -> tuple[Any, Any]:
    """Return accuracy in percent and log-likelihood, each [depths, lengths]."""
    cells = results["cells"]
    right, likely = (
        by_place(cells, value, "depth", results["depths"], results["lengths"])
        for value in ("accuracy", "log_likelihood")
    )
    return 100 * right, likely


def _answers(opened: OpenedModel, every: Sequence[Question]) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance

    requests = [
        Instance("loglikelihood", {}, (question.context, question.answer), number, ("needle", number, 1))
        for number, question in enumerate(every)
    ]
    return opened.cached_lm.loglikelihood(requests)


def _supported_lengths(opened: OpenedModel, lengths: Sequence[int]) -> list[int]:
    """Return the lengths that the model's positions allow. Print a note about the others."""
    limit = position_limit(opened.lm.model)
    supported = [length for length in lengths if limit is None or length <= limit]
    if not supported:
        raise ValueError(f"--lengths {lengths[0]}: {opened.name} has {limit:,} positions; name {limit} or less")
    if len(supported) < len(lengths):
        print(f"{opened.name} reads {limit:,} tokens at most: skipping longer texts")
    return supported
