"""Kernels compiled together are those that Inductor compiles one by one."""

from __future__ import annotations

import logging
import random

import pytest
import sympy
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

from nsa_compile import inductor_files, inductor_kernels
from nsa_compile.inductor_kernels import Batch, Kernel, compile_kernels_together

TYPES = ["const double*", "double*", "const int64_t"]


def kernel(body: str, before: str = "", types: list[str] = TYPES) -> Kernel:
    """A kernel in the form in which Inductor writes them: `out[i] = body` for each of `n` numbers `x`."""
    return Kernel(types, f'''#include <torch/csrc/inductor/cpp_prefix.h>
{before}extern "C"  void  kernel(const double* in, double* out, const int64_t n)
{{
    for (int64_t i = 0; i < n; ++i) {{ const double x = in[i]; out[i] = {body}; }}
}}
''')  # fmt: skip


HALF = "template <typename T> inline T changed(T x) { return x / 2; }\n"
TWICE = "template <typename T> inline T changed(T x) { return x * 2; }\n"


@pytest.fixture(autouse=True)
def _prepared():
    inductor_files.prepare()


@pytest.fixture
def units(monkeypatch):
    """The sources that are compiled."""
    sources = []
    original = CppPythonBindingsCodeCache.load_async.__func__

    def load_async(cls, source, *args, **kwargs):
        sources.append(source)
        return original(cls, source, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", classmethod(load_async))
    return sources


def results(*loaded):
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    outs = [torch.zeros_like(x) for _ in loaded]
    for function, out in zip(loaded, outs, strict=True):
        function()(x, out, 3)
    return [out.tolist() for out in outs]


def test_each_kernel_is_its_own_function(units):
    """Also where helpers of the same name stand beside them, and where one is there twice."""
    batch = Batch()
    kernels = [kernel("changed(x)", HALF), kernel("changed(x)", TWICE), kernel("-x"), kernel("-x")]
    loaded = [batch.add(k) for k in kernels]
    assert results(*loaded) == [[0.5, -1.0, 1.5], [2.0, -4.0, 6.0], [-1.0, 2.0, -3.0], [-1.0, 2.0, -3.0]]
    assert len(units) == 1


@pytest.mark.deep
def test_many_kernels_are_several_units_of_one_size(units, monkeypatch):
    monkeypatch.setattr(inductor_kernels, "KERNELS_IN_A_UNIT", 2)
    batch = Batch()
    loaded = [batch.add(kernel(f"x + {i}")) for i in range(5)]
    assert results(*loaded) == [[1.0 + i, -2.0 + i, 3.0 + i] for i in range(5)]
    assert [source.count("METH_VARARGS") for source in units] == [2, 2, 1]


def test_wrong_arguments_are_an_error_as_from_a_kernel_by_itself():
    batch = Batch()
    function = batch.add(kernel("x"))()
    with pytest.raises(RuntimeError, match="requires 3 args"):
        function(torch.zeros(1))


@pytest.mark.deep
def test_kernels_that_do_not_go_together_are_compiled_one_by_one(units, caplog):
    caplog.set_level(logging.WARNING, "nsa_compile")
    batch = Batch()
    kernels = [kernel("x * factor", "#define factor 3\n"), kernel("[&] { int factor = 2; return x * factor; }()")]
    loaded = [batch.add(k) for k in kernels]
    assert results(*loaded) == [[3.0, -6.0, 9.0], [2.0, -4.0, 6.0]]
    assert len(units) == 3
    assert "2 kernels cannot be compiled together, so each is by itself" in caplog.text


def test_a_kernel_that_cannot_be_compiled_is_inductors_error():
    batch = Batch()
    loaded = batch.add(kernel("unheard_of(x)"))
    with pytest.raises(CppCompileError, match="unheard_of"):
        loaded()


@pytest.mark.deep(but=["2"])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_inductor_generates_gets_its_functions(threads, units):
    """A source with another header is left to Inductor, which may see that header otherwise."""
    compile_kernels_together()
    with config.patch(compile_threads=threads):
        compiling = AsyncCompile()
        alone = kernel("std::abs(x)", "#include <cstdlib>\n")
        scope = {"a": compiling.cpp_pybinding(*kernel("x * x")), "b": compiling.cpp_pybinding(*kernel("x - 1"))}
        scope["c"] = compiling.cpp_pybinding(*alone)
        compiling.wait(scope)
    assert results(*(lambda name=name: scope[name] for name in "abc")) == [[1, 4, 9], [0, -3, 2], [1, 2, 3]]
    assert sorted(source.count("METH_VARARGS") for source in units) == [1, 2]


@pytest.mark.deep
def test_a_program_of_several_kernels_is_one_unit(units):
    compile_kernels_together()
    torch._dynamo.reset()

    def program(x, w):
        for i in range(3):
            x = torch.tanh(x @ w) + i
        return x

    x, w = torch.randn(6, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    with config.patch(force_disable_caches=True):
        torch.testing.assert_close(torch.compile(program, fullgraph=True)(x, w), program(x, w))
    assert [source.count("METH_VARARGS") for source in units] == [3]


@pytest.mark.deep
def test_strides_of_indices_are_those_that_sympy_simplifies():
    from torch._inductor import sizevars
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    x, y, z = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "xyz")
    rng = random.Random(0)

    def number():
        return rng.choice([1, 2, 4, 8, 12, 16, 64, 127])

    def index():
        terms = [number() * v * rng.choice([1, 1, y]) for v in (x, y, z)]
        if rng.random() < 0.6:
            inner = number() * x + rng.choice([0, number() * y])
            terms.append(number() * rng.choice([FloorDiv(inner, number()), ModularIndexing(inner, number(), number())]))
        return sum(rng.sample(terms, rng.randint(1, len(terms)))) * (rng.choice([1, 2]) * z + 3)

    drawn = [(index(), rng.choice([x, y, z]), rng.choice([None, 4, 16])) for _ in range(150)]
    found = []
    for module in (sympy, None):
        if module is None:
            inductor_kernels.simplify_plain_indices_by_expanding()
        else:
            sizevars.sympy = module
            inductor_kernels.simplify_plain_indices_by_expanding.cache_clear()
        for f in (sizevars.stride_at, sizevars.stride_at_vec_range, sizevars.simplify_index_in_vec_range):
            f.cache_clear()
        found.append([sizevars.stride_at_vec_range(*of) for of in drawn])
    assert all(sympy.expand(a - b) == 0 for a, b in zip(*found, strict=True))
