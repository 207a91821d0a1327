"""Blocks and every n-th of the rows that exist: pooled, convolved, stepped over; and what is told of their spread."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile.loops import LoopDeclined
from tests.loops.test_loops import D, compare, matches

S = 23


def inputs():
    torch.manual_seed(0)
    return [torch.randn(S, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def attend(q, keys, values):
    return (keys @ q).softmax(0) @ values


def along_rows(pool, x, *how, **named):
    return pool(x.T[None], *how, **named)[0].T


def pooled(q, k, v):
    """NSA's compressed branch, its blocks by pooling."""
    out = []
    for t in range(S):
        if t + 1 < 4:
            out.append(q[t] * 0)
        else:
            out.append(attend(q[t], *(along_rows(F.avg_pool1d, x[: t + 1], 4, 2) for x in (k, v))))
    return torch.stack(out)


def pooled_by_its_maximum(q, k, v):
    K, out = k.new_zeros(0, D), []
    for t in range(S):
        K = torch.cat([K, k[t : t + 1]])
        blocks = along_rows(F.max_pool1d, torch.cat([v[:3], K]), 4)
        out.append(attend(q[t], blocks, blocks))
    return torch.stack(out)


def pooled_behind_the_first_rows(q, k, v):
    out = []
    for t in range(4, S):
        blocks = along_rows(F.avg_pool1d, k[t % 4 : t + 1], 4)
        out.append(attend(q[t], blocks, blocks) if t >= 8 else q[t])
    return torch.stack(out)


def convolved(q, k, v):
    """Blocks compressed by a convolution, as some ports of NSA have it."""
    weight, out = v[: 4 * D].reshape(D, D, 4), []
    for t in range(3, S):
        blocks = along_rows(F.conv1d, k[: t + 1], weight, q[0], stride=2)
        out.append(attend(q[t], blocks, blocks))
    return torch.stack(out)


def convolved_by_channel(q, k, v):
    out = []
    for t in range(3, S):
        blocks = along_rows(F.conv1d, k[: t + 1], v[:4].T[:, None], stride=3, groups=D)
        out.append(attend(q[t], blocks, blocks))
    return torch.stack(out)


def convolved_with_padding(q, k, v):
    """A causal convolution: what reaches beyond the last row is cut off."""
    out = []
    for t in range(S):
        blocks = along_rows(F.conv1d, k[: t + 1], v[:3].T[:, None], padding=2, groups=D)[: t + 1]
        out.append(attend(q[t], blocks, blocks))
    return torch.stack(out)


def pooled_with_padding(q, k, v):
    out = []
    for t in range(S):
        means = along_rows(F.avg_pool1d, k[: t + 1], 3, 2, 1)
        out.append(attend(q[t], means, along_rows(F.max_pool1d, v[: t + 1], 3, 2, 1)))
    return torch.stack(out)


def dilated_as_a_loop(q, k, v):
    out = []
    for t in range(S):
        out.append(attend(q[t], k[: t + 1 : 3], v[: t + 1 : 3]))
    return torch.stack(out)


def every_other_row_of_a_cache(q, k, v):
    K, out = k[:1], []
    for t in range(S):
        K = torch.cat([K, k[t : t + 1]])
        out.append(K[1::2].sum(0) + attend(q[t], K[::2][-3:], K[::2][-3:]))
    return torch.stack(out)


def normalized(q, k, v):
    out = []
    for t in range(S):
        rows = k[: t + 1]
        out.append((q[t] - rows.mean(0)) / (rows.std(0, correction=0) + 0.1) + rows.var(0, unbiased=False))
    return torch.stack(out)


def spread_of_all(q, k, v):
    out = []
    for t in range(1, S):
        spread, mean = torch.std_mean(k[: t + 1])
        out.append(q[t] * spread + torch.var_mean(v[:t], dim=(0, 1), correction=0, keepdim=True)[0][0] + mean)
    return torch.stack(out)


def similar(q, k, v):
    out = []
    for t in range(S):
        out.append(F.cosine_similarity(k[: t + 1], q[t], dim=-1) @ v[: t + 1])
    return torch.stack(out)


def multiplied_and_ranged(q, k, v):
    out = []
    for t in range(S):
        low, high = k[: t + 1].aminmax(dim=0)
        out.append(v[max(0, t - 3) : t + 1].cumprod(0).sum(0) + low * high * q[t])
    return torch.stack(out)


PROGRAMS = [
    pooled, pooled_by_its_maximum, pooled_behind_the_first_rows, convolved, convolved_by_channel,
    convolved_with_padding, pooled_with_padding, dilated_as_a_loop,
    every_other_row_of_a_cache, normalized, spread_of_all, similar, multiplied_and_ranged,
]  # fmt: skip


@pytest.mark.deep(but=["spread_of_all"])
@pytest.mark.parametrize("written", PROGRAMS, ids=lambda f: f.__name__)
def test_blocks_and_every_nth_row(written, caplog):
    compare(written, *inputs(), raised=False)
    assert "runs as it is written" not in caplog.text


@pytest.mark.deep(but=["dilated_as_a_loop"])
@pytest.mark.parametrize("written", [pooled, convolved, convolved_by_channel, dilated_as_a_loop])
def test_attention_to_blocks_is_attention_to_blocks(written):
    report = compare(written, *inputs())
    assert "compressed_attention" in matches(report)


def of_a_constant_row(k):
    out = []
    for t in range(S):
        out.append(k[: t + 1].std(0, correction=0))
    return torch.stack(out)


def of_one_row(k):
    out = []
    for t in range(S):
        out.append(k[: t + 1].var(0))
    return torch.stack(out)


@pytest.mark.deep(but=["of_one_row"])
@pytest.mark.filterwarnings("ignore:var")  # there is none
@pytest.mark.parametrize("written", [of_a_constant_row, of_one_row])
def test_the_spread_of_rows_that_are_one(written):
    """Torch's derivative of a standard deviation is 0 at 0; of one row there is no variance, and no derivative."""
    (k, *_) = inputs()
    with torch.no_grad():
        k[:] = k[0]
    found = []
    for function in (nsa_compile.loop(written, nested="eager", cache=False, on_decline="error"), written):
        y = function(k)
        found.append((y.detach(), *torch.autograd.grad(y[1:].sum(), k)))
    torch.testing.assert_close(*found, equal_nan=True)
    assert found[0][0].isnan().any() == (written is of_one_row)


@pytest.mark.deep(but=["dtype0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_spread_in_low_precision_is_rounded_once(dtype):
    k = (torch.randn(S, D, generator=torch.Generator().manual_seed(0)) + 8).to(dtype)
    ours = nsa_compile.loop(of_a_constant_row, nested="eager", cache=False, on_decline="error")(k)
    torch.testing.assert_close(ours, of_a_constant_row(k), rtol=torch.finfo(dtype).eps, atol=0)


def without_what_is_beyond(k):
    return along_rows(F.avg_pool1d, k, 3, 1, 1, count_include_pad=False).sum(0)


def with_half_a_block(k):
    return along_rows(F.avg_pool1d, k, 2, 2, ceil_mode=True).sum(0)


def with_the_places(k):
    values, places = F.max_pool1d(k.T[None], 1, return_indices=True)
    return (values * places).sum((0, 2))


def in_groups(k):
    return along_rows(F.conv1d, k, torch.ones(4, 2, 1, dtype=k.dtype), groups=2).sum(0)


def from_another_one_each_time(k):
    return k[(len(k) - 1) % 2 :: 2].sum(0)


def of_one_row_too_few(k):
    return k.var(0, correction=2)


@pytest.mark.deep(but=["of_one_row_too_few-"])
@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (without_what_is_beyond, "aten.avg_pool2d: leaves what stands beyond the rows out of its means"),
        (with_half_a_block, "aten.avg_pool2d: pools blocks that are not full"),
        (with_the_places, "reads a result of aten.max_pool2d_with_indices.default that has no rule"),
        (
            in_groups,
            "aten.convolution: is a convolution that is dilated, of several dimensions, or of groups of channels",
        ),
        (of_one_row_too_few, "aten.var.correction: has fewer elements than its correction at some steps"),
        (from_another_one_each_time, "aten.slice.Tensor: steps over rows, from one on that changes from step to step"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_blocks_are_declined_by_name(read, reason):
    def run(k):
        out = []
        for t in range(S):
            out.append(read(k[: t + 1]))
        return torch.stack(out)

    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(inputs()[0])
