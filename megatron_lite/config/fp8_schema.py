"""Define the section `precision.fp8` and check it against the other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from megatron_lite.config.section import Section, without_effect


class Fp8Config(Section):
    """FP8 matmuls of the blocks' projections. Embedding, head, decays, norms and recurrences keep their precision."""

    recipe: Literal["none", "rowwise"] = Field(
        default="none",
        description="rowwise: output, input gradient and weight gradient in FP8 (e4m3), with one scale per row and no amax "
        "history. CUDA needs compute capability 9.0 (Hopper) and bf16. A CPU computes the same numbers in float32, slowly.",
    )
    num_layers_at_start_in_bf16: int = Field(default=0, ge=0, description="First blocks without FP8.")
    num_layers_at_end_in_bf16: int = Field(default=0, ge=0, description="Last blocks without FP8.")

    def covers(self, block: int, blocks: int) -> bool:
        """Return whether block number `block`, from 0, of `blocks` runs in FP8."""
        first = self.num_layers_at_start_in_bf16
        return self.recipe != "none" and first <= block < blocks - self.num_layers_at_end_in_bf16


def fp8_problems(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key, problem) of the section in combination with the other sections."""
    fp8, parallel, key = config.precision.fp8, config.parallel, ("precision", "fp8")
    if fp8.recipe == "none":
        yield from without_effect(fp8, key, "precision.fp8.recipe = rowwise")
        return
    if config.precision.dtype == "fp16":
        text = f"= {fp8.recipe} with precision.dtype = fp16: bf16 is allowed; set precision.dtype=bf16, or recipe=none"
        yield (*key, "recipe"), text
    elif parallel.compile or parallel.zero_stage > 2:
        other = "compile = true" if parallel.compile else f"zero_stage = {parallel.zero_stage}"
        change = "compile=false" if parallel.compile else "zero_stage to 0, 1 or 2"
        text = f"= {fp8.recipe} is not supported with parallel.{other}: set parallel.{change}, or recipe=none"
        yield (*key, "recipe"), text
    blocks = getattr(config.model, "num_layers", None)
    unquantized = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
    if blocks is not None and unquantized >= blocks:
        text = (
            f"and num_layers_at_end_in_bf16 leave no block in FP8: their sum {unquantized} must be less than "
            f"model.num_layers = {blocks}, or set recipe=none"
        )
        yield (*key, "num_layers_at_start_in_bf16"), text
