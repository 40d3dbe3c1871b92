"""Programs on disk: found again, never trusted blindly."""

import logging
import os

import pytest

from levanter_infer.runtime.compile_cache import VARIABLE
from levanter_infer.runtime.program_store import ProgramStore, default_store


@pytest.fixture
def store(tmp_path):
    tmp_path.chmod(0o700)
    return ProgramStore(tmp_path)


def test_a_program_is_found_under_its_own_description_only(store):
    store.save("round of 4", b"code" * 1000)
    assert store.load("round of 4") == b"code" * 1000
    assert store.load("round of 8") is None


def test_other_sources_or_settings_are_another_description(store, monkeypatch):
    from levanter_infer.runtime import program_store

    store.save("round", b"code")
    monkeypatch.setattr(program_store, "_environment", lambda: "another version")
    assert store.load("round") is None


@pytest.mark.parametrize("spoil", [lambda code: code[:-5], lambda code: code[:9] + b"?" + code[10:], lambda code: b""])
def test_a_spoilt_program_is_made_anew(store, tmp_path, spoil, caplog):
    store.save("round", os.urandom(100))
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert store.load("round") is None
    assert str(path) in caplog.text


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others"):
        ProgramStore(tmp_path)


def test_no_cache_no_store(monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    assert default_store() is None
