"""Hypothesis profiles, and the configuration of a run small enough for a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Before torch is imported, here and in subprocesses: parallel test workers with a thread a core each would fight over
# the cores, and OpenMP's busy waiting makes that many times slower than taking turns.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
# The same examples on every machine and in every run, so that a failure belongs to a change; the deep one searches.
settings.register_profile("fast", max_examples=12, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=1000, **_COMMON)
settings.load_profile("fast")  # --hypothesis-profile=deep takes the other one

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


def with_fault(fault: str, once: Path) -> dict[str, str]:
    """The environment of a process with a fault planted, which strikes once; `tests/train/faults` has the kinds.

    A signal of the test's own would come some steps later on a busy machine, or when the run is over.
    """
    once.touch()
    path = [str(Path(__file__).parent / "train" / "faults"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "FAULT": fault, "FAULT_ONCE": str(once), "PYTHONPATH": os.pathsep.join(filter(None, path))}


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
