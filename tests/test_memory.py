"""Two storages, or a storage and an array, may be one piece of memory: what writes to it is not left to a program that
takes them for two."""

import array
import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile.memory import memories, overlaps_itself

S, D = 5, 4


@given(st.data())
def test_a_tensor_that_does_not_overlap_itself_has_an_element_at_each_place(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    steps = [data.draw(st.integers(0, 9)) for _ in sizes]
    x = torch.zeros(40).as_strided(sizes, steps)
    places = [sum(i * s for i, s in zip(at, steps, strict=True)) for at in itertools.product(*map(range, sizes))]
    if not overlaps_itself(x):
        assert len(places) == len(set(places))
    elif steps == sorted(steps, reverse=True) and all(n > 1 for n in sizes):
        assert not x.is_contiguous()


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:, None], lambda x: x[:0].expand(0, D), torch.clone]
)
def test_layouts_that_are_no_overlap(view):
    assert not overlaps_itself(view(torch.zeros(S, D)))


@given(st.data())
def test_pieces_are_those_whose_addresses_meet(data):
    bytes_ = np.zeros(64, np.uint8)
    spans = data.draw(st.lists(st.tuples(st.integers(0, 62), st.integers(1, 8)), min_size=1, max_size=6))
    parts = [bytes_[a : a + n] for a, n in spans]
    made = [
        data.draw(st.sampled_from([lambda x: x, torch.from_numpy, memoryview, lambda x: x[::-1]]))(x) for x in parts
    ]
    found = memories(made)
    assert found[0] == 0
    assert sorted(set(found)) == list(range(max(found) + 1))
    pieces = {frozenset(range(a, min(a + n, 64))) for a, n in spans}
    while joined := next(((a, b) for a, b in itertools.combinations(pieces, 2) if a & b), None):
        pieces = (pieces - set(joined)) | {joined[0] | joined[1]}
    of = [next(piece for piece in pieces if a in piece) for a, _ in spans]
    assert all((found[i] == found[j]) == (of[i] == of[j]) for i, j in itertools.combinations(range(len(spans)), 2))


def writes(a, b, x):
    rows = []
    for t in range(S):
        a[t] += x[t]
        rows.append(x[t] + b[t] * 1)
    return torch.stack(rows)


def reads_an_array(a, b, x):
    rows = []
    for t in range(S):
        a[t] += x[t]
        rows.append(x[t] * float(np.asarray(b).sum()))
    return torch.stack(rows)


def by_numpy():
    held = np.zeros((S, D), np.float32)
    return torch.from_numpy(held), torch.from_numpy(held)


def by_dlpack():
    held = torch.zeros(S, D)
    return held, torch.from_dlpack(held)


def by_buffer():
    held = bytearray(4 * S * D)
    return tuple(torch.frombuffer(held, dtype=torch.float32).view(S, D) for _ in range(2))


def shifted():
    held = np.zeros((S + 1, D), np.float32)
    return torch.from_numpy(held[1:]), torch.from_numpy(held[:-1])


def backwards():
    held = np.zeros((S, D), np.float32)
    return torch.from_numpy(held), held[::-1]


def of_numbers():
    held = array.array("f", [0.0] * S * D)
    return torch.frombuffer(held, dtype=torch.float32).view(S, D), held


def of_bytes():
    held = bytearray(4 * S * D)
    return torch.frombuffer(held, dtype=torch.float32).view(S, D), held


def a_view_of_bytes():
    held = np.zeros((S, D), np.float32)
    return torch.from_numpy(held), memoryview(held)


def of_another_language():
    held = (ctypes.c_float * (S * D))()
    return torch.frombuffer(held, dtype=torch.float32).view(S, D), np.ctypeslib.as_array(held)


@pytest.mark.deep
@pytest.mark.parametrize("make", [by_numpy, by_dlpack, by_buffer, shifted])
def test_loops_that_write_to_a_tensor_of_two_storages(make):
    compare_after_a_call_with_memory_of_their_own(writes, make)


@pytest.mark.deep
@pytest.mark.parametrize("make", [backwards, of_numbers, of_bytes, a_view_of_bytes, of_another_language])
def test_loops_that_read_an_array_of_what_they_write(make):
    compare_after_a_call_with_memory_of_their_own(reads_an_array, make)


def compare_after_a_call_with_memory_of_their_own(run, make):
    """The program of a first call, whose tensors share nothing, is not for the second."""
    compiled = nsa_compile.loop(run, nested="eager", cache=False)
    for apart in (True, False):
        results = []
        for function in (run, compiled):
            a, b = make()
            a = a.clone() if apart else a
            results += [(function(a, b, torch.ones(S, D)), a, torch.as_tensor(np.asarray(b).copy()))]
        for expected, found in zip(*results, strict=True):
            assert found.equal(expected)


@pytest.mark.deep(but=["<lambda>0"])
@pytest.mark.parametrize(
    "view", [lambda x: x.unfold(0, D, 1), lambda x: x[:D].expand(S, D), lambda x: x.as_strided((S, D), (1, 1))]
)
def test_loops_that_write_to_a_tensor_that_overlaps_itself(view, caplog):
    def run(x, rows):
        held = view(x)
        for t in range(S):
            held[t] += rows[t]
        return held

    (x, y), rows = (torch.zeros(S + D - 1) for _ in range(2)), torch.ones(S, D)
    assert nsa_compile.loop(run, nested="eager", cache=False)(x, rows).equal(run(y, rows))
    assert x.equal(y)
    assert "it writes in place to held, whose elements share memory" in caplog.text


@pytest.mark.parametrize("make", [by_numpy, by_dlpack, by_buffer, shifted])
def test_compiled_functions_that_write_to_an_input_of_two_storages(make):
    def run(x, held):
        held.add_(1)
        return nsa_compile.scan(lambda carry, row: (carry + row, carry + row), torch.zeros(D), x)[1]

    compiled = nsa_compile.compile(run, nested="eager", cache=False)
    for make_inputs in (lambda: (torch.zeros(S, D), torch.zeros(S, D)), make):
        assert compiled(*make_inputs()).equal(run(*make_inputs()))


def test_compiled_functions_that_write_to_an_input_that_overlaps_itself():
    def run(x, held):
        held[0].add_(1)
        return nsa_compile.scan(lambda carry, row: (carry + row, carry + row), torch.zeros(D), x + held)[1]

    compiled = nsa_compile.compile(run, nested="eager", cache=False)
    for expand in (torch.clone, lambda x: x[0].expand(S, D)):
        x, y = torch.zeros(S, D), torch.zeros(S, D)
        assert compiled(torch.ones(S, D), expand(x)).equal(run(torch.ones(S, D), expand(y)))
        assert x.equal(y)
