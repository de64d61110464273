"""Evaluation of a checkpoint: `python eval.py runs/default`. Results go to `results.json` beside the run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from tools.load_model import LoadedModel
    from tools.perplexity import TokenText

RESULTS_FILE = "results.json"
Metrics = Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    from tools.load_model import CheckpointError, load_model

    try:
        loaded = load_model(options.checkpoint, device=options.device, dtype=options.dtype)
        parameters = sum(p.numel() for p in loaded.model.parameters())
        print(f"{loaded.checkpoint}: {parameters / 1e6:,.2f} M parameters, {_dtype(loaded)} on {loaded.device}\n")
        results = evaluate_texts(loaded, options)
    except (CheckpointError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(["text", "documents", "tokens", "bytes", "loss", "perplexity", "bits per byte"], _rows(results)))
    out = options.out or loaded.run / RESULTS_FILE
    write_results(out, loaded, {"perplexity": results})
    print(f"\n{out}")
    return 0


def evaluate_texts(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Metrics]:
    """Perplexity of every text of `--data`, or of the run's validation set. Raises FileNotFoundError, ValueError."""
    from tools.perplexity import perplexity, validation_text

    with tempfile.TemporaryDirectory() as folder:
        texts = [_text(loaded, name, Path(folder), options.text_key) for name in options.data]
        return {
            text.name: perplexity(
                loaded,
                text,
                sequence_length=options.sequence_length,
                batch_size=options.batch_size,
                progress=sys.stderr.isatty(),
            )
            for text in texts or [validation_text(loaded)]
        }


def write_results(out: Path, loaded: LoadedModel, suites: Mapping[str, Mapping[str, Metrics]]) -> None:
    """Adds to a results file {suite: {task: {metric: value}}}; what it said of another checkpoint is dropped.

    Written aside and renamed.
    """
    from megatron_lite.checkpoint import versions

    checkpoint = str(loaded.checkpoint.resolve())
    results: dict[str, dict[str, Any]] = {}
    if out.is_file():
        earlier = json.loads(out.read_text(encoding="utf-8"))
        if earlier.get("checkpoint") == checkpoint:
            results = earlier["results"]
    for suite, tasks in suites.items():
        results[suite] = {**results.get(suite, {}), **tasks}
    content = {
        "checkpoint": checkpoint,
        "step": loaded.step,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "dtype": _dtype(loaded),
        "device": str(loaded.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.aside")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, out)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a rule; the first is text, the others are numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _dtype(loaded: LoadedModel) -> str:
    return str(next(loaded.model.parameters()).dtype).removeprefix("torch.")


def _rows(results: Mapping[str, Metrics]) -> list[list[str]]:
    return [
        [
            name,
            *(f"{metrics[key]:,.0f}" for key in ("documents", "tokens", "bytes")),
            f"{metrics['loss']:.4f}",
            f"{metrics['perplexity']:,.3f}",
            f"{metrics['bits_per_byte']:.4f}",
        ]
        for name, metrics in results.items()
    ]


def _text(loaded: LoadedModel, name: str, folder: Path, text_key: str) -> TokenText:
    from tools.perplexity import raw_text, token_file_text

    if Path(f"{name}.idx").exists() or Path(f"{name}.bin").exists():
        return token_file_text(Path(name), loaded.tokenizer, name=name)
    return raw_text(name, loaded.tokenizer, folder, text_key=text_key)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python eval.py",
        description="Evaluate a checkpoint: perplexity and bits per byte of its validation set, or of any text.",
        epilog=(
            "examples:\n"
            "  python eval.py runs/default                              the run's validation set\n"
            "  python eval.py runs/default/checkpoints/step_00000100    an earlier checkpoint\n"
            "  python eval.py runs/default --data README.md 'docs/*.md' any text files, each argument a row\n"
            "  python eval.py runs/default --data pile/test.jsonl.zst --text-key text\n"
            "  python eval.py runs/default --data pile/test_text_document  token files, without extension\n"
            "\n"
            "Bits per byte = nats / ln 2 / bytes of UTF-8: it compares models with different tokenizers, and with\n"
            "compressors (gzip -9 reaches about 2 on source code). Every token counts once, ends of documents too.\n"
            "The scores are added to results.json in the run's folder; `python -m tools.plot RUN --html` shows them."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="folder of a run, or one of its checkpoints/step_*")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="raw text (.txt, .md, .py ..., .jsonl, .gz, .zst; files, folders, globs) or prefixes of token files;"
        " default: the run's validation set",
    )
    parser.add_argument("--text-key", default="text", help="key of the text in JSON lines (default text)")
    parser.add_argument("--sequence-length", type=_positive, help="tokens of a piece (default: as in training)")
    parser.add_argument("--batch-size", type=_positive, default=8, help="pieces side by side (default 8)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU where there is one)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16, fp16, fp64 (default: bf16 on a GPU, else fp32)")
    parser.add_argument("--out", type=Path, help="file of the results (default: results.json in the run's folder)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: 1 or more is allowed")
    return value


if __name__ == "__main__":
    sys.exit(main())
