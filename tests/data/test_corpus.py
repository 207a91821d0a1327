"""Data sets: the split, the yardstick, and no substitute for one that is not there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nsa_compile.config import load_config
from nsa_compile.data.corpus import best_unigram_loss, load_corpus, split, streamed_corpus
from nsa_compile.errors import UserError


def test_shakespeare_is_the_plays():
    corpus = load_corpus(load_config())
    text = corpus.tokenizer.decode(corpus.train.tokens)
    assert text.startswith("A Midsummer Night's Dream\n\nACT I\n")
    assert "To be, or not to be: that is the question" in text
    assert len(text) > 4_500_000


def test_the_split_is_by_position_and_loses_nothing():
    tokens = np.arange(1001)
    train, held_out = split(tokens)
    assert len(held_out) == 50
    np.testing.assert_array_equal(np.concatenate((train, held_out)), tokens)


def test_validation_batches_come_from_the_held_out_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a" * 1900 + "b" * 100, encoding="utf-8")
    corpus = load_file(path, "train.seq_len=32")
    assert (corpus.validation == ord("b")).all()
    assert (corpus.train.sequence(0, 33) == ord("a")).all()


def test_unigram_loss_of_text_like_the_training_text_is_its_entropy():
    tokens = np.repeat(np.arange(4), [40000, 20000, 10000, 10000])
    entropy = 0.5 * math.log(2) + 0.25 * math.log(4) + 2 * 0.125 * math.log(8)
    assert best_unigram_loss(tokens, tokens, 4) == pytest.approx(entropy, abs=1e-3)
    assert math.isfinite(best_unigram_loss(tokens, np.array([4]), 5))


def test_uniform_is_random_bytes_and_its_yardstick_is_ln_256():
    corpus = load_corpus(load_config(overrides=["data.name=uniform"]))
    assert corpus.best_unigram_loss == math.log(256)
    assert not np.array_equal(corpus.train.sequence(0, 513), corpus.validation[0, 0])


def load_file(path, *overrides):
    """The corpus of a file, its cache beside it."""
    return load_corpus(load_config(overrides=[f"data.name={path}", f"data.cache_dir={path.parent}/cache", *overrides]))


@pytest.mark.parametrize("name", ["missing.txt", "shakspeare", "random", "."])
def test_a_data_set_that_is_not_there_is_an_error(name):
    with pytest.raises(UserError, match="is no data set"):
        load_corpus(load_config(overrides=[f"data.name={name}"]))


def test_a_text_that_is_no_text_is_an_error(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match="not UTF-8"):
        load_file(path)


def test_a_stream_holds_out_its_first_documents():
    def open_from(first):
        # 40 characters and the separator's two: documents say on which side they are.
        files = [[{"text": ("h" if 400 * file + row < 1000 else "t") * 40} for row in range(400)] for file in range(25)]
        return files[first:]

    config = load_config(overrides=["data.name=fineweb-edu", "train.seq_len=128"])
    corpus = streamed_corpus(config, open_from)
    assert set(corpus.validation.ravel().tolist()) == set(b"h\n")
    train = np.concatenate([corpus.train.sequence(index, 129) for index in range(300)])
    assert set(train.tolist()) == set(b"t\n")
    np.testing.assert_array_equal(corpus.train.sequence(7, 129), train[7 * 129 : 8 * 129])
    corpus.train.close()
    with pytest.raises(UserError, match="the stream of documents ended at sequence"):
        streamed_corpus(config, lambda first: [[{"text": "x"}] * 9000])


@pytest.mark.parametrize("count", [0, 999])
def test_a_stream_too_short_to_hold_anything_out_is_an_error(count):
    config = load_config(overrides=["data.name=fineweb-edu"])
    with pytest.raises(UserError, match=f"it holds {count} documents, and the first 1,000 are held out"):
        streamed_corpus(config, lambda first: [[{"text": "x"}] * count])


@pytest.mark.parametrize("length", [0, 100])
def test_a_text_that_is_too_short_is_an_error(tmp_path, length):
    path = tmp_path / "text.txt"
    path.write_text("x" * length, encoding="utf-8")
    with pytest.raises(UserError, match="is too short"):
        load_file(path)
