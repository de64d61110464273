"""A SentencePiece tokenizer from raw text: python -m tools.train_tokenizer --input ... --output tokenizer.model"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.atomic_io import read_json, write_whole
from data.corpus.discovery import source_files
from data.corpus.readers import read_documents
from data.corpus.split import TextSample, split_position
from data.tokenizer import load_tokenizer
from data.train_sentencepiece import check_sentencepiece_size, train_sentencepiece
from tools.cli.arguments import command, command_line, positive

EXAMPLES = """example:
  python -m tools.train_tokenizer --input stdlib --vocab-size 4096 --output tokenizer.model
  python train.py data.tokenizer.type=sentencepiece data.tokenizer.path=tokenizer.model

The model loses nothing: decoding gives back every text, spaces, line ends and rare characters included. Characters
that are not in the vocabulary become bytes. Ids 0 and 1 are the end of a document and "unknown", which is never used.
bpe trains in seconds; unigram takes some twenty times as long and compresses source code a little less.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    check_sentencepiece_size(options.vocab_size)
    files = source_files(options.input)
    made_from = {key: getattr(options, key) for key in ("vocab_size", "model_type", "sample_characters", "jsonl_key")}
    made_from["files"] = hashlib.sha256(json.dumps([file.identity() for file in files]).encode()).hexdigest()[:16]
    record = Path(f"{options.output}.json")
    if options.output.exists() and not options.overwrite:
        before = read_json(record, "remove it", *made_from, "hash") if record.is_file() else {}
        if before != {**made_from, "hash": load_tokenizer("sentencepiece", options.output).hash}:
            raise ValueError(
                f"{options.output} exists, made from other input, with other settings or elsewhere; name another --output, or "
                "replace it with --overwrite"
            )
        print(
            f"{options.output} is complete: trained before on this input with these settings (--overwrite trains again)"
        )
        return 0
    start = time.perf_counter()
    held_out: list[str] = []
    sample = TextSample(options.sample_characters)
    for document in read_documents(files, options.jsonl_key):
        position = split_position(document)
        if position < 0.01 and sum(map(len, held_out)) < 2_000_000:
            held_out.append(document.text)
        else:
            sample.add(position, document.text)
    if not sample.characters:  # the hashes of a few documents may all be low
        for text in held_out:
            sample.add(0.0, text)
        held_out = []
    texts = sample.texts()
    if not texts:
        raise ValueError(f"--input {' '.join(options.input)}: holds no text")
    print(f"training {options.model_type} of {options.vocab_size:,} on {sample.characters:,} characters")
    aside = options.output.with_name(f".{options.output.name}.trained")
    try:
        train_sentencepiece(
            texts, aside, vocab_size=options.vocab_size, model_type=options.model_type, threads=options.workers
        )
        tokenizer = load_tokenizer("sentencepiece", aside)
        # First, so that no kill leaves a tokenizer without it, which the same command would refuse.
        write_whole(record, json.dumps({**made_from, "hash": tokenizer.hash}, indent=2) + "\n")
        aside.replace(options.output)
    finally:
        aside.unlink(missing_ok=True)
    measured, what = (held_out, "held-out documents") if held_out else (texts[:100], "the training text")
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(measured, options.workers))
    size = sum(len(text.encode()) for text in measured)
    print(f"{options.output}: {tokenizer.vocab_size:,} pieces, {size / tokens:.3f} bytes a token on {what}")
    print(f"{time.perf_counter() - start:.1f} seconds")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line("python -m tools.train_tokenizer", "Train a SentencePiece tokenizer on raw text.", EXAMPLES)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders, globs, or stdlib")
    add("--jsonl-key", default="text", metavar="KEY", help="key of the text in JSON lines (text)")
    add("--output", type=Path, required=True, metavar="FILE", help="the model to write, and FILE.json: what from")
    add("--overwrite", action="store_true", help="replace a FILE that was made from something else, or train it again")
    add("--vocab-size", type=positive, default=4096, metavar="N", help="pieces, the 256 bytes included (4096)")
    add("--model-type", choices=["bpe", "unigram"], default="bpe", help="(bpe)")
    add(
        "--sample-characters",
        type=positive,
        default=48_000_000,
        metavar="N",
        help="text to train on, documents chosen by hash (48 million)",
    )
    add("--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="threads (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
