"""A grammar of little stories: drawn at random, and recognised, so that what a model writes can be checked.

A story is one line: someone is in trouble, a friend helps, and all ends well. The hero, the friend, the place and the
thing return later in the story, so a model must look back to tell it right.
"""

import random
import re

OPENINGS = ("Once upon a time", "One day", "Long ago", "One sunny morning", "On a cold winter night")
ANIMALS = ("fox", "bear", "rabbit", "mouse", "owl", "cat", "dog", "frog", "hedgehog", "duck", "goat", "squirrel")
ADJECTIVES = ("small", "brave", "sleepy", "clever", "shy", "starved", "kind", "old", "curious", "merry")
HEROES = ("Pip", "Mila", "Tom", "Luna", "Bo", "Finn", "Otto", "Ivy")
FRIENDS = ("Nora", "Ada", "Rosie", "Max", "Lily", "Sam", "Greta", "Hugo")
PLACES = ("forest", "village", "valley", "garden", "meadow", "castle", "barn", "cave", "harbour", "mill")
THINGS = ("lantern", "apple", "key", "drum", "kite", "book", "bell", "hat", "boat", "blanket", "pie", "feather")
COLOURS = ("red", "blue", "green", "golden", "silver", "white")
SPOTS = ("under a stone", "behind a tree", "in the tall grass", "by the river", "on the roof", "in a deep hole")
FEELINGS = ("sad", "worried", "tired", "lonely")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful calculator.",
    "Answer briefly.",
    "You tell stories and do sums.",
)

_TEMPLATES = (
    "{opening}, a {adj} {animal} named {hero} lost a {colour} {thing}. {friend} the {animal2} looked {spot} and found "
    'the {thing}. "Thank you, {friend}!" said {hero}, and the {animal} hugged the {animal2}.',
    "{opening}, a {adj} {animal} named {hero} went to the {place} to find a {thing}. In the {place} {hero} met "
    '{friend} the {animal2}. "The {thing} is {spot}," said {friend}. '
    "{hero} thanked {friend} and took the {thing} home.",
    "{opening}, a {adj} {animal} named {hero} was {feeling}. {friend} the {animal2} saw it and gave {hero} a {colour} "
    "{thing}. The {thing} made {hero} happy, and {hero} and {friend} played in the {place} until night.",
)
_CHOICES = {
    "opening": OPENINGS,
    "adj": ADJECTIVES,
    "animal": ANIMALS,
    "animal2": ANIMALS,
    "hero": HEROES,
    "friend": FRIENDS,
    "place": PLACES,
    "colour": COLOURS,
    "thing": THINGS,
    "spot": SPOTS,
    "feeling": FEELINGS,
}


def make_story(rng: random.Random, animal: str | None = None) -> str:
    """Draw one story without its closing newline; `animal` fixes the hero's kind."""
    values = {field: rng.choice(words) for field, words in _CHOICES.items()}
    if animal is not None:
        values["animal"] = animal
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
    """Whether `text` (without its closing newline) is a story of this grammar, in which characters and things stay."""
    return any(pattern.fullmatch(text) for pattern in _PATTERNS)
