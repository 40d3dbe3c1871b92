"""Write tests/golden for the families that Levanter alone has: what its own modules answer.

Run from the repository root in an environment with Levanter (`pip install marin-levanter`, Python 3.12 or newer):

    JAX_PLATFORMS=cpu python scripts/golden/make_levanter_goldens.py [case ...]

As `make_goldens.py`: the weights come from `tests/golden_cases.py`, in float32. Levanter has no cache: every greedy
token is the choice of its forward over the whole sequence.
"""

import dataclasses
import functools
import importlib.metadata
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from haliax import Axis
from levanter.grug.sharding import compact_grug_mesh
from levanter.models.snowball import GrugMoeHfConfig, SnowballConfig, SnowballLMHeadModel

try:
    from levanter.models.hero import HeroConfig
    from levanter.models.hero_model import HeroLMHeadModel
except ImportError:  # a release without Hero answers the cases of schema 1
    HeroConfig = HeroLMHeadModel = None

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.golden.cases import CASES
from scripts.golden.golden_files import write_goldens
from tests.golden_cases import NUM_GREEDY, make_weights

POSITIONS = 128
"""Sequences are padded to this length, so that one program serves all; a causal model does not see the padding."""


REFERENCE = f"marin-levanter {importlib.metadata.version('marin-levanter')}"


@functools.cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors that Levanter would export."""
    state = eqx.filter_eval_shape(lambda: fresh_model(frozen(CASES[name].config)).to_state_dict())
    return {key: value.shape for key, value in state.items()}


def frozen(config: dict):
    """Levanter's configuration: of Snowball (schema 1) or of Hero (schema 2)."""
    kind = SnowballConfig if config["grugmoe_artifact_schema_version"] == 1 else HeroConfig
    if kind is None:
        raise ImportError("the installed levanter has no levanter.models.hero")
    own = kind.from_hf_config(GrugMoeHfConfig(**config))
    return dataclasses.replace(own, attention_implementation="reference")


def fresh_model(config):
    kind = SnowballLMHeadModel if isinstance(config, SnowballConfig) else HeroLMHeadModel
    return kind.init(Axis("vocab", config.vocab_size), config, key=jax.random.key(0))


def build_model(name: str, config: dict, zeroed: str | None = None):
    """Levanter's model with the case's weights; tensors whose names end with `zeroed` are zeros."""
    weights = make_weights(name, CASES[name].config, shapes(name))
    weights = {key: value * 0 if zeroed and key.endswith(zeroed) else value for key, value in weights.items()}
    return fresh_model(frozen(config)).from_state_dict(weights)


@eqx.filter_jit
def forward(model, tokens: jax.Array) -> jax.Array:
    return model.transformer(tokens[None])[0] @ model.transformer.output_proj


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    padded = np.zeros(POSITIONS, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(forward(model, padded))[: len(tokens)]


def full_logits(
    name: str, config: dict, tokens: np.ndarray, *, strict: bool = True, zeroed: str | None = None
) -> np.ndarray:
    return logits_of(build_model(name, config, zeroed), tokens)


def greedy_tokens(name: str, config: dict, prompt: np.ndarray) -> np.ndarray:
    tokens, model = prompt, build_model(name, config)
    for _ in range(NUM_GREEDY):
        tokens = np.append(tokens, np.int32(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :].astype(np.int32)


def main(names: list[str]) -> None:
    with jax.set_mesh(compact_grug_mesh()), jax.default_matmul_precision("highest"):
        for name in names or [name for name, case in CASES.items() if case.reference == "levanter"]:
            write_goldens(name, shapes(name), full_logits, greedy_tokens, REFERENCE)


if __name__ == "__main__":
    main(sys.argv[1:])
