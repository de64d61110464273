"""Provide data, validation and summary of a run that trains on text, with causal or masked samples."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.checkpoint.resume import StartPoint
from megatron_lite.config.schema import Config
from megatron_lite.fault_tolerance.rank_consistency import file_facts, require_agreement
from megatron_lite.parallel.collectives import on_main
from megatron_lite.parallel.grid import Grid
from megatron_lite.trainer import Steps, TrainState
from megatron_lite.validation import ValidationSet
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.evaluation.during_training import suite_evaluation
from tools.inference.generation import complete
from tools.loading.token_data import PreparedData, check_sequence_length, prepared_data
from tools.loading.tokenizer import check_same_tokenizer, save_tokenizer
from tools.pretraining.data import PREPARATION_HOURS, training_samples, training_steps, validation_set
from tools.pretraining.unigram_baseline import unigram_baseline


class TextObjective:
    """A language model: `Objective` over token files.

    The constructor prepares the token files and loads their tokenizer. All ranks and the checkpoint must have the same ones.
    """

    def __init__(self, config: Config[ModelConfig], start: StartPoint | None, grid: Grid) -> None:
        data: PreparedData = on_main(
            grid, lambda: prepared_data(config.data, config.model.vocab_size), timeout_hours=PREPARATION_HOURS
        )
        on_main(grid, lambda: check_sequence_length(data, config.batch.sequence_length))
        require_agreement({"data": file_facts(data.files)}, grid)
        self._tokenizer = tokenizer = data.load_tokenizer()
        if start is not None and start.is_trained:
            on_main(grid, lambda: check_same_tokenizer(tokenizer, config.run.path, start.manifest))
        self._config, self._data, self._grid = config, data, grid
        self.tokenizer_hash: str | None = tokenizer.hash
        self.source = f"{data.train_tokens / 1e6:,.1f} M tokens of text"

    def training_samples(self, steps: int, state: TrainState) -> Any:
        """Return the samples as `Objective`."""

        def build() -> Any:
            return training_samples(
                self._config, self._data, self._tokenizer, steps, state.step, state.consumed_samples
            )

        # One process writes the cache of the sample order.
        on_main(self._grid, lambda: build() and None, timeout_hours=PREPARATION_HOURS)
        return build()

    def training_steps(self, samples: Any) -> Callable[[int], Steps]:
        """Return the steps as `Objective`."""
        return training_steps(self._config, samples, self._grid)

    def validation(self) -> ValidationSet | None:
        """Return the validation data, or None."""
        data = self._data
        return validation_set(self._config, data.validation, data.validation_bytes, self._tokenizer, self._grid)

    def test(self) -> ValidationSet | None:
        """Return the data of the final test, or None."""
        return validation_set(self._config, self._data.test, None, self._tokenizer, self._grid)

    def sample(self, model: Callable[[], LanguageModel]) -> Callable[[], dict[str, str]] | None:
        """Return a function that completes `evaluation.prompt`; None for a masked model or without `sample_tokens`."""
        settings = self._config.evaluation
        # A model with layers on several processes writes no text in training; tools.generate does.
        has_all_layers = self._grid.pipe_size * self._grid.context_size == 1
        if not settings.sample_tokens or not has_all_layers or self._config.data.objective != "causal":
            return None

        def sample() -> dict[str, str]:
            limit = settings.sample_tokens
            text = complete(model(), self._tokenizer, settings.prompt, max_tokens=limit, temperature=0.7, top_p=0.9)
            return {"prompt": settings.prompt, "text": text}

        return sample

    def suites(self, model: Callable[[], LanguageModel]) -> Callable[[], dict[str, float]] | None:
        """Return the function of `suite_evaluation`."""
        return suite_evaluation(self._config, self._tokenizer, self._grid, model)

    def save(self) -> None:
        """Write the tokenizer into the run folder."""
        save_tokenizer(self._tokenizer, self._config.run.path)

    def validation_lines(self, values: Mapping[str, float], report: dict[str, Any]) -> list[str]:
        """Return loss and perplexity, and the result beside general compressors or the most frequent token."""
        data = self._data
        lines = [f"validation loss {values['loss']:.4f} nats/token, perplexity {values['perplexity']:.2f} (whole set)"]
        if "bits_per_byte" in values and data.validation_text is not None:
            text = data.validation_text.read_bytes()
            report["compressors"] = compressed_bits_per_byte(text)
            rows = {"this model": values["bits_per_byte"], **report["compressors"]}
            lines += ["", f"bits per byte on the {len(text):,} bytes of validation text, never trained on:"]
            lines += [f"  {name:<12}{bits:7.4f}" for name, bits in sorted(rows.items(), key=lambda row: row[1])]
        if "accuracy" in values and data.validation is not None:
            report["unigram"] = unigram_baseline(data.train[0], data.validation, data.load_tokenizer())
            lines += [
                f"masked-token accuracy: {values['accuracy']:.2%}",
                f"accuracy of the most frequent token of the training text: {report['unigram']['accuracy']:.2%} "
                f"(loss {report['unigram']['loss']:.4f})",
            ]
        return lines

    def test_line(self, values: Mapping[str, float]) -> str:
        """Return loss, perplexity and accuracy."""
        accuracy = f", masked-token accuracy {values['accuracy']:.2%}" if "accuracy" in values else ""
        return f"test loss {values['loss']:.4f} nats/token, perplexity {values['perplexity']:.2f}{accuracy}"


def compressed_bits_per_byte(text: bytes) -> dict[str, float]:
    """Return the bits per byte of the text after `gzip -9` and `xz -9`."""
    size = max(len(text), 1)
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / size,
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / size,
    }
