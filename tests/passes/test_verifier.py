"""The verifier, tested with passes that are broken on purpose: each is caught, by name."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import nsa_compile
from nsa_compile.passes import pipeline
from nsa_compile.passes.pipeline import Options, run_pipeline
from nsa_compile.passes.verifier import VerificationError

STEPS = 6


def running_attention(q, k):
    """Causal attention written as a loop, plus something after it."""

    def step(cache, x):
        position = torch.arange(STEPS)
        cache = torch.where((position == x["t"])[:, None], x["k"], cache)
        scores = (cache @ x["q"]).masked_fill(position > x["t"], float("-inf"))
        return cache, scores.softmax(0) @ cache

    xs = {"q": q, "k": k, "t": torch.arange(STEPS)}
    _, y = nsa_compile.scan(step, torch.zeros(STEPS, 4), xs)
    return torch.tanh(y) * 2.0


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(0)
    return torch.randn(STEPS, 4), torch.randn(STEPS, 4)


def capture(inputs) -> fx.GraphModule:
    """The graph Dynamo captures, before any pass."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(running_attention, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


@pytest.fixture
def broken(request):
    """Append one pass to the pipeline for the length of a test."""

    def add(run) -> None:
        request.addfinalizer(pipeline.register(run.__name__)(run).unregister)

    return add


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if name in str(n.target) or name in n.name)


def expect_caught(gm, real_inputs, name: str, message: str, **options) -> None:
    with pytest.raises(VerificationError, match=message) as caught:
        run_pipeline(gm, Options(nested="eager", check=real_inputs is not None, **options), real_inputs)
    assert caught.value.pass_name == name
    assert name in str(caught.value)


def test_healthy_pipeline_passes(inputs):
    report = run_pipeline(capture(inputs), Options(nested="eager", check=True), inputs)
    changed = {p.name for p in report.passes if p.changed}
    assert changed == {"resolve_carries", "eliminate_guards", "raise_attention", "batch_prefill", "lower_attention"}
    assert report.scans[0].batched
    assert all(p.max_abs_error is not None and p.max_abs_error < 1e-6 for p in report.passes if p.changed)


def test_dropped_node(inputs, broken):
    def drops_a_node(gm, context):
        tanh = find(gm, "tanh")
        tanh.replace_all_uses_with(tanh.args[0])
        gm.graph.erase_node(tanh)
        gm.recompile()
        return True

    broken(drops_a_node)
    expect_caught(capture(inputs), inputs, "drops_a_node", "changed values on real inputs")


def test_dropped_output(inputs, broken):
    def drops_an_output(gm, context):
        gm.graph.output_node().args = ((),)
        gm.recompile()
        return True

    broken(drops_an_output)
    expect_caught(capture(inputs), None, "drops_an_output", "signature")


def test_stale_shape(inputs, broken):
    def leaves_a_stale_shape(gm, context):
        tanh = find(gm, "tanh")
        with gm.graph.inserting_after(tanh):
            flipped = gm.graph.call_function(torch.transpose, (tanh, 0, 1))
        flipped.meta = dict(tanh.meta)  # promises [6, 4], yields [4, 6]
        tanh.replace_all_uses_with(flipped, delete_user_cb=lambda user: user is not flipped)
        gm.recompile()
        return True

    broken(leaves_a_stale_shape)
    expect_caught(capture(inputs), None, "leaves_a_stale_shape", "stale shape")


def test_lost_meta(inputs, broken):
    def loses_meta(gm, context):
        tanh = find(gm, "tanh")
        with gm.graph.inserting_before(tanh):
            bare = gm.graph.call_function(torch.neg, (tanh.args[0],))
        tanh.args = (bare,)
        gm.recompile()
        return True

    broken(loses_meta)
    expect_caught(capture(inputs), None, "loses_meta", "lost its meta")


def test_change_denied(inputs, broken):
    def denies_its_change(gm, context):
        find(gm, "tanh").target = torch.sigmoid
        gm.recompile()
        return False

    broken(denies_its_change)
    expect_caught(capture(inputs), None, "denies_its_change", "said changed=False")


def test_change_invented(inputs, broken):
    def invents_a_change(gm, context):
        return True

    broken(invents_a_change)
    expect_caught(capture(inputs), None, "invents_a_change", "said changed=True")


def test_wrong_mask(inputs, broken):
    def moves_the_mask(gm, context):
        mask = find(gm, "gt")
        mask.target = torch.ops.aten.ge.Tensor  # the diagonal goes
        gm.recompile()
        return True

    broken(moves_the_mask)
    # An attention node would have no mask to move.
    options = {"disable": ["raise_attention"]}
    expect_caught(capture(inputs), inputs, "moves_the_mask", "NaN|changed values", **options)


def test_malformed_graph(inputs, broken):
    def uses_before_it_defines(gm, context):
        tanh, mul = find(gm, "tanh"), find(gm, "mul")
        mul.append(tanh)
        return True

    broken(uses_before_it_defines)
    gm = capture(inputs)
    expect_caught(gm, None, "uses_before_it_defines", "malformed|did not change")
