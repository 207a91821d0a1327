"""Results that `functools.lru_cache` keeps. Those of a trace are stand-ins for tensors, and must not outlive it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from nsa_compile.loops.python_numbers import SYMBOLIC
from nsa_compile.loops.watched import is_of_library

__all__ = ["Memos"]

# From a cache to what a result of a function holds: its links or values, an object, its attributes, a list, a tensor.
_DEPTH = 6


class Memos:
    """The functions with a cache that are there, but for those of libraries."""

    def __init__(self) -> None:
        # Each refers to its type; to go over all objects in Python takes twice as long.
        found = [x for x in gc.get_referrers(functools._lru_cache_wrapper) if type(x) is functools._lru_cache_wrapper]
        self.functions = [x for x in found if not is_of_library(x)]
        self.kept: set[int] = set()  # addresses of the stand-ins that caches were filled with last

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Caches that are filled with stand-ins inside this context are empty after it: what they are for is computed
        again, in the next trace or in the loop."""
        before = [x.cache_info().misses for x in self.functions]
        self.kept = set()
        try:
            yield
        finally:
            for function, misses in zip(self.functions, before, strict=True):
                stand_ins = _stand_ins(function) if function.cache_info().misses != misses else []
                self.kept.update(map(id, stand_ins))
                if stand_ins:
                    function.cache_clear()


def _stand_ins(function: Any) -> list[Any]:
    plain = (function.__wrapped__, function.__dict__)
    found = [x for x in gc.get_referents(function) if not any(x is y for y in plain)]
    seen, stand_ins = set(map(id, found)), []
    for _ in range(_DEPTH):
        of_trace = [x for x in found if isinstance(x, (FunctionalTensor, FakeTensor, *SYMBOLIC))]
        stand_ins += of_trace
        found = [x for x in found if not any(x is y for y in of_trace)]
        found = [x for x in gc.get_referents(*found) if not isinstance(x, type) and id(x) not in seen]
        seen.update(map(id, found))
    return stand_ins
