"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer for clients that have none, in vLLM's form."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.config import check_keys
from levanter_infer.engine.params import brief
from levanter_infer.io.openai import check_model

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

PATHS = ("/tokenize", "/detokenize")
"""Paths that take a body; `/tokenizer_info` takes none."""


class Tokenization:
    """The tokenizer of a model.

    Args:
        tokenizer: None: every request is refused.
        max_model_len: tokens of a sequence, at most, for answers.
        model_names: names that `model` may have.
    """

    def __init__(self, tokenizer: "Tokenizer | None", max_model_len: int, model_names: Sequence[str]):
        self._tokenizer, self._max_model_len, self._names = tokenizer, max_model_len, model_names
        self._readers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "/tokenize": self._encode,
            "/detokenize": self._decode,
        }

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """The body of an answer; path: one of `PATHS`. Raises: ValueError that names what is wrong."""
        if not isinstance(body, dict):
            raise ValueError(f"the body is {brief(body)}; expected a JSON object")
        check_model(body.get("model"), self._names)
        return self._readers[path](body)

    def info(self) -> dict[str, Any]:
        """Special tokens, as texts; null for one that there is not. Raises: ValueError without a tokenizer."""
        known = self._known()
        bos, eos = known.id_of("bos_token"), known.id_of("eos_token")
        eos = next((i for i in (eos, *known.eos_token_ids) if i is not None), None)
        texts = (None if i is None else known.decode([i], skip_special_tokens=False) for i in (bos, eos))
        return dict(zip(("bos_token", "eos_token"), texts, strict=True))

    def _encode(self, body: Mapping[str, Any]) -> dict[str, Any]:
        check_keys(body, ["model", "prompt", "add_special_tokens"], "body")
        text, special = body.get("prompt"), body.get("add_special_tokens", True)
        if not isinstance(text, str):
            raise ValueError(f"body.prompt is {brief(text)}; expected a text")
        if type(special) is not bool:
            raise ValueError(f"body.add_special_tokens is {brief(special)}; expected true or false")
        tokens = self._known().encode(text, special)
        return {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens}

    def _decode(self, body: Mapping[str, Any]) -> dict[str, Any]:
        check_keys(body, ["model", "tokens"], "body")
        tokens, size = body.get("tokens"), self._known().vocab_size
        if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < size for each in tokens):
            raise ValueError(f"body.tokens is {brief(tokens)}; expected a list of token ids, 0 to {size - 1}")
        return {"prompt": self._known().decode(tokens, skip_special_tokens=False)}

    def _known(self) -> "Tokenizer":
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer")
        return self._tokenizer
