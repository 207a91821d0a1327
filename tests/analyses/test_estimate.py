"""Estimates of what a graph costs, against counting by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.analyses.estimate import Estimate, estimate, peak_of
from nsa_compile.models import nsa_attention
from nsa_compile.passes import pipeline
from nsa_compile.passes.report import Report
from tests.models.test_nsa import EXAMPLE

FLOAT = 4  # bytes


def estimate_of(fn, *args) -> Estimate:
    """The estimate of the graph that Dynamo captures of `fn`, before any pass."""
    estimates = []

    def keep(gm, _):
        estimates.append(estimate(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True, dynamic=False)(*args)
    (only,) = estimates
    return only


@pytest.mark.parametrize(
    "spelling", [torch.matmul, torch.nn.functional.linear, lambda a, b: torch.einsum("mk,nk->mn", a, b)]
)
def test_a_matrix_product(spelling):
    m, k, n = 5, 7, 3
    a, b = torch.randn(m, k), torch.randn(n, k)
    cost = estimate_of(lambda a, b: spelling(a, b.t() if spelling is torch.matmul else b), a, b)
    size = FLOAT * (m * k + k * n + m * n)
    assert cost == Estimate(operators=1, flops=2 * m * n * k, bytes_moved=size, peak_bytes=size)


def test_peak_of_a_chain_is_two_links():
    """x lives throughout; a link lives until the next one is made. The last is the output."""

    def chain(x):
        for _ in range(6):
            x = torch.tanh(x)
        return x

    size = FLOAT * 10
    cost = estimate_of(chain, torch.randn(10))
    assert cost == Estimate(operators=6, flops=0, bytes_moved=6 * 2 * size, peak_bytes=3 * size)


def test_what_is_read_late_lives_long():
    def late(x):
        early = x.sin()
        y = x.cos().tan().exp()  # at most two of these beside x and early
        return y + early

    assert estimate_of(late, torch.randn(10)).peak_bytes == 4 * FLOAT * 10


def test_all_outputs_live_to_the_end():
    assert estimate_of(lambda x: (x.sin(), x.cos(), x.tan()), torch.randn(10)).peak_bytes == 4 * FLOAT * 10


def test_views_cost_nothing_and_share_a_storage():
    x = torch.randn(4, 6)
    plain = estimate_of(lambda x: x.sin(), x)
    viewed = estimate_of(lambda x: (x.t()[1:].unsqueeze(0), x.sin().view(24).reshape(2, 12).t())[1], x)
    assert viewed == plain


def test_a_view_keeps_its_storage_alive():
    def through_a_view(x):
        row = x.sin()[0]  # 1 of 10 rows, and the rest with it
        y = (x.cos() * 2).sum(0)
        return y + row

    x = torch.randn(10, 10)
    assert estimate_of(through_a_view, x).peak_bytes == 4 * FLOAT * 100


def test_an_expanded_dimension_is_read_once():
    x, y = torch.randn(1, 8), torch.randn(100, 8)
    assert estimate_of(lambda x, y: x.expand(100, 8) + y, x, y).bytes_moved == FLOAT * (8 + 800 + 800)


def test_in_place_operators_read_and_write_one_storage():
    def twice(x):
        y = x.sin()
        y.mul_(2)
        return y

    size = FLOAT * 10
    cost = estimate_of(twice, torch.randn(10))
    assert cost.operators == 2
    assert cost.peak_bytes == 2 * size


def running_products(x, w):
    """A scan of `[n]` rows, a matrix product a step."""

    def step(h, row):
        h = torch.tanh(h @ w + row)
        return h, h * 2

    return nsa_compile.scan(step, x.new_zeros(1, x.shape[-1]), x[:, None])[1]


@pytest.mark.deep
def test_a_scan_costs_its_body_at_every_step():
    n = 6
    w = torch.randn(n, n)
    one, two, many = (estimate_of(running_products, torch.randn(S, n), w) for S in (1, 2, 40))
    step = two.operators - one.operators
    assert step == 6  # mm, add, tanh, mul, and the copies of both outputs
    assert many.operators == one.operators + 39 * step
    assert [cost.flops for cost in (one, two, many)] == [S * 2 * n * n for S in (1, 2, 40)]
    # A longer loop holds more rows, of xs and of ys, and nothing else: one step works at a time.
    assert many.peak_bytes - one.peak_bytes == 39 * 2 * n * FLOAT


def test_the_peak_of_a_scan_is_in_its_body():
    def wide_steps(x):
        def step(h, row):
            return h + row, (row[:, None] @ torch.ones(1, 1000)).sum(1)

        return nsa_compile.scan(step, torch.zeros(5), x)[1]

    assert estimate_of(wide_steps, torch.randn(20, 5)).peak_bytes > 5 * 1000 * FLOAT


def region(x, w):
    return (x @ w).tanh().sin()


@pytest.mark.parametrize(
    "called", [lambda *x: checkpoint(region, *x, use_reentrant=False), torch.compiler.nested_compile_region(region)]
)
def test_regions_are_walked_into(called):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    assert estimate_of(lambda x, w: called(x, w), x, w) == estimate_of(region, x, w)


@pytest.mark.deep
def test_the_report_says_what_the_passes_bought():
    torch._dynamo.reset()
    fast = nsa_compile.compile(
        lambda *x: nsa_attention(*x, pattern=EXAMPLE.pattern),
        nested="eager",
        cache=False,
        estimate=True,
        attention="sparse",
    )
    fast(*EXAMPLE.tensors())
    report = nsa_compile.last_report()
    before, after = report.estimate_captured, report.passes[-1].estimate
    for cost in (before, *(p.estimate for p in report.passes)):
        assert all(type(number) is int and number > 0 for number in vars(cost).values())
    assert after.operators < before.operators / 10
    assert after.bytes_moved < before.bytes_moved
    # The same products as in the loop, less those of φ and of scores nobody needs.
    assert 0.2 * before.flops < after.flops <= before.flops
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_estimates_are_made_when_asked_for():
    torch._dynamo.reset()
    nsa_compile.compile(torch.sin, nested="eager", cache=False)(torch.randn(3))
    report = nsa_compile.last_report()
    assert report.estimate_captured is None
    assert all(p.estimate is None for p in report.passes)


def test_what_cannot_be_estimated_still_compiles(monkeypatch):
    def fails(gm):
        raise NotImplementedError("aten.mystery\nhas no fake implementation")

    monkeypatch.setattr(pipeline, "estimate", fails)
    torch._dynamo.reset()
    nsa_compile.compile(torch.sin, nested="eager", cache=False, estimate=True)(torch.randn(3))
    assert nsa_compile.last_report().notes == ["no estimate: aten.mystery"]


def test_the_peak_of_a_computation_counts_what_it_makes_and_not_its_inputs():
    with FakeTensorMode():
        x = torch.empty(1000)

        def work():
            total = (x + 1) * 2  # the sum is dead when the square is made
            return total.square()

        assert peak_of(work, [x]) == 2 * x.nbytes
        # Without them being told, inputs are taken for constants, which are there throughout.
        assert peak_of(work, []) == 3 * x.nbytes
