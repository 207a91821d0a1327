"""Every program of the catalogue, compiled: its values, its gradients, its verdict."""

import inspect

import pytest
import torch

import nsa_compile
from nsa_compile.capture.refusals import ScanNotCompiled
from tests.catalogue import verdicts
from tests.catalogue.catalogue import CLASSES, Sizes, falls_short, verdict
from tests.catalogue.programs import PROGRAMS
from tests.catalogue.verdicts import VERDICTS

SIZES = Sizes()


def results(function, inputs):
    """The output, and the gradients of the inputs that ask for them, under a fixed random cotangent."""
    y = function(*inputs)
    torch.manual_seed(0)
    cotangent = torch.randn_like(y)
    return y.detach(), torch.autograd.grad(y, [x for x in inputs if x.requires_grad], cotangent, allow_unused=True)


@pytest.mark.deep(
    every=12,
    but=[
        "rwkv4/rwkv4",
        "min/running_min",
        "hca/compressed_window_and_sink",
        "linear_attention/linear_by_cache",
        "top_tokens_per_head/top_tokens_by_gather",
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_is_its_loop_and_has_its_verdict(name):
    program, (today, _) = PROGRAMS[name], VERDICTS[name]
    torch._dynamo.reset()
    expected = results(program.at(SIZES), program.inputs(SIZES))
    assert expected[0].isfinite().all()
    compiled = nsa_compile.compile(program.at(SIZES), nested="eager", attention="sparse", cache=False)
    try:
        actual = results(compiled, program.inputs(SIZES))
    except ScanNotCompiled:
        assert today == "one line"
        return
    except torch._dynamo.exc.BackendCompilerFailed:
        assert today == "crash"
        return
    torch.testing.assert_close(actual, expected, rtol=program.tolerance, atol=program.tolerance)
    assert verdict(nsa_compile.last_report()) == today


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("group", dict.fromkeys(program.group for program in PROGRAMS.values()))
def test_spellings_of_a_group_compute_the_same(group):
    first, *others = (program for program in PROGRAMS.values() if program.group == group)
    expected = first.at(SIZES)(*first.inputs(SIZES))
    for other in others:
        tolerance = max(first.tolerance, other.tolerance)
        actual = other.at(SIZES)(*other.inputs(SIZES))
        assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance), f"{other.name} is not {first.name}"


def test_the_table_has_a_line_for_each_program():
    assert list(VERDICTS) == list(PROGRAMS)
    assert len(PROGRAMS) >= 120
    assert all(owed in CLASSES for _, owed in VERDICTS.values())


def test_the_table_marks_what_falls_short():
    lines = {
        line.split('"')[1]: line.endswith("# short")
        for line in inspect.getsource(verdicts).splitlines()
        if '": (' in line
    }
    assert lines == {name: falls_short(*verdict) for name, verdict in VERDICTS.items()}
