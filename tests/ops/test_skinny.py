"""Products of few rows: as exact as sums are, and the same for a row whatever is beside it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from nsa_compile.ops import cpp, skinny
from nsa_compile.ops.dispatch import KERNELS
from tests.strategies import few

X, W, B = torch.randn(2, 6), torch.randn(5, 6), torch.randn(5)


def rows_of(count, width, dtype, apart):
    """Rows with elements side by side, some elements apart from one another."""
    return torch.randn(count, width + apart, dtype=dtype)[:, :width]


@few(60)
@given(
    st.integers(1, 40), st.integers(1, 50), st.integers(1, 200), st.sampled_from(skinny.DTYPES), st.booleans(),
    st.tuples(*[st.sampled_from([0, 3])] * 2), st.integers(0, 99),
)  # fmt: skip
def test_rounds_as_sums_do_and_rows_do_not_depend_on_others(rows, columns, depth, dtype, biased, apart, seed):
    torch.manual_seed(seed)
    x, weight = rows_of(rows, depth, dtype, apart[0]), rows_of(columns, depth, dtype, apart[1])
    bias = torch.randn(2 * columns, dtype=dtype)[::2] if biased else None
    found = skinny.skinny_linear(x, weight, bias)

    x64, w64 = x.double(), weight.double()
    b64 = torch.zeros(columns, dtype=torch.float64) if bias is None else bias.double()
    most = (depth + 2) * torch.finfo(dtype).eps * (x64.abs() @ w64.abs().T + b64.abs())
    assert ((found.double() - (x64 @ w64.T + b64)).abs() <= most).all()

    cut = seed % rows
    alone = [
        skinny.skinny_linear(part, weight, bias) for part in (x[:cut], x[cut : cut + 1], x[cut + 1 :]) if len(part)
    ]
    assert torch.equal(torch.cat(alone), found)


def test_threads_do_not_change_a_bit():
    x, weight = torch.randn(6, 300), torch.randn(401, 300)
    given_threads = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(skinny.skinny_linear(x, weight))
    finally:
        torch.set_num_threads(given_threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nan_and_infinity_stay_in_their_row_and_column():
    x, weight = torch.randn(3, 20), torch.randn(4, 20)
    x[1, 3], weight[2, 19] = torch.nan, torch.inf
    assert torch.equal(skinny.skinny_linear(x, weight).isfinite(), (x @ weight.T).isfinite())


def test_columns_that_lie_apart_are_copied():
    x = torch.randn(6, 3).T
    assert torch.equal(skinny.skinny_linear(x, W), skinny.skinny_linear(x.contiguous(), W))


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ((X[0], W), r"x is \[6\], weight \[5, 6\]; they must be \[M, K\] and \[N, K\]"),
        ((X, W[:, :5]), r"x is \[2, 6\], weight \[5, 5\]"),
        ((X, torch.randn(6, 5).T), r"weight has strides \(1, 5\); its last one must be 1"),
        ((X, W, B[:1]), r"bias is \[1\]; it must be \[5\]"),
        ((X, W.double()), "the dtypes are torch.float32, torch.float64; they must be all float32 or all float64"),
        ((X.half(), W.half()), "the dtypes are torch.float16;"),
    ],
)
def test_what_does_not_fit_is_refused(given_, says):
    with pytest.raises(ValueError, match=says):
        skinny.skinny_linear(*given_)


def test_what_it_is_for():
    most = skinny.MOST_ROWS
    assert skinny.takes(torch.randn(most, 6), W)
    assert skinny.takes(torch.randn(most // 2, 2, 6), W)
    for x, weight in [
        (torch.randn(most + 1, 6), W),
        (X[:0], W),
        (X, W[:0]),
        (X, torch.randn(6, 5).T),
        (X.bfloat16(), W.bfloat16()),
        (X, W.double()),
        (X.to("meta"), W.to("meta")),
        (X.to_sparse(), W),
        (X, W.to_sparse()),
        (X, W[0]),
    ]:
        assert not skinny.takes(x, weight)


def test_its_work_is_counted():
    with FlopCounterMode(display=False) as counter:
        skinny.skinny_linear(X, W, B)
    assert counter.get_total_flops() == 2 * 2 * 5 * 6


def test_without_a_compiler_it_takes_nothing_and_the_log_says_so(monkeypatch, caplog):
    def fail():
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setitem(KERNELS["skinny"]["cpu"].__dict__, "code", SimpleNamespace(prepare=fail))
    cpp.works.cache_clear()
    assert not skinny.takes(X, W)
    cpp.works.cache_clear()
    assert "products of few rows are a library's, slower: their kernel cannot be used (no compiler)" in caplog.text
