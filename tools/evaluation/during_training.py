"""Evaluate suites during training: the function that `train.py` passes to the trainer."""

from __future__ import annotations

import re
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

    Every process calls it. Data ranks that hold the whole model share the requests. With ZeRO 3 a forward pass needs all
    ranks, and each rank answers all requests.

    Raises:
        ValueError, FileNotFoundError: an unknown suite or task, or missing data, so that a wrong configuration is refused
            before the first step. A hub that cannot be reached is a warning only.
    """
    settings = config.evaluation
    if not settings.suites:
        return None
    if grid.pipe_size * grid.context_size > 1:
        if grid.is_main:
            warnings.warn(
                "evaluation.suites: models with pipeline or context parallelism are not evaluated during training; "
                "evaluate their checkpoints with python eval.py RUN --suite ...",
                stacklevel=2,
            )
        return None
    from tools.evaluation.adapter import ProjectLM
    from tools.evaluation.command import scores
    from tools.evaluation.data_parallel import Processes
    from tools.evaluation.harness import evaluate, prepare_tasks
    from tools.evaluation.request import TaskRequest
    from tools.evaluation.suites import UnknownNameError, suite_names

    # Every name that is no suite is a task.
    suites = [name for name in settings.suites if name in suite_names() or name.endswith((".yml", ".yaml"))]
    tasks = [name for name in settings.suites if name not in suites]
    folder = None if settings.data_directory is None else Path(settings.data_directory)
    try:
        prepared = prepare_tasks(TaskRequest(tuple(suites), tuple(tasks), data_dir=folder))
    except UnknownNameError as error:
        raise UnknownNameError(f"evaluation.suites: {error}") from error
    except ConnectionError as error:
        if grid.is_main:
            message = f"evaluation.suites are not evaluated in this run: {_with_keys(str(error))}"
            warnings.warn(message, stacklevel=2)
        return None
    except (FileNotFoundError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(_with_keys(str(error))) from error
    shared = grid.data_size > 1 and config.parallel.zero_stage < 3
    processes = Processes(grid.data_rank, grid.data_size) if shared else Processes()

    def run() -> dict[str, float]:
        lm = ProjectLM(
            model(),
            tokenizer,
            max_length=config.batch.sequence_length,
            processes=processes,
            # The trainer leaves memory for about one micro-batch.
            batch_tokens=max(4096, config.batch.micro_batch_size * config.batch.sequence_length),
            state_bytes=1 << 30,
            progress=False,
        )
        results = evaluate(lm, prepared)
        return {} if results is None else scores(results, prepared.suites)

    return run


def _with_keys(message: str) -> str:
    """Return a message of the task loader with configuration keys in place of the options of eval.py."""
    message = re.sub(r" ?\(--without \S+\)", " (name the other tasks in evaluation.suites)", message)
    message = message.replace("take missing files from the hub (--hub)", "use the hub (evaluation.data_directory=null)")
    return message.replace("--data-dir", "evaluation.data_directory")
