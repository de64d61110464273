"""Prepare a run up to its first step: start checkpoint, data, engine, state, evaluation, trainer."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import Tokenizer
from megatron_lite.checkpoint.checkpointer import Checkpointer, check_shapes
from megatron_lite.checkpoint.resume import StartPoint, check_length, find_start, restore
from megatron_lite.config.loader import dump_config
from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.engine.precision import faster_dtype
from megatron_lite.fault_tolerance.guards import StopSignal
from megatron_lite.fault_tolerance.rank_consistency import file_facts, require_agreement
from megatron_lite.metrics.logger import PREVIOUS_FILE_NAME, MetricsLogger, measured_kinds
from megatron_lite.parallel.collectives import on_main
from megatron_lite.parallel.grid import Grid
from megatron_lite.planning.flops import peak_flops, training_flops_per_token
from megatron_lite.trainer import Steps, Trainer, TrainState
from megatron_lite.validation import due_measurements
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.evaluation.during_training import suite_evaluation
from tools.inference.generation import complete
from tools.loading.engine import build_engine
from tools.loading.token_data import PreparedData, check_sequence_length, prepared_data
from tools.loading.tokenizer import check_same_tokenizer, save_tokenizer
from tools.pretraining.data import training_samples, training_steps, validation_set
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

    data, tokenizer = _open_data(config, start, grid)
    dtype = _dtype(config, start, grid)
    engine = build_engine(config, grid, dtype)
    checkpointer = _open_checkpointer(config, engine)
    values, archive = restore(checkpointer, start, grid) if start is not None else ({}, None)
    state = TrainState.from_dict(values)
    state.tokenizer = tokenizer.hash

    def samples_of(steps: int) -> Any:
        def build() -> Any:
            return training_samples(config, data, tokenizer, steps, state.step, state.consumed_samples)

        on_main(grid, lambda: build() and None)  # one process writes the cache of the sample order
        return build()

    if not is_trained and config.schedule.time_budget_minutes:
        measured = training_steps(config, samples_of(1), grid)(0)
        config = reload(f"schedule.train_steps={_steps_in_budget(config, engine, measured, grid)}")
    samples = samples_of(config.schedule.train_steps)
    validation = validation_set(config, data.validation, data.validation_bytes, tokenizer, grid)
    test = validation_set(config, data.test, None, tokenizer, grid)

    def model() -> LanguageModel:
        return LanguageModel(config.model, layers=engine.layers)

    def sample() -> str:
        limit = config.evaluation.sample_tokens
        return complete(model(), tokenizer, config.evaluation.prompt, max_tokens=limit, temperature=0.7, top_p=0.9)

    suites = suite_evaluation(config, tokenizer, grid, model)
    writes_samples = _writes_samples(config, grid)
    if state.evaluation_due:  # unless it was done after the checkpoint
        has = {"validation": validation is not None, "sample": writes_samples, "suites": suites is not None}
        due = due_measurements(config, state.step, **has)
        state.evaluation_due = on_main(grid, lambda: not due <= measured_kinds(config.run.path, state.step))
    metrics = None
    if grid.is_main:
        save_tokenizer(tokenizer, config.run.path)
        print(start_message(config, engine, data, state, start.path if start else None))
        if archive is not None:
            print(f"later checkpoints and metrics are moved to {archive} and {config.run.path / PREVIOUS_FILE_NAME}")
        metrics = _open_metrics(config, state, keep_previous=archive is not None)
    trainer = Trainer(
        engine,
        config,
        metrics,
        checkpointer,
        batches=training_steps(config, samples, grid),
        validation=validation,
        test=test,
        sources=samples.sources,
        state=state,
        config_yaml=dump_config(config),
        flops_per_token=training_flops_per_token(
            engine.model, config.batch.sequence_length, config.data.predicted_fraction
        ),
        peak_flops=peak_flops(grid.device, dtype) if grid.is_main else None,
        sample=sample if writes_samples else None,
        suites=suites,
        early=early,
    )
    return lambda: _fit(trainer, data)


def _complete_run(config: Config[ModelConfig], start: StartPoint, grid: Grid) -> Callable[[], int]:
    """Print that the run has nothing left to do. Raises CheckpointError for a model of another architecture."""
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in LanguageModel(config.model).named_parameters()}
    check_shapes(shapes, start.manifest, start.path)
    if grid.is_main:
        print(complete_message(config, start.path, start.manifest["step"]))
    return lambda: 0


def _open_data(config: Config[ModelConfig], start: StartPoint | None, grid: Grid) -> tuple[PreparedData, Tokenizer]:
    """Prepare the token files and load their tokenizer. Check that all ranks and the checkpoint have the same ones."""
    data: PreparedData = on_main(grid, lambda: prepared_data(config.data, config.model.vocab_size))
    on_main(grid, lambda: check_sequence_length(data, config.batch.sequence_length))
    require_agreement({"data": file_facts(data.files)}, grid)
    tokenizer = data.load_tokenizer()
    if start is not None and start.is_trained:
        on_main(grid, lambda: check_same_tokenizer(tokenizer, config.run.path, start.manifest))
    return data, tokenizer


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


def _writes_samples(config: Config[Any], grid: Grid) -> bool:
    # A model with layers on several processes writes no text in training; tools.generate does.
    has_all_layers = grid.pipe_size * grid.context_size == 1
    return bool(config.evaluation.sample_tokens) and has_all_layers and config.data.objective == "causal"


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


def _fit(trainer: Trainer[Any], data: PreparedData) -> int:
    """Train, print the summary on the main process and return 0."""
    try:
        result = trainer.fit()
    finally:
        if trainer.metrics is not None:
            trainer.metrics.close()
        trainer.engine.close()
    if trainer.engine.grid.is_main:
        print(summary(trainer.config, result, data))
    return 0
