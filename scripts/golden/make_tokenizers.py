"""Write tests/golden/tokenizers.json: token ids and texts that transformers' tokenizers give for small files.

Run from the repository root in the environment of make_chats.py:

    .venv-tok/bin/python scripts/golden/make_tokenizers.py

Some files are those that transformers itself saves, others are in the form of Llama 2's.
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer, LlamaTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.tokenizer_files import byte_level, llama2, write

TEXTS = [
    *("", " ", "hello", " hello", "  hello", "hello  hello ", "[INST] x [/INST]", "[INST]x[/INST] x", "<s>hello</s>"),
    *(
        "hello</s> hello",
        "</s>",
        "<s> x<s>x",
        "\n x",
        "é猫 🙂",
        "▁x",
        "a<unk>b",
        "<|bos|>hello <|eos|>",
        "hello\thello\n",
    ),
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SAVED = {
    "saved": {},
    "saved_no_bos": {"add_bos_token": False},
    "saved_bos": {"add_bos_token": True},
    "saved_eos": {"add_eos_token": True},
    "saved_both": {"add_bos_token": True, "add_eos_token": True},
    "saved_legacy": {"legacy": True, "add_bos_token": True},
    "saved_no_prefix": {"add_prefix_space": False, "add_bos_token": True},
}
LLAMA = {**NAMED, "tokenizer_class": "LlamaTokenizer"}
FAST = {**NAMED, "tokenizer_class": "PreTrainedTokenizerFast"}
WRITTEN = {
    "llama2": ({**LLAMA, "add_bos_token": True, "add_eos_token": False, "legacy": False}, {"model_type": "llama"}),
    "llama2_no_config": ({**LLAMA, "add_bos_token": True, "add_eos_token": False, "legacy": False}, None),
    "llama2_legacy": ({**LLAMA, "legacy": True}, {"model_type": "llama"}),
    "llama2_fast": ({**NAMED, "tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "llama"}),
    "llama2_class_in_model": (NAMED, {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}),
    "llama2_no_names": ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, None),
    "llama2_null_bos": ({**LLAMA, "bos_token": None, "add_bos_token": True}, None),
    "llama2_no_bos": ({**LLAMA, "add_bos_token": False}, None),
    "llama2_eos": ({**LLAMA, "add_eos_token": True}, None),
    "llama2_no_prefix": ({**LLAMA, "add_prefix_space": False}, None),
    "code_llama": ({**NAMED, "tokenizer_class": "CodeLlamaTokenizer"}, None),
    "code_llama_no_bos": ({**NAMED, "tokenizer_class": "CodeLlamaTokenizer", "add_bos_token": False}, None),
    "mistral": ({**LLAMA, "add_bos_token": True}, {"model_type": "mistral"}),
    "mixtral": (LLAMA, {"model_type": "mixtral"}),
    "qwen3": (LLAMA, {"model_type": "qwen3"}),
    "fast": (FAST, {"model_type": "llama"}),
    "fast_no_bos": ({**FAST, "add_bos_token": False}, {"model_type": "llama"}),
    "fast_eos": ({**FAST, "add_eos_token": True}, None),
    "no_class": (NAMED, {"model_type": "llama"}),
}
BYTE_LEVEL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
BYTES = {
    "bytes": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "bytes_llama": {"tokenizer_class": "LlamaTokenizerFast"},
    "bytes_llama_no_bos": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False},
    "bytes_llama_both": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True},
}


def main() -> None:
    cases = {}
    with tempfile.TemporaryDirectory() as root:
        raw = json.loads(llama2().to_str())["model"]
        for name, arguments in SAVED.items():
            merges = [tuple(merge) for merge in raw["merges"]]
            made = LlamaTokenizer(vocab=raw["vocab"], merges=merges, **arguments)
            made.save_pretrained(Path(root, name))
            cases[name] = case(Path(root, name), "saved")
        for name, (config, model) in WRITTEN.items():
            for suffix, bos in (("", True), ("_plain", False)):
                directory = write(Path(root, name + suffix), llama2(bos=bos), tokenizer_config=config)
                if model is not None:
                    (directory / "config.json").write_text(json.dumps(model))
                cases[name + suffix] = case(directory, "llama2" + suffix)
        for name, config in BYTES.items():
            directory = write(Path(root, name), byte_level(bos=True), tokenizer_config={**BYTE_LEVEL, **config})
            cases[name] = case(directory, "byte_level")
    path = Path("tests/golden/tokenizers.json")
    golden = {"transformers": transformers.__version__, "texts": TEXTS, "cases": cases}
    path.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{path}: {len(cases)} tokenizers, {len(TEXTS)} texts each")


def case(directory: Path, made: str) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    files = {}
    for path in sorted(directory.glob("*.json")):
        if path.name != "tokenizer.json" or made == "saved":
            files[path.name] = json.loads(path.read_text())
    ids = [tokenizer(text).input_ids for text in TEXTS]
    plain = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    decoded = [tokenizer.decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=False) for each in ids]
    whole = [tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in ids]
    kind = type(tokenizer).__name__
    return {"made": made, "class": kind, "files": files, "ids": ids, "plain": plain, "decoded": decoded, "whole": whole}


if __name__ == "__main__":
    main()
