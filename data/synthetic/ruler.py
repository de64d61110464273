"""Generate the synthetic tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3 and appendix).

Retrieval: eight needle in a haystack (NIAH) tasks. Multi-hop tracing: variable tracking (`vt`). Aggregation: common and
frequent words extraction (`cwe`, `fwe`). The paper's two question answering tasks need SQuAD and HotpotQA and are absent.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .ruler_text import ADJECTIVES, NOISE, NOUNS, prose, word_pairs

# `cwe`: number of common words. Repeats of common and of other words in the text and in its solved example, and the number of
# other words of the example: in texts of at least `_CWE_LONG_TEXT` tokens, and in shorter ones.
_CWE_ANSWERS = 10
_CWE_LONG_TEXT = 4096
_CWE_LONG, _CWE_SHORT = ((30, 3), (10, 3), 30), ((6, 1), (3, 1), 10)
_VT_HOPS = 4
# Results of different versions do not compare. Version 2 has needles in noise on lines of their own.
TEXTS_VERSION = 2
_ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class RulerExample:
    """Hold one text of a task: prompt, right answers, and place of the answer.

    Attributes:
        context: instruction and haystack.
        question: follows the context.
        answer_prefix: beginning of the answer, the end of the prompt.
        answers: strings that a right answer contains.
        depth: place of the answer from 0 (begin of the haystack) to 1; None if it has several places.
        written: the answers as the right continuation writes them; empty for a list with commas.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    depth: float | None = None
    written: str = ""

    @property
    def prompt(self) -> str:
        """Return the text that a model continues."""
        return self.context + self.question + self.answer_prefix

    @property
    def completion(self) -> str:
        """Return the right continuation of the prompt."""
        return f" {self.written or ', '.join(self.answers)}"

    @property
    def text(self) -> str:
        """Return prompt and right answer, for training."""
        return f"{self.prompt}{self.completion}."


@dataclass(frozen=True)
class RulerTask:
    """Describe a task.

    Attributes:
        description: of the task, for tables and help.
        max_tokens: limit of the generated answer in the paper, tokens.
        build: function of (random generator, number of units of the haystack, `_Haystack`) to an example.
        single: whether the answer has one place, so that a depth can be requested.
    """

    description: str
    max_tokens: int
    build: Callable[[random.Random, int, _Haystack], RulerExample]
    single: bool = False


@dataclass
class _Haystack:
    """Hold what an example depends on besides its random generator.

    Attributes:
        length: tokens of prompt and answer, at most.
        depth: requested place of the answer, from 0 to 1; None draws it.
        more: sentences of the text that follow `pieces`.
        pieces: sentences that were read so far.
    """

    length: int
    depth: float | None
    more: Iterator[str]
    pieces: list[str]

    def first(self, count: int) -> list[str]:
        """Return the first pieces. Raises ValueError if the text has fewer."""
        self.pieces += itertools.islice(self.more, max(0, count - len(self.pieces)))
        if len(self.pieces) < count:
            raise ValueError(
                f"length {self.length}: the haystack is shorter ({len(self.pieces):,} pieces); give a longer text or a shorter "
                "length"
            )
        return [piece if piece[-1:].isspace() else piece + " " for piece in self.pieces[:count]]


def make_example(
    task: str,
    length: int,
    seed: int,
    count_tokens: Callable[[str], int],
    haystack: Sequence[str] | None = None,
    *,
    depth: float | None = None,
    answer_tokens: int = 0,
) -> RulerExample:
    """Return an example of a task that fills `length` tokens with its answer, up to about one sentence or word.

    The arguments determine the example. Needles in noise and prose do not depend on the length. Examples with the same
    haystack begin with the same text.

    Args:
        task: a key of `TASKS`.
        length: tokens of prompt and answer, at most.
        seed: of needles, words and places.
        count_tokens: number of tokens of a text.
        haystack: sentences of a text for the tasks that hide needles in prose; None for generated prose of this seed.
        depth: place of the answer, from 0 to 1; None draws it.
        answer_tokens: tokens reserved for the answer; at least those of the right answer.

    Raises ValueError for an unknown task, a depth that is not allowed, a length below the shortest example, and a haystack
    that is too short.
    """
    if task not in TASKS:
        raise ValueError(f"there is no RULER task {task!r}; allowed are {', '.join(TASKS)}")
    if depth is not None and not (TASKS[task].single and 0 <= depth <= 1):
        allowed = "from 0 to 1" if TASKS[task].single else "none, because its answer has several places"
        raise ValueError(f"depth {depth:g} of {task}: allowed is {allowed}")
    name = f"{task}/{seed}"  # without the length: the same needles at every length
    sentences = _Haystack(length, depth, prose(name) if haystack is None else iter(haystack), [])

    @functools.lru_cache(maxsize=2)
    def example(units: int) -> RulerExample:
        return TASKS[task].build(random.Random(name), units, sentences)

    def tokens(units: int) -> int:
        built = example(units)
        return count_tokens(built.prompt) + max(answer_tokens, count_tokens(f"{built.completion}."))

    least = tokens(1)
    if least > length:
        raise ValueError(
            f"length {length}: the shortest example of {task} takes {least:,} tokens; name {least} or more"
        )
    return example(_most_units(tokens, least, length))


def _most_units(tokens: Callable[[int], int], least: int, length: int) -> int:
    """Return a number of units with tokens(units) <= length, and less room than an average unit, found by interpolation.

    least: tokens(1), which fits. Every call of `tokens` tokenizes a text, so that few are made.
    """
    low, low_tokens = 1, least
    high: int | None = None
    slope = 0.0
    while (high is None or high - low > 1) and not length - low_tokens < slope:
        units = low + (max(1, int((length - low_tokens) / slope)) if slope else 16)
        if high is not None:
            units = min(units, high - 1)
        taken = tokens(units)
        slope = max(1e-3, (taken - low_tokens) / (units - low))
        if taken <= length:
            low, low_tokens = units, taken
        else:
            high = units
    return low


def _needle_task(
    description: str,
    haystack: str,
    keys: str = "word",
    values: str = "number",
    *,
    distractors: int = 0,
    num_keys: int = 1,
    num_values: int = 1,
) -> RulerTask:
    """Return a NIAH task.

    haystack: "noise", "prose", or "needles" for a text of distractors only. keys, values: kinds of `_distinct`.
    distractors: other needles in noise or prose. num_keys: keys of the question. num_values: values of each key.
    """
    answers = num_keys * num_values
    noun, verb = (values, "is") if answers == 1 else (f"{values}s", "are")
    hidden = f"A special magic {noun} is" if answers == 1 else f"Some special magic {noun} are"
    question = f"What {verb} {'the' if answers == 1 else 'all the'} special magic {noun}"

    def build(drawn: random.Random, units: int, text: _Haystack) -> RulerExample:
        others = units if haystack == "needles" else distractors
        names = _distinct(drawn, keys, num_keys + others)
        contents = _distinct(drawn, values, answers + others)
        depth = drawn.random() if text.depth is None else text.depth
        owners = [name for name in names[:num_keys] for _ in range(num_values)] + names[num_keys:]
        end = " " if haystack == "prose" else "\n"
        needles = [
            f"One of the special magic {values}s for {name} is: {content}.{end}"
            for name, content in zip(owners, contents, strict=True)
        ]
        if haystack == "needles":
            pieces, needles = needles[1:], needles[:1]
        else:
            pieces = [NOISE] * units if haystack == "noise" else text.first(units)
        places = [drawn.randint(0, len(pieces)) for _ in needles]
        if answers == 1:
            places[0] = _place(pieces, depth)
        names = names[:num_keys]
        listed = names[0] if num_keys == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
        return RulerExample(
            f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you about the {noun} "
            f"afterwards.\n{_inserted(pieces, needles, places)}",
            f"\n{question} for {listed} mentioned in the provided text?",
            f" The special magic {noun} for {listed} mentioned in the provided text {verb}",
            tuple(contents[:answers]),
            depth if answers == 1 else None,
        )

    return RulerTask(description, 128, build, answers == 1)


def _variable_tracking(drawn: random.Random, units: int, _: _Haystack) -> RulerExample:
    """Return a chain of assignments in repeated noise, after a short solved example."""
    names = _distinct(drawn, "variable", 2 * (_VT_HOPS + 1))
    example_value, value = _distinct(drawn, "value", 2)
    names, example_names = names[: _VT_HOPS + 1], names[_VT_HOPS + 1 :]

    def parts(names: list[str], value: str, lines: int) -> RulerExample:
        chain = [f"VAR {names[0]} = {value}\n", *(f"VAR {b} = VAR {a}\n" for a, b in itertools.pairwise(names))]
        places = sorted(drawn.randint(0, lines) for _ in chain)
        text = _inserted([NOISE] * lines, chain, places)
        return RulerExample(
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}",
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            f" Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are assigned "
            f"the value {value}, they are:",
            tuple(names),
            written=" ".join(names),
        )

    return _with_example(parts(example_names, example_value, 2), parts(names, value, units))


def _common_words(drawn: random.Random, units: int, text: _Haystack) -> RulerExample:
    """Return a numbered list of words of which ten are frequent, after a short solved example. A unit is another word."""
    repeats, example_repeats, example_others = _CWE_LONG if text.length >= _CWE_LONG_TEXT else _CWE_SHORT
    words = [*ADJECTIVES, *NOUNS]
    drawn.shuffle(words)
    counts = (_CWE_ANSWERS, _CWE_ANSWERS, example_others, units)
    words += word_pairs(drawn, max(0, sum(counts) - len(words)))
    remaining = iter(words)
    common, example_common, example_other, other = (list(itertools.islice(remaining, count)) for count in counts)

    def parts(common: list[str], others: list[str], repeats: tuple[int, int]) -> RulerExample:
        every = common * repeats[0] + others * repeats[1]
        drawn.shuffle(every)
        return RulerExample(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
            f"appear most often.\n{_numbered(every)}",
            f"\nQuestion: What are the {len(common)} most common words in the above list?",
            f" Answer: The top {len(common)} words that appear most often in the list are:",
            tuple(common),
            written=_numbered(common),
        )

    return _with_example(parts(example_common, example_other, example_repeats), parts(common, other, repeats))


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _frequent_words(drawn: random.Random, units: int, _: _Haystack) -> RulerExample:
    """Return coded words with frequencies of a Zeta distribution (exponent 2). The most frequent one is noise."""
    # With 100 words, ranks two to five have different numbers of repeats.
    total = 99 + units
    repeats = list(itertools.takewhile(bool, (int(total / rank**2 / _ZETA_2) for rank in itertools.count(1))))
    words = ["....", *_distinct(drawn, "code", len(repeats) - 1)]
    every = [word for word, count in zip(words, repeats, strict=True) for _ in range(count)]
    drawn.shuffle(every)
    return RulerExample(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
        f"coded words. {' '.join(every)}",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(words[1:4]),
    )


def _with_example(solved: RulerExample, example: RulerExample) -> RulerExample:
    """Return an example that begins with a solved one."""
    return replace(example, context=f"{solved.prompt}{solved.completion}\n\n{example.context}")


def _place(pieces: Sequence[str], depth: float) -> int:
    """Return the number of pieces before a depth, measured in characters, to the nearest piece."""
    ends = [0, *itertools.accumulate(map(len, pieces))]
    return min(range(len(ends)), key=lambda place: abs(ends[place] - depth * ends[-1]))


def _inserted(pieces: Sequence[str], sentences: Sequence[str], places: Sequence[int]) -> str:
    """Return the text with each sentence in front of the piece of its place. Sentences of one place keep their order."""
    parts: list[str] = []
    previous = 0
    for place, sentence in sorted(zip(places, sentences, strict=True), key=lambda pair: pair[0]):
        parts += [*pieces[previous:place], sentence]
        previous = place
    return "".join([*parts, *pieces[previous:]]).rstrip()


def _distinct(drawn: random.Random, kind: str, count: int) -> list[str]:
    """Return distinct strings of a kind in random order."""
    if kind == "word":
        return word_pairs(drawn, count)
    strings: dict[str, None] = {}
    while len(strings) < count:
        strings[_KINDS[kind](drawn)] = None
    return list(strings)


_KINDS: Mapping[str, Callable[[random.Random], str]] = {
    "number": lambda drawn: str(drawn.randint(10**6, 10**7 - 1)),
    "uuid": lambda drawn: str(uuid.UUID(int=drawn.getrandbits(128), version=4)),
    "variable": lambda drawn: "".join(drawn.choices(string.ascii_uppercase, k=5)),
    "value": lambda drawn: str(drawn.randint(10**4, 10**5 - 1)),
    "code": lambda drawn: "".join(drawn.choices(string.ascii_lowercase, k=6)),
}

TASKS: Mapping[str, RulerTask] = {
    "niah_single_1": _needle_task("one number in repeated noise", "noise"),
    "niah_single_2": _needle_task("one number in prose", "prose"),
    "niah_single_3": _needle_task("one UUID in prose", "prose", values="uuid"),
    "niah_multikey_1": _needle_task("one of four keys in prose", "prose", distractors=3),
    "niah_multikey_2": _needle_task("one of many keys, a text of needles", "needles"),
    "niah_multikey_3": _needle_task("one of many UUIDs, a text of needles", "needles", keys="uuid", values="uuid"),
    "niah_multivalue": _needle_task("four values of one key", "prose", num_values=4),
    "niah_multiquery": _needle_task("the values of four keys", "prose", num_keys=4),
    "vt": RulerTask("variable tracking: one chain of four hops", 30, _variable_tracking),
    "cwe": RulerTask("common words extraction: ten words", 120, _common_words),
    "fwe": RulerTask("frequent words extraction: three coded words", 50, _frequent_words),
}
