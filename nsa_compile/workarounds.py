"""Workarounds for defects of torch, each with its cause, its scope and the versions it is for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch._functorch.config as functorch_config


@contextlib.contextmanager
def inductor_config(*, has_scans: bool) -> Iterator[None]:
    """Compile a graph that still holds a scan without donated buffers.

    A scan whose body closes over parameters inherits the outer backward's donated buffers and overwrites them:
    silently wrong gradients (relative errors above 1) under Inductor, torch 2.11 to 2.13, pytorch#153679. Graphs
    without a scan keep the optimisation.
    """
    if not has_scans:
        yield
        return
    with functorch_config.patch(donated_buffer=False):
        yield
