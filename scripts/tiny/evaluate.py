"""Accuracy of the tiny model: plain greedy decoding with the uncached forward, one full forward per token."""

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from tokenizers import Tokenizer

from levanter_infer.axes import POSITION
from levanter_infer.models.decoder import DecoderModel

from .data import Example, chat, draw_digits, plain, sort_task, story_prompt, sum_task
from .grammar import ANIMALS, HEROES, is_story, make_story
from .tokenizer import EOS, EOS_ID

_ROWS = 256


@jax.jit
def _next_tokens(model: DecoderModel, tokens: NamedArray, lens: jax.Array) -> jax.Array:
    """The likeliest next token of each row. tokens: i32[row, position]; lens: i32[row], tokens that count."""
    logits = model(tokens).array
    last = jnp.take_along_axis(logits, (lens - 1)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(last, axis=-1).astype(jnp.int32)


def greedy(model: DecoderModel, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """The greedy continuation of each prompt, with its end token if any."""
    texts = []
    for start in range(0, len(prompts), _ROWS):
        texts += _greedy_rows(model, tokenizer, prompts[start : start + _ROWS], max_tokens)
    return texts


def _greedy_rows(model: DecoderModel, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int) -> list[str]:
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
    starts = np.array([len(row) for row in ids], np.int32)
    width = int(starts.max()) + max_tokens
    tokens = np.full((len(ids), width), EOS_ID, np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    axes = (Axis("row", len(ids)), Axis(POSITION, width))
    lens, running, rows = starts.copy(), np.ones(len(ids), bool), np.arange(len(ids))
    for _ in range(max_tokens):
        chosen = np.asarray(_next_tokens(model, NamedArray(jnp.asarray(tokens), axes), jnp.asarray(lens)))
        tokens[rows[running], lens[running]] = chosen[running]
        lens[running] += 1
        running &= chosen != EOS_ID
        if not running.any():
            break
    # An answer that never ended shows as one without its end token.
    spans = [tokens[i, starts[i] : lens[i]].tolist() for i in range(len(ids))]
    return tokenizer.decode_batch(spans, skip_special_tokens=False)


def _share_exact(model: DecoderModel, tokenizer: Tokenizer, examples: Sequence[Example], max_tokens: int) -> float:
    """Share of examples whose last segment the model writes exactly, end token included."""
    answers = greedy(model, tokenizer, [_before_last(example) for example in examples], max_tokens)
    return float(np.mean([a == example[-1].text for a, example in zip(answers, examples, strict=True)]))


def share_of_sums(
    model: DecoderModel, tokenizer: Tokenizer, pairs: Sequence[tuple[int, int]], *, as_chat: bool = False
) -> float:
    """Share of these sums answered right, as plain lines or as a user's messages."""
    tasks = [sum_task(a, b) for a, b in pairs]
    return _share_exact(model, tokenizer, [chat([task]) if as_chat else plain(task) for task in tasks], max_tokens=5)


def share_of_sorts(model: DecoderModel, tokenizer: Tokenizer, *, count: int, as_chat: bool = False) -> float:
    """Share of `count` held-out lists (four to six digits) sorted right."""
    rng = random.Random(2)
    tasks = [sort_task(draw_digits(rng, held_out=True)) for _ in range(count)]
    return _share_exact(model, tokenizer, [chat([task]) if as_chat else plain(task) for task in tasks], max_tokens=15)


def share_of_stories(model: DecoderModel, tokenizer: Tokenizer, *, count: int) -> float:
    """Share of `count` stories, each begun up to the word after the hero's name, that end within the grammar."""
    rng = random.Random(3)
    prefixes = []
    for _ in range(count):
        words = make_story(rng).split(" ")
        hero = next(i for i, word in enumerate(words) if word in HEROES)
        prefixes.append(" ".join(words[: hero + 2]))
    stories = [b + rest for b, rest in zip(prefixes, greedy(model, tokenizer, prefixes, 80), strict=True)]
    return float(np.mean([_is_ended_story(story) for story in stories]))


def share_of_requests(model: DecoderModel, tokenizer: Tokenizer) -> float:
    """Share of animals that get a story of the grammar about themselves when a user requests one."""
    requests = [story_prompt(animal) for animal in ANIMALS]
    stories = greedy(model, tokenizer, [chat_prompt(request) for request in requests], 80)
    about = [f" {animal} named " in story for animal, story in zip(ANIMALS, stories, strict=True)]
    return float(np.mean([_is_ended_story(story) and ok for story, ok in zip(stories, about, strict=True)]))


def _is_ended_story(text: str) -> bool:
    ending = f"\n{EOS}"
    return text.endswith(ending) and is_story(text.removesuffix(ending))


def chat_prompt(message: str) -> str:
    """One user's message as the chat template renders it."""
    return _before_last(chat([(message, "")]))


def _before_last(example: Example) -> str:
    return "".join(segment.text for segment in example[:-1])
