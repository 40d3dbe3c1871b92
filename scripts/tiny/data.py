"""The examples that the tiny model learns from: sums, sorting, stories, and chats about them.

An example is a list of `Segment`s; only segments with `learned=True` enter the loss. Everything is drawn from a
`random.Random`, so one seed gives one stream of examples. The formats and the held-out rules stand in
`docs/tiny-model.md`; `tests/test_tiny_data.py` checks them.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .grammar import ANIMALS, SYSTEM_PROMPTS, make_story
from .tokenizer import ASSISTANT, EOS, EOS_ID, SYSTEM, USER

MAX_OPERAND = 99

# Rows and tokens per row, for each kind of example in a step. Kinds have batches of their own, so that short sums are
# not padded to the length of a story.
SUM_ROWS, SUM_LEN = 288, 12
LINE_ROWS, LINE_LEN = 48, 32
PASSAGE_ROWS, PASSAGE_LEN = 24, 96


@dataclass(frozen=True)
class Segment:
    """A piece of an example's text; `learned` says whether its tokens are predicted or only read."""

    text: str
    learned: bool


Example = list[Segment]


class Batch(NamedTuple):
    """Padded rows: `tokens` i32[row, position] and `weights` f32[row, position].

    `weights[r, i]` is the weight of predicting token i of row r from the ones before it; 0 for prompts and padding.
    """

    tokens: np.ndarray
    weights: np.ndarray


def is_held_out_sum(a: int, b: int) -> bool:
    """Whether `a+b=` is kept out of training, in every format."""
    return (a + 3 * b) % 11 == 0


def is_held_out_sort(digits: Sequence[int]) -> bool:
    """Whether this list is kept out of training: four digits or more, sum of (i + 1) * digits[i] divisible by 11."""
    return len(digits) >= 4 and sum((i + 1) * d for i, d in enumerate(digits)) % 11 == 0


def sum_pairs(*, held_out: bool) -> list[tuple[int, int]]:
    """All pairs (a, b) with operands 0..99 that are held out, or all that are not."""
    operands = range(MAX_OPERAND + 1)
    return [(a, b) for a in operands for b in operands if is_held_out_sum(a, b) == held_out]


TRAINED_SUMS = sum_pairs(held_out=False)


def sum_task(a: int, b: int) -> tuple[str, str]:
    """Prompt and answer, the answer without its newline: `17+25=` and `42`."""
    return f"{a}+{b}=", str(a + b)


def sort_task(digits: Sequence[int]) -> tuple[str, str]:
    """Prompt and answer, the answer without its newline: `sort 4 1 3:` and ` 1 3 4`."""
    spaced = "".join(f" {d}" for d in digits)
    return f"sort{spaced}:", "".join(f" {d}" for d in sorted(digits))


def draw_sum(rng: random.Random) -> tuple[str, str]:
    return sum_task(*rng.choice(TRAINED_SUMS))


def draw_digits(rng: random.Random, *, held_out: bool = False) -> list[int]:
    """One to six digits, longer lists more often, held out or not as asked (held-out lists have four or more)."""
    while True:
        size = rng.choice((4, 5, 6) if held_out else (1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6))
        digits = [rng.randrange(10) for _ in range(size)]
        if is_held_out_sort(digits) == held_out:
            return digits


def draw_sort(rng: random.Random) -> tuple[str, str]:
    return sort_task(draw_digits(rng))


def story_prompt(animal: str) -> str:
    """A user's request for a story about an animal."""
    return f"Tell me a story about {'an' if animal[0] in 'aeiou' else 'a'} {animal}."


def draw_story_request(rng: random.Random) -> tuple[str, str]:
    """A user's request and a story that fulfils it."""
    if rng.random() < 0.2:
        return "Tell me a story.", make_story(rng)
    animal = rng.choice(ANIMALS)
    return story_prompt(animal), make_story(rng, animal)


def plain(task: tuple[str, str]) -> Example:
    """Prompt, answer, newline, end."""
    prompt, answer = task
    return [Segment(prompt, False), Segment(f"{answer}\n{EOS}", True)]


def chat(turns: Iterable[tuple[str, str]], system: str | None = None) -> Example:
    """The turns as the chat template renders them; every answer is a target."""
    segments = [] if system is None else [Segment(f"{SYSTEM}{system}", False)]
    for prompt, answer in turns:
        segments.append(Segment(f"{USER}{prompt}{ASSISTANT}", False))
        segments.append(Segment(f"{answer.strip()}\n{EOS}", True))
    return segments


def draw_line(rng: random.Random) -> Example:
    """A short example: sorting, or one question of a chat."""
    kind = rng.random()
    if kind < 0.6:
        return plain(draw_sort(rng))
    return chat([draw_sum(rng) if kind < 0.8 else draw_sort(rng)])


def draw_passage(rng: random.Random) -> Example:
    """A long example: a story, a chat about a story, or a chat of several turns, with or without a system text."""
    kind = rng.random()
    if kind < 0.45:
        return [Segment(f"{make_story(rng)}\n{EOS}", True)]
    system = None
    if rng.random() < 0.5:
        system = rng.choice(SYSTEM_PROMPTS)
    if kind < 0.65:
        return chat([draw_story_request(rng)], system)
    if rng.random() < 0.3:
        # Any sentence may stand in a system message; the model must read past it.
        system = rng.choice(make_story(rng).split(". ")).rstrip(".") + "."
    num_turns = rng.choice((1, 2) if system else (2, 3))
    turns = [draw_sum(rng) if rng.random() < 0.6 else draw_sort(rng) for _ in range(num_turns)]
    return chat(turns, system)


def sum_stream(rng: random.Random) -> Iterator[Example]:
    """Every trained pair once per epoch, in a new random order each time."""
    while True:
        for pair in rng.sample(TRAINED_SUMS, len(TRAINED_SUMS)):
            yield plain(sum_task(*pair))


def encode_example(encode: Callable[[str], list[int]], example: Example) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of one example; its first token is never predicted, as nothing stands before it."""
    ids: list[int] = []
    weights: list[float] = []
    for segment in example:
        piece = encode(segment.text)
        ids += piece
        weights += [float(segment.learned)] * len(piece)
    weights[0] = 0.0
    return ids, weights


def make_batch(encode: Callable[[str], list[int]], examples: Sequence[Example], *, length: int) -> Batch:
    """Pad examples to `length` tokens.

    Raises: ValueError if an example does not fit.
    """
    tokens = np.full((len(examples), length), EOS_ID, np.int32)
    weights = np.zeros((len(examples), length), np.float32)
    for row, example in enumerate(examples):
        ids, learned = encode_example(encode, example)
        if len(ids) > length:
            raise ValueError(f"example of {len(ids)} tokens does not fit into rows of {length}; raise the row length")
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids)] = learned
    return Batch(tokens, weights)


def batches(encode: Callable[[str], list[int]], seed: int) -> Iterator[list[Batch]]:
    """Batches of sums, lines and passages for each step; one seed gives one stream."""
    rng = random.Random(seed)
    sums = sum_stream(rng)

    while True:
        yield [
            make_batch(encode, [next(sums) for _ in range(SUM_ROWS)], length=SUM_LEN),
            make_batch(encode, [draw_line(rng) for _ in range(LINE_ROWS)], length=LINE_LEN),
            make_batch(encode, [draw_passage(rng) for _ in range(PASSAGE_ROWS)], length=PASSAGE_LEN),
        ]
