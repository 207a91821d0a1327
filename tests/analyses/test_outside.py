"""Masks that are made before a loop: what the program names of them is known, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile.analyses import outside
from nsa_compile.analyses.facts import FIRST_STEPS
from tests.strategies import few

B, D = 2, 4
INF, LOWEST = float("inf"), torch.finfo(torch.float64).min


@dataclass(frozen=True)
class Masks:
    """How the mask of all steps is made, and how a step takes its row of it."""

    length: int = 5
    diagonal: int = 0  # the last key of step t is t + diagonal
    joined: str = "and"  # how that is joined with a mask that is data: and, or, not, where
    fill: float = -INF
    form: str = "bool"  # bool, bias, or weights after the softmax
    layout: str = "rows"  # rows, columns (scanned along the other dimension), broadcast
    closed: bool = False  # whether a mask that is the same at each step hides the last keys as well
    start: str = "zeros"  # what the caches hold at first


def program(p: Masks):
    S = p.length
    causal = torch.ones(S, S, dtype=torch.bool).tril(p.diagonal)

    def run(q, k, v, ids, first):
        same = ids[:, :, None] == ids[:, None]
        if p.layout == "broadcast":
            same = same[:1]
        seen = {
            "and": lambda: causal & same,
            "or": lambda: causal | same,
            "not": lambda: ~(~causal | ~same),
            "where": lambda: torch.where(causal, same, torch.zeros((), dtype=torch.bool)),
        }[p.joined]()
        if p.form == "bias":
            rows = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, p.fill)
        else:
            rows = seen
        if p.layout == "columns":
            rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
        rows = rows.expand(B, -1, -1).movedim(1, 0)
        near = (ids.sum(1, keepdim=True) > -1) & (torch.arange(S) < S - 1) if p.closed else None
        positions = torch.arange(S)

        def step(state, x):
            t, q, k, v, row = x
            K, V = (torch.where((positions == t)[:, None], n[:, None], c) for n, c in zip((k, v), state, strict=True))
            s = torch.einsum("bd,bsd->bs", q, K)
            if p.form == "bias":
                s = s + row
            elif p.form == "bool":
                s = s.masked_fill(~row, p.fill)
            if near is not None:
                s = s.masked_fill(~near, p.fill)
            weights = s.softmax(-1)
            if p.form == "weights":
                weights = weights * row
            return (K, V), torch.einsum("bs,bsd->bd", weights, V)

        start = first if p.start == "given" else torch.zeros_like(first)
        xs = (positions, *(x.movedim(1, 0) for x in (q, k, v)), rows)
        return nsa_compile.scan(step, (start, start * 2), xs)[1]

    return run


def outcome(function, p: Masks, seed: int):
    torch.manual_seed(seed)
    q, k, v, first = (torch.randn(B, p.length, D, dtype=torch.float64, requires_grad=True) for _ in range(4))
    ids = torch.randint(2, (B, p.length)).sort(-1).values
    y = function(q, k, v, ids, first)
    torch.manual_seed(1)
    grads = torch.autograd.grad((y * torch.randn_like(y)).sum(), (q, k, v, first), allow_unused=True)
    return y.detach(), [torch.zeros(1, dtype=y.dtype) if g is None else g for g in grads]


def check(p: Masks, seed: int = 0):
    torch._dynamo.reset()
    compiled = nsa_compile.compile(program(p), nested="eager", attention="sparse", cache=False)
    (y, gradients), (loop_y, expected) = outcome(compiled, p, seed), outcome(program(p), p, seed)
    torch.testing.assert_close(y, loop_y, equal_nan=True)
    for actual, of_loop in zip(gradients, expected, strict=True):
        # What gradients a query gives that keeps no key, and is NaN, is not promised: see docs/what-compiles.md.
        told = ~(actual.isnan() | of_loop.isnan()) | ~loop_y.isnan().any()
        torch.testing.assert_close((actual + 0 * of_loop)[told], (of_loop + 0 * actual)[told])
    (scan,) = nsa_compile.last_report().scans
    return scan


KNOWN = {
    "a mask": Masks(),
    "of De Morgan": Masks(joined="not"),
    "a bias": Masks(form="bias"),
    "scanned along columns": Masks(layout="columns"),
    "of one sequence for all": Masks(layout="broadcast", form="bias"),
    "with one that is closed over": Masks(closed=True),
}


def has_one_cache_for_each(scan) -> bool:
    """Whether attention reads the caches of the program, and not a pair that holds what was there before as well."""
    return scan.carries == ["Rows", "Rows"] and scan.batched and not scan.guards_kept


@pytest.mark.deep
@pytest.mark.parametrize("p", KNOWN.values(), ids=KNOWN)
def test_a_mask_that_names_later_keys_hides_them(p):
    assert has_one_cache_for_each(check(p))


@pytest.mark.deep
@pytest.mark.parametrize("change", [{"diagonal": 1}, {"joined": "or"}], ids=["a key too many", "or"])
@pytest.mark.parametrize("form", ["bool", "bias", "weights"])
def test_a_mask_that_may_show_a_later_key_does_not(form, change):
    assert not has_one_cache_for_each(check(replace(Masks(form=form), **change)))


@few(12)
@given(
    st.builds(
        Masks,
        length=st.integers(1, 6),
        diagonal=st.sampled_from([-1, 0, 0, 0, 1]),
        joined=st.sampled_from(["and", "or", "not", "where"]),
        fill=st.sampled_from([-INF, LOWEST, -1e9]),
        form=st.sampled_from(["bool", "bias", "weights"]),
        layout=st.sampled_from(["rows", "columns", "broadcast"]),
        closed=st.booleans(),
        start=st.sampled_from(["zeros", "zeros", "given"]),
    ),
    st.integers(0, 1000),
)
def test_whatever_is_made_outside_the_loop_is_what_comes_out(p, seed):
    check(p, seed)


def late(*args, own=outside._at_each_step):
    """Each mask lasts a step longer."""
    facts = own(*args)
    names = [name for name in FIRST_STEPS if name != "zero" and getattr(facts, name) is not None]
    steps = {name: (x := getattr(facts, name)) + (x > 0) for name in names}
    runs = {n: (x[0], x[1] + 1) for n in ("surely_true", "surely_false") if (x := getattr(facts, n)) is not None}
    return replace(facts, **steps, **runs)


@pytest.mark.deep
@pytest.mark.parametrize("form", ["bool", "bias"])
def test_a_mask_that_lasts_too_long_is_seen(form, monkeypatch):
    monkeypatch.setattr(outside, "_at_each_step", late)
    with pytest.raises(AssertionError):
        check(Masks(diagonal=1, form=form))
