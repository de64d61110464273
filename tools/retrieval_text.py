"""Write generated retrieval texts as JSON lines: python -m tools.retrieval_text --output retrieval.jsonl --documents 1000 ..."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from data.atomic_io import atomic_write
from data.corpus.discovery import source_files
from data.corpus.readers import read_documents
from data.machine_memory import machine_memory
from data.progress import ProgressBar
from data.synthetic.retrieval_text import MOST_DOCUMENTS, RETRIEVAL_TASKS, sentences, training_example
from data.synthetic.ruler import TASKS
from data.tokenizer import TOKENIZER_TYPES, load_tokenizer
from tools.cli.arguments import check_not_read, check_writable, command, command_line, from_zero, positive, words

HAYSTACK_CHARACTERS = 50_000_000

EXAMPLES = """example: 2,000 texts of 1,000 to 16,000 tokens, as token files, with 5 % of the samples of a run
  python -m tools.retrieval_text --output corpora/retrieval.jsonl --documents 2000 --min-tokens 1000 --max-tokens 16000 \\
      --tokenizer-type hf --vocab-file corpora/gpt-neox-20b/tokenizer.json
  python -m tools.preprocess_data --input corpora/retrieval.jsonl --output-prefix corpora/retrieval --append-eod \\
      --tokenizer-type hf --vocab-file corpora/gpt-neox-20b/tokenizer.json
  python train.py configs/metala_1.4b_16k.yml 'data.blend={by: weights, weights: [95, 5]}' \\
      'data.train=[PREFIX, corpora/retrieval_text_document]'

The texts are RULER's tasks with their answers: needles in a haystack (single, multi-key, multi-value, multi-query) and
variable tracking. The tasks take turns. A record names its task as its source, so logging.loss_by_source=true shows the loss
of each task. Seeds of evaluations are 0 or more and seeds of these texts are below 0, so no evaluated example is trained on.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    tokenizer = load_tokenizer(options.tokenizer_type, options.vocab_file)
    haystack = None
    if options.haystack:
        files = source_files(options.haystack)
        check_not_read(options.output, "--output", [*options.haystack, *(file.path for file in files)])
        documents = read_documents(files, options.jsonl_key)
        haystack = sentences((document.text for document in documents), HAYSTACK_CHARACTERS)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode_batch([text])[0])

    example = partial(
        training_example, tasks=options.tasks, seed=options.seed, count_tokens=count_tokens, haystack=haystack
    )
    _check_lengths(options, example)
    counts: Counter[str] = Counter()
    tokens = 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with (
        ProgressBar(total=options.documents, unit="document", disable=options.no_progress) as bar,
        atomic_write(options.output) as file,
    ):
        for number in range(options.documents):
            task, document = example(number, lengths=(options.min_tokens, options.max_tokens))
            file.write(json.dumps({"text": document.text, "meta": {"pile_set_name": task}}).encode() + b"\n")
            counts[task] += 1
            tokens += count_tokens(document.text)
            bar.update()
    listed = ", ".join(f"{count:,} {task}" for task, count in counts.items())
    print(f"{options.output}: {options.documents:,} documents, {tokens:,} tokens ({listed})")
    return 0


def _check(options: argparse.Namespace) -> None:
    if unknown := [task for task in options.tasks if task not in TASKS]:
        raise ValueError(f"--tasks {','.join(unknown)}: allowed are {', '.join(TASKS)}")
    if options.min_tokens > options.max_tokens:
        raise ValueError(
            f"--min-tokens {options.min_tokens}: at most --max-tokens {options.max_tokens} is allowed; lower one, or raise the"
            " other"
        )
    if options.max_tokens > (memory := machine_memory()):  # a token has one byte or more
        raise ValueError(
            f"--max-tokens {options.max_tokens}: a text must fit into this machine's memory of {memory:,} bytes; give less"
        )
    if options.documents > MOST_DOCUMENTS:
        raise ValueError(f"--documents {options.documents}: at most {MOST_DOCUMENTS} are allowed; use several --seed")
    if options.output.exists() and not options.overwrite:
        raise ValueError(f"{options.output} exists; name another --output, or replace it with --overwrite")
    check_writable(options.output, "--output")


def _check_lengths(options: argparse.Namespace, example: Callable[..., object]) -> None:
    """Raise ValueError for a length that a task cannot have. Each task has one of the first examples."""
    for flag, length in (("--min-tokens", options.min_tokens), ("--max-tokens", options.max_tokens)):
        try:
            for number in range(len(options.tasks)):
                example(number, lengths=(length, length))
        except ValueError as error:
            raise ValueError(f"{flag} {length}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.retrieval_text", "Write generated retrieval texts as JSON lines, for training.", EXAMPLES
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="JSON lines to write")
    add("--overwrite", action="store_true", help="replace FILE")
    add("--documents", type=positive, required=True, metavar="N", help="number of texts")
    add("--min-tokens", type=positive, default=1000, metavar="N", help="shortest text (1000)")
    add("--max-tokens", type=positive, default=16000, metavar="N", help="longest text; lengths are log-uniform (16000)")
    add(
        "--tasks",
        type=words,
        default=list(RETRIEVAL_TASKS),
        metavar="A,B",
        help=f"tasks, of {', '.join(TASKS)} (all but cwe and fwe)",
    )
    add("--seed", type=from_zero, default=0, metavar="N", help="another seed gives other texts (0)")
    add(
        "--haystack",
        nargs="+",
        metavar="PATH",
        help=f"text that hides the needles of prose tasks: the first {HAYSTACK_CHARACTERS:,} characters of files, folders, "
        "globs, or stdlib (default: generated prose)",
    )
    add("--jsonl-key", default="text", metavar="KEY", help="key of the text in JSON lines of --haystack (text)")
    add("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="tokenizer that counts the tokens")
    add("--vocab-file", metavar="FILE", help="the tokenizer's file; bytes needs none")
    add("--no-progress", action="store_true", help="hide the progress bar")
    return parser


if __name__ == "__main__":
    sys.exit(main())
