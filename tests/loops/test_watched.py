"""Values that functions read of modules and classes: a program that was traced with others is not used again."""

from __future__ import annotations

import importlib
import math
import sys
import types

import pytest
import torch

from nsa_compile import loop
from nsa_compile.loops.paths import Explorer

SOURCE = """
import sys
import torch

SCALE, TABLE, CALLS = 2.0, [1.0, 2.0], 0

class Settings:
    gain = 2.0

class Scaled:
    factor = 2.0
    def of(self, x):
        return x * self.factor

def scaled(x):
    return x * SCALE

def by_table(x):
    return x * TABLE[0]

MADE = None

def once(x):
    global MADE
    if MADE is None:
        MADE = [3.0]
    return x * MADE[0]

def with_or_without_numpy(x):
    return x * (2.0 if "numpy" in sys.modules else 3.0)

def counting(x):
    global CALLS
    CALLS += 1
    return x * CALLS
"""
LOCAL = 2.0


def topk():
    """Reads itself, and has the name of a method that a loop calls."""
    return topk


class Here:
    def of(self, x):
        return x * LOCAL


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A module of somebody else."""
    (tmp_path / "somebody_elses.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("somebody_elses")
    del sys.modules["somebody_elses"]


def over_rows(function):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(function(x[t]))
        return torch.stack(rows)

    return run


def compare(run, *changes):
    """The loop as written and as compiled, before and after each change."""
    compiled = loop(run, nested="eager", cache=False, on_decline="error")
    for change in (lambda: None, *changes):
        change()
        x = torch.arange(8.0).view(4, 2)
        torch.testing.assert_close(compiled(x), run(x), rtol=0, atol=0)


def test_variables_of_other_modules(other):
    compare(over_rows(other.scaled), lambda: setattr(other, "SCALE", 5.0), lambda: setattr(other, "SCALE", 2.0))
    compare(over_rows(other.by_table), lambda: other.TABLE.__setitem__(0, 5.0))


def test_attributes_of_modules_and_classes(other):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(x[t] * other.SCALE * other.Settings.gain)
        return torch.stack(rows)

    compare(run, lambda: setattr(other, "SCALE", 5.0), lambda: setattr(other.Settings, "gain", 7.0))


def test_zero_and_minus_zero_of_another_module(other):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(x[t] * math.copysign(1.0, other.SCALE))
        return torch.stack(rows)

    compare(run, lambda: setattr(other, "SCALE", 0.0), lambda: setattr(other, "SCALE", -0.0))


def test_attributes_of_the_class_of_an_object(other):
    scaled = other.Scaled()

    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(scaled.of(x[t]))
        return torch.stack(rows)

    compare(
        run,
        lambda: setattr(other.Scaled, "factor", 5.0),
        lambda: setattr(scaled, "factor", 7.0),
        lambda: setattr(other.Scaled, "of", lambda self, x: x - 1),
    )


def test_what_a_method_reads_of_the_loops_module(monkeypatch):
    here = Here()

    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(here.of(x[t]))
        return torch.stack(rows)

    compare(run, lambda: monkeypatch.setitem(globals(), "LOCAL", 5.0))


def test_an_import_elsewhere_compiles_nothing_again(other, monkeypatch):
    explored = []
    explore = Explorer.explore
    monkeypatch.setattr(Explorer, "explore", lambda self: explored.append(self) or explore(self))
    compare(
        over_rows(other.with_or_without_numpy),
        lambda: monkeypatch.setitem(sys.modules, "a_new_module", types.ModuleType("a_new_module")),
    )
    assert len(explored) == 1


def test_what_assigns_to_its_module_is_run_as_written(other, caplog):
    x = torch.ones(4, 2)
    assert loop(over_rows(other.counting), nested="eager", cache=False)(x)[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert other.CALLS == 4
    assert "counting assigns to CALLS, a variable of its module" in caplog.text


@pytest.mark.parametrize(
    "step",
    [
        lambda x, t: x[: t + 1].reshape(-1)[:2],  # reads no row alone, and has no state
        lambda x, t: x[t] * x[t].sum().item(),
        lambda x, t: x[: t + 1].topk(min(2, t + 1), 0).values.sum(0),
    ],
)
def test_steps_that_ended_in_errors(step):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(step(x, t))
        return torch.stack(rows)

    x = torch.arange(8.0).view(4, 2)
    torch.testing.assert_close(loop(run, nested="eager", cache=False)(x), run(x), rtol=0, atol=0)


def test_what_assigns_to_its_module_once(other):
    """A table that is made when it is first asked for is there at the second step, and stays as it is."""

    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(other.once(x[t]))
        return torch.stack(rows)

    x = torch.ones(4, 2)
    expected = run(x)
    torch.testing.assert_close(loop(run, nested="eager", cache=False, on_decline="error")(x), expected)
