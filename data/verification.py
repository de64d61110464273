"""Compare token files and caches with their checksums, reading every byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cache import CONTENTS, damage
from .checksum import difference
from .corpus.document_sources import read_sources
from .index_checks import REMEDY
from .indexed import IndexedTokens, bin_path
from .manifest import manifest_tokenizer, read_manifest


@dataclass
class Findings:
    """Collect one sentence per file: `compared` (intact), `unknown` (no checksum to compare with) or `damaged`."""

    compared: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def compare(self, path: Path, record: dict[str, Any], remedy: str) -> None:
        """Compare all bytes of a file with its record."""
        if problem := difference(path, record, whole=True):
            self.damaged.append(f"{problem}. {remedy}")
        else:
            self.compared.append(f"{path}: {record['bytes']:,} bytes, intact")


def verify_token_files(prefix: Path) -> Findings:
    """Verify a pair of token files, their manifest and sources, the tokenizer, and the input files that still exist."""
    findings = Findings()
    try:
        manifest = read_manifest(prefix) or {}
    except ValueError as error:
        findings.damaged.append(str(error))
        manifest = {}
    for ending, record in manifest.get("checksums", {}).items():
        findings.compare(Path(f"{prefix}.{ending}"), record, REMEDY)
    if findings.damaged:
        return findings
    try:
        tokens = IndexedTokens(prefix)
        read_sources(prefix, len(tokens))
        _verify_tokenizer(prefix, manifest, findings)
    except ValueError as error:
        findings.damaged.append(str(error))
    if "checksums" not in manifest:
        findings.unknown.append(
            f"{bin_path(prefix)}: it has no checksum (written by another project or an earlier version); its sizes and"
            " index are valid"
        )
    for name, record in manifest.get("inputs", {}).items():
        if Path(name).is_file():
            findings.compare(Path(name), record, "Copy or download it again.")
        else:
            findings.unknown.append(f"{name}: this input file no longer exists")
    return findings


def verify_caches(folder: Path) -> Findings:
    """Verify every cache in a folder (`data.cache_directory`), or the folder itself if it is a cache.

    Raises ValueError if there is no cache.
    """
    caches = [path.parent for path in sorted([*folder.glob(CONTENTS), *folder.glob(f"*/{CONTENTS}")])]
    if not caches:
        raise ValueError(
            f"{folder} holds no cache: name a prefix of token files, or the folder of data.cache_directory"
        )
    findings = Findings()
    for cache in caches:
        problems = damage(cache, whole=True)
        findings.damaged += [f"{problem}. Remove {cache}; it is rebuilt at the next start." for problem in problems]
        if not problems:
            findings.compared.append(f"{cache}: intact")
    return findings


def _verify_tokenizer(prefix: Path, manifest: dict[str, Any], findings: Findings) -> None:
    try:
        tokenizer = manifest_tokenizer(prefix)
    except FileNotFoundError as error:
        findings.unknown.append(str(error))
        return
    if tokenizer is not None and tokenizer.hash != manifest["tokenizer"]["hash"]:
        findings.damaged.append(
            f"{tokenizer.path} is not the tokenizer of {prefix}: its hash is {tokenizer.hash}, not"
            f" {manifest['tokenizer']['hash']}. Copy it again."
        )
    elif tokenizer is not None and tokenizer.path is not None:
        findings.compared.append(f"{tokenizer.path}: the tokenizer of the token files")
