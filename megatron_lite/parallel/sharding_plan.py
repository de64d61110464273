"""Partition words: each parameter says once how it is partitioned, and everything that must agree reads that word.

A module declares `tensor_parallel_plan`, from the name of one of its parameters or submodules to a word:

| word                        | meaning                                                                           |
|-----------------------------|-----------------------------------------------------------------------------------|
| column                      | a linear's output features (rows of its weight) are cut                           |
| row                         | a linear's input features (columns of its weight) are cut, the outputs are summed |
| vocab                       | the vocabulary (first dimension) is cut                                           |
| shard                       | the first dimension is cut along with the heads                                   |
| replicated                  | whole everywhere, and every process sees the whole gradient                       |
| replicated, gradient summed | whole everywhere, and every process sees a part of the gradient, which is summed  |
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

WORDS = ("column", "row", "vocab", "shard", "replicated", "replicated, gradient summed")


@dataclass(frozen=True)
class Shard:
    """Which part of a tensor a process holds: part `index` of `count` equal ones along `dim`; count 1 is all of it.

    A piece of a checkpoint is a range of the flattened shard. Shards along the first dimension are ranges of the
    flattened tensor too.
    """

    dim: int = 0
    index: int = 0
    count: int = 1

    def cut(self, full: Tensor) -> Tensor:
        """This part of a full tensor, as a view.

        Raises:
            ValueError: the dimension does not divide.
        """
        if self.count == 1:
            return full
        size = full.shape[self.dim]
        if size % self.count:
            raise ValueError(f"dimension {self.dim} of {tuple(full.shape)} does not divide into {self.count} parts")
        return full.narrow(self.dim, self.index * (size // self.count), size // self.count)

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this part of a tensor of shape `full`."""
        return (*full[: self.dim], full[self.dim] // self.count, *full[self.dim + 1 :]) if self.count > 1 else full


def partition_words(module: nn.Module) -> dict[str, str]:
    """The partition word of every parameter of a module, by parameter name.

    The innermost plan that names the parameter, or a submodule on the way to it, decides.

    Raises:
        ValueError: a parameter without a word, or a word that does not exist.
    """
    words: dict[str, str] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        word = word_of(module, name)
        if word not in WORDS:
            owner = "no plan names it" if word is None else f"its word is {word!r}"
            raise ValueError(
                f"{type(module).__name__} parameter {name}: {owner}; the tensor_parallel_plan of its module must say "
                f"one of {', '.join(WORDS)}"
            )
        words[name] = word
    return words


def word_of(module: nn.Module, name: str) -> str | None:
    """The word that the plans in `module` give to a parameter or buffer, None where they give none."""
    return _word(module, name.split("."))


def shard_of(word: str | None, shape: tuple[int, ...], index: int, count: int) -> Shard:
    """The shard of a tensor of shape `shape` with this word on process `index` of `count` of a tensor group.

    A row-cut linear's bias (one dimension) is whole: it is added once, after the sum.
    """
    if count == 1:
        return Shard()
    if word in ("column", "vocab", "shard"):
        return Shard(0, index, count)
    if word == "row" and len(shape) == 2:
        return Shard(1, index, count)
    return Shard()


def _word(module: nn.Module, path: list[str]) -> str | None:
    word = getattr(module, "tensor_parallel_plan", {}).get(path[0])
    if len(path) > 1:
        inner = _word(getattr(module, path[0]), path[1:])
        word = inner if inner is not None else word
    return word
