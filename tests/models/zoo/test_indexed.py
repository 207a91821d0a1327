"""Attentions with an indexer against their papers: DSA, MSA, QSA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.models.zoo import judge
from tests.models.zoo.written import (
    best,
    causal,
    divergence,
    linear,
    projected,
    rms_norm,
    softmax,
    turned,
    turned_halves,
    turned_pairs,
)
from tests.strategies import few


def dsa(c, p, x):
    pattern, heads, content = c.pattern, c.n_heads, c.head_dim - c.pattern.rope_dim
    length = x.shape[1]
    c_q = rms_norm(linear(p, "q_down", x), c.norm_eps, p["q_norm.weight"])
    q = turned_pairs(linear(p, "q_up", c_q, heads), c.rope_theta, pattern.rope_dim)
    latent, k_rope = linear(p, "kv_down", x).split([pattern.kv_rank, pattern.rope_dim], -1)
    latent = rms_norm(latent, c.norm_eps, p["kv_norm.weight"])
    k_rope = turned_pairs(k_rope[:, :, None], c.rope_theta, pattern.rope_dim)
    k, v = linear(p, "kv_up", latent, heads).split([content, c.value_dim], -1)
    k = torch.cat([k, k_rope.expand(-1, -1, heads, -1)], -1)

    q_index = turned_halves(linear(p, "index_q", c_q.detach(), pattern.index_heads), c.rope_theta, pattern.rope_dim)
    k_index = F.layer_norm(
        linear(p, "index_k", x.detach()), [pattern.index_dim], p["index_norm.weight"], p["index_norm.bias"], c.norm_eps
    )
    k_index = turned_halves(k_index[:, :, None], c.rope_theta, pattern.rope_dim)[:, :, 0]
    w = linear(p, "index_weight", x.detach()) / pattern.index_heads**0.5
    products = torch.einsum("btjd,bsd->btsj", q_index, k_index) / pattern.index_dim**0.5
    index = (products.relu() * w[:, :, None]).sum(-1)
    seen = best(torch.where(causal(length), index, -torch.inf), pattern.num_selected)

    weights = softmax(torch.einsum("bthd,bshd->bhts", q, k) / c.head_dim**0.5, seen[:, None])
    o = torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)
    return linear(p, "out", o), divergence(weights.sum(1), index, seen)


def msa(c, p, x):
    pattern, groups, length = c.pattern, c.n_kv_heads, x.shape[1]
    q, k, v = projected(c, p, x)
    q_index = rms_norm(linear(p, "index_q", x.detach(), groups), c.norm_eps, p["index_q_norm.weight"])
    k_index = rms_norm(linear(p, "index_k", x.detach(), 1), c.norm_eps, p["index_k_norm.weight"])
    q_index, k_index = turned(q_index, c.rope_theta), turned(k_index, c.rope_theta)[:, :, 0]
    index = torch.einsum("btgd,bsd->bgts", q_index, k_index) / pattern.index_dim**0.5
    own = torch.arange(length) // pattern.block
    score = []
    for i in range(int(own[-1]) + 1):
        inside = causal(length) & (own == i)
        of_block = torch.where(inside, index, -torch.inf).amax(-1)
        score.append(torch.where(own == i, torch.inf, of_block))
    seen = best(torch.stack(score, -1), pattern.num_selected)[..., own] & causal(length)
    weights = softmax(
        torch.einsum("bthd,bshd->bhts", q, k) / c.head_dim**0.5, seen.repeat_interleave(c.n_heads // groups, 1)
    )
    o = torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)
    return linear(p, "out", o), divergence(weights.unflatten(1, (groups, -1)).mean(2), index, seen)


def qsa(c, p, x):
    pattern, length, block = c.pattern, x.shape[1], c.pattern.block
    q, k, v = projected(c, p, x)
    q_index = rms_norm(linear(p, "index_q", x.detach(), pattern.index_heads), c.norm_eps, p["index_q_norm.weight"])
    q_index = turned(q_index, c.rope_theta)
    count = length // block
    raw = linear(p, "index_k", x.detach())[:, : count * block]
    pooled = rms_norm(raw.unflatten(1, (count, block)).mean(2), c.norm_eps, p["index_k_norm.weight"])
    spread = torch.zeros(len(x), length, 1, pattern.index_dim, dtype=x.dtype)
    for i in range(count):  # each pooled key where its first token stands
        spread = spread.index_add(1, torch.tensor([i * block]), pooled[:, i, None, None])
    k_index = turned(spread, c.rope_theta)[:, 0 : count * block : block, 0]
    index = torch.einsum("btjd,bnd->btnj", q_index, k_index).relu().sum(-1) / pattern.index_dim**0.5
    complete = torch.arange(length)[:, None] >= torch.arange(count) * block + block - 1
    chosen = best(torch.where(complete, index, -torch.inf), pattern.num_selected)
    seen = torch.zeros(len(x), length, length, dtype=torch.bool)
    for t in range(length):
        for i in range(count):
            seen[:, t, i * block : (i + 1) * block] |= chosen[:, t, i, None]
        seen[:, t, (t + 1) // block * block : t + 1] = True
    weights = softmax(torch.einsum("bthd,bshd->bhts", q, k) / c.head_dim**0.5, seen[:, None])
    o = torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)
    mass = weights.sum(1)[..., : count * block].unflatten(-1, (count, block)).sum(-1)
    return linear(p, "out", o), divergence(mass, index, chosen)


REFERENCES = {"dsa": dsa, "msa": msa, "qsa": qsa}
SIZES = {
    "dsa": st.fixed_dictionaries(
        {
            "num_selected": st.integers(1, 7), "q_rank": st.just(5), "kv_rank": st.just(4),
            "rope_dim": st.sampled_from([2, 4]), "index_heads": st.integers(1, 2), "index_dim": st.sampled_from([4, 6]),
        }
    ),
    "msa": st.fixed_dictionaries(
        {"block": st.integers(1, 5), "num_selected": st.integers(1, 3), "index_dim": st.sampled_from([2, 4])}
    ),
    "qsa": st.fixed_dictionaries(
        {
            "block": st.integers(1, 4), "num_selected": st.integers(1, 4), "index_heads": st.integers(1, 2),
            "index_dim": st.sampled_from([2, 4]),
        }
    ),
}  # fmt: skip


# One head of an indexer scores zero wherever its ReLU does, so equal scores are drawn often.
@pytest.mark.parametrize("name", SIZES)
@few(25)
@given(data=st.data(), length=st.integers(1, 16), groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_each_is_what_its_paper_says(name, data, length, groups, seed):
    config = judge.make_config(name, data.draw(SIZES[name]), n_kv_heads=groups)
    layer, x = judge.make_layer(config, seed), judge.make_input(config, 2, length, seed)
    judge.check_reference(layer, REFERENCES[config.attention], x)


def test_of_equal_scores_the_first_are_chosen():
    """A ReLU that lets nothing through scores all tokens alike, and keys of zero all blocks."""
    x = judge.make_input(judge.make_config("gqa"), 2, 12)
    for name, sizes in (
        ("dsa", {"num_selected": 3, "q_rank": 5, "kv_rank": 4, "rope_dim": 2, "index_heads": 2, "index_dim": 4}),
        ("qsa", {"block": 2, "num_selected": 2, "index_heads": 2, "index_dim": 4}),
    ):
        config = judge.make_config(name, sizes)
        layer = judge.make_layer(config)
        with torch.no_grad():
            layer.index_q.weight.zero_()
        judge.check_reference(layer, REFERENCES[name], x)
        changed = x.clone()
        changed[:, 5] += 1  # neither among the first nor near the last
        assert torch.equal(layer(x)[:, 10:], layer(changed)[:, 10:])


def count(config, length):
    """Pairs of one head by the paper's words."""
    p = config.pattern
    match config.attention:
        case "dsa":
            return sum(min(t + 1, p.num_selected) for t in range(length))
        case "msa":
            return sum(min(t // p.block, p.num_selected - 1) * p.block + t % p.block + 1 for t in range(length))
        case "qsa":
            return sum(min((t + 1) // p.block, p.num_selected) * p.block + (t + 1) % p.block for t in range(length))


def ranked(config, length):
    """Multiplies of the ranking of a sequence."""
    p, tokens = config.pattern, length * (length + 1) // 2
    match config.attention:
        case "dsa":
            return tokens * p.index_heads * (p.index_dim + 1)
        case "msa":
            return tokens * config.n_kv_heads * p.index_dim
        case "qsa":
            return sum((t + 1) // p.block for t in range(length)) * p.index_heads * p.index_dim


@pytest.mark.parametrize("name", SIZES)
@few(20)
@given(data=st.data(), length=st.integers(1, 40))
def test_useful_work_is_counted(name, data, length):
    config = judge.make_config(name, data.draw(SIZES[name]))
    assert config.variant.pairs(config, length) == count(config, length)
    matrices = sum(p.numel() for p in judge.make_layer(config).parameters() if p.dim() == 2)
    work = matrices + ranked(config, length) / length
    assert sum(config.variant.multiplies(config, length)) == pytest.approx(work)


@pytest.mark.parametrize(
    ("attention", "sizes"),
    [
        (
            "dsa",
            {
                "num_selected": 2048, "q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "index_heads": 64,
                "index_dim": 128,
            },
        ),
        ("msa", {"block": 128, "num_selected": 16, "index_dim": 128}),
        ("qsa", {"block": 4, "num_selected": 512, "index_heads": 4, "index_dim": 128}),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_papers(attention, sizes):
    assert vars(judge.make_config(attention, head_dim=192).pattern) == sizes


@pytest.mark.parametrize(
    ("attention", "sizes", "line"),
    [
        ("dsa", {"rope_dim": 3}, r"pattern\.rope_dim = 3 must be even"),
        ("dsa", {"rope_dim": 64, "index_dim": 32}, r"pattern\.rope_dim = 64 must be at most index_dim = 32"),
        ("dsa", {"rope_dim": 6}, r"pattern\.rope_dim = 6 must be below head_dim = 6"),
        ("msa", {"index_dim": 3}, r"pattern\.index_dim = 3 must be even"),
        ("qsa", {"index_heads": 0}, r"pattern\.index_heads = 0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(attention, sizes, line):
    with pytest.raises(ValueError, match=line):
        judge.make_config(attention, sizes)


def test_an_attention_without_a_loss_of_its_own_is_not_asked_for_one():
    from nsa_compile.models import NSATransformer

    model = NSATransformer(judge.make_config("moba", {"block": 4}))
    with pytest.raises(ValueError, match=r"^return_auxiliary = True needs a layer with a loss of its own"):
        model(torch.zeros(1, 4, dtype=torch.int64), return_auxiliary=True)
