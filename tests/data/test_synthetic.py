"""Synthetic tasks: the answer is there, far enough away, and never the same on both sides of the split."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.config import load_config
from nsa_compile.data.corpus import load_corpus
from nsa_compile.data.sampling import BatchSampler
from nsa_compile.data.synthetic import Copying, Needle, answer_accuracy
from nsa_compile.errors import UserError

SEEDS, INDICES = st.integers(0, 2**63 - 1), st.integers(0, 2**40)


def text(tokens: np.ndarray) -> str:
    return bytes(tokens.tolist()).decode("ascii")


@given(SEEDS, INDICES, st.integers(3, 200))
def test_a_copy_repeats_the_string_after_the_separator(seed, index, length):
    source = Copying(seed)
    tokens, answers = source.sequence(index, length), source.answers(length)
    assert tokens.shape == answers.shape == (length,)
    string, copy, *rest = text(tokens).split("|")
    assert string == copy
    assert len(string) == (length - 1) // 2
    assert rest == ([] if length % 2 else [""])
    assert text(tokens[answers]) == copy


def read(tokens: np.ndarray) -> tuple[list[tuple[int, str]], list[str], str]:
    """What a sequence hides, as (place, key and value), what it asks for, and its filler."""
    hidden = [(i, f"{'ABCDEFGHIJKLMNOP'[(r - 128) // 8]}{(r - 128) % 8}") for i, r in enumerate(tokens) if r >= 128]
    written = text(tokens[tokens < 128])
    asked = re.findall(r"[A-P][0-7]", written)
    return hidden, asked, written[: len(written) - 2 * len(asked)]


@given(SEEDS, INDICES, st.integers(1, 300), st.integers(0, 200), st.integers(1, Needle.MOST))
def test_needles_are_asked_for_at_the_end_and_lie_far_enough_away(seed, index, min_distance, more, needles):
    source = Needle(seed, min_distance, needles=needles)
    length = source.shortest + more
    tokens = source.sequence(index, length)
    assert tokens.shape == (length,)
    hidden, asked, filler = read(tokens)
    assert sorted(needle for _, needle in hidden) == sorted(asked)
    assert len({needle[0] for needle in asked}) == len(asked) == needles
    assert text(tokens[length - 2 * needles :]) == "".join(asked)
    assert text(tokens[source.answers(length)]) == "".join(needle[1] for needle in asked)
    places = [place for place, _ in hidden]
    assert length - 2 * needles - places[-1] > min_distance
    # Cut at the needles, and put together again, it is the text that repeats itself.
    assert filler in 20 * text(Needle.FILLER)


def test_needles_lie_everywhere_have_any_value_and_are_asked_for_in_any_order():
    source = Needle(0, 100)
    sequences = [read(source.sequence(index, 513))[:2] for index in range(400)]
    places = np.array([[place for place, _ in hidden] for hidden, _ in sequences]) - np.arange(16)
    room = 513 - source.shortest
    assert places.min() == 0
    assert places.max() == room
    # The smallest, those in the middle and the largest of sixteen uniform numbers.
    expected = room * np.arange(1, 17) / 17
    assert np.all(np.abs(places.mean(axis=0) - expected) < 0.03 * room)
    values = np.array([[int(needle[1]) for needle in asked] for _, asked in sequences])
    assert np.all(np.abs(np.bincount(values.flat, minlength=8) / values.size - 1 / 8) < 0.02)
    keys = np.array([[ord(needle[0]) - ord("A") for needle in asked] for _, asked in sequences])
    assert np.all(np.abs(keys.mean(axis=0) - 7.5) < 1)
    asked_where = [asked.index(hidden[0][1]) for hidden, asked in sequences]
    assert abs(np.mean(asked_where) - 7.5) < 1


@pytest.mark.deep
@pytest.mark.parametrize(
    ("make", "possible"),
    [(Copying, 20 * 20), (lambda seed, held_out: Needle(seed, 8, held_out, needles=1), 16 * 8)],
    ids=["copying", "needle"],
)
def test_no_held_out_example_is_trained_on_though_there_are_few(make, possible, monkeypatch):
    # Strings of two characters, so that a common example would be drawn.
    monkeypatch.setattr(Copying, "ALPHABET", Copying.ALPHABET[:20])

    def examples(held_out: bool) -> set[bytes]:
        source = make(3, held_out)
        length = 5 if isinstance(source, Copying) else 200
        return {source.sequence(i, length)[-2:].astype(np.uint8).tobytes() for i in range(2000)}

    train, held_out = examples(False), examples(True)
    assert not train & held_out
    assert len(train) > 0.8 * possible
    assert len(held_out) >= 0.02 * possible


@pytest.mark.parametrize("name", ["copying", "needle"])
def test_a_corpus_of_a_task_resumes_and_knows_its_answers(name):
    config = load_config(overrides=[f"data.name={name}", "train.seq_len=200"])
    corpus = load_corpus(config)
    assert corpus.validation.shape == (8, 4, 201)
    assert corpus.answers is not None
    assert corpus.answers.shape == (201,)
    whole = BatchSampler(corpus.train, 4, 200)
    batches = [whole.next_batch() for _ in range(3)]
    np.testing.assert_array_equal(BatchSampler(corpus.train, 4, 200, position=8).next_batch(), batches[2])
    assert 0 < corpus.best_unigram_loss < np.log(256)


@pytest.mark.parametrize(("name", "seq_len"), [("copying", 128), ("needle", 111)])
def test_the_distance_defaults_to_the_window_and_must_fit(name, seq_len):
    overrides = [f"data.name={name}", f"train.seq_len={seq_len}"]
    load_corpus(load_config(overrides=overrides))
    with pytest.raises(UserError, match=f"needs train.seq_len of at least {seq_len}, and it is {seq_len - 1}"):
        load_corpus(load_config(overrides=[*overrides, f"train.seq_len={seq_len - 1}"]))
    with pytest.raises(UserError, match=r"data\.min_distance = 65 \(as configured\)"):
        load_corpus(load_config(overrides=[*overrides, "data.min_distance=65"]))


def test_accuracy_counts_the_answers_only():
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    answers = np.array([True, False, True, True])
    assert answer_accuracy([[0, 3, 4], [0, 7, 8]], tokens, answers) == 1.0
    assert answer_accuracy([[2, 3, 0], [6, 0, 0]], tokens, answers) == 0.25


def test_a_model_that_copies_from_the_known_distance_is_always_right():
    source = Copying(0)
    tokens = BatchSampler(source, 3, 40).next_batch()
    predictions = np.roll(tokens, 20, axis=1)[:, :-1]
    assert answer_accuracy(predictions, tokens, source.answers(41)) == 1.0
    assert answer_accuracy(np.zeros_like(predictions), tokens, source.answers(41)) == 0.0
