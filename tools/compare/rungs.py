"""Plan the rungs of a ladder: sizes of equal parameters, each trained for several numbers of tokens per parameter."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_lite.config.schema import Config
from models.config import ModelConfig

PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # as run.seed


class Tuning(BaseModel):
    """Hold the section `ladder.tuning`: the learning rates that `--tune` tries at the first rung of some sizes.

    Attributes:
        sizes: trained with every factor.
        models: their mean loss over the sizes chooses the factor of all models and sizes.
        factors: of `optimizer.lr` of each size.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: tuple[str, ...] = Field(min_length=1)
    models: tuple[str, ...] = Field(min_length=1)
    factors: tuple[PositiveNumber, ...] = Field(min_length=2)

    @field_validator("factors")
    @classmethod
    def _different(cls, factors: tuple[float, ...]) -> tuple[float, ...]:
        _check_different(factors)
        return factors


class Ladder(BaseModel):
    """Hold the section `ladder` of a comparison's file.

    Attributes:
        parameters: size -> parameters without embeddings. The MLP width of every model is chosen for it.
        tokens_per_parameter: size -> tokens per parameter of its rungs.
        seeds: size -> seeds of its rungs; other sizes have the `seeds` of the file.
        tolerance: largest relative difference of a run's parameters and tokens from the planned numbers.
        multiple: of the MLP widths.
        max_passes: most passes over the training text in one run. Up to four passes are nearly as good as new text
            (Muennighoff et al., 2305.16264).
        max_overlap: share of a held-out document's 13-word n-grams that the training text may hold.
        tuning: learning rates to try; None for those of `sizes`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameters: dict[str, PositiveNumber] = Field(min_length=1)
    tokens_per_parameter: dict[str, Annotated[tuple[PositiveNumber, ...], Field(min_length=1)]]
    seeds: dict[str, Annotated[tuple[Seed, ...], Field(min_length=1)]] = {}
    tolerance: float = Field(default=0.01, gt=0, lt=1)
    multiple: int = Field(default=8, ge=1)
    max_passes: float = Field(default=4, gt=0)
    max_overlap: float = Field(default=0.9, gt=0, le=1)
    tuning: Tuning | None = None

    @field_validator("tokens_per_parameter")
    @classmethod
    def _different(cls, numbers: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        for of_size in numbers.values():
            _check_different(of_size)
        return numbers

    @model_validator(mode="after")
    def _same_sizes(self) -> Ladder:
        tuned = dict.fromkeys(() if self.tuning is None else self.tuning.sizes)
        named = {"tokens_per_parameter": self.tokens_per_parameter, "seeds": self.seeds, "tuning.sizes": tuned}
        for name, sizes in named.items():
            if unknown := sorted(sizes.keys() - self.parameters.keys()):
                raise ValueError(f"ladder.{name} has the size {unknown[0]}; allowed are {', '.join(self.parameters)}")
        if missing := sorted(self.parameters.keys() - self.tokens_per_parameter.keys()):
            raise ValueError(
                f"ladder.tokens_per_parameter lacks the size {missing[0]}: give its numbers, such as [10, 20]"
            )
        return self

    def rungs(self) -> dict[str, tuple[str, float]]:
        """Return rung name -> (size, tokens per parameter), the smallest size and its fewest tokens first."""
        ordered = sorted(self.parameters, key=lambda size: self.parameters[size])
        ratios = self.tokens_per_parameter
        return {f"{size}-{ratio:g}x": (size, ratio) for size in ordered for ratio in sorted(ratios[size])}

    @property
    def largest(self) -> str:
        """Return the size whose loss the smaller sizes predict."""
        return max(self.parameters, key=lambda size: self.parameters[size])

    def is_largest(self, rung: str) -> bool:
        """Return whether a rung has the largest size."""
        return self.rungs()[rung][0] == self.largest


def _check_different(numbers: tuple[float, ...]) -> None:
    """Raise ValueError if two numbers give runs of one name."""
    names = [f"{number:g}" for number in numbers]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{repeated[0]} is there twice; the numbers name the runs, so they must differ in six digits")


def steps_of_rung(ladder: Ladder, rung: str, config: Config[ModelConfig]) -> int:
    """Return the training steps of a rung.

    Raises ValueError with the arithmetic if no number of steps gives the rung's tokens within the tolerance.
    """
    size, ratio = ladder.rungs()[rung]
    parameters = ladder.parameters[size]
    wanted, per_step = ratio * parameters, config.batch.tokens_per_step
    steps = max(1, round(wanted / per_step))
    reached = config.batch.tokens_of(steps)
    if abs(reached - wanted) > ladder.tolerance * wanted:
        difference = 100 * abs(reached / wanted - 1)
        raise ValueError(
            f"ladder rung {rung}: {ratio:g} tokens per parameter x {parameters:,.0f} parameters = {wanted:,.0f} tokens; "
            f"{steps:,} x {per_step:,} tokens per step = {reached:,}, {difference:.3g} % away, and {100 * ladder.tolerance:g} % "
            f"is allowed. Lower batch.global_batch_size, or give {reached / parameters:.4g} in place of {ratio:g} in "
            f"ladder.tokens_per_parameter.{size}"
        )
    return steps
