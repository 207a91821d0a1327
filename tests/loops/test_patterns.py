"""Positions, masks and identities that are made before a loop: known by their numbers, and data where these change."""

from __future__ import annotations

import logging

import pytest
import torch

import nsa_compile
from tests.catalogue.catalogue import verdict

S, D = 24, 16


def by_positions(x, positions):
    K, out = torch.zeros_like(x), []
    for t in range(x.shape[0]):
        K = K.clone()
        K[t] = x[t]
        out.append((K @ x[t]).masked_fill(positions > t, -torch.inf).softmax(-1) @ K)
    return torch.stack(out)


def by_rows_of_a_mask(x, mask):
    K, out = torch.zeros_like(x), []
    for t in range(x.shape[0]):
        K = K.clone()
        K[t] = x[t]
        out.append((K @ x[t]).masked_fill(~mask[t], -torch.inf).softmax(-1) @ K)
    return torch.stack(out)


def by_an_additive_mask(x, mask):
    K, out = torch.zeros_like(x), []
    for t in range(x.shape[0]):
        K = K.clone()
        K[t] = x[t]
        out.append((K @ x[t] + mask[0, 0, t]).softmax(-1) @ K)
    return torch.stack(out)


def by_an_identity(x, eye):
    state, out = x.new_zeros(D, D), []
    for t in range(x.shape[0]):
        k = torch.nn.functional.normalize(x[t], dim=0)
        state = (eye - 0.5 * torch.outer(k, k)) @ state + torch.outer(k, x[t])
        out.append(x[t] @ state)
    return torch.stack(out)


def additive(size):
    return torch.full((size, size), -torch.inf, dtype=torch.float64).triu(1)[None, None]


LOOPS = {
    "positions": (by_positions, torch.arange, "window_attention"),
    "positions as floats": (by_positions, lambda n: torch.arange(n).double(), "scored_attention"),
    "tril": (by_rows_of_a_mask, lambda n: torch.ones(n, n, dtype=torch.bool).tril(), "window_attention"),
    "a window": (
        by_rows_of_a_mask,
        lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-3),
        "window_attention",
    ),
    "an additive mask": (by_an_additive_mask, additive, "scored_attention"),
    "eye": (by_an_identity, lambda n: torch.eye(D, dtype=torch.float64), "parallel"),
}


def rows(seed=0, length=S):
    torch.manual_seed(seed)
    return torch.randn(length, D, dtype=torch.float64, requires_grad=True)


def gradients_too(function, x, *others):
    y = function(x, *others)
    torch.manual_seed(1)
    return y.detach(), *torch.autograd.grad(y, x, torch.randn_like(y))


def compared(compiled, function, x, *others):
    torch.testing.assert_close(
        gradients_too(compiled, x, *others), gradients_too(function, x, *others), rtol=1e-10, atol=1e-10
    )


@pytest.mark.deep(but=["eye"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_is_given_is_known_by_its_pattern(name):
    function, make, expected = LOOPS[name]
    length = 70 if name == "eye" else S
    looped = nsa_compile.loop(function, nested="eager", attention="sparse", cache=False)
    compared(looped, function, rows(0, length), make(length))
    assert verdict(nsa_compile.last_report()) == expected
    compared(looped, function, rows(1, length), make(length))


def one_off(x):
    x = x.clone()
    numbers = x.view(-1)
    numbers[3] = ~numbers[3] if x.dtype == torch.bool else 1 - numbers[3].clamp(min=0)
    return x


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "positions as floats"])
def test_other_numbers_are_data_from_then_on(name, caplog):
    function, make, _ = LOOPS[name]
    looped = nsa_compile.loop(function, nested="eager", cache=False)
    compared(looped, function, rows(), make(S))
    with caplog.at_level(logging.WARNING, "nsa_compile"):
        for seed in (1, 2):
            compared(looped, function, rows(seed), one_off(make(S)))
    assert caplog.text.count("changed since the loop was compiled for its value") == 1
    compared(looped, function, rows(3), make(S))


@pytest.mark.deep
@pytest.mark.parametrize("name", LOOPS)
def test_numbers_off_by_one_are_no_pattern(name, caplog):
    function, make, _ = LOOPS[name]
    looped = nsa_compile.loop(function, nested="eager", cache=False)
    with caplog.at_level(logging.WARNING, "nsa_compile"):
        compared(looped, function, rows(), one_off(make(S)))
        compared(looped, function, rows(), make(S))
    assert "changed since" not in caplog.text


def written_inside(x):
    positions, y, out = torch.arange(S), x * 2, []
    for t in range(S):
        positions[t] += 3
        out.append((y * (positions > t)[:, None]).sum(0))
    return torch.stack(out)


def written_through_another(x):
    base = torch.arange(2 * S)
    positions, y, out = base[2 : S + 2], x * 2, []
    for t in range(S):
        base[t + 2] = 1
        out.append((y * (positions > t)[:, None]).sum(0))
    return torch.stack(out)


def replaced(x):
    positions, y, out = torch.arange(S), x * 2, []
    for t in range(S):
        out.append((y * (positions > t)[:, None]).sum(0))
        positions = positions.roll(1)
    return torch.stack(out)


@pytest.mark.deep(but=["replaced"])
@pytest.mark.parametrize("function", [written_inside, written_through_another, replaced])
def test_positions_that_a_loop_changes(function):
    looped = nsa_compile.loop(function, nested="eager", cache=False)
    for seed in (0, 1):
        compared(looped, function, rows(seed))


@pytest.mark.deep
def test_a_tensor_that_is_written_between_two_calls():
    positions = torch.arange(S)
    looped = nsa_compile.loop(by_positions, nested="eager", cache=False)
    compared(looped, by_positions, rows(), positions)
    positions[0] = -1
    compared(looped, by_positions, rows(), positions)
    positions.data[1] = -1
    compared(looped, by_positions, rows(), positions)


@pytest.mark.deep
def test_a_value_that_is_not_compared_is_seen(monkeypatch):
    monkeypatch.setattr("nsa_compile.program.constants.Held.is_what", lambda self, x: True)
    looped = nsa_compile.loop(by_positions, nested="eager", cache=False)
    compared(looped, by_positions, rows(), torch.arange(S))
    with pytest.raises(AssertionError):
        compared(looped, by_positions, rows(), torch.arange(S) - 2)


@pytest.mark.deep(but=["shape2-dtype4"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (4,), (0,), (4, 4), (1, 1, 3, 3), (2, 2, 2)])
def test_tensors_of_any_kind_may_be_made_before_a_loop(dtype, shape):
    def run(x, made):
        out = []
        for t in range(x.shape[0]):
            out.append(x[t] * made.to(x.dtype).sum())
        return torch.stack(out)

    made = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    x = rows(0, 3)
    torch.testing.assert_close(nsa_compile.loop(run, nested="eager", cache=False)(x, made), run(x, made))
