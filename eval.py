"""Measure perplexity on any text, and evaluate suites through the lm-evaluation-harness. `python eval.py --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cli.arguments import command, command_line, from_zero, interrupted, numbers, positive
from tools.cli.arguments import words as comma_separated
from tools.evaluation.request import EvaluationRequest


@command
def main(arguments: Sequence[str] | None = None) -> int:
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
    request = EvaluationRequest.from_options(_parser().parse_args(words))
    try:
        from tools.evaluation.command import evaluate_model

        evaluate_model(request)
    except KeyboardInterrupt:
        return interrupted("the same command resumes with the cached answers")
    return 0


def _refuse_checkpoint(words: Sequence[str], suite: str) -> None:
    """Raise ValueError for a model before or after --suite mqar: a word that is neither key=value nor an option's value."""
    for previous, word in zip(["", *words], words, strict=False):
        option_value = previous.startswith("-") and "=" not in previous
        if not option_value and not word.startswith("-") and "=" not in word:
            raise ValueError(
                f"{word}: --suite {suite} trains its own models and takes no checkpoint, only key=value; leave it out "
                f"(python eval.py --suite {suite} --help)"
            )


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python eval.py",
        "Evaluate a model: zero-shot suites through the lm-evaluation-harness, perplexity on any text.",
        EPILOG,
    )
    parser.add_argument(
        "checkpoint",
        help="folder of a run, or one of its checkpoints/step_*; for suites and tasks also a Hugging Face folder or name",
    )
    suites = parser.add_argument_group("suites")
    suites.add_argument(
        "--suite",
        type=comma_separated,
        default=[],
        metavar="A,B",
        help="superglue, commonsense, needle, or a YAML file; mqar, mad, listops (no checkpoint: --suite mqar --help)",
    )
    suites.add_argument(
        "--tasks", type=comma_separated, default=[], metavar="A,B", help="any tasks of the harness, by name"
    )
    suites.add_argument(
        "--without", type=comma_separated, default=[], metavar="A,B", help="tasks of the suites to leave out"
    )
    suites.add_argument(
        "--data-dir",
        type=Path,
        help="folder of the tasks' data (super_glue/boolq/validation.jsonl.gz ...); default: the hub",
    )
    suites.add_argument("--hub", action="store_true", help="take data that the folder lacks from the hub")
    suites.add_argument(
        "--split",
        choices=["validation", "test"],
        help="evaluate this split where the data have it (marked in the table)",
    )
    suites.add_argument("--shots", type=from_zero, help="examples in the prompt (default: the task's number)")
    suites.add_argument(
        "--max-length", type=positive, help="tokens that the model reads at once (default: as in training)"
    )
    suites.add_argument(
        "--samples", dest="save_samples", action="store_true", help="also write every document with its answers"
    )
    suites.add_argument("--name", help="name of the model in tables")
    suites.add_argument("--trust-remote-code", action="store_true", help="run the Python code in a Hugging Face folder")
    suites.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    needle = parser.add_argument_group("needle in a haystack (--suite needle)")
    needle.add_argument(
        "--lengths", type=numbers, metavar="N,N", help="tokens of a text (default 2048,4096,8192,16384)"
    )
    needle.add_argument("--depths", type=numbers, metavar="P,P", help="percent (default 0,10,...,100)")
    needle.add_argument("--needles", type=positive, default=5, metavar="N", help="facts per cell (default 5)")
    needle.add_argument("--filler", type=Path, metavar="FILE", help="a text; default: the run's validation text")
    needle.add_argument("--seed", type=int, default=0, help="seed of the facts (default 0)")
    texts = parser.add_argument_group("perplexity")
    texts.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="raw text (.txt, .md, .py ..., .jsonl, .gz, .zst; files, folders, globs) or prefixes of token files;"
        " default without a suite: the run's validation set",
    )
    texts.add_argument("--text-key", default="text", help="key of the text in JSON lines (default text)")
    texts.add_argument("--sequence-length", type=positive, help="tokens per piece (default: as in training)")
    texts.add_argument("--batch-size", type=positive, default=8, help="pieces per batch (default 8)")
    texts.add_argument(
        "--by-position", action="store_true", help="loss by position up to 4 x the trained length, with a plot"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU where there is one)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16, fp16, fp64 (default: bf16 on a GPU, else fp32)")
    parser.add_argument(
        "--out",
        type=Path,
        help="results file, with tables and chart beside it (default: results.json in the run's folder; of suites:"
        " evaluation/STEP/results.json there, of a Hugging Face model in runs/evaluation/NAME)",
    )
    return parser


EPILOG = """examples:
  python eval.py runs/default                              perplexity of the run's validation set
  python eval.py runs/default --suite superglue,commonsense --data-dir DATA
                                                           tables with the paper's rows
  python eval.py EleutherAI/pythia-410m --suite commonsense    any Hugging Face model, in the same table
  python eval.py runs/default --suite needle               a fact in a long text, by length and depth, as a heat map
  python eval.py runs/default --tasks piqa,arc_easy        any tasks of the harness
  torchrun --nproc-per-node 8 eval.py runs/big --suite superglue   eight GPUs share the requests
  python eval.py table a/results.json b/results.json       several models in one table
  python eval.py compare a/results.json b/results.json     differences, paired by document, with their significance
  python eval.py runs/default --data README.md 'docs/*.md' any text files, each argument a row
  python eval.py runs/default --data pile/test.jsonl.zst --text-key text
  python eval.py runs/default --data pile/test_text_document    token files, without extension
  python eval.py runs/default --by-position                loss by position, also beyond the trained length
  python eval.py --suite mqar                              train small models on generated tasks

An interrupted evaluation resumes with the same command.
Bits per byte = nats / ln 2 / bytes of UTF-8: it compares models with different tokenizers, and with
compressors (gzip -9 reaches about 1.6 on Python source code). Every token counts once, also the ends of documents.
The scores are added to results.json in the run's folder; `python -m tools.plot RUN --html` shows them.
docs/guide/evaluation.md has the details."""


if __name__ == "__main__":
    sys.exit(main())
