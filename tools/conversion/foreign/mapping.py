"""Describe models of other codebases: the model section of a configuration, and the source of each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from tools.loading.model import nearest


@dataclass(frozen=True)
class Source:
    """Describe how their tensors `names` make a tensor here. By default one tensor is taken unchanged.

    Attributes:
        make: returns the tensor here from theirs.
        back: returns their tensor from the one here, if `names` has one name.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor
    back: Callable[[Tensor], Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class Foreign:
    """Describe another codebase's model.

    Attributes:
        model: its architecture here.
        sources: parameter name -> source; None for a tensor of zeros.
        unused: patterns of names without weights (buffers).
    """

    model: ModelConfig
    sources: dict[str, Source | None]
    unused: tuple[str, ...] = field(default=())


def tied(model: ModelConfig, name: str = "lm_head.weight") -> tuple[str, ...]:
    """Return the pattern of a tied matrix, which the file may hold a second time under this name."""
    return (f"^{re.escape(name)}$",) if model.tie_embeddings else ()


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
    """Raise ValueError for a setting whose value has no counterpart here. An absent setting is allowed."""
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(
                f"{key} = {config[key]!r} has no counterpart here; allowed are {', '.join(map(repr, values))}"
            )


def check_names(foreign: Foreign, given: Iterable[str], source: str) -> None:
    """Raise ValueError naming missing and unknown tensors, with the nearest names."""
    given = set(given)
    needed = {name for entry in foreign.sources.values() if entry is not None for name in entry.names}
    missing = sorted(needed - given)
    unknown = sorted(n for n in given - needed if not any(re.search(pattern, n) for pattern in foreign.unused))
    problems = [f"{name} is missing" + nearest(name, unknown) for name in missing]
    problems += [f"{name} is unknown" + nearest(name, missing or needed) for name in unknown]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ValueError(f"{source}: {len(problems)} tensors do not fit config.json: {'; '.join(problems[:6])}{more}")


def make(foreign: Foreign, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the float32 tensor of a parameter. Raises ValueError with both shapes if they differ."""
    entry = foreign.sources[name]
    if entry is None:
        return torch.zeros(shape)
    parts = [tensors[part].float() for part in entry.names]
    given = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in zip(entry.names, parts, strict=True))
    try:
        tensor = entry.make(*parts)
    except RuntimeError as error:
        raise ValueError(f"{given} does not make {name} {list(shape)}: {error}") from error
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{given} makes {name} {list(tensor.shape)}, and config.json needs {list(shape)}: correct the "
            "sizes in config.json, or take the weights that belong to it"
        )
    return tensor.contiguous()
