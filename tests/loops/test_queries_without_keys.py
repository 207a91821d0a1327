"""Queries that keep no key: NaN in the loop, and so are the gradients of the values that the step attends to, whether a
mask hides them or not. Those that it does not attend to, such as rows that a window has left behind, have none.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile.passes import raise_attention

S, D, W = 11, 4, 4


def attend(q, K, V, keep, bias):
    scores = K @ q / 2
    if bias:  # a program of scores
        scores = scores + torch.arange(len(K), dtype=scores.dtype) / 10
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ V


def written(rows, t, new):
    return rows.index_copy(0, torch.tensor([t]), new[t : t + 1])


def all_rows(q, k, v, seen, bias):
    K, V, M, out = torch.zeros(S, D), torch.zeros(S, D), torch.zeros(S, dtype=torch.bool), []
    for t in range(S):
        K, V, M = (written(rows, t, new) for rows, new in ((K, k), (V, v), (M, seen)))
        out.append(attend(q[t], K, V, M & (torch.arange(S) <= t), bias))
    return torch.stack(out)


def window_by_mask(q, k, v, seen, bias):
    K, V, M, out = [], [], [], []
    for t in range(S):
        K.append(k[t])
        V.append(v[t])
        M.append(seen[t])
        keep = torch.stack(M) & (torch.arange(t + 1) > t - W)
        out.append(attend(q[t], torch.stack(K), torch.stack(V), keep, bias))
    return torch.stack(out)


def values_given_as_a_whole(q, k, v, seen, bias):
    out = []
    for t in range(S):
        out.append(attend(q[t], k, v, seen & (torch.arange(S) <= t), bias))
    return torch.stack(out)


def last_rows_of_a_list(q, k, v, seen, bias):
    K, V, M, out = [], [], [], []
    for t in range(S):
        K.append(k[t])
        V.append(v[t])
        M.append(seen[t])
        out.append(attend(q[t], torch.stack(K[-W:]), torch.stack(V[-W:]), torch.stack(M[-W:]), bias))
    return torch.stack(out)


def slices_of_what_is_given(q, k, v, seen, bias):
    out = []
    for t in range(S):
        a = max(0, t + 1 - W)
        out.append(attend(q[t], k[a : t + 1], v[a : t + 1], seen[a : t + 1], bias))
    return torch.stack(out)


def ring(q, k, v, seen, bias):
    K, V, M, out = torch.zeros(W, D), torch.zeros(W, D), torch.zeros(W, dtype=torch.bool), []
    for t in range(S):
        K, V, M = (written(rows, t % W, new[t - t % W :]) for rows, new in ((K, k), (V, v), (M, seen)))
        out.append(attend(q[t], K, V, M, bias))
    return torch.stack(out)


def first_and_last_rows(q, k, v, seen, bias):
    K, V, M, out = k[:0], v[:0], seen[:0], []
    for t in range(S):
        K, V, M = (torch.cat([rows, new[t : t + 1]]) for rows, new in ((K, k), (V, v), (M, seen)))
        if len(K) > W + 1:
            K, V, M = (torch.cat([rows[:1], rows[-W:]]) for rows in (K, V, M))
        out.append(attend(q[t], K, V, M, bias))
    return torch.stack(out)


def cut_in_two_ways(q, k, v, seen, bias):
    """The values' rows are copied for each step."""
    K, V, M, out = [], v[:0], seen[:0], []
    for t in range(S):
        K.append(k[t])
        V, M = torch.cat([V, v[t : t + 1]])[-W:], torch.cat([M, seen[t : t + 1]])
        out.append(attend(q[t], torch.stack(K)[max(0, t + 1 - W) :], V, M[-W:], bias))
    return torch.stack(out)


def rows_at_some_steps(q, k, v, seen, bias):
    K, V, M, out = [], [], [], []
    for t in range(S):
        if t % 2 == 0:
            K.append(k[t])
            V.append(v[t])
            M.append(seen[t])
        out.append(attend(q[t], torch.stack(K), torch.stack(V), torch.stack(M), bias))
    return torch.stack(out)


def two_sets(q, k, v, seen, bias):
    """The last rows, and every third of all, in one softmax."""
    K, V, M, far_k, far_v, far, out = [], [], [], [], [], [], []
    for t in range(S):
        K.append(k[t])
        V.append(v[t])
        M.append(seen[t])
        if t % 3 == 0:
            far_k.append(2 * k[t])
            far_v.append(3 * v[t])
            far.append(seen[t])
        keys = torch.cat([torch.stack(K[-W:]), torch.stack(far_k)])
        values = torch.cat([torch.stack(V[-W:]), torch.stack(far_v)])
        out.append(attend(q[t], keys, values, torch.cat([torch.stack(M[-W:]), torch.stack(far)]), bias))
    return torch.stack(out)


def two_products(q, k, v, seen, bias):
    """The weights of two sets, one of them of values as they are given, are taken apart again."""
    out = []
    for t in range(S):
        n = max(0, t + 1 - W)
        scores = torch.cat([k[: t + 1] @ q[t], k[n : t + 1] @ q[t] * 2])
        weights = scores.masked_fill(~torch.cat([seen[: t + 1], seen[n : t + 1]]), -math.inf).softmax(-1)
        out.append(weights[: t + 1] @ v[: t + 1] + v[n : t + 1].T @ weights[t + 1 :])
    return torch.stack(out)


def sums_of_products(q, k, v, seen, bias):
    """A softmax that is written out, whose NaN are taken out of the weights or not."""
    out = []
    for t in range(S):
        scores = (k[: t + 1] @ q[t]).masked_fill(~seen[: t + 1], -math.inf)
        weights = (scores - scores.amax()).exp()
        weights = weights / weights.sum()
        if bias:
            weights = torch.where(weights.isnan(), torch.zeros_like(weights), weights)
        out.append((weights[:, None] * v[: t + 1]).sum(0))
    return torch.stack(out)


def torchs_attention(q, k, v, seen, bias):
    """It yields zeros, and no NaN."""
    out = []
    for t in range(S):
        keep = seen[None, : t + 1]
        if bias:
            keep = torch.where(keep, 0.0, -math.inf)
        out.append(F.scaled_dot_product_attention(q[t : t + 1], k[: t + 1], v[: t + 1], attn_mask=keep)[0])
    return torch.stack(out)


PROGRAMS = [
    all_rows, window_by_mask, values_given_as_a_whole, last_rows_of_a_list, slices_of_what_is_given, ring,
    first_and_last_rows, cut_in_two_ways, rows_at_some_steps, two_sets, two_products,
    sums_of_products, torchs_attention,
]  # fmt: skip
MASKS = torch.ones(S) > 0, torch.arange(S) < 3, torch.arange(S) > 8, torch.arange(S) % 6 == 0, torch.zeros(S) > 0


def judged(program, bias):
    torch.manual_seed(0)
    given = [torch.randn(S, D) for _ in range(3)]
    direction = torch.randn(S, D)
    compiled = nsa_compile.loop(program, nested="eager", cache=False)
    for seen in MASKS:
        found = []
        for f in (program, compiled):
            inputs = [x.clone().requires_grad_() for x in given]
            out = f(*inputs, seen, bias)
            found.append([out, *torch.autograd.grad((out * direction).sum(), inputs)])
        for name, expected, actual in zip("oqkv", *found, strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-4, atol=1e-5, msg=f"of {name}")


@pytest.mark.deep(but=["first_and_last_rows-plain"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients_are_nan_where_those_of_the_loop_are(program, bias, double):
    judged(program, bias)


@pytest.mark.deep
def test_rows_that_come_and_go_are_still_those_of_a_cache(double):
    judged(last_rows_of_a_list, False)
    report = str(nsa_compile.last_report())
    assert "attention by a program of scores" in report
    assert "copy" not in report


@pytest.mark.deep(every=3)
@pytest.mark.parametrize(
    ("broken", "program"),
    [
        (lambda *given: (0, 0, 0, -1), all_rows),
        (lambda *given: (0, 0, 1, W + 1), last_rows_of_a_list),
        (lambda *given: (0, 1, 1, W - 1), last_rows_of_a_list),
    ],
)
def test_a_planted_fault_is_seen(broken, program, monkeypatch, double):
    monkeypatch.setattr(raise_attention, "keys_there", broken)
    with pytest.raises(AssertionError):
        judged(program, False)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
