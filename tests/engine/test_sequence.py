"""Text and tokens of a sequence: text that joins to what the tokens decode to, and stops where they count."""

import numpy as np
import pytest

from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.text import IncrementalDecoder, StopMatcher


def sequence(tokenizer: Tokenizer, **params) -> SampleState:
    sampling = SamplingParams(**params)
    group = RequestState(id="0", prompt=None, prompt_token_ids=[1], params=sampling, seed=0, max_len=64)
    made = SampleState(request=group, index=0, decoder=IncrementalDecoder(tokenizer))
    if sampling.stop:
        made.matcher = StopMatcher(sampling.stop, min_tokens=sampling.min_tokens)
    group.sequences.append(made)
    return made


def extend(subject: SampleState, ids: list[int]) -> None:
    zeros = np.zeros(len(ids), np.float32)
    subject.extend(np.asarray(ids), zeros, zeros, None, [0] * len(ids))


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_stop_string_counts_from_its_min_tokens_on(byte_level, min_tokens, rounds):
    b = byte_level.encode("b")
    assert len(b) == 1
    subject = sequence(byte_level, stop="b", min_tokens=min_tokens)
    for _ in range(rounds):
        if subject.finish_reason is None:
            extend(subject, b * (6 // rounds))
    assert (subject.finish_reason, subject.stop_reason) == ("stop", "b")
    assert len(subject.token_ids) == max(min_tokens, 1) and subject.text == "b" * (len(subject.token_ids) - 1)


def test_a_text_that_ends_within_a_character_shows_all_of_its_bytes(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        whole = tokenizer.encode("a 🙂", add_special_tokens=False)
        for end in range(1, len(whole) + 1):
            subject = sequence(tokenizer)
            extend(subject, whole[:end])
            subject.finish("length")
            assert subject.completion().text == tokenizer.decode(whole[:end])
    assert subject.text == "a 🙂"


def test_text_at_the_end_is_what_the_tokens_decode_to(byte_level):
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, byte_level.vocab_size, 12).tolist()
        subject = sequence(byte_level)
        extend(subject, ids)
        subject.finish("length")
        assert subject.completion().text == byte_level.decode(ids)


def test_the_longest_stop_that_ended_it_is_named(byte_level):
    subject = sequence(byte_level, stop_token_ids=[7, [5, 6, 7], [6, 7], [5, 7]])
    extend(subject, [5, 6, 7])
    subject.finish("stop")
    assert subject.completion().stop_reason == (5, 6, 7)
    other = sequence(byte_level, stop_token_ids=[8])
    extend(other, [5, 6])
    other.finish("length")
    assert other.completion().stop_reason is None
    later = other.snapshot()
    later.take_over(subject)
    assert later.stop_reason == (5, 6, 7)


def test_each_token_has_as_many_of_the_likeliest_as_were_asked_for_with_their_log_probabilities(byte_level):
    subject = sequence(byte_level, logprobs=2)
    top = np.asarray([[9, 4, 7], [4, 3, 1]]), np.asarray([[-0.5, -1.0, -1.5], [-0.25, -2.0, -3.0]], np.float32)
    zeros = np.zeros(2, np.float32)
    subject.extend(np.asarray([9, 3]), zeros, zeros, top, [0, 0])
    assert subject.top_logprobs == [{9: -0.5, 4: -1.0}, {4: -0.25, 3: -2.0}]
