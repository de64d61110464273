"""Filters of a corpus: near duplicates, quality, language, ftfy; and the data card that counts what they remove."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.corpus.discovery import source_files
from data.corpus.document_sources import allowed_sources
from data.corpus.ngrams import ngram_hashes
from data.corpus.readers import Document
from data.manifest import read_manifest
from data.preprocessing import filters as module
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.filters import DuplicateIndex, Filters, document_filter, quality_problem, signature
from data.preprocessing.pipeline import preprocess
from tests.data.inline_pool import Inline
from tests.data.preprocessing.test_preprocess_data import decoded, outputs, write
from tools.preprocess_data import main

PROSE = "The old house stood at the end of a road that few people used, and it had been empty for many years."
DEDUPLICATED = Filters(near_duplicates=0.7)


def text_of(seed: int, words: int = 200) -> list[str]:
    draw = random.Random(seed)
    return [f"word{draw.randrange(3000)}" for _ in range(words)]


def jaccard(a: str, b: str, words: int) -> float:
    first, second = set(ngram_hashes(a, words).tolist()), set(ngram_hashes(b, words).tolist())
    return len(first & second) / len(first | second)


def test_ngrams_ignore_case_and_punctuation_and_depend_on_order():
    assert (ngram_hashes("The cat, sat on A mat!", 3) == ngram_hashes("the cat sat -- on a mat", 3)).all()
    assert len(ngram_hashes("a b c d e f", 5)) == 2
    assert len(ngram_hashes("a b a b a b", 2)) == 2
    assert not np.intersect1d(ngram_hashes("a b c", 3), ngram_hashes("c b a", 3)).size
    assert len(ngram_hashes("two words", 13)) == len(ngram_hashes("?!", 13)) == 1


def test_near_duplicates_are_skipped_and_other_documents_kept(tmp_path, inline):
    base, other = text_of(0), text_of(1)
    near = [*base[:100], "changed", *base[101:]]
    far = [*base[:100], *text_of(2, 100)]
    texts = [" ".join(words) for words in (base, other, near, far)]
    assert jaccard(texts[0], texts[2], 5) > 0.9 > 0.5 > jaccard(texts[0], texts[3], 5)
    path = write(tmp_path / "x.jsonl", [{"text": text} for text in [*texts, texts[0]]])
    settings = PreprocessingSettings("bytes", deduplicate=True, filters=DEDUPLICATED)
    manifest = preprocess(source_files(path), tmp_path / "out", settings, progress=False)["text"]
    assert decoded(tmp_path / "out_text_document") == [texts[0], texts[1], texts[3]]
    assert manifest["skipped"] == {"near repeat": 1, "repeat": 1}


def test_signatures_do_not_depend_on_the_size_of_an_update(monkeypatch):
    text = " ".join(text_of(3, 500))
    whole = module.signature(text, DEDUPLICATED)
    monkeypatch.setattr(module, "_ROWS", 64)
    assert module.signature(text, DEDUPLICATED) == whole
    assert len(whole) == module.SIGNATURE_BYTES


def test_near_duplicates_after_a_kill_equal_those_of_one_job(tmp_path, inline):
    for number, name in enumerate("abc"):
        records = [" ".join([*text_of(seed)[:190], name]) for seed in range(number, number + 3)]
        write(tmp_path / f"{name}.jsonl", [{"text": text} for text in records])
    files, settings = source_files(str(tmp_path / "*.jsonl")), PreprocessingSettings("bytes", filters=DEDUPLICATED)
    manifest = preprocess(files, tmp_path / "whole", settings, progress=False)["text"]
    assert (manifest["documents"], manifest["skipped"]) == (5, {"near repeat": 4})
    Inline.stop_at = "c.jsonl"
    with pytest.raises(KeyboardInterrupt):
        preprocess(files, tmp_path / "cut", settings, progress=False)
    Inline.stop_at = None
    preprocess(files, tmp_path / "cut", settings, progress=False)
    whole, cut = ({name[-4:]: content for name, content in outputs(tmp_path / p).items()} for p in ("whole", "cut"))
    assert whole == cut


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n".join(f"{PROSE} It is page {n}." for n in range(5)), None),
        (PROSE, "number of words"),
        ("of the " + "a b " * 100, "word length"),
        (f"{PROSE} " * 3 + "# " * 8, "symbols"),
        (PROSE * 3 + " 1234" * 60, "words without a letter"),
        ("one common phrase without such words stands here " * 10, "stop words"),
        ("\n".join(f"- {PROSE} {n}" for n in range(5)), "bullet lines"),
        ("\n".join(f"{PROSE} {n}..." for n in range(5)), "lines that end with an ellipsis"),
        ("\n".join([PROSE] * 5), "repeated lines"),
        ("\n".join(f"{PROSE} {n}" for n in range(20)) + "\n\nthe end" * 4, "repeated paragraphs"),
    ],
)
def test_quality_rules(text, problem):
    assert quality_problem(text) == (problem and f"quality: {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("of the house " * 16 + "one two", None),  # 50 words
        ("of the house " * 16 + "one", "number of words"),
        ("\n".join([f"- {PROSE} {n}" for n in range(9)] + [PROSE]), None),  # 90 %
        ("\n".join(f"{PROSE} {n}{'...' if n < 3 else '.'}" for n in range(10)), None),  # 30 %
        ("\n".join(f"{PROSE} {n}{'...' if n < 4 else '.'}" for n in range(10)), "lines that end with an ellipsis"),
        (" ".join([*["of the house"] * 30, *["#"] * 10]), None),  # 10 % of 100 words
        (" ".join([*["of the house"] * 30, *["#"] * 11]), "symbols"),
        (" ".join([*["of the house"] * 40, *["1234"] * 30]), None),  # 80 %
        (" ".join([*["of the house"] * 40, *["1234"] * 31]), "words without a letter"),
        # 21 % of the characters are in two repeats of a line, which are 9 % of the lines.
        ("\n".join([f"{PROSE} {PROSE}"] * 3 + [f"{PROSE[:64]} {n:02}" for n in range(20)]), "repeated lines"),
        # 23 % and 18 % of the characters are in repeated lines.
        ("\n".join([*(f"{PROSE} It is page {n}." for n in range(2)), PROSE, PROSE]), "repeated lines"),
        ("\n".join([*(f"{PROSE} It is page {n}." for n in range(3)), PROSE, PROSE]), None),
    ],
)
def test_quality_limits_are_inclusive(text, problem):
    assert quality_problem(text) == (problem and f"quality: {problem}")


def test_language_is_that_of_the_beginning(monkeypatch):
    german = "Das alte Haus stand am Ende einer Straße, die nur wenige Menschen benutzten. " * 8
    keep = document_filter(Filters(languages=("en",)))
    assert keep(Document(PROSE + german, Path())) == "language"
    monkeypatch.setattr(module, "_LANGUAGE_SAMPLE", len(PROSE))
    assert keep(Document(PROSE + german, Path())) is None


def test_candidates_below_the_similarity_are_kept():
    settings = PreprocessingSettings("bytes", filters=DEDUPLICATED)
    first = np.arange(module.PERMUTATIONS, dtype=np.uint32)
    for equal, reason in ((80, None), (100, "near repeat")):
        index = DuplicateIndex(settings)
        other = np.where(first < equal, first, first + 1000).astype(np.uint32)
        records = [bytes(module.DIGEST_BYTES) + values.tobytes() for values in (first, other)]
        assert [index.reason(record) for record in records] == [None, reason]


@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.9, 0.98])
def test_signatures_that_agree_at_the_threshold_are_found(threshold):
    """Check 400 pairs: at least 96 % are near repeats. 18 bands of 7 hashes at 0.8 find 98.6 %."""
    bands, rows = module.bands_and_rows(threshold)
    assert bands * rows <= module.PERMUTATIONS
    assert 1 - (1 - threshold**rows) ** bands >= 0.98
    generator, found = np.random.default_rng(0), 0
    index = DuplicateIndex(PreprocessingSettings("bytes", filters=Filters(near_duplicates=threshold)))
    for _ in range(400):
        first = generator.integers(1 << 32, size=module.PERMUTATIONS, dtype=np.uint32)
        other = first.copy()
        changed = generator.permutation(module.PERMUTATIONS)[: int((1 - threshold) * module.PERMUTATIONS)]
        other[changed] += 1
        pair = [index.reason(bytes(module.DIGEST_BYTES) + values.tobytes()) for values in (first, other)]
        assert pair[0] is None
        found += pair[1] == "near repeat"
    assert found >= 384


def test_near_duplicates_are_those_of_one_text_key():
    index = DuplicateIndex(PreprocessingSettings("bytes", filters=DEDUPLICATED))
    sketch = signature(" ".join(text_of(0)), DEDUPLICATED)
    records = [bytes([key]) + bytes(module.DIGEST_BYTES - 1) + sketch for key in (0, 1, 0, 1)]
    assert [index.reason(record) for record in records] == [None, None, "near repeat", "near repeat"]


def test_language_filter_keeps_the_given_languages():
    english, german = PROSE * 2, "Das alte Haus stand am Ende einer Straße, die nur wenige Menschen benutzten. " * 2
    keep = document_filter(Filters(languages=("en",)))
    assert [keep(Document(text, Path())) for text in (english, german)] == [None, "language"]
    assert document_filter(Filters(languages=("de", "en")))(Document(german, Path())) is None


def test_filters_that_remove_every_document_are_named(tmp_path, inline):
    write(tmp_path / "in.jsonl", [{"text": "The cat sat on the mat and looked at the dog."}, {"text": ""}])
    settings = PreprocessingSettings("bytes", filters=Filters(languages=("de",)))
    message = r"the filters leave no document of .*in\.jsonl \(removed: 1 empty, 1 language\)\. Change the options"
    with pytest.raises(ValueError, match=message):
        preprocess(source_files(tmp_path / "in.jsonl"), tmp_path / "out", settings, progress=False)


def test_excluded_sources_are_left_out_and_must_occur(tmp_path, inline, capsys):
    path = write(
        tmp_path / "x.jsonl", [{"text": f"t{n}", "meta": {"pile_set_name": "a b c"[2 * (n % 3)]}} for n in range(9)]
    )
    words = [
        "--input",
        str(path),
        "--tokenizer-type",
        "bytes",
        "--output-prefix",
        str(tmp_path / "out"),
        "--no-progress",
    ]
    assert main([*words, "--exclude-sources", "a", "c"]) == 0
    assert "skipped: 3 source a, 3 source c" in capsys.readouterr().out
    assert decoded(tmp_path / "out_text_document") == ["t1", "t4", "t7"]
    assert main([*words, "--overwrite", "--exclude-sources", "a", "d"]) == 2
    assert (
        "--exclude-sources 'd': 0 of 9 documents have this source; allowed are 'a', 'b', 'c'" in capsys.readouterr().err
    )
    assert decoded(tmp_path / "out_text_document") == ["t1", "t4", "t7"], "the earlier output is intact"
    assert not list(tmp_path.glob("*.parts-*"))


def test_message_of_an_unknown_source_lists_few_of_many_names():
    known = {f"site-{number}.org" for number in range(20_000)}
    message = allowed_sources(["site-77.com"], known)
    assert message.startswith("they have 20,000 sources; the nearest are 'site-77")
    assert len(message) < 120
    assert allowed_sources(["?"], known) == "they have 20,000 sources; none of them is similar"
    assert allowed_sources(["d"], {"b", "a"}) == "allowed are 'a', 'b'"


def test_documents_without_a_source_can_be_excluded(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": "a", "meta": {"pile_set_name": "a"}}, {"text": "b"}])
    recipe = PreprocessingSettings("bytes", filters=Filters(exclude_sources=("other",)))
    manifest = preprocess(source_files(path), tmp_path / "out", recipe, progress=False)["text"]
    assert (manifest["sources"], manifest["skipped"]) == (["a"], {"source other": 1})


def test_source_names_stay_in_their_cells_of_the_card(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": "a", "meta": {"pile_set_name": "a | b\nc"}}])
    words = ["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out"), "--data-card"]
    assert main(words) == 0
    assert "\n| a \\| b c | not given | 1 |" in (tmp_path / "out_text_document.md").read_text()


def test_card_without_removed_documents_says_so(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": PROSE}])
    words = ["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out"), "--data-card"]
    assert main(words) == 0
    card = (tmp_path / "out_text_document.md").read_text()
    assert "## Removed documents\n\nNo document was removed.\n\n## Settings" in card


def test_ctrl_c_names_the_next_step(tmp_path, inline, capsys):
    paths = [write(tmp_path / f"{n}.jsonl", [{"text": PROSE}]) for n in (1, 2)]
    words = ["--input", *map(str, paths), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out")]
    Inline.stop_at = "2.jsonl"
    assert main(words) == 130
    assert "interrupted: the same command resumes after the last finished part" in capsys.readouterr().err
    Inline.stop_at = None
    assert main(words) == 0


def test_card_and_counts_of_the_command(tmp_path, inline, capsys):
    records = [{"text": f"{PROSE} {n} " * 4, "meta": {"pile_set_name": "ab"[n % 2]}} for n in range(4)]
    records += [{"text": " ".join(text_of(4))}, {"text": "kurz"}, records[0]]
    path = write(tmp_path / "x.jsonl", records)
    (tmp_path / "licences.yml").write_text("a: CC BY 4.0\n")
    words = [
        "--input",
        str(path),
        "--tokenizer-type",
        "bytes",
        "--append-eod",
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    words += ["--quality", "--deduplicate", "--no-progress", "--data-card", str(tmp_path / "licences.yml")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "skipped: 1 quality: number of words, 1 quality: stop words, 1 repeat" in printed
    card = (tmp_path / "out_text_document.md").read_text()
    size = sum(len(record["text"]) for record in records[:4:2])
    assert f"| a | CC BY 4.0 | 2 | {size + 2:,} | 50.0% | {size / (size + 2):.3f} |" in card
    assert "| b | not given | 2 |" in card
    assert "Tokenizer: bytes, 257 entries" in card
    assert "| repeat | 1 |" in card
    assert "| quality | True |" in card
    assert "| append_eod | True |\n| source_key | meta.pile_set_name |" in card
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert manifest["source_bytes"] == [size, size]
    # The card of finished token files is written again, and a source that no document has is refused.
    (tmp_path / "licences.yml").write_text("c: MIT\n")
    assert main(words) == 2
    message = "the source 'c', which 0 of 4 documents have; allowed are 'a', 'b'. Correct the licences and give the same command"
    assert message in capsys.readouterr().err
    # An excluded source may keep its licence in the file.
    (tmp_path / "licences.yml").write_text("a: MIT\nb: CC0\n")
    assert main([*words, "--overwrite", "--exclude-sources", "b"]) == 0
    assert "| a | MIT | 2 |" in (card := (tmp_path / "out_text_document.md").read_text())
    assert "CC0" not in card
    (tmp_path / "licences.yml").write_text("[a, b]\n")
    assert main(words) == 2
    assert "one line per source, SOURCE: LICENCE, is allowed" in capsys.readouterr().err


def test_card_of_replaced_token_files_is_removed(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": PROSE}])
    words = ["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out"), "--overwrite"]

    def cards(*more: str) -> list[str]:
        assert main([*words, *more]) == 0
        return sorted(card.name for card in tmp_path.glob("*.md"))

    assert cards("--split", "0,1", "--data-card") == ["out_validation_text_document.md"]
    assert cards("--split", "1,0", "--data-card") == ["out_train_text_document.md"]
    assert cards("--split", "1,0") == []


def test_split_uses_the_repaired_text(tmp_path, inline, monkeypatch):
    repair = SimpleNamespace(fix_text=lambda text: text.replace("Ã¶", "ö"))
    monkeypatch.setitem(sys.modules, "ftfy", repair)
    path = write(tmp_path / "x.jsonl", [{"text": f"{word} {n}"} for n in range(20) for word in ("schÃ¶n", "schön")])
    words = ["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out")]
    assert main([*words, "--ftfy", "--split", "1,1"]) == 0
    sides = [decoded(tmp_path / f"out_{name}_text_document") for name in ("train", "validation")]
    assert len(sides[0]) + len(sides[1]) == 40
    assert not set(sides[0]) & set(sides[1]), "equal texts are on one side"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--near-duplicates", "1"], "--near-duplicates 1.0: 0.3 to 0.98 is allowed"),
        (["--languages", "english"], "--languages english: allowed are ace, "),
        (
            ["--shingle-words", "5"],
            "--shingle-words 5 has no effect without --near-duplicates: add --near-duplicates SHARE",
        ),
        (
            ["--data-card", "nowhere.yml"],
            "--data-card nowhere.yml cannot be read (No such file or directory): give a YAML file",
        ),
    ],
)
def test_filters_refuse_other_values(tmp_path, inline, capsys, words, message):
    path = write(tmp_path / "x.jsonl", [{"text": "a"}])
    common = ["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out")]
    assert main([*common, *words]) == 2
    assert message in capsys.readouterr().err
