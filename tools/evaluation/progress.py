"""What a model has answered so far, and when: for measuring an evaluation while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from tools.evaluation.adapter import ProjectLM

# (context, continuation), as the harness asks.
Asked = tuple[str, str]
# Seconds between two lines.
_INTERVAL = 5.0


class TimeUpError(Exception):
    """The evaluation was stopped because its time was over; what was answered is in the `Watch`."""


@dataclass
class Watch:
    """Follows one evaluation, prints a line every few seconds, and ends it by `TimeUpError` when its time is over.

    Attributes:
        name: of the model.
        out: where lines go.
        limit: seconds, from `start` on; None for no limit.
        began: seconds from `start` until the harness asked, ready: until its requests were tokenised, ended: until the
            last answer so far.
        tokens: of every request, the last one of each excepted, as the model would read them one by one.
        answers: log-likelihoods so far.
        answered, answered_tokens: requests so far, and their tokens.
    """

    name: str
    out: TextIO
    limit: float | None = None
    clock: Callable[[], float] = time.perf_counter
    began: float = 0.0
    ready: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    answers: dict[Asked, float] = field(default_factory=dict)
    answered: int = 0
    answered_tokens: int = 0

    def start(self) -> None:
        """Start the clock."""
        self._zero = self._printed = self.clock()

    @property
    def seconds(self) -> float:
        """Return the seconds since `start`."""
        return self.clock() - self._zero

    @property
    def share(self) -> float:
        """Return the share of the tokens whose requests are answered."""
        return self.answered_tokens / max(1, sum(self.tokens))

    @property
    def tokens_a_second(self) -> float:
        """Return the tokens of answered requests per second, from the first known token to the last answer."""
        return self.answered_tokens / max(1e-9, self.ended - self.ready)

    def ask(self, what: str) -> None:
        """The harness asks; `what` is done before the first request is known by its tokens."""
        self.began = self.seconds
        self._line(what)

    def expect(self, tokens: Iterable[int]) -> None:
        """Record the tokens of every request."""
        self.ready = self.ended = self.seconds
        self.tokens = list(tokens)
        self._line(f"tokenised in {self.ready - self.began:.1f} s: {sum(self.tokens) / 1e6:.2f} M tokens")

    def answer(self, found: Iterable[tuple[Asked, int, float]]) -> None:
        """(request, its tokens, log-likelihood) of what was answered. Raises TimeUpError."""
        for asked, tokens, value in found:
            self.answers[asked] = value
            self.answered += 1
            self.answered_tokens += tokens
        self.ended = self.seconds
        if self.clock() - self._printed > _INTERVAL:
            self._line(
                f"{self.answered:,} of {len(self.tokens):,} requests, {self.share:.0%} of the tokens, "
                f"{self.tokens_a_second:,.0f} a second"
            )
        if self.answered < len(self.tokens):
            self.check()

    def check(self) -> None:
        """Raise TimeUpError when the time is over."""
        if self.limit is not None and self.seconds > self.limit:
            raise TimeUpError(f"{self.name}: stopped after {self.seconds:.0f} s")

    def _line(self, text: str) -> None:
        self._printed = self.clock()
        print(f"{self.name}, {self.seconds:.1f} s: {text}", file=self.out, flush=True)


def follow(lm: Any, watch: Watch) -> None:
    """Has a model, this project's or the harness's `hf`, report to `watch` from now on."""
    original = lm.loglikelihood
    follow_one = _follow_own if isinstance(lm, ProjectLM) else _follow_huggingface
    asked: list[Asked] = []

    def loglikelihood(requests: Any, *args: Any, **kwargs: Any) -> Any:
        asked[:] = [request.args for request in requests]
        watch.ask(f"{len(asked):,} requests")
        return original(requests, *args, **kwargs)

    lm.loglikelihood = loglikelihood
    follow_one(lm, watch, asked)


def _follow_own(lm: ProjectLM, watch: Watch, asked: Sequence[Asked]) -> None:
    scorer: Any = lm.scorer
    units, score = scorer.units, scorer.score_units

    def watched_units(contexts: Any, targets: Any) -> Any:
        watch.expect(len(context) + len(target) - 1 for context, target in zip(contexts, targets, strict=True))
        return units(contexts, targets)

    def watched_score(nodes: Any, requests: int, *, done: Any) -> None:
        def reported(answers: Any) -> None:
            done(answers)
            watch.answer((asked[i], watch.tokens[i], value) for i, (value, _) in answers)

        score(nodes, requests, done=reported)

    scorer.units, scorer.score_units = watched_units, watched_score


def _follow_huggingface(lm: Any, watch: Watch, asked: Sequence[Asked]) -> None:
    encode, score = lm.tok_encode, lm._loglikelihood_tokens
    tokens: dict[Asked, int] = {}

    def watched_encode(*args: Any, **kwargs: Any) -> Any:
        watch.check()
        return encode(*args, **kwargs)

    def watched_score(requests: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.update({pair: len(context) + len(target) - 1 for pair, context, target in requests})
        watch.expect(len(context) + len(target) - 1 for _, context, target in requests)
        return score(requests, *args, **kwargs)

    class Hook:
        # The harness calls it with every answer, for its cache.
        def add_partial(self, kind: str, pair: Asked, answer: tuple[float, bool]) -> None:
            watch.answer([(pair, tokens[pair], answer[0])])

    lm.tok_encode, lm._loglikelihood_tokens, lm.cache_hook = watched_encode, watched_score, Hook()
