"""Modes that are on around a compiled function."""

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
