"""generation_config.json: the sampling parameters that a model's authors suggest."""

import dataclasses
from pathlib import Path
from typing import Any

from levanter_infer.checkpoints.source import GENERATION, Source, resolve_source

_APPLIED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
"""Keys of the file, and the names of the same sampling parameters here."""
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "max_length": (20,),
    "min_length": (0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "low_memory": (False,),
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "dola_layers": (),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "max_time": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "top_h": (),
    "watermarking_config": (),
}
"""Unsupported keys that affect sampling, with the values (beside null and []) that switch them off. Other keys, such as
token ids, the cache or what `generate` returns, do not affect sampling."""


@dataclasses.dataclass(frozen=True)
class SuggestedSampling:
    """Sampling parameters of a model's generation_config.json."""

    params: dict[str, Any]
    """Sampling parameters by name."""
    unsupported: dict[str, Any]
    """Keys of the file that affect sampling and are not supported."""


def suggested_sampling(source: Source) -> SuggestedSampling | None:
    """The sampling parameters that a checkpoint suggests; None if it has no generation_config.json.

    `do_sample: false` is temperature 0, without the parameters of a random draw. A key that the file lacks is not
    suggested, whatever its default is in transformers.

    Raises: ValueError if the file is no JSON object.
    """
    if not source.has(GENERATION):
        return None
    content = source.read_json(GENERATION)
    given = {key: value for key, value in content.items() if value is not None}
    params = {ours: given[key] for key, ours in _APPLIED.items() if key in given}
    if given.get("do_sample") is False:
        params = {"temperature": 0.0, **{key: value for key, value in params.items() if key not in _DRAWING}}
    unsupported = {key: value for key, value in given.items() if key in _OFF and value not in ([], {}, *_OFF[key])}
    return SuggestedSampling(params, unsupported)


def required_sampling(path_or_id: str | Path, revision: str | None = None) -> SuggestedSampling:
    """`suggested_sampling` of a model. Raises: ValueError without a generation_config.json, or as `resolve_source`."""
    suggested = suggested_sampling(resolve_source(path_or_id, revision, weights=False))
    if suggested is None:
        raise ValueError(f"model {str(path_or_id)!r} has no {GENERATION} to take sampling parameters from; give them")
    return suggested
