"""The first places of a ranking: those of torch's stable sort, ties and NaN included."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from nsa_compile.ops import cpp, ranked
from nsa_compile.ops.dispatch import KERNELS
from tests.strategies import few

INF, NAN = float("inf"), float("nan")


def by_sort(x, count):
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@few(60)
@given(
    st.integers(2, 5000),
    st.floats(0, 0.5),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 3, 1000, None]),
    st.booleans(),
    st.integers(0, 99),
)
def test_equals_a_stable_sort(width, part, dtype, distinct, hidden, seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 3, width, dtype=dtype)
    if distinct is not None:
        x = (x * distinct).round() / distinct  # with zeros of both signs
    special = torch.tensor([INF, -INF, NAN, 0.0, -0.0], dtype=dtype)
    x[torch.rand_like(x) < 0.05] = special[seed % 5]
    if hidden:
        x[..., width // 3 :] = -INF
    count = max(1, int(part * width))
    assert torch.equal(ranked.first_places(x, count), by_sort(x, count))
    across = x.transpose(0, 1)
    assert torch.equal(ranked.first_places(across, count), by_sort(across, count))


def test_a_pivot_from_a_sample_that_is_no_sample_of_the_row():
    x = torch.zeros(1, 4096)
    x[:, ::16] = -1.0  # all that the sample sees
    x[0, 1::2] = torch.randn(2048)
    assert torch.equal(ranked.first_places(x, 500), by_sort(x, 500))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)])
def test_few_rows(shape):
    x = torch.randn(shape)
    assert torch.equal(ranked.first_places(x, 3), by_sort(x, 3))


def test_compiles_and_takes_no_part_in_gradients():
    x = torch.randn(3, 64, requires_grad=True)
    y = torch.compile(lambda x: x.gather(-1, ranked.first_places(x, 4)), backend="aot_eager", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(gradient, torch.zeros_like(x).scatter(-1, by_sort(x, 4), 1.0))


def test_without_a_compiler_rows_are_sorted_and_the_log_says_so(monkeypatch, caplog):
    def fail():
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setitem(KERNELS["ranked"]["cpu"].__dict__, "code", SimpleNamespace(prepare=fail))
    cpp.works.cache_clear()
    x = torch.randn(6, 16)
    run = partial(scan, lambda c, row: (c, row.sort(descending=True).indices[:3]), torch.zeros(()))
    found = nsa_compile.compile(lambda x: run(x)[1], nested="eager", cache=False)(x)
    cpp.works.cache_clear()
    assert torch.equal(found, run(x)[1])
    assert "rankings are sorted as a whole, slower: their kernel cannot be used (no compiler)" in caplog.text


@pytest.mark.deep(but=["values"])
@pytest.mark.parametrize("read", ["indices", "values", "all indices", "all but one"])
def test_a_sort_of_which_the_first_indices_are_read(read, monkeypatch):
    """Of scores with ties: the loop and the batched program pick the same."""
    called = []
    own = ranked.first_places
    monkeypatch.setattr(ranked, "first_places", lambda *args: called.append(args) or own(*args))

    def step(total, x):
        _, row = x
        values, indices = row.sort(dim=-1, descending=True, stable=True)
        if read == "indices":
            y = row.square().gather(-1, indices[..., :3]) * indices[..., :2].sum(-1, keepdim=True)
        elif read == "values":
            y = values[..., :3] * indices[..., :3]
        elif read == "all but one":
            y = row.gather(-1, indices[..., :2]) + indices[..., :-1].sum(-1, keepdim=True)
        else:
            y = (row.square().gather(-1, indices) * torch.arange(row.shape[-1]))[..., :3]
        return total, y

    def run(x):
        return scan(step, torch.zeros(()), (torch.arange(x.shape[0]), x))[1]

    x = (torch.randn(6, 2, 16, dtype=torch.float64) * 2).round().requires_grad_()
    y, expected = nsa_compile.compile(run, nested="eager", cache=False)(x), run(x)
    assert torch.equal(y, expected)
    cotangent = torch.randn_like(expected)
    assert torch.equal(*(torch.autograd.grad((z * cotangent).sum(), [x])[0] for z in (y, expected)))
    assert bool(called) == (read == "indices")
