"""Selections are returned and replayed alike by the loop, by what trains, by prefill and by the decode step."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nsa_compile
from nsa_compile.models import NSATransformer, NSAttention, SparsePattern, nsa_attention
from nsa_compile.models.nsa import nsa_prefill
from nsa_compile.verification.oracle import nsa_branches_oracle
from tests.models.test_nsa import assume_unambiguous, tiny_model, tokens_for, value_and_grads
from tests.strategies import NSAProblem, few, nsa_problems


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def drawn_selection(problem: NSAProblem, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Any blocks `[B, S, G, count]`: none, later ones, some that are not there, some twice."""
    blocks = -(-problem.S // problem.l_sel)
    rng = torch.Generator().manual_seed(problem.seed + 1)
    return torch.randint(-2, blocks + 2, (problem.B, problem.S, problem.G, count), generator=rng, dtype=dtype)


def oracle_replaying(problem: NSAProblem, selection: Tensor):
    def run(*tensors: Tensor) -> Tensor:
        *rest, gates = tensors
        branches, _ = nsa_branches_oracle(*rest, **problem.oracle_arguments, selection=selection)
        return sum(gates.double()[..., c, None] * branch for c, branch in enumerate(branches))

    return run


def compiled(function, nested: str = "eager"):
    torch._dynamo.reset()
    return nsa_compile.compile(function, nested=nested, cache=False, attention="sparse")


def operators() -> list[str]:
    report = nsa_compile.last_report()
    assert report is not None
    return sorted(choice.operator for choice in report.attention)


# ----------------------------------------------------------------------------------------------- against the oracle


@given(problem=nsa_problems(), count=st.integers(1, 6), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_a_replayed_selection_equals_the_oracle(problem, count, dtype):
    tensors, selection = problem.tensors(), drawn_selection(problem, count, dtype)
    arguments = {"pattern": problem.pattern, "phi": problem.block_phi, "selection": selection}
    actual = value_and_grads(lambda *x: nsa_attention(*x, **arguments), tensors)
    expected = value_and_grads(oracle_replaying(problem, selection), tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.deep
@few(4)
@given(problem=nsa_problems(), count=st.integers(1, 6), nested=st.sampled_from(["eager", "aot_eager"]))
def test_a_replayed_selection_compiled_equals_the_oracle(problem, count, nested):
    """By the operator on blocks, and with nothing ranked."""
    problem = dataclasses.replace(problem, S=problem.S + 2 * problem.l_sel + problem.l, D=4, Dv=3)
    tensors, selection = problem.tensors(), drawn_selection(problem, count)
    settings = {"pattern": problem.pattern, "phi": problem.block_phi}
    replay = compiled(lambda selection, *x: nsa_attention(*x, **settings, selection=selection), nested)
    actual = value_and_grads(lambda *x: replay(selection, *x), tensors)
    assert "selected_attention" in operators()
    assert not any("selection" in operator or "scores" in operator for operator in operators())
    expected = value_and_grads(oracle_replaying(problem, selection), tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


EXAMPLE = NSAProblem(
    B=2, S=40, G=2, h=2, D=4, Dv=3, l=4, d=2, l_sel=4, n=4, w=6, num_initial=1, num_local=2,
    index_convention="minus", phi="mean", contents="normal", strided=False, seed=0,
)  # fmt: skip


@pytest.mark.deep(but=["of another group"])
@pytest.mark.parametrize("fault", ["the next block", "the block before", "of another token", "of another group"])
def test_a_selection_that_is_off_is_seen(fault):
    """What the comparisons above are worth."""
    tensors, selection = EXAMPLE.tensors(), drawn_selection(EXAMPLE, 3)
    off = {
        "the next block": selection + 1,
        "the block before": selection - 1,
        "of another token": selection.roll(1, 1),
        "of another group": selection.flip(2),
    }[fault]
    actual = value_and_grads(lambda *x: nsa_attention(*x, pattern=EXAMPLE.pattern, selection=off), tensors)
    expected = value_and_grads(oracle_replaying(EXAMPLE, selection), tensors)
    for a, b in ((actual[0], expected[0]), (actual[1][3], expected[1][3]), (actual[1][4], expected[1][4])):
        assert float((a - b).abs().max()) > 1e-3


@given(problem=nsa_problems())
def test_what_is_returned_is_the_oracles_choice(problem):
    tensors = problem.tensors()
    assume_unambiguous(problem, tensors)
    arguments = {"pattern": problem.pattern, "phi": problem.block_phi}
    output, selection = nsa_attention(*tensors, **arguments, return_selection=True)
    assert torch.equal(output, nsa_attention(*tensors, **arguments))
    assert torch.equal(output, nsa_attention(*tensors, **arguments, selection=selection))
    _, chosen = nsa_branches_oracle(*tensors[:-1], **problem.oracle_arguments)
    assert selection.dtype == torch.int32
    assert torch.equal(as_sets(selection), as_sets(chosen))


def as_sets(selection: Tensor) -> Tensor:
    return selection.long().sort(-1).values


# ------------------------------------------------------------------------------------------------------------- ties


def repeated_keys(problem: NSAProblem, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Keys that are the same in every block: blocks of equal weight, but for the first and the last ones."""
    q, k_cmp, *rest = problem.tensors(dtype)
    return q, k_cmp[:, torch.arange(problem.S) % problem.l_sel], *rest


def in_every_form(pattern: SparsePattern, dtype: torch.dtype):
    """Each path's selection `[B, S, G, n]` of tensors, as functions that are compiled at their first call alone."""

    def train(**x):
        return nsa_attention(**x, pattern=pattern, return_selection=True)[1]

    def prefill(lengths, **x):
        return nsa_prefill(lengths=lengths, max_len=64, **x, pattern=pattern, return_selection=True)[2]

    layer = _Projected(pattern)
    step = nsa_compile.compile_decode_step(layer, nested="eager", cache=False)
    trained = {"the loop": train, "compiled": compiled(train)}
    if dtype == torch.float32:
        trained["compiled by Inductor"] = compiled(train, "inductor")
    fast_prefill = compiled(prefill)

    def select(tensors) -> dict[str, Tensor]:
        names = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates")
        inputs = dict(zip(names, (x.detach() for x in tensors), strict=True))
        batch, length = inputs["q"].shape[:2]
        layer.inputs = inputs
        return {name: run(**inputs) for name, run in trained.items()} | {
            "prefill": fast_prefill(torch.full((batch,), length), **inputs),
            "decode": _decoded(layer, layer.decode_step, batch, length),
            "decode, compiled": _decoded(layer, step, batch, length),
        }

    return select


class _Projected:
    """Attention to tokens that are projected already, as a model of one layer without weights."""

    inputs: dict[str, Tensor]

    def __init__(self, pattern: SparsePattern) -> None:
        self.pattern = pattern

    def init_state(self, batch: int, room: int):
        from nsa_compile.models.nsa import init_state

        return init_state(batch, room, self.inputs["k_slc"], self.inputs["v_slc"], pattern=self.pattern)

    def decode_step(self, state, t):
        from nsa_compile.models.nsa import NSAToken, decode_step, mean_phi

        rows = {name: x.index_select(1, t[:1])[:, 0] for name, x in self.inputs.items()}
        token = NSAToken(t, q_cmp=rows["q"], **rows)
        state, output, selection = decode_step(
            state, token, pattern=self.pattern, phi_k=mean_phi, phi_v=mean_phi, return_selection=True
        )
        return state, output, selection


def _decoded(layer: _Projected, step, batch: int, length: int) -> Tensor:
    state, rows = layer.init_state(batch, length), []
    for t in range(length):
        state, _, selection = step(state, torch.full((batch,), t))
        rows.append(selection.clone())
    return torch.stack(rows, 1)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ties_go_the_same_way_on_every_path(dtype):
    problem = dataclasses.replace(EXAMPLE, n=5)
    select = in_every_form(problem.pattern, dtype)
    for tensors in (
        repeated_keys(problem, dtype),
        dataclasses.replace(problem, contents="equal keys").tensors(dtype),
        dataclasses.replace(problem, contents="zero queries").tensors(dtype),
    ):
        _, chosen = nsa_branches_oracle(*tensors[:-1], **problem.oracle_arguments)
        found = select(tensors)
        assert {name: bool(torch.equal(as_sets(x), as_sets(chosen))) for name, x in found.items()} == dict.fromkeys(
            found, True
        )
        # There are ties to be decided: most blocks weigh the same.
        later = as_sets(chosen)[:, 30:]
        assert bool((later[..., 1:3] < 5).any())


# ----------------------------------------------------------------------------------------------------------- models


@pytest.mark.deep
def test_every_path_of_a_model_records_the_same_and_replays_it():
    """Two layers, two groups, prompts of two lengths; in float64, where no rounding decides."""
    model, lengths = tiny_model(), torch.tensor([40, 23])
    tokens = tokens_for(model, 2, 40)
    logits, selection = model(tokens, return_selection=True)
    assert selection.shape == (2, 40, 2, 2, 4)
    run = compiled(model)
    fast, recorded = run(tokens, return_selection=True)
    assert torch.equal(recorded, selection)
    torch.testing.assert_close(fast, logits)
    # Another selection than the model's own: a replay that was ranked all the same would be seen.
    other = selection.clamp(min=0).flip(1) // 2
    expected = model(tokens, other)
    assert float((expected - logits).abs().max()) > 1e-3
    torch.testing.assert_close(run(tokens, other), expected)

    options = {"nested": "eager", "cache": False}
    for prefill, step in (
        (model.prefill, model.decode_step),
        (nsa_compile.compile_prefill(model, **options), nsa_compile.compile_decode_step(model, **options)),
    ):
        with torch.no_grad():
            _, last, chosen = prefill(tokens, lengths, 64, every=True, return_selection=True)
            assert torch.equal(chosen, selection)
            torch.testing.assert_close(last, logits.detach())
            _, last = prefill(tokens, lengths, 64, every=True, selection=other)
            torch.testing.assert_close(last, expected.detach())
            for replayed, due in ((None, logits), (other, expected)):
                # From the end of the shorter prompt on, so the sequences stand at different positions.
                state, *_ = prefill(tokens, lengths - 5, 64, **({} if replayed is None else {"selection": replayed}))
                for _ in range(5):
                    t = state.t.clone()
                    at = torch.arange(2), t
                    given = {} if replayed is None else {"selection": replayed[at]}
                    state, row, *chosen = step(state, tokens[at], **given, return_selection=True)
                    torch.testing.assert_close(row, due[at].detach())
                    assert torch.equal(chosen[0], (selection if replayed is None else replayed)[at])


def gradients(model: NSATransformer, logits: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(logits.square().mean(), list(model.parameters())))


@pytest.mark.deep
@pytest.mark.parametrize(("nested", "checkpointed"), [("eager", (0, 1)), ("inductor", ())])
def test_gradients_under_a_replay_are_those_of_the_ranked_model(nested, checkpointed):
    """To every parameter, the compressed branch's included, also where blocks are computed again."""
    model = tiny_model()
    tokens = tokens_for(model, 2, 40)
    logits, selection = model(tokens, return_selection=True)
    expected = gradients(model, logits)
    assert all(float(grad.abs().max()) > 0 for grad in expected)
    nsa_compile.compile_blocks(model, nested=nested, attention="sparse", cache=False)
    model.checkpoint_blocks(checkpointed)
    torch.testing.assert_close(gradients(model, model(tokens, selection)), expected)
    assert operators() == ["compressed_attention", "selected_attention", "window_attention"]
    again, chosen = model(tokens, return_selection=True)
    assert torch.equal(chosen, selection)
    torch.testing.assert_close(gradients(model, again), expected)


@pytest.mark.deep
def test_a_replayed_step_computes_no_ranking(tmp_path):
    """As the test before asserts of what trains: no importance of blocks is computed."""
    model = tiny_model(n_layers=1)
    tokens = tokens_for(model, 1, 40)
    _, selection = model(tokens, return_selection=True)
    operators = {}
    for name, given_blocks in (("ranked", {}), ("replayed", {"selection": selection[:, 0]})):
        torch._dynamo.reset()
        folder = tmp_path / name
        step = nsa_compile.compile_decode_step(model, dump_dir=str(folder), nested="eager", cache=False)
        step(model.init_state(1, 40), tokens[:, 0], **given_blocks)
        assert "in block_importance" not in max(folder.glob("*_after.py")).read_text(), "the operator computes it"
        operators[name] = [choice.operator for choice in nsa_compile.last_report().attention]
    assert operators["ranked"] == ["step_attention with selection", "step_attention", "step_attention"]
    assert operators["replayed"] == ["step_attention"] * 3


def counting(seed: int, length: int) -> Tensor:
    """Sequences `[8, length]` that count up, each by a number of its own, with a wrong one now and then."""
    rng = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(1, high, (8, 1), generator=rng) for high in (19, 6))
    wrong = torch.rand(8, length, generator=rng) < 0.1
    drawn = torch.randint(19, (8, length), generator=rng)
    return torch.where(wrong, drawn, (start + stride * torch.arange(length)) % 19)


@pytest.fixture(scope="module")
def trained() -> NSATransformer:
    """A model in float32 that has learned something: its loss is below that of one who knows no order."""
    torch.manual_seed(0)
    model = tiny_model().float()
    nsa_compile.compile_blocks(model, nested="eager", attention="sparse", cache=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(80):
        tokens = counting(step, 97)
        loss = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * math.log(model.config.vocab_size), losses
    return model.requires_grad_(False)


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 64), (torch.bfloat16, 4)])
def test_a_trained_model_selects_alike_on_every_path(trained, dtype, roundings):
    """But for choices that rounding decides; and a replay takes those away."""
    model = copy.deepcopy(trained).to(dtype)
    tokens = counting(99, 96)
    _, by_train = compiled(model)(tokens, return_selection=True)
    options = {"nested": "eager", "cache": False}
    prefill, step = nsa_compile.compile_prefill(model, **options), nsa_compile.compile_decode_step(model, **options)
    by_prefill = prefill(tokens, every=True, return_selection=True)[2]
    state, stepped, by_decode = model.init_state(8, 96), [], []
    for column in tokens.unbind(1):
        state, row, selection = step(state, column, return_selection=True)
        stepped.append(row.clone())
        by_decode.append(selection)
    stepped, by_decode = torch.stack(stepped, 1), torch.stack(by_decode, 1)

    def share_differing(selection: Tensor) -> float:
        # Beyond the first four blocks there is a choice.
        return (as_sets(selection) != as_sets(by_decode))[:, 16:].any(-1).double().mean().item()

    def error(logits: Tensor) -> float:
        return float((logits.float() - stepped.float()).abs().max() / stepped.float().abs().max())

    assert max(map(share_differing, (by_train, by_prefill))) <= (0 if dtype == torch.float32 else 0.1)
    rounding = roundings * torch.finfo(dtype).eps
    run = compiled(model)
    assert error(run(tokens, by_decode)) <= rounding
    assert error(prefill(tokens, every=True, selection=by_decode)[1]) <= rounding
    off = torch.where(by_decode < 1, by_decode, by_decode - 1)
    assert error(run(tokens, off)) > rounding


@pytest.mark.deep
def test_blocks_of_the_future_give_nothing():
    model = tiny_model()
    before = tokens_for(model, 2, 40)
    after = torch.cat([before[:, :20], (before[:, 20:] + 1) % model.config.vocab_size], 1)
    every = torch.arange(10, dtype=torch.int32).expand(2, 40, 2, 2, 10)
    for run in (model, compiled(model)):
        a, b = (run(tokens, every)[:, :20] for tokens in (before, after))
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------------ layer

LAYER = {"dim": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=3, window=6)


@pytest.mark.deep(but=["False"])
@pytest.mark.parametrize("compile", [False, True])
def test_a_selection_belongs_to_its_document(compile):
    """Packed, padded or alone: blocks count from the first token of the document, and replay the same."""
    torch.manual_seed(0)
    layer = NSAttention(**LAYER, pattern=PATTERN).double()
    x = torch.randn(1, 60, 16, dtype=torch.float64)
    first, second = (layer(part, return_selection=True) for part in (x[:, :37], x[:, 37:]))
    other = torch.cat([first[1], second[1]], 1).flip(1).clamp(max=4)
    expected = torch.cat([layer(x[:, :37], selection=other[:, :37]), layer(x[:, 37:], selection=other[:, 37:])], 1)
    if compile:
        nsa_compile.compile_block(layer, nested="eager", attention="sparse")
    cu_seqlens = torch.tensor([0, 37, 60])
    output, selection = layer(x, cu_seqlens=cu_seqlens, return_selection=True)
    torch.testing.assert_close(output, torch.cat([first[0], second[0]], 1))
    assert torch.equal(selection, torch.cat([first[1], second[1]], 1))
    torch.testing.assert_close(layer(x, cu_seqlens=cu_seqlens, selection=other), expected)
    mask = torch.arange(60)[None] >= 37
    output, selection = layer(x, mask, return_selection=True)
    assert torch.equal(selection[:, 37:], second[1])
    assert bool((selection[:, :37] == -1).all())


# -------------------------------------------------------------------------------------------------------- bad input


def test_selections_that_cannot_be_are_one_line():
    model = tiny_model()
    tokens = tokens_for(model, 2, 12)
    _, good = model(tokens, return_selection=True)
    state = model.init_state(2, 12)
    for selection, words in (
        (good.float(), "selection has dtype torch.float32; it must be torch.int32 or torch.int64"),
        (good[:, :-1], r"selection has shape \[2, 11, 2, 2, 4\]; here it must be \[2, 12, 2, 2\] and n, 1 or more"),
        (good[..., :0], r"must be \[2, 12, 2, 2\] and n"),
        (good[:, :, 0], r"selection has shape \[2, 12, 2, 4\]"),
    ):
        with pytest.raises(ValueError, match=words):
            model(tokens, selection)
        with pytest.raises(ValueError, match=words):
            model.prefill(tokens, selection=selection)
    with pytest.raises(ValueError, match=r"must be \[2, 2, 2\] and n"):
        model.decode_step(state, tokens[:, 0], selection=good)
    layer = model.blocks[0].attention
    with pytest.raises(ValueError, match=r"must be \[2, 12, 2\] and n"):
        layer(torch.randn(2, 12, 16).double(), selection=good)
    with pytest.raises(ValueError, match=r"must be \[2, 12, 2\] and n"):
        layer(torch.randn(2, 12, 16).double(), torch.ones(2, 12).long(), selection=good)


@pytest.mark.parametrize("changes", [{"branches": ("compressed", "window")}, {"attention": "dense"}])
def test_a_model_that_selects_nothing_says_so(changes):
    model = tiny_model(**changes)
    tokens = tokens_for(model, 1, 12)
    for run in (model, model.prefill):
        with pytest.raises(ValueError, match="need the selected branch"):
            run(tokens, return_selection=True)
