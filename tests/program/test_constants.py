"""What a program holds, buffers and tensors from outside, is a constant as long as it stays what it was."""

from __future__ import annotations

import logging

import pytest
import torch

import nsa_compile
from nsa_compile.program import constants
from tests.catalogue.catalogue import verdict

S, D = 12, 4
OUTSIDE = torch.arange(S)


def rows():
    torch.manual_seed(0)
    return [torch.randn(S, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def attention(positions, hidden_rows, q, k, v):
    """Causal attention by positions, or under the rows of a table: booleans, or numbers that are added."""

    def step(cache, token):
        t, q, k, v, hidden = token
        at = (positions == t)[:, None]
        K, V = torch.where(at, k, cache[0]), torch.where(at, v, cache[1])
        scores = K @ q
        scores = scores + hidden if hidden.is_floating_point() else scores.masked_fill(hidden, -torch.inf)
        return (K, V), scores.softmax(-1) @ V

    xs = (torch.arange(len(q)), q, k, v, hidden_rows)
    return nsa_compile.scan(step, (torch.zeros_like(k), torch.zeros_like(v)), xs)[1]


class Module(torch.nn.Module):
    def __init__(self, table="positions"):
        super().__init__()
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        self.register_buffer("positions", torch.arange(S))
        self.register_buffer("hidden", hidden)
        self.register_buffer("bias", torch.zeros(S, S, dtype=torch.float64).masked_fill(hidden, -torch.inf))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.table = table

    def forward(self, q, k, v):
        table = {"positions": self.positions[None] > self.positions[:, None], "hidden": self.hidden, "bias": self.bias}
        return attention(self.positions, table[self.table], q, k, v)


def results(function, tensors):
    y = function(*tensors)
    return y.detach(), torch.autograd.grad(y.square().sum(), tensors)


def compiled_of(function, nested="eager", **options):
    torch._dynamo.reset()
    return nsa_compile.compile(function, nested=nested, attention="sparse", **{"cache": False, **options})


def assert_equal(compiled, function, tensors):
    torch.testing.assert_close(results(compiled, tensors), results(function, tensors))


@pytest.mark.deep(but=["eager-hidden"])
@pytest.mark.parametrize("table", ["positions", "hidden", "bias"])
@pytest.mark.parametrize("nested", ["eager", "inductor"])
def test_buffers_are_constants(table, nested):
    module = Module(table)
    compiled = compiled_of(module, nested)
    assert_equal(compiled, module, rows())
    assert verdict(nsa_compile.last_report()) in ("window_attention", "scored_attention")
    assert not nsa_compile.last_report().declines


def test_globals_and_variables_of_outer_functions_are_constants():
    hidden = OUTSIDE[None] > OUTSIDE[:, None]

    def run(q, k, v):
        return attention(OUTSIDE, hidden, q, k, v)

    assert_equal(compiled_of(run), run, rows())
    assert verdict(nsa_compile.last_report()) == "window_attention"


@pytest.mark.deep
def test_arguments_are_data():
    def run(q, k, v, hidden):
        return attention(torch.arange(S), hidden, q, k, v)

    compiled = compiled_of(run)
    for shift in (1, 0):
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1).roll(-shift, 0)
        hidden[:, 0] = False
        actual, expected = (function(*rows(), hidden) for function in (compiled, run))
        torch.testing.assert_close(actual, expected)
    assert verdict(nsa_compile.last_report()) == "scored_attention"


def write(module):
    module.positions.copy_(module.positions.flip(0))


def replace(module):
    module.positions = module.positions.flip(0)


def write_a_row(module):
    with torch.no_grad():
        module.hidden[3, 1] = True


CHANGES = {write: ("positions", "positions"), replace: ("positions", "positions"), write_a_row: ("hidden", "hidden")}


@pytest.mark.deep
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("nested", ["eager", "inductor"])
def test_what_has_changed_is_seen(change, nested, caplog):
    table, name = CHANGES[change]
    module = Module(table)
    compiled = compiled_of(module, nested)
    assert_equal(compiled, module, rows())
    change(module)
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        for _ in range(2):
            assert_equal(compiled, module, rows())
    lines = [line for line in caplog.messages if "changed since" in line]
    assert len(lines) == 1
    assert f"self.{name} changed" in lines[0]
    change(module)  # back again, or once more
    assert_equal(compiled, module, rows())


def test_a_change_that_is_overlooked_is_wrong(monkeypatch):
    """The test above would see it."""
    monkeypatch.setattr(constants.Held, "is_what", lambda self, x: True)
    module = Module()
    compiled = compiled_of(module)
    assert_equal(compiled, module, rows())
    write(module)
    with pytest.raises(AssertionError):
        assert_equal(compiled, module, rows())


def test_equal_values_are_no_change(caplog):
    """A checkpoint that is loaded, another module of the same class."""
    module = Module()
    compiled = compiled_of(module)
    assert_equal(compiled, module, rows())
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        module.load_state_dict(Module().state_dict())
        assert_equal(compiled, module, rows())
        module.positions = torch.arange(S)
        assert_equal(compiled, module, rows())
    assert not any("changed since" in line for line in caplog.messages)


def test_what_the_function_writes_to_is_no_constant(caplog):
    class Counting(Module):
        def forward(self, q, k, v):
            self.calls.add_(1)
            return super().forward(q, k, v) + (torch.arange(S) + self.calls)[:, None]

    module, twin = Counting(), Counting()
    compiled = compiled_of(module)
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        for _ in range(3):
            torch.testing.assert_close(compiled(*rows()), twin(*rows()))
    assert not any("changed since" in line for line in caplog.messages)


@pytest.mark.deep
def test_kept_results_are_kept_for_a_value(tmp_path, monkeypatch):
    """A program that was kept for one table is not taken for another."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for shift in (0, 2):
        module = Module("hidden")
        module.hidden = torch.ones(S, S, dtype=torch.bool).triu(1 + shift)
        module.hidden[:, 1:] |= module.positions[1:] > module.positions[:, None]
        module.hidden[5, shift] = True
        assert_equal(compiled_of(module, cache=True), module, rows())


def test_the_check_of_the_first_call():
    module = Module("hidden")
    assert_equal(compiled_of(module, check="first"), module, rows())


def test_in_inference_mode():
    module = Module()
    with torch.inference_mode():
        module.positions = torch.arange(S)
        compiled = compiled_of(module)
        for _ in range(2):
            torch.testing.assert_close(compiled(*rows()), module(*rows()))
        module.positions = torch.arange(S).flip(0)
        torch.testing.assert_close(compiled(*rows()), module(*rows()))


@pytest.mark.deep
@pytest.mark.parametrize("written", [lambda x: x.data, lambda x: x.numpy()])
def test_writes_that_autograd_does_not_see(written):
    """They leave the version of a tensor as it is."""
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)

    def run(q, k, v):
        return attention(torch.arange(S), hidden, q, k, v)

    compiled = compiled_of(run)
    for _ in range(2):
        torch.testing.assert_close(compiled(*rows()), run(*rows()))
        written(hidden)[2:, 0] = True
