"""Biases by the distance of query and key: an element for each distance; and others, as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nsa_compile import scan
from nsa_compile.ops.scored import portable
from nsa_compile.passes import raise_attention
from tests.passes.test_found_programs import INF, equal_gradients, rows

H, S, D, BUCKETS = 2, 11, 4, 6


def buckets(ago):
    """As T5 has them: the first by distance, the others by its logarithm."""
    far = 3 + ((ago.clamp_min(1) / 3).log() * 2).long()
    return torch.where(ago < 3, ago.clamp_min(0), far.clamp_max(BUCKETS - 1))


BIASES = {
    "index": lambda table, t, P: table[:, buckets(t - P)],
    "of the last dimension": lambda table, t, P: table.T[buckets(t - P)].permute(1, 0),
    "index_select": lambda table, t, P: table.index_select(1, buckets(t - P)),
    "embedding": lambda table, t, P: F.embedding(buckets(t - P), table.T).movedim(-1, 0),
    "gather": lambda table, t, P: table.gather(1, buckets(t - P).expand(H, -1)),
    "both directions": lambda table, t, P: table[:, (t - P).abs().clamp_max(BUCKETS - 1)],
    "each head another distance": lambda table, t, P: table.gather(1, buckets(torch.stack([t - P, 2 * (t - P)]))),
    "scaled": lambda table, t, P: 0.5 * table[:, buckets(t - P)],
}
OTHERS = {
    "by position": lambda table, t, P: table[:, P.clamp_max(BUCKETS - 1)],
    "by the query alone": lambda table, t, P: table.index_select(1, t.clamp_max(BUCKETS - 1).view(1)),
    "of the sum": lambda table, t, P: table[:, (t + P) % BUCKETS],
    "at one pair otherwise": lambda table, t, P: table[:, torch.where((t == 7) & (P == 2), 5, buckets(t - P))],
    "at a pair that is masked": lambda table, t, P: table[:, torch.where((t == 2) & (P == 7), 5, buckets(t - P))],
    "of a table that changes": lambda table, t, P: (table * (t + 1))[:, buckets(t - P)],
}


def attention(bias):
    def run(q, k, v, table):
        P = torch.arange(len(q))

        def step(caches, row):
            t, q, k, v = row
            K, V = (torch.where((t == P)[:, None, None], x, c) for x, c in zip((k, v), caches, strict=True))
            s = torch.einsum("hd,phd->hp", q, K) + bias(table, t, P)
            return (K, V), torch.einsum("hp,phd->hd", s.masked_fill(t < P, -INF).softmax(-1), V)

        return scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (P, q, k, v))[1]

    return run


def checked(bias, steps=S, nested="eager"):
    """Compare the program with its loop."""
    torch._dynamo.reset()
    inputs = rows(3, steps, H, D).unbind()
    table = rows(H, BUCKETS)
    equal_gradients(attention(bias), *(x.clone().requires_grad_() for x in (*inputs, table)), nested=nested)


@pytest.fixture
def read(monkeypatch):
    """The last dimensions of what scores of programs read."""
    seen = []
    forward = portable.forward

    def spied(q, k, v, leaves, program, tiles):
        seen.extend(x.shape[3] for x in leaves)
        return forward(q, k, v, leaves, program, tiles)

    monkeypatch.setattr(portable, "forward", spied)
    return seen


@pytest.mark.deep(but=["both directions"])
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_by_distance_has_an_element_for_each(name, read):
    checked(BIASES[name])
    assert 2 * S - 1 in read


@pytest.mark.deep(but=["by position"])
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_bias_has_none(name, read):
    checked(OTHERS[name])
    assert read
    assert 2 * S - 1 not in read


@pytest.mark.deep(but=["1"])
@pytest.mark.parametrize("steps", [1, 2, 70])
def test_any_length(steps):
    checked(BIASES["index"], steps)


@pytest.mark.deep
def test_through_inductor():
    checked(BIASES["embedding"], nested="inductor")


def test_distances_off_by_one_are_seen(monkeypatch):
    found = raise_attention.KeySet.by_distance

    def shifted(self, record):
        keys = found(self, record)
        for leaf in keys.leaves:
            if leaf.by_distance is not None:
                leaf.by_distance[1][...] = leaf.by_distance[1].roll(1, -1)
        return keys

    monkeypatch.setattr(raise_attention.KeySet, "by_distance", shifted)
    with pytest.raises(AssertionError):
        checked(BIASES["index"])
