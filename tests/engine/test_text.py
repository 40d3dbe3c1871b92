"""Text of growing sequences: pieces join to what the whole decodes to; stop strings are found where they end first."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.engine.text import IncrementalDecoder, StopMatcher
from tests import tokenizer_files


def pieces_of(tokenizer, ids):
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_byte_level_pieces_join_to_decode_for_any_tokens(byte_level, data):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    assert "".join(pieces_of(byte_level, ids)) == byte_level.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="ab é☃猫🙂hello world!. \n", max_size=30))
def test_byte_fallback_pieces_join_to_decode(byte_fallback, text):
    ids = byte_fallback.encode(text)
    assert "".join(pieces_of(byte_fallback, ids)) == byte_fallback.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_after_a_prompt_pieces_are_what_the_whole_adds_to_it(byte_fallback, data):
    ids = byte_fallback.encode(data.draw(st.text(alphabet="ab é☃猫 hello world!. ", min_size=1, max_size=30)))
    texts = [byte_fallback.decode(ids[:end]) for end in range(len(ids) + 1)]
    whole = [end for end, text in enumerate(texts) if "�" not in text]
    end = data.draw(st.sampled_from(whole))
    decoder = IncrementalDecoder(byte_fallback, prompt=[1, *ids[:end], 2, byte_fallback.vocab_size])
    assert texts[end] + "".join(map(decoder.push, ids[end:])) + decoder.flush() == texts[-1]


@pytest.mark.parametrize("tail", [b"\xef\xbf\xbd", b"\xe2", b"\xff" * 5, b""])
def test_words_after_broken_bytes_or_tokens_without_text_keep_their_space(byte_fallback, tail):
    hello, world = (byte_fallback._tokenizer.token_to_id(f"▁{word}") for word in ("hello", "world"))
    ids = [1, hello, *(3 + byte for byte in tail)]
    decoder = IncrementalDecoder(byte_fallback, prompt=ids)
    assert byte_fallback.decode([*ids, world]) == byte_fallback.decode(ids) + decoder.push(world)


def test_tokens_without_text_and_shown_special_ones_keep_the_space_of_the_next_word(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "▁hello": 2, "▁world": 3, "": 4, "</s>": 6}  # 5 is no token
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = tokenizer_files.byte_fallback().decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    made = Tokenizer.from_directory(tokenizer_files.write(tmp_path, tokenizer))
    for prompt, ids in (([1, 2, 5], [3]), ([1, 2, 4], [3]), ([1, 2], [3, 5, 3]), ([1, 2], [3, 4, 3])):
        decoder = IncrementalDecoder(made, prompt=prompt)
        assert made.decode(prompt) + "".join(map(decoder.push, ids)) + decoder.flush() == made.decode(prompt + ids)
    decoder = IncrementalDecoder(made, hidden={6}, prompt=[1, 2])
    assert [decoder.push(i) for i in (3, 1, 3)] == [" world", "<s>", " world"]


def test_a_prompt_that_ends_within_a_character_leaves_what_follows_alone(byte_fallback):
    first, second = byte_fallback.encode("ü")[-2:]
    decoder = IncrementalDecoder(byte_fallback, prompt=[first])
    assert [decoder.push(first), decoder.push(second), decoder.flush()] == ["", "ü", ""]


def test_characters_are_given_out_with_their_last_byte(byte_level):
    ids = byte_level.encode("é🙂", add_special_tokens=False)
    pieces = pieces_of(byte_level, ids)
    assert "".join(pieces) == "é🙂"
    assert pieces[-1] == "" and pieces[-2].endswith("🙂") and "�" not in "".join(pieces)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_broken_bytes_are_replaced_and_do_not_hold_up_what_follows(request, name):
    tokenizer = request.getfixturevalue(name)
    byte = 0xFF + 3 if name == "byte_fallback" else tokenizer._tokenizer.token_to_id("ÿ")
    a = tokenizer._tokenizer.token_to_id("a")
    pieces = pieces_of(tokenizer, [a, byte, byte, byte, byte, byte, a, a])
    assert "".join(pieces) == "a" + "�" * 5 + "aa"
    assert pieces[-2] == "a" and pieces[-1] == ""


def test_unfinished_character_comes_out_at_the_end(byte_level):
    first_byte = byte_level.encode("🙂")[0]
    assert pieces_of(byte_level, [first_byte]) == ["", "�"]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_special_tokens_and_ids_of_a_padded_vocabulary_give_no_text(request, name):
    tokenizer = request.getfixturevalue(name)
    special = 1
    ids = tokenizer.encode("a é")
    mixed = [special, ids[0], special, tokenizer.vocab_size + 7, *ids[1:-1], special, ids[-1]]
    assert "".join(pieces_of(tokenizer, mixed)) == tokenizer.decode(ids) == "a é"


def first_stop(pieces, stops, min_tokens):
    """(begin, token number) by brute force: the first end, then the longest."""
    text, ends = "", []
    for piece in pieces:
        text += piece
        ends.append(len(text))
    for end in range(1, len(text) + 1):
        token = next(i for i, e in enumerate(ends) if e >= end) + 1
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths and token >= min_tokens:
            return end - max(lengths), token
    return None


def run_matcher(pieces, stops, min_tokens):
    matcher = StopMatcher(stops, min_tokens=min_tokens)
    for i, piece in enumerate(pieces):
        cut = matcher.push(piece, i + 1)
        if cut is not None:
            return cut, i + 1
    return None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    min_tokens=st.integers(0, 8),
)
def test_matcher_agrees_with_brute_force(pieces, stops, min_tokens):
    assert run_matcher(pieces, stops, min_tokens) == first_stop(pieces, stops, min_tokens)


def test_stop_string_across_tokens_is_cut_exactly():
    pieces = ["The an", "swer\nEN", "", "D of it"]
    assert run_matcher(pieces, ["END"], 0) == (len("The answer\n"), 4)


def test_match_completed_before_min_tokens_does_not_count():
    assert run_matcher(["x", "STOP", "y", "STOP", "z"], ["STOP"], 3) == (6, 4)
    assert run_matcher(["x", "STOP"], ["STOP"], 2) == (1, 2)


def test_stop_strings_are_matched_alone_not_joined():
    assert run_matcher(["a", "b", "c"], ["ac", "cb"], 0) is None


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopMatcher(["", "a"])


def test_matcher_reads_each_character_once_however_long_the_stop():
    """A text of near misses: work per character is bounded, so a doubled text is not four times the work."""
    reads = 0

    class Counted(str):
        def __getitem__(self, index):
            nonlocal reads
            reads += 1
            return str.__getitem__(self, index)

    matcher = StopMatcher(["a" * 500 + "b"])
    matcher._patterns = [(Counted(stop), table) for stop, table in matcher._patterns]
    for i in range(5000):
        assert matcher.push("aaa", i + 1) is None
    assert reads < 5 * 15000


def test_special_tokens_are_shown_unless_hidden():
    tokenizer = Tokenizer.from_directory("models/tiny")
    ids = tokenizer.encode("a") + [2, 1] + tokenizer.encode("b") + [0]
    assert all(tokenizer.is_special(token) for token in (0, 1, 2))
    for hidden, expected in ((None, "ab"), ({0}, "a<|user|><|system|>b"), ({0, 2}, "a<|system|>b")):
        decoder = IncrementalDecoder(tokenizer, hidden)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == expected
