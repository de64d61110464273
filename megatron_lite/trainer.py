"""The training loop: batch, step, log; validation, checkpoint and stop when they are due."""

from __future__ import annotations

import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.writer import refuse_not_finite
from megatron_lite.config.loader import dump_config
from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Batch, Engine, StepResult
from megatron_lite.fault_tolerance.finite_check import fault_of_loss, state_not_finite
from megatron_lite.fault_tolerance.guards import SkipCounter, SpikeGuard, StopSignal, TooManySkippedSteps, Watchdog
from megatron_lite.fault_tolerance.heartbeat import Heartbeat
from megatron_lite.fault_tolerance.replica_check import ReplicaCheck, ReplicasDifferError
from megatron_lite.fault_tolerance.straggler_detection import StragglerDetector, timed_layers
from megatron_lite.metrics.logger import MetricsLogger
from megatron_lite.metrics.per_source_loss import PerSourceLoss
from megatron_lite.metrics.step_metrics import StepMetrics
from megatron_lite.optim.lr_schedule import learning_rate
from megatron_lite.parallel.collectives import any_rank, set_collective_timeout
from megatron_lite.validation import ValidationSet, due_measurements, evaluate

# Factor of `run.watchdog_minutes` and `run.timeout_minutes` for the first step, which compiles, and for suites.
_LONG = 3.0
_FIRST_STEP_MINUTES = 30.0  # least timeout of collectives in the first step


class Steps(Protocol):
    """Iterates over the micro-batches of this process per step; closed when the loop ends."""

    def __next__(self) -> Sequence[Batch]: ...

    def close(self) -> None: ...


@dataclass
class TrainState:
    """Everything that a resumed run needs besides weights and optimizer state.

    Attributes:
        step: completed steps, skipped ones included.
        consumed_samples: position in the sample order, which decides the next samples.
        consumed_tokens: tokens of these samples, padding included.
        skipped_steps: steps without an update; the learning rate depends on step - skipped_steps.
        skipped_in_a_row: skipped steps since the last update.
        seconds: training time over all starts.
        loss_mean: running mean of the spike guard.
        losses_seen: number of losses in this mean.
        source_sums: of the steps since the last log line, see `PerSourceLoss`.
        tokenizer: hash of the tokenizer; None in checkpoints of earlier versions.
        evaluation_due: the save came before the evaluation after this step; the next start begins with the evaluation.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    loss_mean: float | None = None
    losses_seen: int = 0
    source_sums: dict[str, list[float]] = field(default_factory=dict)
    tokenizer: str | None = None
    evaluation_due: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Return the state in a checkpoint."""
        # Old checkpoints have no `losses_seen`: one loss per step that was not skipped.
        values = {"losses_seen": values.get("step", 0) - values.get("skipped_steps", 0), **values}
        return cls(**{known.name: values[known.name] for known in fields(cls) if known.name in values})


@dataclass(frozen=True)
class FitResult:
    """Result of the loop.

    Attributes:
        finished: all steps are complete; otherwise a signal stopped the run after a save.
        validation: metrics of the whole validation set; empty without one.
        checkpoint: the latest one of the run, on the main process.
    """

    finished: bool
    state: TrainState
    validation: dict[str, float]
    checkpoint: Path | None


class Trainer:
    """Trains an engine.

    Args:
        metrics: on the main process; None on the others.
        checkpointer: for the engine and the run's checkpoints folder.
        batches: consumed samples -> the steps from there on.
        validation: read during the run and at its end; None for a run without validation data.
        test: a second set, for the end of the run; None for none.
        sources: names of the sources of the text, indexed by `source` of the batches, for per-source losses; empty for none.
        state: of the start checkpoint, or of a new run. The trainer updates it.
        sample: returns text of the model, as values to log; None for none. Every process calls it after each validation.
        suites: returns scores of `evaluation.suites`, empty on processes without results; None for none. Every process calls it.
        early: signals received before the trainer existed; they stop it after its first step.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config[Any],
        metrics: MetricsLogger | None,
        checkpointer: Checkpointer,
        *,
        batches: Callable[[int], Steps],
        validation: ValidationSet | None,
        test: ValidationSet | None,
        sources: Sequence[str],
        state: TrainState,
        sample: Callable[[], dict[str, str]] | None,
        suites: Callable[[], dict[str, float]] | None,
        early: StopSignal,
    ) -> None:
        self.engine, self.config, self.metrics, self.state = engine, config, metrics, state
        self._batches, self._validation, self._test, self._sample = batches, validation, test, sample
        self._config_yaml = dump_config(config)
        self._step_metrics = StepMetrics(engine, config)
        self._sources = PerSourceLoss(sources, state.source_sums)
        self._suites, self._early = suites, early
        self._checkpointer = checkpointer
        self._skips = SkipCounter(
            config.run.max_skipped_steps, config.run.path, writes=engine.grid.is_main, in_a_row=state.skipped_in_a_row
        )
        self._spikes = SpikeGuard(config.run.spike_factor, state.loss_mean, state.losses_seen)
        tokens = config.batch.tokens_per_step // config.batch.data_ranks // config.parallel.context
        self._replicas = ReplicaCheck(engine.optimizer_state, engine.grid, config.run.replica_check_interval, tokens)
        layers = timed_layers(engine.layers, config.parallel)
        self._stragglers = StragglerDetector(layers, engine.grid, config.logging.spread_interval)

    def fit(self) -> FitResult:
        """Train to the last step or to a signal.

        Raises:
            TooManySkippedSteps: see `SkipCounter`.
            CheckpointError: a save failed; the previous checkpoint is intact.
            ReplicasDifferError: copies of a tensor differ between ranks.
            NotFiniteError: weights, moments or a validation loss are not finite.
        """
        config, state, grid = self.config, self.state, self.engine.grid
        who = f"rank {grid.rank} of {grid.world_size} ({socket.gethostname()}, process {os.getpid()})"
        stuck = config.run.heartbeat_seconds / 2 or None
        with (
            StopSignal(early=self._early) as signal,
            Watchdog(config.run.watchdog_minutes, who, delay=0.3 * grid.local_rank, stuck_seconds=stuck) as watchdog,
            Heartbeat(grid, config.run.heartbeat_seconds, state.step) as heartbeat,
            closing(self._batches(state.consumed_samples)) as steps,
        ):
            self._signal, self._watchdog = signal, watchdog
            initial_step, last = state.step, state.step >= config.schedule.train_steps
            stopped = not last and not self._evaluate_due()
            set_collective_timeout(60 * max(_FIRST_STEP_MINUTES, _LONG * config.run.timeout_minutes))
            watchdog.kick(_LONG)
            while not stopped and not last:
                self._step(steps)
                heartbeat.step = state.step
                if state.step == initial_step + 1:
                    set_collective_timeout(60 * config.run.timeout_minutes)
                watchdog.kick()
                stopped, busy = any_rank([signal.received is not None, self._checkpointer.is_busy], grid)
                self._note_saved(self._checkpointer.settle(busy))
                last = state.step == config.schedule.train_steps
                state.evaluation_due = not last and bool(self._due_measurements())
                # The checkpoint is complete before the evaluation, so that a kill during it loses no step.
                if save := stopped or last or self._save_due():
                    self._save(wait=stopped or last or state.evaluation_due)
                if not stopped and not self._evaluate_due():
                    stopped = True
                    if not save:
                        self._save(wait=True)
            if stopped and not last:
                self._log({"signal": signal.received or "on another rank"}, "stop")
            final = self._evaluate_at_the_end() if last else None
        return FitResult(final is not None, state, final or {}, self._checkpointer.latest() if grid.is_main else None)

    def _step(self, steps: Steps) -> None:
        config, state = self.config, self.state
        begin = time.perf_counter()
        micro_batches = next(steps)
        data_seconds = time.perf_counter() - begin
        lr = learning_rate(state.step - state.skipped_steps, config.optimizer.lr, config.schedule)
        sources = self._sources
        with self._stragglers.timing(state.step + 1):
            result = self.engine.train_step(
                micro_batches, lr=lr, should_skip=self._before_update, num_sources=len(sources.names)
            )
        sources.add(result.by_source)
        if not math.isfinite(result.loss):
            self._find_fault(micro_batches)
        seconds = time.perf_counter() - begin
        first_sample = state.consumed_samples
        samples = config.batch.size_at(first_sample)
        tokens = samples * config.batch.sequence_length
        state.step += 1
        state.consumed_samples += samples
        state.consumed_tokens += tokens
        state.seconds += seconds
        state.skipped_steps += result.skipped
        state.loss_mean, state.losses_seen = self._spikes.mean, self._spikes.seen
        self._log_step(result, lr=lr, tokens=tokens, seconds=seconds, data_seconds=data_seconds)
        try:
            self._replicas.finish()
            self._skips.record(
                step=state.step,
                skipped=result.skipped,
                samples=(first_sample, state.consumed_samples),
                loss=result.loss,
                gradient_norm=result.gradient_norm,
            )
        except (ReplicasDifferError, TooManySkippedSteps):  # raised on every process
            self._note_saved(self._checkpointer.finish())
            raise
        state.skipped_in_a_row = self._skips.in_a_row

    def _log_step(self, result: StepResult, *, lr: float, tokens: int, seconds: float, data_seconds: float) -> None:
        """Log the values of the last step if they are due, and slow ranks. Every process calls it."""
        state = self.state
        stragglers = self._stragglers.compare(data_seconds) if self._stragglers.is_due(state.step) else None
        if self.metrics is None:
            return
        if _due(state.step, self.config.logging.interval) or result.skipped:
            values = self._step_metrics.values(
                result,
                lr=lr,
                tokens=tokens,
                consumed_tokens=state.consumed_tokens,
                skipped_steps=state.skipped_steps,
                seconds=seconds,
                data_seconds=data_seconds,
                stragglers=stragglers,
            )
            self._log({**values, **self._sources.take()}, "train")
        for text in stragglers.slow if stragglers is not None else ():
            self.metrics.warn(state.step, text, kind="slow_rank")

    def _before_update(self, loss: float) -> bool:
        """Return whether to skip the update. The weights are still those of this step's forward pass."""
        self._replicas.before_update(self.state.step + 1)
        return self._spikes.should_skip(loss)

    def _find_fault(self, micro_batches: Sequence[Batch]) -> None:
        """Log whether the fault behind a non-finite loss is transient or persistent. A non-finite state ends the run."""
        fault = fault_of_loss(self.engine, micro_batches)
        if fault is not None and self.metrics is not None:
            self.metrics.warn(self.state.step + 1, fault.text, kind=fault.kind)
        if fault is not None and fault.kind == "persistent_fault":
            self._refuse_state(f"step {self.state.step + 1} is not finite")

    def _due_measurements(self) -> set[str]:
        has = {"validation": self._validation is not None, "sample": self._sample is not None}
        return due_measurements(self.config, self.state.step, **has, suites=self._suites is not None)

    def _evaluate_due(self) -> bool:
        """Run the evaluation that is due after a step before the last. Return False if a signal interrupts it."""
        if self.state.evaluation_due:
            due = self._due_measurements()
            interrupted = "validation" in due and self._validate(self.config.evaluation.batches) is None
            interrupted = interrupted or ("evaluation" in due and not self._evaluate_suites())
            self.state.evaluation_due = interrupted
        return not self.state.evaluation_due

    def _evaluate_at_the_end(self) -> dict[str, float] | None:
        """Return the metrics of the whole validation set after the last step; None if a signal interrupts the evaluation."""
        if (final := self._validate(None)) is None:
            return None
        if self._test is not None and self._evaluate(self._test, None, "test") is None:
            return None
        return final if self._evaluate_suites() else None

    def _validate(self, limit: int | None) -> dict[str, float] | None:
        if self._validation is None:
            return {}
        values = self._evaluate(self._validation, limit, "validation")
        if values is None:
            return None
        if self._sample is not None:
            with self.engine.optimizer_state.averaged(), self.engine.evaluating():
                sample = self._sample()
            self._log(sample, "sample")
        return values

    def _evaluate(self, data: ValidationSet, limit: int | None, kind: str) -> dict[str, float] | None:
        # A whole set may take as long as many steps.
        progress = partial(self.metrics.show_share, kind) if limit is None and self.metrics is not None else None
        with self.engine.optimizer_state.averaged():
            values = evaluate(self.engine, data, limit, progress, stop=self._stop_between_batches)
        if values is None:
            return None
        values["tokens"] = self.state.consumed_tokens
        self._log(values, kind)
        if values["evaluated_tokens"] and not math.isfinite(values["loss"]):
            self._refuse_state(f"the {kind} loss of step {self.state.step} is not finite", always=True)
        return values

    def _refuse_state(self, what: str, *, always: bool = False) -> None:
        """Raise NotFiniteError on every process where weights or moments are not finite, or `always`."""
        names = state_not_finite(self.engine.optimizer_state, self.engine.grid)
        if names or always:
            self._note_saved(self._checkpointer.finish())
            names = names or ["all weights and moments are finite, so the cause is the forward pass or the data"]
            refuse_not_finite(what, names, self._checkpointer.directory, self.engine.grid)

    def _stop_between_batches(self) -> bool:
        """Return whether a signal has stopped any process. Every process calls it."""
        self._watchdog.kick()
        return any_rank([self._signal.received is not None], self.engine.grid)[0]

    def _evaluate_suites(self) -> bool:
        """Log the scores, or the error, which never stops a run. Return False if a signal came before."""
        if self._suites is None:
            return True
        if self._stop_between_batches():
            return False
        # Longer than the watchdog's time, so that a hang prints its stacks before it ends the run.
        set_collective_timeout(60 * _LONG * self.config.run.timeout_minutes)
        self._watchdog.kick(_LONG)
        begin = time.perf_counter()
        kind, values = "evaluation", dict[str, float | str]()
        try:
            with self.engine.optimizer_state.averaged(), self.engine.evaluating():
                values.update(self._suites())
        except Exception as error:
            kind, values = "evaluation_error", {"error": f"{type(error).__name__}: {error}"}
            if self.engine.grid.is_main:
                warnings.warn(f"evaluation.suites at step {self.state.step} failed: {error}", stacklevel=2)
        self._log(values | {"tokens": self.state.consumed_tokens, "seconds": time.perf_counter() - begin}, kind)
        set_collective_timeout(60 * self.config.run.timeout_minutes)
        self._watchdog.kick()
        return True

    def _save(self, wait: bool) -> None:
        checkpointer, state, run = self._checkpointer, self.state, self.config.run
        set_collective_timeout(60 * run.save_timeout_minutes)
        self._note_saved(checkpointer.finish())
        self._replicas.compare(state.step)
        if self.metrics is not None:
            self.metrics.flush()
        checkpointer.save_async(step=state.step, state=asdict(state), config_yaml=self._config_yaml)
        if wait or not checkpointer.asynchronous:
            self._note_saved(checkpointer.finish())
        set_collective_timeout(60 * run.timeout_minutes)
        self._watchdog.kick()

    def _note_saved(self, complete: bool) -> None:
        last = self._checkpointer.last
        if complete and last is not None:
            self._log({"seconds": last.seconds, "stopped_seconds": last.stopped_seconds}, "checkpoint", last.step)

    def _log(self, values: Mapping[str, Any], kind: str, step: int | None = None) -> None:
        """Write a metrics line of a step, None: the last one, on the process that has the metrics file."""
        if self.metrics is not None:
            self.metrics.log(self.state.step if step is None else step, values, kind=kind)

    def _save_due(self) -> bool:
        settings, step = self.config.checkpoint, self.state.step
        return _due(step, settings.interval) or settings.is_permanent(step)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
