"""Rows of a cache that a step picks by data: values and gradients are those of the loop, and no cache is copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import picked_rows, softmax, staleness, unrolled_picks
from tests.strategies import few

D, BLOCKS = 4, 6
INF, LOWEST = float("inf"), torch.finfo(torch.float64).min


@dataclass(frozen=True)
class Picks:
    """How a step picks rows, and what it does with them."""

    batch: int = 2
    heads: int = 2
    count: int = 3
    block: int = 1
    ranking: str = "topk"  # or sort
    past: str = "rows"  # what is ranked last: rows of the future, blocks of it, those not complete, or nothing
    own: bool = False  # whether the block of the step itself is ranked first
    hidden: str = "rows"  # how these are hidden: by their numbers, by what they are ranked by ("best"), not
    fill: float = -INF
    zeroed: str = ""  # what weights are set to zero behind the softmax: those of hidden rows, of more, none
    read: str = "attention"  # or mean
    twist: str = ""  # what makes picked rows something else than a set
    start: str = "zeros"  # what the caches hold at first

    @property
    def length(self) -> int:
        return BLOCKS * self.block


def program(p: Picks):
    positions, blocks = torch.arange(p.length), torch.arange(BLOCKS)

    def pick(cache, index):  # [B, H, S, D], [B, H, n]
        if p.twist == "by indices":
            return cache[torch.arange(p.batch)[:, None, None], torch.arange(p.heads)[:, None], index]
        if p.twist == "by apart indices":
            return cache.transpose(1, 2)[torch.arange(p.batch)[:, None], index[:, 0], 0][:, None].expand(
                -1, p.heads, -1, -1
            )
        if p.twist == "gathered blocks":
            cache = cache.unflatten(2, (-1, p.block))
            index = index[..., None, None].expand(-1, -1, -1, p.block, D)
            return cache.gather(2, index).flatten(2, 3)
        return cache.gather(2, index[..., None].expand(-1, -1, -1, D))

    def step(state, x):
        t, q, k, v, given = x
        K, V = (
            torch.where((positions == t)[:, None], row[:, :, None], c) for c, row in zip(state, (k, v), strict=True)
        )
        scores = torch.einsum("bhd,bhsd->bhs", q.detach(), K.detach()) if p.past else given
        if p.past == "rows":
            scores = scores.masked_fill(positions > t, -INF)
        if p.block > 1:
            scores = scores.unflatten(-1, (-1, p.block))
            scores = scores.amax(-1) if p.past == "rows" else scores.mean(-1)
        if p.past in ("blocks", "complete"):
            limit = t if p.past == "blocks" else t - p.block
            scores = scores.masked_fill(blocks * p.block > limit, -INF)
        if p.own:
            scores = scores.masked_fill(blocks == t // p.block, INF)
        if p.ranking == "topk":
            best, index = scores.topk(p.count, -1)
        else:
            best, index = (x[..., : p.count] for x in scores.sort(dim=-1, descending=True, stable=True))
        rows = (index[..., None] * p.block + torch.arange(p.block)).flatten(-2)
        best = best.repeat_interleave(p.block, -1)
        if p.twist == "twice":
            rows = rows // 2 * 2
        elif p.twist == "shifted":
            rows = (rows + 1).clamp(max=p.length - 1)
        by_block = p.twist == "gathered blocks"
        keys = pick(K, index if by_block else rows)
        others = (
            rows[:, :1].expand(-1, p.heads, -1)
            if p.twist == "other heads"
            else rows.flip(-1)
            if p.twist == "other order"
            else rows
        )
        values = pick(V, index if by_block else others)
        if p.read == "mean":
            return (K, V), (keys * q[:, :, None]).mean(2).tanh() + values.amax(2)
        s = torch.einsum("bhd,bhnd->bhn", q, keys)
        if p.twist == "by rank":
            s = s + torch.arange(s.shape[-1]) * 0.1
        if p.hidden == "rows":
            s = s.masked_fill(rows > t, p.fill)
        elif p.hidden == "best":
            s = s.masked_fill(best == -INF, p.fill)
        elif p.hidden == "not best":
            s = torch.where(best > -INF, s, p.fill)
        weights = s.softmax(-1)
        if p.zeroed:
            weights = weights.masked_fill(rows > t if p.zeroed == "hidden" else rows >= t, 0.0)
        out = torch.einsum("bhn,bhnd->bhd", weights, values)
        if p.twist == "weights":
            out = out + weights.square().sum(-1, keepdim=True)
        return (K, V), out

    def run(q, k, v, first):
        first = first if p.start == "given" else torch.zeros_like(first)
        state = (first, first * 2)
        given = torch.stack([(q[:, :, :, 0] * (i + 1)).cos() for i in range(p.length)], -1)
        xs = [torch.arange(p.length), *(x.movedim(2, 0) for x in (q, k, v, given))]
        return scan(step, state, tuple(xs))[1]

    return run


def inputs(p: Picks, seed: int = 0):
    torch.manual_seed(seed)
    return [torch.randn(p.batch, p.heads, p.length, D, dtype=torch.float64, requires_grad=True) for _ in range(4)]


def outcome(function, p: Picks, seed: int):
    given = inputs(p, seed)
    y = function(*given)
    torch.manual_seed(1)
    grads = torch.autograd.grad((y * torch.randn_like(y)).sum(), given, allow_unused=True)
    return [y.detach(), *(torch.zeros(1) if g is None else g for g in grads)]


def check(p: Picks, seed: int = 0):
    torch._dynamo.reset()
    compiled = nsa_compile.compile(program(p), nested="eager", attention="sparse", cache=False)
    (y, *gradients), (loop_y, *expected) = outcome(compiled, p, seed), outcome(program(p), p, seed)
    torch.testing.assert_close(y, loop_y, equal_nan=True)
    for actual, of_loop in zip(gradients, expected, strict=True):
        # What gradients a query gives that keeps no key, and is NaN, is not promised: see docs/what-compiles.md.
        told = ~(actual.isnan() | of_loop.isnan()) | ~loop_y.isnan().any()
        torch.testing.assert_close(actual[told], of_loop[told])
    return nsa_compile.last_report()


def operators(report):
    return [choice.operator for choice in report.attention]


def guards(report):
    return [name for s in report.scans for name in s.guards_kept]


SETS = {
    "tokens": Picks(),
    "sorted": Picks(ranking="sort"),
    "blocks": Picks(block=2),
    "gathered blocks": Picks(block=2, twist="gathered blocks"),
    "one head": Picks(batch=1, heads=1),
    "by indices": Picks(twist="by indices"),
    "by indices, one head": Picks(heads=1, twist="by indices"),
    "by what they are ranked by": Picks(hidden="best"),
    "by what they are ranked by, own first": Picks(past="complete", own=True, hidden="not best"),
    "lowest number": Picks(past="blocks", fill=LOWEST),
    "lowest number, blocks": Picks(block=2, past="blocks", own=True, fill=LOWEST, twist="gathered blocks"),
    "lowest number, own block first": Picks(block=2, past="complete", own=True, fill=LOWEST, count=2),
    "zeroed": Picks(block=2, past="blocks", own=True, zeroed="hidden"),
    "lowest number, zeroed": Picks(past="blocks", own=True, fill=LOWEST, zeroed="hidden"),
}


@pytest.mark.deep
@pytest.mark.parametrize("p", SETS.values(), ids=SETS)
def test_attention_to_picked_rows_is_attention_to_a_set(p):
    report = check(p)
    assert operators(report) == ["selected_attention"]
    assert not guards(report)


@pytest.mark.deep
@pytest.mark.parametrize("twist", ["twice", "shifted", "other heads", "other order", "by rank"])
def test_picked_rows_that_are_no_set_stay_what_they_are(twist):
    for block in (1, 2):
        report = check(Picks(block=block, twist=twist))
        assert "selected_attention" not in operators(report)
        assert not guards(report)


@pytest.mark.deep
@pytest.mark.parametrize("zeroed", ["", "hidden"])
@pytest.mark.parametrize("past", ["complete", ""])
def test_where_no_picked_row_may_be_seen_a_finite_fill_weighs_all_alike(past, zeroed):
    report = check(Picks(block=2, past=past, fill=LOWEST, zeroed=zeroed))
    assert "selected_attention" not in operators(report)


@pytest.mark.deep
@pytest.mark.parametrize("p", [Picks(twist="weights"), Picks(read="mean"), Picks(read="mean", past="")])
def test_rows_picked_for_something_else_need_no_copy_of_the_cache(p):
    assert not guards(check(p))


def test_a_cache_that_holds_something_at_first_keeps_its_guard():
    assert guards(check(Picks(start="given", read="mean", past="")))


PICKS = st.builds(
    Picks,
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    count=st.integers(1, 4),
    block=st.integers(1, 2),
    ranking=st.sampled_from(["topk", "sort"]),
    past=st.sampled_from(["rows", "rows", "blocks", "complete", ""]),
    own=st.booleans(),
    hidden=st.sampled_from(["rows", "best", "not best", "not"]),
    fill=st.sampled_from([-INF, LOWEST, -1e9]),
    zeroed=st.sampled_from(["", "", "hidden", "more"]),
    read=st.sampled_from(["attention", "attention", "mean"]),
    twist=st.sampled_from(
        [
            "",
            "",
            "weights",
            "twice",
            "shifted",
            "gathered blocks",
            "other heads",
            "other order",
            "by rank",
            "by indices",
            "by apart indices",
        ]
    ),
    start=st.sampled_from(["zeros", "zeros", "given"]),
)


@few(12)
@given(PICKS, st.integers(0, 1000))
def test_whatever_is_picked_the_loop_is_what_comes_out(p, seed):
    check(p, seed)


FAULTS = {
    "a row counts as written a step early": (
        picked_rows, "constant_node", lambda build, x, device, own=picked_rows.constant_node: own(build, x - 1, device),
        Picks(read="mean", past=""),
    ),
    "nobody asks by whose indices a row was picked": (
        unrolled_picks.PickUnroller, "_whose",
        lambda *args, own=unrolled_picks.PickUnroller._whose: None if own(*args) is None else own(*args) * 0,
        replace(SETS["tokens"], twist="other heads"),
    ),
    "any number is a place": (
        unrolled_picks.PickUnroller, "_is_place", lambda *_: True,
        replace(SETS["tokens"], twist="shifted", hidden="best"),
    ),
    "rows that were not picked have weights": (
        unrolled_picks._PickWriter, "_chosen",
        lambda self, columns, rank, dim, own=unrolled_picks._PickWriter._chosen:
            own(self, replace(columns, ranked=replace(columns.ranked, ends=())), rank, dim),
        SETS["sorted"],
    ),
    "a picked row is always seen": (
        staleness, "keeps_best", lambda *_: True, Picks(block=2, past="complete", fill=LOWEST),
    ),
    "a mask behind the softmax removes nothing more": (
        softmax, "same_mask", lambda *_: True,
        Picks(block=2, past="blocks", own=True, zeroed="more"),
    ),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    owner, name, broken, p = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        check(p)
