"""A small model section, so that the tests of the configuration need no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_lite.config.loader import ConfigError, load_config


@dataclass(frozen=True)
class StandIn:
    vocab_size: int = field(metadata={"doc": "Rows of the embedding."})
    hidden_size: int = field(default=64, metadata={"doc": "Width."})
    num_heads: int = field(default=4, metadata={"doc": "Heads."})
    mixers: tuple[str, ...] = field(default=("metala",), metadata={"doc": "Mixers."})
    mixer_options: dict[str, dict[str, Any]] = field(default_factory=dict, metadata={"doc": "Options."})
    norm: Literal["layernorm", "rmsnorm"] = field(default="layernorm", metadata={"doc": "Norm."})
    norm_eps: float = field(default=1e-5, metadata={"doc": "Epsilon."})
    intermediate_size: int | None = field(default=None, metadata={"doc": "Width of the MLP; null: derived."})
    max_positions: int | None = field(default=None, metadata={"doc": "Learned positions."})

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"model.num_heads = {self.num_heads} does not divide model.hidden_size; nearest: 2 or 4")


# The keys that every run must set.
REQUIRED = (
    "model.vocab_size=5000",
    "data.corpus=stdlib",
    "batch.micro_batch_size=2",
    "batch.global_batch_size=8",
    "optimizer.lr=3e-4",
    "schedule.train_steps=100",
)


def problems(
    *overrides: str, file: Path | None = None, required: tuple[str, ...] = REQUIRED, ranks: int = 1
) -> list[str]:
    """Return the problems for which the configuration is refused."""
    files = [] if file is None else [file]
    with pytest.raises(ConfigError) as caught:
        load_config(files, [*required, *overrides], model_type=StandIn, world_size=ranks)
    assert list(caught.value.problems) == [line[4:] for line in str(caught.value).splitlines()[1:]]
    return list(caught.value.problems)
