"""Describe what one command evaluates. A request is built once, from the command line or a configuration."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

NEEDLE, RULER = "needle", "ruler"  # suites that are no tasks of the harness
LENGTHS = (2048, 4096, 8192, 16384)
SEEDS = (0, 1234, 1234, 1234)  # the harness's defaults
DEPTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


@dataclass(frozen=True)
class TaskRequest:
    """Request suites and tasks of the lm-evaluation-harness.

    Attributes:
        suites: names of suites, or YAML files.
        tasks: additional tasks, groups and tags of the harness.
        without: tasks to leave out; their columns stay empty.
        data_dir: folder of data files; None for the hub.
        hub: whether data that the folder lacks come from the hub.
        split: evaluate this split ("validation", "test") instead of the stock task's, where the data have it.
        shots: examples in the prompt; None for the number of each task, which is 0 for the suites.
        include_path: folder with task YAMLs of one's own.
        limit: first documents per task that are evaluated: a number, or a share below 1; None for all.
        apply_chat_template, system_instruction, fewshot_as_multiturn, gen_kwargs: as `lm_eval.simple_evaluate`.
        seed: of random, NumPy, torch and the examples in the prompt.
    """

    suites: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    data_dir: Path | None = None
    hub: bool = False
    split: str | None = None
    shots: int | None = None
    include_path: Path | None = None
    limit: float | None = None
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: dict[str, Any] | None = None
    seed: tuple[int | None, ...] = SEEDS

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """Return the settings of prompts and generation that are not the default, by name."""
        default = TaskRequest()
        names = ("limit", "apply_chat_template", "system_instruction", "fewshot_as_multiturn", "gen_kwargs", "seed")
        return {name: value for name in names if (value := getattr(self, name)) != getattr(default, name)}


@dataclass(frozen=True)
class NeedleRequest:
    """Request needles in a haystack.

    Attributes:
        lengths: tokens per text.
        depths: percent of the filler before the needle.
        needles: facts per length and depth.
        seed: of the facts.
        filler: a text file; None for the run's validation text.
    """

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[int, ...] = DEPTHS
    needles: int = 5
    seed: int = 0
    filler: Path | None = None


@dataclass(frozen=True)
class RulerRequest:
    """Request the synthetic tasks of RULER.

    Attributes:
        tasks: keys of `data.synthetic.ruler.TASKS`; empty for all.
        without: tasks to leave out.
        lengths: tokens per text, with the generated answer.
        samples: texts per task and length.
        seed: of needles, words and places.
        filler: a text file that hides the needles; None for generated prose.
    """

    tasks: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (1024, *LENGTHS)
    samples: int = 100
    seed: int = 0
    filler: Path | None = None


@dataclass(frozen=True)
class TextRequest:
    """Request the perplexity of texts.

    Attributes:
        data: raw texts and prefixes of token files; empty for the run's validation set.
        text_key: key of the text in JSON lines.
        sequence_length: tokens per piece; None for the trained length, or 4 times it by position.
        stride: tokens between two pieces; None for pieces without common tokens.
        batch_size: pieces per batch.
        by_position: whether the loss is measured by position.
    """

    data: tuple[str, ...] = ()
    text_key: str = "text"
    sequence_length: int | None = None
    stride: int | None = None
    batch_size: int = 8
    by_position: bool = False


@dataclass(frozen=True)
class EvaluationRequest:
    """Request the evaluation of one model.

    Attributes:
        checkpoint: folder of a run or of a checkpoint, or a Hugging Face model.
        tasks, needle, ruler, texts: the kinds of evaluations; None for a kind that is not requested.
        device, dtype: as `tools.loading.model.locate_checkpoint`.
        out: the results file; None for a file in the run's folder.
        name: the model's name in tables; None for the name of the run.
        max_length: tokens in one request; None for the trained length.
        save_samples: whether every document is written with its answers.
        progress: whether a progress bar is shown.
        trust_remote_code: whether the code in a Hugging Face folder may run.
    """

    checkpoint: str
    tasks: TaskRequest | None = None
    needle: NeedleRequest | None = None
    ruler: RulerRequest | None = None
    texts: TextRequest | None = None
    device: str = "auto"
    dtype: str = "auto"
    out: Path | None = None
    name: str | None = None
    max_length: int | None = None
    save_samples: bool = False
    progress: bool = True
    trust_remote_code: bool = False

    @property
    def kinds(self) -> list[str]:
        """Return the requested kinds of results, keys of `results_file.KINDS`, in the order of their evaluation."""
        requested = {"needle": self.needle, "ruler": self.ruler, "suites": self.tasks, "texts": self.texts}
        return [kind for kind, request in requested.items() if request is not None]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> EvaluationRequest:
        """Return the request of a command line of `eval.py`. Texts are the default kind.

        Every option has the name of a field. Raises ValueError for options that no requested evaluation has.
        """
        suites = tuple(name for name in options.suite if name not in (NEEDLE, RULER))
        tasks = texts = needle = ruler = None
        seed = (options.seed or [0])[0] or 0
        if RULER in options.suite:  # its tasks are those of --tasks
            ruler = _filled(RulerRequest, options, seed=seed)
            if (limit := options.limit) is not None:
                most = limit if limit >= 1 else math.ceil(limit * ruler.samples)
                ruler = replace(ruler, samples=min(ruler.samples, most))
            options.tasks = []
        if suites or options.tasks:
            tasks = _filled(TaskRequest, options, suites=suites)
        if options.limit is not None and tasks is None and ruler is None:
            raise ValueError(
                f"--limit {options.limit}: it counts documents of tasks, and no task is named; name --suite ruler or --tasks, or "
                "leave --limit out (--needles sets the facts of --suite needle)"
            )
        if NEEDLE in options.suite:
            needle = _filled(NeedleRequest, options, seed=seed)
        if options.data or options.by_position or not (options.suite or options.tasks):
            texts = _filled(TextRequest, options)
        _refuse_unused(options, [request for request in (tasks, needle, ruler, texts) if request is not None])
        return _filled(cls, options, tasks=tasks, needle=needle, ruler=ruler, texts=texts)


def _refuse_unused(options: argparse.Namespace, requests: Sequence[Any]) -> None:
    """Raise ValueError for an option that no request has. --limit has a check of its own; a seed does no harm."""
    used = {"limit", "seed"}.union(*(request.__dataclass_fields__ for request in requests))
    for name in sorted({name for kind in _KINDS for name in kind.__dataclass_fields__} - used):
        owners = [kind for kind in _KINDS if name in kind.__dataclass_fields__]
        if getattr(options, name, None) not in (None, [], owners[0].__dataclass_fields__[name].default):
            places = " or ".join(_KINDS[kind] for kind in owners)
            raise ValueError(
                f"--{name.replace('_', '-')}: no requested evaluation has this option; add {places}, or leave it out"
            )


# Kind of request -> the option that requests it.
_KINDS: dict[type[Any], str] = {
    TaskRequest: "--tasks",
    NeedleRequest: "--suite needle",
    RulerRequest: "--suite ruler",
    TextRequest: "--data",
}


def _filled(kind: type[Any], options: argparse.Namespace, **values: Any) -> Any:
    """Return a request whose fields are the options of the same names. Options that are None keep the field's default."""
    for field in fields(kind):
        value = getattr(options, field.name, None)
        if field.name not in values and value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
