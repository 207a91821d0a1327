"""What changes around a compiled function from one call to the next."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import nsa_compile
from nsa_compile.capture.refusals import ScanNotCompiled

S, D = 5, 4


def makes_tensors(x):
    return nsa_compile.scan(lambda carry, row: (carry + row.sum(), torch.ones(D)), x.new_zeros(()), x)[1]


def makes_them_where_its_inputs_are(x):
    def step(carry, row):
        total = carry + torch.ones(D, device=row.device) * row
        return total, total

    return nsa_compile.scan(step, x.new_zeros(D), x)[1]


@pytest.mark.deep(but=["makes_them_where_its_inputs_are"])
@pytest.mark.parametrize("run", [makes_tensors, makes_them_where_its_inputs_are])
def test_a_step_makes_tensors_on_the_default_device(run):
    compiled = nsa_compile.compile(run, nested="eager", cache=False)
    x = torch.randn(S, D)
    for where in ("cpu", "meta", "cpu"):
        with torch.device(where):
            expected, found = run(x), compiled(x)
        assert found.device == expected.device
        assert found.is_meta or found.allclose(expected)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.Tensor.sum else result


def test_a_mode_of_ones_own_is_not_left_out():
    compiled = nsa_compile.compile(makes_tensors, nested="eager", cache=False)
    x = torch.randn(S, D)
    compiled(x)
    with Doubles(), pytest.raises(ScanNotCompiled, match=r"a TorchFunctionMode \(Doubles\) is on around"):
        compiled(x)
    assert compiled(x).equal(makes_tensors(x))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(D, D)

    def forward(self, x):
        return nsa_compile.scan(lambda carry, row: (carry + self.project(row), carry), x.new_zeros(D), x)[1]


def test_a_hook_that_comes_later_is_called():
    layer, x = Layer(), torch.randn(S, D)
    compiled = nsa_compile.compile(layer, nested="eager", cache=False)
    compiled(x)
    handle = layer.project.register_forward_hook(lambda module, inputs, output: output * 100)
    torch.testing.assert_close(compiled(x), layer(x))
    handle.remove()
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_zero_keeps_its_sign():
    def run(x, number):
        return nsa_compile.scan(lambda carry, row: (carry + row, carry * math.copysign(1, number)), x[0], x)[1]

    compiled = nsa_compile.compile(run, nested="eager", cache=False)
    x = torch.randn(S, D)
    for number in (0.0, -0.0, 2.0, 0.0):
        torch.testing.assert_close(compiled(x, number), run(x, number))
