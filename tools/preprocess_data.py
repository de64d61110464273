"""Raw text to token files: python -m tools.preprocess_data --input ... --tokenizer-type hf --vocab-file ... ...

The arguments carry GPT-NeoX's names and meanings; the files open in GPT-NeoX and Megatron-LM.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from data.corpus.discovery import source_files
from data.corpus.readers import SOURCE_KEY
from data.preprocessing.encode import Recipe
from data.preprocessing.pipeline import finished, preprocess
from tools.cli.arguments import command, command_line, from_zero, positive, share

# GPT-NeoX's and Megatron-LM's names for what can be read here.
TOKENIZER_TYPES = {
    "sentencepiece": "sentencepiece",
    "SPMTokenizer": "sentencepiece",
    "hf": "hf",
    "HFTokenizer": "hf",
    "wordpiece": "wordpiece",
    "bytes": "bytes",
}

EXAMPLES = """examples:
  the Pile, with its own tokenizer
    python -m tools.preprocess_data --input pile/train/*.jsonl.zst --tokenizer-type hf \\
        --vocab-file tokenizers/gpt-neox-20b/tokenizer.json --append-eod --output-prefix data/pile_train --workers 16
  C4, with 1 % of the documents for validation, chosen by hash, and exact repeats left out
    python -m tools.preprocess_data --input c4/*.json.gz --tokenizer-type wordpiece --vocab-file bert/vocab.txt \\
        --append-eod --split 99,1 --deduplicate --output-prefix data/c4 --workers 16

what is written, for every key of --jsonl-keys
  PREFIX_text_document.bin    the tokens           (with --split: PREFIX_train_text_document.bin and so on)
  PREFIX_text_document.idx    where each document lies
  PREFIX_text_document.json   counts, bytes a token, the tokenizer and its hash, documents of each input file, checksums
  PREFIX_text_document.sources.npy   where the records name it: the source of each document
A config names the path without extension: data.train=PREFIX_text_document. Look into the files with
python -m tools.inspect_data PREFIX_text_document, and compare them with their checksums with --verify.

A job that was killed goes on where it was when the same command is given again: what is finished, in parts of about
256 MiB of text, is not tokenised again; of a job that is complete it says so. Outputs of other input or settings are
replaced with --overwrite only. The output is the same bytes for any number of workers.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    recipe = Recipe(
        tokenizer_type=TOKENIZER_TYPES[options.tokenizer_type],
        tokenizer_path=options.vocab_file,
        keys=tuple(options.jsonl_keys),
        append_eod=options.append_eod,
        ftfy=options.ftfy,
        split=_shares(options.split),
        min_characters=options.min_characters,
        deduplicate=options.deduplicate,
        max_broken=options.max_broken,
        max_empty=options.max_empty,
        source_key=options.source_key,
    )
    if os.path.basename(options.output_prefix) in ("", ".", ".."):
        raise ValueError(
            f"--output-prefix {options.output_prefix} names a folder: add how the names of the files in it begin, for example "
            f"{os.path.join(options.output_prefix, 'train')}"
        )
    # A name that has a comma itself is one that is there.
    files = source_files([p for word in options.input for p in ([word] if os.path.exists(word) else word.split(","))])
    if not options.overwrite and (manifests := finished(files, options.output_prefix, recipe)):
        _say(options.output_prefix, manifests)
        print("complete: written before from this input with these settings (--overwrite writes it again)")
        return 0
    start = time.perf_counter()
    manifests = preprocess(
        files, options.output_prefix, recipe, workers=options.workers, progress=not options.no_progress
    )
    seconds = time.perf_counter() - start
    _say(options.output_prefix, manifests)
    tokens = sum(manifest["tokens"] for manifest in manifests.values())
    print(f"{seconds:.1f} seconds, {tokens / seconds / 1e6:.2f} million tokens/s")
    return 0


def _say(prefix: str, manifests: Mapping[str, Mapping[str, Any]]) -> None:
    for name, manifest in manifests.items():
        print(
            f"{prefix}_{name}_document: {manifest['documents']:,} documents,"
            f" {manifest['tokens']:,} tokens, {manifest['bytes_per_token']:.3f} bytes a token"
        )
    first = next(iter(manifests.values()))
    if first["skipped"]:
        print("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in first["skipped"].items()))
    print(f"rows of a model for this tokenizer: model.vocab_size={first['padded_vocab_size']}")


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.preprocess_data",
        "Raw text to token files that a config trains from (data.train, data.validation).",
        EXAMPLES,
    )
    add = parser.add_argument_group("input").add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, globs, stdlib, a folder that datasets saved, or hf:NAME[:CONFIGURATION][:SPLIT] to stream; "
        "also separated by commas. .jsonl and .json (one object a line), .parquet, .txt; plain, .gz or .zst",
    )
    add("--jsonl-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text; one output each (text)")
    add(
        "--max-broken",
        type=from_zero,
        default=0,
        metavar="N",
        help="lines that may fail to parse, or files in another encoding, before the job stops (0)",
    )
    add(
        "--max-empty",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="share of empty documents at which the job stops (%(default)s)",
    )
    add(
        "--source-key",
        default=SOURCE_KEY,
        metavar="KEY",
        help="where a record names its source, for a loss of each (%(default)s, the Pile's)",
    )
    add("--min-characters", type=from_zero, default=0, metavar="N", help="leave out shorter documents (0)")
    add("--deduplicate", action="store_true", help="keep the first of equal texts")
    add("--ftfy", action="store_true", help="repair mis-decoded text with the package ftfy, which must be installed")
    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer-type",
        required=True,
        choices=sorted(TOKENIZER_TYPES),
        help="hf (HFTokenizer): tokenizer.json; sentencepiece (SPMTokenizer): .model; wordpiece: vocab.txt; bytes",
    )
    add("--vocab-file", metavar="FILE", help="the tokenizer's file; bytes needs none")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token (recommended)")
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="start of the names of all outputs")
    add("--split", metavar="A,B[,C]", help="shares of train,validation,test by hash of the text; without it one output")
    add(
        "--overwrite",
        action="store_true",
        help="replace outputs that were made from something else, or make them again",
    )
    add = parser.add_argument_group("runtime").add_argument
    add(
        "--workers",
        type=positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that tokenise (%(default)s)",
    )
    add("--no-progress", action="store_true", help="no progress bar")
    # GPT-NeoX's, accepted so that its command lines run: there is one format, and progress needs no help here.
    add("--dataset-impl", choices=["mmap"], default="mmap", help=argparse.SUPPRESS)
    add("--num-docs", type=int, help=argparse.SUPPRESS)
    add("--log-interval", type=int, help=argparse.SUPPRESS)
    return parser


def _shares(split: str | None) -> tuple[float, ...]:
    if split is None:
        return ()
    try:
        return tuple(float(share) for share in split.split(","))
    except ValueError as error:
        raise ValueError(f"--split {split!r} must be numbers separated by commas, such as 98,1,1") from error


if __name__ == "__main__":
    sys.exit(main())
