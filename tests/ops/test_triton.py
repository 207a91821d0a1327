"""The kernels registered for CUDA, all of them in one process for each kind of test; see triton_cases.py."""

from __future__ import annotations

import pytest

from tests.ops.triton_cases import needs_cuda, needs_triton, run


@pytest.mark.deep
@needs_triton
def test_values_and_gradients_in_the_interpreter(pytestconfig):
    run("cpu", pytestconfig)


@needs_triton
@needs_cuda
def test_values_and_gradients_on_a_gpu(pytestconfig):
    run("cuda", pytestconfig)


@pytest.mark.deep
@needs_triton
def test_kernels_compile_without_spilling_registers(pytestconfig):
    run("compile", pytestconfig)
