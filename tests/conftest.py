"""Strict JAX for every test: implicit dtype and rank promotion are errors.

Compilation is most of the time that these tests take, so they skip XLA's expensive optimisations, which change speed
and not meaning, and share what they compile. Those are LLVM's, so that the HLO text of a compiled program is that of
users; a test of bits or of time asks for the real code with the fixture `optimized`.
"""

import gc
import os
from pathlib import Path

import hypothesis
import jax
import jaxlib
import pytest

# XLA reads its flags once, when it makes the first device, and one that it does not know ends the process (jaxlib
# 0.11.2). The first takes its older generator of loops, which compiles in half the time and is the engine's on a CPU.
# The second has it generate the code of a program in one piece: the processes of pytest-xdist keep all cores busy.
COMPILES_SOON = "--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"
if jaxlib.version.__version_info__ < (0, 11):
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in COMPILES_SOON if flag not in given)])
FEW_OPTIMIZATIONS = jax.default_backend() == "cpu"


hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.generate])
"""For scripts/mutants.py: the first failure is enough, and searching for a smaller one takes long."""


def pytest_configure(config):
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Tracing makes many objects that stay: looking for cycles as often as Python does takes a twentieth of the time.
    gc.set_threshold(50_000, 20, 20)
    # Equal programs are compiled once for all processes of this checkout, those that tests start included.
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(config.rootpath / ".pytest_cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(FEW_OPTIMIZATIONS).lower(),
    }
    os.environ.update(settings)
    jax.config.update("jax_compilation_cache_dir", settings["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_disable_most_optimizations", FEW_OPTIMIZATIONS)


LONGEST = (
    "test_state_machine.py", "test_ladder.py", "test_programs.py", "test_faults.py", "test_readme.py", "test_pure.py",
    "test_hf_parity.py", "test_sample.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """The longest files first, so that no process is left alone with one of them at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish():
    """The garbage collector need not look again and again through what was imported; tracing makes much garbage that
    is in no cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


MAX_MAPS = 16_000
"""Memory maps from which on a process drops its compiled programs. Each program has several; Linux allows a process
65,530, and XLA ends it with a segmentation fault there."""


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    yield
    drop_programs_if_many()


def drop_programs_if_many() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimized():
    """Compile as users do."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", FEW_OPTIMIZATIONS)


@pytest.fixture
def getkey():
    """A source of fresh, reproducible keys: `key = getkey()`."""
    count = 0

    def get():
        nonlocal count
        count += 1
        return jax.random.fold_in(jax.random.key(20260), count)

    return get
