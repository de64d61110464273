"""Record the requests that a model has answered, and when, to measure an evaluation while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from megatron_lite.plural import counted
from tools.evaluation.adapter import ProjectLM

Request = tuple[str, str]  # context and continuation
SECONDS_BETWEEN_LINES = 5.0


class TimeUpError(Exception):
    """The evaluation reached its time limit. The `ProgressMonitor` has the answers."""


@dataclass
class ProgressMonitor:
    """Record one evaluation, print a line every few seconds, and raise TimeUpError after the time limit.

    Attributes:
        name: of the model.
        out: receives the lines.
        limit: seconds from `start`; None for no limit.
        received: seconds from `start` until the harness sent its requests.
        tokenised: seconds until all requests were tokenised.
        ended: seconds until the last answer.
        tokens: per request, without its last token, which a model does not read.
        answers: log-likelihoods.
        answered, answered_tokens: number of answered requests, and their tokens.
    """

    name: str
    out: TextIO
    limit: float | None = None
    clock: Callable[[], float] = time.perf_counter
    received: float = 0.0
    tokenised: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    answers: dict[Request, float] = field(default_factory=dict)
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
        """Return the answered requests' share of the tokens."""
        return self.answered_tokens / max(1, sum(self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of answered requests per second, from the end of tokenisation to the last answer."""
        return self.answered_tokens / max(1e-9, self.ended - self.tokenised)

    def record_requests(self, count: int) -> None:
        """Record that the harness sent its requests."""
        self.received = self.seconds
        self._print(counted(count, "request"))

    def record_tokens(self, tokens: Iterable[int]) -> None:
        """Record the tokens of every request."""
        self.tokenised = self.ended = self.seconds
        self.tokens = list(tokens)
        self._print(f"tokenised in {self.tokenised - self.received:.1f} s: {sum(self.tokens) / 1e6:.2f} M tokens")

    def record_answers(self, answers: Iterable[tuple[Request, int, float]]) -> None:
        """Record (request, its tokens, log-likelihood) of answered requests. Raises TimeUpError."""
        for request, tokens, value in answers:
            self.answers[request] = value
            self.answered += 1
            self.answered_tokens += tokens
        self.ended = self.seconds
        if self.clock() - self._printed > SECONDS_BETWEEN_LINES:
            self._print(
                f"{self.answered:,} of {len(self.tokens):,} requests, {self.share:.0%} of the tokens, "
                f"{self.tokens_per_second:,.0f} per second"
            )
        if self.answered < len(self.tokens):
            self.check_limit()

    def check_limit(self) -> None:
        """Raise TimeUpError after the time limit."""
        if self.limit is not None and self.seconds > self.limit:
            raise TimeUpError(f"{self.name}: stopped after {self.seconds:.0f} s")

    def _print(self, text: str) -> None:
        self._printed = self.clock()
        print(f"{self.name}, {self.seconds:.1f} s: {text}", file=self.out, flush=True)


def attach_monitor(lm: Any, monitor: ProgressMonitor) -> None:
    """Make a model, this project's or the harness's `hf`, report to a monitor."""
    original = lm.loglikelihood
    arguments: list[Request] = []

    def loglikelihood(requests: Any, *args: Any, **kwargs: Any) -> Any:
        arguments[:] = [request.args for request in requests]
        monitor.record_requests(len(arguments))
        return original(requests, *args, **kwargs)

    lm.loglikelihood = loglikelihood
    if isinstance(lm, ProjectLM):
        _attach_project(lm, monitor, arguments)
    else:
        _attach_huggingface(lm, monitor)


def _attach_project(lm: ProjectLM, monitor: ProgressMonitor, arguments: Sequence[Request]) -> None:
    scorer: Any = lm.scorer
    units, score_units = scorer.units, scorer.score_units

    def monitored_units(contexts: Any, targets: Any) -> Any:
        monitor.record_tokens(len(context) + len(target) - 1 for context, target in zip(contexts, targets, strict=True))
        return units(contexts, targets)

    def monitored_score_units(nodes: Any, requests: int, *, done: Any) -> None:
        def report(scores: Any) -> None:
            done(scores)
            monitor.record_answers((arguments[i], monitor.tokens[i], value) for i, (value, _) in scores)

        score_units(nodes, requests, done=report)

    scorer.units, scorer.score_units = monitored_units, monitored_score_units


def _attach_huggingface(lm: Any, monitor: ProgressMonitor) -> None:
    encode, score = lm.tok_encode, lm._loglikelihood_tokens
    tokens: dict[Request, int] = {}

    def monitored_encode(*args: Any, **kwargs: Any) -> Any:
        monitor.check_limit()
        return encode(*args, **kwargs)

    def monitored_score(requests: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.update({request: len(context) + len(target) - 1 for request, context, target in requests})
        monitor.record_tokens(len(context) + len(target) - 1 for _, context, target in requests)
        return score(requests, *args, **kwargs)

    class Hook:
        # The harness calls it with every answer, for its cache.
        def add_partial(self, kind: str, request: Request, answer: tuple[float, bool]) -> None:
            monitor.record_answers([(request, tokens[request], answer[0])])

    lm.tok_encode, lm._loglikelihood_tokens, lm.cache_hook = monitored_encode, monitored_score, Hook()
