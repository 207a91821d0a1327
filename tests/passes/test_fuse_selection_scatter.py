"""fuse_selection_scatter: masks scattered from block indices become indices, and eq. 8 to 11 one operator; nothing else
does."""

from __future__ import annotations

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from nsa_compile.passes import ORDER
from tests.attention_programs import (
    COMPRESSED,
    SCORE,
    AttentionProgram,
    assert_equals_loop,
    entry,
    fused,
    line_of,
    run_compiled,
    run_compiled_step,
    selection,
    together,
)
from tests.strategies import few

WHOLE, MASK_ONLY = "importance, ranking and mask of blocks of {}", "mask of blocks of {}"


@st.composite
def selections(draw) -> tuple[AttentionProgram, int]:
    """Selection as of eq. 8 to 12, in some way of writing it; and its block size."""

    def pick(*choices):
        return draw(st.sampled_from(choices))

    d = pick(1, 2, 3)
    block = d * pick(1, 2, 4)
    initial, local = pick(0, 1, 2), pick(1, 2)
    l = d * pick(1, 2) if d > 1 else 2  # noqa: E741  (blocks of one token are plain causal attention)
    S = max(l + d, pick(2 * block + 1, 3 * block, 4 * block + block // 2))
    program = selection(
        S=S,
        l=l,
        d=d,
        block=block,
        n=pick(1, 2, 3),
        mass=pick("pc.detach().sum(2)", "pc.sum(2).detach()", "pc.sum(dim=-2)", "pc.detach().transpose(1, 2).sum(1)"),
        allowed=pick("block <= current", "~(block > current)", "block < current + 1", f"block * {block} <= t"),
        forced=pick(
            f"(block < {initial}) | (block > current - {local})", f"(block > current - {local}) | ~(block >= {initial})"
        ),
        score=pick(
            SCORE,
            "torch.where(~allowed, -math.inf, importance.masked_fill(forced, math.inf))",
            "importance.masked_fill(forced, math.inf).masked_fill(~allowed, -math.inf)",
        ),
        rank=pick(
            "torch.sort(score, dim=-1, descending=True, stable=True)", "score.sort(stable=True, descending=True)"
        ),
        chosen=pick(
            "torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, taken)",
            "torch.zeros(score.shape, dtype=torch.bool).scatter(2, index, taken)",
            "score.new_zeros(score.shape, dtype=torch.bool).scatter(-1, index, taken)",
        ),
        tokens=pick(
            None,
            f"chosen[..., None].expand(-1, -1, -1, {block}).flatten(2)[..., :{S}]",
            f"chosen.unsqueeze(-1).repeat(1, 1, 1, {block}).reshape(2, 2, -1)[..., :{S}]",
        ),
        keep=pick(
            "(tokens & (position <= t))[:, :, None]",
            "(position <= t) & tokens.unsqueeze(2)",
            "tokens[:, :, None].logical_and(~(position > t))",
            "~(~tokens)[:, :, None] & (t - position >= 0)",
        ),
    )
    return program, block


@few(4)
@given(
    case=selections(),
    nested=st.sampled_from(["eager"] * 7 + ["aot_eager"]),
    operators=st.sampled_from(["sparse", "sparse", "dense", "auto"]),
)
def test_selection_in_every_form_is_fused(case, nested, operators):
    program, block = case
    note(repr(program))
    actual, report = run_compiled(program, nested, attention=operators)
    assert fused(report) == [WHOLE.format(block)]
    assert report.scans[0].batched
    assert not report.scans[0].guards_kept
    assert_equals_loop(program, actual)


# Legal, and something else than the usual: with numbers of its own.
OTHERS = {
    "other factors": selection(importance="3 * padded[..., 0:7:2] + padded[..., 1:8:2]"),
    "all doubled": selection(importance="2 * (padded[..., 0:7:2] + padded[..., 1:8:2])"),
    "nothing forced": selection(score="torch.where(allowed, importance, -math.inf)"),
    "one block": selection(first="best[..., :1], index[..., :1]"),
    "all blocks": selection(first="best, index"),
    "a window besides": selection(keep="(tokens & (position <= t) & (position > t - 9))[:, :, None]"),
    "more than the past forced": selection(forced="(block < 1) | (block >= current)"),
    "everything forced": selection(forced="block < 99"),
    "moved by index": selection(tokens="chosen.index_select(-1, position // 4)"),
}


@pytest.mark.deep
def test_other_numbers_are_taken_as_they_are():
    program = together(list(OTHERS.values()), COMPRESSED)
    actual, report = run_compiled(program, attention="sparse")
    assert fused(report) == [WHOLE.format(4)] * len(OTHERS)
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_other_conditions_beside_the_blocks_stay_a_mask():
    """Conditions on data, and the same one written twice."""
    program = together(
        [
            selection(keep='(tokens & (position <= t))[:, :, None] & (x["m"] > -1)', data=(2, 2, 1)),
            selection(keep="(tokens & chosen.repeat_interleave(4, -1) & (position <= t))[:, :, None]", data=(2, 2, 1)),
        ],
        COMPRESSED,
    )
    actual, report = run_compiled(program, attention="sparse")
    assert fused(report) == [WHOLE.format(4)] * 2
    assert_equals_loop(program, actual)


@pytest.mark.deep
def test_blocks_have_their_own_size():
    """Tokens in blocks twice as large as those that are ranked, so that half of the blocks hold no token."""
    program = selection(tokens="chosen.repeat_interleave(8, -1)[..., :16]")
    actual, report = run_compiled(program, attention="sparse")
    assert fused(report) == [MASK_ONLY.format(8)]
    assert_equals_loop(program, actual)


# -------------------------------------------------------------------------------------------------------- near misses

DATA = {"data": (2, 2, 1)}

# Indices that are data, from -9 to 9: of no block, of later ones, some twice.
DRAWN = '(x["m"][:, :, 0, :5] * 4).long()'


def given_blocks(columns: str, count: int = 6, blocks: str = "1:5", indices: str = DRAWN) -> AttentionProgram:
    chosen = f"torch.zeros(2, 2, {count}, dtype=torch.bool).scatter(-1, {columns}, True)[..., {blocks}]"
    return selection(taken=f"best > -inf\n        given = {indices}", chosen=chosen, out="o", **DATA)


GIVEN = {
    "clamped, then moved": given_blocks("given.clamp(-1, 4) + 1"),
    "moved, then clamped": given_blocks("(1 + given).clamp(0, 5)"),
    "in 32 bits": given_blocks("given.int().clamp(-1, 4).long() + 1"),
    "one": given_blocks("given[..., :1].clamp(min=-1, max=4) + 1"),
    "the last column for none": given_blocks("torch.where(given < 0, 4, given.clamp(0, 4))", 5, ":4"),
    "into blocks alone": given_blocks("given.clamp(0, 3)", 4, ":"),
    "one beside": given_blocks("given.clamp(-1, 4) + 1", blocks=":4"),
}


@pytest.mark.deep
def test_indices_that_are_data_are_those_of_the_attention():
    program = together(list(GIVEN.values()), COMPRESSED)
    actual, report = run_compiled(program, attention="sparse")
    assert fused(report) == [MASK_ONLY.format(4)] * len(GIVEN)
    assert [choice.operator for choice in report.attention].count("selected_attention") == len(GIVEN)
    assert_equals_loop(program, actual)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["clamped, then moved", "one beside", "into blocks alone"])
@pytest.mark.parametrize("form", ["a step by itself", "a loop that stays"])
def test_single_steps_gather_the_rows_of_indices_that_are_data(name, form):
    """Also where a block comes twice: its tokens count once."""
    if form == "a step by itself":
        actual, report = run_compiled_step(GIVEN[name])
    else:
        actual, report = run_compiled(GIVEN[name], disable=["batch_prefill"])
    assert fused(report) == [MASK_ONLY.format(4)]
    assert_equals_loop(GIVEN[name], actual)


MARKED = "best > -inf\n        marked = {}"
COLUMNS = "torch.zeros(2, 2, {}, dtype=torch.bool).scatter(-1, {}, True)[..., {}]"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("marked", "columns"),
    [
        ("torch.where(taken, index, -1)", (6, "marked.clamp(-1, 4) + 1", "1:5")),
        ("index.masked_fill(~taken, -1)", (5, "marked + 1", "1:")),
        ("torch.where(~taken, -1, index)", (7, "2 + marked.int().long()", "2:6")),
    ],
)
@pytest.mark.parametrize("disable", [[], ["batch_prefill"]])
def test_a_selection_that_is_returned_is_ranked_once(marked, columns, disable, tmp_path):
    program = selection(taken=MARKED.format(marked), chosen=COLUMNS.format(*columns), out="(oc + o, marked.double())")
    actual, report = run_compiled(program, attention="sparse", disable=disable, dump_dir=str(tmp_path))
    assert fused(report) == [WHOLE.format(4)]
    if not disable:
        operators = [choice.operator for choice in report.attention]
        assert sorted(operators) == ["compressed_attention with selection", "selected_attention"]
        assert "aten.sort" not in max(tmp_path.glob("*_after.py")).read_text()
    assert_equals_loop(program, actual)


# Their columns may lie outside of the mask, where the loop would say so, or are no indices plus a number.
UNSURE = {
    "not clamped": given_blocks("given", 4, ":", indices='(x["m"][:, :, 0, :5].abs() * 0.1).long()'),
    "clamped on one side": given_blocks("given.clamp(max=3)", 4, ":", indices=DRAWN + ".abs()"),
    "wrapped around": given_blocks("(given.clamp(-1, 2).to(torch.int8) + 127 + 127 + 3).long()"),
}


@pytest.mark.deep
def test_indices_that_may_lie_outside_of_the_mask_are_left_alone():
    program = together(list(UNSURE.values()), COMPRESSED)
    actual, report = run_compiled(program, attention="sparse")
    matches = [match for match in entry(report, "raise_attention").matches if "a program of scores" in match]
    assert len(matches) == len(UNSURE)
    assert all(match.endswith(": its block indices may lie outside of its block mask; clamp them") for match in matches)
    assert_equals_loop(program, actual)


# The mask is one of blocks, but they are not ranked by eq. 8 to 11.
OTHER_RANKINGS = {
    "order": {
        "topk": selection(rank="torch.topk(score, 3)"),
        "not stable": selection(rank="torch.sort(score, dim=-1, descending=True)"),
        "ascending": selection(rank="torch.sort(-score, dim=-1, stable=True)", taken="best < inf"),
        "from the second": selection(first="best[..., 1:3], index[..., 1:3]"),
        "from the second, not the scores": selection(first="best[..., :3], index[..., 1:4]"),
        "every other": selection(first="best[..., ::2], index[..., ::2]"),
        "from the first, not the scores": selection(first="best[..., 1:4], index[..., :3]"),
        "every other, by their scores": selection(first="best[..., ::2], index[..., :2]"),
        "all of them taken": selection(chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, True)"),
        "only the important ones": selection(taken="best > 0.3"),
    },
    "blocks": {
        "one of the future": selection(allowed="block <= current + 1"),
        "none of the present": selection(allowed="block < current"),
        "every one": selection(score="torch.where(forced, math.inf, importance)"),
        "the second forced": selection(forced="block == 1"),
        "the last but one forced": selection(forced="(block < 1) | (block == current - 1)"),
        "forced now and then": selection(forced="(block < 1) & (t % 2 == 0)"),
        "forced by data": selection(forced='(x["m"][..., :4] > 0)[:, :, 0]', **DATA),
        "allowed by data": selection(allowed='(block <= current) & (x["m"][:, :, 0, :4] > -1)', **DATA),
        "forced first, then not allowed to be": selection(
            score="torch.where(forced, math.inf, torch.where(allowed, importance, -math.inf))"
        ),
    },
    "importance": {
        "other weights": selection(mass="torch.softmax(sc * 2, -1).detach().sum(2)"),
        "scores": selection(mass="sc.detach().sum(2)"),
        "unequal heads": selection(mass="(pc * torch.tensor([[1.0], [2.0]])).sum(2)"),
        "one head": selection(mass="pc[:, :, 0]"),
        "the best head": selection(mass="pc.amax(2)"),
        "half": selection(mass="pc.mean(2)"),
        "of other groups": selection(mass="pc.sum(2).index_select(1, torch.tensor([1, 0]))"),
        "rounded": selection(mass="pc.float().sum(2).double()"),
        "summed in less": selection(mass="pc.sum(2, dtype=torch.float32).double()"),
        "rounded once": selection(mass="pc.float().double().sum(2)"),
        "a factor and a half": selection(importance="1.5 * padded[..., 0:7:2] + padded[..., 1:8:2]"),
        "a difference": selection(importance="padded[..., 0:7:2] - padded[..., 1:8:2]"),
        "uneven": selection(importance="padded.index_select(-1, torch.tensor([0, 2, 4, 5]))"),
        "backwards": selection(importance="padded.index_select(-1, torch.tensor([6, 4, 2, 0]))"),
        "a bias": selection(importance="padded[..., 1:8:2] + 0.1 * block"),
        "of random numbers": selection(mass='x["m"][:, :, 0, :7].abs()', **DATA),
    },
    "threshold": {
        "of top-k": selection(chosen="score >= score.topk(2).values[..., -1:]"),
        "of a sort": selection(chosen="best[..., 1:2] <= score"),
        "of kthvalue": selection(chosen="score >= score.kthvalue(3, -1, keepdim=True).values"),
        "of detached scores": selection(chosen="score.detach() >= score.topk(2).values[..., 1, None].detach()"),
        "that several reach": selection(
            mass="(pc.sum(2) > 0.2).double()", chosen="score >= score.topk(2).values[..., -1:]"
        ),
    },
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("kind", OTHER_RANKINGS)
def test_other_rankings_stay_and_their_mask_goes(kind):
    program = together(list(OTHER_RANKINGS[kind].values()), COMPRESSED)
    actual, report = run_compiled(program, attention="sparse")
    assert fused(report) == [MASK_ONLY.format(4)] * len(OTHER_RANKINGS[kind])
    assert_equals_loop(program, actual)


# The mask depends on data in another way than by whole blocks.
OTHER_MASKS = {
    "block masks": {
        "used elsewhere": selection(out="oc + o + chosen.sum(-1)[:, :, None, None]"),
        "of ones": selection(chosen="torch.ones_like(score, dtype=torch.bool).scatter(-1, index, ~taken)"),
        "of ones, minus these": selection(chosen="torch.ones_like(score, dtype=torch.bool).scatter(-1, index, False)"),
        "of nothing": selection(chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, False)"),
        "of scores": selection(chosen="(importance > 0.4).scatter(-1, index, taken)"),
        "along groups": selection(
            chosen="torch.zeros(2, 4, 2, dtype=torch.bool).scatter(1, index.mT, taken.mT).transpose(1, 2)"
        ),
        "of a part": selection(chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, index[:1], taken[:1])"),
        "of indices that come twice": selection(
            chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, index.clamp(max=1), taken)"
        ),
        "of indices that are moved": selection(
            chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, (index + 1) % 4, taken)"
        ),
        "turned round": selection(keep="(~tokens & (position <= t))[:, :, None]"),
        "and another one": selection(
            chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, taken)\n"
            "        other = torch.zeros_like(score, dtype=torch.bool).scatter(-1, index[..., :1], taken[..., :1])",
            keep="(tokens & other.repeat_interleave(4, -1) & (position <= t))[:, :, None]",
        ),
        "or another one": selection(keep="((tokens | (position > t - 2)) & (position <= t))[:, :, None]"),
    },
    "thresholds": {
        "that few reach": selection(chosen="score > score.topk(2).values[..., -1:]"),
        "from above": selection(chosen="score <= score.topk(2).values[..., -1:]"),
        "of other scores": selection(chosen="score >= importance.topk(2).values[..., -1:]"),
        "of another row": selection(chosen="score >= score.topk(2).values[..., -1:].flip(1)"),
        "of another dimension": selection(chosen="score >= score.topk(1, 1).values[..., -1:]"),
        "of their own": selection(chosen="score >= 0.2"),
        "turned round": selection(
            chosen="score >= score.topk(2).values[..., -1:]", keep="(~tokens & (position <= t))[:, :, None]"
        ),
    },
    "tokens": {
        "in unequal blocks": selection(
            tokens="chosen.index_select(-1, torch.tensor([0] * 3 + [1] * 5 + [2] * 4 + [3] * 4))"
        ),
        "shifted by one": selection(tokens="chosen.index_select(-1, ((position + 1) // 4).clamp(max=3))"),
        "shifted by one to the right": selection(tokens="chosen.index_select(-1, (position - 1).clamp(min=0) // 4)"),
        "rolled": selection(tokens="chosen.repeat_interleave(4, -1).roll(1, -1)"),
        "in turns": selection(tokens="chosen.repeat(1, 1, 4)"),
        "backwards": selection(tokens="chosen.index_select(-1, 3 - position // 4)"),
    },
}  # fmt: skip


# Which indices narrow the keys of which query.
OTHER_ROWS = {
    "of other groups": selection(tokens="chosen.index_select(1, torch.tensor([1, 0])).repeat_interleave(4, -1)"),
    "of one group": selection(tokens="chosen[:, :1].expand(2, 2, 4).repeat_interleave(4, -1)"),
    "of each head": selection(
        mass="pc.detach().transpose(1, 2).flatten(1, 2)",
        importance="(padded[..., 0:7:2] + padded[..., 1:8:2])",
        chosen="torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, taken).unflatten(1, (2, 2)).mT.mT",
        keep="tokens.unflatten(1, (2, 2)) & (position <= t)",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", OTHER_MASKS)
def test_other_masks_are_left_alone(kind):
    program = together(list(OTHER_MASKS[kind].values()), COMPRESSED)
    actual, report = run_compiled(program, attention="sparse")
    assert [line_of(program, match) for match in entry(report, "fuse_selection_scatter").matches] == []
    declines = [d for name in ("raise_attention", "fuse_selection_scatter") for d in entry(report, name).declines]
    scored = [match for match in entry(report, "raise_attention").matches if "a program of scores" in match]
    assert len(declines) + len(scored) >= len(OTHER_MASKS[kind])
    assert_equals_loop(program, actual)


# ------------------------------------------------------------------------------------------------- every set of passes

ATTENTION_PASSES = ["raise_attention", "fuse_selection_scatter", "lower_attention"]
EXAMPLE = selection(S=18)


@pytest.mark.deep
@pytest.mark.parametrize(
    "disable",
    [[p] for p in ATTENTION_PASSES]
    + [[q for q in ORDER if q not in ("resolve_carries", p)] for p in ATTENTION_PASSES]
    + [["batch_prefill"]],
    ids=lambda names: "without " + " ".join(names),
)
def test_passes_alone_and_left_out(disable):
    actual, report = run_compiled(EXAMPLE, attention="sparse", disable=disable)
    found = {p.name: len(p.matches) for p in report.passes}
    raised = 0 if "raise_attention" in disable else 2
    assert found["raise_attention"] == raised
    assert found["fuse_selection_scatter"] == (raised == 2 and "fuse_selection_scatter" not in disable)
    assert_equals_loop(EXAMPLE, actual)


@pytest.mark.deep
def test_every_number_of_rewrites():
    _, report = run_compiled(EXAMPLE, attention="sparse")
    total = sum(len(p.matches) for p in report.passes)
    assert total >= 6
    for limit in range(total):
        actual, report = run_compiled(EXAMPLE, attention="sparse", stop_after=limit)
        assert sum(len(p.matches) for p in report.passes) == limit
        assert_equals_loop(EXAMPLE, actual)
