"""The proof obligation of the compiler: any step program, compiled, equals its loop in values and gradients, and what
the report says about guards and declines is what the program deserves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import nsa_compile
from tests.step_programs import CLAIMS, Program, loop_over_the_future, run_loop, step_programs, values_and_grads
from tests.strategies import few


def equal(actual: tuple[list, list], expected: tuple[list, list]) -> bool:
    pairs = zip(actual[0] + actual[1], expected[0] + expected[1], strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in pairs)


def compiled(
    program: Program, nested: str = "eager", **options
) -> tuple[tuple[list, list], nsa_compile.backend.Report]:
    """Outputs and gradients through the compiler, and its report."""
    torch._dynamo.reset()
    run, *args = program.build()
    options = {"nested": nested, "cache": False, **options}
    fast = torch.compile(run, backend="nsa_compile", fullgraph=True, options=options)
    result = values_and_grads(lambda scan, *inputs: fast(nsa_compile.scan, *inputs), None, *args)
    return result, nsa_compile.last_report()


# ------------------------------------------------------------------------------------------------- the grammar itself


@pytest.mark.parametrize("kind", CLAIMS)
@given(data=st.data())
def test_programs_deserve_their_claim(kind, data):
    """Without any compiler: a program that must be batched does not notice caches that already hold the future; one
    that must not lose its guards does."""
    program = data.draw(step_programs(kind))
    if program.random:
        return
    values, grads = run_loop(program)
    assert all(x.isfinite().all() for x in values + grads)

    if program.claim in ("batched", "not_unguarded"):
        unaware = [
            equal(values_and_grads(run, loop_over_the_future(program.caches), *args), run_loop(program, seed))
            for seed in range(3)
            for run, *args in [program.build(seed)]
        ]
        assert all(unaware) if program.claim == "batched" else not all(unaware)


# --------------------------------------------------------------------------------------------------------- the compiler


def check(program: Program, nested: str) -> None:
    result, report = compiled(program, nested)
    (record,) = report.scans
    note(f"{program!r}\n{record}")

    if not program.random:
        expected = run_loop(program)
        for actual, wanted in zip(result[0] + result[1], expected[0] + expected[1], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)

    if not record.batched:
        assert record.declines, "declined without a reason"
        assert all(decline.op and decline.reason for decline in record.declines)
    if program.claim == "batched":
        assert record.batched, "declined, but within the promise"
        assert not record.guards_kept, "guards kept, but provably not needed"
    elif program.claim == "not_unguarded":
        # Rows of zeros that are not written yet give nothing, whatever weights they meet.
        zeros = ", 0.0, dtype=torch.float64)" in program.source
        assert not record.batched or record.guards_kept or zeros, "guards dropped from a program that sees the future"
    elif program.claim == "declined":
        parallel = bool(record.recurrences)
        assert not record.batched or parallel, "batched, but no guard can make that right"


@pytest.mark.deep(every=2)
@pytest.mark.parametrize("kind", CLAIMS)
@few(7)
@given(data=st.data())
def test_compiled_program_equals_its_loop(kind, data):
    program = data.draw(step_programs(kind))
    nested = data.draw(st.sampled_from(["eager"] * 4 + ["aot_eager"]))
    check(program, nested)
