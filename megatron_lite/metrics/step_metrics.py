"""Compute the logged values of a training step."""

from __future__ import annotations

import math
import resource
from typing import TYPE_CHECKING, Any

import torch

from megatron_lite.config.schema import Config
from megatron_lite.planning.flops import peak_flops, training_flops_per_token

if TYPE_CHECKING:
    from megatron_lite.engine.engine import Engine, StepResult
    from megatron_lite.fault_tolerance.straggler_detection import StragglerReport


class StepMetrics:
    """Compute the values of a log line. Only the main process calls `values`.

    Image classifiers have images per second and no perplexity.

    Args:
        engine: the engine that runs the steps.
        config: the configuration of the run.
    """

    def __init__(self, engine: Engine, config: Config[Any]) -> None:
        self._engine, length = engine, config.batch.sequence_length
        self._tokens_per_image = length if config.data.objective == "classification" else None
        flops = training_flops_per_token(engine.model, length, config.data.predicted_fraction)
        # The peak of a CPU is measured, so only the process that logs it does so.
        peak = peak_flops(engine.grid.device, engine.dtype) if engine.grid.is_main else math.nan
        self._mfu_per_token = flops / (peak * engine.grid.world_size)

    def values(
        self,
        result: StepResult,
        *,
        lr: float,
        tokens: int,
        consumed_tokens: int,
        skipped_steps: int,
        seconds: float,
        data_seconds: float,
        stragglers: StragglerReport | None,
    ) -> dict[str, float]:
        """Return the values of a step by name.

        Args:
            lr: learning rate of the step.
            tokens: tokens of the step. consumed_tokens, skipped_steps: totals of the run.
            seconds: duration of the step. data_seconds: the part of it spent waiting for the batch.
            stragglers: comparison of the ranks in this step; None if there was none.
        """
        values: dict[str, float] = {"loss": result.loss}
        if self._tokens_per_image is None:
            values["perplexity"] = math.exp(min(result.loss, 700.0))
        if result.accuracy is not None:
            values["accuracy"] = result.accuracy
        values |= {
            "learning_rate": lr,
            "gradient_norm": result.gradient_norm,
            "tokens": consumed_tokens,
            "tokens_per_second": tokens / seconds,
            "memory_gib": _peak_memory_gib(self._engine.grid.device),
            "skipped_steps": skipped_steps,
            "data_seconds": data_seconds,
            "data_share": data_seconds / seconds,
            "step_seconds": seconds,
        }
        if self._tokens_per_image:
            values["images_per_second"] = tokens / seconds / self._tokens_per_image
        values["mfu"] = tokens / seconds * self._mfu_per_token
        if self._engine.dtype == "fp16":
            values["loss_scale"] = result.loss_scale
        if stragglers is not None:
            values["step_seconds_max_rank"] = stragglers.slowest
            values["step_seconds_spread"] = stragglers.ratio
            values["probe_spread"] = stragglers.probe_ratio
        return values


def _peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated by torch on a GPU, resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
