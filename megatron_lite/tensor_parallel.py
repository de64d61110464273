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

from torch import nn

WORDS = ("column", "row", "vocab", "shard", "replicated", "replicated, gradient summed")


def partition_words(module: nn.Module) -> dict[str, str]:
    """The partition word of every parameter of a module, by parameter name.

    The innermost plan that names the parameter, or a submodule on the way to it, decides.

    Raises:
        ValueError: a parameter without a word, or a word that does not exist.
    """
    words: dict[str, str] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        word = _word(module, name.split("."))
        if word not in WORDS:
            owner = "no plan names it" if word is None else f"its word is {word!r}"
            raise ValueError(
                f"{type(module).__name__} parameter {name}: {owner}; the tensor_parallel_plan of its module must say "
                f"one of {', '.join(WORDS)}"
            )
        words[name] = word
    return words


def _word(module: nn.Module, path: list[str]) -> str | None:
    word = getattr(module, "tensor_parallel_plan", {}).get(path[0])
    if len(path) > 1:
        inner = _word(getattr(module, path[0]), path[1:])
        word = inner if inner is not None else word
    return word
