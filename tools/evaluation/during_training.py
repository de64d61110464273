"""Suites while a run trains: what `train.py` hands to the trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.tokenizer import Tokenizer
from megatron_lite.config.schema import Config
from megatron_lite.parallel.grid import Grid
from models.language_model import LanguageModel


def suite_evaluation(
    config: Config[Any], tokenizer: Tokenizer, grid: Grid, model: Callable[[], LanguageModel]
) -> Callable[[], dict[str, float]] | None:
    """Return a function that evaluates `evaluation.suites` on the current model, or None if there are none.

    Every process calls it. The requests are shared out over the data ranks where each of them has the whole model; where
    a forward pass is everyone's (ZeRO 3), all do all of it.

    Raises:
        ValueError, FileNotFoundError: an unknown suite or task, or data that the folder lacks, so that a run with a wrong
            configuration ends before it begins. That the hub is out of reach is a warning: it does not stop a run.
    """
    settings = config.evaluation
    if not settings.suites:
        return None
    if grid.pipe_size * grid.context_size > 1:
        if grid.is_main:
            warnings.warn(
                "evaluation.suites: a model whose layers or sequences are on several processes is not evaluated while it "
                "trains; python eval.py RUN --suite ... evaluates its checkpoints",
                stacklevel=2,
            )
        return None
    from tools.evaluation.adapter import ProjectLM
    from tools.evaluation.command import scores
    from tools.evaluation.data_parallel import Processes
    from tools.evaluation.harness import evaluate, prepare_tasks
    from tools.evaluation.request import TaskRequest
    from tools.evaluation.suites import UnknownNameError, suite_names

    # A name is a suite's where there is one, a task's otherwise.
    suites = [name for name in settings.suites if name in suite_names() or name.endswith((".yml", ".yaml"))]
    tasks = [name for name in settings.suites if name not in suites]
    folder = None if settings.data_directory is None else Path(settings.data_directory)
    try:
        prepared = prepare_tasks(TaskRequest(tuple(suites), tuple(tasks), data_dir=folder))
    except UnknownNameError as error:
        raise UnknownNameError(f"evaluation.suites: {error}") from error
    except ConnectionError as error:
        if grid.is_main:
            warnings.warn(f"evaluation.suites are not evaluated in this run: {error}", stacklevel=2)
        return None
    shared = grid.data_size > 1 and config.parallel.zero_stage < 3
    processes = Processes(grid.data_rank, grid.data_size) if shared else Processes()

    def run() -> dict[str, float]:
        lm = ProjectLM(
            model(),
            tokenizer,
            max_length=config.batch.sequence_length,
            processes=processes,
            # Beside the trainer's own memory there is room for about what a micro batch takes.
            batch_tokens=max(4096, config.batch.micro_batch_size * config.batch.sequence_length),
            state_bytes=1 << 30,
            progress=False,
        )
        results = evaluate(lm, prepared)
        return {} if results is None else scores(results, prepared.suites)

    return run
