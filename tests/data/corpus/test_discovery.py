"""The files that a corpus names, the text read from them, and errors that name file and position."""

import datetime
import gzip
import json
import struct
from pathlib import Path

import pytest
import zstandard

from data.corpus import readers
from data.corpus.discovery import SourceFile, source_files, stdlib_files
from data.corpus.readers import Document, parse_block, read_blocks, read_documents


def lines(*texts: str, key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text, "meta": {"pile_set_name": "Github"}}).encode() + b"\n" for text in texts)


def test_path_that_holds_no_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_bytes(lines("a"))
    for corpus in ("", ["x.jsonl", ""]):
        with pytest.raises(ValueError, match=r"the corpus names .*: set 'stdlib', a path, a glob or a list of them"):
            source_files(corpus)
    with pytest.raises(
        ValueError, match="the data path /dev/null is neither a file nor a folder: write its text to a file"
    ):
        source_files("/dev/null")


def read(path: Path | str, key: str = "text") -> list[Document]:
    return list(read_documents(source_files(path), key))


PACKERS = {"": lambda b: b, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_lines(tmp_path, suffix, packed):
    path = tmp_path / f"x{suffix}{packed}"
    path.write_bytes(PACKERS[packed](lines("one", "zwei\nZeilen", "三") + b"\n" + lines("last").rstrip(b"\n")))
    documents = read(path)
    assert [d.text for d in documents] == ["one", "zwei\nZeilen", "三", "last"]
    assert [d.position for d in documents] == [1, 2, 3, 5]
    assert {d.source for d in documents} == {"Github"}


@pytest.mark.parametrize("packed", PACKERS)
def test_a_text_file_is_one_document(tmp_path, packed):
    path = tmp_path / f"book.txt{packed}"
    path.write_bytes(PACKERS[packed]("\ufefffirst\r\nzweite Zeile ä\n".encode()))
    assert [(d.text, d.position) for d in read(path)] == [("first\r\nzweite Zeile ä\n", 0)]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["a", "b", "c", "", "e"], "id": [1, 2, 3, 4, 5]})
    parquet.write_table(table, path, row_group_size=2)
    assert [(d.text, d.position) for d in read(path)] == [("a", 1), ("b", 2), ("c", 3), ("e", 5)]
    with pytest.raises(ValueError, match=r"x\.parquet: no key 'content'; the keys there are text, id"):
        read(path, "content")
    for value, name in ((b"a", "bytes"), (datetime.date(2020, 1, 1), "a date")):
        parquet.write_table(pyarrow.table({"text": [value]}), path)
        with pytest.raises(ValueError, match=rf"x\.parquet row 1: 'text' holds {name}, not a text"):
            read(path)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match="row 2: 'text' holds null"):
        read(path)
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="is not a complete parquet file"):
        read(path)
    path.write_bytes(whole[:4] + bytes([0x5A]) * 30 + whole[34:])
    with pytest.raises(ValueError, match=r"x\.parquet is damaged in row group 1: "):
        read(path)
    path.write_bytes(whole.replace(b"text", b"t\xffxt"))
    with pytest.raises(ValueError, match=r"x\.parquet is not a complete parquet file: 'utf-8' codec can't decode"):
        read(path)


def test_several_members_are_one_stream(tmp_path):
    raw = [lines("a"), lines("b"), lines("c")]
    (tmp_path / "x.jsonl.gz").write_bytes(b"".join(map(gzip.compress, raw)) + b"\0" * 100)
    (tmp_path / "x.jsonl.zst").write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, raw)))
    for path in tmp_path.iterdir():
        assert [d.text for d in read(path)] == ["a", "b", "c"]


def test_padding_with_zeros_may_be_longer_than_a_read(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(lines("a")) + bytes(600_000))
    assert [d.text for d in read(path)] == ["a"]
    path.write_bytes(bytes(600_000))
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz is damaged: no gzip data from byte 0 on"):
        read(path)


@pytest.mark.parametrize("block_bytes", [8, 64, 1 << 20])
def test_blocks_of_any_size_end_at_line_ends(tmp_path, monkeypatch, block_bytes):
    texts = ["x" * n for n in (1, 300, 2, 50, 70, 1, 1)]
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(*texts))
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    blocks = list(read_blocks(source_files(path)))
    documents = [d for block in blocks for d in parse_block(block).documents]
    assert [(d.text, d.position) for d in documents] == list(zip(texts, range(1, 8), strict=True))
    assert sum(block.file_bytes for block in blocks) == path.stat().st_size
    assert (len(blocks) > 1) == (block_bytes < 1000)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("stays", [0.5, 0.99])
def test_a_truncated_file_is_named_with_its_position(tmp_path, packed, stays):
    whole = PACKERS[packed](b"".join(lines(f"{n * 7919 % 104729}" * 9) for n in range(300)))
    path = tmp_path / f"x.jsonl{packed}"
    path.write_bytes(whole[: int(stays * len(whole))])
    with pytest.raises(ValueError, match=rf"x\.jsonl{packed} is cut short: it ends at byte {path.stat().st_size:,}"):
        read(path)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_file_that_is_not_compressed_as_its_name_says(tmp_path, packed):
    path = tmp_path / f"x.jsonl{packed}"
    path.write_bytes(lines("a"))
    with pytest.raises(ValueError, match=rf"x\.jsonl{packed} is damaged: no \w+ data from byte 0 on"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"x\.jsonl line 2: not valid JSON at character 12"),
        (b'{"text": "\xff"}', r"x\.jsonl line 2: not valid UTF-8 at byte 10"),
        (b'["a"]', r"x\.jsonl line 2: holds a list, not an object"),
        (b'{"text": null}', r"x\.jsonl line 2: 'text' holds null, not a text"),
        (b'{"text": 3}', r"x\.jsonl line 2: 'text' holds a number"),
        (b'{"url": "u"}', r"x\.jsonl line 2: no key 'text'; the keys there are url"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines("a") + line + b"\n" + lines("b"))
    with pytest.raises(ValueError, match=message):
        read(path)
    (block,) = read_blocks(source_files(path))
    parsed = parse_block(block)
    assert ([d.text for d in parsed.documents], len(parsed.broken)) == (["a", "b"], 1)


def test_a_wrong_key_lists_the_keys_found(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines("a", "b", key="content"))
    with pytest.raises(
        ValueError, match=r"x\.jsonl line 1: no key 'text'; the keys there are content, meta.*data\.text_key"
    ):
        read(path)
    assert [d.text for d in read(path, "content")] == ["a", "b"]


def test_a_json_array_is_explained(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('[\n {"text": "a"},\n {"text": "b"}\n]')
    with pytest.raises(ValueError, match=r"x\.json line 1: .*one object per line"):
        read(path)


def test_empty_documents_are_counted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines("", " \n\t", "a"))
    (block,) = read_blocks(source_files(path))
    parsed = parse_block(block)
    assert len(parsed.documents) == 1
    assert parsed.skipped == {"empty": 2}


def test_lone_surrogates_become_replacement_characters(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud83d b \\ud83d\\ude00"}\n')
    assert [d.text for d in read(path)] == ["a\ufffd b \U0001f600"]
    path.write_text('{"text": "a", "meta": {"pile_set_name": "s\\ud83d"}}\n')
    assert [d.source for d in read(path)] == ["s\ufffd"]


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes("one\ntwo\nzwölf".encode("latin-1"))
    with pytest.raises(ValueError, match=r"x\.txt: not valid UTF-8 at byte 10 \(line 3\)"):
        read(path)


def test_folders_globs_and_lists(tmp_path):
    for name in ("b.jsonl", "a/c.json.gz", "a/d.txt", "readme.md", ".hidden/e.txt", "f.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(lines(name)) if name.endswith(".gz") else lines(name))

    def names(corpus: str | list[str]) -> list[str]:
        return [file.path.relative_to(tmp_path).as_posix() for file in source_files(corpus)]

    assert names(str(tmp_path)) == ["a/c.json.gz", "a/d.txt", "b.jsonl"]
    assert names(f"{tmp_path}/*.md") == ["readme.md"]
    assert names(f"{tmp_path}/**/*.txt") == ["a/d.txt"]
    assert names([f"{tmp_path}/b.jsonl", str(tmp_path), f"{tmp_path}/*.jsonl"]) == ["b.jsonl", "a/c.json.gz", "a/d.txt"]
    assert [file.format for file in source_files(str(tmp_path))] == ["json lines", "text", "json lines"]


def test_paths_that_are_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=rf"data path .*pile/train does not exist \(nearest existing folder: {tmp_path}\)"
    ):
        source_files(f"{tmp_path}/pile/train")
    with pytest.raises(FileNotFoundError, match=r"no file matches the glob .*\*\.jsonl"):
        source_files(f"{tmp_path}/*.jsonl")
    for corpus in ([], ""):
        with pytest.raises(ValueError, match="names no files"):
            source_files(corpus)
    (tmp_path / "a.md").write_text("a")
    with pytest.raises(ValueError, match=r"holds no \.jsonl, \.json, \.parquet, \.txt file .*it holds 1 \.md\."):
        source_files(tmp_path)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match="splits is a saved data set without a split: save it again"):
        source_files(tmp_path / "splits")


def test_the_standard_library():
    package = stdlib_files("json")
    assert [file.key for file in package] == [
        f"json/{name}.py" for name in ("__init__", "decoder", "encoder", "scanner", "tool")
    ]
    whole = source_files("stdlib")
    keys = [file.key for file in whole]
    assert keys == sorted(keys)
    assert set(package) <= set(whole)
    assert not [key for key in keys if "site-packages" in key or "__pycache__" in key]
    assert source_files("stdlib/json") == package
    with pytest.raises(ValueError, match=r"there are no \.py files in"):
        stdlib_files("no_such_package")


def test_python_files_are_decoded_as_they_declare(tmp_path):
    latin = tmp_path / "latin.py"
    latin.write_bytes("# coding: latin-1\nname = 'é'\r\n".encode("latin-1"))
    wrong = tmp_path / "wrong.py"
    wrong.write_bytes(b"# coding: no-such-codec\n")
    bad = tmp_path / "bad.py"
    bad.write_bytes(b"x = '\xff'\n")
    blocks = read_blocks([SourceFile(path, "python", path.name) for path in (latin, wrong, bad)])
    parsed = [parse_block(block) for block in blocks]
    assert [d.text for p in parsed for d in p.documents] == ["# coding: latin-1\nname = 'é'\n"]
    assert [p.skipped["undecodable"] for p in parsed] == [0, 1, 1]


def test_a_saved_data_set(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(readers, "BLOCK_ROWS", 2)
    rows = [{"text": text, "meta": {"pile_set_name": "Github"}, "n": 1} for text in ("a", "", "b", "c", "d")]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    documents = read(tmp_path / "saved")
    assert [(d.text, d.position, d.source) for d in documents] == [
        (t, p, "Github") for t, p in (("a", 1), ("b", 3), ("c", 4), ("d", 5))
    ]
    (file,) = source_files(tmp_path / "saved")
    assert sum(block.file_bytes for block in read_blocks([file])) <= file.bytes > 0
    with pytest.raises(ValueError, match="saved: no key 'content'; the keys there are text, meta, n"):
        read(tmp_path / "saved", "content")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=r"is a saved data set with the splits train: name one, as .*splits/train"):
        read(tmp_path / "splits")
    assert len(read(tmp_path / "splits/train")) == 4
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    offsets = struct.pack("<6i", 0, 1, 1, 2, 3, 4)  # of the texts; what they lead to is outside of the memory
    content = arrow.read_bytes()
    assert offsets in content
    arrow.write_bytes(content.replace(offsets, struct.pack("<6i", *range(0, 6 << 28, 1 << 28))))
    readers.open_saved.cache_clear()
    with pytest.raises(ValueError, match=r"saved is damaged in rows 1 to 2: "):
        read(tmp_path / "saved")
    arrow.write_bytes(b"")
    readers.open_saved.cache_clear()
    with pytest.raises(ValueError, match="saved is not a complete saved data set"):
        read(tmp_path / "saved")


def test_hub_that_cannot_be_reached_is_refused_at_once(monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants

    def unreachable(*_, **__):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", unreachable)
    (file,) = source_files("hf:some/set:train")
    with pytest.raises(ValueError, match=r"^hf:some/set:train: the hub \S+ cannot be reached \(Name or .*save_to_disk"):
        file.identity()


def test_a_data_set_by_name_is_streamed(tmp_path, monkeypatch):
    """Name a folder as a data set, so that this needs no network."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines("a", "", "b", "three"))
    (tmp_path / "set" / "test.jsonl").write_bytes(lines("t"))
    documents = read(f"hf:{tmp_path}/set")
    assert [(d.text, d.position, d.source) for d in documents] == [
        (text, row, "Github") for text, row in (("a", 1), ("b", 3), ("three", 4))
    ]
    assert [d.text for d in read(f"hf:{tmp_path}/set:test")] == ["t"]
    assert [d.text for d in read(f"hf:{tmp_path}/set:default:test")] == ["t"]
    with pytest.raises(ValueError, match="row 1: no key 'content'; the keys there are text, meta"):
        read(f"hf:{tmp_path}/set", "content")
    (file,) = source_files(f"hf:{tmp_path}/set")
    before = file.identity()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines("other"))
    assert file.identity() != before, "what is cached for it is not used when it changes"
    with pytest.raises(ValueError, match="the library datasets cannot read it"):
        read(f"hf:{tmp_path}/set:validation")

    def lost(*_: object, **__: object):
        yield {"text": "a"}
        raise RuntimeError("the network is gone")

    monkeypatch.setattr("datasets.load_dataset", lost)
    with pytest.raises(ValueError, match="set: the library datasets cannot read it after 1 rows: the network is gone"):
        read(f"hf:{tmp_path}/set")
    for name in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match="must be hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIGURATION:SPLIT"):
            source_files(name)


def test_the_pile_and_c4_samples(shared):
    pile = read(shared / "data/pile_sample/train")
    assert len(pile) > 500
    assert "Github" in {d.source for d in pile} or len({d.source for d in pile}) > 2
    assert sum(len(d.text) for d in pile) > 20_000_000
    assert len(read(f"{shared}/data/c4_sample/c4-*.json.gz")) == 1174
