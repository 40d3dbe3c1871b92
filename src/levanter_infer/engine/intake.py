"""`Intake`: checks requests, and makes of each the sequences that serve it."""

import math
from collections.abc import Sequence

import numpy as np

from levanter_infer.decode.sequence_table import DEFAULT_ROOT, pages_for
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.beams import check_room
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.params import SamplingParams, brief, check_limits, derive_seed
from levanter_infer.engine.request import Request
from levanter_infer.engine.sequence import Group
from levanter_infer.engine.sequence import Sequence as HostSequence
from levanter_infer.engine.text import IncrementalDecoder, StopMatcher

_MAX_SALT = 256
"""Characters of a request's `cache_salt`, at most."""


class Intake:
    """What an engine of these sizes can serve.

    Args:
        tokenizer: None: prompts are token ids, and there is no text.
        seed: from which, with its id, a request without a seed derives its own.
    """

    def __init__(self, shapes: Shapes, config: EngineConfig, tokenizer, seed: int):
        self._shapes, self._config, self._tokenizer, self._seed = shapes, config, tokenizer, seed
        self._roots: dict[tuple[int, str | None], int] = {}
        self.version = 0
        """Of the weights: what they have computed is shared under this version only."""

    def forget_roots(self) -> None:
        """Salts are new again. Requires: nothing is stored for any of them."""
        self._roots.clear()

    def group(self, request: Request, default_id: str) -> Group:
        """The sequences that serve a request.

        Args:
            default_id: names it if it does not name itself.
        Raises: ValueError saying what was got, what was expected, and what to do.
        """
        ids = self._token_ids(request)
        params, shapes = request.sampling, self._shapes
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling is {type(params).__name__}; expected SamplingParams")
        check_limits(
            params,
            vocab_size=shapes.limits.vocab_size,
            max_logprobs=self._config.max_logprobs,
            max_prompt_logprobs=self._config.max_prompt_logprobs,
            max_logit_bias=self._config.max_logit_bias,
            max_stop_sequences=self._config.max_stop_sequences,
        )
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer and this engine has none; use stop_token_ids")
        if params.num_sequences > shapes.num_slots:
            name = "n" if params.best_of is None else "best_of"
            name = name if params.num_beams == 1 else "num_beams"
            raise ValueError(
                f"{name}={params.num_sequences} exceeds the {shapes.num_slots} slots that "
                f"engine.max_seqs={shapes.max_seqs} gives; raise engine.max_seqs"
            )
        max_len = self._max_len(len(ids), params.max_tokens)
        if params.num_beams > 1:
            check_room(params.num_beams, len(ids), max_len, shapes)
        name = request.id if request.id is not None else default_id
        group = Group(
            id=name,
            prompt=request.prompt,
            prompt_token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else derive_seed(self._seed, name),
            max_len=max_len,
            cache_salt=_salt(request.cache_salt),
            priority=_priority(request.priority),
            timeout_s=_timeout(request.timeout_s),
        )
        group.root = self.root(group)
        for index in range(params.num_sequences):
            sequence = HostSequence(group=group, index=index)
            if self._tokenizer is not None:
                sequence.decoder = IncrementalDecoder(self._tokenizer)
                if params.stop:
                    sequence.matcher = StopMatcher(params.stop, min_tokens=params.min_tokens)
            group.sequences.append(sequence)
        return group

    def root(self, group: Group) -> int:
        """What the pages of a group that begins now are found under.

        Each version of the weights with each salt has two roots: an odd one, and an even one for scored prompts
        (`is_scored_root`).
        """
        number = self._roots.setdefault((self.version, group.cache_salt), len(self._roots))
        return DEFAULT_ROOT - 2 * number - (group.params.prompt_logprobs is not None)

    def _token_ids(self, request: Request) -> list[int]:
        given = [n for n in ("prompt", "prompt_token_ids", "messages") if getattr(request, n) is not None]
        if len(given) != 1:
            raise ValueError(f"a request needs one of prompt, prompt_token_ids, messages; got {given or 'none'}")
        if request.prompt_token_ids is not None:
            ids = _checked_ids(request.prompt_token_ids, self._shapes.limits.vocab_size)
        elif self._tokenizer is None:
            raise ValueError(f"{given[0]} needs a tokenizer and this engine has none; give prompt_token_ids")
        elif request.messages is not None:
            text = self._tokenizer.apply_chat_template(request.messages, add_generation_prompt=True)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(request.prompt)
        vocab_size = self._shapes.limits.vocab_size
        if ids and max(ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer gave token {max(ids)}, outside the model's vocabulary of {vocab_size} tokens: "
                "tokenizer and model do not belong together"
            )
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        return ids

    def _max_len(self, prompt_len: int, max_tokens: int) -> int:
        shapes = self._shapes
        if prompt_len + min(max_tokens, 1) > shapes.max_seq_len:
            room = "which leaves no room to generate within" if max_tokens else "more than"
            raise ValueError(
                f"the prompt has {prompt_len} tokens, {room} "
                f"engine.max_seq_len={shapes.max_seq_len}; shorten it or raise engine.max_seq_len"
            )
        if max_tokens > shapes.max_seq_len:
            raise ValueError(
                f"max_tokens={max_tokens} exceeds engine.max_seq_len={shapes.max_seq_len}; lower it or raise "
                "engine.max_seq_len"
            )
        max_len = min(prompt_len + max_tokens, shapes.max_seq_len)
        needed = pages_for(max_len, shapes.page_size)
        if needed > shapes.num_pages:
            raise ValueError(
                f"the sequence may need {needed} pages ({prompt_len} prompt tokens and up to {max_len - prompt_len} "
                f"more, {shapes.page_size} a page) and the pool has {shapes.num_pages}; raise engine.max_pages or "
                "lower max_tokens"
            )
        return max_len


def _checked_ids(token_ids, vocab_size: int) -> list[int]:
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, (Sequence, np.ndarray)):
        raise ValueError(f"prompt_token_ids is {type(token_ids).__name__}; expected a list of token ids")
    ids = []
    for i, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise ValueError(f"prompt_token_ids[{i}]={token!r} is not an integer")
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt_token_ids[{i}]={token} is outside the vocabulary of {vocab_size} tokens")
        ids.append(int(token))
    return ids


def _salt(salt) -> str | None:
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= _MAX_SALT):
        raise ValueError(f"cache_salt={str(salt)[:40]!r}: expected 1 to {_MAX_SALT} characters")
    return salt


def _priority(value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -(2**31) <= value < 2**31 - 1:
        raise ValueError(f"priority={brief(value)}: expected a whole number from -2^31 to 2^31 - 2; smaller goes first")
    return int(value)


def _timeout(timeout_s) -> float | None:
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (is_number and timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s={brief(timeout_s)}: expected seconds above 0; leave it out for none")
    return timeout_s
