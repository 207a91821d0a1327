"""Batches: deterministic, resumable, and never a token from the other side of the split."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.data.sampling import BatchSampler, RandomWindows, UniformBytes, evenly_spaced_batches

TEXT = np.arange(1000, dtype=np.uint16)


@given(st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(0, 20))
def test_a_saved_position_continues_the_stream(seed, batch_size, batches, position):
    source = RandomWindows(TEXT, seed)
    whole = BatchSampler(source, batch_size, 16, position)
    expected = [whole.next_batch() for _ in range(batches + 1)]
    resumed = BatchSampler(source, batch_size, 16, position + batches * batch_size)
    np.testing.assert_array_equal(resumed.next_batch(), expected[-1])


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4))
def test_k_batches_of_b_are_one_batch_of_kb(seed, batch_size, count):
    source = UniformBytes(seed)
    small = BatchSampler(source, batch_size, 8)
    large = BatchSampler(source, batch_size * count, 8)
    np.testing.assert_array_equal(np.concatenate([small.next_batch() for _ in range(count)]), large.next_batch())


@given(st.integers(1, 1000), st.integers(0, 50))
def test_windows_are_contiguous_and_inside_the_text(length, index):
    window = RandomWindows(TEXT, 3).sequence(index, length)
    np.testing.assert_array_equal(window, np.arange(window[0], window[0] + length))


def test_batches_have_one_token_more_than_the_model_sees():
    batch = BatchSampler(RandomWindows(TEXT, 0), 3, 16).next_batch()
    assert batch.shape == (3, 17)
    assert batch.dtype == np.int64


def test_different_sequences_and_seeds_differ():
    streams = [UniformBytes(seed).sequence(index, 64) for seed in (0, 1) for index in (0, 1)]
    assert len({stream.tobytes() for stream in streams}) == 4


def test_uniform_bytes_are_uniform():
    counts = np.bincount(UniformBytes(0).sequence(0, 256_000), minlength=256)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 150 < chi_square < 400  # 255 degrees of freedom: 255 ± 23


def test_evenly_spaced_batches_reach_both_ends():
    batches = evenly_spaced_batches(TEXT, 3, 4, 10)
    assert batches.shape == (3, 4, 11)
    assert batches[0, 0, 0] == 0
    assert batches[-1, -1, -1] == 999
