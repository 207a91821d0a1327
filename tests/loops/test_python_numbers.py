"""Functions of Python of numbers that change from step to step: a few traces serve all steps, which raise where they
do in the loop."""

from __future__ import annotations

import math
from math import sqrt as root

import pytest
import torch

import nsa_compile
from nsa_compile.loops import LoopDeclined, paths

pytestmark = pytest.mark.deep(every=3, of_file=True)

S = 200  # more than steps may be traced

NUMBERS = {
    "len of rows": lambda t, k: len(k),
    "torch.tensor of a len": lambda t, k: torch.tensor(len(k) - 1),
    "new_tensor": lambda t, k: k.new_tensor(t),
    "new_tensor of several": lambda t, k: k.new_tensor([t, len(k)])[1],
    "sqrt": lambda t, k: math.sqrt(t + 1),
    "sqrt at some steps": lambda t, k: math.sqrt(t - 3) if t >= 3 else 0.5,
    "log": lambda t, k: math.log(t + 1),
    "log of a base": lambda t, k: math.log(t + 1, 2),
    "log2 and exp": lambda t, k: math.log2(t + 1) + math.exp(-t / 10),
    "circles": lambda t, k: math.sin(t / 3) + math.cos(t) + math.tan(t / 5) + math.atan(t),
    "arcs": lambda t, k: math.asin(t / 200) + math.acos(t / 200),
    "hyperbolas": lambda t, k: math.sinh(t / 50) + math.cosh(t / 50) + math.tanh(t),
    "conditions": lambda t, k: max(0.1, math.exp(-t / 9)) + min(2, math.log(t + 1)) + (math.sqrt(t) > 3),
    "pow": lambda t, k: math.pow(t, 0.5) + math.pow(0.99, t) + math.fabs(t - 5),
    "adam": lambda t, k: (1 - 0.9 ** (t + 1)) / math.sqrt(1 - 0.99 ** (t + 1)),
}


def summed(number):
    def run(x):
        found = []
        for t in range(len(x)):
            k = x[: t + 1]
            found.append(k.sum(0) * number(t, k))
        return torch.stack(found)

    return run


@pytest.fixture
def ways(monkeypatch):
    found = []
    trace = paths.Explorer._trace
    monkeypatch.setattr(paths.Explorer, "_trace", lambda self, *args: found.append(args[0]) or trace(self, *args))
    return found


@pytest.mark.parametrize("name", NUMBERS)
def test_a_few_traces_serve_all_steps(name, ways):
    run, x = summed(NUMBERS[name]), torch.randn(S, 2, dtype=torch.float64)
    found = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x)
    torch.testing.assert_close(found, run(x), rtol=1e-10, atol=1e-10)
    assert len(ways) < 9


def test_float_and_int_in_the_loop(ways):
    def run(x):
        found = []
        for t in range(len(x)):
            part = (
                root(t)
                + float(t > 9)
                - int(t < 4)
                + float(t) / len(x)
                + int(t / 3)
                + int(float(t) ** 0.5)
                + int("2")
                + float(x.shape[1])
                + int(t)
            )
            found.append(x[t] * part + float("0.5") + sum(float(r) for r in (t, 1)))
        return torch.stack(found)

    x = torch.randn(S, 2, dtype=torch.float64)
    found = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x)
    torch.testing.assert_close(found, run(x), rtol=1e-10, atol=1e-10)
    assert len(ways) < 9


def test_a_float_of_its_own():
    """A function, or a variable, that is called float is not Python's."""

    def run(x, float):
        found = []
        for t in range(len(x)):
            found.append(x[t] * float(t))
        return torch.stack(found)

    x = torch.randn(5, 2, dtype=torch.float64)
    compiled = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")
    torch.testing.assert_close(compiled(x, lambda t: t + 7), run(x, lambda t: t + 7))


def schedule(t):
    part = t / 4 % 1
    return 2 * part if part < 0.5 else 2 - 2 * part


# Each operation rounds: nothing may be put into another order, cancelled, or taken for a whole number.
ROUNDED = {
    "a condition on a remainder": lambda t, k: 2 if (t / 2) % 1 else 1,
    "a triangular schedule": lambda t, k: schedule(t),
    "a condition on a remainder of a negative number": lambda t, k: 2 if -t / 4 % 1 > 0.3 else 1,
    "a whole root": lambda t, k: 2 if math.sqrt(t) % 1 == 0 else 1,
    "a power of two": lambda t, k: 2 if math.log2(t + 1).is_integer() else 1,
    "the lesser of a remainder": lambda t, k: min(t / 4 % 1, 0.6) + max(len(k) / 3 % 1, 0.3),
    "two products": lambda t, k: int(t * 0.57 * 100) + math.ceil(t * 0.1 * 10) + round(t * 0.15 * 10),
    "two sums": lambda t, k: int(t * 0.1 + 0.1 + 0.1 + 0.7) + ((t + 0.1) - t == 0.1),
    "large numbers": lambda t, k: int(1e16 + t - 1e16) + ((1e9 + t * 0.1) - 1e9) * 1e6,
    "equal or not": lambda t, k: (t * 0.1 * 3 > t * 0.3) + 2 * (1e-3 * t * 1e3 == t),
    "a quotient, rounded down": lambda t, k: t // 0.1 + t * 0.1 // 0.1 + divmod(t * 0.1, 0.1)[0],
    "infinity and none": lambda t, k: (t * 1e308 * 10) * 0.0,
    "a power below one": lambda t, k: 2 ** (3 - t) + 0.5**t + 2.0**-t + (t + 1) ** -0.5,
    "counted in a slice": lambda t, k: k[: math.ceil((t + 1) * 0.2 * 2)].sum() + k[int(t * 0.57) :].sum(),
    "a number with all its digits": lambda t, k: 1.0 if t * 1.0 > 6.999999999999999 else 0.0,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_numbers_are_rounded_as_python_rounds_them(name):
    run, x = summed(ROUNDED[name]), torch.ones(12, 2, dtype=torch.float64)
    found = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x)
    torch.testing.assert_close(found, run(x), rtol=1e-14, atol=0, equal_nan=True)


RAISING = {
    "sqrt": lambda t, k: math.sqrt(5 - t),
    "log": lambda t, k: math.log(t),
    "exp": lambda t, k: math.exp(t * 100),
    "acos": lambda t, k: math.acos(t - 1),
    "pow": lambda t, k: math.pow(t - 3, -1),
    "a power of zero": lambda t, k: 0.0 ** (5 - t),
    "a power that is too large": lambda t, k: 10.0 ** (t * 40),
    "divmod": lambda t, k: divmod(t, 7 - t)[0],
    "a division whose result nobody reads": lambda t, k: 0 * t + (1.0 / (t - 5) > 0),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_raises_at_some_step_raises(name):
    run, x = summed(RAISING[name]), torch.randn(12, 2, dtype=torch.float64)
    compiled = nsa_compile.loop(run, nested="eager", cache=False)
    for function in (run, compiled):
        with pytest.raises((ValueError, ArithmeticError)):
            function(x)


def test_too_many_ways_name_the_line():
    def run(x):
        found = []
        for t in range(len(x)):
            number = sum(range(t))  # this line
            found.append(x[t] * number)
        return torch.stack(found)

    compiled = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")
    line = run.__code__.co_firstlineno + 3
    with pytest.raises(LoopDeclined, match=rf"different ways.* as range\(n\) does.*test_python_numbers.py:{line}\)"):
        compiled(torch.randn(S, 2))


@pytest.mark.deep
def test_a_loop_within_the_loop_is_declined_before_it_is_unrolled(ways):
    """Each step would be a way of its own: that is seen from 40 of them, not after they have all been traced."""

    def run(q, k):
        found = []
        for t in range(len(q)):
            scores = []
            for j in range(t + 1):
                scores.append((q[t] * k[j]).sum())
            found.append(torch.stack(scores).softmax(0).sum())
        return torch.stack(found)

    compiled = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")
    line = run.__code__.co_firstlineno + 4
    with pytest.raises(LoopDeclined, match=rf"too many different ways.*test_python_numbers.py:{line}\)"):
        compiled(torch.randn(100, 2), torch.randn(100, 2))
    assert len(ways) < 60


# Positions beside integers of few bits: (what is made of a row and the position, rows, whether it is compiled).
NARROW = {
    "a sum of bytes": (lambda row, t: row + t, torch.arange(8, dtype=torch.int8), True),
    "compared with bytes": (lambda row, t: row > t * 5, torch.full((8,), 20, dtype=torch.uint8), True),
    "chosen": (lambda row, t: torch.where(row > 2, t, row.clamp(max=t)), torch.arange(8, dtype=torch.int16), True),
    "beside truths": (lambda row, t: row + t, torch.tensor([True, False] * 4), True),
    "compared, wrapped around": (lambda row, t: row > t * 50, torch.full((8,), 200, dtype=torch.uint8), False),
    "made of a number that is too large": (
        lambda row, t: torch.full((), t * 50, dtype=torch.int8) + row,
        torch.arange(8),
        False,
    ),
    "up to the largest": (lambda row, t: row * (t * 10**18), torch.ones(9, dtype=torch.float64), True),
}


@pytest.mark.parametrize("name", NARROW)
def test_positions_beside_integers_of_few_bits(name):
    make, given, is_compiled = NARROW[name]

    def run(x):
        found = []
        for t in range(len(x)):
            found.append(make(x[t], t))
        return torch.stack(found)

    results = []
    for function in (run, nsa_compile.loop(run, nested="eager", cache=False)):
        try:
            results.append(function(given))
        except RuntimeError as error:
            results.append(str(error))
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], torch.Tensor):
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    if not is_compiled:
        with pytest.raises(LoopDeclined, match="does not hold it"):
            nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(given)


def test_gradients_scaled_by_how_often_an_index_occurs():
    def run(i, table):
        found = []
        for t in range(len(i)):
            found.append(torch.nn.functional.embedding(i[: t + 1], table, scale_grad_by_freq=True).sum(0))
        return torch.stack(found)

    with pytest.raises(LoopDeclined, match="how often an index occurs"):
        nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(
            torch.tensor([0, 0, 1]), torch.ones(2, 2)
        )


def on_what_data_is(decide):
    def run(x):
        found = []
        for t in range(len(x)):
            found.append(x[t] * 2 if decide(x[t, 0], t) else x[t] * 3)
        return torch.stack(found)

    return run


DECISIONS = {
    "item": lambda a, t: a.item(),
    "a sum's item": lambda a, t: (a + a).item() > 0.5,
    "item beside the position": lambda a, t: t > a.item(),
    "item, rounded": lambda a, t: round(a.item()) % 2,
    "item, in a function": lambda a, t: math.sqrt(abs(a.item())) > 0.5,
    "item, as an integer": lambda a, t: int(a.item()),
    "tolist": lambda a, t: a.tolist() > 0,
    "the lists of two": lambda a, t: a[None].tolist() == (a * 1)[None].tolist(),
    "is_nonzero": lambda a, t: a.is_nonzero(),
    "bool": lambda a, t: a > 0,
}


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("name", DECISIONS)
def test_numbers_that_are_read_out_of_tensors_decide_as_written(name):
    """Of floating-point ones the loop ended in a NameError."""
    run, x = on_what_data_is(DECISIONS[name]), torch.randn(7, 3)
    torch.testing.assert_close(nsa_compile.loop(run, nested="eager", cache=False)(x), run(x))
    with pytest.raises(LoopDeclined, match="it reads a number out of a tensor"):
        nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x)


def test_a_number_that_is_read_and_kept():
    def run(x):
        found = []
        for t in range(len(x)):
            found.append(x[t, 0].item())
        return found

    x = torch.randn(7, 3)
    assert nsa_compile.loop(run, nested="eager", cache=False)(x) == run(x)
    with pytest.raises(LoopDeclined, match="it reads a number out of a tensor"):
        nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x)
