"""Write tests/golden/levanter_checkpoints.zip: what Levanter's trainer stores of two small models.

Run from the repository root in the environment of make_levanter_goldens.py:

    JAX_PLATFORMS=cpu python scripts/golden/make_levanter_checkpoint.py

The weights are those that `tests/golden_cases.py` makes for the names and configs of `CONFIGS` there.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.state_dict import from_torch_compatible_state_dict
from levanter.checkpoint import save_checkpoint
from levanter.models.llama import LlamaConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden_cases import GOLDEN_DIR, LEVANTER_CHECKPOINTS, make_weights, tensor_shapes

PADDED = 40
"""Tokens of Levanter's vocabulary, which is padded to a multiple of the devices."""
CLASSES = {"llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}


def write(directory: Path, name: str, config: dict) -> None:
    own = CLASSES[config["model_type"]].from_hf_config(AutoConfig.for_model(**config))
    vocab = Axis("vocab", config["vocab_size"])
    model = own.model_type.init(vocab, own, key=jax.random.key(0))
    state = {key: jnp.asarray(value) for key, value in make_weights(name, config, tensor_shapes(config)).items()}
    model = from_torch_compatible_state_dict(model, state)
    if name.endswith("padded"):
        model = model.resize_vocab(PADDED, key=jax.random.key(1))
    tree = {"model": model, "opt_state": {"mu": jnp.ones(4)}, "step": jnp.int32(7)}
    save_checkpoint(tree, 7, str(directory / name))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, config in LEVANTER_CHECKPOINTS.items():
            write(Path(folder), name, config)
        with zipfile.ZipFile(GOLDEN_DIR / "levanter_checkpoints.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                archive.write(file, file.relative_to(folder))


if __name__ == "__main__":
    main()
