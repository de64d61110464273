"""Errors of the command line name the file and the position of a bad input."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data.datasets.causal import CausalDataset
from data.indexed import IndexedWriter
from data.manifest import read_manifest
from data.preprocessing import encode
from data.tokenizer import load_tokenizer
from tools.loading.token_data import prepared_data
from tools.preprocess_data import main

ROOT = Path(__file__).parents[2]
LINES = b"".join(json.dumps({"text": f"document {n * 7919 % 104729} " * 5}).encode() + b"\n" for n in range(500))


def run(path: Path, *more: str) -> int:
    return main(["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", f"{path.parent}/out", *more])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.zst", zstandard.compress(LINES)[:-700], "a.jsonl.zst is cut short: it ends at byte "),
        ("a.jsonl.gz", gzip.compress(LINES)[:-700], "a.jsonl.gz is cut short: it ends at byte "),
        ("a.jsonl.zst", b"", "a.jsonl.zst is cut short: it ends at byte 0"),
        ("a.jsonl.gz", b"", "a.jsonl.gz is cut short: it ends at byte 0"),
        ("a.jsonl", LINES + b'{"text": "\xff"}\n', "a.jsonl line 501: not valid UTF-8 at byte 10 of the line"),
        ("a.jsonl", LINES + b'{"text": "a\n', "a.jsonl line 501: not valid JSON at character "),
        (
            "a.jsonl",
            LINES + b'{"text": "a", "n": %s}\n' % (b"1" * 5000),
            "a.jsonl line 501: JSON beyond the limits of Python: ",
        ),
        ("a.jsonl", LINES + b'{"text": %s}\n' % (b"[" * 99999), "a.jsonl line 501: JSON beyond the limits of Python: "),
        ("a.jsonl", LINES + b'{"url": "a"}\n', "a.jsonl line 501: no key 'text'; the keys there are url"),
        ("a.jsonl", LINES.replace(b'"text"', b'"body"'), "a.jsonl line 1: no key 'text'; the keys there are body"),
    ],
)
def test_a_broken_file_is_named_and_nothing_is_written(tmp_path, capsys, inline, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path / name) == 2
    assert f"{tmp_path}/{message}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_repeated_keys_are_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert run(tmp_path / "a.jsonl", "--jsonl-keys", "text", "text") == 2
    assert "--jsonl-keys text text: each key is allowed once" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_document_of_more_tokens_than_the_format_holds(tmp_path, capsys, inline, monkeypatch):
    monkeypatch.setattr(encode, "LONGEST_SEQUENCE", 100)  # 2^31 - 1 tokens of text would not fit the machine
    (tmp_path / "a.jsonl").write_bytes(LINES + json.dumps({"text": "x" * 101}).encode())
    assert run(tmp_path / "a.jsonl") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/a.jsonl line 501: a document of 101 tokens; the format holds at most 100" in error


def token_file(tmp_path: Path, inline: None) -> str:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert run(tmp_path / "a.jsonl", "--append-eod") == 0
    return f"{tmp_path}/out_text_document"


def test_an_index_whose_sizes_do_not_match(tmp_path, inline):
    prefix = token_file(tmp_path, inline)
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(
        ValueError, match=r"out_text_document\.bin is 2 bytes too long: it has [\d,]+, the 500 sequences"
    ):
        CausalDataset(prefix, sequence_length=8, num_samples=2, seed=0)


def test_a_tokenizer_or_a_model_that_does_not_fit(tmp_path, inline, sentencepiece):
    prefix = token_file(tmp_path, inline)
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert manifest["tokenizer"]["hash"] == load_tokenizer("bytes").hash
    from megatron_lite.config.data_schema import DataConfig, TokenizerConfig

    settings = DataConfig(train=prefix, tokenizer=TokenizerConfig(type="bytes"))
    assert prepared_data(settings, 384).train == (prefix,)
    with pytest.raises(ValueError, match=r"model\.vocab_size = 256 is smaller than .* 257 entries .*vocab_size to 384"):
        prepared_data(settings, 256)
    masked = settings.model_copy(update={"objective": "masked"})
    with pytest.raises(ValueError, match=r"257 is smaller than the tokenizer's 257 entries and a mask token"):
        prepared_data(masked, 257)
    other = DataConfig(train=prefix, tokenizer=TokenizerConfig(type="sentencepiece", path=sentencepiece.path))
    with pytest.raises(
        ValueError, match=r"out_text_document was written with another tokenizer: bytes .*hash bytes-257"
    ):
        prepared_data(other, 1024)


def test_a_cache_that_another_file_of_the_same_name_made_is_not_used(tmp_path):
    settings = {"sequence_length": 5, "num_samples": 9, "seed": 1, "cache_directory": tmp_path / "cache"}

    def stream(value: int) -> set[int]:
        with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            writer.add_document(np.full(40 + value, value))
        dataset = CausalDataset(tmp_path / "x", **settings)
        return {int(t) for n in range(len(dataset)) for t in dataset[n]["labels"]}

    assert stream(1) == {1}
    assert stream(2) == {2}
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("limit", [1_000, 20_000])
def test_full_disk_is_named_and_keeps_finished_work(tmp_path, limit):
    """Limit the size of files instead of filling a disk: only the number of the error differs."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    words = [
        "--input",
        "a.jsonl",
        "--tokenizer-type",
        "bytes",
        "--output-prefix",
        "out",
        "--workers",
        "1",
        "--no-progress",
    ]
    code = (
        f"import resource, sys; sys.path.insert(0, {str(ROOT)!r}); from tools.preprocess_data import main\n"
        "if __name__ == '__main__':\n"
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY)); sys.exit(main({words!r}))\n"
    )
    (tmp_path / "run.py").write_text(code)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"error: out\.parts-\S+: File too large", done.stderr)
    assert "Finished work is saved: free disk space and run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out_*"))
    assert not list(tmp_path.rglob("*.aside")), "nothing half-written is left"
