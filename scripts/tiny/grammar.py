"""A grammar of little stories: drawn at random, and recognised, so that what a model writes can be checked.

A story is one line: someone goes somewhere, meets a trouble, is helped by a friend, and all ends well. The hero, the
friend and the wanted thing return later in the story, so a model must look back to tell it right.
"""

import random
import re

OPENINGS = ("Once upon a time", "One day", "Long ago", "One sunny morning", "On a cold winter night")
ANIMALS = ("fox", "bear", "rabbit", "mouse", "owl", "cat", "dog", "frog", "hedgehog", "duck", "goat", "squirrel")
ADJECTIVES = ("small", "brave", "sleepy", "clever", "shy", "hungry", "kind", "old", "curious", "merry")
NAMES = ("Pip", "Mila", "Tom", "Luna", "Bo", "Nora", "Finn", "Ada", "Otto", "Rosie", "Max", "Ivy")
PLACES = ("forest", "village", "valley", "garden", "meadow", "castle", "barn", "cave", "harbour", "mill")
THINGS = ("lantern", "apple", "key", "drum", "kite", "book", "bell", "hat", "boat", "blanket", "pie", "feather")
COLOURS = ("red", "blue", "green", "golden", "silver", "white")
SPOTS = ("under a stone", "behind a tree", "in the tall grass", "by the river", "on the roof", "in a deep hole")
FEELINGS = ("sad", "worried", "tired", "lonely")
LESSONS = (
    "a friend is worth more than gold",
    "asking for help is brave",
    "it is good to share",
    "slow and steady is fine",
    "a kind word costs nothing",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful calculator.",
    "Answer briefly.",
    "You tell stories and do sums.",
)

_TEMPLATES = (
    "{opening}, a {adj} {animal} named {hero} lived in a {place}. {hero} had a {colour} {thing} and loved it dearly. "
    "But the {thing} was lost, and {hero} felt {feeling}. {friend} the {animal2} looked {spot} and found the {thing}. "
    '"Thank you, {friend}!" said {hero}. They learned that {lesson}.',
    "{opening}, a {adj} {animal} named {hero} walked to the {place}. {hero} wanted to find a {colour} {thing}. "
    'A {adj2} {animal2} named {friend} said, "Look {spot}!" There it was, and {hero} shared the {thing} with '
    "{friend}. They learned that {lesson}.",
    "{opening}, there was a {adj} {animal} in the {place}. The name of the {animal} was {hero}, and {hero} was "
    '{feeling}. Then {friend} the {animal2} came and brought a {colour} {thing}. "I found it {spot}," said {friend}. '
    "From that day on {hero} and {friend} were friends, and {hero} knew that {lesson}.",
)
_CHOICES = {
    "opening": OPENINGS,
    "adj": ADJECTIVES,
    "adj2": ADJECTIVES,
    "animal": ANIMALS,
    "animal2": ANIMALS,
    "hero": NAMES,
    "friend": NAMES,
    "place": PLACES,
    "colour": COLOURS,
    "thing": THINGS,
    "spot": SPOTS,
    "feeling": FEELINGS,
    "lesson": LESSONS,
}


def make_story(rng: random.Random, animal: str | None = None) -> str:
    """Draw one story without its closing newline; `animal` fixes the hero's kind.

    The friend never bears the hero's name.
    """
    values = {field: rng.choice(words) for field, words in _CHOICES.items()}
    if animal is not None:
        values["animal"] = animal
    values["friend"] = rng.choice([name for name in NAMES if name != values["hero"]])
    # "a" before a consonant only: "an old owl" needs the other article.
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", rng.choice(_TEMPLATES).format(**values))


def _pattern(template: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def field(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{'|'.join(map(re.escape, _CHOICES[name]))})"

    quoted = re.escape(template).replace(r"\{", "{").replace(r"\}", "}").replace(r"\ ", " ")
    return re.compile(re.sub(r"\{(\w+)\}", field, re.sub(r"\b([Aa]) ", r"\1n? ", quoted)))


_PATTERNS = tuple(_pattern(template) for template in _TEMPLATES)


def is_story(text: str) -> bool:
    """Whether `text` (without its closing newline) is a story of this grammar: hero, friend and thing stay the same."""
    matches = [pattern.fullmatch(text) for pattern in _PATTERNS]
    return any(m is not None and m["hero"] != m["friend"] for m in matches)
