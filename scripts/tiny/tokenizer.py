"""The tiny model's tokenizer: byte-level BPE over the stories, every digit a token of its own.

Any text can be encoded and comes back unchanged, as all 256 bytes are in the vocabulary. Digits never merge, with each
other or with a space, so a sum looks the same wherever it stands.
"""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .grammar import SYSTEM_PROMPTS, make_story

EOS = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (EOS, SYSTEM, USER, ASSISTANT)
EOS_ID = 0
VOCAB_SIZE = 640
MAX_LENGTH = 512

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' + (message['content'] or '') | trim + '\\n' + eos_token -}}"
    "{%- elif message['role'] in ['system', 'user'] -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') | trim -}}"
    "{%- else -%}"
    "{{- raise_exception('the tiny model knows the roles system, user and assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer(seed: int = 0, num_stories: int = 4000) -> Tokenizer:
    """Train the tokenizer on stories and task words; the same seed gives the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    texts = [make_story(rng) for _ in range(num_stories)]
    texts += ["sort", "Tell me a story about a", *SYSTEM_PROMPTS] * (num_stories // 20)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    tokenizer_config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": MAX_LENGTH,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation_config = {"do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    for name, content in (("tokenizer_config", tokenizer_config), ("generation_config", generation_config)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
