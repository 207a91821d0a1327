"""Which registered kernel computes an operator, and what is said where it is not the one for the device."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import cpu_vec_isa

import nsa_compile.ops.scored  # noqa: F401  # which registers its kernels
from nsa_compile import ops
from nsa_compile.ops import cpp, dispatch
from nsa_compile.ops.dispatch import KERNELS, Kernel, register_kernel
from tests.ops.problems import kernels
from tests.ops.test_operators import OPERATORS, inputs, operator, with_gradients


@pytest.fixture
def registry(monkeypatch):
    """What a test registers, or patches in the code of kernels, is gone after it, and so is what was chosen."""
    for name, registered in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, dict(registered))
    dispatch._best.cache_clear()
    yield monkeypatch
    dispatch._best.cache_clear()


def chosen_on(device: str, name: str, dtype: torch.dtype) -> Kernel:
    with torch._subclasses.FakeTensorMode():
        return dispatch.choose_kernel(name, torch.empty(1, device=device, dtype=dtype))


def test_fallback_says_why_once(registry, caplog):
    def broken(operator):
        raise RuntimeError("no C++ compiler")

    registry.setattr(cpp, "load", broken)
    arguments = inputs()["window"]
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        for _ in range(2):
            out = operator("window")(*arguments)[0]
    assert [record.message for record in caplog.records] == [
        "window attention on cpu uses the slow portable implementation: cpu cannot be used (no C++ compiler)"
    ]
    torch.testing.assert_close(out, KERNELS["window"]["portable"].forward(*arguments)[0])


def test_generated_kernels_want_vectors(registry, caplog):
    registry.setattr(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa)
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        assert chosen_on("cpu", "scored", torch.float32) == KERNELS["scored"]["portable"]
    assert [record.message for record in caplog.records] == [
        "scored attention on cpu uses the slow portable implementation: cpu cannot be used (torch knows no vectors of "
        "this processor)"
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_dtypes_without_triton_kernels_are_computed_portably_and_said_so(name, registry, caplog):
    """Decided by the dtype alone: no GPU is asked."""
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        chosen = [chosen_on("cuda", name, torch.float64) for _ in range(2)]
    assert chosen == [KERNELS[name]["portable"]] * 2
    assert [record.message for record in caplog.records] == [
        f"{name} attention on cuda uses the slow portable implementation: there are no Triton kernels for torch.float64"
    ]


def test_a_device_without_a_kernel_of_its_own_gets_the_portable_one_and_is_said_so(registry, caplog):
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        assert chosen_on("meta", "window", torch.float32).name == "portable"
    assert [record.message for record in caplog.records] == [
        "window attention on meta uses the slow portable implementation: no native one exists"
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_dispatch_takes_triton_on_cuda(name, registry):
    code = pytest.importorskip(f"nsa_compile.ops.{name}.triton", reason="triton is not installed")
    registry.setattr(code, "prepare", lambda: None)  # it launches a kernel
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        chosen = chosen_on("cuda", name, dtype)
        assert (chosen.name, chosen.code) == ("triton", code)


def test_dispatch_takes_cpp_on_the_cpu():
    for name in OPERATORS:
        chosen = dispatch.choose_kernel(name, torch.zeros(1))
        assert (chosen.name, chosen.code) == ("cpu", sys.modules[f"nsa_compile.ops.{name}.cpu"])


@pytest.mark.deep
def test_kernels_are_registered_without_loading_their_code():
    script = (
        "import sys, nsa_compile.ops\n"
        "loaded = [name for name in sys.modules if name.startswith('nsa_compile.ops.')]\n"
        "assert not [name for name in loaded if name.rpartition('.')[2] in ('cpu', 'triton', 'portable')], loaded\n"
        "assert 'nsa_compile.ops.triton_common' not in loaded\n"
        "assert not nsa_compile.ops.cpp._load_all.cache_info().currsize\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def toy(name: str = "toy", **changes) -> Kernel:
    """Window attention by the portable code with every output doubled."""
    portable = importlib.import_module("nsa_compile.ops.window.portable")

    def forward(*arguments):
        out, lse = portable.forward(*arguments)
        return 2 * out, lse

    def backward(grad, grad_lse, q, k, v, out, *rest):
        return portable.backward(2 * grad, grad_lse, q, k, v, out / 2, *rest)

    code = SimpleNamespace(forward=forward, backward=backward)
    settings = {"device": "cpu", "dtypes": (torch.float64,), "priority": 2} | changes
    prepare = settings.pop("prepare", None)
    if prepare is not None:
        code.prepare = prepare
    return Kernel("window", name, "a toy", lambda: code, **settings)


def test_a_kernel_of_higher_priority_is_dispatched(registry, caplog):
    arguments = with_gradients(inputs()["window"])
    expected = operator("window")(*arguments)[0]
    gradient = torch.autograd.grad(expected.sum(), arguments[0])[0]
    register_kernel(toy())
    with caplog.at_level(logging.WARNING, logger="nsa_compile"), dispatch.observe() as uses:
        out = operator("window")(*arguments)[0]
        torch.testing.assert_close(out, 2 * expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), arguments[0])[0], 2 * gradient)
        float32 = operator("window")(*inputs(dtype=torch.float32)["window"])[0]  # which it does not take
    torch.testing.assert_close(float32, expected.float())
    assert [use.implementation for use in uses] == ["a toy", "a toy", KERNELS["window"]["cpu"].describe(torch.float32)]
    assert [use.reason for use in uses] == [None] * 3
    assert caplog.records == []
    assert [kernel.id for kernel in kernels("window", torch.float64)][-1] == "toy", "the tests would run it"


@pytest.mark.parametrize("priority", [0, -1, 1])
def test_a_kernel_that_does_not_outrank_the_one_for_the_device_is_not_dispatched(registry, priority):
    register_kernel(toy(priority=priority))
    assert dispatch.choose_kernel("window", torch.zeros(1, dtype=torch.float64)).name == "cpu"


def test_a_kernel_that_cannot_be_prepared_is_passed_over_and_said_so(registry, caplog):
    def prepare():
        raise OSError("no such toy\nand more")

    register_kernel(toy(prepare=prepare))
    arguments = inputs()["window"]
    with caplog.at_level(logging.WARNING, logger="nsa_compile"), dispatch.observe() as uses:
        out = operator("window")(*arguments)[0]
    torch.testing.assert_close(out, KERNELS["window"]["cpu"].forward(*arguments)[0])
    reason = "toy cannot be used (no such toy)"
    assert [record.message for record in caplog.records] == [
        f"window attention on cpu uses the cpu implementation: {reason}"
    ]
    assert [use.reason for use in uses] == [reason]


def test_where_no_kernel_runs_the_call_fails(registry):
    for name in ("cpu", "vectors", "portable"):
        del KERNELS["window"][name]
    with pytest.raises(RuntimeError, match=r"^no kernel of window attention runs for torch\.float32 on cpu: no native"):
        dispatch.choose_kernel("window", torch.zeros(1))


def test_names_of_kernels(registry):
    with pytest.raises(ValueError, match="window attention has a kernel 'cpu'; take another name"):
        register_kernel(toy("cpu"))
    with (
        pytest.raises(ValueError, match=r"implementation is 'toy'; it must be one of cpu, vectors, triton, portable$"),
        ops.force_implementation("toy"),
    ):
        pass
    register_kernel(toy())
    with ops.force_implementation("toy"):
        assert dispatch.choose_kernel("window", torch.zeros(1)).name == "toy"
        with pytest.raises(ValueError, match="selected attention has no implementation 'toy'; it has cpu, vec"):
            dispatch.choose_kernel("selected", torch.zeros(1))
