"""raise_attention: attention as people write it becomes a node that knows its mask; near misses stay as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from tests.attention_programs import (
    LAYOUTS,
    AttentionProgram,
    assert_equals_loop,
    attention,
    attention_programs,
    entry,
    line_of,
    raised,
    run_compiled,
    together,
)
from tests.strategies import few

OPERATORS = ["sparse", "sparse", "dense", "auto"]
NESTED = ["eager"] * 7 + ["aot_eager"]
PROGRAM = "attention by a program of scores"
LOWEST = "s.masked_fill(~keep, torch.finfo(s.dtype).min)"


def as_raised(program: AttentionProgram) -> list[list[str]]:
    """What a report may say: what is no attention of a known kind may be one by a program of scores."""
    if program.mask is None:
        return [[], [PROGRAM]]
    return [[PROGRAM if "depends on data" in program.mask else program.mask]]


@given(program=attention_programs(), nested=st.sampled_from(NESTED), operators=st.sampled_from(OPERATORS))
def test_attention_in_every_form_is_raised(program, nested, operators):
    note(repr(program))
    actual, report = run_compiled(program, nested, attention=operators)
    assert raised(report) in as_raised(program)
    assert_equals_loop(program, actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@few(4)
@given(data=st.data())
def test_low_precision(dtype, data):
    program = data.draw(attention_programs(dtype))
    actual, report = run_compiled(program, attention=data.draw(st.sampled_from(OPERATORS)))
    assert raised(report) in as_raised(program)
    assert_equals_loop(program, actual)


@pytest.mark.deep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_product(layout):
    """Both products in all ways of writing them, in one step."""
    lay = LAYOUTS[layout]
    lines = [f"{x}{x} = {x}.repeat_interleave(2, 1)" for x in "kv" if layout == "heads"]
    lines += ["keep, total = position <= t, 0"]
    products = max(lay.scores, lay.outs, key=len)
    for i in range(len(products)):
        score, out = lay.scores[i % len(lay.scores)], lay.outs[i % len(lay.outs)]
        lines += [f"p = torch.softmax(({score}).masked_fill(~keep, -inf), -1)", f"total = total + {i + 1} * ({out})"]
    program = AttentionProgram(layout, (*lines, "out = total"))
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention to a window of 6"] * len(products)
    assert_equals_loop(program, actual)


def several(masks: list[str], S: int, rows: int) -> AttentionProgram:
    """One step with one attention for each mask, over keys from outside."""
    pieces = {"masked": LOWEST, "post": "p * keep", "S": S, "rows": rows, "outside": True}
    return together([attention(keep=mask, **pieces) for mask in masks])


@pytest.mark.deep
def test_windows_have_their_own_size():
    S, sizes = 9, [1, 2, 3, 4, 8, 9, 10]
    program = several([f"(position <= t) & (position > t - {w})" for w in sizes], S, S)
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == [f"attention to a window of {min(w, S)}" for w in sizes]
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_blocks_have_their_own_size_and_stride():
    S, sizes = 11, [(3, 1), (1, 2), (2, 2), (3, 2), (4, 2), (5, 3), (4, 3)]
    program = several([f"position * {d} + {l - 1} <= t" for l, d in sizes], S, 3)  # noqa: E741
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == [f"attention to blocks of {size} with stride {d}, once they are complete"
                              for size, d in sizes]  # fmt: skip
    assert_equals_loop(program, actual)


# Masks of no kind that an operator knows; each is some kind's neighbour.
UNKIND = {
    "one token of the future": "position <= t + 1",
    "a window over the future": "(position >= t) & (position < t + 2)",
    "a window without oneself": "(position < t) & (position > t - 3)",
    "blocks that grow": "position * position <= t",
    "blocks backwards": "(4 - position) * 2 <= t",
    "blocks that end": "(position * 2 + 1 <= t) & (t < 6)",
    "a window of time": "(position <= t) & (t < 5)",
    "not at first": "(position <= t) & (t > 2)",
    "a sink": "(position <= t) & ((position > t - 2) | (position < 1))",
}


@pytest.mark.deep
def test_other_masks_are_opaque():
    program = several(list(UNKIND.values()), 8, 5)
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention by a program of scores"] * len(UNKIND)
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_windows_of_each_head():
    sizes = "(position <= t) & (position > t - torch.tensor({})[:, None, None])"
    program = several([sizes.format([1, 2]), sizes.format([3, 3])], 6, 6)
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention by a program of scores", "attention to a window of 3"]
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_masked_as_a_column():
    """Scores masked where the keys are not their last dimension."""
    program = attention(
        "plain", scores="k @ q[:, None]", masked="s.masked_fill(~keep[:, None], -inf)[:, 0]", post="p", scale="s * 2"
    )
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention to a window of 6"]
    assert_equals_loop(program, actual)


# ------------------------------------------------------------------------------------------ attention, and more of it


ALSO = {
    "weights are an output": attention(out="p @ v.transpose(1, 2) + p.sum(-1, keepdim=True)"),
    "weights are read by a second step": attention(out="(p @ v.transpose(1, 2)) * p.cumsum(-1)[..., :2]"),
    "values are keys": attention(out="p @ k.transpose(1, 2)"),
    "a query without a gradient": attention(before=("q = q.detach()",)),
    "masked twice": attention(masked="torch.where(keep, s, -inf).masked_fill(t < position, -inf)"),
    "masked twice behind": attention(post="p.masked_fill(~after, 0.0) * keep"),
    "the opposite of the opposite": attention(keep="~(~(position <= t))", keep_after="~(position > t)"),
    "a constant scale": attention(scale="s * torch.tensor(0.5, dtype=DTYPE) * torch.ones(6)"),
    "scaled below one, then masked with less than the lowest": attention(masked=LOWEST, scale="s * 0.01"),
}


@pytest.mark.deep
def test_attention_among_other_things():
    program = together(list(ALSO.values()))
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention to a window of 6"] * len(ALSO)
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_values_in_another_order_than_keys():
    """Weights of visible keys meet rows that are not written yet. These are zero, so no cache is copied."""
    program = attention(out="p @ v.flip(1).transpose(1, 2)")
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == []
    assert report.scans[0].guards_kept == []
    assert any("values may be in another order than keys" in d.reason for d in report.declines)
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_weights_that_meet_two_values():
    program = attention(out="torch.cat([p @ v.transpose(1, 2), p @ k.transpose(1, 2)], -1)")
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention to a window of 6"] * 2
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_rounding_may_be_left_out():
    """Weights that are rounded to less than attention computes in: raised, and no further from the truth."""
    program = attention(cast="p.to(SOFT).to(DTYPE)", soft=torch.float16)
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == ["attention to a window of 6"]
    assert_equals_loop(program, actual)


# -------------------------------------------------------------------------------------------------------- near misses


DATA = {"data": (2, 2, 1)}
KEPT = '(position <= t) & ((x["m"] > {}) | (position == t))'
NEAR_MISSES = {
    "masks": {
        "one less behind": attention(keep_after="position < t"),
        "a window behind": attention(keep_after="(position <= t) & (position > t - 2)"),
        "one more behind": attention(keep="position < t", keep_after="position <= t", masked=LOWEST),
        "data behind": attention(keep_after='keep & (x["m"] > 0)', **DATA),
        "data before": attention(keep=KEPT.format(0), keep_after="position <= t", **DATA),
        "other data": attention(keep=KEPT.format(0), keep_after=KEPT.format(0.5), **DATA),
        "data of other groups": attention(
            before=('data = x["m"] > 0',),
            keep="(data | (position == t)) & (position <= t)",
            keep_after="(data.flip(1) | (position == t)) & (position <= t)",
            **DATA,
        ),
        "the opposite of data": attention(
            before=('data = (x["m"] > 0) | (position == t)',),
            keep="data & (position <= t)",
            keep_after="~data & (position <= t)",
            **DATA,
        ),
        "nothing left, without zeros": attention(keep="position < t", masked=LOWEST, post="p"),
        "maybe nothing left": attention(keep='(position <= t) & (x["m"] > 0)', masked=LOWEST, post="p", **DATA),
    },
    "floors": {
        "-1e9": attention(masked="s.masked_fill(~keep, -1e9)"),
        "the lowest of float32": attention(masked="s.masked_fill(~keep, torch.finfo(torch.float32).min)"),
        "the highest": attention(masked="s.masked_fill(~keep, torch.finfo(s.dtype).max)"),
        "zero": attention(masked="s.masked_fill(~keep, 0.0)"),
        "a product": attention(masked="s * keep"),
        "scaled afterwards": attention(masked=LOWEST, scale="s", late_scale="s * 0.5"),
        "divided afterwards": attention(masked=LOWEST, scale="s", late_scale="s / 2"),
        "a bias afterwards": attention(masked=LOWEST, late_scale="s + 0.1 * position"),
        "one is added, too": attention(masked="s + torch.where(keep, 1.0, -inf) * (t + 1)"),
        "a kept score is a number": attention(masked="torch.where(position > 0, s, 0.3).masked_fill(~keep, -inf)"),
    },
    "scores": {
        "over heads": attention(softmax="torch.softmax(s, 2)", masked=LOWEST),
        "over groups": attention(softmax="torch.softmax(s, 1)", masked=LOWEST),
        "over heads and keys": attention(softmax="torch.softmax(s.flatten(2), -1).view(s.shape)"),
        "detached": attention(scale="s.detach()"),
        "a bias by distance": attention(scale="s - 0.1 * (t - position)"),
        "a bias of data": attention(scale='s + x["m"]', **DATA),
        "capped": attention(scale="torch.tanh(s)"),
        "negative": attention(scale="s * -0.6"),
        "a scale for each head": attention(scale="s * torch.tensor([[0.5], [1.0]])"),
        "a scale of data": attention(scale='s * x["m"].abs()', **DATA),
        "a scale of each step": attention(scale="s * (t + 1)"),
        "of one key, repeated": attention(scale="s[..., :1].expand(s.shape)"),
    },
    "weights": {
        "of a softmax of a softmax": attention(post="torch.softmax(p, -1) * after"),
        "in another order": attention(post="(p * after).index_select(-1, torch.arange(5, -1, -1))"),
        "rolled": attention(post="torch.roll(p * after, 1, -1)"),
        "of other heads": attention(out="p.flip(1) @ v.transpose(1, 2)"),
        "of other groups": attention(out="p.transpose(1, 2) @ v.transpose(1, 2)"),
        "of a key less": attention(out="p[..., 1:] @ v[:, 1:].transpose(1, 2)"),
        "of one head": attention(out="p[:, :, :1].expand(p.shape) @ v.transpose(1, 2)"),
        "detached": attention(post="(p * after).detach()"),
        "dropped": attention(post='p * after * (x["m"] > 0) * 1.25', **DATA),
        "rescaled": attention(post="p * after * 1.25"),
        "renormalised": attention(post="(p * after) / ((p * after).sum(-1, keepdim=True) + 1e-6)"),
        "added": attention(post="p * after + p.flip(2) * after"),
    },
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_near_misses_are_left_alone(kind):
    program = together(list(NEAR_MISSES[kind].values()))
    actual, report = run_compiled(program, attention="sparse")
    programs = [match for match in entry(report, "raise_attention").matches if PROGRAM in match]
    found = [line_of(program, match) for match in entry(report, "raise_attention").matches if match not in programs]
    assert found == []
    reasons = [d.reason for d in entry(report, "raise_attention").declines]
    assert len(reasons) + len(programs) >= len(NEAR_MISSES[kind])
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_a_softmax_in_more_precision_than_its_scores_is_left_alone():
    low = {"dtype": torch.float32, "soft": torch.float32}
    program = attention(softmax="torch.softmax(s.double(), -1)", cast="p.to(DTYPE)", **low)
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == []
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_dropout_is_left_alone():
    """What draws random numbers keeps its order: the whole step stays as it is."""
    program = attention(post="F.dropout(p * after, 0.0 if t is None else 0.5)")
    _, report = run_compiled(program)
    assert raised(report) == []
    assert not report.scans[0].batched


LOG_SUMS = {
    "of the scores": ("out * s.logsumexp(-1, keepdim=True).sigmoid()", True),
    "twice": ("out * (s.logsumexp(-1) - s.logsumexp((-1,))).exp()[..., None] + s.logsumexp(-1)[..., None]", True),
    "of twice the scores": ("out * (2 * s).logsumexp(-1, keepdim=True).sigmoid()", False),
    "of some scores": ("out * s[..., :3].logsumexp(-1, keepdim=True).sigmoid()", False),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", LOG_SUMS)
def test_the_log_sum_exp_of_its_scores_is_that_of_the_attention(name):
    expression, taken = LOG_SUMS[name]
    program = AttentionProgram(
        "plain",
        (
            "keep = position <= t",
            "s = (q @ k.transpose(-1, -2)).masked_fill(~keep, -inf)",
            "out = torch.softmax(s, -1) @ v",
            f"out = {expression}",
        ),
    )
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == [PROGRAM if taken else "attention to a window of 6"]
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_values_may_depend_on_the_log_sum_exp():
    """Then it is computed before the attention."""
    program = AttentionProgram(
        "plain",
        (
            "keep = position <= t",
            "s = (q @ k.transpose(-1, -2)).masked_fill(~keep, -inf)",
            "out = torch.softmax(s, -1) @ (v * s.logsumexp(-1).mean(-1)[..., None, None].sigmoid())",
        ),
    )
    actual, report = run_compiled(program, attention="sparse")
    assert raised(report) == [PROGRAM]
    assert_equals_loop(program, actual)
