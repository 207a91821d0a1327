"""A copy that no compiler takes away."""

from __future__ import annotations

import torch

from nsa_compile.ops.copied import COPIED


def test_the_operator_is_sound():
    for x in (torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t(), torch.arange(3), torch.tensor(True)):
        torch.library.opcheck(COPIED, (x,))
        assert COPIED(x).is_contiguous()


def test_it_is_a_copy_where_it_is_compiled():
    def run(x):
        y = x.t().sin()
        return COPIED(y.t()), y

    first, second = torch.compile(run, fullgraph=True)(torch.randn(3, 4))
    first.zero_()
    assert bool(second.ne(0).all())


def test_it_is_batched_and_differentiated_twice():
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(COPIED, 1, 1)(x), x)
    row = x[0].requires_grad_()
    (first,) = torch.autograd.grad(COPIED(row).pow(3).sum(), row, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), row)[0], 6 * row)
