"""The kernels registered for CUDA, in processes of their own; see triton_cases.py."""

from __future__ import annotations

from nsa_compile.ops.dispatch import Kernel
from tests.ops.triton_cases import needs_cuda, needs_triton, on_cuda, run


@needs_triton
@on_cuda
def test_values_and_gradients_in_the_interpreter(kernel: Kernel, pytestconfig):
    run("cpu", kernel, pytestconfig)


@needs_triton
@needs_cuda
@on_cuda
def test_values_and_gradients_on_a_gpu(kernel: Kernel, pytestconfig):
    run("cuda", kernel, pytestconfig)


@needs_triton
@on_cuda
def test_kernels_compile_without_spilling_registers(kernel: Kernel, pytestconfig):
    run("compile", kernel, pytestconfig)
