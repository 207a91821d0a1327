"""What the compiler makes of the Triton kernels: registers, spills, shared memory and occupancy. No GPU is needed.

python -m nsa_compile.ops.triton_report 90          # the table for compute capability 9.0
python -m nsa_compile.ops.triton_report 80 --json
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nsa_compile.errors import UserError

__all__ = [
    "ARCHS",
    "KernelReport",
    "Launch",
    "Shape",
    "check_compiler",
    "compile_launch",
    "compile_report",
    "launches",
    "occupancy",
    "recorded_launches",
]

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


class Multiprocessor(NamedTuple):
    """What the programs on one multiprocessor share."""

    shared: int  # bytes
    warps: int
    programs: int = 32
    registers: int = 65536


ARCHS = {80: Multiprocessor(164 * 1024, 64), 86: Multiprocessor(100 * 1024, 48), 90: Multiprocessor(228 * 1024, 64)}


class Launch(NamedTuple):
    kernel: Any
    arguments: tuple
    constants: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A problem, by default the paper's: groups of 16 heads of 128, blocks of 64, 16 of them selected."""

    heads: int = 64
    groups: int = 4
    dim: int = 128
    value_dim: int = 128
    length: int = 65536
    dtype: torch.dtype = torch.bfloat16
    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    num_selected: int = 16
    window: int = 512


@dataclass(frozen=True)
class KernelReport:
    operator: str
    kernel: str
    tile: str  # rows x keys
    arch: int
    num_warps: int
    num_stages: int
    registers: int  # a thread
    spills: int  # bytes of stack a thread
    shared: int  # bytes a program
    occupancy: float  # share of a multiprocessor's warps that can be resident


def compile_report(arch: int, shape: Shape | None = None) -> list[KernelReport]:
    """One row for every kernel that attention of this shape launches, forward and backward, in either loop order.

    Raises UserError for an `arch` that is not in `ARCHS`, and where Triton has no NVIDIA compiler or interprets.
    """
    if arch not in ARCHS:
        raise UserError(f"arch = {arch} is not known; take one of {', '.join(map(str, ARCHS))}")
    check_compiler()
    reports: list[KernelReport] = []
    with tempfile.TemporaryDirectory() as cache, mock.patch.object(triton.knobs.cache, "dir", cache):
        for operator, launch in launches(shape or Shape()):
            report = compile_launch(operator, launch, arch)
            if report not in reports:
                reports.append(report)
    return reports


def check_compiler() -> None:
    """Raise UserError where Triton interprets, or has no NVIDIA compiler."""
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, so Triton compiles nothing; unset it")
    for tool in ("ptxas", "cuobjdump"):
        if not (_nvidia_tools() / tool).exists():
            raise UserError(f"triton {triton.__version__} brings no {tool} on this machine; install its Linux wheel")


def launches(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """Operator and launch for all that attention of this shape launches, in either loop order."""
    from nsa_compile.ops.selected.triton import Order

    heads, length = shape.heads, shape.length
    blocks = max(0, (length - shape.compress_block) // shape.compress_stride + 1)
    ratio = shape.select_block // shape.compress_stride
    extra = shape.compress_block // shape.compress_stride
    offsets = tuple(range(1 - extra, ratio))
    weights = tuple(min(extra, ratio, i + 1, ratio + extra - 1 - i) for i in range(len(offsets)))
    scale = shape.dim**-0.5
    indices = _meta(1, length, shape.groups, shape.num_selected, dtype=torch.int32)
    selection = (shape.select_block, offsets, weights, shape.num_selected, 1, 2)
    band = (shape.compress_block, shape.compress_stride, scale, *selection)
    choices: list[tuple[str, int, tuple, dict[str, Any]]] = [
        ("window", length, (shape.window, scale), {}),
        ("compressed", blocks, band, {}),
        *(
            ("selected", length, (indices, shape.select_block, scale), {"order": order})
            for order in (Order("query", 1), Order("query", 2), Order("query", 4), Order("block"))
        ),
    ]
    for operator, keys, parameters, options in choices:
        module = importlib.import_module(f"nsa_compile.ops.{operator}.triton")
        q = _meta(1, length, heads, shape.dim, dtype=shape.dtype)
        k = _meta(1, keys, shape.groups, shape.dim, dtype=shape.dtype)
        v = _meta(1, keys, shape.groups, shape.value_dim, dtype=shape.dtype)
        with recorded_launches() as recorded:
            out, lse, *_ = module.forward(q, k, v, *parameters, **options)
            module.backward(torch.empty_like(out), None, q, k, v, out, lse, *parameters, **options)
        for launch in recorded:
            yield operator, launch


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Inside this context launches go into the list, one for each kernel and set of constants, and nothing runs.

    The tensors may be on any device, "meta" too.
    """
    recorded: list[Launch] = []

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if not any(launch.kernel is kernel and launch.constants == constants for launch in recorded):
            recorded.append(Launch(kernel, arguments, constants))

    with mock.patch.object(JITFunction, "run", record):
        yield recorded


def compile_launch(operator: str, launch: Launch, arch: int) -> KernelReport:
    """Compile as a launch would: an argument of 1 is a constant, multiples of 16 are known as such."""
    kernel, arguments, constants = launch
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[i] if i < len(arguments) else constants[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
        elif i >= len(arguments) or value is None or value == 1:
            signature[name], values[(i,)] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, Tensor) or (signature[name] in ("i32", "i64") and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = _resources(compiled.asm["cubin"])
    metadata = compiled.metadata
    tile = "x".join(str(constants[name]) for name in ("BLOCK_M", "BLOCK_N") if name in constants)
    return KernelReport(
        operator, kernel.__name__, tile, arch, metadata.num_warps, metadata.num_stages, registers, spills,
        metadata.shared, occupancy(ARCHS[arch], registers, metadata.shared, metadata.num_warps),
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of stack, which is where spilled ones go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_nvidia_tools() / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _nvidia_tools() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def occupancy(gpu: Multiprocessor, registers: int, shared: int, num_warps: int) -> float:
    """Registers are given out to warps in units of 256, and every program takes 1 KiB of shared memory more."""
    warp_registers = -(-registers * 32 // 256) * 256
    programs = min(
        gpu.registers // (warp_registers * num_warps),
        gpu.shared // (shared + 1024),
        gpu.warps // num_warps,
        gpu.programs,
    )
    return programs * num_warps / gpu.warps


def main() -> None:
    import json

    import click
    from tabulate import tabulate

    @click.command()
    @click.argument("arch", type=int)
    @click.option("--heads", default=16, show_default=True, help="Heads a group.")
    @click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
    def report(arch: int, heads: int, as_json: bool) -> None:
        """Compile the attention kernels for compute capability ARCH, 90 for 9.0, and say what they take."""
        try:
            rows = [asdict(row) for row in compile_report(arch, Shape(heads=4 * heads))]
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            raise SystemExit(error.exit_code) from None
        click.echo(json.dumps({"kernels": rows}) if as_json else tabulate(rows, headers="keys", floatfmt=".2f"))

    report()


if __name__ == "__main__":
    main()
