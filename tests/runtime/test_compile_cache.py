"""Where the commands keep compiled programs, and whom they trust."""

import logging
import os
import stat
import subprocess
import sys

import jax
import pytest

from levanter_infer.runtime.compile_cache import VARIABLE, enable_compile_cache

PROGRAM = """
import jax, jax.numpy as jnp
from levanter_infer.runtime.compile_cache import enable_compile_cache
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
directory = enable_compile_cache()
def slow(x):
    for i in range(40):
        x = jnp.sin(x @ x) + jnp.sort(x, axis=i % 2)
    return x
jax.block_until_ready(jax.jit(slow)(jnp.ones((8, 8))))
print(len(hits), directory)
"""


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No directory chosen yet; the test's own is restored afterwards."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_directory_is_the_users_alone(unset):
    directory = enable_compile_cache()
    assert directory is not None and directory.is_relative_to(unset / "levanter_infer")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert jax.config.jax_compilation_cache_dir == str(directory)


def test_a_directory_that_others_can_write_is_not_used(unset, caplog):
    directory = enable_compile_cache()
    assert directory is not None
    directory.chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", None)
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache() is None
    assert "can be written by others" in caplog.text and VARIABLE in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_it_can_be_moved_and_turned_off(unset, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "off")
    assert enable_compile_cache() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere"))
    directory = enable_compile_cache()
    assert directory is not None and directory.parent == tmp_path / "elsewhere"


def test_a_directory_given_to_jax_stays(unset):
    jax.config.update("jax_compilation_cache_dir", "/somewhere")
    assert str(enable_compile_cache()) == "/somewhere"


def test_a_second_process_loads_what_the_first_one_compiled(tmp_path):
    hidden = {VARIABLE, "JAX_COMPILATION_CACHE_DIR"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0].startswith("0 ") and not runs[1].startswith("0 ")
