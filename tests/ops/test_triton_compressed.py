"""The Triton kernels of compressed_attention, in processes of their own; see triton_cases.py."""

from __future__ import annotations

from tests.ops.triton_cases import needs_cuda, needs_triton, run


@needs_triton
def test_values_and_gradients_in_the_interpreter(pytestconfig):
    run("cpu", "compressed", pytestconfig)


@needs_triton
@needs_cuda
def test_values_and_gradients_on_a_gpu(pytestconfig):
    run("cuda", "compressed", pytestconfig)


@needs_triton
def test_kernels_compile_without_spilling_registers(pytestconfig):
    run("compile", "compressed", pytestconfig)
