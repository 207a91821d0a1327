"""Native Sparse Attention through the whole compiler: every prefix and subset of passes against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile.models import nsa_attention
from nsa_compile.passes.pipeline import ORDER
from nsa_compile.verification.oracle import nsa_attention_oracle, selection_margin
from tests.models.test_nsa import EXAMPLE, assume_unambiguous, tiny_model, tokens_for, value_and_grads
from tests.strategies import NSAProblem, few, nsa_problems

# Passes that only make sense when the one before has run are skipped by the pipeline, so every subset is legal.
PREFIXES = [ORDER[i:] for i in range(len(ORDER) + 1)]


def compiled(function, nested: str = "eager", **options):
    torch._dynamo.reset()
    options = {"nested": nested, "cache": False, **options}
    return torch.compile(function, backend="nsa_compile", fullgraph=True, dynamic=False, options=options)


def attention(problem: NSAProblem):
    return lambda *tensors: nsa_attention(*tensors, pattern=problem.pattern, phi=problem.block_phi)


def oracle(problem: NSAProblem):
    return lambda *tensors: nsa_attention_oracle(*tensors, **problem.oracle_arguments)[0]


def assert_whole(report) -> None:
    """Everything the compiler promises for this attention: no loop, no guard."""
    for record in report.scans:
        assert record.batched, record.declines
        assert not record.guards_kept
        assert not record.declines


@few(7)
@given(
    problem=nsa_problems(),
    nested=st.sampled_from(["eager", "aot_eager"]),
    operators=st.sampled_from(["sparse", "sparse", "dense", "auto"]),
)
def test_compiled_attention_equals_the_oracle(problem, nested, operators):
    tensors = problem.tensors()
    assume_unambiguous(problem, tensors)
    actual = value_and_grads(compiled(attention(problem), nested, attention=operators), tensors)
    assert_whole(nsa_compile.last_report())
    torch.testing.assert_close(actual, value_and_grads(oracle(problem), tensors), rtol=1e-9, atol=1e-10)


@pytest.mark.deep(but=["1 passes"])
@pytest.mark.parametrize("disable", PREFIXES, ids=lambda names: f"{len(ORDER) - len(names)} passes")
def test_every_prefix_of_the_pipeline(disable):
    tensors = EXAMPLE.tensors()
    nested = "eager" if len(disable) % 3 else "aot_eager"  # with all of them, and in between
    actual = value_and_grads(compiled(attention(EXAMPLE), nested, disable=disable), tensors)
    (record,) = nsa_compile.last_report().scans
    assert record.batched == ("batch_prefill" not in disable), "the scan goes with the pass for it and not before"
    torch.testing.assert_close(actual, value_and_grads(oracle(EXAMPLE), tensors), rtol=1e-9, atol=1e-10)


@pytest.mark.deep
@few(6)
@given(
    problem=nsa_problems(contents=("normal", "equal keys")),
    disable=st.sets(st.sampled_from(ORDER), min_size=1).map(sorted),
    rewrites=st.sampled_from([None, 1, 2]),
)
def test_any_subset_of_passes(problem, disable, rewrites):
    """Guards kept for want of a proof, or a proof without a use: slower, never different."""
    tensors = problem.tensors()
    assume_unambiguous(problem, tensors)
    actual = value_and_grads(compiled(attention(problem), disable=disable, stop_after=rewrites), tensors)
    torch.testing.assert_close(actual, value_and_grads(oracle(problem), tensors), rtol=1e-9, atol=1e-10)


@pytest.mark.deep
def test_graph_does_not_grow_with_the_sequence():
    sizes = []
    for S in (24, 40):
        tensors = [x[:, :S].detach() for x in EXAMPLE.tensors()]
        compiled(attention(EXAMPLE))(*tensors)
        (record,) = nsa_compile.last_report().scans
        assert record.length == S
        sizes.append(record.nodes_after)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.deep
@few(6)
@given(problem=nsa_problems(contents=("normal",)), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_low_precision_is_no_worse_than_the_loop(problem, dtype):
    """What the compiler does may cost no more accuracy than the eager loop loses, plus a rounding band."""
    tensors = problem.tensors(dtype)
    eps = torch.finfo(dtype).eps
    assume_margin = selection_margin(tensors[0], tensors[1], **problem.selection)
    if assume_margin <= 16 * problem.h * eps:
        return
    exact = value_and_grads(oracle(problem), tensors)
    loop = value_and_grads(attention(problem), tensors)
    fast = value_and_grads(compiled(attention(problem), "aot_eager"), tensors)
    # Over all tensors, not for each: a gradient that is exactly zero is a difference of equal terms of this size, and
    # operators that never hold a whole row of weights round the two differently.
    band = 4 * eps * max(float(x.abs().max()) for x in (exact[0], *exact[1]))
    for a, e, x in zip((fast[0], *fast[1]), (loop[0], *loop[1]), (exact[0], *exact[1]), strict=True):
        x = x.double()
        assert float((a.double() - x).abs().max()) <= 2 * float((e.double() - x).abs().max()) + band


# --------------------------------------------------------------------------------------------------- a whole model


def loss_and_grads(run, model, tokens):
    loss = torch.nn.functional.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.deep(but=["changes3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"n_layers": 2}, {"shared_kv": True, "v_head_dim": 6},
        {"branches": ("compressed", "window")}, {"branches": ("compressed", "selected"), "phi": "mean"},
    ],
)  # fmt: skip
def test_compiled_model_equals_the_loop(changes):
    """And every parameter gets a gradient."""
    model = tiny_model(**{"n_layers": 1, **changes})
    tokens = tokens_for(model, 2, 34)
    actual = loss_and_grads(compiled(model, "aot_eager"), model, tokens)
    report = nsa_compile.last_report()
    assert len(report.scans) == model.config.n_layers
    assert_whole(report)
    torch.testing.assert_close(actual, loss_and_grads(model, model, tokens), rtol=1e-8, atol=1e-10)
    for (name, _), grad in zip(model.named_parameters(), actual[1], strict=True):
        assert grad.isfinite().all(), name
        assert grad.any(), name


@pytest.mark.deep
def test_compiled_model_equals_decoding():
    model = tiny_model(n_layers=1)
    tokens = tokens_for(model, 2, 26)
    batched = compiled(model)(tokens)
    state = model.init_state(2, 26)
    for t in range(26):
        state, logits = model.decode_step(state, tokens[:, t])
        torch.testing.assert_close(batched[:, t], logits, rtol=1e-9, atol=1e-10)


def test_later_tokens_change_no_earlier_logits_when_compiled():
    """More tokens than the window, more blocks than are selected."""
    model, S = tiny_model(n_layers=1), 40
    before = tokens_for(model, 2, S)
    fast = compiled(model)
    a = fast(before)
    for cut in (5, 23):
        b = fast(torch.cat([before[:, :cut], (before[:, cut:] + 1) % model.config.vocab_size], 1))
        torch.testing.assert_close(a[:, :cut], b[:, :cut], rtol=0, atol=1e-12)
        assert (a[:, cut:] - b[:, cut:]).abs().amax(-1).min() > 1e-3


@pytest.mark.deep
def test_through_inductor():
    """One model, values and gradients, in float64 down to the generated code."""
    model = tiny_model(n_layers=1)
    tokens = tokens_for(model, 2, 34)
    actual = loss_and_grads(compiled(model, "inductor"), model, tokens)
    assert_whole(nsa_compile.last_report())
    torch.testing.assert_close(actual, loss_and_grads(model, model, tokens), rtol=1e-7, atol=1e-9)


@pytest.mark.deep
def test_a_loop_left_in_the_graph_is_right_through_inductor():
    """A scan under Inductor has had silently wrong gradients upstream; the backend must see to it."""
    tensors = EXAMPLE.tensors()
    actual = value_and_grads(compiled(attention(EXAMPLE), "inductor", disable=ORDER), tensors)
    torch.testing.assert_close(actual, value_and_grads(oracle(EXAMPLE), tensors), rtol=1e-7, atol=1e-9)
