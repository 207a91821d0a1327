"""The closed form of the useful work, against counting it pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.models.config import NSAConfig, SparsePattern
from nsa_compile.models.flops import (
    forward_flops_per_token,
    training_flops_per_token,
    visible_compressed,
    visible_selected,
    visible_window,
)


@st.composite
def patterns(draw):
    stride = draw(st.integers(1, 4))
    return SparsePattern(
        compress_stride=stride,
        compress_block=stride * draw(st.integers(1, 4)),
        select_block=stride * draw(st.integers(1, 4)),
        num_selected=draw(st.integers(3, 6)),
        window=draw(st.integers(1, 20)),
    )


@given(patterns(), st.integers(1, 120))
def test_visible_pairs_are_those_the_definition_counts(pattern, seq_len):
    length, stride, block = pattern.compress_block, pattern.compress_stride, pattern.select_block
    compressed = selected = window = 0
    for t in range(seq_len):
        compressed += sum(j * stride + length - 1 <= t for j in range(seq_len))
        full_blocks = min(pattern.num_selected - 1, t // block)
        selected += full_blocks * block + t % block + 1
        window += min(t + 1, pattern.window)
    assert visible_compressed(pattern, seq_len) == compressed
    assert visible_selected(pattern, seq_len) == selected
    assert visible_window(pattern, seq_len) == window


def make_config(**changes):
    base = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    return NSAConfig(**{**base, "pattern": SparsePattern(8, 4, 8, 3, 8), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"shared_kv": True}, {"phi": "mean"}, {"attention": "dense"}, {"v_head_dim": 4},
        {"branches": ("compressed", "window")}, {"branches": ("window",)},
    ],
)  # fmt: skip
def test_projections_count_the_models_own_matrices(changes):
    torch = pytest.importorskip("torch")
    from nsa_compile.models import NSATransformer

    # With one token there is no compressed block, and one visible key in each of the other branches.
    config = make_config(**changes)
    model = NSATransformer(config)
    matrices = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "phi" not in name
    )
    branches = 1 if config.attention == "dense" else len({"selected", "window"} & set(config.branches))
    pairs = config.n_layers * branches * config.n_heads * (config.head_dim + config.value_dim)
    assert forward_flops_per_token(config, 1) == 2 * (matrices + pairs)


def test_training_is_three_forwards():
    assert training_flops_per_token(make_config(), 64) == 3 * forward_flops_per_token(make_config(), 64)


def test_sparse_attention_grows_slower_than_dense():
    sparse = [forward_flops_per_token(make_config(), n) for n in (1024, 4096)]
    dense = [forward_flops_per_token(make_config(attention="dense"), n) for n in (1024, 4096)]
    assert sparse[1] - sparse[0] < 0.3 * (dense[1] - dense[0])
