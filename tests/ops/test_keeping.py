"""Selected blocks that a checkpointed block keeps: not selected again, and every bit of the gradients as before."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.models import NSATransformer
from nsa_compile.ops import compressed_attention, selected_attention
from nsa_compile.ops.compressed import cpu
from nsa_compile.ops.keeping import keep_selection
from tests.models.test_nsa import tiny_model, tokens_for

RANKING = {"select_block": 8, "offsets": (-1, 0, 1), "weights": (1, 2, 1), "num_initial": 1, "num_local": 1}


@pytest.fixture
def selected(monkeypatch):
    """How many blocks each call of the CPU kernel was to select."""
    calls, forward = [], cpu.forward

    def counted(q, k, v, *parameters):
        calls.append(parameters[6])
        return forward(q, k, v, *parameters)

    monkeypatch.setattr(cpu, "forward", counted)
    return calls


def gradients(model: NSATransformer, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(tokens).float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.deep
@pytest.mark.parametrize(("nested", "changes"), [("aot_eager", {}), ("inductor", {"phi": "mean", "shared_kv": True})])
def test_compiled_blocks_select_once_and_give_the_same_bits(selected, nested, changes):
    model = tiny_model(n_layers=2, **changes).float()
    nsa_compile.compile_blocks(model, attention="sparse", nested=nested)
    tokens = tokens_for(model, 2, 33)
    plain = gradients(model, tokens)
    selected.clear()
    model.checkpoint_blocks({0, 1})
    again = gradients(model, tokens)
    count = model.config.pattern.num_selected
    assert selected == [count, count, 0, 0], "the recomputation selects nothing"
    for expected, actual in zip(plain, again, strict=True):
        assert torch.equal(expected, actual)


def attention(q, k, v):
    """Two selections, the second from the output of the first."""
    for _ in range(2):
        out, _, indices = compressed_attention(
            q, k[:, ::4], v[:, ::4], block_size=4, stride=4, num_selected=3, **RANKING
        )
        q = out + selected_attention(q, k, v, indices, block_size=8)[0]
    return q


def problem():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 64, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def test_a_graph_that_is_used_twice_selects_again_the_second_time(selected):
    inputs = problem()
    expected = torch.autograd.grad(attention(*inputs).sum(), inputs)
    selected.clear()
    out = checkpoint(attention, *inputs, use_reentrant=False, context_fn=keep_selection).sum()
    for calls in ([3, 3, 0, 0], [3, 3]):
        for actual, wanted in zip(torch.autograd.grad(out, inputs, retain_graph=True), expected, strict=True):
            assert torch.equal(actual, wanted)
        assert selected == calls
        selected.clear()


def test_what_is_kept_belongs_to_one_call(selected):
    first, second = problem(), [x.detach().flip(1).requires_grad_() for x in problem()]
    expected = [torch.autograd.grad(attention(*inputs).sum(), inputs) for inputs in (first, second)]
    outs = [checkpoint(attention, *x, use_reentrant=False, context_fn=keep_selection) for x in (first, second)]
    assert not torch.equal(*outs)
    for inputs, wanted, out in reversed(list(zip((first, second), expected, outs, strict=True))):
        for actual, gradient in zip(torch.autograd.grad(out.sum(), inputs), wanted, strict=True):
            assert torch.equal(actual, gradient)


def test_without_checkpointing_nothing_is_kept(selected):
    inputs = problem()
    with torch.no_grad():
        attention(*inputs)
        attention(*inputs)
    assert selected == [3, 3, 3, 3]
