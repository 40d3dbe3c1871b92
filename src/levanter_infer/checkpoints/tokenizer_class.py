"""What transformers makes of a tokenizer.json: its tokenizer classes build some parts anew.

Source: transformers 5.23 (`AutoTokenizer`, `TokenizersBackend`, `LlamaTokenizer`, `CodeLlamaTokenizer`). Which special
tokens enclose a prompt is what tokenizer.json's post-processor says, and neither the class nor `add_bos_token` of
tokenizer_config.json; versions before 5 read the latter, and kept the normalizer of Llama 2's files. Other classes are
read as the file has them.
"""

import json
from collections.abc import Mapping
from typing import Any

LLAMA, CODE_LLAMA = "LlamaTokenizer", "CodeLlamaTokenizer"
_DEFAULT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CLASSES_IGNORED_FOR = ("mistral", "mixtral", "qwen2")
"""Model types for which transformers takes no notice of a Llama class."""


def class_of(content: bytes, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> str | None:
    """The class that builds parts of the tokenizer anew, if one does.

    Args:
        content: of tokenizer.json.
        config: of tokenizer_config.json.
        model_config: of config.json.
    """
    name = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix("Fast")
    if name not in (LLAMA, CODE_LLAMA) or model_config.get("model_type") in _CLASSES_IGNORED_FOR:
        return None
    # Llama 3's files name the class of Llama 2, but are byte-level.
    return None if name == LLAMA and b'"ByteLevel"' in content else name


def default_tokens(kind: str | None) -> Mapping[str, str]:
    """Named tokens that a class has where the configuration does not name them."""
    return _DEFAULT_TOKENS if kind is not None else {}


def rebuilt(content: bytes, kind: str | None, config: Mapping[str, Any], unk_token: object) -> bytes:
    """tokenizer.json with the parts that the class builds anew; as it is without a class, or where it is no BPE.

    Text is split at special tokens, and each space becomes "▁". One is put before the text: at its start only,
    or with `legacy` before each piece between special tokens.
    """
    if kind is None:
        return content
    file = json.loads(content)
    model = file.get("model") if isinstance(file, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return content
    prefix = config.get("add_prefix_space") is not False
    legacy = kind == LLAMA and config.get("legacy") not in (None, False)
    scheme = "never" if not prefix else "always" if legacy else "first"
    file["normalizer"] = None
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix or kind == CODE_LLAMA:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    file["decoder"] = {"type": "Sequence", "decoders": steps}
    unknown = unk_token if kind == CODE_LLAMA and unk_token in (model.get("vocab") or {}) else None
    plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    file["model"] = {**model, **plain, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return json.dumps(file, ensure_ascii=False).encode("utf-8", "surrogatepass")
