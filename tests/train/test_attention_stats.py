"""Statistics of gates and selection, against the oracle's branches and plain Python counting."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict

import pytest
import torch

import nsa_compile
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.verification.oracle import nsa_branches_oracle

PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=5, window=6)
S = 44


def make_model(**changes) -> NSATransformer:
    torch.manual_seed(0)
    config = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "pattern": PATTERN, "mlp_hidden": 32, **changes}
    model = NSATransformer(NSAConfig(vocab_size=19, dim=16, n_layers=2, **config)).double()
    # The initial weights are so small that attention is almost a mean; make what it does visible.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(parameter.shape[-1] ** -0.5 / parameter.std())
    return model


def attention_statistics(model, tokens):
    """As the trainer asks for them."""
    return model.config.variant.statistics(model, tokens)


def tokens(B=2, length=S):
    return torch.randint(19, (B, length), generator=torch.Generator().manual_seed(1))


def entropy(weights):
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights if w > 0)


def oracle_statistics(model, batch):
    """The same by running the model itself, the decode step token by token, and counting one query at a time."""
    inputs = []
    hooks = [
        block.attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for block in model.blocks
    ]
    model(batch)
    for hook in hooks:
        hook.remove()
    return [
        layer_statistics(layer, block.attention, x)
        for layer, (block, x) in enumerate(zip(model.blocks, inputs, strict=True))
    ]


def layer_statistics(layer, attention, x):
    q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = attention._project(x, torch.arange(x.shape[1]))
    k_win, v_win = (k_slc, v_slc) if k_win is None else (k_win, v_win)
    phi_k, phi_v = attention._phi
    p = attention.pattern
    sizes = {
        "l": p.compress_block, "d": p.compress_stride, "l_sel": p.select_block, "n": p.num_selected, "w": p.window,
        "phi_k": phi_k, "phi_v": phi_v, "index_convention": p.index_convention,
    }  # fmt: skip
    keys = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    # The oracle has one query for all branches: the compressed branch and the selection come from the unrotated one.
    (compressed, *_), indices = nsa_branches_oracle(q_cmp, *keys, **sizes)
    (_, _, window), _ = nsa_branches_oracle(q, *keys, **sizes)
    selected = attend_to_blocks(q, k_slc, v_slc, indices, p.select_block)

    gate_sums, share_sums, gate_entropies = [0.0] * 3, [0.0] * 3, []
    B, length, heads, _ = q.shape
    for b in range(B):
        for t in range(length):
            for h in range(heads):
                g = gates[b, t, h].tolist()
                norms = [g[c] * o[b, t, h].norm().item() for c, o in enumerate((compressed, selected, window))]
                for c in range(3):
                    gate_sums[c] += g[c]
                    share_sums[c] += norms[c] / sum(norms)
                gate_entropies.append(entropy(g) / math.log(3))
    count = B * length * heads

    counts, distances, leaving, choosing = Counter(), [], 0, 0
    for b in range(B):
        for t in range(length):
            for group in indices[b, t].tolist():
                free = [j for j in group if j >= 1 and j < t // p.select_block - 1]
                reach = [t - ((j + 1) * p.select_block - 1) for j in free]
                counts.update(free)
                distances += reach
                choosing += bool(free)
                leaving += any(distance >= p.window for distance in reach)
    distances.sort()
    blocks = [j for j in range(-(-length // p.select_block)) if 1 <= j < (length - 1) // p.select_block - 1]

    def quantile(fraction):
        return distances[round(fraction * (len(distances) - 1))]

    return {
        "layer": layer,
        **{f"gate_{name}": gate_sums[c] / count for c, name in enumerate(("compressed", "selected", "window"))},
        **{f"share_{name}": share_sums[c] / count for c, name in enumerate(("compressed", "selected", "window"))},
        "gate_entropy": sum(gate_entropies) / count,
        "selection_entropy": entropy(list(counts.values())) / math.log(len(blocks)),
        "distance_mean": sum(distances) / len(distances),
        "distance_p10": quantile(0.1),
        "distance_p50": quantile(0.5),
        "distance_p90": quantile(0.9),
        "beyond_window": leaving / choosing,
    }


def attend_to_blocks(q, k, v, indices, block):
    """The selected branch for given blocks, `[B, S, Hq, Dv]`."""
    B, length, heads, dim = q.shape
    h = heads // k.shape[2]
    output = q.new_zeros(B, length, heads, v.shape[-1])
    for b in range(B):
        for t in range(length):
            for head in range(heads):
                rows = [j for j in range(t + 1) if j // block in indices[b, t, head // h].tolist()]
                weights = (k[b, rows, head // h] @ q[b, t, head] / math.sqrt(dim)).softmax(0)
                output[b, t, head] = weights @ v[b, rows, head // h]
    return output


@pytest.mark.deep(but=["changes1"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"phi": "mean", "shared_kv": True},
        {"pattern": SparsePattern(4, 2, 4, 4, 6, index_convention="paper_v2"), "v_head_dim": 3},
    ],
)
def test_statistics_equal_the_oracles(changes):
    model, batch = make_model(**changes), tokens()
    actual = [asdict(layer) for layer in attention_statistics(model, batch)]
    expected = oracle_statistics(model, batch)
    assert len(actual) == 2
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert 0 < theirs["beyond_window"] < 1


@pytest.mark.deep
def test_a_collapsed_gate_shows():
    model = make_model()
    with torch.no_grad():
        gate = model.blocks[1].attention.gate
        gate.weight.zero_()
        gate.bias.copy_(torch.tensor([-9.0, -9.0, 9.0]).repeat(4))  # the window alone, in every head
    healthy, collapsed = attention_statistics(model, tokens())
    assert collapsed.gate_window > 0.99 > 0.01 > collapsed.gate_selected
    assert collapsed.share_window > 0.99
    assert collapsed.gate_entropy < 0.01
    assert healthy.gate_entropy > 0.5


@pytest.mark.deep
def test_a_selection_that_always_takes_the_same_block_shows():
    model = make_model(n_kv_heads=1)
    attention = model.blocks[0].attention
    batch = tokens(1)
    spread = attention_statistics(model, batch)[0]
    # Equal scores everywhere: ties go to the lowest blocks, for every query alike.
    with torch.no_grad():
        attention.q.weight.zero_()
    fixed = attention_statistics(model, batch)[0]
    assert fixed.selection_entropy < spread.selection_entropy
    assert fixed.distance_mean > spread.distance_mean


@pytest.mark.deep
def test_sequences_without_a_free_choice_have_no_distances():
    statistics = attention_statistics(make_model(), tokens(1, 12))[0]
    assert statistics.distance_mean is None
    assert statistics.selection_entropy is None
    assert statistics.beyond_window is None
    assert sum((statistics.share_compressed, statistics.share_selected, statistics.share_window)) == pytest.approx(1)


@pytest.mark.parametrize("changes", [{"attention": "dense"}, {"branches": ("compressed", "window")}])
def test_dense_attention_and_fewer_branches_have_none(changes):
    assert attention_statistics(make_model(**changes), tokens()) == []


@pytest.mark.deep
def test_training_does_not_notice():
    """No gradient, no random number, no second compilation of the blocks; and a compiled model gives the same."""
    from torch._dynamo.utils import counters

    eager = attention_statistics(make_model(), tokens())
    model = nsa_compile.compile_blocks(make_model(), nested="eager")
    model(tokens()).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    rng, compiled = torch.get_rng_state(), counters["stats"]["unique_graphs"]
    assert compiled > 0
    assert attention_statistics(model, tokens()) == eager
    assert counters["stats"]["unique_graphs"] == compiled
    assert torch.equal(torch.get_rng_state(), rng)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert torch.is_grad_enabled()


@pytest.mark.deep
def test_it_runs_under_the_autocast_of_the_training():
    model = make_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = attention_statistics(model, tokens())[0]
    assert asdict(rounded) != asdict(attention_statistics(model, tokens())[0])
    assert rounded.gate_window == pytest.approx(attention_statistics(model, tokens())[0].gate_window, rel=0.02)


@pytest.mark.deep
def test_no_graph_is_recorded():
    model, recorded = make_model(), []
    model.blocks[0].mlp.register_forward_hook(lambda _, args, output: recorded.append(output.requires_grad))
    attention_statistics(model, tokens(1))
    assert recorded == [False]
