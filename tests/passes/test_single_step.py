"""A step compiled without a loop, as generation runs it: one program for all positions, which reads and writes the rows
it needs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile.models.nsa import NSAToken, decode_step, init_state, mean_phi
from nsa_compile.passes.report import Report
from tests.attention_programs import (
    COMPRESSED,
    AttentionProgram,
    assert_equals_loop,
    attention,
    entry,
    fused,
    run_compiled_step,
    together,
)
from tests.models.test_nsa import EXAMPLE, assume_unambiguous, tiny_model, tokens_for, value_and_grads
from tests.passes.test_fuse_selection_scatter import OTHER_MASKS, OTHER_RANKINGS, OTHERS, selections
from tests.passes.test_raise_attention import LOWEST
from tests.step_programs import loop
from tests.strategies import NSAProblem, few, nsa_problems

RANKED = "importance, ranking and mask of blocks of {}"
BLOCKS, WINDOW, ROW = "mask of blocks of {}", "window of {}", "one row is written"


def last_report() -> Report:
    report = nsa_compile.last_report()
    assert report is not None
    return report


def read_by_index(report: Report) -> list[str]:
    """Attention that reads single rows: selections, then windows."""
    windows = [match.split(": ", 1)[1].split(" at ")[0] for match in entry(report, "index_cache").matches]
    return fused(report) + [window for window in windows if window.startswith("window")]


def decoded(problem: NSAProblem, compiled: bool):
    """Attention over a sequence, token by token, as a function of its tensors."""
    phi = mean_phi if problem.phi == "mean" else problem.block_phi

    def step(state, token):
        return decode_step(state, token, pattern=problem.pattern, phi_k=phi, phi_v=phi)

    run = nsa_compile.compile(step, nested="eager", cache=False) if compiled else step

    def over_sequence(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates) -> Tensor:
        state = init_state(problem.B, problem.S, k_cmp, v_cmp, pattern=problem.pattern)
        outputs = []
        for t in range(problem.S):
            rows = (x[:, t] for x in (q, q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates))
            state, out = run(state, NSAToken(torch.tensor(t), *rows))
            outputs.append(out)
        return torch.stack(outputs, 1)

    return over_sequence


@few(5)
@given(problem=nsa_problems())
def test_nsa_decodes_as_without_compilation(problem):
    """At every position, in values and gradients: before the first block, at edges, under ties, with few blocks."""
    torch._dynamo.reset()
    tensors = problem.tensors()
    assume_unambiguous(problem, tensors)
    actual = value_and_grads(decoded(problem, compiled=True), tensors)
    expected = value_and_grads(decoded(problem, compiled=False), tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.deep
def test_nsa_reads_its_blocks_and_its_window():
    torch._dynamo.reset()
    with torch.no_grad():
        decoded(EXAMPLE, compiled=True)(*EXAMPLE.tensors())
    assert read_by_index(last_report()) == [RANKED.format(EXAMPLE.l_sel), WINDOW.format(EXAMPLE.w)]


# ------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.deep
@pytest.mark.parametrize("in_place", [False, True], ids=["state kept", "state updated"])
@pytest.mark.parametrize("changes", [{}, {"shared_kv": True, "v_head_dim": 6, "n_layers": 1}])
def test_a_model_decodes_by_one_program(in_place, changes):
    """Up to the end of its caches, and no further."""
    torch._dynamo.reset()
    model = tiny_model(**changes)
    make = (
        nsa_compile.compile_decode_step if in_place else lambda model, **o: nsa_compile.compile(model.decode_step, **o)
    )
    step = make(model, nested="eager", cache=False)
    tokens = tokens_for(model, 2, 26)
    state, expected_state = model.init_state(2, 26), model.init_state(2, 26)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for t in range(26):
            given = state
            before = [None if x is None else x.clone() for x in pytree.tree_leaves(given)]
            state, logits = step(state, tokens[:, t])
            expected_state, expected = model.decode_step(expected_state, tokens[:, t])
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(pytree.tree_leaves(state), pytree.tree_leaves(expected_state))
            if not in_place:
                torch.testing.assert_close(pytree.tree_leaves(given), before, rtol=0, atol=0)
    for refusing in (model.decode_step, *([step] if in_place else [])):
        with pytest.raises(ValueError, match="position 26 has no row in caches for 26 tokens; make a state for more"):
            refusing(expected_state, tokens[:, 0])
    programs = 1 + in_place  # in place, what makes logits is a program of its own
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs
    written = [m for m in entry(last_report(), "index_cache").matches if ROW in m]
    caches = sum(x is not None and "recent" not in name for name, x in state.layers[0]._asdict().items())
    assert len(written) == (caches if in_place else 0), "equal blocks are one program, updated in place"


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, {"shared_kv": True}, {"attention": "dense"}])
def test_prompts_of_several_lengths_are_continued_as_if_each_were_alone(changes):
    """Read in one go, filled up at the end, then decoded side by side, each at its own position."""
    torch._dynamo.reset()
    model = tiny_model(n_layers=2, **changes)
    options = {"nested": "eager", "cache": False}
    prefill, step = nsa_compile.compile_prefill(model, **options), nsa_compile.compile_decode_step(model, **options)
    tokens, lengths = tokens_for(model, 4, 30), torch.tensor([20, 1, 7, 13])
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        state, logits = prefill(tokens[:, :20], lengths, 30)
        assert all(scan.batched for scan in last_report().scans)
        layouts = [
            [x.stride() for x in layer if x is not None]
            for layer in (state.layers[0], model.init_state(4, 30).layers[0])
        ]
        assert layouts[0] == layouts[1], "one step serves both"
        alone = [model.init_state(1, 30) for _ in lengths]
        for b, length in enumerate(lengths.tolist()):
            for token in tokens[b, :length]:
                alone[b], expected = model.decode_step(alone[b], token[None])
            torch.testing.assert_close(logits[b], expected[0], rtol=1e-10, atol=1e-12)
        for i in range(10):
            following = torch.stack([tokens[b, length + i] for b, length in enumerate(lengths)])
            state, logits = step(state, following)
            for b, token in enumerate(following):
                alone[b], expected = model.decode_step(alone[b], token[None])
                torch.testing.assert_close(logits[b], expected[0], rtol=1e-10, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # prefill, step and logits
    assert all(choice.operator.startswith("step_attention") for choice in last_report().attention)
    if not changes:
        assert read_by_index(last_report()) == [RANKED.format(4), WINDOW.format(8)]


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, {"attention": "dense"}])
def test_what_is_decoded_beside_a_sequence_does_not_change_a_bit_of_it(changes):
    """By Inductor and in float32, in which a library's product of few rows depends on their number, and so wide that
    Inductor deals out the sum of a norm to two threads."""
    torch._dynamo.reset()
    model = tiny_model(n_layers=2, dim=2048, mlp_hidden=96, **changes).float()
    step = torch._inductor.config.patch({"cpp.threads": 2})(nsa_compile.compile_decode_step(model))
    torch.manual_seed(0)
    together, tokens = model.init_state(6, 30), tokens_for(model, 6, 1)[:, 0]
    for leaf in pytree.tree_leaves(together.layers):
        if leaf is not None:
            leaf.normal_()
    together.t.copy_(torch.tensor([29, 0, 7, 13, 20, 3]))
    parts = [slice(0, 1), slice(1, 3), slice(3, 6)]
    found = []
    for part in parts:
        state = model.init_state(part.stop - part.start, 30)
        for own, x in zip(pytree.tree_leaves(state), pytree.tree_leaves(together), strict=True):
            if own is not None:
                own.copy_(x[part])
        found.append(pytree.tree_leaves(step(state, tokens[part])))
    expected = pytree.tree_leaves(step(together, tokens))
    for pieces, whole in zip(zip(*found, strict=True), expected, strict=True):
        assert whole is None or torch.equal(torch.cat(pieces), whole)


@pytest.mark.deep
def test_a_row_of_a_cache_is_written_where_it_lies():
    """Into caches that lie group after group, as `init_state` makes them: no memory for another one is taken."""
    torch._dynamo.reset()
    model, room = tiny_model(n_layers=1), 4096
    step = nsa_compile.compile_decode_step(model)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(step, model.init_state(1, room), tokens_for(model, 1, 1)[:, 0])
    taken = [line for text in code for line in text.splitlines() if "= empty_strided_cpu(" in line]
    assert taken
    assert not [line for line in taken if str(room) in line]


class Own(torch.nn.Module):
    """A step of one's own, without attention."""

    def __init__(self, step):
        super().__init__()
        self.decode_step = step


STATES = {
    "a shift": lambda s, x: ((x * 2, s[0], s[1]), x + s[2]),
    "a swap": lambda s, x: ((s[1], s[0], s[2]), x),
    "the old one as output": lambda s, x: ((s[0] + x, s[1], s[2]), s[0]),
    "a view of the old one": lambda s, x: ((s[0].t(), s[2], s[1]), x),
    "a recurrence": lambda s, x: ((F.linear(s[0], x).tanh(), s[1], s[2]), s[0]),
    "names": lambda s, x: ({"b": s["a"], "a": s["b"] + x}, s["a"]),
}


@pytest.mark.deep(but=["a swap-eager", "a recurrence-eager"])
@pytest.mark.parametrize("nested", ["eager", "inductor"])
@pytest.mark.parametrize("name", STATES)
def test_a_state_is_computed_from_all_that_was_before(name, nested):
    """Parts of it may be parts of what was before, and so may what is returned."""
    torch._dynamo.reset()
    step = nsa_compile.compile_decode_step(Own(STATES[name]), nested=nested)
    names = "ab" if name == "names" else range(3)
    parts = [torch.full((2, 2), float(i + 1)).tril() for i in range(len(names))]
    state, expected = (dict(zip(names, x, strict=True)) if name == "names" else x for x in (parts, [*parts]))
    expected = pytree.tree_map(torch.clone, expected)
    for i in range(3):
        x = torch.full((2, 2), 10.0 * (i + 1))
        returned, output = step(state, x)
        expected, expected_output = STATES[name](expected, x)
        assert returned is state
        torch.testing.assert_close(output, expected_output)
        for key in names:
            torch.testing.assert_close(state[key], expected[key])


Z = torch.zeros(2, 3)
REFUSED = {
    "a number": ((Z, [3]), lambda s, x: (s, x), "state[1][0] is of type int"),
    "text": ({"a": [{"b": "c"}]}, lambda s, x: (s, x), "state['a'][0]['b'] is of type str"),
    "one tensor twice": ((Z, Z), lambda s, x: (s, x), "two tensors of the state, of shape [2, 3], share memory"),
    "rows in common": ((Z[:, :2], Z[:, 1:]), lambda s, x: (s, x), "two tensors of the state, of shape [2, 2], share"),
    "an expanded one": (Z[:, :1].expand(2, 3), lambda s, x: (s, x), "the state is expanded"),
    "it grows": (Z[:0], lambda s, x: (torch.cat([s, x]), x), "float32[1, 3] on cpu for the state, which was float32[0"),
    "it is broadcast": (Z, lambda s, x: (s[:1] + x, x), "float32[1, 3] on cpu for the state, which was float32[2, 3]"),
    "another dtype": (Z, lambda s, x: (s.double(), x), "float64[2, 3] on cpu for the state, which was float32[2, 3]"),
    "a part less": ((Z, Z + 1), lambda s, x: (s[:1], x), "a tuple of 1 for the state, which was a tuple of 2"),
    "another key": (
        {"a": Z},
        lambda s, x: ({"b": s["a"]}, x),
        "a dict with ['b'] for the state, which was a dict",
    ),
    "a part that comes": ([Z, None], lambda s, x: ([s[0], x], x), "for state[1], which was None"),
    "the logits alone": (Z, lambda s, x: x, "decode_step returns float32[1, 3] on cpu, where it returns (state,"),
    "nothing": (Z, lambda s, x: None, "decode_step returns None, where it returns (state, logits)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_be_updated_in_place_is_refused(name):
    state, function, message = REFUSED[name]
    torch._dynamo.reset()
    state = pytree.tree_map(lambda x: x, state)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        nsa_compile.compile_decode_step(Own(function), nested="eager")(state, torch.ones(1, 3))
    assert "\n" not in str(raised.value)
    assert not any(x.any() for x in pytree.tree_leaves(state) if x is Z), "nothing is written"


def test_halves_of_one_tensor_are_a_state():
    keys_and_values = torch.zeros(2, 3, 2)
    step = nsa_compile.compile_decode_step(Own(lambda s, x: ((s[0] + x, s[1] + s[0]), s[1])), nested="aot_eager")
    for _ in range(2):
        step((keys_and_values[0], keys_and_values[1]), torch.ones(3, 2))
    assert keys_and_values[:, 0, 0].tolist() == [2.0, 1.0]


def test_what_is_called_in_another_way_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"Linear has no method decode_step\(state, tokens\) that returns"):
        nsa_compile.compile_decode_step(torch.nn.Linear(1, 1))
    step = nsa_compile.compile_decode_step(Own(lambda s, x: (s, x)), nested="eager")
    with pytest.raises(TypeError, match=r"decode_step\(s, x\): got an unexpected keyword argument 'top'"):
        step(torch.zeros(1), torch.zeros(1), top=3)
    with pytest.raises(TypeError, match=r"decode_step\(s, x\): missing a required argument: 'x'"):
        step(torch.zeros(1))


class Counted(torch.nn.Module):
    """A model whose step does more with its state than its blocks do; `how` it takes the function for these."""

    class Block(torch.nn.Module):
        def decode_step(self, cache, x, t):
            return cache * 0.5 + x, x + cache

    def __init__(self, how):
        super().__init__()
        self.blocks, self.how = torch.nn.ModuleList([self.Block(), self.Block()]), how

    def step(self, state, x, block):
        t, caches, mean = state
        found = []
        for one, cache in zip(self.blocks, caches, strict=True):
            cache, x = block(one, cache, x, t)
            found.append(cache)
        if self.how == "a cache of two":
            found[0] = found[0] + found[1]
        elif self.how == "swapped":
            found.reverse()
        return (t + 1, found, mean * 0.9 + x), x + mean

    def decode_step(self, state, x, *, block=Block.decode_step):
        return self.step(state, x, block)


class WithoutBlock(Counted):
    def decode_step(self, state, x, **asked):
        return self.step(state, x, self.Block.decode_step)


@pytest.mark.parametrize("how", ["", "a cache of two", "swapped"])
@pytest.mark.parametrize("kind", [Counted, WithoutBlock])
def test_all_of_the_state_is_updated_whatever_blocks_do(kind, how):
    torch._dynamo.reset()
    model = kind(how)
    step = nsa_compile.compile_decode_step(model, nested="eager")

    def first():
        return torch.zeros(2), [torch.ones(2, 3), torch.zeros(2, 3)], torch.zeros(2, 3)

    state, expected = first(), first()
    for i in range(3):
        x = torch.full((2, 3), float(i))
        returned, output = step(state, x)
        expected, expected_output = model.decode_step(expected, x)
        assert returned is state
        torch.testing.assert_close((state, output), (expected, expected_output))


def test_what_a_step_returns_beside_its_state_may_be_of_parts():
    step = nsa_compile.compile_decode_step(
        Own(lambda s, x: (s + x, {"logits": x, "all": (s, None, 3)})), nested="eager"
    )
    _, found = step(torch.zeros(2), torch.ones(2))
    torch.testing.assert_close(found, {"logits": torch.ones(2), "all": (torch.zeros(2), None, 3)})


@pytest.mark.deep
def test_scores_are_those_of_the_tokens_that_are_read(final_graphs):
    """No score of the selected or the window branch beyond n · l' and w tokens, however long the cache is."""
    torch._dynamo.reset()
    model = tiny_model(n_layers=1, head_dim=10)  # a number that no other size is
    config = model.config
    flops, blocks = [], []
    for length in (264, 520):
        state = model.init_state(1, length)
        with torch.no_grad():
            nsa_compile.compile(model.decode_step, nested="eager", cache=False, estimate=True)(
                state, tokens_for(model, 1, 1)[:, 0]
            )
        flops.append(last_report().passes[-1].estimate.flops)
        blocks.append(state.layers[0].k_cmp.shape[2])
        floats = [
            x for n in final_graphs[-1].graph.nodes if isinstance(x := n.meta.get("example_value"), Tensor)
            and x.is_floating_point() and length in x.shape
        ]  # fmt: skip
        assert floats, "the caches themselves"
        assert all({config.head_dim, config.value_dim} & set(x.shape) for x in floats), "they are keys or values"
    compressed = 2 * config.n_heads * (config.head_dim + config.value_dim)
    assert flops[1] - flops[0] == compressed * (blocks[1] - blocks[0])


@pytest.mark.deep
def test_without_the_pass_scores_grow_with_the_cache():
    """What the test above would see if nothing were fused."""
    torch._dynamo.reset()
    model = tiny_model(n_layers=1)
    flops = []
    for length in (264, 520):
        options = {
            "nested": "eager",
            "cache": False,
            "estimate": True,
            "disable": ["fuse_selection_scatter", "index_cache"],
        }
        with torch.no_grad():
            nsa_compile.compile(model.decode_step, **options)(
                model.init_state(1, length), tokens_for(model, 1, 1)[:, 0]
            )
        flops.append(last_report().passes[-1].estimate.flops)
    config = model.config
    assert flops[1] - flops[0] > 2 * 2 * config.n_heads * (config.head_dim + config.value_dim) * 256


# ----------------------------------------------------------------------------------------- other steps than NSA's own


def check_without_gradients(program: AttentionProgram) -> Report:
    """Compiled where no gradient is asked for, a step reads caches in place; its outputs are the loop's."""
    torch._dynamo.reset()
    run, *args = program.build(0)
    step_of: list = []

    def scan(step, init, xs):
        step_of.append(nsa_compile.compile(step, nested="eager", cache=False))
        return loop(step_of[0], init, xs)

    with torch.no_grad():
        actual, expected = run(scan, *args), run(loop, *args)
        run, *args = program.build(0, exact=True)
        exact = run(loop, *args)
    for a, e, x in zip(*map(pytree.tree_leaves, (actual, expected, exact)), strict=True):
        eps = torch.finfo(e.dtype).eps if e.dtype.is_floating_point else 0.0
        assert a.dtype == e.dtype
        near = 2 * float((e.double() - x.double()).abs().max()) + 64 * eps * float(x.double().abs().max())
        assert float((a.double() - x.double()).abs().max()) <= near
    report = last_report()
    assert all(choice.operator.startswith("step_attention") for choice in report.attention)
    return report


@pytest.mark.deep
@few(4)
@given(case=selections(), nested=st.sampled_from(["eager", "aot_eager"]))
def test_selection_in_every_form(case, nested):
    program, block = case
    actual, report = run_compiled_step(program, nested)
    assert fused(report) == [BLOCKS.format(block)]
    assert_equals_loop(program, actual)
    assert fused(check_without_gradients(program)) == [RANKED.format(block)]


@pytest.mark.deep
@pytest.mark.parametrize("programs", [OTHERS, *OTHER_RANKINGS.values()], ids=["others", *OTHER_RANKINGS])
def test_other_rankings_decide_what_is_read(programs):
    program = together(list(programs.values()), COMPRESSED)
    actual, report = run_compiled_step(program)
    assert fused(report) == [BLOCKS.format(4)] * len(programs)
    assert_equals_loop(program, actual)
    check_without_gradients(program)


@pytest.mark.deep
@pytest.mark.parametrize("kind", OTHER_MASKS)
def test_other_masks_are_left_alone(kind):
    program = together(list(OTHER_MASKS[kind].values()), COMPRESSED)
    actual, report = run_compiled_step(program)
    assert read_by_index(report) == []
    assert len(report.declines) >= len(OTHER_MASKS[kind])
    assert_equals_loop(program, actual)
    assert read_by_index(check_without_gradients(program)) == []


def windowed(keep: str, **fields) -> AttentionProgram:
    return attention(keep=keep, masked=LOWEST, S=8, rows=8, **fields)


WINDOWS = {
    "plain": windowed("(position <= t) & (position > t - 3)"),
    "reversed": windowed("(t >= position) & (t - 2 <= position)"),
    "by distance": windowed("(t - position >= 0) & (t - position < 3)"),
    "by distance, the other way": windowed("(position - t <= 0) & (position - t > -3)"),
    "negated": windowed("~(position > t) & ~(position < t - 2)"),
    "moved": windowed("((position[None] <= t[None, None]) & (position + 3 > t.reshape(1, 1)))[0]"),
    "ahead": windowed("(position <= t + 1) & (position > t - 2)"),
    "and data": windowed('(position <= t) & (position > t - 3) & (x["m"] > 0)', data=(2, 2, 1)),
}
NO_WINDOWS = {
    "no lower end": windowed("position <= t"),
    "no upper end": windowed("position > t - 3"),
    "either": windowed("(position <= t) & ((position > t - 3) | (position == 0))"),
    "as wide as the cache": windowed("(position <= t) & (position > t - 8)"),
    "growing": windowed("(position <= t) & (position > t - t // 2 - 1)"),
    "every other key": windowed("(2 * position <= t) & (2 * position > t - 3)"),
    "backwards": windowed("(7 - position <= t) & (7 - position > t - 3)"),
    "two positions": windowed("(position <= t) & (position > t * 2 - 5)"),
    "narrow integers": windowed(
        "(position.to(torch.uint8) <= t.to(torch.uint8)) & (position.to(torch.uint8) > t.to(torch.uint8) - 3)"
    ),
}


@pytest.mark.deep
def test_windows_in_every_form_are_read_alone():
    program = together([AttentionProgram(**{**vars(p), "data": (2, 2, 1)}) for p in WINDOWS.values()])
    actual, report = run_compiled_step(program)
    assert read_by_index(report) == [WINDOW.format(3)] * len(WINDOWS)
    assert_equals_loop(program, actual)
    assert read_by_index(check_without_gradients(program)) == [WINDOW.format(3)] * len(WINDOWS)


@pytest.mark.deep
def test_what_is_no_window_is_left_alone():
    program = together(list(NO_WINDOWS.values()))
    actual, report = run_compiled_step(program)
    assert read_by_index(report) == []
    assert_equals_loop(program, actual)


# ------------------------------------------------------------------------------------------------------------- writes


def test_rows_are_written_in_place_only_where_one_row_is_meant():
    """Each cache is set to itself under a condition; positions before, inside and behind the rows."""
    conditions = {
        "one row": (lambda row, t: row == t, True),
        "one later": (lambda row, t: row + 1 == t, True),
        "the other way": (lambda row, t: t - row == 2, True),
        "several rows": (lambda row, t: row <= t, False),
        "backwards": (lambda row, t: 5 - row == t, False),
        "all or nothing": (lambda row, t: (t == 3).expand(6), False),
    }

    def step(t, source, *caches):
        scores = torch.softmax(source, -1)  # a step has attention
        for cache, (condition, _) in zip(caches, conditions.values(), strict=True):
            cache.copy_(torch.where(condition(torch.arange(6), t)[:, None], source[None], cache))
        return scores

    torch._dynamo.reset()
    fast = nsa_compile.compile(step, nested="eager", cache=False)
    actual = [torch.zeros(6, 2) for _ in conditions]
    expected = [torch.zeros(6, 2) for _ in conditions]
    for t in (-3, 0, 2, 4, 7, 13, 16, 40):
        source = torch.randn(2)
        fast(torch.tensor(t), source, *actual)
        step(torch.tensor(t), source, *expected)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), t
    written = [m for m in entry(last_report(), "index_cache").matches if ROW in m]
    assert len(written) == sum(is_row for _, is_row in conditions.values())


@pytest.mark.deep
def test_rows_of_several_sequences_are_written_where_each_has_its_own():
    """`t [B]` against `row [S]`: row t[b] of sequence b; what is no such write stays as it is."""
    conditions = {
        "each its own": (lambda row, t: row == t[:, None], True),
        "one later": (lambda row, t: row + 1 == t[:, None], True),
        "every other": (lambda row, t: 2 * row == t[:, None] - 1, True),
        "turned round": (lambda row, t: row == t.flip(0)[:, None], True),
        "the first one's": (lambda row, t: (row == t[:1]).expand(3, 6), False),
        "by head": (lambda row, t: (row[:, None] == t[:2])[None, :, :, None], False),
        "of the last dimension": (lambda row, t: (row == t[:, None])[:, None, None], True),
        "backwards": (lambda row, t: 5 - row == t[:, None], False),
    }

    def step(t, source, *caches):
        weights = torch.softmax(source, -1)  # a step has attention
        for cache, (condition, _) in zip(caches, conditions.values(), strict=True):
            here = condition(torch.arange(6), t)
            here = here if here.dim() == 4 else here[:, :, None, None]
            new = source[..., None] if cache.shape[-1] == 6 else source[:, None]
            cache.copy_(torch.where(here, new, cache))
        return weights

    torch._dynamo.reset()
    for nested in ("eager", "inductor"):
        fast = nsa_compile.compile(step, nested=nested, cache=False)
        actual = [torch.zeros(*((3, 2, 2, 6) if "last" in name else (3, 6, 2, 2))) for name in conditions]
        expected = [x.clone() for x in actual]
        for t in ([0, 1, 2], [5, 5, 5], [-3, 40, 3], [4, 13, 0]):
            source = torch.randn(3, 2, 2)
            fast(torch.tensor(t), source, *actual)
            step(torch.tensor(t), source, *expected)
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), t
        written = [m for m in entry(last_report(), "index_cache").matches if ROW in m]
        assert len(written) == sum(is_row for _, is_row in conditions.values())


@pytest.mark.deep(but=["<lambda>-False2"])
@pytest.mark.parametrize(
    ("keep", "is_window"),
    [
        (lambda p, t: (p <= t[:, None]) & (p > t[:, None] - 3), True),
        (lambda p, t: (t[:, None] - p >= 0) & (t[:, None] - p < 3), True),
        (lambda p, t: (p <= t[:, None]) & (p > (t - 3)[:, None]), True),
        (lambda p, t: (p <= t[:, None]) & (p > t.flip(0)[:, None] - 3), False),  # ends of two sequences
        (lambda p, t: (p <= t.flip(0)[:, None]) & (p > t.flip(0)[:, None] - 3), False),
        (lambda p, t: (p <= t[:1, None]) & (p > t[:1, None] - 3), False),  # one of several positions for all
    ],
)
def test_windows_of_several_sequences_are_read_alone(keep, is_window):
    def step(t, q, k, v):
        scores = torch.einsum("bghd,bsgd->bghs", q, k)
        kept = keep(torch.arange(8), t)[:, None, None]
        weights = scores.masked_fill(~kept, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~kept, 0)
        return torch.einsum("bghs,bsgd->bghd", weights, v)

    torch._dynamo.reset()
    fast = nsa_compile.compile(step, nested="eager", cache=False)
    for t in ([2, 5, 7], [7, 2, 3]):
        q, k, v = (torch.randn(3, *shape, dtype=torch.float64) for shape in ((2, 2, 4), (8, 2, 4), (8, 2, 4)))
        torch.testing.assert_close(fast(torch.tensor(t), q, k, v), step(torch.tensor(t), q, k, v))
    assert read_by_index(last_report()) == ([WINDOW.format(3)] if is_window else [])


def test_copies_that_someone_outside_may_hold_stay_copies():
    def step(t, x, cache):
        weights = torch.softmax(x + t, -1)
        held = cache.clone()
        swapped = x.clone()
        cache.copy_(weights)
        return held, swapped.view(-1), weights.clone().add(1)

    torch._dynamo.reset()
    fast = nsa_compile.compile(step, nested="eager", cache=False)
    for run in (step, fast):
        x, cache = torch.arange(3.0), torch.ones(3)
        held, swapped, _ = run(torch.tensor(0), x, cache)
        x.zero_()
        assert torch.equal(held, torch.ones(3))
        assert torch.equal(swapped, torch.arange(3.0))
        torch.testing.assert_close(cache, torch.arange(3.0).softmax(-1))
    (resolved,) = [p for p in last_report().passes if p.name == "resolve_carries"]
    assert "a step by itself" in resolved.matches[0]


# ------------------------------------------------------------------------------------- caches that are read as they lie

MASKS = {
    "of each sequence": lambda t, row: (row <= t[:, None])[:, None, None],
    "of each head": lambda t, row: ((row <= t[:1, None]) & (row % 4 != torch.arange(4)[:, None]))[None, :, None],
    "of each sequence and head": lambda t, row: (
        (row <= t[:, None])[:, None, None] & (row % 4 != torch.arange(4)[:, None])[None, :, None]
    ),
    "of all": lambda t, row: (row <= t[0])[None, None, None],
}


@pytest.mark.deep(but=["of each sequence and head-1"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_over_a_cache_reads_it_as_it_lies_where_heads_agree(mask, batch):
    """Four heads on two groups; where their masks differ, the keys are repeated for them."""

    def step(t, q, new, cache):
        row = torch.arange(12)
        cache = torch.where((row == t[:, None])[..., None, None], new[:, None], cache)
        k, v = cache.transpose(1, 2).split([8, 6], -1)
        keep = MASKS[mask](t, row)
        return cache, F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)

    torch._dynamo.reset()
    fast = nsa_compile.compile(step, nested="eager", cache=False)
    rng = torch.Generator().manual_seed(0)
    cache = torch.randn(batch, 12, 2, 14, generator=rng, dtype=torch.float64)
    for t in ([3, 11, 5], [7, 2, 9]):
        q = torch.randn(batch, 4, 1, 8, generator=rng, dtype=torch.float64)
        new = torch.randn(batch, 2, 14, generator=rng, dtype=torch.float64)
        with torch.no_grad():
            actual = fast(torch.tensor(t[:batch]), q, new, cache)
        torch.testing.assert_close(actual, step(torch.tensor(t[:batch]), q, new, cache), rtol=1e-10, atol=1e-12)
    (choice,) = last_report().attention
    assert choice.operator == ("dense" if "head" in mask and batch > 1 else "step_attention") or batch == 1


@pytest.mark.deep
def test_a_ranking_is_of_its_own_attention():
    """Two attentions to the same keys under different masks; the blocks are those of the second one."""

    def step(t, q, k, cache):
        row, block = torch.arange(12), torch.arange(6)

        def weights(keep):
            scores = torch.einsum("bhd,btd->bht", q, k).masked_fill(~keep, torch.finfo(q.dtype).min)
            return scores.softmax(-1).masked_fill(~keep, 0.0)

        outputs = [weights(row <= t) @ k]
        p = weights((row <= t) & (row % 3 != 0))
        outputs.append(p @ k)
        importance = p.sum(1)[:, ::2] + p.sum(1)[:, 1::2]
        score = torch.where(block <= t // 2, importance, -torch.inf)
        best, index = torch.sort(score, dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter(-1, index[:, :2], best[:, :2] > -torch.inf)
        keep = (chosen.repeat_interleave(2, -1) & (row <= t))[:, None]
        scores = torch.einsum("bhd,btd->bht", q, cache).masked_fill(~keep, torch.finfo(q.dtype).min)
        outputs.append(scores.softmax(-1).masked_fill(~keep, 0.0) @ cache)
        return outputs

    torch._dynamo.reset()
    fast = nsa_compile.compile(step, nested="eager", cache=False)
    rng = torch.Generator().manual_seed(0)
    for t in (1, 4, 9):
        q, k, cache = (torch.randn(2, n, 8, generator=rng, dtype=torch.float64) for n in (3, 12, 12))
        with torch.no_grad():
            actual = fast(torch.tensor(t), q, k, cache)
        torch.testing.assert_close(actual, step(torch.tensor(t), q, k, cache), rtol=1e-10, atol=1e-12)
    assert fused(last_report()) == [RANKED.format(2)]
    found = sorted(choice.operator for choice in last_report().attention)
    assert found == ["step_attention", "step_attention", "step_attention with selection"]


def test_weights_that_somebody_reads_are_not_computed_twice():
    def step(t, q, k):
        keep = torch.arange(12) <= t
        scores = torch.einsum("bhd,btd->bht", q, k).masked_fill(~keep, torch.finfo(q.dtype).min)
        weights = scores.softmax(-1).masked_fill(~keep, 0.0)
        return weights @ k, weights.sum(1)

    torch._dynamo.reset()
    fast = nsa_compile.compile(step, nested="eager", cache=False)
    q, k = torch.randn(2, 3, 8), torch.randn(2, 12, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(torch.tensor(5), q, k), step(torch.tensor(5), q, k))
    assert not last_report().attention


@pytest.mark.deep
@pytest.mark.parametrize("room", [1, 3])
def test_a_model_with_room_for_less_than_a_block_decodes(room):
    """Its cache of compressed rows has none."""
    model = tiny_model()
    assert room < model.config.pattern.compress_block
    tokens = tokens_for(model, 2, room)
    step = nsa_compile.compile_decode_step(model, nested="eager", cache=False)
    state, expected = (model.init_state(2, room) for _ in range(2))
    with torch.no_grad():
        for t in range(room):
            state, logits = step(state, tokens[:, t])
            expected, due = model.decode_step(expected, tokens[:, t])
            torch.testing.assert_close(logits, due)
