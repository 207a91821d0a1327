"""The program of the README. `nsa-compile passes explain examples/ten_lines.py` tells what became of it."""

import torch

import nsa_compile


def step(cache, token):  # write the key and value of token t, attend to all written so far
    t, q, k, v = token
    K, V = cache[0].clone(), cache[1].clone()
    K[t], V[t] = k, v
    weights = (K @ q / 8).masked_fill(torch.arange(len(K)) > t, -torch.inf).softmax(-1)
    return (K, V), weights @ V


def attention(q, k, v):  # [S, D] each
    xs = (torch.arange(len(q)), q, k, v)
    return nsa_compile.scan(step, (torch.zeros_like(k), torch.zeros_like(v)), xs)[1]


q, k, v = torch.randn(3, 1024, 64)
fast = nsa_compile.compile(attention)
torch.testing.assert_close(fast(q, k, v), attention(q, k, v))
