"""Encode context and continuation as the harness does, count requests, and refuse those that cannot be scored.

Spaces at the end of a context move to the continuation. The context is encoded alone, then the whole text. The
continuation is the rest of the whole after as many ids as the context has. Some tokenizers have pieces that cross the
boundary. Three cases follow:

- Only the last id of the context differs. The tokenizers of this project end a word with its space: "the cat sat" is "the ",
  "cat ", "sat", and "the cat" alone ends with "cat". The harness gives "cat" to the model, which no text has before "sat". This
  project gives the ids of the whole.
- The whole has no more ids than the context, and the harness ends with an assertion. The continuation is then encoded
  alone (`Pair.apart`).
- The whole begins with other ids than the context before its last id, so that the split is at another place of the text. The
  harness scores such a pair, and so does this project (`Pair.recut`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from data.tokenizer import Tokenizer


class Pair(NamedTuple):
    """Hold the ids of a context and of its continuation.

    apart: whether the continuation was encoded alone. recut: whether the whole text begins with other ids than the context, apart
    from its last id.
    """

    context: Any
    target: Any
    apart: bool = False
    recut: bool = False


@dataclass
class RequestCounts:
    """Count the requests of an evaluation.

    Attributes:
        requests: by task. truncated: longer than the model's length. apart, recut: as in `Pair`.
        tokens: ids that a model without a shared state would read. longest: ids of the longest request.
    """

    requests: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)
    recut: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    longest: int = 0

    def add(self, task: str, pair: Pair, limit: int) -> None:
        """Count one request. limit: ids of context and continuation that the model can read."""
        length = len(pair.context) + len(pair.target)
        self.requests[task] += 1
        self.truncated[task] += length > limit
        self.apart[task] += pair.apart
        self.recut[task] += pair.recut and not pair.apart
        self.longest = max(self.longest, length)

    def by_task(self) -> dict[str, dict[str, int]]:
        """Return the counters by name. "requests" has all tasks, the others have those with a count."""
        partial = {name: getattr(self, name) for name in ("truncated", "apart", "recut")}
        return {
            "requests": dict(self.requests),
            **{name: {task: n for task, n in counter.items() if n} for name, counter in partial.items()},
        }


def split_pair(context: Any, whole: Any, encode_rest: Callable[[], Any], rest: str) -> Pair:
    """Split the ids of a whole text after those of its context.

    context, whole: ids. rest: the text after the context. encode_rest: returns its ids.

    Raises ValueError for a continuation without a token.
    """
    size = len(context)
    recut = not np.array_equal(context[: size - 1], whole[: size - 1]) if size else False
    if size < len(whole) or not rest:
        return Pair(context if recut else whole[:size], whole[size:], recut=recut)
    return Pair(context, _not_empty(encode_rest(), rest), apart=True, recut=recut)


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], prefix_token_id: int | None) -> list[Pair]:
    """Return (context, continuation) texts as ids, as `TemplateLM.loglikelihood` encodes them, but for the cases above.

    prefix_token_id: the context of a continuation without one, such as the end of a document; None for no token. An empty
    continuation has no ids. Raises as `split_pair`.
    """
    prefix = np.array([] if prefix_token_id is None else [prefix_token_id], np.int64)
    stripped = []
    for context, continuation in pairs:
        start = context.rstrip()
        stripped.append((start, context[len(start) :] + continuation))
    texts = dict.fromkeys(text for context, rest in stripped for text in (context, context + rest))
    ids = dict(zip(texts, encode_texts(tokenizer, list(texts)), strict=True))
    encoded = []
    for context, rest in stripped:
        whole, alone = ids[context + rest], ids[context]
        if len(alone):
            encoded.append(split_pair(alone, whole, lambda rest=rest: encode_texts(tokenizer, [rest])[0], rest))  # type: ignore[misc]
        elif len(whole) > 1 and whole[0] == prefix_token_id:
            encoded.append(Pair(whole[:1], whole[1:]))
        else:
            encoded.append(Pair(prefix, _not_empty(whole, rest)))
    return encoded


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Any]:
    """Return the ids of each text as int64 [n]."""
    return [np.asarray(ids, np.int64) for ids in tokenizer.encode_batch(texts, os.cpu_count() or 1)]


def refuse_longer(task: str, length: int, limit: int, others: int = 0) -> None:
    """Raise ValueError for a continuation that is longer than `limit`.

    others: tokens of the model's length besides those of a continuation.
    """
    if length > limit:
        raise ValueError(
            f"{task or 'a request'}: a continuation has {length:,} tokens and the model reads {limit:,} at once: its beginning "
            f"would not be scored. Give a larger --max-length ({length + others}), or leave the task out (--without "
            f"{task or 'TASK'})"
        )


def _not_empty(ids: Any, text: str) -> Any:
    if text and not len(ids):
        raise ValueError(f"the tokenizer has no token for the continuation {text!r}: it cannot be scored")
    return ids
