"""The .bin/.idx format: golden bytes, round trips, and errors for truncated files."""

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.indexed import LONGEST_SEQUENCE, IndexedTokens, IndexedWriter, bin_path, idx_path, token_dtype


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.int64))
    return prefix


def test_golden_bytes(tmp_path):
    prefix = write(tmp_path / "a_text_document", [[1, 2, 65499], [], [7]])
    assert bin_path(prefix).read_bytes() == bytes.fromhex("0100 0200 dbff 0700")
    assert idx_path(prefix).read_bytes() == bytes.fromhex(
        "4d4d494449445800 00"  # magic
        "0100000000000000"  # version
        "08"  # uint16
        "0300000000000000"  # sequences
        "0400000000000000"  # documents + 1
        "03000000 00000000 01000000"  # sizes
        "0000000000000000 0600000000000000 0600000000000000"  # byte offsets
        "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # documents
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_text_document.bin", "a_text_document.idx"]


def test_a_vocabulary_under_65500_is_stored_in_two_bytes():
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")


@given(
    documents=st.lists(st.lists(st.integers(0, 100), max_size=9), min_size=1, max_size=20).filter(any),
    dtype=st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
)
def test_written_token_files_read_back_equal(tmp_path_factory, documents, dtype):
    tokens = IndexedTokens(write(tmp_path_factory.mktemp("rt") / "x", documents, dtype))
    assert [tokens[i].tolist() for i in range(len(tokens))] == documents
    assert tokens.dtype == np.dtype(dtype)
    assert tokens.num_tokens == sum(map(len, documents))
    assert tokens.num_documents == len(documents)
    for number, document in enumerate(documents):
        assert tokens.read(number, 1, 3).tolist() == document[1:4]


def test_documents_of_several_sequences(tmp_path):
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2]), np.array([3]))
        writer.add_document(np.array([4]))
    tokens = IndexedTokens(tmp_path / "x")
    assert tokens.document_starts.tolist() == [0, 2, 3]
    assert (len(tokens), tokens.num_documents) == (3, 2)


def test_joined_files_keep_their_documents(tmp_path):
    first = tmp_path / "first"
    with IndexedWriter(first, np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2]), np.array([3]))
    second = write(tmp_path / "second", [[4], [5, 6]])
    with IndexedWriter(tmp_path / "both", np.dtype("<u2")) as writer:
        writer.add_file(first)
        writer.add_file(second)
    with IndexedWriter(tmp_path / "direct", np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2]), np.array([3]))
        writer.add_document(np.array([4]))
        writer.add_document(np.array([5, 6]))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "both").read_bytes() == path(tmp_path / "direct").read_bytes()


def with_pointers(prefix: Path, *pointers: int) -> None:
    index = bytearray(idx_path(prefix).read_bytes())
    at = 34 + 4 * len(pointers)
    index[at : at + 8 * len(pointers)] = struct.pack(f"<{len(pointers)}q", *pointers)
    idx_path(prefix).write_bytes(index)


@pytest.mark.parametrize(
    ("stored", "pointers"), [([1, 2, 99, 99, 3], (0, 8)), ([99, 1, 2, 3], (2, 6))], ids=["inside", "in front"]
)
def test_a_file_with_gaps_is_joined_by_sequence(tmp_path, stored, pointers):
    prefix = write(tmp_path / "x", [[1, 2], [3]])
    bin_path(prefix).write_bytes(np.array(stored, "<u2").tobytes())
    with_pointers(prefix, *pointers)
    with pytest.warns(UserWarning, match=r"x\.idx skips \d bytes of \.bin before sequence"):
        assert not IndexedTokens(prefix).is_contiguous
    with IndexedWriter(tmp_path / "y", np.dtype("<u2")) as writer:
        writer.add_file(prefix)
    joined = IndexedTokens(tmp_path / "y")
    assert joined.is_contiguous
    assert [joined[0].tolist(), joined[1].tolist()] == [[1, 2], [3]]


def test_a_sequence_outside_of_the_file_is_not_read(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2], [3]])
    with_pointers(prefix, 4, 4)
    with pytest.raises(
        ValueError, match=r"x\.idx is damaged at byte 50: it places sequence 1 at byte 4 .*ends at byte 8"
    ):
        IndexedTokens(prefix)


def test_files_of_two_types_are_not_joined(tmp_path):
    other = write(tmp_path / "wide", [[1]], "<i4")
    with pytest.raises(ValueError, match="one tokenizer"), IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_file(other)


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    def interrupted() -> None:
        with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            writer.add_document(np.array([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_files_that_were_there(tmp_path, monkeypatch):
    prefix = write(tmp_path / "x", [[1, 2]])

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write(prefix, [[3]])
    assert IndexedTokens(prefix)[0].tolist() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_old_index_is_removed_before_new_tokens_are_in_place(tmp_path, monkeypatch):
    prefix = write(tmp_path / "x", [[1, 2]])
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if target == idx_path(prefix):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[3, 4]])
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused(tmp_path, token):
    with pytest.raises(ValueError, match=f"{token}, outside of uint16"), IndexedWriter(tmp_path / "x", "<u2") as writer:
        writer.add_document(np.array([5, token]))


def test_offsets_of_more_than_two_to_the_31_tokens(tmp_path):
    writer = IndexedWriter(tmp_path / "x", "<u2")
    writer._sizes.extend([LONGEST_SEQUENCE] * 4)  # tokens that nobody writes here
    writer.finish()
    stored = np.frombuffer(idx_path(tmp_path / "x").read_bytes(), "<i8", 4, 34 + 4 * 4)
    assert stored.tolist() == [2 * n * LONGEST_SEQUENCE for n in range(4)]


def test_a_sequence_of_two_to_the_31_tokens_is_refused(tmp_path):
    endless = np.broadcast_to(np.uint16(0), 2**31)
    with (
        pytest.raises(ValueError, match=r"2,147,483,648 tokens; the format holds at most"),
        IndexedWriter(tmp_path / "x", "<u2") as writer,
    ):
        writer.add_document(endless)
    with pytest.raises(ValueError, match=r"2,147,483,648 tokens"), IndexedWriter(tmp_path / "x", "<u2") as writer:
        writer.add_documents(endless, np.array([2**31]))


def test_floats_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="float32; allowed: uint8"):
        IndexedWriter(tmp_path / "x", np.dtype("float32"))


@pytest.mark.parametrize("cut", [1, 7, 16])
@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_cut_file_is_named_with_the_bytes_missing(tmp_path, suffix, cut):
    prefix = write(tmp_path / "x", [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"x\.{suffix} is {cut} bytes short"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_files_that_do_not_belong_together(tmp_path, suffix):
    prefix = write(tmp_path / "x", [[1, 2, 3]])
    with open(tmp_path / f"x.{suffix}", "ab") as file:
        file.write(b"\0\0\0\0")
    with pytest.raises(ValueError, match=rf"x\.{suffix} is 4 bytes too long"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_an_empty_file(tmp_path, suffix):
    prefix = write(tmp_path / "x", [[1, 2, 3]])
    (tmp_path / f"x.{suffix}").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"x\.{suffix} is empty"):
        IndexedTokens(prefix)


def test_a_corpus_without_text(tmp_path):
    with pytest.raises(ValueError, match="lists no sequences"):
        IndexedTokens(write(tmp_path / "none", []))
    with pytest.raises(ValueError, match="holds no tokens"):
        IndexedTokens(write(tmp_path / "empty", [[], []]))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"TNTIDX\0\0", "old TNTIDX format"),
        (0, b"PK", "not a token index"),
        (9, b"\x02", "version 2"),
        (17, b"\x06", "type code 6, a float"),
        (17, b"\x07", "type code 7, a float"),
        (17, b"\x09", "type code 9; allowed: 1 uint8"),
        (34 + 12 * 1, b"\x01", r"x\.idx is damaged at byte 46: it begins document 0 at sequence 1"),
    ],
)
def test_a_wrong_header(tmp_path, at, value, message):
    prefix = write(tmp_path / "x", [[1, 2, 3]])
    content = bytearray(idx_path(prefix).read_bytes())
    content[at : at + len(value)] = value
    idx_path(prefix).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        IndexedTokens(prefix)


def test_missing_file_error_names_similar_prefixes(tmp_path):
    prefix = write(tmp_path / "corpus_text_document", [[1]])
    with pytest.raises(
        FileNotFoundError, match=r"corpus_text_documents\.idx does not exist\. Beside it: .*t_document\. "
    ):
        IndexedTokens(tmp_path / "corpus_text_documents")
    with pytest.raises(
        FileNotFoundError, match=r"python -m tools\.preprocess_data; .*make data-pile-sample.*docs/guide/data\.md"
    ):
        IndexedTokens(tmp_path / "nowhere" / "corpus")
    with pytest.raises(FileNotFoundError, match=r"without extension: .*corpus_text_document$"):
        IndexedTokens(bin_path(prefix))
    bin_path(prefix).unlink()
    with pytest.raises(FileNotFoundError, match=r"\.bin does not exist"):
        IndexedTokens(prefix)


def test_sequence_index_out_of_range_is_refused(tmp_path):
    tokens = IndexedTokens(write(tmp_path / "x", [[1]]))
    with pytest.raises(IndexError, match="sequence 1 of 1"):
        tokens[1]
