"""Damaged files: named with place and remedy, caches built again, leftovers of dead processes removed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from data import checksum
from data.atomic_io import remove_leftovers, temporary_path
from data.cache import CONTENTS, built_folder, cached_arrays
from data.checksum import Checksum, DamagedDataError, difference, read_sealed, record_of, write_sealed
from data.corpus.discovery import source_files
from data.corpus.document_sources import read_sources
from data.datasets.causal import CausalDataset
from data.indexed import IndexedTokens, IndexedWriter, idx_path
from data.manifest import read_manifest
from data.preprocessing import pipeline
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import preprocess
from tests.data.inline_pool import Inline
from tools import inspect_data, preprocess_data

DEAD = f"{2**22 + 1}@{socket.gethostname()}"  # above the largest process id of Linux


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.fixture
def prefix(tmp_path: Path, inline: None) -> Path:
    records = [{"text": f"document {n} " * 20, "meta": {"pile_set_name": "ab"[n % 2]}} for n in range(40)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    preprocess(
        source_files(tmp_path / "in.jsonl"),
        tmp_path / "out",
        PreprocessingSettings("bytes", append_eod=True),
        progress=False,
    )
    return tmp_path / "out_text_document"


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**16 + 1, 5 * 2**16 + 7, 40 * 2**16])
def test_the_record_of_a_file_does_not_depend_on_the_pieces(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(0).bytes(size)
    (tmp_path / "x").write_bytes(content)
    record = record_of(tmp_path / "x")
    pieces = Checksum()
    for first in range(0, size, 30_001):
        pieces.update(content[first : first + 30_001])
    assert pieces.record() == record
    few = Checksum(max_blocks=4)
    few.update(content)
    record = few.record()
    assert len(record["codes"]) <= 8 * 4
    assert difference(tmp_path / "x", record) is None
    if size:
        flip(tmp_path / "x", size - 1)
        first = (size - 1) // record["block"] * record["block"]
        assert f"x is damaged between bytes {first:,} and {size:,}: " in str(difference(tmp_path / "x", record))


def test_a_sealed_file_of_json_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed(path, {"a": 1, "b": [0.1, None]})
    assert read_sealed(path, "mend", "a") == {"a": 1, "b": [0.1, None]}
    written = path.read_text()
    for damaged in (written.replace("0.1", "0.2"), written.replace(checksum.SEAL, "seal"), written[:-9], ""):
        path.write_text(damaged)
        with pytest.raises(DamagedDataError, match=r"x\.json .*mend"):
            read_sealed(path, "mend", "a")


@pytest.mark.parametrize("ending", ["bin", "idx", "json", "sources.npy"])
def test_flipped_bit_is_detected_at_the_start(prefix: Path, ending: str) -> None:
    path = Path(f"{prefix}.{ending}")
    for at in np.linspace(0, path.stat().st_size - 1, 12, dtype=int):
        whole = path.read_bytes()
        flip(path, int(at))
        with pytest.raises(ValueError, match=f"out_text_document.{ending}"):
            read_sources(prefix, len(IndexedTokens(prefix)))
        path.write_bytes(whole)
    assert len(read_sources(prefix, len(IndexedTokens(prefix)))[0]) == 2


def test_large_files_are_compared_by_verify(prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(checksum, "ALWAYS_CHECKED", 100)
    assert inspect_data.main([str(prefix), "--verify"]) == 0
    assert "in.jsonl: 11,199 bytes, intact" in (printed := capsys.readouterr().out)
    assert printed.count("OK ") == 4
    flip(Path(f"{prefix}.bin"), 5)
    IndexedTokens(prefix)
    assert inspect_data.main([str(prefix), "--verify"]) == 1
    assert "DAMAGED " in (printed := capsys.readouterr().out)
    assert "out_text_document.bin is damaged between bytes 0 and " in printed
    assert "python -m tools.preprocess_data ... --overwrite" in printed


def test_files_without_checksums_open(prefix: Path, capsys) -> None:
    Path(f"{prefix}.json").unlink()
    assert len(IndexedTokens(prefix)) == 40
    assert inspect_data.main([str(prefix), "--verify"]) == 0
    assert "it has no checksum" in capsys.readouterr().out


def test_input_changed_with_same_size_and_time_is_refused(
    prefix: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prefix.parent / "in.jsonl"
    state = path.stat()
    flip(path, 14)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert inspect_data.main([str(prefix), "--verify"]) == 1
    assert "in.jsonl is damaged between bytes 0 and " in capsys.readouterr().out
    words = ["--input", str(path), "--tokenizer-type", "bytes", "--append-eod", "--no-progress", "--overwrite"]
    assert preprocess_data.main([*words, "--output-prefix", str(prefix.parent / "out")]) == 2
    assert "in.jsonl has changed with the same size and time. Token files" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["flipped", "empty", "cut", "gone", "contents"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, capsys, how: str) -> None:
    def build() -> dict[str, np.ndarray]:
        return {"a": np.arange(1000)}

    cached_arrays(tmp_path, "x", {"n": 1}, build)
    (folder,) = tmp_path.iterdir()
    path = folder / (CONTENTS if how == "contents" else "a.npy")
    if how in ("flipped", "contents"):
        flip(path, path.stat().st_size // 2)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if how == "empty" else 900])
    assert inspect_data.main([str(tmp_path), "--verify"]) == 1
    assert cached_arrays(tmp_path, "x", {"n": 1}, build)["a"].tolist() == list(range(1000))
    assert f"the cache {folder} is rebuilt: {path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]
    assert inspect_data.main([str(tmp_path), "--verify"]) == 0


def test_a_large_damaged_order_of_samples_ends_with_a_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checksum, "ALWAYS_CHECKED", 100)
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for size in (30, 50, 70):
            writer.add_document(np.arange(size))
    for name, value in (
        ("sample_index", 2**40),
        ("sample_index", -1),
        ("shuffle_index", 2**30),
        ("document_index", -9),
    ):
        cache = tmp_path / f"{name}{value}"
        settings = {"sequence_length": 8, "num_samples": 10, "seed": 1, "cache_directory": cache}
        CausalDataset(tmp_path / "x", **settings)
        (path,) = cache.glob(f"*/{name}.npy")
        array = np.load(path)
        array[:] = value
        np.save(path, array)
        with pytest.raises(DamagedDataError, match=r"\.npy is damaged: it names a sample .* Remove .*--verify"):
            CausalDataset(tmp_path / "x", **settings)[0]


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".corpus-1.{DEAD}.aside").mkdir()
    (tmp_path / f".corpus-1.{DEAD}.aside" / "x").touch()
    (tmp_path / f".x.bin.{DEAD}.aside").touch()
    kept = [tmp_path / ".corpus-2.7@other-host.aside", temporary_path(tmp_path / "own"), tmp_path / ".x.aside"]
    for path in kept:
        path.touch()
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    (tmp_path / f".corpus-3.{DEAD}.aside").mkdir()
    built_folder(tmp_path, "y", "", lambda aside: (aside / "z").touch())
    assert not (tmp_path / f".corpus-3.{DEAD}.aside").exists()


def index_of(prefix: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(idx_path(prefix).read_bytes())
    change(content)
    idx_path(prefix).write_bytes(content)


def test_files_of_merge_datasets_and_of_megatron_without_documents(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for size in (3, 5):
            writer.add_document(np.arange(size))
    whole = idx_path(prefix).read_bytes()
    starts_at = 34 + 12 * 2

    def boundaries(*values: int) -> None:
        content = bytearray(whole[:starts_at]) + np.array(values, "<i8").tobytes()
        content[26:34] = np.array([len(values)], "<u8").tobytes()
        idx_path(prefix).write_bytes(content)

    boundaries(0)
    with pytest.warns(
        UserWarning, match=r"x\.idx marks no documents .* each of its 2 sequences is taken as a document"
    ):
        tokens = IndexedTokens(prefix)
    assert (tokens.num_documents, tokens.document_starts.tolist()) == (2, [0, 1, 2])
    with pytest.warns(UserWarning, match="marks no documents"):
        assert len(CausalDataset(prefix, sequence_length=3, num_samples=2, seed=0)) == 2
    boundaries()
    with pytest.raises(ValueError, match="has no document index"):
        IndexedTokens(prefix)
    boundaries(0, 1)
    with pytest.raises(ValueError, match="the remaining sequences belong to no document: its writer did not"):
        IndexedTokens(prefix)
    idx_path(prefix).write_bytes(whole + bytes(2))
    with pytest.raises(
        ValueError, match="multimodal corpus: after 2 sequences and 3 boundaries it holds a mode for each"
    ):
        IndexedTokens(prefix)


@pytest.mark.parametrize("manifest", ["{}", '{"tokenizer": {"type": "bytes"}}', "[1]", "{", '{"tokenizer": "\xff"}'])
def test_invalid_manifest_is_refused(prefix: Path, manifest: str, capsys) -> None:
    Path(f"{prefix}.json").write_bytes(manifest.encode("latin-1"))
    assert inspect_data.main([str(prefix)]) == 2
    assert "out_text_document.json " in capsys.readouterr().err
    assert read_manifest(prefix.with_name("none")) is None


@pytest.mark.parametrize("ending", ["text.bin", "text.idx", "text.sources.npy", "report", "digests"])
def test_a_damaged_part_of_a_killed_job_is_written_again(tmp_path, inline, monkeypatch, capsys, ending: str) -> None:
    for name in "abc":
        lines = [
            json.dumps({"text": f"document {n} " * 9 + name * (n % 2), "meta": {"pile_set_name": name}})
            for n in range(9)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = source_files([tmp_path / f"{name}.jsonl" for name in "abc"])
    recipe = PreprocessingSettings("bytes", deduplicate=True)
    preprocess(files, tmp_path / "whole", recipe, progress=False)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "join_shards", stopped)
        with pytest.raises(KeyboardInterrupt):
            preprocess(files, tmp_path / "cut", recipe, progress=False)
    (part,) = tmp_path.glob(f"cut.parts-*/000001*{ending}")
    flip(part, part.stat().st_size // 2)
    preprocess(files, tmp_path / "cut", recipe, progress=False)
    assert f"finished parts are written again: {part}" in capsys.readouterr().err
    for suffix in ("bin", "idx", "sources.npy", "json"):
        cut, whole = (tmp_path / f"{name}_text_document.{suffix}" for name in ("cut", "whole"))
        assert cut.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.parts-*"))


def test_killed_worker_gives_an_error_message(tmp_path, inline, monkeypatch, capsys) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')

    class Dead(Inline):
        def submit(self, function, block):
            outcome: Future[object] = Future()
            outcome.set_exception(BrokenProcessPool())
            return outcome

    monkeypatch.setattr(pipeline, "_pool", lambda recipe, workers: Dead(recipe))
    words = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-type", "bytes", "--no-progress"]
    assert preprocess_data.main([*words, "--output-prefix", str(tmp_path / "out")]) == 2
    assert "a worker process was killed near " in (printed := capsys.readouterr().err)
    assert "in.jsonl, block from 1 on: too little memory (use fewer --workers)" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_parts_of_dead_jobs_with_other_settings_are_removed_at_the_end(tmp_path, inline) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    for name, owner in (("dead", DEAD), ("alive", f"{os.getpid()}@{socket.gethostname()}"), ("elsewhere", "1@other")):
        (tmp_path / f"out.parts-{name}").mkdir()
        (tmp_path / f"out.parts-{name}" / pipeline.OWNER).write_text(owner)
    preprocess(source_files(tmp_path / "in.jsonl"), tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    assert {path.name for path in tmp_path.glob("out.parts-*")} == {"out.parts-alive", "out.parts-elsewhere"}
