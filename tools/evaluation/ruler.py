"""Measure RULER's synthetic tasks (Hsieh et al. 2024, arXiv 2404.06654): retrieval, tracing and aggregation by length.

The texts are those of `data.synthetic.ruler`. The score of a text is the share of its right answers that greedy decoding
writes, compared as strings without regard to case. The limits of generated tokens are the paper's.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.synthetic.ruler import TASKS, TEXTS_VERSION, RulerExample, make_example
from data.synthetic.ruler_text import prose
from megatron_lite.plural import counted
from models.options import nearest_names
from tools.evaluation.cells import by_place, draw_cells, formatted, length_label, with_cells, write_cells
from tools.evaluation.haystack import (
    Filler,
    note_untrained,
    position_limit,
    read_filler,
    refuse_masked,
    split_filler,
)
from tools.evaluation.open_model import OpenedModel, open_model
from tools.evaluation.request import EvaluationRequest, RulerRequest
from tools.evaluation.results_file import matching_results, number_format, refuse_others, weights

if TYPE_CHECKING:
    from tools.loading.model import LocatedCheckpoint

# Places of the answers of single needles, in percent. Successive examples take every seventh one.
DEPTHS = tuple(range(0, 101, 10))


@dataclass(frozen=True)
class Text:
    """Hold one text of a table. max_tokens: limit of the generated answer."""

    task: str
    length: int
    example: RulerExample
    max_tokens: int


def check_ruler(request: RulerRequest, *, alone: bool = True) -> None:
    """Raise ValueError for unknown tasks, a selection without a task, and seeds below 0.

    alone: whether no other suite is requested, whose tasks --without may name.
    """
    for name in request.tasks:
        if name not in TASKS:
            raise ValueError(
                f"--tasks {name}: there is no such task of RULER (evaluate other tasks without --suite ruler); "
                f"{nearest_names(name, TASKS)}"
            )
    if alone and (unknown := [name for name in request.without if name not in TASKS]):
        raise ValueError(f"--without {unknown[0]}: there is no such task of RULER; {nearest_names(unknown[0], TASKS)}")
    if not task_names(request):
        raise ValueError(f"--without leaves no task of RULER: allowed are some of {', '.join(TASKS)}")
    if request.seed < 0:
        raise ValueError(
            f"--seed {request.seed}: seeds from 0 are allowed; tools.retrieval_text trains on those below 0"
        )


def task_names(request: RulerRequest) -> list[str]:
    """Return the requested tasks in the order of the paper."""
    return [task for task in TASKS if task in (request.tasks or TASKS) and task not in request.without]


def run_ruler(
    request: EvaluationRequest, ruler: RulerRequest, located: LocatedCheckpoint | None
) -> dict[str, Any] | None:
    """Measure the score by task and length, print the table, write JSON, Markdown and the heat map.

    located: None for a Hugging Face model. Returns the results, or None on a process other than the main one.

    Raises ValueError for a masked model, for lengths beyond the learned positions, below the shortest text of a task or
    beyond a filler that a task reads; as `open_model`.
    """
    from tools.evaluation.harness import is_main_process

    lengths = sorted(set(ruler.lengths))
    text, digest = read_filler(ruler.filler)
    refuse_masked(located)
    opened = open_model(request, located, "ruler", max_length=max(lengths))
    limit = position_limit(opened.lm.model)
    if limit is not None and max(lengths) > limit:
        raise ValueError(f"--lengths {max(lengths)}: {opened.name} has {limit:,} positions; name {limit} or less")
    settings = {
        "dtype": number_format(opened.lm.model),
        "samples": ruler.samples,
        "seed": ruler.seed,
        "texts_version": TEXTS_VERSION,
        "filler": str(ruler.filler or "generated prose"),
        "filler_sha256": digest,
    }
    description = {"model": opened.facts, "title": opened.name, **settings}
    cell_settings = _settings(description)
    refuse_others(opened.out, "ruler", _settings, cell_settings)
    if is_main_process(opened.lm):
        note_untrained(opened, lengths)
    filler = None if ruler.filler is None else split_filler(text, opened.lm.tok_encode, max(lengths))
    cells: list[dict[str, Any]] = []
    every = {length: _texts(opened, ruler, filler, length) for length in lengths}  # refused before the first answer
    for length, texts in every.items():
        if is_main_process(opened.lm):
            print(f"RULER at {length:,} tokens: {counted(len(texts), 'text')}", file=sys.stderr)
        cells += score_cells(texts, _outputs(opened, texts), keep_outputs=request.save_samples)
    if not is_main_process(opened.lm):
        return None
    earlier = matching_results(opened.out, "ruler", _settings, cell_settings)  # the file may have changed since
    results = with_cells(earlier, {**description, "cells": cells}, "task", list(TASKS).index)
    write_cells(opened.out, results, table(results), heat_map)
    opened.finish()
    if opened.loaded is not None:
        _add_to_run(opened, results)
    return results


def string_match(output: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the output contains, without regard to case."""
    lower = output.lower()
    return statistics.mean(answer.lower() in lower for answer in answers)


def score_cells(texts: Sequence[Text], outputs: Sequence[str], *, keep_outputs: bool = False) -> list[dict[str, Any]]:
    """Return mean score and standard error of every task and length, and the score of every example.

    keep_outputs: also keep answers and generated texts.
    """
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for text, output in zip(texts, outputs, strict=True):
        answers = text.example.answers
        row: dict[str, Any] = {"depth": text.example.depth, "score": string_match(output, answers)}
        if keep_outputs:
            row |= {"answers": answers, "output": output}
        cells.setdefault((text.task, text.length), []).append(row)
    return [
        {
            "task": task,
            "length": length,
            "score": statistics.mean(row["score"] for row in rows),
            "stderr": statistics.stdev(row["score"] for row in rows) / len(rows) ** 0.5 if len(rows) > 1 else None,
            "examples": rows,
        }
        for (task, length), rows in cells.items()
    ]


def depth_cells(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the mean score of the single needles (niah_single_1 to 3) by length and depth in percent."""
    scores: dict[tuple[int, int], list[float]] = {}
    for cell in results["cells"]:
        if cell["task"].startswith("niah_single"):
            for row in cell["examples"]:
                scores.setdefault((cell["length"], round(100 * row["depth"])), []).append(row["score"])
    return [
        {"length": length, "depth": depth, "score": statistics.mean(values)}
        for (length, depth), values in scores.items()
    ]


def table(results: Mapping[str, Any]) -> str:
    """Return Markdown tables of scores in percent: tasks by length with averages, and single needles by depth.

    A cell that was not measured is a dash, and so is an average over it.
    """
    from tools.reporting.tables import markdown_table

    lengths = results["lengths"]
    header = [*(f"{length:,}" for length in lengths), "average"]
    values = _percent(results["cells"], "task", results["tasks"], lengths)
    parts = [
        f"{results['title']}: RULER, score in percent by tokens of text; {counted(results['samples'], 'text')} per cell",
        markdown_table(["task", *header], _rows(results["tasks"], values), aligned=True),
    ]
    if by_depth := depth_cells(results):
        depths = sorted({cell["depth"] for cell in by_depth})
        values = _percent(by_depth, "depth", depths, lengths)
        parts += [
            "Single needles (niah_single), score in percent by depth of the needle",
            markdown_table(["depth, %", *header], _rows(depths, values), aligned=True),
        ]
    return "\n\n".join(parts) + "\n"


def heat_map(results: Mapping[str, Any], out: Path) -> None:
    """Draw the scores by task and length, and those of single needles by depth and length."""
    from tools.reporting.style import saved_figure

    lengths = results["lengths"]
    panels: list[tuple[str, str, Sequence[Any], Any]] = [
        ("task", "score of each task, %", results["tasks"], results["cells"])
    ]
    if by_depth := depth_cells(results):
        depths = sorted({cell["depth"] for cell in by_depth})
        panels.append(("depth", "single needles by depth of the needle, %", depths, by_depth))
    height = 1.5 + 0.3 * max(len(rows) for _, _, rows, _ in panels)
    style = {"axes.grid": False}
    with saved_figure(out, 1, len(panels), style=style, height=height, squeeze=False) as (figure, axes):
        for panel, (row, words, rows, cells) in zip(axes[0], panels, strict=True):
            values = _percent(cells, row, rows, lengths)
            draw_cells(panel, values, [str(name) for name in rows], lengths, limits=(0, 100), digits=0)
            panel.set(title=words, xlabel=length_label(results))
        figure.suptitle(results["title"])


def _percent(cells: Sequence[Mapping[str, Any]], row: str, rows: Sequence[Any], lengths: Sequence[int]) -> Any:
    return 100 * by_place(cells, "score", row, rows, lengths)


def _rows(names: Sequence[Any], values: Any) -> list[list[str]]:
    """Return rows of a table [names, lengths], with a last row and a last column of averages."""
    values = np.vstack([values, values.mean(0)])
    values = np.column_stack([values, values.mean(1)])
    return [[str(name), *formatted(row, 1)] for name, row in zip([*names, "average"], values, strict=True)]


def _settings(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell besides task and length; empty for no results."""
    if not results:
        return {}
    return {
        "weights": weights(results["model"]),
        "number format": results["dtype"],
        "--samples": results["samples"],
        "--seed": results["seed"],
        "texts of version": results.get("texts_version", 1),
        "filler": results["filler_sha256"] or results["filler"],
    }


def _repeated(filler: Filler, length: int) -> Iterator[str]:
    """Yield the sentences of a filler without end, because `make_example` also tries texts beyond the length.

    Raises ValueError at the first sentence if the filler has fewer tokens than the length.
    """
    if filler.total < length:
        raise ValueError(
            f"length {length}: the filler has {filler.total:,} tokens; name a longer text with --filler, or a shorter length"
        )
    yield from itertools.cycle(filler.pieces)


def _texts(opened: OpenedModel, ruler: RulerRequest, filler: Filler | None, length: int) -> list[Text]:
    """Return the texts of one length. Successive single needles have different depths.

    filler: None for generated prose. Only tasks with needles in prose read it.

    Raises ValueError naming every task without a text of this length.
    """

    def count(text: str) -> int:
        return len(opened.lm.tok_encode(text))

    generated = list(itertools.islice(prose("haystack"), length // 5 + 1)) if filler is None else []
    texts: list[Text] = []
    refused: dict[str, str] = {}
    for task in task_names(ruler):
        kind = TASKS[task]
        for number in range(ruler.samples):
            depth = DEPTHS[7 * number % len(DEPTHS)] / 100 if kind.single else None
            seed = 1_000_000 * ruler.seed + number
            haystack: Any = generated if filler is None else _repeated(filler, length)
            try:
                example = make_example(task, length, seed, count, haystack, depth=depth, answer_tokens=kind.max_tokens)
            except ValueError as error:
                refused[task] = str(error)
                break
            # A tokenizer of short pieces may need more tokens for the right answer than the paper allows.
            texts.append(Text(task, length, example, max(kind.max_tokens, count(example.completion))))
    if refused:
        raise ValueError(
            f"{'; '.join(refused.values())} with --lengths, or leave out what does not fit: --without {','.join(refused)}"
        )
    return texts


def _outputs(opened: OpenedModel, texts: Sequence[Text]) -> list[str]:
    """Return the greedy continuation of every prompt."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance(
            "generate_until",
            {},
            (
                text.example.prompt + space_before_answer(opened.lm.tok_encode, text.example),
                {"until": [], "max_gen_toks": text.max_tokens, "do_sample": False},
            ),
            number,
            ("ruler", number, 1),
        )
        for number, text in enumerate(texts)
    ]
    return opened.cached_lm.generate_until(requests)


def space_before_answer(encode: Callable[[str], Sequence[int]], example: RulerExample) -> str:
    """Return " " for a tokenizer whose tokens end with spaces, else "".

    Such a tokenizer reads "is 1" as "is " and "1". A prompt that ends with "is" would end with a token that no text holds there.
    """
    end = example.answer_prefix
    whole = encode(f"{end} 1")

    def begins(text: str) -> bool:
        ids = encode(text)
        return list(whole[: len(ids)]) == list(ids)

    return " " if not begins(end) and begins(end + " ") else ""


def _add_to_run(opened: OpenedModel, results: Mapping[str, Any]) -> None:
    """Add the scores to the run's results file, which its report page and the card of its export show."""
    from tools.evaluation.run_results import add_to_run

    scores: dict[str, dict[str, float]] = {}
    details: dict[str, dict[str, Any]] = {}
    for cell in results["cells"]:
        metric = f"score at {cell['length']:,} tokens"
        scores.setdefault(cell["task"], {})[metric] = cell["score"]
        details.setdefault(cell["task"], {})[metric] = {"stderr": cell["stderr"], "documents": len(cell["examples"])}
    add_to_run(opened.loaded, {"ruler": scores}, {"ruler": details})
