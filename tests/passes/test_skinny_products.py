"""Products of few rows read their weight once: which ones, and that they stay what they were."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import nsa_compile
from nsa_compile import scan
from nsa_compile.ops import skinny
from tests.attention_programs import entry

torch.manual_seed(0)
X, W, B = torch.randn(3, 6), torch.randn(5, 6), torch.randn(5)


def compiled(function, *inputs, grad=False, **options):
    """What a compiled function gives, and what the pass matched in it."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        found = nsa_compile.compile(function, nested="eager", cache=False, **options)(*inputs)
    report = nsa_compile.last_report()
    assert report is not None
    return found, [match.split(": ", 1)[1] for match in entry(report, "skinny_products").matches]


TAKEN = {
    "linear": lambda x: F.linear(x, W),
    "linear with a bias": lambda x: F.linear(x, W, B),
    "beside norms and activations": lambda x: F.linear(F.silu(F.rms_norm(x, (6,))), W) + 1,
    "a module": lambda x: LAYER(x),
    "of one row without a batch": lambda x: F.linear(x[0], W),
    "of three dimensions": lambda x: F.linear(x[:, None], W, B),
    "a part of a weight": lambda x: F.linear(x[:, 1:5], W[1:4, 1:5]),
    "in a step that is traced": lambda x: scan(lambda c, row: (c + 1, F.linear(row, W, B)), torch.zeros(()), x[None])[
        1
    ],
}
LAYER = nn.Linear(6, 5)


@pytest.mark.parametrize("name", TAKEN)
def test_reads_the_weight_once(name):
    found, matches = compiled(TAKEN[name], X)
    assert len(matches) == 1
    assert "by a weight" in matches[0]
    with torch.no_grad():
        torch.testing.assert_close(found, TAKEN[name](X))


@pytest.mark.parametrize(
    ("name", "function", "inputs", "grad"),
    [
        ("a gradient may flow", lambda x: F.linear(x, W), (X,), True),
        ("a gradient is turned on inside", lambda x: with_gradients(x), (X,), False),
        ("too many rows", lambda x: F.linear(x, W), (torch.randn(skinny.MOST_ROWS + 1, 6),), False),
        ("a weight that lies across", lambda x: F.linear(x, torch.randn(6, 5).T), (X,), False),
        ("bfloat16", lambda x: F.linear(x, W.bfloat16()), (X.bfloat16(),), False),
        ("a product with a factor", lambda x: torch.addmm(B, x, W.t(), alpha=2.0), (X,), False),
        ("a single bias for all", lambda x: F.linear(x, W, B[:1]), (X,), False),
        ("no rows", lambda x: F.linear(x, W), (X[:0],), False),
        ("arguments by name", lambda x: F.linear(x, weight=W, bias=B), (X,), False),
        ("into a tensor", lambda x: torch._C._nn.linear(x, W, out=x.new_zeros(3, 5)), (X,), False),
        ("a transform", lambda x: torch.vmap(lambda row: F.linear(row, W))(x), (X,), False),
        ("a size that is data", lambda x: F.linear(x[x[:, 0] > 0], W), (X,), False),
        ("beside something else", lambda x: F.linear(x.sort().values, W), (X,), False),
    ],
)
def test_leaves_the_others_alone(name, function, inputs, grad):
    torch.manual_seed(0)
    found, matches = compiled(function, *inputs, grad=grad)
    torch.manual_seed(0)
    assert matches == []
    assert torch.equal(found, function(*inputs))


def with_gradients(x):
    with torch.enable_grad():
        return F.linear(x, W)


WRITES = {
    "before": lambda x: (x.mul_(2), F.linear(x, W))[1],
    "to the product": lambda x: (y := F.linear(x, W), y.view(-1).add_(100))[0],
    "to a part of the product": lambda x: (y := F.linear(x, W), y[0].zero_())[0],
    "to something local": lambda x: (z := x + 0, z.add_(1), F.linear(z, W))[2],
    "by an activation": lambda x: (z := x + 0, F.silu(z, inplace=True), F.linear(z, W))[2],
    "by an activation, not by name": lambda x: (z := x + 0, F.silu(z, True), F.linear(z, W))[2],
}


@pytest.mark.deep(every=4)
@pytest.mark.parametrize("nested", ["eager", "inductor"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_nobody_reads_by_its_result_is_there(name, nested):
    torch._dynamo.reset()
    x, own = X.clone(), X.clone()
    with torch.no_grad():
        found = nsa_compile.compile(WRITES[name], nested=nested, cache=False)(x)
        torch.testing.assert_close(found, WRITES[name](own))
    assert torch.equal(x, own)


def test_under_autocast_a_library_multiplies():
    with torch.autocast("cpu"):
        found, matches = compiled(lambda x: F.linear(x, W), X)
        assert torch.equal(found, F.linear(X, W))
    assert matches == []
    assert found.dtype == torch.bfloat16


def test_it_can_be_disabled():
    _, matches = compiled(lambda x: F.linear(x, W), X, disable=("skinny_products",))
    assert matches == []


def test_a_forward_derivative_is_refused_not_dropped():
    torch._dynamo.reset()
    run = nsa_compile.compile(lambda x: F.linear(x, W), nested="eager", cache=False)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(Exception, match="no derivatives in forward mode"):
        run(forward_ad.make_dual(X, X))


def test_a_trained_program_has_its_gradients():
    """The program without gradients is not the one with them."""
    torch._dynamo.reset()
    run = nsa_compile.compile(
        lambda x: F.linear(x, LAYER.weight, LAYER.bias).square().sum(), nested="eager", cache=False
    )
    with torch.no_grad():
        run(X)
    x = X.clone().requires_grad_()
    found = torch.autograd.grad(run(x), [x, LAYER.weight])
    torch.testing.assert_close(found, torch.autograd.grad(LAYER(x).square().sum(), [x, LAYER.weight]))
