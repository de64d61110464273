"""Tokenize raw text to token files: python -m tools.preprocess_data --input ... --tokenizer-type hf --vocab-file ... ...

Options have the names and meanings of GPT-NeoX. GPT-NeoX and Megatron-LM can read the files.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from data.corpus.discovery import source_files
from data.corpus.readers import SOURCE_KEY
from data.preprocessing.data_card import write_data_cards
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.filters import Filters
from data.preprocessing.pipeline import finished, preprocess
from data.tokenizer import merges_of
from megatron_lite.plural import counted
from tools.cli.arguments import (
    above_zero,
    check_not_read,
    check_writable,
    command,
    command_line,
    from_zero,
    interrupted,
    positive,
    share,
    words,
)

# Names of tokenizer types, including those of GPT-NeoX and Megatron-LM.
TOKENIZER_TYPES = {
    "sentencepiece": "sentencepiece",
    "SPMTokenizer": "sentencepiece",
    "hf": "hf",
    "HFTokenizer": "hf",
    "gpt2": "gpt2",
    "GPT2BPETokenizer": "gpt2",
    "wordpiece": "wordpiece",
    "bytes": "bytes",
}

EXAMPLES = """examples:
  the Pile, with its own tokenizer
    python -m tools.preprocess_data --input 'corpora/pile/train/*.jsonl.zst' --tokenizer-type hf \\
        --vocab-file corpora/gpt-neox-20b/tokenizer.json --append-eod --output-prefix corpora/pile/train --workers 16
  C4, with 1 % of the documents for validation, chosen by hash, without exact duplicates
    python -m tools.preprocess_data --input 'c4/*.json.gz' --tokenizer-type wordpiece --vocab-file bert/vocab.txt \\
        --append-eod --split 99,1 --deduplicate --output-prefix corpora/c4 --workers 16
  web pages in English that keep Gopher's rules, without near duplicates, with a data card
    python -m tools.preprocess_data --input 'web/*.jsonl.zst' --tokenizer-type wordpiece --vocab-file bert/vocab.txt \\
        --append-eod --quality --languages en --near-duplicates 0.8 --data-card licences.yml --output-prefix corpora/web

outputs, for each key of --jsonl-keys
  PREFIX_text_document.bin    the tokens (with --split: PREFIX_train_text_document.bin and so on)
  PREFIX_text_document.idx    the position of each document
  PREFIX_text_document.json   counts, bytes per token, the tokenizer and its hash, documents per input file, checksums
  PREFIX_text_document.sources.npy   the source of each document, if the records name it
  PREFIX_text_document.md     with --data-card: sources, licences, sizes, what the filters removed

A configuration names the path without extension: data.train=PREFIX_text_document. To inspect the files, run
python -m tools.inspect_data PREFIX_text_document; with --verify it compares them with their checksums.

To resume a job that was killed, run the same command again. Finished parts of about 256 MiB of text are not tokenized
again. Outputs of other input or settings are replaced only with --overwrite. The output does not depend on --workers.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.shingle_words and options.near_duplicates is None:
        raise ValueError(
            f"--shingle-words {options.shingle_words} has no effect without --near-duplicates: add --near-duplicates SHARE, "
            "such as 0.8, or leave --shingle-words out"
        )
    if len(set(options.jsonl_keys)) < len(options.jsonl_keys):
        raise ValueError(f"--jsonl-keys {' '.join(options.jsonl_keys)}: each key is allowed once; it names an output")
    settings = PreprocessingSettings(
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
        filters=Filters(
            quality=options.quality,
            languages=tuple(sorted(set(options.languages))),
            near_duplicates=options.near_duplicates,
            exclude_sources=tuple(sorted(set(options.exclude_sources))),
            shingle_words=options.shingle_words or Filters.shingle_words,
        ),
    )
    licences = _licences(options.data_card) if options.data_card else {}
    if options.merge_file is not None:
        if settings.tokenizer_type != "gpt2" or options.vocab_file is None:
            raise ValueError("--merge-file requires --tokenizer-type gpt2 (GPT2BPETokenizer) and --vocab-file")
        if options.merge_file.resolve() != (expected := merges_of(options.vocab_file)).resolve():
            raise ValueError(
                f"--merge-file {options.merge_file}: {expected} is allowed, beside --vocab-file; rename or move the file"
            )
    if os.path.basename(options.output_prefix) in ("", ".", ".."):
        raise ValueError(
            f"--output-prefix {options.output_prefix} names a folder: add how the names of the files in it begin, for example "
            f"{os.path.join(options.output_prefix, 'train')}"
        )
    # An existing path may contain a comma; any other word is split at commas.
    inputs = [p for word in options.input for p in ([word] if os.path.exists(word) else word.split(","))]
    files = source_files(inputs)
    for name in settings.names():
        manifest = Path(f"{options.output_prefix}_{name}_document.json")
        check_not_read(manifest, "--output-prefix", [*inputs, *(file.path for file in files)])
    if not options.overwrite and (manifests := finished(files, options.output_prefix, settings)):
        _print_summary(options, manifests, licences)
        print("complete: written before from this input with these settings (--overwrite writes it again)")
        return 0
    for name in settings.names():
        check_writable(Path(f"{options.output_prefix}_{name}_document.bin"), "--output-prefix")
    start = time.perf_counter()
    try:
        manifests = preprocess(
            files, options.output_prefix, settings, workers=options.workers, progress=not options.no_progress
        )
    except KeyboardInterrupt:
        return interrupted("the same command resumes after the last finished part")
    seconds = time.perf_counter() - start
    _print_summary(options, manifests, licences)
    tokens = sum(manifest["tokens"] for manifest in manifests.values())
    print(f"{seconds:.1f} seconds, {tokens / seconds / 1e6:.2f} million tokens/s")
    return 0


def _print_summary(
    options: argparse.Namespace, manifests: Mapping[str, Mapping[str, Any]], licences: Mapping[str, str]
) -> None:
    for name, manifest in manifests.items():
        prefix = f"{options.output_prefix}_{name}_document"
        print(
            f"{prefix}: {counted(manifest['documents'], 'document')},"
            f" {manifest['tokens']:,} tokens, {manifest['bytes_per_token']:.3f} bytes per token"
        )
    first = next(iter(manifests.values()))
    if first["skipped"]:
        print("skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in first["skipped"].items()))
    print(f"vocabulary size of a model with this tokenizer: model.vocab_size={first['padded_vocab_size']}")
    if options.data_card is not None:
        prefixes = {Path(f"{options.output_prefix}_{name}_document"): manifest for name, manifest in manifests.items()}
        print("data card: " + ", ".join(map(str, write_data_cards(prefixes, licences))))


def _licences(path: str) -> dict[str, str]:
    """Return the licence per source of a YAML file. Raises ValueError if it holds something else."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--data-card {path} cannot be read ({error.strerror}): give a YAML file of lines SOURCE: LICENCE, or no file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--data-card {path} is not YAML: {error}. Write lines SOURCE: LICENCE") from error
    if not isinstance(content, dict) or not all(isinstance(word, str) for pair in content.items() for word in pair):
        raise ValueError(f"--data-card {path}: one line per source, SOURCE: LICENCE, is allowed")
    return content


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.preprocess_data",
        "Tokenize raw text to token files for training (data.train, data.validation).",
        EXAMPLES,
    )
    add = parser.add_argument_group("input").add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, globs, stdlib, a folder saved by datasets, or hf:NAME[:CONFIGURATION][:SPLIT] to stream; "
        "may be separated by commas. .jsonl and .json (one object per line), .parquet, .txt; plain, .gz or .zst",
    )
    add("--jsonl-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text; one output per key (text)")
    add(
        "--max-broken",
        type=from_zero,
        default=0,
        metavar="N",
        help="most lines that cannot be parsed, or files in another encoding, before the job stops (0)",
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
        help="key of the source in a record, for the per-source loss (%(default)s, as in the Pile); another key is refused if "
        "no file has it in its first documents",
    )
    add("--min-characters", type=from_zero, default=0, metavar="N", help="skip shorter documents (0)")
    add = parser.add_argument_group("filters (removed documents are counted per reason)").add_argument
    add("--deduplicate", action="store_true", help="skip documents whose text equals an earlier one")
    add(
        "--near-duplicates",
        type=above_zero,
        metavar="SHARE",
        help="skip documents whose word n-grams have this Jaccard similarity (0.3 to 0.98, usually 0.8) with those of an "
        "earlier one: MinHash and locality-sensitive hashing",
    )
    add("--shingle-words", type=positive, metavar="N", help="words per n-gram of --near-duplicates (5)")
    add(
        "--quality",
        action="store_true",
        help="skip documents that break Gopher's rules for English prose (arXiv 2112.11446)",
    )
    add(
        "--languages",
        type=words,
        default=[],
        metavar="A,B",
        help="keep documents in these languages, such as en,de; zxx is text without a language, such as code",
    )
    add(
        "--exclude-sources",
        nargs="+",
        default=[],
        metavar="NAME",
        help="leave out documents of these sources (--source-key); a name that no document has is refused",
    )
    add("--ftfy", action="store_true", help="repair mis-decoded text with the package ftfy")
    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer-type",
        required=True,
        choices=sorted(TOKENIZER_TYPES),
        metavar="TYPE",
        help="hf (HFTokenizer): tokenizer.json; sentencepiece (SPMTokenizer): .model; gpt2 (GPT2BPETokenizer): vocab.json "
        "and merges.txt; wordpiece: vocab.txt; bytes",
    )
    add("--vocab-file", metavar="FILE", help="the tokenizer's file; bytes needs none")
    add("--merge-file", type=Path, metavar="FILE", help="the merges of gpt2 (default: beside --vocab-file)")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token (recommended)")
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="beginning of all output paths")
    add("--split", metavar="A,B[,C]", help="shares of train,validation,test, by hash of the text (default: one output)")
    add(
        "--overwrite",
        action="store_true",
        help="replace existing outputs, even if other input or settings made them",
    )
    add(
        "--data-card",
        nargs="?",
        const="",
        metavar="LICENCES",
        help="also write PREFIX_text_document.md; LICENCES is a YAML file of lines SOURCE: LICENCE",
    )
    add = parser.add_argument_group("runtime").add_argument
    add(
        "--workers",
        type=positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that tokenize (%(default)s)",
    )
    add("--no-progress", action="store_true", help="hide the progress bar")
    # Options of GPT-NeoX that are accepted without effect, so that its command lines run.
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
