"""`EngineLM`: EleutherAI's lm-evaluation-harness on an engine, as the harness' model `levanter-infer`.

`python -m levanter_infer.lm_eval …` is the harness' own command with that model registered.

Source: contexts are truncated, windows cut and texts ended as `HFLM` of lm_eval 0.4.13 does.
"""

import argparse
import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams, brief, check_names
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.engine.text import IncrementalDecoder

_SCORE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)
_LOAD = ("model", "revision", "dtype", "adapter", "tokenizer", "seed", "max_gen_toks")
_ENGINE = tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name != "tiles")
_NOT_IN_TASKS = {"max_tokens", "stop", "n", "best_of", "logprobs", "prompt_logprobs", "return_routed_experts"}
_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in _NOT_IN_TASKS)
_GEN_KWARGS = (
    "until",
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "do_sample",
    *_SAMPLING,
)
_NAMES_ELSEWHERE = {
    **{"pretrained": "model", "path": "model", "peft": "adapter"},
    **{"max_model_len": "max_seq_len", "max_length": "max_seq_len"},
}
_NAME = "levanter-infer"
_DEFAULT_DEVICE = "cuda:0"
"""The device that the harness' command passes when it was given none."""


@register_model(_NAME)
class EngineLM(TemplateLM):
    """An engine as a model of the harness. The engine forms the batches, whatever the order of the requests.

    Args:
        engine: with a tokenizer.
        max_gen_toks: tokens to generate, at most, for tasks that do not say.
    Raises: ValueError for an engine without a tokenizer, or whose tokenizer has no token to begin a text with.
    """

    def __init__(self, engine: InferenceEngine, *, max_gen_toks: int = 256):
        super().__init__()
        if engine.tokenizer is None:
            raise ValueError("the engine has no tokenizer; make it with that of the model")
        self._engine, self._tokenizer, self._max_gen_toks = engine, engine.tokenizer, max_gen_toks
        eos = self._tokenizer.id_of("eos_token")
        ids = [i for i in (eos, *self._tokenizer.eos_token_ids) if i is not None]
        if not ids:
            raise ValueError("the tokenizer has no end-of-sequence token; name one in its tokenizer_config.json")
        bos = self._tokenizer.id_of("bos_token")
        self._eot, self._prefix = ids[0], ids[0] if bos is None else bos
        self._prefix_text = self._tokenizer.decode([self._prefix], skip_special_tokens=False)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "EngineLM":
        """As `create_from_arg_obj`, from `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> "EngineLM":
        """Load a model and make its engine.

        Args:
            arg_dict: `model` (as in `load_model`), and where wanted `revision`, `dtype`, `adapter`, `tokenizer` (a
                directory, URL or hub id), `seed`, `max_gen_toks` and the fields of `EngineConfig`.
            additional_config: the harness' `batch_size` and `max_batch_size`, which stay at their defaults, and
                `device`, which is None or what the harness' command passes when it was given none ("cuda:0").
        Raises: ValueError for an unknown name, a wrong value, a batch size or a device.
        """
        check_names("model_args", arg_dict, [*_LOAD, *_ENGINE], _NAMES_ELSEWHERE, "argument")
        if not arg_dict.get("model"):
            raise ValueError("model_args has no model; give model=PATH, a directory, URL or hub id")
        sizes = {name: (additional_config or {}).get(name) for name in ("batch_size", "max_batch_size")}
        for name, value in sizes.items():
            if value is not None and not (name == "batch_size" and str(value) in ("1", "auto")):
                raise ValueError(
                    f"{name}={brief(value)}: the engine forms its batches; leave it out, and use max_seqs in model_args"
                )
        device = (additional_config or {}).get("device")
        if device not in (None, _DEFAULT_DEVICE):
            raise ValueError(_device_refusal(device))
        config = EngineConfig(**{name: value for name, value in arg_dict.items() if name in _ENGINE})
        named = {name: arg_dict.get(name) for name in ("dtype", "revision", "adapter")}
        model, tokenizer = load_model(arg_dict["model"], **named)
        if arg_dict.get("tokenizer"):
            tokenizer = Tokenizer.from_source(resolve_source(arg_dict["tokenizer"], weights=False))
        engine = InferenceEngine(model, tokenizer, config, seed=arg_dict.get("seed", 0), donate_model=True)
        return cls(engine, max_gen_toks=arg_dict.get("max_gen_toks", 256))

    @property
    def max_length(self) -> int:
        """Tokens that the model is given, at most. The token that it predicts from them counts for the engine too."""
        return self._engine.shapes.max_seq_len - 1

    @property
    def eot_token_id(self) -> int:
        return self._eot

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The sha256 of the tokenizer's files, chat templates among them: a name for the harness' cache of requests."""
        return self._tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The harness' record of the template, "" for the model's own. Raises: ValueError for a template by name."""
        if isinstance(chat_template, str):
            raise ValueError(f"apply_chat_template={brief(chat_template)}: expected true, for the model's default")
        return "" if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, open for the assistant's turn, or inside its last message."""
        return self._tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids; with None a text that begins with the text of the prefix token, as chats do, gets no second."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self._prefix_text)
        return self._tokenizer.encode(string, add_special_tokens)

    def _run(self, requests: Sequence[Request], name: str, disable_tqdm: bool):
        """(index, output) of each request as it ends. Raises: ValueError for one that was refused or failed."""
        named = [
            request if request.id else dataclasses.replace(request, id=str(i)) for i, request in enumerate(requests)
        ]
        index = {request.id: i for i, request in enumerate(named)}
        order = sorted(named, key=lambda request: list(request.prompt_token_ids or ()))  # shared prefixes adjacent
        outputs = self._engine.as_completed(order)
        for output in tqdm(outputs, total=len(named), desc=name, disable=disable_tqdm):
            errors = [output.error, *(each.error for each in output.completions)]
            if any(errors):
                raise ValueError(f"{name}: {next(filter(None, errors))}")
            yield index[output.id], output

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        prompts = []
        for key, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"{brief(key)} has {len(context)} tokens of context and {len(continuation)} of continuation; "
                    f"expected at least one each, and at most {self.max_length} of continuation (max_seq_len - 1)"
                )
            ids = [*context, *continuation][-(self.max_length + 1) :]
            prompts.append(Request(prompt_token_ids=ids, sampling=_SCORE))
        results = [(0.0, False)] * len(requests)
        for i, output in self._run(prompts, "loglikelihood", disable_tqdm):
            key, _, continuation = requests[i]
            results[i] = _score(output, continuation)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[i])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for i, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Texts, cut before the first of `until`.

        Raises: ValueError for a name in gen_kwargs that is not known, or a `max_gen_toks` that leaves no context.
        """
        prompts, untils = [], []
        repeats: collections.Counter[str] = collections.Counter()
        for context, gen_kwargs in (request.args for request in requests):
            sampling, until = self._sampling(gen_kwargs)
            ids, _ = maybe_truncate(self.tok_encode(context), sampling.max_tokens, self.max_length)
            # Random numbers follow from the id: from what is asked and how often, and not from the order
            digest = hashlib.sha256(repr((ids, sampling)).encode()).hexdigest()
            prompts.append(Request(prompt_token_ids=ids, sampling=sampling, id=f"{digest}-{repeats[digest]}"))
            untils.append(until)
            repeats[digest] += 1
        texts = [""] * len(requests)
        for i, output in self._run(prompts, "generate_until", disable_tqdm):
            done = output.completions[0]
            text = done.text
            if isinstance(done.stop_reason, tuple):
                decoder = IncrementalDecoder(self._tokenizer, prompt=output.prompt_token_ids)
                text = "".join(map(decoder.push, done.token_ids[: -len(done.stop_reason)])) + decoder.flush()
            texts[i] = postprocess_generated_text(text or "", untils[i], None)
            self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _sampling(self, gen_kwargs: Mapping[str, Any]) -> tuple[SamplingParams, list[str]]:
        """Parameters of a task, and the strings that end its text."""
        check_names("gen_kwargs", gen_kwargs, _GEN_KWARGS, {"stop": "until"}, "argument")
        wanted = {name: value for name, value in gen_kwargs.items() if value is not None}
        given: dict[str, Any] = {**normalize_gen_kwargs(wanted, self._max_gen_toks)}
        until = [text for text in given.pop("until") if text]
        if not all(isinstance(text, str) for text in until):
            raise ValueError(f"until={brief(until)}: expected a string or a list of strings")
        max_tokens, sample = given.pop("max_gen_toks"), given.pop("do_sample")
        if not 0 < max_tokens < self.max_length:
            raise ValueError(
                f"max_gen_toks={max_tokens}: expected 1 to {self.max_length - 1}, which leaves a token of context; "
                "lower it (in gen_kwargs or model_args) or raise max_seq_len"
            )
        if not sample:
            given["temperature"] = 0.0
        stop_ids = given.pop("stop_token_ids", ())
        stops = [stop_ids] if isinstance(stop_ids, int) else list(stop_ids)
        texts = []
        for text in until:  # generated text is without special tokens, so these end a sample as tokens
            ids = self._tokenizer.encode(text, False)
            if any(self._tokenizer.is_special(i) for i in ids):
                stops += [ids] if ids[0] not in self._tokenizer.eos_token_ids or len(ids) > 1 else []
            else:
                texts.append(text)
        return SamplingParams.from_dict(
            {**given, "max_tokens": max_tokens, "stop": texts, "stop_token_ids": stops}
        ), until


def _score(output: RequestOutput, continuation: Sequence[int]) -> tuple[float, bool]:
    """Log probability of the tokens that end a prompt, and whether each is the likeliest one."""
    assert output.prompt_logprobs is not None and output.prompt_top_logprobs is not None
    count = len(continuation)
    best = [next(iter(top)) for top in output.prompt_top_logprobs[-count:]]
    return float(np.sum(output.prompt_logprobs[-count:], dtype=np.float64)), best == list(continuation)


def _device_refusal(device) -> str:
    return f"device={brief(device)}: JAX chooses the device; leave it out, and set JAX_PLATFORMS (cpu, cuda, tpu)"


def main() -> None:
    """The harness' command. Exits with 2 for `--device` with an engine, which the harness itself could not tell from
    its default."""
    seen = argparse.ArgumentParser(add_help=False)
    seen.add_argument("--model", "-M")
    seen.add_argument("--model_args", "-a")
    seen.add_argument("--device")
    given, _ = seen.parse_known_args()
    if given.model == _NAME and given.device is not None:
        seen.exit(2, f"--{_device_refusal(given.device)}\n")
    cli_evaluate()


if __name__ == "__main__":
    main()
