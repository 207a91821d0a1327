"""An integer is equal to the row that a step writes of it: under a finite fill the key of the step itself is kept."""

from __future__ import annotations

import pytest
import torch

import nsa_compile
from nsa_compile import scan
from tests.catalogue.catalogue import verdict
from tests.passes.test_found_programs import equal_gradients, rows

S, B, H = 12, 2, 2
T = torch.arange(S)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def attention(seen, write=lambda t, own, ids: torch.where(t == T, own[:, None], ids), shape=(B, S)):
    """Causal attention to the keys whose numbers meet those of a token, all others at a finite fill."""

    def run(q, k, v, numbers):
        def step(state, token):
            t, q, k, v, own = token
            before, K, V = state
            ids = write(t, own, before)
            K, V = (torch.where((t == T)[:, None], x[:, :, None], c) for x, c in ((k, K), (v, V)))
            mask = (t >= T) & seen(ids, own, before)
            scores = torch.einsum("bhd,bhsd->bhs", q, K).masked_fill(~mask[:, None], torch.finfo(q.dtype).min)
            return (ids, K, V), torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), V)

        state = torch.zeros(shape, dtype=numbers.dtype), torch.zeros(B, H, S, 4, dtype=q.dtype), q.new_zeros(B, H, S, 4)
        return scan(step, state, (T, q, k, v, numbers))[1]

    return run


def scattered(t, own, ids):
    return ids.scatter(1, t.expand(B, 1), own[:, None])


KEPT = {
    "equal": attention(lambda ids, own, _: ids == own[:, None]),
    "equal, the other way round": attention(lambda ids, own, _: own[:, None] == ids),
    "not unequal": attention(lambda ids, own, _: ~(ids != own[:, None])),
    "no more": attention(lambda ids, own, _: ids <= own[:, None]),
    "no less": attention(lambda ids, own, _: ids >= own[:, None]),
    "not more": attention(lambda ids, own, _: ~(ids > own[:, None])),
    "written by scatter": attention(lambda ids, own, _: ids == own[:, None], scattered),
    "written by index_copy": attention(
        lambda ids, own, _: ids == own[:, None], lambda t, own, ids: ids.index_copy(1, t[None], own[:, None])
    ),
    "one for all sequences": attention(
        lambda ids, own, _: (ids == own[0])[None], lambda t, own, ids: torch.where(t == T, own[0], ids), (S,)
    ),
}

# The own key may be hidden, so that the fill decides.
NOT_KEPT = {
    "less": attention(lambda ids, own, _: ids < own[:, None]),
    "not equal": attention(lambda ids, own, _: ids != own[:, None]),
    "the number of the other sequence": attention(lambda ids, own, _: ids == own.flip(0)[:, None]),
    "the number of the last sequence": attention(lambda ids, own, _: ids == own[1:, None]),
    "another number": attention(lambda ids, own, _: ids == own[:, None] + 1),
    "before the step writes it": attention(lambda ids, own, before: before == own[:, None]),
    "written at every other step": attention(
        lambda ids, own, _: ids == own[:, None],
        lambda t, own, ids: torch.where((t == T) & (t % 2 == 0), own[:, None], ids),
    ),
    "written one row later": attention(
        lambda ids, own, _: ids == own[:, None], lambda t, own, ids: torch.where(t + 1 == T, own[:, None], ids)
    ),
    "another number is written": attention(
        lambda ids, own, _: ids == own[:, None], lambda t, own, ids: torch.where(t == T, own[:, None] * 2, ids)
    ),
    "numbers of floating point, of which one is none": attention(lambda ids, own, _: ids == own[:, None]),
}


def given(name):
    q, k, v = (x.requires_grad_() for x in rows(3, S, B, H, 4).unbind(0))
    numbers = torch.tensor(
        [[1, 2], [1, 2], [1, 3], [2, 3], [2, 2], [2, 2], [3, 1], [3, 3], [1, 3], [1, 1], [1, 1], [2, 1]]
    )
    if "floating" in name:
        numbers = numbers.double()
        numbers[5, 0] = torch.nan
    return q, k, v, numbers


@pytest.mark.deep(every=3, but=["the number of the last sequence"])
@pytest.mark.parametrize("name", {**KEPT, **NOT_KEPT})
def test_what_is_compared_with_itself_is_equal(name):
    run = (KEPT | NOT_KEPT)[name]
    equal_gradients(lambda *x: (run(*x),), *given(name))
    report = nsa_compile.last_report()
    copied = bool(report.scans[0].guards_kept) or any(p.name == "unroll_buffers" and p.matches for p in report.passes)
    assert ("scored_attention" in verdict(report) and not copied) == (name in KEPT)
