"""Functions of torch that refuse tensors of several dtypes. Stand-ins for tensors do not tell whether they do, and a
program of all steps may have other operators in their place: nobody would raise the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from nsa_compile.ir.scans import first_line


def why_refused(function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Why torch refuses the dtypes of these tensors, which may be stand-ins; None if it does not. It is asked with
    zeros, and only where there are several floating dtypes, or `out` has one of its own."""
    if not _are_mixed(args, kwargs):
        return None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            named = {name: pytree.tree_map(_zeros, x) for name, x in kwargs.items()}
            function(*pytree.tree_map(_zeros, tuple(args)), **named)
    except Exception as error:
        return f"torch refuses tensors of these dtypes: {first_line(error)}"
    return None


def _are_mixed(args: Any, kwargs: Any) -> bool:
    found = set()
    for x in (*args, *kwargs.values()):
        for y in x if type(x) in (list, tuple) else (x,):  # one that grows may not be gone over
            if isinstance(y, Tensor) and (y.dtype.is_floating_point or y is kwargs.get("out")):
                found.add(y.dtype)
    return len(found) > 1


def _zeros(x: Any) -> Any:
    if isinstance(x, torch.SymInt | torch.SymFloat):
        return x.node.hint
    if not isinstance(x, Tensor):
        return x
    return torch.zeros([_zeros(n) for n in x.shape], dtype=x.dtype, device=x.device)
