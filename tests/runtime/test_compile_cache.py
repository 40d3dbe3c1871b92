"""Where the commands store compiled programs, and which directories they trust."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from levanter_infer import EngineConfig, InferenceEngine, load_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.runtime import compile_cache
from levanter_infer.runtime.compile_cache import VARIABLE, enable_compile_cache
from tests.tiny_models import tiny_model

DEFAULTS = {
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
"""JAX's."""
PROGRAM = """
import jax, jax.numpy as jnp
from levanter_infer.runtime.compile_cache import enable_compile_cache
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
directory = enable_compile_cache()
def slow(x):
    for i in range(300):  # far more than the 0.1 s from which on a program is kept
        x = jnp.sin(x @ x) + jnp.sort(x, axis=i % 2)
    return x
jax.block_until_ready(jax.jit(slow)(jnp.ones((8, 8))))
print(len(hits), directory)
"""


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No directory chosen yet; the test's own is restored afterwards."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", *DEFAULTS)
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    for name, value in DEFAULTS.items():
        jax.config.update(name, value)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_refused", set())
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


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


@pytest.mark.parametrize("above", ["xla", "levanter_infer", "."])
def test_a_directory_below_one_that_others_can_write_is_not_used(unset, caplog, above):
    """They could rename its contents, and replace a directory."""
    directory = enable_compile_cache()
    assert directory is not None
    jax.config.update("jax_compilation_cache_dir", None)
    open_one = next(p for p in directory.parents if p.name == above) if above != "." else unset
    open_one.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache() is None
        assert enable_compile_cache() is None
    assert f"{open_one} can be written by others" in caplog.text and caplog.text.count("compiled anew") == 1
    open_one.chmod(0o1777)  # no user can rename files of others
    assert enable_compile_cache() == directory


@pytest.mark.parametrize("above", ["xla", "levanter_infer"])
def test_a_directory_below_that_of_another_user_is_not_used(unset, caplog, monkeypatch, above):
    directory = enable_compile_cache()
    assert directory is not None
    jax.config.update("jax_compilation_cache_dir", None)
    theirs = next(p for p in directory.parents if p.name == above)
    if os.getuid() == 0:
        os.chown(theirs, 12345, -1)
    else:  # our files look foreign to a process of another user, and the directory itself like ours
        stat_of = Path.stat
        status = os.stat_result((*theirs.stat()[:4], 12345, *theirs.stat()[5:]))
        monkeypatch.setattr(Path, "stat", lambda path, **_: status if path == theirs else stat_of(path))
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache() is None
    assert f"{theirs} belongs to another user" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_directories_are_made_for_the_user_alone_whatever_the_umask(unset):
    before = os.umask(0)
    try:
        directory = enable_compile_cache()
    finally:
        os.umask(before)
    assert directory is not None
    made = [path for path in (directory, *directory.parents) if path.is_relative_to(unset)]
    assert len(made) == 4 and all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in made)


def test_a_link_is_followed_once(unset, tmp_path):
    """The checked directory is the one that is used: a link on the way may lead elsewhere a moment later."""
    (tmp_path / "real").mkdir(mode=0o700)
    unset.symlink_to(tmp_path / "real")
    directory = enable_compile_cache()
    assert directory is not None and directory.is_relative_to((tmp_path / "real").resolve())


def test_settings_of_the_user_stay(unset, monkeypatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    assert enable_compile_cache() is not None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == 0


def test_thresholds_are_ours_where_they_are_jaxs_defaults(unset):
    assert enable_compile_cache() is not None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1


def test_a_cache_that_is_switched_off_stays_off(unset):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compile_cache() is None and not unset.exists()
    assert jax.config.jax_compilation_cache_dir is None


def test_it_can_be_moved_and_turned_off(unset, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "off")
    assert enable_compile_cache() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere"))
    directory = enable_compile_cache()
    assert directory is not None and directory.parent == tmp_path / "elsewhere"


def test_a_tilde_is_the_home(unset, monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(VARIABLE, "~/programs")
    directory = enable_compile_cache()
    assert directory is not None and directory.parent == tmp_path / "home" / "programs"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv(VARIABLE, "~no-such-user/programs")
    assert enable_compile_cache() is None and VARIABLE in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_directory_given_to_jax_stays(unset):
    jax.config.update("jax_compilation_cache_dir", "/somewhere")
    assert str(enable_compile_cache()) == "/somewhere"


def test_library_users_have_a_cache_too(unset, tmp_path):
    model = tiny_model()
    engine = InferenceEngine(model, config=EngineConfig(max_seqs=2, max_pages=8))
    assert jax.config.jax_compilation_cache_dir.startswith(str(unset))
    jax.config.update("jax_compilation_cache_dir", None)
    save_model(model, tmp_path / "model")
    load_model(tmp_path / "model")
    assert jax.config.jax_compilation_cache_dir.startswith(str(unset))
    assert engine.stats()["rounds"] == 0


def test_a_second_process_loads_what_the_first_one_compiled(tmp_path):
    hidden = {VARIABLE, "JAX_COMPILATION_CACHE_DIR", *(name.upper() for name in DEFAULTS)}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0].startswith("0 ") and not runs[1].startswith("0 ")
