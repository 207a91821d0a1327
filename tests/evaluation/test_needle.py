"""Needles: where they lie, and that what is called found was found."""

from __future__ import annotations

import numpy as np
import pytest

from nsa_compile.data.synthetic import make_synthetic
from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.errors import UserError
from nsa_compile.evaluation import needle
from nsa_compile.evaluation.scoring import Scores
from nsa_compile.generation.trained import load_trained

TEXT = np.frombuffer(b"0123456789" * 100, np.uint8)


class Oracle:
    """Scores what it is told is found as certain, and the rest as one in e."""

    def __init__(self, finds):
        self.finds = finds

    def score(self, sequences, length):
        for sequence in sequences:
            assert len(sequence) <= length + 1
            right = np.array([self.finds(sequence, i) for i in range(1, len(sequence))])
            yield Scores(np.where(right, 0.0, -1.0), right)


def in_the_text(sequence, i):
    """The password of the question, where the sentence was hidden."""
    text = bytes(sequence.tolist())
    return text.count(text[text.rindex(b"\n") :]) == 2


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (1.0, None)])
def test_a_sentence_lies_at_its_depth_and_only_where_it_should(depth, place):
    tokens, bare, size = needle._case(TEXT, ByteTokenizer(), 300, depth, 3)
    assert len(tokens) == len(bare) == 301
    hidden, without = bytes(tokens.tolist()), bytes(bare.tolist())
    question = hidden[hidden.rindex(b"\n") :]
    assert without.endswith(question)
    assert question.endswith(b".")
    assert question[-size:].startswith(b" ")
    assert (hidden.count(question), without.count(question)) == (2, 1)
    expected = 0 if place == 0 else len(hidden) - 2 * len(question) - 1
    assert hidden.index(question) == expected


def test_a_model_that_finds_sentences_is_said_to():
    found = needle.find_sentences(Oracle(in_the_text), TEXT, ByteTokenizer(), 256, depths=3, samples=4)
    assert [row.depth for row in found] == [0, 0.5, 1]
    for row in found:
        assert (row.length, row.answers, row.accuracy, row.log_prob) == (256, 4, 1.0, 0.0)
        assert row.unprompted == -row.gain < -6, "a letter each"


def test_a_model_that_guesses_gains_nothing():
    found = needle.find_sentences(Oracle(lambda sequence, i: False), TEXT, ByteTokenizer(), 256, 2, 2)
    assert [(row.accuracy, row.gain) for row in found] == [(0, 0), (0, 0)]


@pytest.fixture(scope="module")
def config(needle_run):
    return load_trained(needle_run).config


def test_records_are_found_where_they_lie(config):
    """Told apart by depth: an oracle that sees only the first half of the hay."""
    source = make_synthetic(config, held_out=True)

    def finds(sequence, i):
        questions = len(sequence) - 2 * source.needles
        hay = sequence[:questions]
        if i < questions or (i - questions) % 2 == 0:
            return False
        return source.record(*sequence[i - 1 : i + 1]) in hay[: (len(hay) + 1) // 2]

    found = needle.find_records(Oracle(finds), config, 64, depths=2, samples=20)
    assert [(row.depth, row.accuracy, row.log_prob) for row in found] == [(0.25, 1, 0), (0.75, 0, -1)]
    assert sum(row.answers for row in found) == 20 * 3
    assert all(row.gain is None for row in found)


def test_depths_at_which_no_needle_fell_are_left_out(config):
    found = needle.find_records(Oracle(lambda sequence, i: True), config, 64, depths=50, samples=1)
    assert 1 <= len(found) <= 3


def test_needles_that_do_not_fit_are_refused(config):
    with pytest.raises(UserError, match="--length 15 must be at least 16, or the needles of the run do not fit"):
        needle.find_records(Oracle(lambda sequence, i: True), config, 15, 2, 1)
    needle.find_records(Oracle(lambda sequence, i: True), config, 16, 2, 1)


def test_sentences_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"--length 60 must be at least \d+, or no text is left"):
        needle.find_sentences(Oracle(in_the_text), TEXT, ByteTokenizer(), 60, 1, 1)
    with pytest.raises(UserError, match="the held-out text has 1000 tokens, and --length 2000 needs"):
        needle.find_sentences(Oracle(in_the_text), TEXT, ByteTokenizer(), 2000, 1, 1)
