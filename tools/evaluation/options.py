"""Define the command line of `python eval.py MODEL ...`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.cli.arguments import command_line, from_zero, numbers, positive, positive_numbers, words
from tools.evaluation.request import SEEDS


class _MergeKeyValues(argparse.Action):
    """Parse key=value arguments as the harness does. Its module is imported only for a value, so that --help is fast."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from lm_eval._cli.utils import MergeDictAction

        MergeDictAction.__call__(self, parser, namespace, values, option_string)  # type: ignore[arg-type]


def evaluation_parser() -> argparse.ArgumentParser:
    """Return the parser of `python eval.py MODEL ...`. Options of the harness keep its names, with - or _."""
    parser = command_line(
        "python eval.py",
        "Evaluate a model: zero-shot suites through the lm-evaluation-harness, perplexity on any text.",
        EPILOG,
    )
    parser.add_argument(
        "checkpoint",
        help="folder of a run, or one of its checkpoints/step_*; or a Hugging Face folder or name",
    )
    suites = parser.add_argument_group("suites")
    suites.add_argument(
        "--suite",
        type=words,
        default=[],
        metavar="A,B",
        help="superglue, commonsense, needle, ruler, or a YAML file; mqar, mad, lra (no checkpoint: "
        "--suite mqar --help)",
    )
    suites.add_argument(
        "--tasks",
        type=words,
        default=[],
        metavar="A,B",
        help="tasks, groups and tags of the harness (mmlu, ai2_arc); with --suite ruler, tasks of RULER",
    )
    suites.add_argument(*_both("--include-path"), type=Path, metavar="FOLDER", help="folder with your own task YAMLs")
    suites.add_argument(
        "--limit",
        type=_limit,
        metavar="N",
        help="evaluate the first N documents per task (RULER: per length), or a share below 1; for tests only, marked in "
        "every output",
    )
    suites.add_argument("--without", type=words, default=[], metavar="A,B", help="tasks of the suites to leave out")
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
    suites.add_argument(
        "--shots",
        *_both("--num-fewshot"),
        type=from_zero,
        metavar="N",
        help="examples in the prompt (default: the task's number)",
    )
    suites.add_argument(
        *_both("--apply-chat-template"),
        nargs="?",
        const=True,
        default=False,
        metavar="NAME",
        help="use the chat template",
    )
    suites.add_argument(*_both("--system-instruction"), metavar="TEXT", help="system message in front of every prompt")
    suites.add_argument(
        *_both("--fewshot-as-multiturn"),
        nargs="?",
        type=_truth,
        const=True,
        metavar="BOOL",
        help="examples as turns of the conversation (default: with --apply-chat-template)",
    )
    suites.add_argument(
        *_both("--gen-kwargs"),
        nargs="+",
        action=_MergeKeyValues,
        metavar="KEY=VALUE",
        help="generation arguments, which replace those of the tasks (temperature=0.8 do_sample=True)",
    )
    suites.add_argument(
        "--max-length", type=positive, help="tokens that the model reads at once (default: as in training)"
    )
    suites.add_argument(
        *_both("--log-samples"),
        dest="save_samples",
        action="store_true",
        help="also write every document with its answers; as --samples without a number",
    )
    suites.add_argument("--name", help="name of the model in tables")
    suites.add_argument(
        *_both("--trust-remote-code"), action="store_true", help="run the Python code in a Hugging Face folder"
    )
    suites.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    needle = parser.add_argument_group("needle in a haystack (--suite needle) and RULER (--suite ruler)")
    needle.add_argument(
        "--lengths",
        type=positive_numbers,
        metavar="N,N",
        help="tokens of a text, also as N N (default 2048,4096,8192,16384; RULER also 1024)",
    )
    needle.add_argument(
        "--depths", type=numbers, metavar="P,P", help="needle: percent, also as P P (default 0,10,...,100)"
    )
    needle.add_argument("--needles", type=positive, default=5, metavar="N", help="needle: facts per cell (default 5)")
    needle.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help="RULER: texts per task and length (default 100; the paper has 500)",
    )
    needle.add_argument(
        "--filler",
        type=Path,
        metavar="FILE",
        help="a text that hides needles; default: the run's validation text, for RULER generated prose",
    )
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
    texts.add_argument(
        "--sequence-length",
        type=positive,
        help="tokens per piece (default: as in training; of a Hugging Face model its length, at most 2048)",
    )
    texts.add_argument(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens between two pieces, which then overlap: the shared tokens are context (default: no overlap)",
    )
    texts.add_argument("--batch-size", type=positive, default=8, help="pieces per batch (default 8)")
    texts.add_argument(
        "--by-position", action="store_true", help="loss by position up to 4 x the trained length, with a plot"
    )
    parser.add_argument(
        "--seed",
        type=_seeds,
        metavar="N[,N,N,N]",
        help="seeds of random, NumPy, torch and the examples in the prompt (default 0,1234,1234,1234); the first is also"
        " the seed of needles and RULER",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU where there is one)")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="fp32, bf16, fp16, fp64 (default: bf16 on a GPU, else fp32; of a Hugging Face model that of its weights)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="results file, *.json, with tables and chart beside it (default: results.json in the run's folder; of suites:"
        " evaluation/STEP/results.json there, of a Hugging Face model in runs/evaluation/NAME)",
    )
    return parser


def parse_evaluation(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of `python eval.py MODEL ...`.

    Numbers after --lengths and --depths may be separated by spaces. --samples without a number is --log-samples.
    """
    joined: list[str] = []
    for word in arguments:
        is_number = re.fullmatch(r"[\d,][\d,.]*", word) is not None
        if is_number and len(joined) > 1 and joined[-2] in ("--lengths", "--depths"):
            joined[-1] += f",{word}"
            continue
        if joined[-1:] == ["--samples"] and not is_number:
            joined[-1] = "--log-samples"
        joined.append(word)
    if joined[-1:] == ["--samples"]:
        joined[-1] = "--log-samples"
    parser = evaluation_parser()
    unknown = parser.parse_known_args(joined)[1]
    if unknown and not any(word.startswith("-") for word in unknown):
        parser.error(
            f"{' '.join(unknown)}: one checkpoint is allowed; separate the names after --suite, --tasks and --without by commas, "
            "as --tasks piqa,boolq"
        )
    return parser.parse_args(joined)


def _both(option: str) -> tuple[str, str]:
    """Return an option with dashes, and with the underscores of the harness."""
    return option, "--" + option[2:].replace("-", "_")


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0 or (value > 1 and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text}: a whole number of documents, or a share between 0 and 1, is allowed")
    return value if value < 1 else int(value)


def _seeds(text: str) -> tuple[int | None, ...]:
    from lm_eval._cli.utils import _int_or_none_list_arg_type

    try:
        return tuple(_int_or_none_list_arg_type(3, 4, ",".join(map(str, SEEDS)), text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: one integer, or four (or None) separated by commas") from error


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text}: true or false")
    return text.lower() in ("true", "1", "yes")


EPILOG = """examples:
  python eval.py runs/default                              perplexity of the run's validation set
  python eval.py runs/default --suite superglue,commonsense --data-dir DATA
                                                           tables with the paper's rows
  python eval.py EleutherAI/pythia-410m --suite commonsense    any Hugging Face model, in the same table
  python eval.py runs/default --suite needle               a fact in a long text, by length and depth, as a heat map
  python eval.py runs/default --suite ruler --lengths 1024 4096 --samples 50    RULER's tasks by length
  python eval.py runs/default --tasks piqa,ai2_arc,mmlu    tasks, tags and groups of the harness
  python eval.py runs/default --tasks my_task --include-path my_tasks --limit 10    your own task, ten documents
  python eval.py CHAT_MODEL --tasks gsm8k --apply-chat-template --system-instruction "Be brief." --gen-kwargs temperature=0
  torchrun --nproc-per-node 8 eval.py runs/big --suite superglue   eight GPUs share the requests
  python eval.py table a/results.json b/results.json       several models in one table
  python eval.py compare a/results.json b/results.json     differences, paired by document, with their significance
  python eval.py runs/default --data README.md 'docs/*.md'   any text files, each argument a row
  python eval.py runs/default --data pile/test.jsonl.zst --text-key text
  python eval.py runs/default --data pile/test_text_document    token files, without extension
  python eval.py EleutherAI/pythia-410m --data README.md --stride 512    a Hugging Face model, with overlapping pieces
  python eval.py runs/default --by-position                loss by position, also beyond the trained length
  python eval.py --suite mqar                              train small models on generated tasks

An interrupted evaluation resumes with the same command.
Bits per byte = nats / ln 2 / bytes of UTF-8: it compares models with different tokenizers, and with
compressors (gzip -9 reaches about 1.6 on Python source code). Every token counts once, also the ends of documents.
Without --limit the scores are added to results.json in the run's folder; `python -m tools.plot RUN --html` shows
them.
docs/guide/evaluation.md has the details."""
