"""The judge is judged: hand-computed numbers, limits in which NSA is ordinary attention, and planted faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nsa_compile.verification import oracle
from nsa_compile.verification.oracle import (
    importance,
    masked_softmax,
    nsa_attention_oracle,
    nsa_branches_oracle,
    num_compressed_blocks,
    select,
)


def make(B=1, S=12, G=2, h=2, D=4, Dv=3, seed=0, requires_grad=False):
    rng = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_(requires_grad)

    kv = [rand(B, S, G, dim) for dim in (D, Dv) * 3]
    return rand(B, S, G * h, D), *kv


def dense_causal(q, k, v):
    h = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.repeat_interleave(h, 2).transpose(1, 2), v.repeat_interleave(h, 2).transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def test_number_of_compressed_blocks_counts_whole_blocks_only():
    assert [num_compressed_blocks(S, 4, 2) for S in (1, 3, 4, 5, 6, 7, 8)] == [0, 0, 1, 1, 2, 2, 3]
    assert num_compressed_blocks(2048, 32, 16) == 127


def test_paper_example_weighs_neighbouring_blocks_1_2_2_2_1():
    """l/d/l' = 32/16/64: block j takes 4j-1 … 4j+3. One-hot probabilities read the weights out."""
    weights = torch.stack([importance(p[None], 2, 32, 16, 64, "minus") for p in torch.eye(8)], dim=-1)
    assert weights.tolist() == [[2, 2, 2, 1, 0, 0, 0, 0], [0, 0, 0, 1, 2, 2, 2, 1]]
    printed = torch.stack([importance(p[None], 2, 32, 16, 64, "paper_v2") for p in torch.eye(8)], dim=-1)
    assert printed.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [1, 2, 2, 2, 1, 0, 0, 0]]


def test_importance_sums_the_heads_of_the_group():
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    assert importance(p, 2, 1, 1, 1, "minus").tolist() == [0.75, 1.25]


@pytest.mark.parametrize(
    ("scores", "t", "n", "expected"),
    [
        ([9, 1, 5, 3, 0, 0], 10, 4, [0, 2, 4, 5]),  # 0 and 4, 5 are forced; 2 is the best of the rest
        ([0, 7, 7, 7, 0, 0], 10, 4, [0, 1, 4, 5]),  # a tie goes to the lower index
        ([0, 0, 0, 0, 0, 0], 11, 5, [0, 1, 2, 4, 5]),
        ([0, 9, 0, 9, 9, 9], 3, 4, [0, 1]),  # fewer than n blocks up to t: all of them, none beyond
        ([0, 9, 9, 9, 0, 0], 10, 3, [0, 4, 5]),  # forced blocks count towards n
    ],
)
def test_select(scores, t, n, expected):
    assert select(scores, t, 2, n, 1, 2) == expected


def test_three_tokens_by_hand():
    """One head, D = 1, l = d = l' = 1: with q = 0 every branch is the mean over what its mask keeps."""
    q = torch.zeros(1, 3, 1, 1)
    v = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1)
    (cmp, slc, win), indices = nsa_branches_oracle(
        q, v, v, v, v, v, v, l=1, d=1, l_sel=1, n=1, w=2, num_initial=0, num_local=1
    )
    assert cmp.flatten().tolist() == [1.0, 1.5, 3.0]
    assert slc.flatten().tolist() == [1.0, 2.0, 6.0]
    assert win.flatten().tolist() == [1.0, 1.5, 4.0]
    assert indices.flatten().tolist() == [0, 1, 2]
    gates = torch.tensor([1.0, 10.0, 100.0]).expand(1, 3, 1, 3)
    out, _ = nsa_attention_oracle(q, v, v, v, v, v, v, gates, l=1, d=1, l_sel=1, n=1, w=2, num_initial=0, num_local=1)
    assert out.flatten().tolist() == [111.0, 171.5, 463.0]


def test_two_tokens_by_hand_with_a_real_softmax():
    """q·k / sqrt(D) = 0 and ln 3, so the probabilities are 1/4 and 3/4."""
    q = torch.tensor([[0.0] * 4, [math.log(3), 0, 0, 0]]).view(1, 2, 1, 4)
    k = torch.tensor([[0.0] * 4, [2.0, 0, 0, 0]]).view(1, 2, 1, 4)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    (_, _, win), _ = nsa_branches_oracle(q, k, v, k, v, k, v, l=1, d=1, l_sel=1, n=1, w=2, num_local=1, num_initial=0)
    torch.testing.assert_close(win.flatten(), torch.tensor([4.0, 7.0], dtype=torch.float64), rtol=1e-7, atol=0)


def test_everything_selected_is_dense_causal_attention():
    q, k_cmp, v_cmp, k, v, k_win, v_win = make()
    (_, slc, _), _ = nsa_branches_oracle(q, k_cmp, v_cmp, k, v, k_win, v_win, l=4, d=2, l_sel=4, n=3, w=5)
    torch.testing.assert_close(slc, dense_causal(q, k, v))


def test_a_window_over_everything_is_dense_causal_attention():
    q, *kv, k, v = make()
    (_, _, win), _ = nsa_branches_oracle(q, *kv, k, v, l=4, d=2, l_sel=2, n=3, w=12)
    torch.testing.assert_close(win, dense_causal(q, k, v))


def test_a_window_of_one_returns_the_token_itself():
    q, *kv, k, v = make()
    (_, _, win), _ = nsa_branches_oracle(q, *kv, k, v, l=4, d=2, l_sel=2, n=3, w=1)
    torch.testing.assert_close(win, v.repeat_interleave(2, 2))


def test_blocks_of_one_token_compress_to_dense_causal_attention():
    q, k, v, *kv = make()
    (cmp, _, _), _ = nsa_branches_oracle(q, k, v, *kv, l=1, d=1, l_sel=2, n=3, w=1)
    torch.testing.assert_close(cmp, dense_causal(q, k, v))


def test_no_visible_compressed_block_is_zero_in_value_and_gradient():
    inputs = make(S=6, requires_grad=True)
    (cmp, _, _), _ = nsa_branches_oracle(*inputs, l=4, d=2, l_sel=2, n=3, w=2)
    assert (cmp[:, :3] == 0).all()
    assert (cmp[:, 3:] != 0).all()
    cmp.sum().backward()
    grad = inputs[0].grad
    assert grad.isfinite().all()
    assert (grad[:, :3] == 0).all()
    # One visible block: its probability is 1 whatever q says. Token 5 is the first that can choose.
    assert (grad[:, 3:5].abs() < 1e-15).all()
    assert (grad[:, 5] != 0).all()


def test_sequence_shorter_than_a_block():
    (cmp, slc, _), indices = nsa_branches_oracle(*make(S=3), l=4, d=2, l_sel=2, n=3, w=2)
    assert (cmp == 0).all()
    assert slc.isfinite().all()
    assert indices[0, 0, 0].tolist() == [0, -1, -1]
    assert indices[0, 2, 0].tolist() == [0, 1, -1]


def test_phi_sees_the_tokens_of_its_block_in_order():
    q, k, v, *kv = make()
    last = {"l": 4, "d": 2, "l_sel": 2, "n": 3, "w": 1, "phi_k": lambda x: x[-1], "phi_v": lambda x: x[-1]}
    (cmp, _, _), _ = nsa_branches_oracle(q, k, v, *kv, **last)
    # At t = 3 only block 0 is visible, and its last token is 3.
    torch.testing.assert_close(cmp[0, 3], v[0, 3].repeat_interleave(2, 0))


def test_heads_of_a_group_are_neighbours():
    """Head g·h + i reads group g: with a window of one the output is the value of the group."""
    q, *kv, k, v = make(G=2, h=2)
    (_, _, win), _ = nsa_branches_oracle(q, *kv, k, v, l=4, d=2, l_sel=2, n=3, w=1)
    torch.testing.assert_close(win[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(win[:, :, 1], v[:, :, 0])
    torch.testing.assert_close(win[:, :, 2], v[:, :, 1])


def test_later_tokens_change_nothing():
    S, cut = 24, 13
    inputs = make(S=S)
    perturbed = [torch.cat([x[:, :cut], torch.randn_like(x[:, cut:]) * 10], 1) for x in inputs]
    shape = {"l": 4, "d": 2, "l_sel": 4, "n": 4, "w": 5}
    before, chosen_before = nsa_branches_oracle(*inputs, **shape)
    after, chosen_after = nsa_branches_oracle(*perturbed, **shape)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :cut], b[:, :cut])
        assert not torch.equal(a[:, cut:], b[:, cut:])
    assert torch.equal(chosen_before[:, :cut], chosen_after[:, :cut])


def test_selection_carries_no_gradient():
    """k_cmp moves the selection; with only the selected branch in the loss nothing may flow back to it."""
    inputs = make(S=24, requires_grad=True)
    (_, slc, _), _ = nsa_branches_oracle(*inputs, l=4, d=2, l_sel=4, n=4, w=5)
    grads = torch.autograd.grad(slc.sum(), inputs, allow_unused=True)
    assert grads[1] is None
    assert grads[2] is None
    assert grads[5] is None
    assert grads[6] is None
    assert all(g.abs().sum() > 0 for g in (grads[0], grads[3], grads[4]))


def test_masked_softmax_without_a_column_is_zero():
    assert masked_softmax(torch.ones(2, 3), torch.zeros(3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


def test_margin_is_zero_on_a_tie_and_positive_without_one():
    q, k, *_ = make(S=24)
    shape = {"l": 4, "d": 2, "l_sel": 4, "n": 4}
    assert 0 < oracle.selection_margin(q, k, **shape) < 1
    assert oracle.selection_margin(torch.zeros_like(q), k, **shape) < 1e-12
    assert oracle.selection_margin(q, k, l=4, d=2, l_sel=4, n=6) == math.inf
