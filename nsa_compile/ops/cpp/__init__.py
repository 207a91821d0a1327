"""Compiles the C++ kernels at first use and calls them.

Inductor's builder does the work: its compiler, its flags with the vector width of the machine. They switch off what
would change the meaning of floating-point code, contraction included; the kernels ask for fused multiply-adds where
they want them. A kernel is compiled once a machine, not once a process: it is kept beside what Inductor keeps, under a
digest of all that it was made from, and sealed with one of its own (`compiler_cache.py`, `files.py`).

Where the machine has a matrix unit (AMX), products of float32 and below run on it, as exactly as on its vectors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import re
import tempfile
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import filelock
import torch
from torch import Tensor

from nsa_compile import inductor_files
from nsa_compile.compiler_cache import errors_named, machine_name
from nsa_compile.files import make_private, read_sealed, write_sealed
from nsa_compile.ops.dispatch import KERNELS, Kernel, register_kernel
from nsa_compile.ops.tiles import compute_dtype

if TYPE_CHECKING:
    from torch._inductor.cpp_builder import CppBuilder

__all__ = [
    "DTYPES", "Sizes", "View", "backward", "call", "check_compiler", "check_vectors", "empty", "forward",
    "has_matrix_unit", "kernel_directory", "load", "load_generated", "register_kernels", "register_step_kernel",
    "sizes_of", "uses_matrix_unit", "works",
]  # fmt: skip

logger = logging.getLogger("nsa_compile")

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.bool: 6,
}
_HERE = Path(__file__).parent
_LARGE_PAGE = 2**21
# Smaller blocks are kept by the C library when they are freed, and faulted in before (glibc's largest mmap threshold).
_FRESH_BYTES = 2**25
_LONGEST_BUILD_S = 300.0  # of a kernel, on a busy machine
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


class Sizes(ctypes.Structure):
    """Mirror of `tensor.h`."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("batch", "queries", "keys", "query_heads", "groups", "key_dim", "value_dim")
    )  # fmt: skip


_vectors_only: list[bool] = []


@cache
def has_matrix_unit() -> bool:
    """Whether the processor has a matrix unit (AMX), and the system lets this process use it."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def uses_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether a kernel called now for inputs of this dtype multiplies on the matrix unit."""
    return has_matrix_unit() and not _vectors_only and dtype != torch.float64


@contextmanager
def _on_vectors() -> Iterator[None]:
    """Inside this context the kernels leave the matrix unit alone, as on machines that have none."""
    _vectors_only.append(True)
    try:
        yield
    finally:
        _vectors_only.pop()


@dataclass(frozen=True)
class _CppKernel(Kernel):
    alone: bool = False  # its library is loaded by itself

    def describe(self, dtype: torch.dtype) -> str:
        return f"{self.words}, {'matrix unit' if uses_matrix_unit(dtype) else 'vectors'}"


def register_kernels(operator: str, *, generated: bool = False) -> None:
    """Register what `<operator>/cpu.py` calls: with all that the processor has, and without its matrix unit.

    Those are operators over whole sequences; `generated` ones have a kernel for each program.
    """

    def load_code() -> Any:
        return import_module(f"nsa_compile.ops.{operator}.cpu")

    def load_vectors() -> SimpleNamespace:
        code, on_vectors = load_code(), _on_vectors()
        functions = [name for name in code.__all__ if name != "prepare"]
        return SimpleNamespace(prepare=code.prepare, **{name: on_vectors(getattr(code, name)) for name in functions})

    register_kernel(_CppKernel(operator, "cpu", "C++", load_code, device="cpu", priority=1, alone=generated))
    register_kernel(Kernel(operator, "vectors", "C++, vectors", load_vectors, device="cpu", priority=-1))


def register_step_kernel(operator: str) -> None:
    """Register what `<operator>/cpu.py` calls, an operator of single steps, which needs none of the others."""
    load_code = partial(import_module, f"nsa_compile.ops.{operator}.cpu")
    register_kernel(_CppKernel(operator, "cpu", "C++", load_code, device="cpu", priority=1, alone=True))


@cache
def load(operator: str) -> ctypes.CDLL:
    """The compiled kernels of an operator. Raises whatever Inductor raises where there is no working compiler."""
    kernel = KERNELS[operator]["cpu"]
    if _of_sequences(kernel):
        return _load_all()[operator]
    return _obtain(operator, kernel_directory(inductor_files.prepare()))


def load_generated(operator: str, part: str, text: str) -> ctypes.CDLL:
    """The library of `<operator>/<part>.cpp` with a text in place of its line `// PROGRAM`."""
    source = _source(operator, f"{part}.cpp").replace("// PROGRAM\n", text)
    return _obtain(f"{operator}-{part}", kernel_directory(inductor_files.prepare()), source)


def check_compiler() -> None:
    """Raises whatever Inductor raises where there is no compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


def check_vectors() -> None:
    """Raises where torch knows no vectors of the processor, whose functions a generated kernel calls."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    if not pick_vec_isa():
        raise RuntimeError("torch knows no vectors of this processor")


@cache
def _load_all() -> dict[str, ctypes.CDLL]:
    """All operators over sequences: a program that uses one uses the others, and three in parallel compile faster."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    kept = kernel_directory(inductor_files.prepare())
    pick_vec_isa()  # runs a compiler itself, and should do so once
    operators = [name for name, kernels in KERNELS.items() if _of_sequences(kernels.get("cpu"))]
    with ThreadPoolExecutor(len(operators)) as pool:
        # Inductor's configuration lives in the context of the calling thread.
        loading = [pool.submit(copy_context().run, _obtain, operator, kept) for operator in operators]
        return {operator: library.result() for operator, library in zip(operators, loading, strict=True)}


def _of_sequences(kernel: Kernel | None) -> bool:
    return isinstance(kernel, _CppKernel) and not kernel.alone


@cache
def works(operator: str, without: str) -> bool:
    """Whether the kernel of an operator can be compiled; if not, the log says what happens `without` it."""
    try:
        KERNELS[operator]["cpu"].prepare()
    # A compiler that is absent or broken surfaces as almost any exception.
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        logger.warning("%s, slower: their kernel cannot be used (%s)", without, why)
        return False
    return True


def kernel_directory(compiled: Path) -> Path:
    """Where kernels are kept in a directory for compiled programs."""
    return compiled / "nsa_compile" / "kernels"


def _obtain(name: str, directory: Path, source: str | None = None) -> ctypes.CDLL:
    """The library of a source, or of the operator of that name, as it was kept, or compiled now and kept."""
    source = _source(name) if source is None else source
    made_from = [source, _builder("source", "folder").get_command_line(), torch.__version__, machine_name()]
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()
    path = directory / f"{name}-{digest[:32]}.so"
    if (library := _open(path)) is not None:
        return library
    with _alone(path):
        # Another process may have compiled it meanwhile.
        return _open(path) or _build(source, path)


def _open(path: Path) -> ctypes.CDLL | None:
    """A kept library. None where there is none; one that cannot be used is deleted."""
    try:
        read_sealed(path)
        return ctypes.CDLL(str(path))  # what is after the end of a library, such as a seal, is not loaded
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("kernel '%s' cannot be used (%s); it is compiled again", path, error)
        with suppress(OSError):
            path.unlink()
        return None


def _build(source: str, path: Path) -> ctypes.CDLL:
    """Compile a library and keep it; it serves this process also where it cannot be kept."""
    with tempfile.TemporaryDirectory(prefix="nsa-compile-") as folder:
        (Path(folder) / "kernel.cpp").write_text(source, encoding="utf-8")
        builder = _builder(f"{folder}/kernel.cpp", folder, header=inductor_files.kept_header())
        with errors_named():
            builder.build()
        built = Path(builder.get_target_file_path())
        try:
            write_sealed(path, built.read_bytes())
        except OSError as error:
            logger.warning("kernel '%s' cannot be kept (%s); it will be compiled again", path, error)
            return ctypes.CDLL(str(built))  # it stays in memory when the file is gone
    return ctypes.CDLL(str(path))


def _builder(source: str, folder: str, *, header: str | None = None) -> CppBuilder:
    """Inductor's builder of a library, with the flags of its own kernels."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu")
    options.precompiled_header = header
    return CppBuilder(name="kernel", sources=source, BuildOption=options, output_dir=folder)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While one process compiles a kernel, let others wait for it, but not for ever, and not where they cannot lock.

    Two that compile the same do no harm.
    """
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=_LONGEST_BUILD_S)
    with suppress(filelock.Timeout, OSError):
        make_private(path.parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@cache
def _source(operator: str, name: str = "cpu.cpp") -> str:
    """The source of an operator with the headers of this directory put in: the key of the cache must cover them."""
    included: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        name = match[1]
        if name in included:
            return ""
        included.add(name)
        return expand((_HERE / name).read_text(encoding="utf-8"))

    def expand(text: str) -> str:
        return re.sub(r'^#include "(\w+\.h)"$', put_in, text.replace("#pragma once\n", ""), flags=re.MULTILINE)

    return expand((_HERE.parent / operator / name).read_text(encoding="utf-8"))


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor of the device and, unless told otherwise, the dtype of another one.

    A large one is fresh memory each time, and its first use a page fault for each page: it asks for large pages.
    """
    result = like.new_empty(shape, dtype=dtype)
    if result.nbytes >= _FRESH_BYTES and _madvise is not None:
        first = -(-result.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
        last = (result.data_ptr() + result.nbytes) // _LARGE_PAGE * _LARGE_PAGE
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)  # a wish: it may fail
    return result


def forward(
    operator: str, inputs: tuple[Tensor, ...], *parameters: object, indices: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Output and log-sum-exp for `inputs`, which are q, k, v and what else the kernel reads; `indices` are written."""
    q, k, v = inputs[:3]
    out, lse = empty(q, *q.shape[:3], v.shape[3]), empty(q, *q.shape[:3], dtype=compute_dtype(q))
    results = (out, lse) if indices is None else (out, lse, indices)
    call(operator, "forward", sizes_of(q, k, v), (*inputs, *results), *parameters)
    return results


def backward(operator: str, inputs: tuple[Any, ...], *parameters: object) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv for `inputs`, which are grad_out, grad_lse (or None), q, k, v, out, lse and what else is read."""
    _, _, q, k, v, *_ = inputs
    dq, dk, dv = empty(q, *q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    call(operator, "backward", sizes_of(q, k, v), (*inputs, dq, dk, dv), *parameters)
    return dq, dk, dv


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    batch, queries, query_heads, key_dim = q.shape
    return Sizes(batch, queries, k.shape[1], query_heads, k.shape[2], key_dim, v.shape[3])


def call(
    operator: str,
    direction: str,
    sizes: Sizes,
    tensors: tuple[Tensor | View | None, ...],
    *parameters: object,
    library: ctypes.CDLL | None = None,
) -> None:
    """`<operator>_attention_<direction>(sizes, tensors, parameters…, number of threads, use of the matrix unit)`.

    The first tensor is there; of the others one that is not has no data. Parameters are ints, floats and sequences of
    ints. The library is that of the operator, unless one is given. Raises MemoryError where working memory cannot be
    allocated.
    """
    if sizes.batch == 0 or sizes.queries == 0:
        return
    function = getattr(load(operator) if library is None else library, f"{operator}_attention_{direction}")
    q = tensors[0]
    assert isinstance(q, Tensor)
    numbers = [number for x in tensors for number in _describe(x)]
    described = array("q", numbers)
    arguments = [_to_c(parameter) for parameter in parameters]
    threads = ctypes.c_int64(torch.get_num_threads())
    matrix_unit = ctypes.c_int64(uses_matrix_unit(q.dtype))
    if function(ctypes.byref(sizes), ctypes.c_void_p(described.buffer_info()[0]), *arguments, threads, matrix_unit):
        raise MemoryError(
            f"{operator}_attention ({direction}) ran out of memory for q [{sizes.batch}, {sizes.queries}, "
            f"{sizes.query_heads}, {sizes.key_dim}]; use a smaller batch or a shorter sequence"
        )


class View(NamedTuple):
    """Elements of a tensor by strides that torch does not have, negative ones; the first of them is `offset`."""

    of: Tensor
    offset: int
    strides: tuple[int, int, int, int]


def _describe(x: Tensor | View | None) -> tuple[int, ...]:
    """The fields of a `Tensor` of `tensor.h`: each has 64 bits."""
    if x is None:
        return 0, 0, 0, 0, 0, 0
    if isinstance(x, View):
        return x.of.data_ptr() + x.offset * x.of.element_size(), *x.strides, DTYPES[x.of.dtype]
    return x.data_ptr(), *x.stride(), *(0,) * (4 - x.dim()), DTYPES[x.dtype]


def _to_c(parameter: object) -> object:
    if isinstance(parameter, int):
        return ctypes.c_int64(parameter)
    if isinstance(parameter, float):
        return ctypes.c_double(parameter)
    assert isinstance(parameter, (list, tuple))
    return (ctypes.c_int64 * len(parameter))(*parameter)
