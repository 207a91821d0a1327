"""The recurrent attentions against their papers, over explicit time and in closed form."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.models.zoo.recurrent import Memory
from nsa_compile.models.zoo.recurrent_variants import Recurrent
from tests.models.zoo import judge, recurrences
from tests.models.zoo.written import linear, rms_norm, turned
from tests.strategies import few

DECAYED = (recurrences.decayed_over_time, recurrences.decayed_closed)
DELTA = (recurrences.delta_over_time, recurrences.delta_closed)


def heads(c, p, x, *names):
    """The projections of these names, each `[B, S, H, width]`; of keys and values for each head of queries."""
    given = []
    for name in names:
        y = linear(p, name, x, c.n_heads if name == "q" else c.n_kv_heads)
        given.append(y.repeat_interleave(c.n_heads // y.shape[2], 2))
    return given


def silu(x):
    return x * x.sigmoid()


def linear_attention(recurrence, c, p, x):
    q, k, v = heads(c, p, x, "q", "k", "v")
    q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    # The normaliser is what the same attention makes of a value of 1.
    ones = torch.ones(*v.shape[:-1], 1, dtype=v.dtype)
    never = torch.zeros(*q.shape[:-1], 1, dtype=q.dtype)
    o = recurrence(q, k, torch.cat([v, ones], -1), never)
    return linear(p, "out", (o[..., :-1] / (o[..., -1:] + 1e-6)).flatten(2))


def retnet(recurrence, c, p, x):
    q, k, v = heads(c, p, x, "q", "k", "v")
    q, k = turned(q, c.rope_theta), turned(k, c.rope_theta) / c.head_dim**0.5
    decay = torch.tensor([math.log(1 - 2 ** (-5 - i)) for i in range(c.n_heads)], dtype=x.dtype)
    o = recurrence(q, k, v, decay[:, None].expand(*q.shape[:-1], 1))
    o = o - o.mean(-1, keepdim=True)
    o = rms_norm(o, c.norm_eps).flatten(2) * p["norm.weight"] + p["norm.bias"]
    return linear(p, "out", o * silu(linear(p, "gate", x)))


def gla(recurrence, c, p, x):
    q, k, v = heads(c, p, x, "q", "k", "v")
    decay = linear(p, "decay_up", linear(p, "decay_down", x)).sigmoid() ** (1 / c.pattern.gate_temperature)
    decay = decay.unflatten(-1, (c.n_kv_heads, -1)).repeat_interleave(c.n_heads // c.n_kv_heads, 2)
    o = recurrence(q / c.head_dim**0.5, k, v, decay.log())
    o = o - o.mean(-1, keepdim=True)
    o = rms_norm(o, c.norm_eps) * p["norm.weight"] + p["norm.bias"]
    return linear(p, "out", o.flatten(2) * silu(linear(p, "gate", x)))


def mamba2(recurrence, c, p, u):
    inner, groups = c.n_heads * c.value_dim, c.pattern.groups
    xbc = recurrences.convolved(linear(p, "xbc", u), p["conv.weight"], p["conv.bias"])
    x = xbc[..., :inner].unflatten(-1, (c.n_heads, -1))
    keys, queries = xbc[..., inner:].unflatten(-1, (2, groups, -1)).repeat_interleave(c.n_heads // groups, 3).unbind(2)
    dt = (1 + (linear(p, "dt", u) + p["dt_bias"]).exp()).log()[..., None]
    y = recurrence(queries, keys, dt * x, -dt * p["a_log"].exp()[:, None]) + p["d"][:, None] * x
    y = (y.flatten(2) * silu(linear(p, "gate", u))).unflatten(-1, (groups, -1))
    return linear(p, "out", rms_norm(y, c.norm_eps).flatten(2) * p["scale"])


def delta_inputs(c, p, x):
    y = recurrences.convolved(torch.cat([linear(p, name, x) for name in "qkv"], -1), p["conv.weight"])
    widths = [c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.n_kv_heads * c.value_dim]
    q, k, v = y.split(widths, -1)
    q = q.unflatten(-1, (c.n_heads, -1))
    k, v = (y.unflatten(-1, (c.n_kv_heads, -1)).repeat_interleave(c.n_heads // c.n_kv_heads, 2) for y in (k, v))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    return q / c.head_dim**0.5, k, v, linear(p, "beta", x).sigmoid()


def delta_net(recurrence, c, p, x):
    q, k, v, beta = delta_inputs(c, p, x)
    o = recurrence(q, k, v, beta, torch.zeros(*q.shape[:-1], 1, dtype=q.dtype))
    return linear(p, "out", rms_norm(o, c.norm_eps, p["norm.weight"]).flatten(2))


def gated_delta_net(recurrence, c, p, x):
    dt = (1 + (linear(p, "alpha", x) + p["dt_bias"]).exp()).log()
    o = recurrence(*delta_inputs(c, p, x), (-dt * p["a_log"].exp())[..., None])
    o = rms_norm(o, c.norm_eps, p["norm.weight"]).flatten(2)
    return linear(p, "out", o * silu(linear(p, "gate", x)))


def kda(recurrence, c, p, x):
    dt = (1 + (linear(p, "alpha_up", linear(p, "alpha_down", x)) + p["dt_bias"]).exp()).log()
    o = recurrence(*delta_inputs(c, p, x), -dt.unflatten(-1, (c.n_heads, -1)) * p["a_log"].exp()[:, None])
    o = rms_norm(o, c.norm_eps, p["norm.weight"]).flatten(2)
    return linear(p, "out", o * linear(p, "gate_up", linear(p, "gate_down", x)).sigmoid())


REFERENCES = {
    "linear": (linear_attention, DECAYED),
    "retnet": (retnet, DECAYED),
    "gla": (gla, DECAYED),
    "mamba2": (mamba2, DECAYED),
    "delta_net": (delta_net, DELTA),
    "gated_delta_net": (gated_delta_net, DELTA),
    "kda": (kda, DELTA),
}
SIZES = {
    "gla": {"gate_rank": st.integers(1, 3), "gate_temperature": st.sampled_from([16.0, 3.0])},
    "mamba2": {"conv": st.integers(1, 5), "groups": st.sampled_from([2, 1, 4])},
    "delta_net": {"conv": st.integers(1, 5)},
    "gated_delta_net": {"conv": st.integers(1, 5)},
    "kda": {"conv": st.integers(1, 5), "gate_rank": st.sampled_from([None, 3])},
}


@pytest.mark.parametrize("form", [0, 1], ids=["over_time", "closed"])
@pytest.mark.parametrize("name", REFERENCES)
@few(9)
@given(
    data=st.data(), length=st.integers(1, 11), groups=st.sampled_from([1, 2, 4]), v_head_dim=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_what_the_paper_says(name, form, data, length, groups, v_head_dim, seed):
    sizes = {key: data.draw(values, label=key) for key, values in SIZES.get(name, {}).items()}
    config = judge.make_config(name, sizes, n_kv_heads=groups, v_head_dim=v_head_dim)
    written, forms = REFERENCES[name]
    reference = lambda c, p, x: written(forms[form], c, p, x)  # noqa: E731
    judge.check_reference(judge.make_layer(config, seed), reference, judge.make_input(config, 2, length, seed))


def test_every_recurrence_has_a_reference():
    from nsa_compile.models.variant import REGISTERED, find

    assert {name for name in REGISTERED if isinstance(find(name), Recurrent)} == set(REFERENCES)


@pytest.mark.parametrize("name", REFERENCES)
def test_the_state_does_not_grow_and_has_room_for_any_token(name):
    config = judge.make_config(name)
    layer = judge.make_layer(config)
    short, long = layer.init_state(2, 1), layer.init_state(2, 1000)
    assert [part.shape for part in short] == [part.shape for part in long]
    assert layer.room(short) is None
    x = judge.make_input(config, 2, 7)
    state = short
    for t in range(7):  # far beyond max_len = 1
        state, o = layer.decode_step(state, x[:, t], torch.tensor(t))
    torch.testing.assert_close(o, layer(x)[:, -1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_layer_in_bfloat16_sums_its_state_in_float32(name):
    config = judge.make_config(name)
    layer = config.variant.layer(config).bfloat16()
    layer.says_uncompiled = False
    state = layer.init_state(2, 3)
    assert state.s.dtype == torch.float32
    after, o = layer.decode_step(state, torch.randn(2, config.dim, dtype=torch.bfloat16), torch.tensor(0))
    assert [part.dtype for part in after] == [part.dtype for part in state]
    assert o.dtype == torch.bfloat16
    assert o.isfinite().all()


@pytest.mark.parametrize("name", ["mamba2", "gated_delta_net", "kda"])
def test_decays_begin_as_those_of_mamba(name):
    config = judge.make_config(name, n_heads=64, n_kv_heads=64)
    torch.manual_seed(0)
    layer = config.variant.layer(config)
    rate, delta = layer.a_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 2
    assert 14 < rate.max() <= 16
    assert 0.0009 < delta.min() < 0.002
    assert 0.05 < delta.max() < 0.101
    # Evenly in the logarithm: half of them are below the geometric mean.
    assert 0.3 < (delta < 0.01).double().mean() < 0.7


def test_decays_of_retention_are_fixed_and_those_of_gla_begin_near_one():
    retention = judge.make_config("retnet").variant.layer(judge.make_config("retnet"))
    full = Memory(torch.ones_like(retention.init_state(1, 1).s))
    faded, _ = retention.decode_step(full, torch.zeros(1, retention.config.dim), torch.tensor(0))
    assert faded.s[0, :, 0, 0].tolist() == [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256]
    pattern = judge.make_config("gla").pattern
    assert (pattern.gate_rank, pattern.gate_temperature) == (16, 16.0)


@pytest.mark.parametrize("name", REFERENCES)
def test_useful_work_is_every_matrix_and_every_product_with_the_state(name):
    config = judge.make_config(name)
    layer = judge.make_layer(config)
    matrices = sum(p.numel() for key, p in layer.named_parameters() if p.dim() == 2)
    state = config.n_heads * config.head_dim * config.value_dim
    beside = config.n_heads * config.head_dim if name == "linear" else 0  # the normaliser's product
    products = 3 if REFERENCES[name][1] is DELTA else 2
    assert config.variant.pairs(config, 100) == 0
    assert sum(config.variant.multiplies(config, 100)) == matrices + products * state + beside


def test_heads_of_mamba_are_in_groups():
    with pytest.raises(ValueError, match=r"^n_heads = 4 must be a multiple of pattern\.groups = 3$"):
        judge.make_config("mamba2", {"groups": 3})
