"""Hypothesis strategies for the attention operators, and the judge of their results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.dispatch import KERNELS, Kernel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kernels(operator: str, dtype: torch.dtype | None = None) -> list[Kernel]:
    """The registered kernels that run on the CPU and take a dtype, if one is given, as parameters of a test.

    Where there is no matrix unit to leave alone, the one that does so is the other one again.
    """
    found = [kernel for kernel in KERNELS[operator].values() if kernel.device in (None, "cpu")]
    found = [kernel for kernel in found if kernel.name != "vectors" or cpp.has_matrix_unit()]
    return [pytest.param(kernel, id=kernel.name) for kernel in found if dtype is None or dtype in kernel.dtypes]


def reference(operator: str) -> Callable[..., tuple[Tensor, ...]]:
    return importlib.import_module(f"nsa_compile.ops.{operator}.reference").forward


@dataclass(frozen=True)
class Problem:
    """Shapes and contents of q, k, v and the gradients of the results; `keys` is T, or N of the compressed branch."""

    B: int
    S: int
    keys: int
    G: int
    h: int
    D: int
    Dv: int
    contents: str
    layout: str
    dtype: torch.dtype
    seed: int
    through_lse: bool = False  # the log-sum-exp has a gradient, too

    @property
    def scale(self) -> float:
        return self.D**-0.5

    def taken_by(self, kernel: Kernel) -> Problem:
        """This problem in its dtype, or, if the kernel does not take that, in one that it takes."""
        return self if self.dtype in kernel.dtypes else replace(self, dtype=kernel.dtypes[0])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and grad_out in `dtype`, laid out as `layout` says."""
        rng = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        q = normal(self.B, self.S, self.G * self.h, self.D)
        k = normal(self.B, self.keys, self.G, self.D)
        v = normal(self.B, self.keys, self.G, self.Dv)
        grad = normal(self.B, self.S, self.G * self.h, self.Dv)
        if self.contents == "small integers":
            q, k = q.round().clamp(-1, 1), k.round().clamp(-1, 1)
        elif self.contents == "large":  # softmax saturates
            q, k = q * 8, k * 8
        elif self.contents == "equal keys":
            k = k[:, :1].expand_as(k)
        elif self.contents == "zero queries":
            q = torch.zeros_like(q)
        return tuple(self._lay_out(x.to(self.dtype)) for x in (q, k, v, grad))

    def grad_lse(self) -> Tensor | None:
        """The gradient of the log-sum-exp, if it has one, in the dtype of the computation."""
        if not self.through_lse:
            return None
        rng = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(self.B, self.S, self.G * self.h, 1, generator=rng, dtype=torch.float64)
        return self._lay_out(x.to(torch.promote_types(self.dtype, torch.float32))).squeeze(-1)

    def _lay_out(self, x: Tensor) -> Tensor:
        if self.layout == "permuted":
            return x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        if self.layout == "sliced":  # nothing is contiguous, and what lies between is not a number
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        if self.layout == "expanded" and x.shape[0]:
            return x[:1].expand_as(x)
        return x.contiguous()


@st.composite
def problems(draw, keys: Callable[[int], int] | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Problem:
    """Small and awkward problems; `keys` derives the number of keys from S, otherwise it is drawn."""
    S = draw(st.one_of(st.integers(0, 8), st.integers(9, 150)))
    T = draw(st.one_of(st.just(S), st.integers(0, 180)))
    D = draw(st.sampled_from([1, 4, 5, 16, 80, 192]))
    return Problem(
        B=draw(st.sampled_from([1, 1, 2, 3, 0])),
        S=S,
        keys=T if keys is None else keys(S),
        G=draw(st.sampled_from([1, 2])),
        h=draw(st.sampled_from([1, 2, 3, 4, 16])),
        D=D,
        Dv=draw(st.sampled_from([D, 1, 7, 32])),
        contents=draw(st.sampled_from(["normal", "normal", "small integers", "large", "equal keys", "zero queries"])),
        layout=draw(st.sampled_from(["contiguous", "permuted", "sliced", "expanded"])),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
        through_lse=draw(st.booleans()),
    )


def check(problem: Problem, kernel: Kernel, *parameters: object) -> tuple[Tensor, ...]:
    """Values and gradients of a kernel against the reference in float64; returns the outputs.

    An error may be that of the reference evaluated at the same precision, plus a band of roundings: of the result,
    once, at the precision of the input, and of scores and sums at that of the computation.
    """
    q, k, v, grad = problem.tensors()
    grad_lse = problem.grad_lse()
    before = [x.clone() for x in (q, k, v, grad)]
    exact = _run_reference(kernel.operator, (q, k, v, grad), grad_lse, torch.float64, parameters)
    rounded = _run_reference(kernel.operator, (q, k, v, grad), grad_lse, problem.dtype, parameters)
    out, lse, *rest = kernel.forward(q, k, v, *parameters)
    gradients = kernel.backward(grad, grad_lse, q, k, v, out, lse, *parameters)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, grad), before, strict=True)), "an input was written to"

    computed = torch.promote_types(problem.dtype, torch.float32)
    assert (out.dtype, lse.dtype) == (problem.dtype, computed)
    bands = _bands(problem, (q, k, v, grad), grad_lse, computed)
    for name, result, reference, approximate in zip(bands, (out, lse, *gradients), exact, rounded, strict=True):
        assert result.shape == reference.shape, name
        assert result.is_contiguous(), name
        largest = reference.nan_to_num(0, 0, 0).abs().max().item() if reference.numel() else 0.0
        result_rounding = 2 * torch.finfo(result.dtype).eps * largest
        error, allowed = _error(result, reference), _error(approximate, reference) + bands[name] + result_rounding
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    return out, lse, *rest


def _run_reference(
    operator: str,
    tensors: tuple[Tensor, ...],
    grad_lse: Tensor | None,
    dtype: torch.dtype,
    parameters: tuple[object, ...],
) -> list[Tensor]:
    """out, lse, dq, dk, dv of the reference evaluated in `dtype`, as float64."""
    *inputs, grad = (x.to(dtype).detach().clone() for x in tensors)
    leaves = [x.requires_grad_() for x in inputs]
    out, lse, *_ = reference(operator)(*leaves, *parameters)
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    gradients = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    return [x.detach().double() for x in (out, lse, *gradients)]


def _error(result: Tensor, reference: Tensor) -> float:
    if not reference.numel():
        return 0.0
    difference = torch.where(result == reference, 0.0, result.double() - reference)  # -inf equals -inf
    return difference.abs().max().item()


def _bands(
    problem: Problem, tensors: tuple[Tensor, ...], grad_lse: Tensor | None, computed: torch.dtype
) -> dict[str, float]:
    """Roundings of the computation for each result, from the largest values that enter it."""
    largest_q, largest_k, largest_v, largest_grad, largest_grad_lse = (
        x.double().abs().max().item() if x is not None and x.numel() else 0.0 for x in (*tensors, grad_lse)
    )
    score = problem.scale * largest_q * largest_k * problem.D
    dweight = largest_grad * largest_v * problem.Dv
    queries = problem.S * problem.h
    unit = 4 * torch.finfo(computed).eps * (1 + score)
    # The output that the backward pass reads is rounded to the input's precision, and delta with it.
    dscore = unit * (dweight + largest_grad_lse) + torch.finfo(problem.dtype).eps * dweight
    return {
        "out": unit * largest_v,
        "lse": unit,
        "dq": dscore * largest_k * problem.scale,
        "dk": dscore * largest_q * problem.scale * queries**0.5,
        "dv": unit * largest_grad * queries**0.5,
    }


def peak_memory(reset: bool = False) -> int:
    """The most memory that this process has had, or has had since a reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
