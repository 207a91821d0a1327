"""Inductor's C++ kernels in less time (torch 2.13): many in one translation unit, and indices simplified by less.

Inductor calls the compiler once for each kernel. Nine tenths of what that takes is the start: the precompiled header,
the templates of vectors, the linker. Here the kernels of one program share it. They are compiled with the same flags,
and are the same functions.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

log = logging.getLogger("nsa_compile")

# Of a unit's time, its start takes as much as ten kernels; several units can be compiled at the same time.
KERNELS_IN_A_UNIT = 16

_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
_METHOD = '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}},'


class Kernel(NamedTuple):
    """A kernel as Inductor wrote it: the C++ types of its arguments, and its source."""

    argument_types: Sequence[str]
    source: str


class Batch:
    """The kernels of one program; the first that is asked for has all of them compiled."""

    def __init__(self) -> None:
        self._kernels: list[Kernel] = []

    def add(self, kernel: Kernel) -> Callable[[], Any]:
        """Take a kernel, and return what returns the compiled function."""
        self._kernels.append(kernel)
        index = len(self._kernels) - 1
        return lambda: self._compiled[index]

    @functools.cached_property
    def _compiled(self) -> list[Any]:
        number = -(-len(self._kernels) // KERNELS_IN_A_UNIT)
        size = -(-len(self._kernels) // number)
        units = [self._kernels[i : i + size] for i in range(0, len(self._kernels), size)]
        loading = [_start(unit) for unit in units]
        return [kernel for unit, load in zip(units, loading, strict=True) for kernel in _load(unit, load)]


@functools.cache
def compile_kernels_together() -> None:
    """Let the programs that Inductor makes in this process compile their C++ kernels together."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    one, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        kernel = Kernel(argtypes, source_code)
        if not _can_share(kernel):
            return one(self, argtypes, source_code)
        batch = self.__dict__.setdefault("nsa_compile_batch", Batch())
        return LambdaFuture(batch.add(kernel))

    def wait_for_kernels(self: Any, scope: dict[str, Any]) -> None:
        # With one thread, Inductor does not wait: it has compiled everything by now.
        scope.update({name: value.result() for name, value in scope.items() if isinstance(value, LambdaFuture)})
        self.__dict__.pop("nsa_compile_batch", None)
        wait(self, scope)

    AsyncCompile.cpp_pybinding = cpp_pybinding
    AsyncCompile.wait = wait_for_kernels


def _can_share(kernel: Kernel) -> bool:
    """Whether a source is one function, without headers that others might see otherwise."""
    source = kernel.source
    return source.count("#include") == source.count(_INCLUDE) == 1 and len(_ENTRY.findall(source)) == 1


def _start(unit: Sequence[Kernel]) -> Callable[[], Any]:
    """Begin to compile some kernels; what is returned waits for the module and loads it."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    return CppPythonBindingsCodeCache.load_async(source_of(unit), submit_fn=submit)


def _load(unit: Sequence[Kernel], load: Callable[[], Any]) -> list[Any]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.exc import CppCompileError

    try:
        module = load()
    except CppCompileError as error:
        if len(unit) == 1:
            raise
        log.warning("%d kernels cannot be compiled together, so each is by itself: %s", len(unit), error)
        return [CppPythonBindingsCodeCache.load_pybinding(*kernel) for kernel in unit]
    return [getattr(module, f"kernel_{i}") for i in range(len(unit))]


def source_of(unit: Sequence[Kernel]) -> str:
    """One source with all kernels of a unit, as `kernel_0`, `kernel_1`, ..., and their Python bindings."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    # What comes before the function that Python calls, this function, and the module that lists it.
    before, found, rest = Bindings.suffix_template.partition("static PyObject* {entry_func}_py")
    function, listed, module = (found + rest).partition("static PyMethodDef")
    methods = ",\n    ".join(f'{{"kernel_{i}", kernel_{i}_py, METH_VARARGS, ""}}' for i in range(len(unit)))
    parts = [_INCLUDE]
    for i, kernel in enumerate(unit):
        body = _ENTRY.sub(f"static void kernel_{i}(", kernel.source.replace(_INCLUDE, ""))
        parts.append(f"namespace of_{i} {{\n{body}\n}}\nusing of_{i}::kernel_{i};\n")
    parts.append(before.format(entry_func="kernel", extra_parse_arg=""))
    for i, kernel in enumerate(unit):
        arguments = ", ".join(
            f"parse_arg<{type_.replace('const ', '')}>(args, {n})" for n, type_ in enumerate(kernel.argument_types)
        )
        call = f"kernel_{i}({arguments}); Py_RETURN_NONE;"
        parts.append(
            function.format(entry_func=f"kernel_{i}", arg_len=len(kernel.argument_types), call_entry_func=call)
        )
    parts.append((listed + module).replace(_METHOD, "{methods},").format(entry_func="kernel", methods=methods))
    return "".join(parts)


@functools.cache
def simplify_plain_indices_by_expanding() -> None:
    """Let Inductor find the strides of an index that is a polynomial by multiplying it out.

    It calls `sympy.simplify`, which tries all that it knows: a quarter of the time in which a recurrent layer compiles.
    """
    import sympy
    from torch._inductor import sizevars

    functions = (sympy.core.function.Application, sympy.core.relational.Relational)

    class Sympy(ModuleType):
        """sympy, to that module."""

        def __getattr__(self, name: str) -> Any:
            return getattr(sympy, name)

        @staticmethod
        def simplify(expression: Any) -> Any:
            plain = isinstance(expression, sympy.Expr) and not expression.has(*functions)
            return sympy.expand(expression) if plain else sympy.simplify(expression)

    sizevars.sympy = Sympy("sympy")  # pyrefly: ignore[bad-assignment]
