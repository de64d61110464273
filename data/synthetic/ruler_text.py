"""Hold words and sentences of the haystacks of `ruler.py`: keys, word lists, repeated noise, and generated prose."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"

# No word is part of another one, because answers are matched as substrings.
_ADJECTIVES = """
abrupt amber ancient arid awkward bashful bitter blunt bouncy brisk brittle calm candid cheerful chilly clever
cloudy coarse cosmic crimson crooked curious damp dapper dense distant dizzy dusty eager elegant faint famous fierce
flimsy fluffy fragile frosty gentle giddy gloomy golden graceful grumpy hasty hollow humble idle jagged jolly keen
lavish lazy lively lofty lonely lucid magenta mellow mighty misty modest muddy narrow nimble noisy obscure odd orange
patient placid polite proud purple quaint quiet rapid rigid robust rugged rusty scarlet serene shallow shiny silent
silver sleek slender sober solemn spicy steady stormy sturdy subtle sullen supple swift tender thirsty tidy timid tiny
tough tranquil velvet vivid wary weary wicked witty zealous
"""
_NOUNS = """
acorn anchor apple attic badger bakery balcony banjo barrel basket beacon beetle bicycle biscuit blanket bottle
bridge bucket butter button cabin cactus camera candle canyon carpet castle cellar chapel cherry chimney circus
compass copper cottage cradle crystal curtain cushion dagger desert diamond dolphin donkey dragon drawer engine
falcon feather fiddle forest fossil fountain galaxy garden garlic glacier goblet guitar hammer harbor harvest helmet
hermit honey island jacket jewel jungle kettle kitchen ladder lagoon lantern lemon library lizard lobster locket
magnet mango marble market meadow melon mirror monkey mountain museum napkin needle nickel oasis ocean olive orchard
otter oyster paddle palace panther parcel parrot pebble pencil pepper piano pickle pigeon pillow planet pocket potato
prairie puppet pyramid quarry rabbit raven ribbon river rocket saddle salmon sandal scooter shelter shovel signal
sparrow spider statue summit tablet teapot temple thimble thunder ticket tiger timber tomato tractor trumpet tulip
tunnel turtle umbrella valley vessel village violin voyage wagon walnut walrus willow window winter wizard yogurt zebra
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())

# Prose of a haystack: {a} is an adjective, {n} a noun, {p} a person, {t} a time, {v} a verb, {o} an opinion.
_SENTENCES = (
    "{t}, {p} {v} the {a} {n} near the {n}.",
    "The {n} of the town was {a}, and the {n} was {a} too.",
    "{p} {o} that a {a} {n} is worth more than a {a} {n}.",
    "When the {n} became {a}, {p} {v} it and went back to the {n}.",
    "Nobody in the {n} {v} the {n} {t2}.",
    "It took {p} a long time to see why the {n} looked so {a}.",
    "If you want to build a {n}, you should first learn how a {n} works.",
    "{p} and the others {v} every {n}, but the {a} one was gone.",
    "One reason is that most people never look at a {n} twice.",
    "A {a} idea often begins as a {a} one, like a {n} in a {n}.",
    "{t}, the {n} was so {a} that even {p} {v} it.",
    "There is a story about a {n} that {p} {v} {t2}.",
    "The best way to find a {n} is to stop thinking about it.",
    "{p} {o} that the {n} and the {n} were once the same thing.",
    "Later the {a} {n} was sold, and with the money {p} bought a {n}.",
    "What surprised {p} was how {a} the {n} seemed from a distance.",
)
_CHOICES = {
    "a": ADJECTIVES,
    "n": NOUNS,
    "p": (
        *("my neighbour", "the teacher", "an old friend", "the captain", "her brother", "the painter", "a visitor"),
        *("the engineer", "his aunt", "the gardener", "a student", "the mayor"),
    ),
    "t": (
        *("Last year", "In the evening", "One morning", "After the rain", "Before sunrise", "During the holidays"),
        *("On Sunday", "In those days", "Some weeks later", "At the end of the summer"),
    ),
    "t2": ("in those days", "before the war", "after dinner", "for many years", "at night", "during the festival"),
    "v": ("found", "painted", "described", "admired", "repaired", "lost", "carried", "forgot", "noticed", "measured"),
    "o": ("believed", "wrote", "explained", "claimed", "used to say", "discovered", "suspected"),
}


def prose(seed: int | str) -> Iterator[str]:
    """Yield sentences of generated English without end. A paragraph of four to eight sentences ends with a newline."""
    drawn = random.Random(seed)
    while True:
        for remaining in reversed(range(drawn.randint(4, 8))):
            sentence = _filled(drawn, drawn.choice(_SENTENCES))
            yield sentence[0].upper() + sentence[1:] + ("\n" if remaining == 0 else " ")


def word_pairs(drawn: random.Random, count: int) -> list[str]:
    """Return distinct words such as "amber-lantern" in random order. Raises ValueError for more than there are."""
    most = len(ADJECTIVES) * len(NOUNS)
    if count > most:
        raise ValueError(f"{count:,} distinct words: at most {most:,} are allowed; name a shorter length")
    pairs = drawn.sample(range(most), count)
    return [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]


def _filled(drawn: random.Random, template: str) -> str:
    """Return a template with a random word in every field."""
    parts = template.replace("}", "{").split("{")
    text = "".join(drawn.choice(_CHOICES[part]) if number % 2 else part for number, part in enumerate(parts))
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
