"""Prepare a run up to its first step: start checkpoint, data, engine, state, evaluation, trainer."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer, check_shapes
from megatron_lite.checkpoint.resume import StartPoint, check_length, find_start, restore
from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.engine.precision import faster_dtype
from megatron_lite.fault_tolerance.guards import StopSignal
from megatron_lite.metrics.logger import PREVIOUS_FILE_NAME, MetricsLogger, measured_kinds
from megatron_lite.parallel.collectives import on_main
from megatron_lite.parallel.grid import Grid
from megatron_lite.trainer import Steps, Trainer, TrainState
from megatron_lite.validation import due_measurements
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.loading.engine import build_engine
from tools.loading.model import parameter_shapes
from tools.pretraining.objective import Objective, open_objective
from tools.pretraining.summary import complete_message, is_complete, start_message, summary


def prepare_run(
    config: Config[ModelConfig], reload: Callable[..., Config[ModelConfig]], grid: Grid, early: StopSignal
) -> Callable[[], int]:
    """Prepare a run up to its first step; return a function that trains, to be called once, and returns the exit status.

    Args:
        reload: loads the configuration with more overrides.
        early: signals since before the preparation; they stop the run after its first step.

    Raises:
        ValueError, OSError, CheckpointError: the configuration, the data or a checkpoint cannot be used.
    """
    torch.manual_seed(config.run.seed)
    torch.set_float32_matmul_precision("highest")
    start = find_start(config.checkpoint, grid)
    is_trained = start is not None and start.is_trained
    if start is not None and is_trained and config.schedule.time_budget_minutes:
        config = reload(f"schedule.train_steps={start.read_train_steps()}")
    # If only the end is missing, such as the last validation, the trainer does it.
    if start is not None and start.is_own and on_main(grid, lambda: is_complete(config, start.manifest)):
        return _complete_run(config, start, grid)
    if start is not None:
        on_main(grid, lambda: check_length(start, config.batch.sequence_length))

    objective = open_objective(config, start, grid)
    dtype = _dtype(config, start, grid)
    engine = build_engine(config, grid, dtype)
    checkpointer = _open_checkpointer(config, engine)
    values, archive = restore(checkpointer, start, grid) if start is not None else ({}, None)
    state = TrainState.from_dict(values)
    state.tokenizer = objective.tokenizer_hash

    if not is_trained and config.schedule.time_budget_minutes:
        measured = objective.training_steps(objective.training_samples(1, state))(0)
        config = reload(f"schedule.train_steps={_steps_in_budget(config, engine, measured, grid)}")
    samples = objective.training_samples(config.schedule.train_steps, state)
    validation, test = objective.validation(), objective.test()

    def model() -> LanguageModel:
        return LanguageModel(config.model, layers=engine.layers)

    sample, suites = objective.sample(model), objective.suites(model)
    if state.evaluation_due:  # unless it was done after the checkpoint
        has = {"validation": validation is not None, "sample": sample is not None, "suites": suites is not None}
        due = due_measurements(config, state.step, **has)
        state.evaluation_due = on_main(grid, lambda: not due <= measured_kinds(config.run.path, state.step))
    metrics = None
    if grid.is_main:
        objective.save()
        print(start_message(config, engine, objective, state, start))
        if archive is not None:
            print(f"later checkpoints and metrics are moved to {archive} and {config.run.path / PREVIOUS_FILE_NAME}")
        metrics = _open_metrics(config, state, keep_previous=archive is not None)
    trainer = Trainer(
        engine,
        config,
        metrics,
        checkpointer,
        batches=objective.training_steps(samples),
        validation=validation,
        test=test,
        sources=samples.sources,
        state=state,
        sample=sample,
        suites=suites,
        early=early,
    )
    return lambda: _fit(trainer, objective)


def _complete_run(config: Config[ModelConfig], start: StartPoint, grid: Grid) -> Callable[[], int]:
    """Print that the run has nothing left to do. Raises CheckpointError for a model of another architecture."""
    check_shapes(parameter_shapes(config.model), start.manifest, start.path)
    if grid.is_main:
        print(complete_message(config, start.path, start.manifest["step"]))
    return lambda: 0


def _dtype(config: Config[ModelConfig], start: StartPoint | None, grid: Grid) -> str:
    """Return the configured number format; for auto the format of the checkpoint, or the faster one."""
    if config.precision.dtype != "auto":
        return config.precision.dtype
    if start is not None and start.is_trained:
        return start.manifest["layout"]["dtype"]
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    return on_main(grid, lambda: faster_dtype(grid.device, config.model.hidden_size, tokens))


def _open_checkpointer(config: Config[Any], engine: Engine) -> Checkpointer:
    return Checkpointer(
        engine,
        Path(config.checkpoint.directory),
        asynchronous=config.checkpoint.asynchronous,
        timeout_seconds=60 * config.run.save_timeout_minutes,
        keep_last=config.checkpoint.keep_last,
        is_permanent=config.checkpoint.is_permanent,
    )


def _steps_in_budget(config: Config[Any], engine: Any, steps: Steps, grid: Grid) -> int:
    """Return how many steps fit into `schedule.time_budget_minutes`, at most `schedule.train_steps`."""
    with closing(steps):
        seconds = engine.measure_step_seconds(next(steps))
    # A batch size ramp is measured at its smallest batch.
    samples = config.schedule.time_budget_minutes * 60 / seconds * config.batch.size_at(0)
    steps_in = range(1, config.schedule.train_steps + 1)
    return on_main(grid, lambda: max(1, bisect.bisect_right(steps_in, samples, key=config.batch.samples_of)))


def _open_metrics(config: Config[Any], state: TrainState, *, keep_previous: bool) -> MetricsLogger:
    return MetricsLogger(
        config.run.path,
        total_steps=config.schedule.train_steps,
        initial_step=state.step,
        measures_again=state.evaluation_due,
        keep_previous=keep_previous,
        progress_bar=config.logging.progress_bar,
        tensorboard=config.logging.tensorboard,
        wandb=config.logging.wandb.model_dump(),
        config=config.model_dump(mode="json"),
    )


def _fit(trainer: Trainer, objective: Objective) -> int:
    """Train, print the summary on the main process and return 0."""
    try:
        result = trainer.fit()
    finally:
        if trainer.metrics is not None:
            trainer.metrics.close()
        trainer.engine.close()
    if trainer.engine.grid.is_main:
        print(summary(trainer.config, result, objective))
    return 0
