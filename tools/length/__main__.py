"""Evaluate models at lengths below and above the trained length: a table, JSON and a plot.

Causal models: loss of the validation text in pieces of 0.5 to 32 times the trained length, and by position. Masked
models: accuracy on masked tokens in rows of 128 to 8192 tokens. The text and the predicted tokens are the same at each
length. Only the visible context differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.atomic_io import write_json
from tools.cli.arguments import check_picture, command, command_line, positive

if TYPE_CHECKING:
    from models.config import ModelConfig
    from tools.loading.model import LoadedModel

MASKED_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)

EPILOG = """
examples:
  python -m tools.length runs/default                            0.5 to 32 times the trained length
  python -m tools.length runs/metala runs/softmax -o length.png  several models in one picture
  python -m tools.length runs/lion_s_base runs/bert_base         masked models: 128 to 8192 tokens
  python -m tools.length runs/default --data corpora/books_text_document --tokens 4000000

A model with learned positions is evaluated up to model.max_positions.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status, 2 for invalid input."""
    parser = command_line("python -m tools.length", __doc__, EPILOG)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="run or step folders, all causal or all masked"
    )
    parser.add_argument("--lengths", type=positive, nargs="+", help="lengths in tokens; default: see above")
    parser.add_argument("--tokens", type=positive, default=1 << 20, help="most tokens of the text to use (%(default)s)")
    parser.add_argument("--data", metavar="PREFIX", help="token file; default: the run's validation text")
    parser.add_argument("--device", default="auto", help="cuda or cpu (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16 ... (default: bf16 on a GPU)")
    parser.add_argument("-o", "--out", type=Path, help="the plot; default: length.png in the first run's folder")
    options = parser.parse_args(arguments)
    if options.out:
        check_picture(options.out, "--out")
    results, masked = measure(options.runs, options)
    from tools.length.causal import loss_table
    from tools.length.masked import accuracy_table
    from tools.length.plot import plot_accuracy, plot_loss
    from tools.loading.model import run_of

    lengths = sorted({row["length"] for rows in results.values() for row in (rows if masked else rows["by_length"])})
    print(accuracy_table(results, lengths) if masked else loss_table(results))
    out = options.out or run_of(options.runs[0]) / "length.png"
    write_json(out.with_suffix(".json"), results)
    (plot_accuracy if masked else plot_loss)(results, out)
    print(out)
    return 0


def measure(runs: Sequence[Path], options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the results by run, and whether the models are masked models.

    Raises ValueError for causal and masked runs together, and as `load_model` and `measure_run`. Errors that need no weights
    are raised before the first run is measured.
    """
    from data.indexed import IndexedTokens
    from data.manifest import check_tokenizer
    from tools.loading.model import load_located, locate_checkpoint

    results: dict[str, Any] = {}
    kinds: dict[str, Path] = {}
    located = {run: locate_checkpoint(run, device=options.device, dtype=options.dtype) for run in runs}
    for run, checkpoint in located.items():
        checkpoint.refuse_images()
        kinds.setdefault("masked" if checkpoint.model.bidirectional_mixers() else "causal", run)
        if len(kinds) > 1:
            models = " and ".join(f"{path} is a {kind} model" for kind, path in kinds.items())
            raise ValueError(f"{models}: give only one kind of model per command")
        _lengths(run, checkpoint.model, checkpoint.config, options.lengths)
        if options.data:
            IndexedTokens(options.data)
            check_tokenizer(options.data, checkpoint.read_tokenizer())
    for run, checkpoint in located.items():
        results[str(run)] = measure_run(
            load_located(checkpoint), options.lengths, data=options.data, tokens=options.tokens
        )
    return results, "masked" in kinds


def measure_run(
    loaded: LoadedModel, requested: Sequence[int] | None = None, *, data: str | None = None, tokens: int = 1 << 20
) -> Any:
    """Return one dict per length for a masked model, {"by_length": ..., "by_position": ...} for a causal model.

    Raises ValueError if a length does not divide the longest, if all lengths are too long for the model or the text, or if
    there is no text.
    """
    from data.indexed import IndexedTokens
    from data.progress import ProgressBar
    from tools.evaluation.perplexity import validation_text
    from tools.length.causal import loss_over_length, pieces_read
    from tools.length.masked import masked_accuracy

    masked = bool(loaded.model.config.bidirectional_mixers())
    prefix = data or str(validation_text(loaded).prefix)
    in_file, trained = IndexedTokens(prefix).num_tokens, int(loaded.config["batch"]["sequence_length"])
    size = min(in_file, tokens)
    lengths = _lengths(loaded.run, loaded.model.config, loaded.config, requested)
    least = lengths[0] if masked else trained
    lengths = lengths if requested else [length for length in lengths if length <= size]
    if not lengths or max(lengths) > size or (not masked and trained not in lengths):
        raise ValueError(
            f"{prefix} has {in_file:,} tokens, and --tokens is {tokens:,}: too few for pieces of "
            f"{max([*lengths, least]):,}; give shorter --lengths, more --tokens or another --data"
        )
    longest = max(lengths)
    total = len(lengths) * pieces_read(in_file, longest, tokens)
    with ProgressBar(total=total, desc=loaded.run.name, unit="piece", leave=False) as bar:
        if masked:
            options = {"longest": longest, "tokens": tokens, "progress": bar.update}
            rows = [masked_accuracy(loaded, prefix, length, **options) for length in lengths]
            return [{**row, "trained_at": trained} for row in rows]
        losses = loss_over_length(loaded, prefix, lengths, tokens=tokens, progress=bar.update)
    return {"by_length": losses.by_length(), "by_position": losses.by_position()}


def _lengths(run: Path, model: ModelConfig, config: Mapping[str, Any], requested: Sequence[int] | None) -> list[int]:
    """Return the requested or default lengths that the model can read; for a causal model also the trained length."""
    from tools.length.causal import MULTIPLES

    trained = int(config["batch"]["sequence_length"])
    if model.bidirectional_mixers():
        lengths = sorted({*(requested or MASKED_LENGTHS)})
    else:
        whole = [int(trained * multiple) for multiple in MULTIPLES if trained * multiple % 1 == 0]
        lengths = sorted({*(requested or whole), trained})
    limit = model.max_positions
    readable = [length for length in lengths if limit is None or length <= limit]
    if not readable:
        raise ValueError(
            f"{run} reads at most {limit} tokens (model.max_positions), but the shortest of --lengths is "
            f"{lengths[0]}; give a shorter one"
        )
    for length in readable:
        if max(readable) % length:
            subject = (
                f"--lengths {length}"
                if length in (requested or [])
                else f"the trained length {length} is also measured"
            )
            longest = max(readable)
            added = "" if longest in (requested or [longest]) else " (the trained length is also measured)"
            raise ValueError(f"{subject}: it must divide the longest length, {longest}{added}")
    return readable


if __name__ == "__main__":
    sys.exit(main())
