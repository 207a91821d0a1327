"""Hypothesis profiles, and the configuration of a run small enough for a test."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported, here and in subprocesses: parallel test workers with a thread a core each would fight over
# the cores, and OpenMP's busy waiting makes that many times slower than taking turns.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's own processes for compiling would be one more import of torch for each that compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Whether the compiler knows the vectors that the processor has: each process would start one of its own to find out.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# As seldom as `tests/children` says, not after each compilation.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Where a machine asks for no files of bytecode, each process that a test starts would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Every Python that tests start imports `sitecustomize` from there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (f"{Path(__file__).parent}/children", os.environ.get("PYTHONPATH")))
)

import pytest
from hypothesis import HealthCheck, settings

from tests.children import sitecustomize  # noqa: F401  # here, too, what it changes
from tests.depth import left_out, take_every_case, takes_every_case
from tests.room import with_room

_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
# The same examples on every machine and in every run, so that a failure belongs to a change; the deep one searches.
settings.register_profile("fast", max_examples=3, derandomize=True, **_COMMON)
settings.register_profile("every-case", max_examples=12, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=1000, **_COMMON)

TINY_RUN = {
    "run.name": "tiny",
    "model.dim": 32,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "model.head_dim": 8,
    "model.pattern.compress_block": 8,
    "model.pattern.compress_stride": 4,
    "model.pattern.select_block": 8,
    "model.pattern.num_selected": 3,
    "model.pattern.window": 8,
    "train.seq_len": 32,
    "train.batch_size": 2,
    "train.steps": 4,
    "train.eval_every": 2,
    "train.eval_batches": 1,
    "train.save_every": 2,
    "train.sample_tokens": 8,
    "optim.warmup": 1,
    # Eager: the tests of the compiler are elsewhere.
    "compile.enabled": "false",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: a test that waits for a process or a disk leaves its own to another."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="also what is marked deep, which a usual run leaves out")


@pytest.hookimpl(tryfirst=True)  # before hypothesis takes the profile that is asked for
def pytest_configure(config: pytest.Config) -> None:
    take_every_case(config)
    settings.load_profile("every-case" if takes_every_case() else "fast")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A usual run leaves out what is marked deep and not asked for by name. What compiles most comes first: were it
    left to the end, one process would work and the other wait. Tests and their fixtures have room for their frames."""
    if not takes_every_case() and not any("::" in arg for arg in config.args):
        config.hook.pytest_deselected(items=(deep := left_out(items)))
        ids = {id(item) for item in deep}
        items[:] = [item for item in items if id(item) not in ids]
    items.sort(key=lambda item: not ("inductor" in item.nodeid or "spilling" in item.nodeid))
    for item in items:
        item.setup = functools.partial(with_room, item.setup)
        item.runtest = functools.partial(with_room, item.runtest)


def with_fault(fault: str, once: Path) -> dict[str, str]:
    """The environment of a process with a fault planted, which strikes once; `tests/children` has the kinds.

    A signal of the test's own would come some steps later on a busy machine, or when the run is over.
    """
    once.touch()
    return {**os.environ, "FAULT": fault, "FAULT_ONCE": str(once)}


def cold_cache(directory: Path) -> Path:
    """A directory for compiled programs that holds the operators and Inductor's headers alone, which take a minute."""
    from nsa_compile import compiler_cache, inductor_files
    from nsa_compile.ops import cpp

    cpp.load("window")  # and the others with it
    warm = compiler_cache.directory()
    shutil.copytree(cpp.kernel_directory(warm), cpp.kernel_directory(directory))
    headers = inductor_files.header_directory(warm)
    headers.mkdir(exist_ok=True)
    inductor_files.header_directory(directory).symlink_to(headers)
    return directory


@contextlib.contextmanager
def _no_room() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def no_room() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Within `with no_room():` no file can be longer than 100 bytes, as on a disk that is full."""
    return _no_room


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_of_other_modules_is_gone():
    """Dynamo hands what it compiled for one test to every other that calls the same function in the same way."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def tiny_overrides(tmp_path):
    """`tiny_overrides(**{"train.steps": 2})`: KEY=VALUE strings of a tiny run that writes below tmp_path."""

    def make(**changes: Any) -> list[str]:
        values = {**TINY_RUN, "run.dir": str(tmp_path / "runs"), **changes}
        return [f"{key}={value}" for key, value in values.items()]

    return make
