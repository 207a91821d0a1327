"""Drawn models around scans, compiled, equal eager in all that a caller can see; and the judge sees what it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_compile.backend import nsa_compile_backend
from nsa_compile.errors import UserError
from nsa_compile.passes.verifier import VerificationError
from tests.model_judge import FAILURES, general, judge, judge_in_time, shrink
from tests.model_programs import HEADER, draw

# One of everything that a compiler may get wrong, in the form of a drawn program.
EVERYTHING = (
    HEADER
    + """
CALLS = [(3, 2)]
NESTED, FULLGRAPH, MODE = 'eager', True, 'grad'
DTYPE, D, G = torch.float64, 2, 1
GAIN = nn.Parameter(torch.full((), 1.5, dtype=DTYPE))


def arguments(S, B):
    args, leaves = {}, {}
    leaves['x'] = args['x'] = torch.randn((S, B, D), dtype=DTYPE).requires_grad_()
    leaves['m'] = args['m'] = torch.randn((S, B, D), dtype=DTYPE)
    return args, leaves


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D, dtype=DTYPE))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x=None, m=None):
        S, B = x.shape[0], x.shape[1]
        h = x @ self.w
        h.mul_(2)
        m[:1].zero_()
        self.count.add_(1)
        h = h * GAIN + torch.rand(S, B, D, dtype=DTYPE)
        unused = h + 1
        def step(c, x):
            n = {"k": c["k"] + x["x"]}
            return n, {"y": n["k"] * 2}
        final, rows = scan(step, {"k": torch.zeros(B, D, dtype=DTYPE)}, {"x": h})
        out = {}
        out["y"] = rows["y"]
        out["seen"] = m[1:]
        out["steps"] = torch.arange(S)
        return out


model = Model()
run = model
"""
)

Run = Callable[..., Any]


def on_outputs(change: Callable[[Tensor], Tensor]) -> Callable[[Run, dict], Run]:
    """A compiler whose programs return something else."""
    return lambda run, _: lambda **a: torch.utils._pytree.tree_map_only(Tensor, change, run(**a))


def drops_writes_to_arguments(run: Run, _: dict) -> Run:
    return lambda **a: run(**{name: x.clone() for name, x in a.items()})


def drops_writes_to_buffers(run: Run, namespace: dict) -> Run:
    def without(**a: Any) -> Any:
        before = {name: x.clone() for name, x in namespace["model"].named_buffers()}
        out = run(**a)
        for name, x in namespace["model"].named_buffers():
            x.copy_(before[name])
        return out

    return without


def drops_dead_code(run: Run, _: dict) -> Run:
    """FX takes a write whose result nobody reads for unused."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Run:
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return nsa_compile_backend(gm, inputs, options={"nested": "eager", "cache": False})

    return torch.compile(run, backend=backend)


def freezes_draws(run: Run, _: dict) -> Run:
    def frozen(**a: Any) -> Any:
        torch.manual_seed(0)
        return run(**a)

    return frozen


def draws_twice(run: Run, _: dict) -> Run:
    def twice(**a: Any) -> Any:
        out = run(**a)
        torch.rand(1)
        return out

    return twice


def hands_out_a_constant(run: Run, _: dict) -> Run:
    steps: list[Tensor] = []

    def constant(**a: Any) -> Any:
        out = run(**a)
        steps.append(out["steps"])
        return {**out, "steps": steps[0]}

    return constant


def raises(error: Exception) -> Callable[[Run, dict], Run]:
    def compiler(run: Run, _: dict) -> Run:
        def failing(**a: Any) -> Any:
            raise error

        return failing

    return compiler


def flipped(x: Tensor) -> Tensor:
    return x.flip(0) if x.dim() else x


def steeper(x: Tensor) -> Tensor:
    """The same value with twice the gradient."""
    return x + (x - x.detach()) if x.is_floating_point() else x


FAULTS = {
    "drops writes to arguments": (drops_writes_to_arguments, "wrong_state"),
    "drops writes to buffers": (drops_writes_to_buffers, "wrong_state"),
    "drops dead code": (drops_dead_code, "wrong_value"),
    "freezes draws": (freezes_draws, "wrong_random"),
    "draws twice": (draws_twice, "wrong_random"),
    "hands out a constant": (hands_out_a_constant, "wrong_value"),
    "flips a value": (on_outputs(flipped), "wrong_value"),
    "rounds": (on_outputs(lambda x: x.float().to(x.dtype)), "wrong_value"),
    "another dtype": (on_outputs(lambda x: x.float()), "wrong_value"),
    "loses an alias": (on_outputs(torch.clone), "wrong_alias"),
    "loses the gradient": (on_outputs(lambda x: x.detach()), "wrong_grad"),
    "doubles the gradient": (on_outputs(steeper), "wrong_grad"),
    "raises": (raises(IndexError("list index out of range")), "crash"),
    "raises many lines": (raises(VerificationError("batch_prefill", "this\nand that")), "crash"),
    "raises one line": (raises(UserError("a step may not write to its carry; clone it")), "one_line_error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_judge_sees_a_planted_fault(fault):
    compiler, kind = FAULTS[fault]
    assert judge(EVERYTHING, compiler).kind == kind


def test_judge_accepts_what_is_right():
    assert judge(EVERYTHING, lambda run, _: run).kind == "no_scan_seen"


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-5), ("bfloat16", 0.06)])
def test_judge_sees_more_than_roundings(dtype, off):
    """Within the band of its dtype, and farther from the program in float64 than eager is."""
    source = (
        EVERYTHING.replace("torch.float64, 2, 1", f"torch.{dtype}, 2, 1")
        .replace(" + torch.rand(S, B, D, dtype=DTYPE)", "")
        .replace("D), dtype=DTYPE)", "D), dtype=torch.float64).bfloat16().to(DTYPE)")
        .replace("randn(D, D, dtype=DTYPE)", "randn(D, D, dtype=torch.float64).bfloat16().to(DTYPE)")
    )
    assert judge(source, lambda run, _: run).kind == "no_scan_seen"

    def changed(x: Tensor) -> Tensor:
        return x * (1 + off) if x.is_floating_point() else x

    verdict = judge(source, on_outputs(lambda x: changed(x).to(x.dtype) if x.requires_grad else x))
    assert (verdict.kind, verdict.cause) == ("wrong_value", "output: farther from float64 than eager")


def test_judge_passes_over_what_eager_refuses():
    assert judge(EVERYTHING.replace("h.mul_(2)", "x.mul_(2)")).kind == "eager_fails"


@pytest.mark.deep
def test_judge_passes_over_what_is_overwritten_unseen_by_autograd():
    """Eager gradients are those of the tensors as overwritten; any other gradient than the right one is still wrong."""
    source = EVERYTHING.replace('n["k"] * 2', 'n["k"].square()')
    source = source.replace("        out = {}", '        final["k"].data.mul_(2)\n        out = {}')
    verdict = judge(source)
    assert (verdict.kind, verdict.cause) == ("eager_fails", "a write through .data overwrites what its backward needs")
    assert judge(source, FAULTS["doubles the gradient"][0]).kind == "wrong_grad"
    assert judge(source, FAULTS["loses the gradient"][0]).kind == "wrong_grad"


def test_judge_passes_over_nan_that_a_layer_makes():
    compiler = on_outputs(lambda x: x.nan_to_num())
    assert judge(EVERYTHING.replace("h.mul_(2)", "h = h / 0 * 0"), compiler).kind == "eager_fails"
    given = EVERYTHING.replace("requires_grad_()", "fill_(math.nan)")
    assert judge(given, compiler).cause == "output: a number where eager has NaN"


@pytest.mark.deep
def test_judge_passes_over_what_torch_does_by_itself():
    """Its functionalization draws in another order into a transposed tensor."""
    drawn = "h = h * torch.empty_like(h.transpose(0, 2)).bernoulli_(0.5).transpose(0, 2)"
    assert judge(EVERYTHING.replace("h.mul_(2)", drawn)).kind == "torch_differs"


def test_errors_of_torch_are_told_without_who_handed_it_the_graph():
    for one, other in (
        ("backend='backend' raised:", "backend='aot_eager' raised:"),
        ("a tensor, which is output 1 of Mul, is", "a tensor, which is output 0 of Stack, is"),
    ):
        assert general(one) == general(other)


# Programs of the grammar, and not the one above alone, must be such that a fault shows.
SOMEWHERE = ("drops writes to arguments", "drops writes to buffers", "freezes draws", "flips a value", "loses an alias",
             "loses the gradient", "doubles the gradient")  # fmt: skip


@pytest.mark.deep(but=["freezes draws", "flips a value", "loses the gradient", "doubles the gradient"])
@pytest.mark.parametrize("fault", SOMEWHERE)
def test_drawn_programs_show_a_planted_fault(fault):
    compiler, _ = FAULTS[fault]
    assert any(judge(draw(0, number).source, compiler).kind in FAILURES for number in range(40))


@pytest.mark.deep
def test_drawn_programs_are_mostly_legal_and_judged_right_uncompiled():
    kinds = [judge(draw(0, number).source, lambda run, _: run).kind for number in range(40)]
    assert set(kinds) <= {"no_scan_seen", "eager_fails"}
    assert kinds.count("no_scan_seen") >= 24


def test_a_program_depends_on_its_seed_and_number_alone():
    sources = [draw(seed, number).source for seed in (0, 1) for number in (5, 6)]
    assert len(set(sources)) == 4
    assert sources == [draw(seed, number).source for seed in (0, 1) for number in (5, 6)]


def test_shrinking_keeps_what_a_failure_needs():
    compiler, kind = FAULTS["drops writes to arguments"]
    source = shrink(EVERYTHING, lambda candidate: judge(candidate, compiler).kind == kind)
    assert "m[:1].zero_()" in source
    assert "rand(" not in source
    assert "self.count.add_(1)" not in source


# --------------------------------------------------------------------------------------------------------- the compiler


# A failing number is shrunk, and said what it needs, by `python -m benchmarks.model_programs --only NUMBER`.
@settings(phases=[Phase.explicit, Phase.generate])
@given(number=st.integers(0, 99_999))
def test_compiled_model_equals_eager(number):
    program = draw(0, number)
    verdict = judge_in_time(program.source)
    assume(verdict.kind != "eager_fails")
    note(f"program {number} of seed 0\n{program.source}")
    assert not verdict.failed, verdict
