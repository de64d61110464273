"""Decode recurrently: read the prompt once, then compute each token from a state of constant size.

The state of attention layers is a cache of all tokens, which grows, or of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from data.tokenizer import Tokenizer
from models.language_model import LanguageModel
from tools.inference.sampling import check_sampling, next_tokens

State = list[dict[str, torch.Tensor]]


@torch.inference_mode()
def read_prefix(model: LanguageModel, tokens: Sequence[int], state: State | None = None) -> State:
    """Return the state after tokens that follow `state`: one row, which `generate` continues."""
    device = next(model.parameters()).device
    return _last_logits(model, torch.tensor([tokens], device=device), None, state)[1]


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    vocab_size: int,
    stop_id: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    first_row: int = 0,
    prefix: State | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts of any lengths in one batch.

    Args:
        prompts: token ids, at least one each; shorter ones are padded on the left and masked.
        vocab_size: only smaller ids are sampled, because the padding rows of the embedding have no meaning.
        stop_id: ends the text of a prompt; it is not yielded.
        seed: row r uses its own generator with seed + first_row + r, or with seed[r] if `seed` is a sequence.
        first_row: see `seed`.
        prefix: result of `read_prefix` for the tokens before every prompt.

    Yields:
        The next token of each prompt, or None for ended prompts, until all have ended or `max_tokens` is reached.

    Raises:
        ValueError: an empty prompt, or a sampling parameter out of range.
    """
    check_sampling(temperature, top_k, top_p)
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens: give at least one, such as the end-of-document token")
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = True
    seeds = [seed + first_row + row for row in range(len(prompts))] if isinstance(seed, int) else seed
    generators = [torch.Generator().manual_seed(row_seed) for row_seed in seeds]
    alive = [True] * len(prompts)
    tokens, padding = tokens.to(device), None if bool(mask.all()) else mask.to(device)
    state = prefix
    if state is not None:
        rows = torch.zeros(len(prompts), dtype=torch.long, device=device)
        state = [{key: value.index_select(0, rows) for key, value in layer.items()} for layer in state]
    for _ in range(max_tokens):
        logits, state = _last_logits(model, tokens, padding, state)
        drawn = next_tokens(logits[:, :vocab_size], generators, temperature=temperature, top_k=top_k, top_p=top_p)
        ids = drawn.tolist()
        alive = [a and i != stop_id for a, i in zip(alive, ids, strict=True)]
        if not any(alive):
            return
        yield [i if a else None for a, i in zip(alive, ids, strict=True)]
        tokens, padding = drawn[:, None], None


def _last_logits(
    model: LanguageModel,
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    state: State | None,
) -> tuple[torch.Tensor, State]:
    """Return the logits [batch, vocab] of the last position only, which need less memory, and the new state."""
    hidden, new_state = model.hidden_states(tokens, mask=mask, state=state, return_state=True)
    return model.head(hidden[:, -1:])[:, 0], new_state


class TextStream:
    """Decode tokens to text one by one, in whole characters.

    A token may be part of a character (byte fallback, byte-level BPE). Its text is returned when the character is complete.
    Each call decodes a window of a few tokens, so that the cost does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        # Tokenizers may decode the first piece of a text differently, so each new piece is decoded after others.
        self._tokenizer, self._window = tokenizer, list(prompt[-8:])
        self._shown = len(tokenizer.decode(self._window))
        self._pending = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes, or "" if a character is incomplete."""
        self._window.append(token)
        self._pending += 1
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = len(text)
        last = self._window[-self._pending :] if self._pending else []
        # SentencePiece may remove all spaces at the start of a text, so the window begins with another character.
        if (shown := self._tokenizer.decode(last)).strip(" "):
            self._window, self._shown = last, len(shown)
        self._pending = 0
        return new


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Return the continuation of one prompt, without the prompt.

    It ends at the end-of-document token, after `max_tokens`, or at the last learned position.
    """
    ids = prompt_ids(tokenizer, prompt)
    max_tokens = int(min(max_tokens, longest_continuation(model, ids)))
    steps = generate(
        model,
        [ids],
        max_tokens=max_tokens,
        vocab_size=tokenizer.vocab_size,
        stop_id=tokenizer.end_of_document_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    stream = TextStream(tokenizer, ids)
    return "".join(stream.push(step[0]) for step in steps if step[0] is not None) + stream.finish()


def longest_continuation(model: LanguageModel, prompt: Sequence[int]) -> float:
    """Return how many tokens can follow a prompt; infinite without learned positions. The last token is not read."""
    positions = model.config.max_positions
    return math.inf if positions is None else max(0, positions + 1 - len(prompt))


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a prompt. An empty prompt becomes the end-of-document token, after which documents begin."""
    return [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.end_of_document_id]
