"""Models at lengths below and beyond that of training: a table, JSON and a plot.

Causal models: the loss of the validation text in pieces of 0.5 to 32 times the trained length, and by position. Masked
models: the tokens found in rows of 128 to 8192 tokens, hidden once. The text and what is asked of it are the same at
every length; only how much of the text around it is in view differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """The command line. Returns 2 for what cannot be evaluated."""
    parser = command_line("python -m tools.length", __doc__, EPILOG)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="runs, or step folders, of one kind")
    parser.add_argument("--lengths", type=positive, nargs="+", help="tokens; default: see above")
    parser.add_argument("--tokens", type=positive, default=1 << 20, help="at most so many of the text (%(default)s)")
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
    """Results by run, and whether the models are masked ones. Raises ValueError for runs of both kinds, and as
    `load_model` and `measure_run`; what is seen without weights before the first run is measured."""
    from data.indexed import IndexedTokens
    from data.manifest import check_tokenizer
    from tools.loading.model import load_located, locate_checkpoint

    results: dict[str, Any] = {}
    kinds: dict[str, Path] = {}
    located = {run: locate_checkpoint(run, device=options.device, dtype=options.dtype) for run in runs}
    for run, checkpoint in located.items():
        kinds.setdefault("masked" if checkpoint.model.bidirectional_mixers() else "causal", run)
        if len(kinds) > 1:
            words = " and ".join(f"{path} is a {kind} model" for kind, path in kinds.items())
            raise ValueError(f"{words}: one picture holds one kind")
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
    loaded: LoadedModel, asked: Sequence[int] | None = None, *, data: str | None = None, tokens: int = 1 << 20
) -> Any:
    """A masked model: a list of dicts, one a length. A causal one: {"by_length": ..., "by_position": ...}.

    Raises ValueError where lengths do not divide the longest, the model or the text reads none of them, or there is
    no text.
    """
    from data.indexed import IndexedTokens
    from tools.evaluation.perplexity import validation_text
    from tools.length.causal import loss_over_length, pieces_read
    from tools.length.masked import masked_accuracy

    masked = bool(loaded.model.config.bidirectional_mixers())
    prefix = data or str(validation_text(loaded).prefix)
    size, trained = IndexedTokens(prefix).num_tokens, int(loaded.config["batch"]["sequence_length"])
    lengths = _lengths(loaded.run, loaded.model.config, loaded.config, asked)
    least = lengths[0] if masked else trained
    lengths = lengths if asked else [length for length in lengths if length <= size]
    if not lengths or max(lengths) > size or (not masked and trained not in lengths):
        raise ValueError(f"{prefix} has {size:,} tokens, too few for pieces of {max([*lengths, least]):,}")
    if masked:
        longest, results = max(lengths), []
        with _bar(loaded, len(lengths) * pieces_read(size, longest, tokens)) as progress:
            for length in lengths:
                row = masked_accuracy(loaded, prefix, length, longest=longest, tokens=tokens, progress=progress)
                results.append({**row, "trained_at": trained})
        return results
    with _bar(loaded, len(lengths) * pieces_read(size, max(lengths), tokens)) as progress:
        found = loss_over_length(loaded, prefix, lengths, tokens=tokens, progress=progress)
    return {"by_length": found.by_length(), "by_position": found.by_position()}


def _lengths(run: Path, model: ModelConfig, config: Mapping[str, Any], asked: Sequence[int] | None) -> list[int]:
    """Those that are asked, or else the default ones, as far as the model reads; a causal model's trained one too."""
    from tools.length.causal import MULTIPLES

    trained = int(config["batch"]["sequence_length"])
    if model.bidirectional_mixers():
        lengths = sorted({*(asked or MASKED_LENGTHS)})
    else:
        whole = [int(trained * multiple) for multiple in MULTIPLES if trained * multiple % 1 == 0]
        lengths = sorted({*(asked or whole), trained})
    limit = model.max_positions
    kept = [length for length in lengths if limit is None or length <= limit]
    if not kept:
        raise ValueError(f"{run} reads {limit} tokens at most (model.max_positions); --lengths begins at {lengths[0]}")
    for length in kept:
        if max(kept) % length:
            raise ValueError(f"--lengths {length}: does not divide the longest, {max(kept)}")
    return kept


@contextmanager
def _bar(loaded: LoadedModel, total: int) -> Iterator[Callable[[], Any]]:
    """A progress bar over readings of the text, on a terminal; yields what moves it."""
    from tqdm import tqdm

    with tqdm(
        total=total, desc=loaded.run.name, unit="piece", leave=False, disable=not sys.stderr.isatty()
    ) as progress:
        yield progress.update


if __name__ == "__main__":
    sys.exit(main())
