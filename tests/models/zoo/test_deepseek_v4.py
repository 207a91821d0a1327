"""CSA and HCA against their paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.zoo import judge
from tests.models.zoo.written import best, causal, divergence, linear, rms_norm, turned_pairs
from tests.strategies import few

SMALL = {"q_rank": 5, "rope_dim": 2, "out_groups": 2, "out_rank": 3}
MODEL = {"n_kv_heads": 1, "v_head_dim": None}


def entries_of(c, p, x, name, overlap):
    """Entries `[B, N, width]`, block by block."""
    values, gates, bias = linear(p, f"{name}.value", x), linear(p, f"{name}.gate", x), p[f"{name}.bias"]
    m, width = c.pattern.block, bias.shape[-1] // (1 + overlap)
    made = []
    for i in range(x.shape[1] // m):
        this, before = slice(i * m, (i + 1) * m), slice((i - 1) * m, i * m)
        rows, logits = [values[:, this, -width:]], [gates[:, this, -width:] + bias[:, -width:]]
        if overlap and i:
            rows.append(values[:, before, :width])
            logits.append(gates[:, before, :width] + bias[:, :width])
        shares = torch.cat(logits, 1).exp()
        shares = shares / shares.sum(1, keepdim=True)
        made.append(rms_norm((shares * torch.cat(rows, 1)).sum(1), c.norm_eps, p[f"{name}.norm.weight"]))
    if not made:
        return torch.zeros(len(x), 0, width, dtype=x.dtype)
    first = torch.arange(len(made)) * m
    return turned_pairs(torch.stack(made, 1)[:, :, None], c.rope_theta, c.pattern.rope_dim, at=first)[:, :, 0]


def reference(c, p, x):
    pattern, heads, length = c.pattern, c.n_heads, x.shape[1]
    c_q = rms_norm(linear(p, "q_down", x), c.norm_eps, p["q_norm.weight"])
    q = turned_pairs(rms_norm(linear(p, "q_up", c_q, heads), c.norm_eps), c.rope_theta, pattern.rope_dim)
    kv = rms_norm(linear(p, "kv", x, 1), c.norm_eps, p["kv_norm.weight"])
    kv = turned_pairs(kv, c.rope_theta, pattern.rope_dim)[:, :, 0]
    overlap = c.attention == "csa"
    entries = entries_of(c, p, x, "compressor", overlap)
    count = entries.shape[1]
    complete = torch.arange(length)[:, None] + 1 >= (torch.arange(count) + 1) * pattern.block
    chosen = complete.expand(len(x), -1, -1)
    if overlap:
        keys = entries_of(c, p, x.detach(), "index_compressor", True)
        q_index = turned_pairs(linear(p, "index_q", c_q.detach(), pattern.index_heads), c.rope_theta, pattern.rope_dim)
        w = linear(p, "index_weight", x.detach()) / pattern.index_heads**0.5
        products = torch.einsum("btjd,bnd->btnj", q_index, keys) / pattern.index_dim**0.5
        index = (products.relu() * w[:, :, None]).sum(-1)
        chosen = best(torch.where(chosen, index, -torch.inf), pattern.num_selected)

    back = torch.arange(length)[:, None] - torch.arange(length)
    near = causal(length) & (back < pattern.window)
    everything = torch.cat([kv, entries], 1)
    seen = torch.cat([near.expand(len(x), -1, -1), chosen], -1)[:, None]
    powers = torch.einsum("bthd,bsd->bhts", q, everything) / c.head_dim**0.5
    powers = torch.where(seen, powers.exp(), 0)
    weights = powers / (powers.sum(-1, keepdim=True) + p["sinks"].exp()[:, None, None])
    o = turned_pairs(torch.einsum("bhts,bsd->bthd", weights, everything), c.rope_theta, pattern.rope_dim, sign=-1)
    halves = o.flatten(2).chunk(pattern.out_groups, -1)
    down = p["out_down.weight"].chunk(pattern.out_groups, 0)
    o = torch.cat([part @ matrix.T for part, matrix in zip(halves, down, strict=True)], -1)
    o = linear(p, "out", o)
    return (o, divergence(weights[..., length:].sum(1), index, chosen)) if overlap else o


CASES = st.fixed_dictionaries({"block": st.integers(1, 4), "window": st.integers(1, 5)}).flatmap(
    lambda sizes: st.one_of(
        st.just(("hca", sizes)),
        st.fixed_dictionaries(
            {"num_selected": st.integers(1, 3), "index_heads": st.integers(1, 2), "index_dim": st.sampled_from([2, 4])}
        ).map(lambda more: ("csa", {**sizes, **more})),
    )
)


@few(40)
@given(case=CASES, length=st.integers(1, 15), seed=st.integers(0, 99))
def test_each_is_what_the_paper_says(case, length, seed):
    attention, sizes = case
    config = judge.make_config(attention, {**SMALL, **sizes}, **MODEL)
    judge.check_reference(judge.make_layer(config, seed), reference, judge.make_input(config, 2, length, seed))


@few(60)
@given(case=CASES, length=st.integers(1, 40))
def test_useful_work_is_counted(case, length):
    attention, sizes = case
    config = judge.make_config(attention, {**SMALL, **sizes}, **MODEL)
    p = config.pattern
    complete = [(t + 1) // p.block for t in range(length)]
    entries = sum(min(n, p.num_selected) for n in complete) if attention == "csa" else sum(complete)
    assert config.variant.pairs(config, length) == entries + sum(min(t + 1, p.window) for t in range(length))
    layer = judge.make_layer(config)
    matrices = sum(value.numel() for name, value in layer.named_parameters() if value.dim() == 2 and "bias" not in name)
    ranking = sum(complete) * p.index_heads * (p.index_dim + 1) / length if attention == "csa" else 0
    assert sum(config.variant.multiplies(config, length)) == pytest.approx(matrices + ranking)


def test_defaults_are_those_of_the_released_model():
    model = {**MODEL, "n_heads": 64, "head_dim": 512}
    shared = {"window": 128, "q_rank": 1024, "rope_dim": 64, "out_groups": 8, "out_rank": 1024}
    assert vars(judge.make_config("hca", **model).pattern) == {"block": 128, **shared}
    indexer = {"num_selected": 512, "index_heads": 64, "index_dim": 128}
    assert vars(judge.make_config("csa", **model).pattern) == {"block": 4, **shared, **indexer}


@pytest.mark.parametrize(
    ("sizes", "model", "line"),
    [
        ({}, {"n_kv_heads": 2}, r"n_kv_heads = 2 must be 1: all queries share one head of keys"),
        ({}, {"v_head_dim": 4}, r"v_head_dim = 4 must be null: keys are values"),
        ({"rope_dim": 8}, {}, r"pattern\.rope_dim = 8 must be at most head_dim = 6"),
        ({"out_groups": 3}, {}, r"pattern\.out_groups = 3 must divide n_heads = 4"),
        ({"rope_dim": 1}, {}, r"pattern\.rope_dim = 1 must be even"),
        ({"index_dim": 0}, {}, r"pattern\.index_dim = 0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(sizes, model, line):
    with pytest.raises(ValueError, match=line):
        judge.make_config("csa", {**SMALL, **sizes}, **{**MODEL, **model})
