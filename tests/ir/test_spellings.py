"""A softmax, a product of matrices and a choice that are written out become operators; what is not quite one stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_compile.ir.aten import aten
from nsa_compile.ir.spellings import normalize_spellings

SOFTMAX, MATRICES, CHOICE = aten._softmax.default, aten.bmm.default, aten.where.self


def check(function: Callable[..., Tensor], inputs: list[Tensor], target: object, *, found: bool = True) -> None:
    """Whether a function is spelled otherwise, with values and gradients as before."""
    gm = make_fx(function, {}, tracing_mode="fake")(*inputs)
    normalize_spellings(gm)
    gm.recompile()
    targets = [node.target for node in gm.graph.nodes]
    assert (target in targets) == found, gm.graph
    results = []
    for run in (function, gm):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = run(*given)
        torch.manual_seed(0)
        wanted = [x for x in given if x.requires_grad]
        grads = torch.autograd.grad((out * torch.randn_like(out)).sum(), wanted, allow_unused=True)
        results.append([out, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True))])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def scores(*shape: int) -> Tensor:
    """Some removed, and all of one row."""
    torch.manual_seed(1)
    s = torch.randn(*shape, dtype=torch.float64) * 30
    s[..., 1] = -torch.inf
    return s


def over_sum(s: Tensor, d: int, top: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
    e = (s - (s.amax(d, keepdim=True) if top is None else top(s, d))).exp()
    return e / e.sum(d, keepdim=True)


def with_one_more(s: Tensor, c: Tensor, top: Callable[[Tensor, Tensor], Tensor] = torch.maximum) -> Tensor:
    most = top(s.amax(-1, keepdim=True), c[:, None])
    e = (s - most).exp()
    return e / (e.sum(-1, keepdim=True) + (c[:, None] - most).exp())


def softmax1(s: Tensor, least: float = 0.0) -> Tensor:
    top = s.amax(-1, keepdim=True).clamp(min=least)
    e = (s - top).exp()
    return e / ((-top).exp() + e.sum(-1, keepdim=True))


WRITTEN_OUT = {
    "over the sum": lambda s: over_sum(s, -1),
    "along another dimension": lambda s: over_sum(s, 0),
    "max": lambda s: over_sum(s, -1, lambda s, d: s.max(d, keepdim=True).values),
    "max, detached": lambda s: over_sum(s, -1, lambda s, d: s.max(d, keepdim=True)[0].detach()),
    "amax of what is detached": lambda s: over_sum(s, -1, lambda s, d: s.detach().amax(d, True)),
    "log_softmax": lambda s: s.log_softmax(-1).exp(),
    "and one": lambda s: softmax1(s),
}
NEARLY = {
    "nothing taken off": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    "another number taken off": lambda s: over_sum(s, -1, lambda s, d: s.amin(d, keepdim=True)),
    "the largest of another dimension": lambda s: over_sum(s, -1, lambda s, d: s.amax(0, keepdim=True)),
    "the largest of all": lambda s: over_sum(s, -1, lambda s, d: s.amax().expand(3, 1)),
    "the largest of others": lambda s: over_sum(s, -1, lambda s, d: (2 * s).amax(d, keepdim=True)),
    "summed along another dimension": lambda s: _e(s) / _e(s).sum(0, keepdim=True),
    "over the mean": lambda s: _e(s) / _e(s).mean(-1, keepdim=True),
    "over twice the sum": lambda s: _e(s) / (_e(s).sum(-1, keepdim=True) + _e(s).sum(-1, keepdim=True)),
    "two and one": lambda s: softmax1(s, 1.0),
    "over a detached sum": lambda s: _e(s) / _e(s).sum(-1, keepdim=True).detach(),
}


def _e(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


@pytest.mark.parametrize("spelling", WRITTEN_OUT)
def test_a_softmax_is_named(spelling):
    check(WRITTEN_OUT[spelling], [scores(3, 5).clamp(min=-80)], SOFTMAX)
    check(WRITTEN_OUT[spelling], [scores(3, 5)[:, [0, 1, 3]]], SOFTMAX)


@pytest.mark.parametrize("spelling", NEARLY)
def test_what_is_nearly_a_softmax_is_not(spelling):
    check(NEARLY[spelling], [scores(3, 5).clamp(min=-1, max=1)], SOFTMAX, found=False)


# Of scores, what is shown of them, and values.
MASKED = {
    "times a mask": lambda s, m, v: _over(_e(s) * m) @ v,
    "times zeros and ones": lambda s, m, v: _over(m.to(s.dtype) * _e(s)) @ v,
    "by choice": lambda s, m, v: _over(torch.where(m, _e(s), 0.0)) @ v,
    "filled with zeros": lambda s, m, v: _over(_e(s).masked_fill(~m, 0.0)) @ v,
    "twice": lambda s, m, v: _over(_e(s).masked_fill(~m, 0.0) * m[0]) @ v,
    "a softmax, masked": lambda s, m, v: _over(s.softmax(-1) * m) @ v,
    "behind the values": lambda s, m, v: (lambda e: (e @ v) / e.sum(-1, keepdim=True))(_e(s)),
    "behind the values, masked": lambda s, m, v: (lambda e: (e @ v) / e.sum(-1, keepdim=True))(_e(s) * m),
    "behind the values, the sum reshaped": lambda s, m, v: (lambda e: (e @ v) / e.sum(-1)[..., None])(_e(s) * m),
    "behind the values of one query": lambda s, m, v: (
        lambda e: torch.einsum("bqk,bkd->bqd", e, v) / e.sum(-1, keepdim=True)
    )(_e(s) * m),
    "behind the values of vectors": lambda s, m, v: (
        lambda e: torch.einsum("bk,bkd->bd", e, v) / e.sum(-1, keepdim=True)
    )(_e(s[:, 0]) * m[:, 0]),
}
NEARLY_MASKED = {
    "over the sum of all": lambda s, m, v: (_e(s) * m) / _e(s).sum(-1, keepdim=True) @ v,
    "over the sum of others": lambda s, m, v: (_e(s) * m) / (_e(s) * ~m).sum(-1, keepdim=True) @ v,
    "and a little": lambda s, m, v: _e(s) * m / ((_e(s) * m).sum(-1, keepdim=True) + 1e-6) @ v,
    "along another dimension": lambda s, m, v: _e(s) * m / (_e(s) * m).sum(1, keepdim=True) @ v,
    "times numbers": lambda s, m, v: _over(_e(s) * v[..., :1].mT) @ v,
    "filled with ones": lambda s, m, v: _over(_e(s).masked_fill(~m, 1.0)) @ v,
    "masked before, the largest of all": lambda s, m, v: (
        _over((s.masked_fill(~m, -9) - s.amax(-1, keepdim=True)).exp()) @ v
    ),
    "behind the values, the sum of another row": lambda s, m, v: (lambda e: (e @ v) / e.sum(-1, keepdim=True).flip(1))(
        _e(s) * m
    ),
    "behind the values, turned": lambda s, m, v: (lambda e: (e.mT @ v[:, :3]) / e.sum(-1, keepdim=True)[:, :1])(
        _e(s) * m
    ),
    "behind the values, of all rows": lambda s, m, v: (lambda e: (e @ v) / e.sum((1, 2), keepdim=True))(_e(s) * m),
    "behind the values, over their sum": lambda s, m, v: (lambda e: (e @ v) / (e @ v).sum(-1, keepdim=True))(_e(s) * m),
}


def _over(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize(("spelling", "found"), [*((x, True) for x in MASKED), *((x, False) for x in NEARLY_MASKED)])
def test_a_softmax_that_is_masked_behind_the_exponentials(spelling, found):
    torch.manual_seed(0)
    s, v = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    shown = torch.rand(2, 3, 5) < 0.6
    shown[..., 0] = True
    function = {**MASKED, **NEARLY_MASKED}[spelling]
    check(lambda s, m, v: function(s, m, v), [s, shown, v], SOFTMAX, found=found)


def test_a_softmax_with_one_score_more():
    c = torch.randn(3, dtype=torch.float64)
    check(lambda s, c: with_one_more(s, c), [scores(3, 5), c], SOFTMAX)
    check(lambda s, c: with_one_more(s, c, lambda a, b: torch.maximum(b, a).detach()), [scores(3, 5), c], SOFTMAX)
    check(lambda s, c: with_one_more(s, c, lambda a, b: a), [scores(3, 5), c], SOFTMAX, found=False)
    check(
        lambda s, c: with_one_more(s, c, lambda a, b: torch.maximum(a, 2 * b)), [scores(3, 5), c], SOFTMAX, found=False
    )


LOG_SUMS = {
    "of products": (lambda p: (p - p.logsumexp(-1, keepdim=True)).exp(), True),
    "masked": (lambda p: _over_log_sum((p * 0.3).masked_fill(p > 1, -torch.inf)), True),
    "masked by choice": (lambda p: _over_log_sum(torch.where(p > 1, -torch.inf, p.tanh() * 9)), True),
    "detached": (lambda p: (p - p.logsumexp(-1, keepdim=True).detach()).exp(), False),
    "of what is detached": (lambda p: (p - p.detach().logsumexp(-1, keepdim=True)).exp(), False),
    "of what is not detached": (lambda p: (p.detach() - p.logsumexp(-1, keepdim=True)).exp(), False),
    "along another dimension": (lambda p: (p - p.logsumexp(0, keepdim=True)).exp(), True),
    "of another dimension": (lambda p: (p - p.mT.logsumexp(-1, keepdim=True)).exp(), False),
    "masked by a number": (lambda p: _over_log_sum(p.masked_fill(p > -99, -1e9)), False),
    "masked by ones times a number": (lambda p: _over_log_sum(p + torch.ones_like(p) * -1e9), False),
    "masked by a sum": (lambda p: _over_log_sum(p + torch.where(p > -99, -1e30, 0.0)), False),
}


def _over_log_sum(s: Tensor) -> Tensor:
    return (s - s.logsumexp(-1, keepdim=True)).exp()


@pytest.mark.parametrize("name", LOG_SUMS)
def test_less_the_log_sum_exp(name):
    """Of scores as low as those of masks it tells nothing of how many they are."""
    function, found = LOG_SUMS[name]
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)]
    check(lambda a, b: function(a @ b), given, SOFTMAX, found=found)


def test_a_mask_that_is_given_may_be_low():
    given = [torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)]
    check(
        lambda a, b, mask: _over_log_sum(a @ b + mask),
        [*given, torch.zeros(3, 3).double() - 1e30],
        SOFTMAX,
        found=False,
    )


def test_a_score_more_for_each_weight_is_no_softmax():
    def with_one_each(s: Tensor, c: Tensor) -> Tensor:
        most = torch.maximum(s.amax(-1, keepdim=True), c)
        e = (s - most).exp()
        return e / (e.sum(-1, keepdim=True) + (c - most).exp())

    check(
        lambda s, c: with_one_each(s, c), [scores(3, 5), torch.randn(3, 5, dtype=torch.float64)], SOFTMAX, found=False
    )


@given(
    shape=st.lists(st.sampled_from([1, 2, 3]), min_size=2, max_size=5),
    alike=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=5, max_size=5),
    dim=st.integers(0, 4),
    keepdim=st.booleans(),
    fewer=st.booleans(),
    mask=st.booleans(),
)
def test_sums_of_products_are_products_of_matrices(shape, alike, dim, keepdim, fewer, mask):
    """Each operand has a size of 1 along some dimensions, and one may be a mask."""
    torch.manual_seed(0)
    sizes = [[1 if one[i] else n for n, one in zip(shape, alike, strict=False)] for i in range(2)]
    a, b = (torch.randn(size, dtype=torch.float64) for size in sizes)
    if fewer and a.shape[0] == 1:
        a = a[0]
    b = b > 0 if mask else b
    dim %= len(shape)
    full = torch.broadcast_shapes(a.shape, b.shape)
    sizes[0] = [1] * (len(shape) - a.dim()) + list(a.shape)
    contracted = sizes[0][dim] == sizes[1][dim] and full[dim] > 1
    apart = any(x != y for x, y in zip(*sizes, strict=True))
    check(lambda a, b: (a * b).sum(dim, keepdim=keepdim), [a, b], MATRICES, found=contracted and apart)


def test_other_sums_are_none():
    a, b = torch.randn(2, 1, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    check(lambda a, b: (a * b).sum(-1), [a, b], MATRICES)
    for other in (lambda a, b: (a * b).sum(), lambda a, b: (a * b).sum((1, 2)), lambda a, b: (a + b).sum(-1),
                  lambda a, b: (a * b.float()).sum(-1), lambda a, b: (a * b).sum(-1, dtype=torch.float32)):  # fmt: skip
        check(other, [a, b], MATRICES, found=False)
    integers = [torch.arange(6).view(2, 1, 3), torch.arange(24).view(2, 4, 3)]
    gm = make_fx(lambda a, b: (a * b).sum(-1), tracing_mode="fake")(*integers)
    normalize_spellings(gm)
    assert MATRICES not in [node.target for node in gm.graph.nodes]


CHOICES = {
    "blend": lambda at, new, old: old * (1 - at) + at * new,
    "the other way round": lambda at, new, old: new * at + (1 - at) * old,
    "ones less": lambda at, new, old: (torch.ones_like(at) - at) * old + at * new,
    "lerp": lambda at, new, old: torch.lerp(old, new.expand_as(old), at.expand_as(old)),
}
NO_CHOICES = {
    "added": lambda at, new, old: old + at * new,
    "another rest": lambda at, new, old: old * (2 - at) + at * new,
    "rest of another": lambda at, new, old: old * (1 - at.flip(0)) + at * new,
    "twice": lambda at, new, old: torch.add(old * (1 - at), at * new, alpha=2),
}


@pytest.mark.parametrize("spelling", [*CHOICES, *NO_CHOICES])
@pytest.mark.parametrize("flags", [True, False])
def test_a_choice_by_zeros_and_ones_is_named(spelling, flags):
    """But not by other numbers."""
    torch.manual_seed(0)
    at = torch.tensor([True, False, False, True]).view(4, 1)
    new, old = torch.randn(1, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    function = {**CHOICES, **NO_CHOICES}[spelling]
    if flags:
        check(lambda at, *x: function(at.to(torch.float64), *x), [at, new, old], CHOICE, found=spelling in CHOICES)
    else:
        check(function, [at.double() / 2, new, old], CHOICE, found=False)


SUMS_OF_WEIGHTS = {
    "difference": (lambda a, b, v, c: (a.softmax(-1) - 0.3 * b.softmax(-1)) @ v, 2),
    "by a learned number": (lambda a, b, v, c: (a.softmax(-1) / 2 - b.softmax(-1) * c) @ v, 2),
    "moved": (lambda a, b, v, c: (a.softmax(-1) + b.softmax(-1)).transpose(1, 2) @ v, 2),
    "on the right": (lambda a, b, v, c: v.mT @ (a.softmax(-1) - b.softmax(-1)), 2),
    "of three": (lambda a, b, v, c: (a.softmax(-1) - b.softmax(-1) + (2 * a).softmax(-1)) @ v, 1),
    "of something else": (lambda a, b, v, c: (a.softmax(-1) - b.sigmoid()) @ v, 1),
    "by a number for each key": (lambda a, b, v, c: (a.softmax(-1) - b.softmax(-1) * a[:, :1]) @ v, 1),
}


@pytest.mark.parametrize("name", SUMS_OF_WEIGHTS)
def test_each_softmax_of_a_sum_meets_the_values(name):
    function, products = SUMS_OF_WEIGHTS[name]
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 3), (2, 3, 3), (2, 3, 4), ())]
    check(function, given, MATRICES)
    gm = make_fx(function, {}, tracing_mode="fake")(*given)
    normalize_spellings(gm)
    assert len(gm.graph.find_nodes(op="call_function", target=MATRICES)) == products


def put(x, indices, new, accumulate=False):
    return aten.index_put.default(x, indices, new, accumulate)


WRITES = {
    "transposed": lambda x, new, at: put(x.transpose(0, 1), [at], new[:2, :2, :4]).transpose(0, 1),
    "from the end": lambda x, new, at: put(x.transpose(-1, 0), [None, at - 3], new[:4, :2, :2]).transpose(0, 2),
    "permuted": lambda x, new, at: put(x.permute(1, 2, 0), [at], new[:2, :4, :2]).permute(2, 0, 1),
    "broadcast": lambda x, new, at: put(x.permute(2, 1, 0), [None, at], new[0, 0, 0]).permute(2, 1, 0),
    "index_copy": lambda x, new, at: x.permute(1, 2, 0).index_copy(-3, at, new[:2, :4, :2]).permute(2, 0, 1),
    "of something computed": lambda x, new, at: put((x * 2).mT, [None, None, at], new[:2, :4, :2]).mT,
}
NO_WRITES = {
    "another way back": lambda x, new, at: put(x.permute(1, 2, 0), [at], new[:2, :4, :2]).permute(1, 2, 0),
    "added": lambda x, new, at: put(x.transpose(0, 1), [at], new[0, 0, 0], True).transpose(0, 1),
    "two indices": lambda x, new, at: put(x.transpose(0, 1), [at, at % 2], new[0, 0, 0]).transpose(0, 1),
    "a table of rows": lambda x, new, at: put(x.transpose(0, 1), [at[:, None]], new[0, 0, 0]).transpose(0, 1),
    "a mask": lambda x, new, at: put(x.transpose(0, 1), [x[0, :, 0] > 0], new[0, 0, 0]).transpose(0, 1),
}


@pytest.mark.parametrize("name", [*WRITES, *NO_WRITES])
def test_a_write_to_a_transposed_tensor_is_one_to_the_tensor(name):
    """Only to whole rows, and if it is transposed back."""
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((2, 3, 4), (4, 4, 4))] + [torch.tensor([2, 0])]
    written = {**WRITES, **NO_WRITES}[name]

    def function(*x):
        return written(*x).contiguous()  # random cotangents follow strides

    gm = make_fx(function, {}, tracing_mode="fake")(*inputs)
    normalize_spellings(gm)
    (write,) = (n for n in gm.graph.nodes if n.target in (aten.index_put.default, aten.index_copy.default))
    moves = (aten.permute.default, aten.transpose.int)
    assert (write.args[0].target not in moves) == (name in WRITES)
    check(function, inputs, write.target)
