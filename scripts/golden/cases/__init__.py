"""The golden cases of all families, in the order of tests/golden/cases.json."""

from scripts.golden.cases import base, dense, experts, latent, llama, recurrent
from scripts.golden.cases.base import Case

CASES = {**llama.CASES, **base.CASES, **experts.CASES, **recurrent.CASES, **latent.CASES, **dense.CASES}

__all__ = ["CASES", "Case"]
