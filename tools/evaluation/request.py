"""What one command evaluates. It is built once, from the command line or from a configuration."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

NEEDLE = "needle"  # a suite of its own: no task of the harness
LENGTHS = (2048, 4096, 8192, 16384)
DEPTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


@dataclass(frozen=True)
class TaskRequest:
    """Suites and tasks of the lm-evaluation-harness.

    Attributes:
        suites: names of suites, or YAML files.
        tasks: tasks of the harness, in addition.
        without: tasks of the suites to leave out; their columns stay empty.
        data_dir, hub, split: as `tools.evaluation.tasks.load_tasks`.
        shots: examples in the prompt; None for the number of each task, which is none for the suites.
    """

    suites: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    data_dir: Path | None = None
    hub: bool = False
    split: str | None = None
    shots: int | None = None


@dataclass(frozen=True)
class NeedleRequest:
    """Needles in a haystack.

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
class TextRequest:
    """Perplexity of texts.

    Attributes:
        data: raw texts and prefixes of token files; empty for the run's validation set.
        text_key: key of the text in JSON lines.
        sequence_length: tokens per piece; None for the trained length, or 4 times it by position.
        batch_size: pieces per batch.
        by_position: whether the loss is measured by position.
    """

    data: tuple[str, ...] = ()
    text_key: str = "text"
    sequence_length: int | None = None
    batch_size: int = 8
    by_position: bool = False


@dataclass(frozen=True)
class EvaluationRequest:
    """A model, and what it is evaluated on.

    Attributes:
        checkpoint: folder of a run or of a checkpoint, or a Hugging Face model.
        tasks, needle, texts: the three kinds of evaluations; None for a kind that is not requested.
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
        """The kinds of results, in the order of their evaluation: keys of `results_file.KINDS`."""
        requested = {"needle": self.needle, "suites": self.tasks, "texts": self.texts}
        return [kind for kind, request in requested.items() if request is not None]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> EvaluationRequest:
        """Return the request of a command line of `eval.py`. Texts are the default kind."""
        suites = tuple(name for name in options.suite if name != NEEDLE)
        tasks = texts = needle = None
        if suites or options.tasks:
            tasks = TaskRequest(
                suites,
                tuple(options.tasks),
                tuple(options.without),
                options.data_dir,
                options.hub,
                options.split,
                options.shots,
            )
        if NEEDLE in options.suite:
            lengths, depths = tuple(options.lengths or LENGTHS), tuple(options.depths or DEPTHS)
            needle = NeedleRequest(lengths, depths, options.needles, options.seed, options.filler)
        if options.data or options.by_position or not (options.suite or options.tasks):
            texts = TextRequest(
                tuple(options.data),
                options.text_key,
                options.sequence_length,
                options.batch_size,
                options.by_position,
            )
        return cls(
            options.checkpoint,
            tasks,
            needle,
            texts,
            device=options.device,
            dtype=options.dtype,
            out=options.out,
            name=options.name,
            max_length=options.max_length,
            save_samples=options.samples,
            progress=options.progress,
            trust_remote_code=options.trust_remote_code,
        )
