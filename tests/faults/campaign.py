"""Inject every kind of fault many times: `python -m tests.faults.campaign [--counts small|large] [KIND ...]`.

Each kind is a module of this folder with `run(count, seed, folder)`, which returns counts. A kind may describe failed cases in
`failures.jsonl` of the folder. One table shows the counts, a JSON file holds counts and failures. The exit status is 1 if a
count misses its target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.faults.outcomes import FAILURES


@dataclass(frozen=True)
class Kind:
    """Describe how often a fault is injected, and which counts pass.

    Attributes:
        zero: counts that must be 0.
        all_cases: counts that must equal the first one, the number of cases.
    """

    small: int
    large: int
    zero: tuple[str, ...] = ()
    all_cases: tuple[str, ...] = ()

    def violated(self, counts: dict[str, int]) -> list[str]:
        """Return the counts that miss their target."""
        cases = next(iter(counts.values()))
        return [key for key in self.zero if counts[key]] + [key for key in self.all_cases if counts[key] != cases]


KINDS = {
    "kill_loop": Kind(2, 84, zero=("different", "orphans", "lost_more_than_an_interval")),
    "frozen_processes": Kind(1, 20, zero=("killed_by_a_pause", "not_named", "orphans")),
    "lost_machine": Kind(2, 10, zero=("slow_to_end", "other_result"), all_cases=("recovered",)),
    "power_cut": Kind(6, 200, zero=("by hand", "other result"), all_cases=("restarted",)),
    "fuzz_data": Kind(60, 20_000, zero=FAILURES),
    "fuzz_checkpoints": Kind(20, 2_000, zero=FAILURES),
    "bit_flips": Kind(4, 100, all_cases=("noticed",)),
}


def run_kind(name: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run one kind and return its counts, seconds, verdict ("holds" or "violated: ...") and failed cases."""
    begin = time.monotonic()
    counts = import_module(f"tests.faults.{name}").run(count, seed, folder)
    violated = KINDS[name].violated(counts)
    failures = folder / "failures.jsonl"
    return {
        "kind": name,
        "counts": counts,
        "seconds": round(time.monotonic() - begin),
        "verdict": f"violated: {', '.join(violated)}" if violated else "holds",
        "failures": [json.loads(line) for line in failures.read_text().splitlines()] if failures.exists() else [],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per kind."""
    rows = [["kind", "counts", "seconds", "verdict"]]
    for result in results:
        counts = ", ".join(f"{key} {value}" for key, value in result["counts"].items())
        rows.append([result["kind"], counts, str(result["seconds"]), result["verdict"]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 when every target holds, else 1."""
    parser = argparse.ArgumentParser("python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; none: all")
    parser.add_argument("--counts", choices=("small", "large"), default="small", help="number of cases per kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments and places")
    parser.add_argument("--out", type=Path, default=Path("campaign.json"), help="JSON file of the results")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.kinds if name not in KINDS]
    if unknown:
        parser.error(f"unknown kind {unknown[0]}; allowed are {', '.join(KINDS)}")
    results = []
    names = options.kinds or list(KINDS)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder, tqdm(names, disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            count = getattr(KINDS[name], options.counts)
            results.append(run_kind(name, count, options.seed, Path(folder, name)))
            options.out.write_text(json.dumps({"seed": options.seed, "results": results}, indent=1) + "\n")
    print(table(results))
    return int(any(result["verdict"] != "holds" for result in results))


if __name__ == "__main__":
    sys.exit(main())
