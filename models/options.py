"""Parts of the configuration that layers and mixers read: the model's shape, and checks of options.

`models/config.py` imports the mixers to check their options, so layers and mixers import this file instead.
Importing it needs the standard library only.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cache
from math import inf, isclose, isqrt
from typing import Any, Literal, Protocol

# Descriptions of options that several mixers have.
HEAD_NORM = "Norm per head before the gate, without gain; flash-linear-attention's models have rmsnorm."
HEAD_NORM_EPS = "Added to the variance (or mean square) in that norm."
DT_MIN = "Smallest time step of decay_init: hippo, that of the first head (s4d_lin: channel)."
DT_MAX = "Largest time step of decay_init: hippo, that of the last head (s4d_lin: channel)."


# Field -> type of a dataclass. Every `ModelConfig` needs several, and one takes a millisecond.
type_hints = cache(typing.get_type_hints)


def option(default: Any, doc: str) -> Any:
    """Return a dataclass field of a configuration with its default and its description."""
    return field(default=default, metadata={"doc": doc})


class ModelShape(Protocol):
    """Declare the part of `models.config.ModelConfig` that layers and mixers read. The keys are described there."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def mlp(self) -> str: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def embedding_scale(self) -> float: ...
    @property
    def norm(self) -> str: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def norm_affine(self) -> bool: ...
    @property
    def head(self) -> str: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def init_method(self) -> str: ...
    @property
    def output_init_method(self) -> str: ...
    @property
    def init_std(self) -> float: ...
    def bidirectional_mixers(self) -> list[str]: ...
    def mixer_of(self, layer_index: int) -> str: ...


def require_divisor(key: str, value: int, name: str, dividend: float) -> None:
    """Raise ValueError with the nearest legal values unless `value` divides `dividend`, a whole number up to rounding.

    key: the config key of `value`. name: that of `dividend` in the message.
    """
    whole = round(dividend)
    if not isclose(dividend, whole):
        raise ValueError(f"{name} = {dividend:g}: must be a whole number, which {key} = {value} divides")
    if whole % value:
        legal = join_names(nearest_divisors(whole, value))
        raise ValueError(f"{key} = {value} does not divide {name} = {dividend:g}; nearest that do: {legal}")


def nearest_divisors(dividend: int, wanted: int) -> list[int]:
    """Return the largest divisor of `dividend` below `wanted` and the smallest above it, as far as they exist."""
    # The limit is for mistyped numbers, whose divisors would take hours.
    small = [d for d in range(1, min(isqrt(dividend), 2**20) + 1) if dividend % d == 0]
    divisors = {*small, *(dividend // d for d in small)}
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def nearest_multiples(value: int, factor: int) -> str:
    """Return the multiples of `factor` on both sides of `value`, at least `factor`, as "a or b"."""
    below = value // factor * factor
    return join_names(x for x in (below, below + factor) if x)


def require_at_least(mixer: str, options: Any, least: int, *keys: str) -> None:
    """Raise ValueError for an option of `mixer` among `keys` that is below `least`; None is a default and passes."""
    for key in keys:
        value = getattr(options, key)
        if value is not None and value < least:
            raise ValueError(f"model.mixer_options.{mixer}.{key} = {value}: must be at least {least}")


def require_positive(mixer: str, options: Any, *keys: str) -> None:
    """Raise ValueError for an option of `mixer` among `keys` that is not greater than 0 and finite."""
    for key in keys:
        value = getattr(options, key)
        if not 0 < value < inf:
            raise ValueError(f"model.mixer_options.{mixer}.{key} = {value}: must be greater than 0 and finite")


def check_time_steps(mixer: str, dt_min: float, dt_max: float) -> None:
    """Raise ValueError unless 0 < dt_min <= dt_max and both are finite."""
    if not 0 < dt_min <= dt_max < inf:
        raise ValueError(
            f"model.mixer_options.{mixer}.dt_min = {dt_min:g} with dt_max = {dt_max:g}: set 0 < dt_min <= dt_max, both finite"
        )


def check_key_dim(mixer: str, config: ModelShape, expand_k: float) -> None:
    """Raise ValueError if model.num_heads does not divide key_dim = expand_k * model.hidden_size."""
    name = f"key_dim of {mixer}, model.hidden_size * {expand_k:g}"
    require_divisor("model.num_heads", config.num_heads, name, config.hidden_size * expand_k)


def fits_type(value: Any, allowed: Any) -> bool:
    """Return whether a value from YAML has an annotated type.

    Types: bool, int, float, str, None, a Literal, a union or a tuple of them, or a dict, in which null is a default.
    """
    kinds, origin = typing.get_args(allowed), typing.get_origin(allowed)
    if origin is Literal:
        return any(value == kind and type(value) is type(kind) for kind in kinds)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(fits_type(item, kinds[0]) for item in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(item is None or fits_type(item, kinds[1]) for item in value.values())
    if kinds:
        return any(fits_type(value, kind) for kind in kinds)
    if allowed is float:  # YAML writes 2 where 2.0 is meant; a bool is no number
        return type(value) in (int, float)
    return allowed is Any or type(value) is allowed


def describe_type(allowed: Any) -> str:
    """Return the allowed values of an annotated type, as `fits_type` reads it, in words."""
    names = {bool: "true, false", int: "whole numbers", float: "numbers", str: "text", type(None): "null"}
    kinds, origin = typing.get_args(allowed), typing.get_origin(allowed)
    if origin is Literal:
        return ", ".join(str(kind) for kind in kinds)
    if origin is tuple:
        return f"lists of {describe_type(kinds[0])}"
    if origin is dict:
        return "mappings of mappings"
    return ", ".join(describe_type(kind) for kind in kinds) if kinds else names[allowed]


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ..." with the known names most similar to `name`; if none is similar, all names of a short list."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {join_names(close)}?"
    return (
        f"allowed are {', '.join(names) or 'none'}"
        if len(names) <= 30
        else f"none of the {len(names)} names is similar"
    )


def join_names(items: Iterable[Any]) -> str:
    """Return the items as "a or b or c"."""
    return " or ".join(str(item) for item in items)
