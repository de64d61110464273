"""Refuse a run whose processes differ in configuration, code, packages or data.

A machine with an older checkout, another environment or an old copy of the data would train wrongly without an error. The
processes compare digests; the message names the differences with the ranks.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.parallel.collectives import gather
from megatron_lite.parallel.grid import Grid

Facts = Mapping[str, Mapping[str, str]]


class DisagreementError(ValueError):
    """The processes of the run differ; the message names the differences."""


def require_agreement(facts: Facts, grid: Grid) -> None:
    """Compare facts over all processes; every process calls this. Equal processes exchange only digests.

    Args:
        facts: subject ("configuration", "code", ...) -> name -> value.

    Raises:
        DisagreementError: on every process, naming the ranks and what differs.
    """
    if grid.world_size == 1:
        return
    digests = {subject: _digest(json.dumps(values, sort_keys=True).encode()) for subject, values in facts.items()}
    everyone = gather(digests, grid)
    differing = [subject for subject in facts if len({digest[subject] for digest in everyone}) > 1]
    if differing:
        hosts, values = zip(
            *gather((socket.gethostname(), {subject: facts[subject] for subject in differing}), grid), strict=True
        )
        raise DisagreementError(difference(values, hosts))


def difference(facts: Sequence[Facts], hosts: Sequence[str], limit: int = 8) -> str:
    """Return the differences between the facts of the ranks in words, at most `limit` names per subject."""
    lines = ["the processes of this run differ; nothing was started:"]
    for subject in facts[0]:
        names = sorted({name for values in facts for name in values[subject]})
        differing = [
            (name, per_rank)
            for name in names
            if len(set(per_rank := [values[subject].get(name, "absent") for values in facts])) > 1
        ]
        for name, per_rank in differing[:limit]:
            (usual, _), *_ = Counter(per_rank).most_common(1)
            groups: dict[str, list[int]] = {}
            for rank, value in enumerate(per_rank):
                groups.setdefault(value, []).append(rank)
            parts = [
                f"{rank_words(ranks, hosts)} {_shown(value)}"
                for value, ranks in sorted(groups.items(), key=lambda group: (group[0] != usual, group[1]))
            ]
            lines.append(f"  {subject}: {name}: {'; '.join(parts)}")
        if len(differing) > limit:
            lines.append(f"  {subject}: and {len(differing) - limit} more")
    lines.append("Start every process again with the same command, checkout, environment and data")
    return "\n".join(lines)


def configuration_facts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> value as JSON of a nested configuration."""
    facts: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            facts |= {f"{key}.{name}": text for name, text in configuration_facts(value).items()}
        else:
            facts[key] = json.dumps(value, sort_keys=True, default=str)
    return facts


def code_facts(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return relative path -> SHA-256 of every Python file under `root/name` (a file or a folder)."""
    facts = {}
    for name in names:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            facts[file.relative_to(root).as_posix()] = _digest(file.read_bytes())
    return facts


def file_facts(paths: Iterable[Path | None]) -> dict[str, str]:
    """Return path -> size and SHA-256 of the first and last MiB, which distinguishes versions of large files quickly."""
    facts = {}
    for path in paths:
        if path is None:
            continue
        if not path.is_file():
            facts[str(path)] = "no such file"
            continue
        size = path.stat().st_size
        with open(path, "rb") as file:
            ends = file.read(1 << 20)
            file.seek(max(0, size - (1 << 20)))
            ends += file.read()
        facts[str(path)] = f"{size:,} bytes, SHA-256 {_digest(ends)[:12]}"
    return facts


def rank_words(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return "rank 3" or "ranks 0-2, 5"; with the host of every rank of the run, "ranks 0-2 (node1, node2)"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    machines = f" ({', '.join(sorted({hosts[rank] for rank in ranks}))})" if hosts else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts) + machines


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _shown(value: str) -> str:
    if len(value) == 64 and all(letter in "0123456789abcdef" for letter in value):
        return f"SHA-256 {value[:12]}"
    return value if len(value) <= 100 else value[:97] + "..."
