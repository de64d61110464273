"""Measure perplexity on any text, and evaluate suites through the lm-evaluation-harness. `python eval.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

from tools.cli.arguments import command, interrupted
from tools.evaluation.options import parse_evaluation
from tools.evaluation.request import EvaluationRequest


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word.startswith("--suite") for word in words):
        from tools.synthetic.command import synthetic_command, synthetic_suite

        try:
            if name := synthetic_suite(words):
                _refuse_checkpoint(words, name)
                return synthetic_command(words)
        except KeyboardInterrupt:
            return interrupted("the same command resumes with the unfinished runs")
    if words[:1] in (["compare"], ["table"]):
        from tools.evaluation.command import compare_command, table_command

        return (compare_command if words[0] == "compare" else table_command)(words[1:])
    request = EvaluationRequest.from_options(parse_evaluation(words))
    try:
        from tools.evaluation.command import evaluate_model

        evaluate_model(request)
    except KeyboardInterrupt:
        return interrupted("the same command resumes with the cached answers")
    return 0


def _refuse_checkpoint(words: Sequence[str], suite: str) -> None:
    """Raise ValueError if a word is neither an option, an option's value nor key=value: it would name a checkpoint."""
    for previous, word in pairwise(["", *words]):
        option_value = previous.startswith("-") and "=" not in previous
        if not option_value and not word.startswith("-") and "=" not in word:
            raise ValueError(
                f"{word}: --suite {suite} trains its own models and takes no checkpoint, only key=value; leave it out "
                f"(python eval.py --suite {suite} --help)"
            )


if __name__ == "__main__":
    sys.exit(main())
