"""Write a model as an ordinary HF checkpoint directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from levanter_infer.checkpoints.weights import DTYPES, write_safetensors
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.family import get_parameter, parameters
from levanter_infer.models.registry import FAMILIES

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def save_model(model: DecoderModel, directory: str | Path, *, hf_config: Mapping[str, Any] | None = None) -> None:
    """Write `config.json` and `model.safetensors` with HF's names and layouts; loading them gives `model` bit for bit.

    Args:
        directory: created if absent; files with these two names are replaced, others stay.
        hf_config: further keys of config.json, such as `eos_token_id`; they must not change the model.
    Raises: ValueError if `hf_config` contradicts the model, or the dtype has no name in safetensors.
    """
    family = FAMILIES[model.config.model_type]
    if model.is_packed:
        raise ValueError(
            f"the weights are packed for the backend {model.backend.name} (`prepare`); save the model as it was loaded"
        )
    dtype = np.dtype(model.embeddings.weight.dtype)
    name = next((_DTYPE_NAMES[name] for name, known in DTYPES.items() if known == dtype), None)
    if name is None:
        raise ValueError(f"weights are {dtype}, expected one of {', '.join(_DTYPE_NAMES.values())}; cast them first")
    config = {
        "architectures": [family.architecture],
        **family.config_to_hf(model.config),
        "torch_dtype": name,
        **(hf_config or {}),
    }
    if family.config_from_hf(config) != model.config:
        raise ValueError(f"hf_config={dict(hf_config or {})} changes the model; leave out the keys that the model sets")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    params = parameters(model, family)
    write_safetensors(
        directory / "model.safetensors",
        [
            (hf_name, param.hf_shape, np.dtype(get_parameter(model, param.path).dtype))
            for param in params
            for hf_name in param.hf_names
        ],
        _tensors(model, params),
    )
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensors(model: DecoderModel, params):
    """HF's tensors in the order of `params`; host memory holds one stacked parameter at a time."""
    for param in params:
        stacked = np.asarray(get_parameter(model, param.path).array).reshape(len(param.hf_names), *param.hf_shape)
        yield from stacked
