"""The tiny model's examples: what is held out stays out, the formats are as documented, a seed gives one stream."""

import random
import re
from itertools import islice
from pathlib import Path

import jinja2
import pytest
from scripts.tiny import data, grammar
from scripts.tiny.tokenizer import CHAT_TEMPLATE, EOS, EOS_ID, VOCAB_SIZE, build_tokenizer

SUM = re.compile(r"(\d+)\+(\d+)=")
SORT = re.compile(r"sort((?: \d)+):")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def text_of(example: data.Example) -> str:
    return "".join(segment.text for segment in example)


@pytest.fixture(scope="module")
def many() -> list[data.Example]:
    rng = random.Random(11)
    sums = list(islice(data.sum_stream(rng), len(data.TRAINED_SUMS)))
    return sums + [data.draw_line(rng) for _ in range(4000)] + [data.draw_passage(rng) for _ in range(4000)]


def test_held_out_sums_are_the_stated_pairs():
    held_out = data.sum_pairs(held_out=True)
    assert held_out == [(a, b) for a in range(100) for b in range(100) if (a + 3 * b) % 11 == 0]
    assert len(held_out) + len(data.TRAINED_SUMS) == 10_000
    assert not set(held_out) & set(data.TRAINED_SUMS)


def test_held_out_tasks_are_never_drawn_in_any_format(many):
    examples = [text_of(example) for example in many]
    sums = [(int(a), int(b)) for text in examples for a, b in SUM.findall(text)]
    lists = [[int(d) for d in digits.split()] for text in examples for digits in SORT.findall(text)]
    assert set(sums) == set(data.TRAINED_SUMS)
    assert not [digits for digits in lists if data.is_held_out_sort(digits)]
    assert {len(digits) for digits in lists} == {1, 2, 3, 4, 5, 6}
    assert any(text.startswith("<|user|>") and SUM.search(text) for text in examples)


def test_every_plus_belongs_to_a_well_formed_sum(many):
    for example in many:
        text = text_of(example)
        assert text.count("+") == len(SUM.findall(text)), text


def test_every_task_is_answered_right(many):
    for example in many:
        for before, after in zip(example, example[1:], strict=False):
            if found := SUM.search(before.text):
                assert after.text == f"{int(found[1]) + int(found[2])}\n{EOS}"
            if found := SORT.search(before.text):
                assert after.text.strip() == " ".join(sorted(found[1].split())) + f"\n{EOS}"


def test_formats_are_the_documented_ones():
    assert data.sum_task(17, 25) == ("17+25=", "42")
    assert data.sort_task([4, 1, 3]) == ("sort 4 1 3:", " 1 3 4")
    assert text_of(data.plain(data.sum_task(5, 7))) == f"5+7=12\n{EOS}"
    page = (Path(__file__).parents[1] / "docs" / "tiny-model.md").read_text()
    assert "17+25=42" in page and "sort 4 1 3: 1 3 4" in page and "(a + 3*b) % 11 == 0" in page


def test_only_answers_enter_the_loss(encode):
    ids, weights = data.encode_example(encode, data.chat([("1+2=", "3"), ("4+0=", "4")], "Answer briefly."))
    learned = [token for token, weight in zip(ids, weights, strict=True) if weight]
    assert learned == encode(f"3\n{EOS}4\n{EOS}")


def test_chats_are_what_the_template_renders():
    environment = jinja2.Environment()
    template = environment.from_string(CHAT_TEMPLATE)
    turns = [("17+25=", "42"), ("sort 4 1 3:", " 1 3 4")]
    messages = [{"role": "system", "content": "Answer briefly."}]
    for prompt, answer in turns:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer + "\n"}]
    whole = template.render(messages=messages, eos_token=EOS)
    assert whole == text_of(data.chat(turns, "Answer briefly."))
    prompt = template.render(messages=messages[:-1], eos_token=EOS, add_generation_prompt=True)
    assert whole.startswith(prompt) and whole.removeprefix(prompt) == f"1 3 4\n{EOS}"
    assert template.render(messages=[{"role": "user", "content": None}], eos_token=EOS) == "<|user|>"


def test_batches_are_the_same_for_the_same_seed_only(encode):
    first, again, other = (next(data.batches(encode, seed)) for seed in (0, 0, 1))
    same = [[(a == b).all() for a, b in zip(x, y, strict=True)] for x, y in zip(first, again, strict=True)]
    assert all(map(all, same))
    assert not (first[0][0] == other[0][0]).all()


def test_examples_fit_into_their_rows(encode):
    rng = random.Random(5)
    assert max(len(encode(text_of(data.draw_passage(rng)))) for _ in range(1500)) <= data.PASSAGE_LEN
    assert max(len(encode(text_of(data.draw_line(rng)))) for _ in range(1500)) <= data.LINE_LEN
    with pytest.raises(ValueError, match="does not fit into rows of 3"):
        data.make_batch(encode, [data.plain(("1+1=", "2"))], length=3)


def test_segments_tokenize_alone_as_they_do_together(encode, many):
    for example in many[::40]:
        assert data.encode_example(encode, example)[0] == encode(text_of(example))


def test_tokenizer_gives_each_digit_a_token_and_any_text_back(tokenizer, encode):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(EOS) == EOS_ID
    assert tokenizer.encode("sort 17 2:").tokens[-5:] == ["1", "7", "Ġ", "2", ":"]
    for text in ("", " a  b ", "12+34=\n\n", "héllo, 日本 😀\x00\t", "<|user|>17<|endoftext|>"):
        assert tokenizer.decode(encode(text), skip_special_tokens=False) == text


def test_tokenizer_is_the_same_every_time(tokenizer):
    assert build_tokenizer().to_str() == tokenizer.to_str()


def test_story_is_about_the_wanted_animal_with_its_article():
    rng = random.Random(9)
    for _ in range(200):
        request, story = data.draw_story_request(rng)
        for animal in grammar.ANIMALS:
            assert f" {animal}." not in request or re.search(rf"\b{animal}\b", story)
        assert not re.search(r"\b[Aa] [aeiou]", request + story)


def test_stories_are_recognised_and_others_are_not():
    rng = random.Random(7)
    for _ in range(500):
        story = grammar.make_story(rng)
        assert grammar.is_story(story), story
    story = next(s for s in iter(lambda: grammar.make_story(rng), None) if "Pip went" in s)
    assert not grammar.is_story(story.replace("Pip went", "Tom went"))
    assert not grammar.is_story(story + " The end.")
