"""Train a SentencePiece tokenizer on raw text: python -m tools.train_tokenizer --input ... --output tokenizer.model"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.atomic_io import read_json, write_text
from data.corpus.discovery import source_files
from data.corpus.readers import read_documents
from data.corpus.split import TextSample, split_position
from data.progress import ProgressBar
from data.tokenizer import load_tokenizer
from data.train_sentencepiece import check_sentencepiece_size, train_sentencepiece
from tools.cli.arguments import check_not_read, check_writable, command, command_line, positive

EXAMPLES = """example:
  python -m tools.train_tokenizer --input stdlib --vocab-size 4096 --output tokenizer.model
  python train.py data.tokenizer.type=sentencepiece data.tokenizer.path=tokenizer.model

Decoding returns the exact text, including spaces, line ends and rare characters. Characters outside the vocabulary become
bytes. Id 0 is the end of a document. Id 1 is "unknown", which is never used. bpe trains in seconds; unigram takes about
twenty times as long and compresses source code slightly less.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    check_sentencepiece_size(options.vocab_size)
    if options.output.is_dir():
        raise ValueError(
            f"--output {options.output} is a folder: name a file in it, such as {options.output / 'tokenizer.model'}"
        )
    files = source_files(options.input)
    settings = {key: getattr(options, key) for key in ("vocab_size", "model_type", "sample_characters", "jsonl_key")}
    settings["files"] = hashlib.sha256(json.dumps([file.identity() for file in files]).encode()).hexdigest()[:16]
    record = Path(f"{options.output}.json")
    for path in (options.output, record):
        check_not_read(path, "--output", [*options.input, *(file.path for file in files)])
    if options.output.exists() and not options.overwrite:
        previous = read_json(record, "remove it", *settings, "hash") if record.is_file() else {}
        if previous != {**settings, "hash": load_tokenizer("sentencepiece", options.output).hash}:
            raise ValueError(
                f"{options.output} exists, made from other input, with other settings or elsewhere; name another --output, or "
                "replace it with --overwrite"
            )
        print(
            f"{options.output} is complete: trained before on this input with these settings (--overwrite trains again)"
        )
        return 0
    check_writable(options.output, "--output")
    threads = min(options.workers, 128)  # the library fails where the machine cannot start all
    start = time.perf_counter()
    held_out: list[str] = []
    sample = TextSample(options.sample_characters)
    total = sum(file.bytes for file in files)
    with ProgressBar(total=total or None, desc="reading", unit="B", unit_scale=True, leave=False) as bar:
        for document in read_documents(files, options.jsonl_key, progress=bar.update):
            position = split_position(document)
            if position < 0.01 and sum(map(len, held_out)) < 2_000_000:
                held_out.append(document.text)
            else:
                sample.add(position, document.text)
    if not sample.characters:  # with few documents, all hashes may select held-out documents
        for text in held_out:
            sample.add(0.0, text)
        held_out = []
    texts = sample.texts()
    if not texts:
        raise ValueError(
            f"--input {' '.join(options.input)}: holds no text; name files that hold text under --jsonl-key {options.jsonl_key}"
        )
    print(f"training {options.model_type} of {options.vocab_size:,} on {sample.characters:,} characters")
    temporary = options.output.with_name(f".{options.output.name}.trained")
    try:
        train_sentencepiece(
            texts, temporary, vocab_size=options.vocab_size, model_type=options.model_type, threads=threads
        )
        tokenizer = load_tokenizer("sentencepiece", temporary)
        # Written first: the same command would refuse a tokenizer without its record.
        write_text(record, json.dumps({**settings, "hash": tokenizer.hash}, indent=2) + "\n")
        temporary.replace(options.output)
    finally:
        temporary.unlink(missing_ok=True)
    measured, source = (held_out, "held-out documents") if held_out else (texts[:100], "the training text")
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(measured, threads))
    size = sum(len(text.encode()) for text in measured)
    print(f"{options.output}: {tokenizer.vocab_size:,} pieces, {size / tokens:.3f} bytes per token on {source}")
    print(f"{time.perf_counter() - start:.1f} seconds")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line("python -m tools.train_tokenizer", "Train a SentencePiece tokenizer on raw text.", EXAMPLES)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders, globs, or stdlib")
    add("--jsonl-key", default="text", metavar="KEY", help="key of the text in JSON lines (text)")
    add("--output", type=Path, required=True, metavar="FILE", help="model to write; FILE.json records its input")
    add("--overwrite", action="store_true", help="replace FILE, even if other input or settings made it")
    add("--vocab-size", type=positive, default=4096, metavar="N", help="pieces, including the 256 bytes (4096)")
    add("--model-type", choices=["bpe", "unigram"], default="bpe", help="(bpe)")
    add(
        "--sample-characters",
        type=positive,
        default=48_000_000,
        metavar="N",
        help="most characters to train on; documents are chosen by hash (48 million)",
    )
    add("--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="threads (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
