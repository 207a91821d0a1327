"""Operators that few loops use, of rows that grow: what works along other dimensions, picks, pads and writes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile.loops import LoopDeclined
from tests.loops.test_loops import D, compare

S = 9


def inputs(length=S):
    torch.manual_seed(0)
    return [torch.randn(length, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def attend(k, q, v=None):
    return (k @ q).softmax(0) @ (k if v is None else v)


def best(k, q, n=2):
    return (k @ q).topk(min(n, len(k))).indices


def highest(k, q):
    numbers, at = (k @ q).topk(min(4, len(k)))
    return at, numbers


def rows_masked(k, q):
    rows = k * 1
    rows[k @ q > 0] = q
    return rows.sum(0)


def kept_at(k, at, number):
    """A number that may have a gradient, at places that grow in number."""
    weights = k.new_zeros(len(k))
    weights[at] = number
    return weights


def turned(k):
    return torch.roll(k.view(-1, 2, 2), (1, 1), (1, 2)).reshape(-1, D)


def picked(k, q):
    return attend(k.index_select(0, best(k, q)), q)


def gathered(k, q):
    scores = k @ q
    top = scores.topk(1).indices
    return k.gather(0, top[:, None].expand(1, D))[0] * scores.gather(0, top)


def embedded(k, q):
    return F.embedding(k.argmax(1), torch.arange(4.0 * D, dtype=k.dtype).view(4, D)).sum(0) * q


def best_of_columns(k, q):
    (top, at), (low, _) = q.topk(2), q.sort()
    return attend(k, q) * top.sum() + low[0] + at.sum()


def cut_at_the_first(k, q):
    first, others = k.split([1, len(k) - 1])
    return first[0] + others.sum(0) * q


def cut_at_the_last(k, q):
    others, last = k.split([len(k) - 1, 1])
    return attend(others, q) + last[0]


def by_columns(k, q):
    a, b, c, d = k.unbind(1)
    return attend(torch.stack([a, b], 1), q[:2], torch.stack([c, d], 1)).repeat(2)


def side_by_side(k, q):
    scores = torch.stack([k @ q, (k * k).sum(1)], -1).softmax(0)
    return (scores[..., None] * torch.stack([k, k * 2], 1)).sum((0, 1))


def copied(k, q):
    doubled, scores, wide = torch.empty_like(k), k.new_zeros(len(k)), k.new_zeros(len(k), D)
    doubled.copy_(k * 2)
    scores.copy_(k @ q)
    wide.copy_(q)
    return scores.softmax(0) @ (doubled * wide)


def below_the_diagonal(k, q):
    scores = (k @ k.T).tril()
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[-1] @ k * q


def gates(k, q):
    return F.logsigmoid(k @ q).cumsum(0).exp() @ k


def written_in_places(k, q):
    k = k.clone()
    k[-1] = q
    k[0] = k[0] * 2
    k[len(k) // 2] = 0.0
    return attend(k, q)


def written_between(k, q):
    k = k.clone()
    k[max(0, len(k) - 2) :] = q
    k[len(k) // 3 : len(k) // 2] *= 3
    return attend(k, q)


def scattered(k, q):
    at = (k @ q).argmax()[None]
    weights = k.new_zeros(len(k)).scatter(0, at, 1.0)
    return weights.scatter_add(0, at * 0, k.new_full((1,), 0.5)) @ k


def chosen(k, q, scatter):
    """Attention to the best keys, fewer where there are not so many."""
    scores = k @ q
    keep = scatter(torch.zeros(len(k), dtype=torch.bool), scores.topk(min(4, len(k))).indices)
    return scores.masked_fill(~keep, -torch.inf).softmax(0) @ k


def put(keep, at):
    keep[at] = True
    return keep


def chosen_by_heads(k, q):
    scores = torch.stack([k @ q, k @ q.flip(0)])
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(min(4, len(k)), -1).indices, True)
    return scores.masked_fill(~keep, -torch.inf).softmax(-1).sum(0) @ k


def masked_in_place(k, q):
    scores, rows, seen = (k @ k.T) * 1, k * 1, torch.zeros(len(k), dtype=torch.long)
    scores[torch.ones_like(scores, dtype=torch.bool).triu(1)] = -torch.inf
    rows[k @ q > 0] = q[0]
    rows[rows < -1] = 0.5
    seen[k @ q < 0] = 3
    return (scores.softmax(-1) @ rows)[-1] + seen.to(k.dtype) @ k


def counted(k, q):
    n = len(k)
    bias = torch.arange(n, 0, -1) - torch.arange(n, dtype=torch.float32) * 0.2 + torch.full((n,), n * 0.5)
    return attend(k, q) + (k @ q + bias).softmax(0) @ k


def padded_scores(k, q):
    weights = F.pad(k @ q, (0, S - len(k)), value=-torch.inf).softmax(0)
    return weights[: len(k)] @ k + weights.sum()


def padded_to_the_length(k, q):
    rows = F.pad(k, (0, 0, 0, S - len(k)))
    return (rows @ q).masked_fill(torch.arange(S) >= len(k), -torch.inf).softmax(0) @ rows


def heads_repeated(k, q):
    scores = (k.view(-1, 2, 2).repeat(1, 2, 1) * q.view(2, 2).repeat(2, 1)).sum(-1)
    return scores.softmax(0).sum(1) @ k


READS = {
    "flipped columns": lambda k, q: attend(k.flip(1), q),
    "columns turned round": lambda k, q: attend(turned(k), q),
    "the last row first": lambda k, q: attend(k.flip(0, 1) * 2, q, k.flip(0)),
    "sums from behind": lambda k, q: (k @ q).flip(0).cumsum(0).flip(0).tanh() @ k,
    "none, the last first": lambda k, q: k[: len(k) - 3].flip(0).sum(0) + k[: len(k) - 3].roll(1, 0).sum(0) + q,
    "rows turned round": lambda k, q: attend(k.roll(1, 0), q, k) + attend(k.roll(-7, 0), q, k),
    "turned round by more and more": lambda k, q: attend(k.roll((len(k), len(k)), (0, 1)), q, k),
    "half a gate": lambda k, q: attend(k, q, F.glu(k, 1)).repeat(2),
    "the median of columns": lambda k, q: k.median(1).values.softmax(0) @ k + k.nanmedian(1, True).indices.sum(),
    "sums of exponentials": lambda k, q: attend(k.logcumsumexp(1), q),
    "highest until now": lambda k, q: attend(k.cummax(1).values, q) + k.cummin(-1).indices.sum(0),
    "distances": lambda k, q: (-F.pairwise_distance(k, q)).softmax(0) @ k,
    "pairs of columns": lambda k, q: k.unfold(1, 2, 1).sum(-1).softmax(0).sum(1) @ k * q,
    "columns padded": lambda k, q: (F.pad(k, (1, 2)) @ F.pad(q, (1, 2))).softmax(0) @ k,
    "a row before": lambda k, q: attend(F.pad(k, (0, 0, 1, 0)), q),
    "rows behind": lambda k, q: attend(F.pad(k, (0, 0, 0, 2), value=0.3), q),
    "rows behind, of another number": lambda k, q: F.pad(k, (0, 0, 0, 1), value=math.log(len(k))).sum(0) * q,
    "fewer and fewer rows before": lambda k, q: attend(F.pad(k, (0, 0, S - len(k), 0)), q),
    "chosen by scatter": lambda k, q: chosen(k, q, lambda keep, at: keep.scatter(0, at, True)),
    "chosen by scatter in place": lambda k, q: chosen(k, q, lambda keep, at: keep.scatter_(-1, at, True)),
    "chosen by their numbers": lambda k, q: chosen(k, q, put),
    "truths padded": lambda k, q: torch.where(F.pad(k > 0, (1, 0))[:, :D], k, q).sum(0),
    "the best one until now": lambda k, q: torch.where(k @ q > 0, len(k), torch.arange(len(k))).to(k.dtype) @ k,
    "a row repeated": lambda k, q: (q[None].repeat(len(k), 1) * k).sum(0),
    "layers": lambda k, q: attend(F.layer_norm(k, (D,)), q),
    **{
        f.__name__.replace("_", " "): f
        for f in (
            picked, masked_in_place, chosen_by_heads, gathered, embedded, best_of_columns, cut_at_the_first,
            cut_at_the_last, by_columns, side_by_side, copied, below_the_diagonal, gates, written_in_places,
            written_between, scattered, counted, padded_scores, padded_to_the_length, heads_repeated,
        )
    },
}  # fmt: skip


def written(read, window):
    def run(k, q):
        out = []
        for t in range(2, S):
            out.append(read(k[max(0, t - window) : t + 1], q[t]))
        return torch.stack(out)

    return run


@pytest.mark.deep(every=6)
@pytest.mark.parametrize("name", READS)
def test_all_rows_until_now(name):
    compare(written(READS[name], S), *inputs(), raised=False, cache=False)


def test_the_best_keys_are_selected():
    """A mask of as many of the best keys as there are is the selection that it is with a fixed number."""

    def run(k, q):
        out = []
        for t in range(len(k)):
            out.append(READS["chosen by scatter"](k[: t + 1], q[t]))
        return torch.stack(out)

    report = compare(run, *inputs(64), cache=False, attention="sparse")
    assert [choice.operator for choice in report.attention] == ["selected_attention"]


@pytest.mark.deep(every=8)
@pytest.mark.parametrize("name", READS)
def test_the_rows_of_a_window(name):
    compare(written(READS[name], 3), *inputs(), raised=False, cache=False)


def without_a_number(k, q):
    """Rows that do not exist would be divided by the root of their variance, 0."""
    return attend(F.layer_norm(k, (D,), eps=0.0), q)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (without_a_number, "aten.native_layer_norm: divides by a standard deviation that may be 0"),
        (lambda k, q: attend(k.cummax(0).values, q), "aten.cummax: has no rule for a dimension that grows"),
        (lambda k, q: attend(torch.roll(k, 1), q), "aten.roll: rolls all elements as one row; name the dimension"),
        (
            lambda k, q: k.new_zeros(len(k)).scatter(0, *highest(k, q)) @ k,
            "aten.scatter.src: writes as many elements as",
        ),
        (
            lambda k, q: k.new_zeros(len(k)).scatter_add(0, *highest(k, q)) @ k,
            "aten.scatter_add: writes as many elements",
        ),
        (lambda k, q: kept_at(k, highest(k, q)[0], q[0]) @ k, "aten.index_put: writes to as many places as there are"),
        (lambda k, q: k.new_zeros(len(k)).scatter(0, best(k[3:], q, 1), 1.0) @ k, "writes to no place at some steps"),
        (rows_masked, "aten.index_put: writes a tensor where a mask is true"),
        (lambda k, q: q.repeat(len(k)).sum() * q, "aten.repeat: repeats a dimension that grows, or does so another"),
    ],
)
def test_others_are_declined_by_name(read, reason):
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(written(read, S), nested="eager", cache=False, on_decline="error")(*inputs())


def gated(state):
    """Gated linear attention by heads, from a state that may be a number."""

    def run(k, q):
        s, out = state, []
        for t in range(S):
            s = k[t].view(2, 2)[:, :1, None] * s + k[t].view(2, 2, 1) * q[t].view(2, 1, 2)
            out.append(s.sum(1))
        return torch.stack(out)

    return run


def test_a_state_that_begins_with_a_number_is_told_how_to_begin():
    with pytest.raises(LoopDeclined, match=r"begin a state with torch\.zeros of its final size, not with a number"):
        nsa_compile.loop(gated(0), nested="eager", cache=False, on_decline="error")(*inputs())
    compare(gated(torch.zeros(2, 2, 2, dtype=torch.float64)), *inputs(), raised=False, cache=False)


@pytest.mark.parametrize("write", ["scatter", "index_put"])
def test_the_numbers_so_far_are_written_and_no_later_ones(write):
    def run(x, ids):
        out = []
        for t in range(len(ids)):
            seen, so_far = torch.zeros(len(x), dtype=torch.bool), ids[: t + 1]
            if write == "scatter":
                seen = seen.scatter(0, so_far, True)
            else:
                seen = seen.index_put((so_far,), torch.tensor(True))
            out.append(x.masked_fill(~seen[:, None], 0.0).sum(0))
        return torch.stack(out)

    x, ids = torch.randn(9, D, dtype=torch.float64), torch.tensor([3, 3, 1, 8, 0, 5])
    compiled = nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")
    torch.testing.assert_close(compiled(x, ids), run(x, ids))


def test_means_begin_with_one_row():
    def run(k):
        out = []
        for t in range(len(k)):
            out.append(k[: t + 1].mean(0) - k[: t + 1].var(0, correction=0))
        return torch.stack(out)

    k = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
    compare(run, k, raised=False, cache=False)
