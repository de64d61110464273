"""RULER examples: answers in the text, distractors beside them, lengths, determinism, and refused arguments."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from data.synthetic.ruler import TASKS, RulerExample, make_example
from data.synthetic.ruler_text import ADJECTIVES, NOUNS, prose, word_pairs

NIAH = [name for name in TASKS if name.startswith("niah")]
SINGLE = [name for name in TASKS if TASKS[name].single]
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.(?=\s|$)")


def count(text: str) -> int:
    """Count words, digits and other characters besides spaces: about the number of tokens of a BPE tokenizer."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]|\n", text))


def example(task: str, length: int = 1000, seed: int = 0, **options) -> RulerExample:
    return make_example(task, length, seed, count, **options)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [800, 1024, 4096])
def test_text_with_answer_fills_the_length(task: str, length: int) -> None:
    made = example(task, length, 3)
    assert 0.88 * length < count(made.text) <= length
    right = {"vt": " ".join(made.answers), "cwe": " ".join(f"{i}. {word}" for i, word in enumerate(made.answers, 1))}
    right.setdefault(task, ", ".join(made.answers))
    assert made.text == f"{made.context}{made.question}{made.answer_prefix} {right[task]}."
    reserved = example(task, length, 3, answer_tokens=200)
    assert 0.88 * length < count(reserved.prompt) + 200 <= length


@pytest.mark.parametrize("task", TASKS)
def test_arguments_determine_the_example(task: str) -> None:
    first = example(task, seed=5)
    assert first == example(task, seed=5)
    assert first.answers != example(task, seed=6).answers
    if task in NIAH and task not in ("niah_multikey_2", "niah_multikey_3"):
        assert first.answers == example(task, 1500, seed=5).answers


@pytest.mark.parametrize("task", NIAH)
@pytest.mark.parametrize("seed", [0, 1])
def test_needles_of_the_question_occur_once_and_distractors_differ(task: str, seed: int) -> None:
    made = example(task, seed=seed)
    needles = NEEDLE.findall(made.context)
    assert len({value for _, value in needles}) == len(needles)
    in_question = [(key, value) for key, value in needles if key in made.question]
    assert sorted(value for _, value in in_question) == sorted(made.answers)
    assert all(made.context.count(answer) == 1 for answer in made.answers)
    assert len({key for key, _ in in_question}) == (4 if task == "niah_multiquery" else 1)
    assert len(made.answers) == (4 if task in ("niah_multiquery", "niah_multivalue") else 1)
    others = len(needles) - len(in_question)
    if task in ("niah_multikey_2", "niah_multikey_3"):
        assert others >= 10
        assert not NEEDLE.sub("", made.context.split("afterwards.\n")[1]).strip()
    else:
        assert others == (3 if task == "niah_multikey_1" else 0)


@pytest.mark.parametrize("task", SINGLE)
def test_answer_lies_at_the_requested_depth(task: str) -> None:
    for depth in (0, 0.5, 1):
        made = example(task, depth=depth)
        text = made.context.split("afterwards.\n")[1]
        begin = text.index(made.answers[0])
        assert made.depth == depth
        assert begin / len(text) == pytest.approx(depth, abs=0.08)
    assert len({example(task, seed=seed).depth for seed in range(4)}) == 4


def test_haystack_is_the_text_in_order() -> None:
    sentences = [f"Sentence {number} of a given text.\n" for number in range(400)]
    made = [example("niah_single_2", seed=seed, haystack=sentences, depth=0.5) for seed in range(2)]
    for one in made:
        body = NEEDLE.sub("", one.context.split("afterwards.\n")[1])
        numbers = [int(number) for number in re.findall(r"Sentence (\d+)", body)]
        assert numbers == list(range(len(numbers)))
    before = [one.context[: one.context.index("One of")] for one in made]
    assert before[0] == before[1]  # examples of one haystack share the text before their needles
    with pytest.raises(ValueError, match=r"length 1000: the haystack is shorter \(20 pieces\); give a longer text"):
        example("niah_single_2", haystack=sentences[:20])


def test_variables_are_one_chain() -> None:
    made = example("vt", seed=2)
    solved, text = made.context.split("\n\nMemorize", 1)
    value = re.search(r"assigned the value (\d+)", made.question)[1]
    assert re.findall(r"^VAR (\w+) = (\w+)$", text, re.M) == [(made.answers[0], value)]
    assert re.findall(r"^VAR (\w+) = VAR (\w+)$", text, re.M) == [(b, a) for a, b in itertools.pairwise(made.answers)]
    assert not any(answer in solved for answer in made.answers)
    assert len(made.answers) == 5


@pytest.mark.parametrize(
    ("length", "common", "others", "solved"), [(1000, 6, 1, {3: 10, 1: 10}), (4096, 30, 3, {10: 10, 3: 30})]
)
def test_common_words_are_more_frequent_than_the_others(
    length: int, common: int, others: int, solved: dict[int, int]
) -> None:
    made = example("cwe", length)
    first, second = made.context.split("\n\nBelow", 1)
    in_list, _, right = first.partition("\nQuestion")
    repeats = Counter(re.findall(r"\d+\. (\S+)", in_list))
    assert Counter(repeats.values()) == solved
    assert {repeats[word] for word in re.findall(r"\d+\. (\S+)", right)} == {max(solved)}
    counts = Counter(re.findall(r"\d+\. (\S+)", second))
    assert {counts.pop(answer) for answer in made.answers} == {common}
    assert set(counts.values()) == {others}
    assert len(made.answers) == 10
    assert not any(answer in made.context.split("\n\nBelow", 1)[0] for answer in made.answers)


def test_frequent_words_follow_the_zeta_distribution() -> None:
    made = example("fwe", 4000)
    counts = Counter(made.context.split("coded words. ")[1].split())
    assert [word for word, _ in counts.most_common(4)] == ["....", *made.answers]
    noise, *answers = (number for _, number in counts.most_common(5))
    assert answers == pytest.approx([noise / rank**2 for rank in (2, 3, 4, 5)], abs=1)
    assert answers[2] > answers[3]


def test_no_word_is_part_of_another_one() -> None:
    words = [*ADJECTIVES, *NOUNS]
    assert [(a, b) for a, b in itertools.permutations(words, 2) if a in b] == []
    text = "".join(itertools.islice(prose(0), 200))
    assert len(set(text.split("\n"))) > 20
    assert not re.search(r"[{}]|magic|\ba [aeiou]", text)


@pytest.mark.parametrize(
    ("task", "depth", "message"),
    [
        ("niah", None, "there is no RULER task 'niah'; allowed are niah_single_1, niah_single_2"),
        ("niah_single_1", 1.5, "depth 1.5 of niah_single_1: allowed is from 0 to 1"),
        ("vt", 0.5, "depth 0.5 of vt: allowed is none, because its answer has several places"),
    ],
)
def test_wrong_arguments_are_refused(task: str, depth: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example(task, depth=depth)


@pytest.mark.parametrize("task", TASKS)
def test_too_short_length_is_refused_with_the_shortest_one(task: str) -> None:
    with pytest.raises(
        ValueError, match=rf"length 20: the shortest example of {task} takes \d+ tokens; name \d+ or more"
    ) as e:
        example(task, 20)
    least = int(str(e.value).split()[-3])
    assert count(example(task, least).text) <= least


def test_more_keys_than_words_are_refused() -> None:
    import random

    with pytest.raises(ValueError, match=r"100,000 distinct words: at most [\d,]+ are allowed; name a shorter length"):
        word_pairs(random.Random(0), 100_000)
