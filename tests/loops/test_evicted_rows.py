"""Python loops whose caches lose rows when they are full, as people write them."""

from __future__ import annotations

import pytest
import torch

import nsa_compile

S, D, SINKS, WINDOW = 11, 4, 2, 3
FULL = SINKS + WINDOW


def attend(q, K, V):
    return (K @ q).softmax(-1) @ V


def cut_after_the_write(q, k, v):
    """StreamingLLM: the first tokens and the last ones."""
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        if K.shape[0] > FULL:
            K, V = torch.cat([K[:SINKS], K[-WINDOW:]]), torch.cat([V[:SINKS], V[-WINDOW:]])
        out.append(attend(q[t], K, V))
    return torch.stack(out)


def cut_before_the_write(q, k, v):
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        if K.shape[0] == FULL:
            K, V = torch.cat([K[:SINKS], K[SINKS + 1 :]]), torch.cat([V[:SINKS], V[SINKS + 1 :]])
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        out.append(attend(q[t], K, V))
    return torch.stack(out)


def cut_to_one_sink_before_the_write(q, k, v):
    """The rows in between are those of two segments and a new row, as they are read."""
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        if len(K) >= WINDOW + 1:
            K, V = torch.cat([K[:1], K[1 - WINDOW :]]), torch.cat([V[:1], V[1 - WINDOW :]])
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        out.append(attend(q[t], K, V))
    return torch.stack(out)


def past_key_values(q, k, v):
    """A pair that begins as None, `[1, 1, T, D]`, cut by its length."""
    out, past = [], None
    for t in range(S):
        K, V = k[t][None, None, None], v[t][None, None, None]
        if past is not None:
            K, V = torch.cat([past[0], K], 2), torch.cat([past[1], V], 2)
        n = K.shape[2]
        if n > FULL:
            K = torch.cat([K[:, :, :SINKS], K[:, :, n - WINDOW : n]], 2)
            V = torch.cat([V[:, :, :SINKS], V[:, :, n - WINDOW : n]], 2)
        past = K, V
        out.append(((q[t] @ K.transpose(-1, -2)).softmax(-1) @ V).flatten())
    return torch.stack(out)


def by_a_list_of_rows(q, k, v):
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        if K.shape[0] > 5:
            K, V = K[[0, 2, 3, 4, 5]], V[[0, 2, 3, 4, 5]]
        out.append(attend(q[t], K, V))
    return torch.stack(out)


def the_oldest_goes(q, k, v):
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        if K.shape[0] > WINDOW:
            K, V = K[1:], V[1:]
        out.append(attend(q[t], K, V))
    return torch.stack(out)


def compressed_when_full(q, k, v):
    """A block that is full becomes a row of another cache, and is emptied."""
    out, K, means = [], k.new_zeros(0, D), k.new_zeros(0, D)
    for t in range(S):
        K = torch.cat([K, k[t : t + 1]])
        if K.shape[0] == WINDOW:
            means, K = torch.cat([means, K.mean(0, keepdim=True)]), K[:0]
        rows = torch.cat([means, K])
        out.append(attend(q[t], rows, rows + v[t]))
    return torch.stack(out)


def by_data(q, k, v):
    """Which row is lost depends on the scores: a near miss."""
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        if K.shape[0] > WINDOW:
            kept = (K @ q[t]).topk(WINDOW).indices
            K, V = K[kept], V[kept]
        out.append(attend(q[t], K, V))
    return torch.stack(out)


def scaled_when_cut(q, k, v):
    """A near miss: rows change where they move."""
    out, K, V = [], k.new_zeros(0, D), v.new_zeros(0, D)
    for t in range(S):
        K, V = torch.cat([K, k[t : t + 1]]), torch.cat([V, v[t : t + 1]])
        if K.shape[0] > WINDOW:
            K, V = K[1:] * 0.9, V[1:]
        out.append(attend(q[t], K, V))
    return torch.stack(out)


ROWS_MOVE = [
    cut_after_the_write,
    cut_before_the_write,
    cut_to_one_sink_before_the_write,
    past_key_values,
    by_a_list_of_rows,
    the_oldest_goes,
    compressed_when_full,
]


@pytest.mark.deep(but=["past_key_values"])
@pytest.mark.parametrize("function", [*ROWS_MOVE, by_data, scaled_when_cut])
def test_a_cache_that_loses_rows(function):
    torch.manual_seed(0)
    inputs = [torch.randn(S, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = []
    for run in (nsa_compile.loop(function, nested="eager", attention="sparse", cache=False), function):
        y = run(*inputs)
        torch.manual_seed(1)
        found.append((y.detach(), torch.autograd.grad(y, inputs, torch.randn_like(y))))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
    if function in ROWS_MOVE:
        report = nsa_compile.last_report()
        (scan,) = report.scans
        assert scan.batched, scan
        assert not scan.recurrences, scan
        of_all_steps = f"attention of {S} queries" in str(report.passes)  # no copies of the cache for each step
        assert of_all_steps or function is compressed_when_full, report.passes
