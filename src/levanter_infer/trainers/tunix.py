"""An engine as the rollout worker of Tunix' trainers (google-tunix 0.1.7, `tunix.rl.rollout.base_rollout`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request

_LOGPROBS = {"processed_logprobs": "processed_logprobs", "raw_logprobs": "logprobs"}
"""vLLM's names for what it returns, which Tunix' configuration uses, and ours."""


class TunixRollout(base_rollout.BaseRollout):
    """Samples for `RLCluster`: give `functools.partial(TunixRollout, engine=…, to_model=…)` as `rollout_engine` of its
    `ClusterConfig`, and Tunix gives the rest.

    Args:
        engine: with a tokenizer.
        to_model: makes of the parameters that `update_params` gets (a state of flax.nnx) the model that
            `swap_weights` takes.
        rollout_actor: the model of the trainer; returned by `model()`.
        tokenizer: of Tunix; its `pad_id` and `eos_id` are used.
        mesh, rollout_config: not used; the engine has a mesh, and `generate` gets a configuration.
    """

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        to_model: Callable[[Any], Any],
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: Any = None,
    ):
        if engine.tokenizer is None:
            raise ValueError("Tunix gives prompts as text, and the engine has no tokenizer; make it with one")
        self._engine, self._to_model, self._actor, self._tokenizer = engine, to_model, rollout_actor, tokenizer
        self._calls = 0

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs) -> Any:
        """Sample one completion of each prompt. Equal prompts get samples of their own, also with a `seed`.

        Returns: `RolloutOutput`; prompts are padded on the left to `max_prompt_length`, `logits` is None.
        Raises: ValueError for a further argument, a prompt that cannot be served or is longer than
            `max_prompt_length`; TypeError for what is no sampling parameter.
        """
        if kwargs:
            raise ValueError(f"generate() was given {', '.join(sorted(kwargs))}, which this engine does not know")
        sampling = _sampling(rollout_config)
        self._calls += 1
        requests = [
            Request(text, sampling=sampling, id=f"{self._calls}/{i}", first_sample=0 if sampling.seed is None else i)
            for i, text in enumerate(prompts)
        ]
        outputs = self._engine.generate(requests)
        for i, output in enumerate(outputs):
            if output.error is not None:
                raise ValueError(f"prompts[{i}]: {output.error}")
        samples = [output.completions[0] for output in outputs]
        kind = _LOGPROBS.get(rollout_config.rollout_vllm_logprobs_mode)
        if rollout_config.return_logprobs and kind is None:
            mode = brief(rollout_config.rollout_vllm_logprobs_mode)
            raise ValueError(f"rollout_vllm_logprobs_mode={mode}: expected one of {', '.join(_LOGPROBS)}")
        return base_rollout.RolloutOutput(
            text=[sample.text for sample in samples],
            logits=None,
            tokens=[np.asarray(sample.token_ids, np.int32) for sample in samples],
            left_padded_prompt_tokens=self._padded(
                [output.prompt_token_ids for output in outputs], rollout_config.max_prompt_length
            ),
            logprobs=[getattr(sample, kind) for sample in samples] if rollout_config.return_logprobs and kind else None,
        )

    def _padded(self, prompts: list[list[int]], length: int) -> np.ndarray:
        longest = max(map(len, prompts))
        if longest > length:
            raise ValueError(f"a prompt has {longest} tokens, and max_prompt_length={length}; raise it")
        padded = np.full((len(prompts), length), self.pad_id(), np.int32)
        for row, ids in zip(padded, prompts, strict=True):
            row[length - len(ids) :] = ids
        return padded

    def get_per_token_logps(self, prompt_tokens, completion_tokens) -> jax.Array:
        """Log probabilities under the engine's weights, f32[row, completion token]. Prompts are padded on the left;
        what stands at the padding of completions is of no meaning."""
        completions = np.asarray(completion_tokens)
        rows = []
        for prompt, completion in zip(np.asarray(prompt_tokens), completions, strict=True):
            begin = int(np.argmax(prompt != self.pad_id()))
            rows.append([*prompt[begin:].tolist(), *completion.tolist()])
        scores = self._engine.score(rows)
        return jnp.asarray(np.stack([each[-completions.shape[1] :] for each in scores]))

    def update_params(self, params, filter_types: tuple[Any, ...] | None = None) -> None:
        """Sample with `params` from now on. Raises: ValueError for adapters alone, and as `swap_weights`."""
        adapters = [each.__name__ for each in filter_types or () if "LoRA" in getattr(each, "__name__", "")]
        if adapters:
            raise ValueError(f"the engine takes whole weights, and Tunix gives {adapters[0]}; merge the adapters")
        self._engine.swap_weights(self._to_model(params))

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        return self._actor


def _sampling(config) -> SamplingParams:
    """The sampling parameters of a `RolloutConfig`."""
    top_k = 0 if config.top_k in (None, -1) else config.top_k
    seed = None if config.seed is None else int(np.asarray(config.seed).ravel()[-1])
    return SamplingParams(
        **{
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": top_k,
            "seed": seed,
            "stop_token_ids": config.eos_tokens or (),
            **config.rollout_vllm_sampling_kwargs,
        }
    )
