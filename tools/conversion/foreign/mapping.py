"""Models of other codebases in this one's terms: the model section of a configuration, and where every tensor comes from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """A tensor made from tensors of other names; by default it is the only one.

    Attributes:
        make: from their tensors to the one here.
        back: from the one here to theirs, where one tensor makes one.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor
    back: Callable[[Tensor], Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class Foreign:
    """Another codebase's model.

    Attributes:
        model: its architecture here.
        sources: canonical name to where the tensor comes from; None for one that is zero.
        unused: patterns of names that carry no weights (buffers).
    """

    model: ModelConfig
    sources: dict[str, Source | None]
    unused: tuple[str, ...] = field(default=())


class Renamed(Mapping[str, Tensor]):
    """Map their names to tensors made from those here, for a model whose tensors correspond one to one."""

    def __init__(self, foreign: Foreign, tensors: Mapping[str, Tensor]) -> None:
        self._sources = {
            entry.names[0]: (name, entry.back) for name, entry in foreign.sources.items() if entry is not None
        }
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        ours, back = self._sources[name]
        return back(self._tensors[ours])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def only(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError for a setting with a value that this codebase has no counterpart for. An absent one is allowed."""
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(
                f"{key} = {config[key]!r} has no counterpart here; allowed are {', '.join(map(repr, values))}"
            )


def check_names(foreign: Foreign, given: Iterable[str], source: str) -> None:
    """ValueError naming tensors that are missing, or that belong to nothing, with the nearest names."""
    given = set(given)
    wanted = {name for entry in foreign.sources.values() if entry is not None for name in entry.names}
    missing = sorted(wanted - given)
    extra = sorted(n for n in given - wanted if not any(re.search(pattern, n) for pattern in foreign.unused))
    problems = [f"{name} is missing" + _near(name, extra) for name in missing]
    problems += [f"{name} belongs to nothing" + _near(name, missing or wanted) for name in extra]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ValueError(f"{source}: {len(problems)} tensors do not fit config.json: {'; '.join(problems[:6])}{more}")


def make(foreign: Foreign, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """One tensor under its canonical name, float32. ValueError with both shapes where they differ."""
    entry = foreign.sources[name]
    if entry is None:
        return torch.zeros(shape)
    parts = [tensors[part].float() for part in entry.names]
    given = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in zip(entry.names, parts, strict=True))
    try:
        made = entry.make(*parts)
    except RuntimeError as error:
        raise ValueError(f"{given} does not make {name} {list(shape)}: {error}") from error
    if tuple(made.shape) != shape:
        raise ValueError(f"{given} makes {name} {list(made.shape)}, and config.json needs {list(shape)}")
    return made.contiguous()


def _near(name: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(others), n=1)
    return f" (nearest: {close[0]})" if close else ""
