"""Masked accuracy at lengths beyond the training length: a table, JSON and a plot.

The validation text of a run, masked once, is cut into rows of each length: the tokens to be found and what hides them are
the same at every length, only how much of the text around them is in view differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)

EPILOG = """
examples:
  python -m tools.masked_length runs/lion_s_base                      128 to 8192 tokens, to runs/lion_s_base/length.png
  python -m tools.masked_length runs/lion_s runs/bert -o length.png   several models in one picture

A model with learned positions is evaluated up to model.max_positions.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 2 for what cannot be evaluated."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.masked_length",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="runs, or step folders")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens (default: 128 ... 8192)")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="at most so many of the text (%(default)s)")
    parser.add_argument("--data", metavar="PREFIX", help="token file; default: the run's validation file")
    parser.add_argument("--device", default="auto", help="cuda or cpu (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, help="the plot; default: length.png in the first run's folder")
    options = parser.parse_args(arguments)
    lengths = sorted(set(options.lengths))
    try:
        results = {
            str(run): masked_accuracy(run, lengths, data=options.data, tokens=options.tokens, device=options.device)
            for run in options.runs
        }
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("tokens   " + "  ".join(f"{length:>7}" for length in lengths))
    for run, values in results.items():
        by_length = {row["length"]: row for row in values}
        cells = [f"{by_length[n]['accuracy']:7.2%}" if n in by_length else f"{'-':>7}" for n in lengths]
        print("accuracy " + "  ".join(cells) + f"   {run}, {int(values[0]['tokens']):,} tokens found or not")
    out = options.out or options.runs[0] / "length.png"
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, out)
    print(out)
    return 0


def masked_accuracy(
    run: Path, lengths: Sequence[int], *, data: str | None = None, tokens: int = 1 << 20, device: str = "auto"
) -> list[dict[str, float]]:
    """For every length that the model can read: accuracy, loss, the number of tokens asked for, the training length.

    Raises ValueError for a causal model, lengths that do not divide the longest, or no validation text.
    """
    import torch
    from tqdm import tqdm

    from data.masked import MaskedDataset
    from data.masking import masking_of
    from tools.load_model import load_model

    longest = max(lengths)
    for length in lengths:
        if longest % length:
            raise ValueError(f"--lengths {length}: does not divide the longest, {longest}")
    loaded = load_model(run, device=device)
    settings = loaded.config["data"]
    if settings["objective"] != "masked":
        raise ValueError(f"{run} is a causal model; this is for data.objective = masked")
    prefix = data or settings["validation"]
    if prefix is None:
        raise ValueError(f"{run} has no validation file: name a token file with --data")
    masking = masking_of(loaded.tokenizer, settings["masked"]["validation_rate"])
    rows = MaskedDataset(
        prefix, masking, loaded.tokenizer, sequence_length=longest, num_samples=None, seed=0, layout="packed"
    )
    rows_read = [rows[i] for i in range(min(len(rows), -(-tokens // longest)))]
    limit = loaded.model.config.max_positions or longest
    readable = [length for length in lengths if length <= limit]
    if not readable:
        raise ValueError(
            f"{run} reads {limit} tokens at most (model.max_positions); --lengths begins at {min(lengths)}"
        )
    results = []
    for length in tqdm(readable, desc=run.name, unit="length", leave=False, disable=not sys.stderr.isatty()):
        nll = weight = 0.0
        right = torch.zeros((), dtype=torch.float64, device=loaded.device)
        with torch.inference_mode():
            for row in rows_read:
                batch = {
                    key: row[key].view(-1, length).to(loaded.device) for key in ("tokens", "labels", "loss_weight")
                }
                hidden = batch["tokens"]
                for layer in (loaded.model.embedding, *loaded.model.blocks):
                    hidden = layer(hidden)
                asked = {"labels": batch["labels"], "loss_weight": batch["loss_weight"], "right": right}
                nll += loaded.model.head(hidden, **asked).item()
                weight += batch["loss_weight"].sum().item()
        trained = int(loaded.config["batch"]["sequence_length"])
        accuracy = right.item() / weight if weight else math.nan
        values = {"length": length, "accuracy": accuracy, "loss": nll / max(weight, 1.0), "tokens": weight}
        results.append({**values, "trained_at": trained})
    return results


def plot(results: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Accuracy against length, one line a run; the training length is dotted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tools.plot import COLORS, STYLE

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.4))
        for (name, rows), color in zip(results.items(), COLORS * len(results), strict=False):
            lengths = [row["length"] for row in rows]
            axes.plot(lengths, [100 * row["accuracy"] for row in rows], marker="o", color=color, label=Path(name).name)
            axes.axvline(rows[0]["trained_at"], color="#777777", ls=":", lw=1)
        axes.set_xscale("log", base=2)
        lengths = sorted({row["length"] for rows in results.values() for row in rows})
        axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
        axes.minorticks_off()
        axes.set(xlabel="tokens in view (dotted: length of training)", ylabel="masked tokens found, percent")
        best = max(row["accuracy"] for rows in results.values() for row in rows)
        axes.set_ylim(0, 120 * best or 1)
        axes.legend()
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
