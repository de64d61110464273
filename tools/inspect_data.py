"""Inspect a pair of token files, or decode labelled images: python -m tools.inspect_data PREFIX"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.corpus.document_sources import read_sources
from data.datasets.best_fit import build_best_fit_index
from data.datasets.sample_index import ORDERS, PACKINGS, build_sample_index, selected_sequences
from data.indexed import IndexedTokens
from data.manifest import manifest_tokenizer, read_manifest
from data.preprocessing.contamination import SHARE, WORDS, shared_documents
from data.tokenizer import TOKENIZER_TYPES, Tokenizer, load_tokenizer
from data.verification import Findings, verify_caches, verify_token_files
from tools.cli.arguments import FAILED, above_zero_to_one, check_picture, command, command_line, from_zero, positive

EXAMPLES = """examples:
  python -m tools.inspect_data corpora/pile/train_text_document                     counts, lengths, integrity
  python -m tools.inspect_data corpora/pile/train_text_document --document 7        document 7 as text
  python -m tools.inspect_data corpora/pile/train_text_document --sample 0 --sequence-length 2048 --num-samples 1000 --seed 1234
                                                                           the first sample of a run and its origin
  python -m tools.inspect_data corpora/pile/train_text_document --sequence-length 16384 --min-tokens 8192
                                                                           long documents, documents that packing cuts
  python -m tools.inspect_data corpora/pile/train_text_document --histogram lengths.png --most-common 20
  python -m tools.inspect_data corpora/pile/train_text_document --verify            compare all bytes with the checksums
  python -m tools.inspect_data runs/cache --verify                           the same for a folder of caches
  python -m tools.inspect_data corpora/pile/validation_text_document --trained-on corpora/pile/train_text_document
                                                                           list held-out documents that training has
  python -m tools.inspect_data corpora/cifar10/train.parquet --images        decode every image

The .json file next to the token files names the tokenizer. For files of other projects give --tokenizer-type and
--vocab-file.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.histogram:
        check_picture(options.histogram, "--histogram")
    if options.verify:
        return _print_findings(
            verify_caches(options.prefix) if options.prefix.is_dir() else verify_token_files(options.prefix)
        )
    if options.images:
        from data.images.reading import find_images
        from data.images.verification import verify_images

        return _print_findings(verify_images(find_images(str(options.prefix), "--images")))
    for flag, value in (("--overlap", options.overlap), ("--ngram-words", options.ngram_words)):
        if value is not None and not options.trained_on:
            raise ValueError(
                f"{flag} {value} has no effect without --trained-on: add --trained-on PREFIX, or leave {flag} out"
            )
    if options.trained_on:
        return _print_shared(options)
    tokens = IndexedTokens(options.prefix)
    tokenizer = (
        load_tokenizer(options.tokenizer_type, options.vocab_file)
        if options.tokenizer_type
        else manifest_tokenizer(options.prefix)
    )
    if options.document is not None:
        _print_document(tokens, options.document, tokenizer)
        print(f"from {_origin(tokens, options.document)}")
    elif options.sample is not None:
        _print_sample(options, tokenizer)
    else:
        _print_summary(tokens, tokenizer)
        if options.min_tokens:
            sizes = tokens.sizes[selected_sequences(tokens, options.min_tokens)]
            count = int(sizes.sum(dtype=np.int64))
            share = f"{count / tokens.num_tokens:.1%} of the tokens"
            print(f"  {options.min_tokens:,} tokens or more: {len(sizes):,} documents, {count:,} tokens ({share})")
        if options.sequence_length:
            _print_packings(tokens, options.min_tokens, options.sequence_length)
    if options.most_common:
        _print_most_common(tokens, options.most_common, tokenizer)
    if options.histogram:
        _draw_lengths(document_lengths(tokens), options.histogram, str(options.prefix))
        print(f"lengths of the documents: {options.histogram}")
    return 0


def _print_findings(findings: Findings) -> int:
    """Print which files or images are intact, unknown or damaged. Returns 1 if one is damaged."""
    for line in findings.compared:
        print(f"OK       {line}")
    for line in findings.unknown:
        print(f"unknown  {line}")
    for line in findings.damaged:
        print(f"DAMAGED  {line}")
    return FAILED if findings.damaged else 0


def _print_shared(options: argparse.Namespace) -> int:
    """Print the documents that the training text holds. Returns 1 if there are any."""
    words, share = options.ngram_words or WORDS, options.overlap or SHARE
    shared = shared_documents(options.prefix, options.trained_on, words=words, share=share)
    for document in shared:
        print(document)
    tokens = IndexedTokens(options.prefix)
    equal = sum(document.equal for document in shared)
    print(
        f"documents in the training text: {len(shared):,} of {len(tokens):,}, {equal:,} equal and"
        f" {len(shared) - equal:,} with at least {share:.0%} of their {words}-word n-grams"
    )
    return FAILED if shared else 0


def document_lengths(tokens: IndexedTokens) -> NDArray[np.int64]:
    """Return the number of tokens of each document, int64 [documents]."""
    ends = np.concatenate([[0], np.cumsum(tokens.sizes, dtype=np.int64)])
    return np.diff(ends[tokens.document_starts])


def _print_summary(tokens: IndexedTokens, tokenizer: Tokenizer | None) -> None:
    lengths = document_lengths(tokens)
    low, median, high = (int(x) for x in np.percentile(lengths, [5, 50, 95]))
    print(f"{tokens.prefix}")
    print(f"  documents  {len(lengths):,}" + ("" if len(lengths) == len(tokens) else f" of {len(tokens):,} sequences"))
    print(f"  tokens     {tokens.num_tokens:,} ({tokens.dtype}, {tokens.num_tokens * tokens.dtype.itemsize:,} bytes)")
    print(
        f"  lengths    mean {lengths.mean():,.1f}; shortest {lengths.min():,}, 5 % under {low:,}, half under"
        f" {median:,}, 95 % under {high:,}, longest {lengths.max():,}"
    )
    names, ids = read_sources(tokens.prefix, len(tokens))
    if len(names) > 1:
        by_source = np.bincount(ids, tokens.sizes, minlength=len(names)) / tokens.num_tokens
        listed = sorted(zip(by_source, names, strict=True), reverse=True)
        print("  sources    " + ", ".join(f"{name} {share:.1%}" for share, name in listed) + " of the tokens")
    if tokenizer is not None:
        ends = np.unique(tokens.document_starts[:1001])[1:]  # of documents that have sequences
        last = [int(tokens[int(end) - 1][-1]) for end in ends if tokens.sizes[int(end) - 1]]
        ended = sum(token == tokenizer.end_of_document_id for token in last)
        path = f" {tokenizer.path}" if tokenizer.path else ""
        print(f"  tokenizer  {tokenizer.type}{path}, {tokenizer.vocab_size:,} entries")
        print(f"  documents that end with the end-of-document token: {ended:,} of the first {len(last):,}")
    print("  both files have the sizes that the index gives")


def _print_packings(tokens: IndexedTokens, min_tokens: int, length: int) -> None:
    """Print how many documents each packing cuts in one epoch, and the share of padding."""
    sizes = tokens.sizes[selected_sequences(tokens, min_tokens)]
    starts = build_sample_index(sizes, length, 1, 0)
    position, offset = starts.sample_index.T
    inside = (offset > 0) & (offset < sizes[starts.document_index[np.minimum(position, len(sizes) - 1)]] - 1)
    stream = len(np.unique(position[inside]))
    index = build_best_fit_index(sizes, length, 1, 0)
    used = int(np.minimum(sizes[index.sequences] - index.offsets, length + 1).sum(dtype=np.int64))
    best = int((sizes > length + 1).sum())
    print(f"  samples of {length:,} tokens, one epoch of {len(sizes):,} documents:")
    print(f"    stream    {len(starts):,} samples, {stream:,} documents cut ({stream / len(sizes):.1%})")
    print(
        f"    best_fit  {len(index):,} samples, {best:,} documents cut ({best / len(sizes):.1%}), padding"
        f" {1 - used / (len(index) * (length + 1)):.2%}"
    )


def _print_document(tokens: IndexedTokens, number: int, tokenizer: Tokenizer | None) -> None:
    if not 0 <= number < tokens.num_documents:
        raise ValueError(f"there is no document {number}: {tokens.prefix} has 0 to {tokens.num_documents - 1}")
    first, end = (int(x) for x in tokens.document_starts[number : number + 2])
    ids = np.concatenate([tokens[sequence] for sequence in range(first, end)]) if end > first else np.zeros(0, int)
    print(f"document {number}: {len(ids):,} tokens")
    print(_text(ids, tokenizer))


def _print_sample(options: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    from data.datasets.blend import Shares, training_dataset
    from data.datasets.causal import Packing

    dataset: Any = training_dataset(
        options.prefix,
        Shares(min_tokens=(options.min_tokens,)),
        sequence_length=options.sequence_length or 2048,
        num_samples=options.num_samples or options.sample + 1,
        seed=options.seed,
        order=options.order,
        packing=Packing(method=options.packing),
    )
    if options.sample >= len(dataset):
        raise ValueError(
            f"there is no sample {options.sample}: these files give 0 to {len(dataset) - 1} (--num-samples)"
        )
    print(f"sample {options.sample} of {len(dataset):,} (epochs: {dataset.epochs}, seed {options.seed})")
    for sequence, first, count in dataset.spans_of_sample(options.sample):
        document = int(np.searchsorted(dataset.file.document_starts, sequence, side="right")) - 1
        print(f"  document {document}, tokens {first:,} to {first + count - 1:,}: {_origin(dataset.file, document)}")
    print(_text(dataset[options.sample]["tokens"].numpy(), tokenizer))


def _origin(tokens: IndexedTokens, document: int) -> str:
    """Return the input file and the source of a document, as far as they are known."""
    manifest = read_manifest(tokens.prefix) or {}
    names, ids = read_sources(tokens.prefix, len(tokens))
    source = names[ids[int(tokens.document_starts[document])]] if manifest.get("sources") else ""
    previous = 0
    for path, count in manifest.get("documents_of_files", []):
        if document < previous + count:
            return f"{path}, text {document - previous + 1} of {count}" + (f", {source}" if source else "")
        previous += count
    return source or "a file that is not recorded"


def _print_most_common(tokens: IndexedTokens, count: int, tokenizer: Tokenizer | None) -> None:
    totals = np.zeros(np.iinfo(np.uint16).max + 1, np.int64)
    counted = 0
    for sequence in range(len(tokens)):
        counts = np.bincount(tokens[sequence])
        if len(counts) > len(totals):
            totals = np.pad(totals, (0, len(counts) - len(totals)))
        totals[: len(counts)] += counts
        counted += len(tokens[sequence])
        if counted > 100_000_000:
            break
    print(f"most common of the first {counted:,} tokens:")
    for token in np.argsort(-totals, kind="stable")[: min(count, np.count_nonzero(totals))]:
        spelled = "" if tokenizer is None else repr(tokenizer.decode([int(token)]))
        print(f"  {100 * totals[token] / counted:6.2f} %  {token:>6} {spelled}")


def _text(ids: NDArray, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(str(int(i)) for i in ids) + "\n(no tokenizer known: give --tokenizer-type and --vocab-file)"
    return tokenizer.decode([int(i) for i in ids])


def _draw_lengths(lengths: NDArray[np.int64], path: Path, title: str) -> None:
    from tools.reporting.style import COLORS, log_axes, saved_figure

    shown = np.maximum(lengths, 1)
    edges = np.geomspace(shown.min(), shown.max() + 1, 60)
    with saved_figure(path) as (_, axes):
        axes.hist(shown, edges, weights=np.full(len(lengths), 100 / len(lengths)), label="documents")
        axes.hist(
            shown, edges, weights=100 * shown / shown.sum(), histtype="step", color=COLORS[1], label="their tokens"
        )
        log_axes(axes, "x")
        axes.set(xlabel="tokens per document", ylabel="share, percent", title=title)
        axes.legend()


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.inspect_data",
        "Inspect token files: counts, documents as text, training samples, a histogram of lengths. Or decode all images.",
        EXAMPLES,
    )
    add = parser.add_argument
    add(
        "prefix",
        type=Path,
        help="the token files without extension; with --verify also a cache folder; with --images the images",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--document", type=from_zero, metavar="N", help="print document N (from 0)")
    shown.add_argument(
        "--sample", type=from_zero, metavar="N", help="print training sample N (from 0) and where it comes from"
    )
    shown.add_argument(
        "--verify",
        action="store_true",
        help="compare all files with their checksums; exit status 1 if one is damaged",
    )
    shown.add_argument(
        "--images",
        action="store_true",
        help="decode every image of a Parquet file, of a folder of Parquet files, or of a folder with one folder per class; "
        "exit status 1 if one does not decode",
    )
    shown.add_argument(
        "--trained-on",
        nargs="+",
        metavar="P",
        help="list the documents that are also in these training token files (prefixes P); exit status 1 if there are any",
    )
    add("--ngram-words", type=positive, metavar="N", help=f"words per n-gram of --trained-on ({WORDS})")
    add(
        "--overlap",
        type=above_zero_to_one,
        metavar="SHARE",
        help=f"share of a document's n-grams from which --trained-on names it ({SHARE})",
    )
    add(
        "--sequence-length",
        type=positive,
        metavar="T",
        help="length of the sample (2048); without --sample: how many documents each packing cuts at this length",
    )
    add("--num-samples", type=positive, metavar="N", help="samples of the run: train_steps x global batch size")
    add("--seed", type=int, default=1234, metavar="S", help="run.seed (1234)")
    add("--order", choices=ORDERS, default="neox", help="data.order (neox)")
    add("--packing", choices=PACKINGS, default="stream", help="data.packing (stream)")
    add(
        "--min-tokens",
        type=from_zero,
        default=0,
        metavar="N",
        help="only documents of N tokens or more (data.blend.min_tokens)",
    )
    add("--histogram", type=Path, metavar="PNG", help="write a histogram of document lengths")
    add("--most-common", type=from_zero, default=0, metavar="N", help="print the N most common tokens")
    add(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        metavar="TYPE",
        help=f"{', '.join(TOKENIZER_TYPES)}: for files without a .json file",
    )
    add("--vocab-file", metavar="FILE", help="the tokenizer's file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
