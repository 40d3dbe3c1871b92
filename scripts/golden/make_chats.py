"""Write tests/golden/chats.json: what transformers' `apply_chat_template` gives for tests/chat_cases.py.

Run from the repository root in an environment of its own (torch is not needed):

    python -m venv .venv-tok && .venv-tok/bin/pip install -r scripts/golden/requirements-tokenizers.txt
    .venv-tok/bin/python scripts/golden/make_chats.py

A chat is written as the text, or as {"error": ...} where transformers raises.
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.chat_cases import CHATS, TEMPLATES
from tests.tokenizer_files import byte_level, write

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "extra_special_tokens": {"image_token": "<|im_end|>"},
}


def main() -> None:
    golden: dict = {"transformers": transformers.__version__, "tokenizer_config": CONFIG, "chats": {}}
    for name, template in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), byte_level(), tokenizer_config=CONFIG, chat_template=template)
            tokenizer = AutoTokenizer.from_pretrained(directory)
        for chat, (messages, arguments) in CHATS.items():
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            except Exception as e:
                text = {"error": f"{type(e).__name__}: {e}".splitlines()[0][:160]}
            golden["chats"][f"{name}/{chat}"] = text
    path = Path("tests/golden/chats.json")
    path.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    errors = sum(isinstance(text, dict) for text in golden["chats"].values())
    print(f"{path}: {len(golden['chats'])} chats, {errors} of them errors")


if __name__ == "__main__":
    main()
