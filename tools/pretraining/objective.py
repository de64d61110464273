"""Define the interface of an objective: samples, validation, pictures or text of the model, lines of the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megatron_lite.checkpoint.resume import StartPoint
from megatron_lite.config.schema import Config
from megatron_lite.parallel.grid import Grid
from megatron_lite.trainer import Steps, TrainState
from megatron_lite.validation import ValidationSet
from models.config import ModelConfig
from models.language_model import LanguageModel


class Objective(Protocol):
    """Provide the data of a run and what is measured on them. Every process has one and calls the same methods.

    Attributes:
        tokenizer_hash: stored in checkpoints; None without a tokenizer.
        source: the training data in words, for the start message.
    """

    tokenizer_hash: str | None
    source: str

    def training_samples(self, steps: int, state: TrainState) -> Any:
        """Return the samples of a run of `steps` steps that continues at `state`; its `sources` names sources of the text."""

    def training_steps(self, samples: Any) -> Callable[[int], Steps]:
        """Return a function of the consumed samples that yields this data rank's next steps, prefetched."""

    def validation(self) -> ValidationSet | None:
        """Return the validation data, or None."""

    def test(self) -> ValidationSet | None:
        """Return the data of the final test, or None."""

    def sample(self, model: Callable[[], LanguageModel]) -> Callable[[], dict[str, str]] | None:
        """Return a function that shows the model's output after a validation, as values to log; None without one."""

    def suites(self, model: Callable[[], LanguageModel]) -> Callable[[], dict[str, float]] | None:
        """Return a function that evaluates `evaluation.suites`, or None."""

    def save(self) -> None:
        """Write what later commands need besides checkpoints into the run folder. The main process calls it."""

    def validation_lines(self, values: Mapping[str, float], report: dict[str, Any]) -> list[str]:
        """Return the lines of the summary for the last validation, and add their numbers to `report`."""

    def test_line(self, values: Mapping[str, float]) -> str:
        """Return the line of the summary for the test."""


def open_objective(config: Config[ModelConfig], start: StartPoint | None, grid: Grid) -> Objective:
    """Return the objective of `data.objective`, with its data prepared and checked.

    Raises ValueError and OSError for data that cannot be used.
    """
    if config.data.objective == "classification":
        from tools.pretraining.images import ImageObjective

        return ImageObjective(config, grid)
    from tools.pretraining.text import TextObjective

    return TextObjective(config, start, grid)
