"""Programs spelled with what few others use: each equals its loop, and none is left a loop for its spelling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile import scan
from tests.catalogue.catalogue import verdict
from tests.passes.test_found_programs import equal_gradients, rows

INF = torch.inf
S = 9
T = torch.arange(S)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(shape, dtype=dtype)


def recurrence(update, read=lambda s, *_: s):
    """A carry of a recurrence, and what is read of it after each step."""

    def run(first, *xs):
        def step(s, row):
            s = update(s, *row)
            return s, read(s, *row)

        return scan(step, first, xs)

    return run


def cached(attend, *first, shift=False):
    """Attention of queries to a cache of rows in their places, or, with `shift`, to the last ones."""

    def run(x, q, *more):
        init = first[0] if first else zeros(*x.shape)

        def step(k, row):
            t, new, *rest = row
            k = torch.cat([k[1:], new[None]]) if shift else k.index_copy(0, t[None], new[None])
            return k, attend(k, t, *rest)

        return scan(step, init, (T, x, q, *more))

    return run


def softmax(scores, *hidden):
    for mask in hidden:
        scores = scores.masked_fill(mask, -INF)
    return scores.softmax(-1)


def divided(s, x, y):
    return torch.addcdiv(s * 0.5, x, y.exp())


def divided_state(s, x, y):
    return torch.addcdiv(x, s, y.exp())


def mean_of_equals(s, x):
    return (s[None] * 0.7).expand(3, 4).mean(0) + x


def beside_its_rows(k, x):
    return torch.select_scatter(torch.cat([k[1:], k[:1]]), x, 0, -1)


def filled(k, x):
    k = k.clone()
    k[2:4] = 0.0
    k[4:].fill_(3.0)
    k[0] = x
    return k


def every_second(k, x):
    k = k.clone()
    k[1:4:2] = x
    return k


RECURRENCES = {
    "addcmul, scaled": (lambda s, x, y: torch.addcmul(s * 0.5, x, y), "parallel", (4,), (S, 4), (S, 4)),
    "addcmul of the state": (lambda s, x, y: torch.addcmul(x, s, y, value=0.3), "parallel", (4,), (S, 4), (S, 4)),
    "addcmul of the state last": (lambda s, x, y: torch.addcmul(x, y, s), "parallel", (4,), (S, 4), (S, 4)),
    "addcdiv": (divided, "parallel", (4,), (S, 4), (S, 4)),
    "addcdiv of the state": (divided_state, "parallel", (4,), (S, 4), (S, 4)),
    "negated": (lambda s, x: -s * 0.9 + x, "parallel", (4,), (S, 4)),
    "the mean of equal elements": (mean_of_equals, "parallel", (4,), (S, 4)),
    "the lower one by where": (lambda s, x: torch.where(s > x, x, s), "parallel", (4,), (S, 4)),
    "a row put beside others": (beside_its_rows, "batched", (5, 4), (S, 4)),
    "rows filled": (filled, "loop", (6, 4), (S, 4)),
    "a number added and reshaped": (lambda s, x: (s + 1).view(2, 2).reshape(4) * 0.5 + x, "parallel", (4,), (S, 4)),
    "addr": (lambda s, k, v: torch.addr(s, k, v, beta=0.5, alpha=2), "parallel", (4, 4), (S, 4), (S, 4)),
}


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences(name):
    update, expected, *shapes = RECURRENCES[name]
    equal_gradients(recurrence(update), *(rows(*shape).requires_grad_() for shape in shapes))
    assert verdict(nsa_compile.last_report()) == expected


def test_slices_of_complex_rows():
    """torch has no derivative of slice_scatter for complex numbers."""
    k, x = (torch.complex(rows(*shape), rows(*shape) * 2).requires_grad_() for shape in ((5, 4), (S, 4)))
    run = recurrence(every_second, lambda k, x: (k.sum(0) * x).abs())
    equal_gradients(lambda k, x: [run(k, x)[1]], k, x)


def _outer(k, v):
    return k[:, None] * v[None]


def number_in_the_sum(q, k, v, h):
    return lambda s: s * h.sigmoid() + _outer(k, v), lambda s: (s * q[:, None] * 0.5).sum(0)


def factor_in_the_sum(q, k, v, h):
    return lambda s: s * h.sigmoid() + torch.outer(-k, v), lambda s: (s * q[:, None] * v[None]).sum(0)


def by_products_of_columns(q, k, v, h):
    return lambda s: s * h.sigmoid() + k[:, None] @ v[None], lambda s: s.mT @ q * h


def transposed(q, k, v, h):
    return lambda s: s * h.sigmoid() + torch.outer(v, k).t(), lambda s: s.t() @ q


def swapped(q, k, v, h):
    return lambda s: s * h.sigmoid() + _outer(v, k).transpose(0, 1), lambda s: (s.transpose(0, 1) @ q[:, None])[:, 0]


def taken_twice(q, k, v, h):
    return lambda s: s * h.sigmoid() - -_outer(k, v) * 2 / 3, lambda s: q @ s


def rounded(q, k, v, h):
    return lambda s: s * h.sigmoid() + _outer(k.float(), v.float()).double(), lambda s: q @ s


LINEAR = {
    f.__name__: f
    for f in (
        number_in_the_sum, factor_in_the_sum, by_products_of_columns, transposed, swapped, taken_twice, rounded,
    )
}  # fmt: skip


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_in_chunks(name, before):
    """Long enough for chunks; a state is read before the step adds to it, or after."""

    def run(first, *xs):
        def step(s, row):
            add, read = LINEAR[name](*row)
            new = add(s)
            return new, read(s if before else new)

        return scan(step, first, xs)

    length = 130
    equal_gradients(run, rows(4, 4), *(rows(length, 4).requires_grad_() for _ in range(3)), rows(length))
    assert verdict(nsa_compile.last_report()) == "parallel"


def _by_position(k, t, q, p):
    return softmax(k @ q - 0.1 * (t - p), torch.arange(4) < 3 - t) @ k


def positions_that_are_given(x, q, p):
    def step(c, row):
        (k, p), (t, new, q) = c, row
        k, p = torch.cat([k[1:], new[None]]), torch.cat([p[1:], t[None]])
        return (k, p), _by_position(k, t, q, p)

    return scan(step, (zeros(4, 4), p), (T, x, q))[1:]


def narrow_positions_of_a_ring(x, q):
    def step(c, row):
        (k, p), (t, new, q) = c, row
        at = (t.long() % 4)[None]
        k, p = k.index_copy(0, at, new[None]), p.index_copy(0, at, t[None])
        return (k, p), softmax(k @ q - 0.1 * (t - p), p < 0) @ k

    return scan(step, (zeros(4, 4), torch.full((4,), -1, dtype=torch.int16)), (T.short(), x, q))[1:]


def two_rows_of_a_ring(x, q):
    def step(k, row):
        t, new, q = row
        k = k.index_copy(0, (2 * t + torch.arange(2)) % 6, torch.stack([new, new * 2]))
        return k, softmax(k @ q, torch.arange(6) > 2 * t + 1) @ k

    return scan(step, zeros(6, 4), (T, x, q))[1:]


def windows_joined_twice(x, q):
    def step(c, row):
        new, q = row
        a, b, d = (torch.cat([old[1:], new[None] * n]) for n, old in enumerate(c, 1))
        k = torch.cat([torch.cat([a, b]) * 2, d])
        return (a, b, d), softmax(k @ q) @ k

    return scan(step, (zeros(3, 4), zeros(2, 4), zeros(2, 4)), (x, q))[1:]


def rows_of_two_precisions(x, q):
    def step(c, row):
        (a, b), (t, new, q) = c, row
        a, b = a.index_copy(0, t[None], new[None].float()), b.index_copy(0, t[None], new[None] * 2)
        weights = torch.cat([(a.double() @ q), b @ q])
        return (a, b), softmax(weights, torch.cat([t < T] * 2)) @ torch.cat([a, b])

    return scan(step, (zeros(S, 4, dtype=torch.float32), zeros(S, 4)), (T, x, q))[1:]


def chosen_of_the_last_blocks(x, q):
    """Of the best blocks only those count that are whole or near."""
    blocks = torch.arange(4)

    def step(k, row):
        t, new, q = row
        k = k.index_copy(0, t[None], new[None])
        chosen = torch.zeros(4, dtype=torch.bool).scatter(0, q.topk(1).indices, True)
        near = (blocks >= t // 3 - 1) & (blocks <= t // 3)
        seen = ((chosen & near) | (blocks == t // 3)).repeat_interleave(3) & (t >= torch.arange(12))
        return k, softmax(k @ q, ~seen) @ k

    return scan(step, zeros(12, 4), (T, x, q))[1:]


def heads_without_keys(x, q):
    def attend(k, t, q):
        scores = torch.stack([k @ q, k @ q * 2])
        return softmax(scores, (t - 2 < T)[None]).sum(0, keepdim=True).nan_to_num() @ k

    return cached(attend)(x, q)[1:]


ATTENTION = {
    "positions that are given": (positions_that_are_given, "scored_attention"),
    "narrow positions of a ring": (narrow_positions_of_a_ring, "scored_attention"),
    "two rows of a ring": (two_rows_of_a_ring, "scored_attention"),
    "windows joined twice": (windows_joined_twice, "scored_attention"),
    "rows of two precisions": (rows_of_two_precisions, "scored_attention"),
    "chosen of the last blocks": (chosen_of_the_last_blocks, "dense"),
    "heads without keys": (heads_without_keys, "batched"),
    "scaled by a tensor": (
        cached(lambda k, t, q: softmax(torch.mul(torch.tensor(0.3, dtype=q.dtype), k @ q), t < T) @ k),
        "window_attention",
    ),
    "scaled behind the mask": (
        cached(lambda k, t, q: (0.3 * (k @ q).masked_fill(t < T, -INF)).softmax(0) @ k),
        "window_attention",
    ),
    "a bias of narrow integers": (
        cached(lambda k, t, q: softmax(k @ q - torch.arange(S, dtype=torch.int16) % 3 * 0.5, t < T) @ k),
        "scored_attention",
    ),
}


@pytest.mark.deep(every=2)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    run, expected = ATTENTION[name]
    more = [torch.tensor([-4, -3, -2, -1])] if name == "positions that are given" else []
    equal_gradients(run, rows(S, 4).requires_grad_(), rows(S, 4).flip(0).requires_grad_(), *more)
    assert verdict(nsa_compile.last_report()) == expected


@pytest.mark.parametrize(
    "read",
    [lambda r: r.softmax(-1), lambda r: F.softmin(r, 0), lambda r: r.transpose(0, -1), lambda r: r.flip(0)],
)
def test_along_a_dimension_of_a_number(read):
    """torch takes a number for a tensor of one element, and counted from behind there was no last dimension."""

    def run(x):
        outside = read(x.sum())

        def step(s, r):
            s = s * 0.5 + read(r) * outside
            return s, s

        return scan(step, x[0], x)

    equal_gradients(run, rows(S).requires_grad_())
    assert verdict(nsa_compile.last_report()) == "parallel"


def test_cosine_similarity():
    """A neural Turing machine addresses its memory by it; torch writes in it where autograd is off."""

    def run(memory, keys, values):
        def step(memory, row):
            key, value = row
            weights = F.cosine_similarity(memory, key, dim=-1).softmax(0)[:, None]
            memory = memory * (1 - weights * 0.5) + weights * value
            return memory, weights.mT @ memory

        return scan(step, memory, (keys, values))

    equal_gradients(run, *(rows(*shape).requires_grad_() for shape in ((3, 4), (S, 4), (S, 4))))
    assert not any("writes" in decline.reason for decline in nsa_compile.last_report().declines)


@pytest.mark.parametrize("index", ["gather", "index_select"])
def test_what_is_picked_of_a_number(index):
    def run(x):
        number = torch.tensor(2.0, dtype=x.dtype)

        def step(s, row):
            zero, new = row
            at = zero if index == "gather" else zero[None]
            s = s * 0.5 + new * getattr(number, index)(0, at)
            return s, s

        return scan(step, x[0], (T * 0, x))

    equal_gradients(run, rows(S, 4).requires_grad_())
