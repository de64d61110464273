"""Preprocess in this process, because starting a worker takes a second."""

from dataclasses import dataclass
from typing import ClassVar

from data.corpus.readers import Block
from data.preprocessing.encode import PreprocessingSettings, encode_block
from data.tokenizer import load_tokenizer


class Inline:
    """Do the work of a pool of processes in this process.

    done: files whose blocks were tokenised. stop_at: name of a file; its first block raises KeyboardInterrupt.
    """

    done: ClassVar[list[str]] = []
    stop_at: str | None = None

    def __init__(self, recipe: PreprocessingSettings) -> None:
        self.recipe, self.tokenizer = recipe, load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path)

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, _, block: Block) -> "Result":
        return Result(self, block)


@dataclass
class Result:
    pool: Inline
    block: Block

    def result(self):
        name = self.block.file.path.name
        if name == Inline.stop_at:
            raise KeyboardInterrupt
        Inline.done.append(name)
        return [encode_block(self.block, key, self.pool.recipe, self.pool.tokenizer) for key in self.pool.recipe.keys]
