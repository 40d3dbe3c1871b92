"""Every family in bfloat16 is as near to itself in float32 as HF transformers is."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.checkpoints.load import load_model
from tests.golden_cases import BFLOAT16_ERRORS, load_case, relative_errors, write_checkpoint
from tests.models.test_hf_parity import uncached_logits

ERRORS = json.loads(BFLOAT16_ERRORS.read_text())["errors"]
"""Mean error of transformers, by golden case."""
MULTIPLE = 1.5
"""Routers turn roundings into other experts, so that the mean of a small checkpoint is noisy."""
WITHOUT_REFERENCE = {"grug_moe": 0.08}
"""Bounds of families that transformers does not have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ERRORS, *WITHOUT_REFERENCE])
def test_errors_of_bfloat16_are_those_of_hf(name, tmp_path):
    case = load_case(name)
    half, _ = load_model(write_checkpoint(tmp_path, case), dtype="bfloat16")
    assert half.dtype == jnp.bfloat16
    full = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf, half)
    pairs = zip(uncached_logits(half, case), uncached_logits(full, case), strict=True)
    error = np.mean(np.concatenate([relative_errors(got.astype(np.float32), want) for got, want in pairs]))
    assert 0 < error <= WITHOUT_REFERENCE.get(name, MULTIPLE * ERRORS.get(name, 0.0))
