"""Tokenizers of both kinds that hold every text."""

import pytest

from levanter_infer.checkpoints.tokenizer import Tokenizer
from tests import tokenizer_files


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.from_directory(tokenizer_files.write(tmp_path_factory.mktemp("t"), tokenizer_files.byte_level()))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    tokenizer = tokenizer_files.byte_fallback()
    return Tokenizer.from_directory(tokenizer_files.write(tmp_path_factory.mktemp("t"), tokenizer))
