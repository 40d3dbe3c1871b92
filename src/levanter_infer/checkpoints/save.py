"""Write a model as an ordinary HF checkpoint directory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from levanter_infer.checkpoints.weights import DTYPES, write_safetensors
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import FAMILIES
from levanter_infer.models.tensors import Parameter, fused_parameters, get_parameter

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def save_model(model: DecoderModel, directory: str | Path, *, hf_config: Mapping[str, Any] | None = None) -> None:
    """Write `config.json` and `model.safetensors` with HF's names and layouts; loading them gives `model` bit for bit.

    Args:
        directory: of this machine, with ~ for the home directory; created if absent. Files with these two names are
            replaced, others stay.
        hf_config: further keys of config.json, such as `eos_token_id`; they must not change the model.
    Raises: ValueError if `hf_config` contradicts the model or is no JSON, the dtype has no name in safetensors, or
        `directory` is a URL; nothing is written then.
    """
    family = FAMILIES[model.config.model_type]
    if model.is_packed:
        raise ValueError(
            f"the weights are packed for the backend {model.backend.name} (`prepare`); save the model as it was loaded"
        )
    if model.head.scale is not None:
        raise ValueError("the weights are quantized (`engine.weight_dtype`); save the model as it was loaded")
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
    stored = {key: config[key] for key in ("torch_dtype", "dtype") if config.get(key, name) != name}
    if stored:
        raise ValueError(f"hf_config has {stored}, and the weights are {name}; leave it out, or cast them first")
    try:
        text = json.dumps(config, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"hf_config={dict(hf_config or {})} cannot be written as JSON: {error}") from None
    if "://" in str(directory):
        raise ValueError(f"{directory} is a URL, and save_model writes to this machine; save and copy the directory")
    directory = Path(directory).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    params = fused_parameters(model, family.tensors)
    write_safetensors(
        directory / "model.safetensors",
        [
            (name, parts[0].tensor_shape, np.dtype(get_parameter(model, parts[0].path).dtype))
            for parts in params
            for name in parts[0].names
        ],
        _tensors(model, params),
    )
    (directory / "config.json").write_text(text)


def _tensors(model: DecoderModel, params: list[tuple[Parameter, ...]]) -> Iterator[np.ndarray]:
    """HF's tensors in the order of `params`; host memory holds the stacked parameters of one line at a time."""
    for parts in params:
        first = parts[0]
        stacked = [np.asarray(get_parameter(model, p.path).array).reshape(-1, *p.slice.shape) for p in parts]
        for start in range(0, len(first.sources), first.num_experts or 1):
            tensor = np.empty((first.num_experts or 1, *first.slice.tensor_shape), stacked[0].dtype)
            for part, values in zip(parts, stacked, strict=True):
                for entry, value in zip(tensor, values[start:], strict=False):
                    part.slice.write(entry, value)
            yield tensor.reshape(first.tensor_shape)
