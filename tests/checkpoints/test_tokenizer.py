"""The tokenizer reads what an HF directory says, as transformers does, and names what is wrong with one."""

import base64
import hashlib
import json
import shutil
import threading
import time

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.checkpoints.tokenizer_limits import _growth, growth
from tests import tokenizer_files
from tests.golden_cases import GOLDEN_DIR
from tests.tokenizer_files import CHATML, byte_fallback, byte_level, llama2, write

TEXTS = ["hello world", "the cat, the mat.", "  two  spaces\n\tand lines ", "ëé ☃ 猫 🙂", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_return_the_text(tmp_path, text):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer, text = Tokenizer.from_directory("models/tiny"), "17+25=42 and some words, " * 8000
    encoding, ticks = threading.Event(), []

    def tick():
        while not encoding.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    ids = tokenizer.encode(text)
    end = time.perf_counter()
    encoding.set()
    thread.join()
    assert len(ids) > 50_000 and ids == tokenizer._tokenizer.encode(text).ids
    assert len([each for each in ticks if begin < each < end]) > 10


def test_post_processor_adds_bos_only_when_special_tokens_are_wanted(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level(bos=True)))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.decode([0, *plain]) == "hello"
    assert tokenizer.decode([0, *plain], skip_special_tokens=False) == "<|bos|>hello"


def test_special_tokens_written_in_a_prompt_count_as_such(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    assert tokenizer.encode("<|bos|>hello") == [0, *tokenizer.encode("hello")]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    "config, warns",
    [
        ({"tokenizer_class": "LlamaTokenizer"}, ()),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, (False,)),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, (True,)),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": False}, (False,)),
        ({}, ()),
    ],
)
def test_tokenizer_json_says_what_encloses_a_prompt(tmp_path, caplog, config, warns, bos):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config}
    tokenizer = Tokenizer.from_directory(write(tmp_path, llama2(bos=bos), tokenizer_config=config))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *plain] if bos else plain
    says = f"but tokenizer.json adds {'one' if bos else 'none'}; the latter is followed, as transformers 5 does"
    assert [record.getMessage().endswith(says) for record in caplog.records] == [True] * (bos in warns)


def test_bos_of_code_llama_must_be_a_token(tmp_path):
    config = {"tokenizer_class": "CodeLlamaTokenizer", "bos_token": "<nothing>"}
    with pytest.raises(ValueError, match="begin with bos_token, which is '<nothing>' and no token of tokenizer.json"):
        Tokenizer.from_directory(write(tmp_path, byte_fallback(), tokenizer_config=config))


GOLDEN = json.loads((GOLDEN_DIR / "tokenizers.json").read_text())


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_tokens_and_texts_equal_those_of_transformers(tmp_path, name):
    case = GOLDEN["cases"][name]
    made = {"llama2": llama2, "llama2_plain": lambda: llama2(bos=False), "byte_level": lambda: byte_level(bos=True)}
    if case["made"] in made:
        made[case["made"]]().save(str(tmp_path / "tokenizer.json"))
    for file, content in case["files"].items():
        (tmp_path / file).write_text(json.dumps(content))
    tokenizer = Tokenizer.from_directory(tmp_path)
    for i, text in enumerate(GOLDEN["texts"]):
        ids = tokenizer.encode(text)
        assert ids == case["ids"][i], text
        assert tokenizer.encode(text, add_special_tokens=False) == case["plain"][i], text
        assert tokenizer.decode(ids) == case["decoded"][i], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["whole"][i], text


STEPS = {
    "string": [normalizers.Replace("a", "a" * 1000)] * 4,
    "regex": [normalizers.Replace(Regex(""), "a" * 100)] * 3,
    "forms": [normalizers.NFKD(), normalizers.Prepend("x" * 3000)],
    "bytes": [normalizers.ByteLevel()] * 40,
}


def with_normalizer(raw, steps):
    raw.normalizer = normalizers.Sequence(list(steps))
    return raw


@pytest.mark.parametrize("name", STEPS)
def test_normalizers_that_multiply_a_text_are_refused(tmp_path, name):
    with pytest.raises(
        ValueError, match="normalizers and pre-tokenizers can make a text .* times as long; expected at"
    ):
        Tokenizer.from_directory(write(tmp_path, with_normalizer(byte_fallback(), STEPS[name])))


def test_pre_tokenizers_and_decoders_that_multiply_are_refused(tmp_path):
    raw = byte_level()
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 40)
    with pytest.raises(ValueError, match="normalizers and pre-tokenizers can make"):
        Tokenizer.from_directory(write(tmp_path / "a", raw))
    raw = byte_level()
    raw.decoder = decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 4)
    with pytest.raises(ValueError, match=r"its decoders can make a text 1e\+12 times as long"):
        Tokenizer.from_directory(write(tmp_path / "b", raw))


def test_table_of_sentencepiece_that_multiplies_is_refused():
    table = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"b" * 20_000 + b"\0").decode()
    assert _growth({"type": "Precompiled", "precompiled_charsmap": table}) == 20_000


@pytest.mark.parametrize(
    "step, text",
    [(each, text) for steps in STEPS.values() for each in steps[:2] for text in ("a", "aba", "ﷺ", "é猫İ", "  a")]
    + [(normalizers.BertNormalizer(), text) for text in ("猫", "ΐ", "İ", "\u1fb7")]
    + [
        (normalizers.Lowercase(), "İ"),
        (normalizers.NFKC(), "ﷺ"),
        (normalizers.NFD(), "\u1fb7"),
        (normalizers.NFC(), "\U0001d160"),
    ],
)
def test_no_step_makes_more_of_a_text_than_its_bound(step, text):
    assert len(step.normalize_str(text).encode()) <= growth(step) * len(text.encode())


def test_prompt_that_steps_could_make_too_long_is_refused_by_its_length(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, with_normalizer(byte_fallback(), STEPS["string"][:1])))
    assert len(tokenizer.encode("a")) == 1000
    with pytest.raises(ValueError, match="the prompt has 40000 bytes, of which .* expected at most 33554 bytes"):
        tokenizer.encode("a" * 40_000)
    raw = byte_level()
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "a" * 4000)])
    tokenizer = Tokenizer.from_directory(write(tmp_path / "b", raw))
    assert len(tokenizer.decode(tokenizer.encode("a"))) == 4000
    with pytest.raises(ValueError, match="the text of the tokens has 10000 bytes"):
        tokenizer.decode(tokenizer.encode("a") * 5000)


def test_known_normalizers_leave_room_for_long_prompts():
    assert growth(llama2().normalizer) == 12
    assert growth(normalizers.NFC()) == 3
    assert growth(None) == growth(pre_tokenizers.Whitespace()) == 1


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=100)
    tokenizer = Tokenizer.from_directory(write(tmp_path, raw))
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"generation_config": {"eos_token_id": [2, 1, 2]}, "config": {"eos_token_id": 0}}, (2, 1)),
        ({"generation_config": {"bos_token_id": 0}, "config": {"eos_token_id": 0}}, (0,)),
        ({"generation_config": {"eos_token_id": [2]}, "tokenizer_config": {"eos_token": "<|eos|>"}}, (2,)),
        ({"config": {"text_config": {"eos_token_id": [2, 0]}}, "tokenizer_config": {"eos_token": "<|eos|>"}}, (2, 0)),
        ({"config": {"eos_token_id": 1, "text_config": {"eos_token_id": 2}}}, (1,)),
        ({"tokenizer_config": {"eos_token": "<|eos|>"}}, (1,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        ({}, ()),
    ],
)
def test_end_of_sequence_comes_from_the_first_file_that_has_it(tmp_path, files, expected):
    assert Tokenizer.from_directory(write(tmp_path, byte_level(), **files)).eos_token_ids == expected


def test_vocab_size_counts_added_tokens_and_larger_ids_are_an_error(tmp_path):
    raw = byte_level()
    tokenizer = Tokenizer.from_directory(write(tmp_path, raw))
    assert tokenizer.vocab_size == raw.get_vocab_size(with_added_tokens=True)
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the tokenizer's vocabulary"):
            tokenizer.decode([0, bad])


def test_half_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(ValueError, match="expected a string"):
        tokenizer.encode(3)  # type: ignore[arg-type]


def test_token_bytes_agree_with_the_library(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    assert tokenizer.is_byte_level
    for i in range(tokenizer.vocab_size):
        text = tokenizer.decode([i], skip_special_tokens=False)
        assert tokenizer.token_bytes(i).decode(errors="replace") == text
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert not Tokenizer.from_directory(write(tmp_path / "b", byte_fallback())).is_byte_level


MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"tokenizer_config": {"chat_template": CHATML}}, RENDERED),
        (
            {
                "tokenizer_config": {
                    "chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
                }
            },
            RENDERED,
        ),
        ({"tokenizer_config": {"chat_template": CHATML}, "chat_template": "file {{ messages[0].content }}"}, "file hi"),
        (
            {
                "tokenizer_config": {
                    "bos_token": {"content": "<|bos|>"},
                    "chat_template": "{{ bos_token }}{{ pad_token }}",
                },
                "special_tokens_map": {"bos_token": "no", "pad_token": "pad"},
            },
            "<|bos|>pad",
        ),
    ],
)
def test_chat_template_is_found_where_models_have_it(tmp_path, files, expected):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level(), **files))
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES) == expected


def test_chat_without_the_generation_prompt(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level(), chat_template=CHATML))
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_messages_without_a_template_are_refused(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template.*give a prompt instead"):
        tokenizer.apply_chat_template(MESSAGES)


def test_fingerprint_depends_on_every_file(tmp_path):
    one = Tokenizer.from_directory(write(tmp_path / "a", byte_level(), tokenizer_config={}))
    same = Tokenizer.from_directory(write(tmp_path / "b", byte_level(), tokenizer_config={}))
    other = Tokenizer.from_directory(write(tmp_path / "c", byte_level(), tokenizer_config={}, chat_template="x"))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert len(one.fingerprint) == len(hashlib.sha256().hexdigest())


def in_config(tmp_path, changes) -> Tokenizer:
    """The tokenizer of models/tiny with other keys in tokenizer_config.json; `changes` gets those that are there."""
    shutil.copytree("models/tiny", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "tokenizer_config.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | changes(before["added_tokens_decoder"])))
    return Tokenizer.from_directory(tmp_path)


def token(content: str, **flags: bool) -> dict:
    return dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False) | {"content": content, **flags}


@pytest.mark.parametrize(
    ("changes", "text", "ids", "decoded"),
    [
        (
            lambda t: {"added_tokens_decoder": t | {"640": token("<|new|>", special=True)}},
            "a<|new|>b",
            [68, 640, 69],
            "ab",
        ),
        (
            lambda t: {"added_tokens_decoder": t | {"640": token("<|new|>", special=False)}},
            "a<|new|>b",
            [68, 640, 69],
            "a<|new|>b",
        ),
        (
            lambda t: {"added_tokens_decoder": t | {"2": t["2"] | {"lstrip": True, "rstrip": True}}},
            "a <|user|> b",
            [68, 2, 69],
            "ab",
        ),
        (lambda t: {"additional_special_tokens": ["a"]}, "cab", [70, 68, 69], "cb"),
        (lambda t: {"extra_special_tokens": ["a"]}, "cab", [70, 68, 69], "cb"),
        (lambda t: {"split_special_tokens": True}, "a<|user|>", [68, 31, 95, 88, 86, 286, 95, 33], "a<|user|>"),
    ],
)
def test_tokens_of_the_configuration_are_those_of_transformers(tmp_path, changes, text, ids, decoded):
    """Ids as transformers 5.24 gives them."""
    tokenizer = in_config(tmp_path, changes)
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == decoded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "added_tokens_decoder is \\[1\\]; expected token ids and their tokens"),
        ({"x": token("a")}, "has the key 'x'; expected a token id"),
        ({"700": "a"}, "has 'a'; expected a mapping with the token's content"),
        ({"700": token("b", special=1)}, "expected true or false for single_word"),  # type: ignore[arg-type]
    ],
)
def test_added_tokens_that_are_none_are_named(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        in_config(tmp_path, lambda _: {"added_tokens_decoder": given})


def test_an_added_token_with_another_id_is_warned_of(tmp_path, caplog):
    tokenizer = in_config(tmp_path, lambda given: {"added_tokens_decoder": given | {"700": token("<|new|>")}})
    assert tokenizer.encode("a<|new|>") == [68, 640]
    assert "has '<|new|>' as token 700, and with tokenizer.json it is 640" in caplog.text


def test_a_special_token_cannot_replace_what_a_template_is_rendered_with(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    plain = Tokenizer.from_directory("models/tiny").apply_chat_template(chat)
    tokenizer = in_config(tmp_path, lambda _: {"extra_special_tokens": {"messages": "<|user|>", "tools": "<|user|>"}})
    assert tokenizer.apply_chat_template(chat) == plain


def break_file(directory, name, content):
    (directory / name).write_bytes(content)


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("tokenizer.json", b"", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds a list; expected a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is int, expected a string"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "a"}]}',
            "chat_template is NoneType, expected a string",
        ),
        ("generation_config.json", b'{"eos_token_id": "</s>"}', "eos_token_id is '</s>'; expected a token id"),
        ("generation_config.json", b'{"eos_token_id": "' + b"x" * 10**5 + b'"}', r"eos_token_id is 'x{79}; expected"),
        (
            "generation_config.json",
            b'{"eos_token_id": [' + b"1, " * 64 + b"2]}",
            "65 eos_token_id; expected at most 64",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": [1]}]}',
            "chat_template is NoneType, expected a string",
        ),
        ("generation_config.json", b'{"eos_token_id": [true]}', "eos_token_id is .True.; expected a token id"),
        ("config.json", b"nope", "config.json is not JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)
def test_broken_file_is_named(tmp_path, name, content, match):
    directory = write(tmp_path, byte_level())
    break_file(directory, name, content)
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_directory(directory)


def test_tokenizer_that_panics_is_a_value_error(tmp_path):
    directory = write(tmp_path, byte_level())
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "x" * 10  # longer than its tokens
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_directory(directory)


def test_missing_directory_and_missing_file_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        Tokenizer.from_directory(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no tokenizer.json; save the tokenizer with"):
        Tokenizer.from_directory(tmp_path)


def test_written_directory_is_what_the_library_itself_reads(tmp_path):
    directory = tokenizer_files.write(tmp_path, byte_level())
    raw = RawTokenizer.from_file(str(directory / "tokenizer.json"))
    ours = Tokenizer.from_directory(directory)
    assert all(ours.encode(text) == raw.encode(text).ids for text in TEXTS)
    assert json.loads((directory / "tokenizer.json").read_text())["decoder"]["type"] == "ByteLevel"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "config.json"]
)
def test_links_out_of_the_directory_are_refused(tmp_path, name):
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory, byte_level())
    (tmp_path / "private").write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=f"{name} links to .*/private, outside the model directory"):
        Tokenizer.from_directory(directory)


def test_special_token_that_cannot_enclose_a_prompt_is_named(tmp_path):
    raw = byte_fallback()
    raw.add_special_tokens(["b:1"])
    config = {"tokenizer_class": "CodeLlamaTokenizer", "bos_token": "b:1"}
    with pytest.raises(ValueError, match="tokenizer_config.json: bos_token cannot enclose a prompt: "):
        Tokenizer.from_directory(write(tmp_path, raw, tokenizer_config=config))
