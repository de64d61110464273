"""tools.retrieval_text: RULER's tasks as training text, with other seeds than the examples of an evaluation."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from data.synthetic import retrieval_text
from data.synthetic.retrieval_text import MOST_DOCUMENTS, RETRIEVAL_TASKS, sentences, training_example, training_seed
from data.synthetic.ruler import make_example
from tools.evaluation.request import RulerRequest
from tools.evaluation.ruler import check_ruler
from tools.retrieval_text import main

COMMAND = [
    "--documents",
    "18",
    "--min-tokens",
    "1500",
    "--max-tokens",
    "4000",
    "--tokenizer-type",
    "bytes",
    "--no-progress",
]


def test_texts_take_turns_over_the_tasks_and_end_with_their_answers(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert main([*COMMAND, "--output", str(tmp_path / "new" / name), "--seed", str(seed)]) == 0
    assert "18 documents, " in (out := capsys.readouterr().out)
    assert "2 niah_single_1, " in out
    assert (tmp_path / "new" / "a").read_bytes() == (tmp_path / "new" / "b").read_bytes()
    records, others = (
        [json.loads(line) for line in (tmp_path / "new" / name).read_text().splitlines()] for name in "ac"
    )
    assert not {record["text"] for record in records} & {record["text"] for record in others}
    assert [record["meta"]["pile_set_name"] for record in records] == 2 * list(RETRIEVAL_TASKS)
    lengths = [len(record["text"]) for record in records]
    assert max(lengths) <= 4000
    assert len(set(lengths)) > 9
    for number, record in enumerate(records):
        task, example = training_example(number, RETRIEVAL_TASKS, (1500, 4000), 0, len)
        assert (record["meta"]["pile_set_name"], record["text"]) == (task, example.text)
        assert record["text"].endswith(f"{example.completion}.")


def test_lengths_are_drawn_log_uniformly(monkeypatch):
    drawn: list[int] = []
    monkeypatch.setattr(retrieval_text, "make_example", lambda task, length, *_: drawn.append(length))
    for number in range(2000):
        training_example(number, RETRIEVAL_TASKS, (100, 10_000), 0, len)
    assert 100 <= min(drawn) < max(drawn) <= 10_000
    shares = [sum(length < limit for length in drawn) / 2000 for limit in (316, 1000, 3162)]
    assert shares == pytest.approx([0.25, 0.5, 0.75], abs=0.04)


def test_training_and_evaluation_draw_from_different_seeds():
    """Evaluation uses seeds from 0 on; every document of every training seed has its own seed below 0."""
    pairs = [(seed, number) for seed in (0, 1, 7) for number in (0, 1, 5, MOST_DOCUMENTS - 1)]
    assert max(training_seed(*pair) for pair in pairs) < 0
    assert len({training_seed(*pair) for pair in pairs}) == len(pairs)
    trained = {
        training_example(n, ["niah_single_1"], (600, 600), seed, len)[1].answers for seed in (0, 1) for n in range(40)
    }
    evaluated = {make_example("niah_single_1", 600, seed, len).answers for seed in range(80)}
    assert len(trained) == len(evaluated) == 80
    assert not trained & evaluated
    for pair in ((-1, 0), (0, -1), (0, MOST_DOCUMENTS)):
        with pytest.raises(ValueError, match="seeds from 0 and documents below 1,000,000,000 are allowed"):
            training_seed(*pair)


def test_evaluation_refuses_the_seeds_of_training():
    check_ruler(RulerRequest(seed=0))
    with pytest.raises(ValueError, match=r"--seed -1: seeds from 0 are allowed; tools\.retrieval_text trains on those"):
        check_ruler(RulerRequest(seed=-1))


def test_needles_hide_in_the_sentences_of_a_text(tmp_path, capsys):
    text = "".join(f"Sentence {number} stands here.{' ' if number % 3 else chr(10)}" for number in range(200))
    (tmp_path / "book.txt").write_text(text)
    words = ["--haystack", str(tmp_path / "book.txt"), "--tasks", "niah_single_2", "--output", str(tmp_path / "out")]
    assert main([*COMMAND, *words]) == 0
    first, second = (json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()[:2])
    numbers = [[int(n) for n in re.findall(r"Sentence (\d+) stands here\.", text)] for text in (first, second)]
    assert all(len(sequence) > 30 for sequence in numbers)
    assert all((b - a) % 200 == 1 for sequence in numbers for a, b in itertools.pairwise(sequence))
    assert numbers[0][0] != numbers[1][0], "another part of the text"
    assert len(sentences([text], 100)) == 200
    (tmp_path / "book.txt").write_text(text[:1800])
    assert main([*COMMAND, *words, "--overwrite"]) == 2
    assert "--max-tokens 4000: length 4000: the haystack is shorter (" in capsys.readouterr().err
    (tmp_path / "book.txt").write_text("\n")
    assert main([*COMMAND, *words, "--overwrite"]) == 2
    assert "holds no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "vt,qa_1"], "--tasks qa_1: allowed are niah_single_1, "),
        (["--min-tokens", "5000"], "--min-tokens 5000: at most --max-tokens 4000 is allowed; lower one"),
        (
            ["--min-tokens", "20"],
            r"--min-tokens 20: length 20: the shortest example of niah_single_1 takes \d+ tokens; name",
        ),
        (["--documents", "2000000000"], "--documents 2000000000: at most 1000000000 are allowed; use several --seed"),
        (["--haystack", "nosuch"], "error: the data path nosuch does not exist"),
        (["--tokenizer-type", "hf", "--vocab-file", "nosuch"], "error: the tokenizer file nosuch does not exist"),
        (
            ["--max-tokens", "9" * 20],
            f"--max-tokens {'9' * 20}: a text must fit into this machine's memory of .*; give less",
        ),
        (["--haystack", ""], "the corpus names an empty path: set 'stdlib', a path"),
        (["--output", "HERE"], "exists; name another --output, or replace it with --overwrite"),
        (["--output", "HERE", "--overwrite", "--haystack", "HERE"], "--output .*here: this command reads it"),
    ],
)
def test_wrong_words_are_refused_and_leave_no_file_or_folder(tmp_path, capsys, words, message):
    (tmp_path / "here").write_text("text")
    words = [str(tmp_path / "here") if word == "HERE" else word for word in words]
    assert main([*COMMAND, "--output", str(tmp_path / "new" / "out"), *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
