"""Each of torch's own operators in a step, by the samples that torch tests it with: deep search alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile.capture.refusals import ScanNotCompiled, ScanRefused

PARTS = 32
SAMPLES = 12  # of an operator, spread over those that torch has
STEPS = 3
LARGEST = 3000  # elements
WITHOUT_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# torch's table has a function of Python under this name, which takes views of its operand by strides.
STRIDED = {"max_pool2d_with_indices_backward"}


def samples(part: int) -> Iterator[tuple[str, Any, Any]]:
    """Operators by name, and the arguments of one call."""
    table = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    known = [op for op in table.op_db if torch.float64 in op.dtypes and op.name not in WITHOUT_VALUES | STRIDED]
    for op in known[part::PARTS]:
        if "sparse" in op.name:
            continue
        every = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
        for i in range(0, len(every), -(-len(every) // SAMPLES) or 1):
            sample = every[i]
            name = f"{op.name} {op.variant_test_name} {i}"
            yield name, op.op, (sample.input, sample.args, sample.kwargs)


def variant(x: Tensor, step: int) -> Tensor:
    """The operand at a step: as given, rounded so that elements are equal, and of few values around zero."""
    if not x.dtype.is_floating_point or step == 0:
        return x.detach().clone()
    return x.detach().round() if step == 1 else (x.detach() / 2).round().clamp(-1, 1)


def outcome(function: Any, rows: list[Tensor]) -> list[Any]:
    """What a function returns, and the gradients of what it is given, unless it makes infinities."""
    leaves = [x.clone().requires_grad_(x.dtype.is_floating_point) for x in rows]
    outputs = function(*leaves)
    graded = [y for y in outputs if y.requires_grad]
    if not graded or not all(bool(y.isfinite().all()) for y in graded):
        return list(outputs)
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=rng, dtype=torch.float64).to(y.dtype) for y in graded]
    gradients = torch.autograd.grad(graded, [x for x in leaves if x.requires_grad], weights, allow_unused=True)
    wanted = (x for x in leaves if x.requires_grad)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True))]


def difference(operator: Any, given: Any) -> str:
    """How the compiled loop over an operator differs from the loop as written; empty where it does not."""
    leaves, structure = pytree.tree_flatten(given)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    if not places or any(leaves[i].numel() > LARGEST or leaves[i].layout != torch.strided for i in places):
        return ""
    rows = [torch.stack([variant(leaves[i], step) for step in range(STEPS)]) for i in places]

    def run(*xs: Tensor) -> Any:
        def step(carry: Tensor, row: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            filled = list(leaves)
            for i, x in zip(places, row, strict=True):
                filled[i] = x
            first, args, kwargs = pytree.tree_unflatten(filled, structure)
            found = pytree.tree_leaves(operator(first, *args, **kwargs))
            return carry, tuple(y for y in found if isinstance(y, Tensor))

        return nsa_compile.scan(step, torch.zeros(1), xs)[1]

    try:
        torch.manual_seed(0)
        expected = outcome(run, rows)
    except Exception:  # it wants its operands as they were
        return ""
    torch._dynamo.reset()
    try:
        torch.manual_seed(0)
        found = outcome(nsa_compile.compile(run, nested="eager", cache=False), rows)
    except (ScanNotCompiled, ScanRefused) as refusal:
        return "" if str(refusal) else "no reason"
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_an_operator_in_a_step_is_what_it_is_in_the_loop(part):
    pytest.importorskip("expecttest")
    wrong = [(name, found) for name, operator, given in samples(part) if (found := difference(operator, given))]
    assert not wrong, "\n".join(itertools.chain.from_iterable(wrong))
