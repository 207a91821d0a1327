"""The state of a loop: what Python objects hold before and after a step, as paths to tensors, numbers and constants.

A path is a tuple of keys from a variable of the loop on, as `("cache", ".layers", 0, ".keys")`. Containers (variables,
lists, tuples, dicts, objects with attributes, closures) are entered; everything else is a leaf.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_compile.loops.lists import Appended, GrowingList

Path = tuple[Any, ...]
# What an object may hold; a loop whose state is larger than this is not one.
LIMIT = 200_000


class NotFollowed(BaseException):
    """Why a loop is not compiled, in a few words; where the source line is known, it is named.

    It is no `Exception`: an `except Exception` of the loop's own must not take it for an error of the loop's.
    """

    def __init__(self, reason: str, place: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.place = reason, place


@dataclass(frozen=True)
class Container:
    """An object that holds others, as it was when it was looked at."""

    value: Any
    kind: str
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


@dataclass
class Snapshot:
    """What the variables of a loop held at some moment."""

    containers: dict[Path, Container]
    leaves: dict[Path, Any]
    same: dict[Path, Path]  # a mutable object, or a tensor, that has been found at another path

    def restore(self) -> None:
        """Put everything back in its place."""
        for container in self.containers.values():
            _fill(container.value, container.kind, container.keys, container.children)

    def install(self, values: dict[Path, Any]) -> None:
        """Put everything back in its place, with other objects at some paths."""
        built: dict[Path, Any] = {}
        for path in (p for p in self.containers if len(p) == 1):
            self._build(path, values, built)

    def _build(self, path: Path, values: dict[Path, Any], built: dict[Path, Any]) -> Any:
        if path in self.same:
            first = self.same[path]
            return built[first] if first in built else values.get(first, self._original(first))
        if path in values:
            built[path] = values[path]
        elif (container := self.containers.get(path)) is not None:
            built[path] = container.value
            children = tuple(self._build((*path, key), values, built) for key in container.keys)
            if container.kind == "tuple":
                if any(a is not b for a, b in zip(children, container.children, strict=True)):
                    kind: Any = type(container.value)
                    built[path] = kind._make(children) if hasattr(kind, "_make") else kind(children)
            else:
                _fill(container.value, container.kind, container.keys, children)
        else:
            built[path] = self.leaves[path]
        return built[path]

    def _original(self, path: Path) -> Any:
        return self.containers[path].value if path in self.containers else self.leaves[path]

    def shape_of(self, path: Path) -> Any:
        """What a path is apart from what it holds: the kind of a container, with its keys; the name of an alias."""
        if path in self.same:
            return "same", self.same[path]
        container = self.containers[path]
        keys = len(container.keys) if container.kind in ("list", "tuple") else container.keys
        return container.kind, type(container.value), keys

    def structure(self) -> dict[Path, Any]:
        """All paths that are no leaves, and what they are."""
        return {path: self.shape_of(path) for path in (*self.containers, *self.same)}


def look(step: types.FunctionType) -> Snapshot:
    """What the variables of a loop hold now, given its step.

    Functions of the module that the loop stands in are entered as closures are, since they read its variables.

    Raises:
        NotFollowed: something is reachable whose changes cannot be seen.
    """
    snapshot = Snapshot({}, {}, {})
    first: dict[int, Path] = {}
    module = step.__globals__
    variables = {**module_variables(step), **cells_of(step)}
    waiting: list[tuple[Path, Any]] = [((name,), x) for name, x in reversed(variables.items())]
    while waiting:
        path, value = waiting.pop()
        known = first.get(id(value))
        if known is not None:
            snapshot.same[path] = known
            continue
        parts = _parts(value, module)
        if parts is None:
            _refuse_hidden_state(value, path)
            snapshot.leaves[path] = value
            if isinstance(value, Tensor | Appended):
                first[id(value)] = path
            continue
        kind, keys, children = parts
        if kind != "tuple":
            first[id(value)] = path
        snapshot.containers[path] = Container(value, kind, keys, children)
        waiting += [((*path, key), child) for key, child in reversed(list(zip(keys, children, strict=True)))]
        if len(snapshot.containers) + len(snapshot.leaves) > LIMIT:
            raise NotFollowed(f"its variables reach more than {LIMIT} objects")
    return snapshot


def _refuse_hidden_state(value: Any, path: Path) -> None:
    if hasattr(value, "__next__"):
        raise NotFollowed(f"{in_words(path)} is an iterator ({type(value).__name__}), whose state cannot be seen")


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPAQUE = (*_NUMBERS, types.ModuleType, type, enum.Enum, torch.Size, torch.device, torch.dtype, torch.Generator)


def _parts(value: Any, module: dict[str, Any]) -> tuple[str, tuple[Any, ...], tuple[Any, ...]] | None:
    """Kind, keys and children of a container; None for a leaf."""
    if isinstance(value, types.CellType):
        try:
            return "cell", ("",), (value.cell_contents,)
        except ValueError:
            return "cell", (), ()
    if isinstance(value, (Tensor, Appended, *_OPAQUE)):
        return None
    if isinstance(value, GrowingList):
        return "object", (".rows", ".cut"), (value.rows, value.cut)
    if isinstance(value, tuple):
        return "tuple", tuple(range(len(value))), value
    if isinstance(value, list | collections.deque):
        return "list", tuple(range(len(value))), tuple(value)
    if isinstance(value, dict):
        extra = _attributes(value)
        return "dict", (*value, *(f".{k}" for k in extra)), (*value.values(), *extra.values())
    if isinstance(value, set):
        return "set", tuple(range(len(value))), tuple(sorted(value, key=repr))
    if isinstance(value, types.MethodType):
        return "method", ("self", "def"), (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return "partial", ("def", "args", "named"), (value.func, value.args, value.keywords)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value, module)
    attributes = _attributes(value)
    if attributes or hasattr(value, "__dict__"):
        return "object", tuple(f".{name}" for name in attributes), tuple(attributes.values())
    return None


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name in (slots,) if isinstance(slots := vars(kind).get("__slots__", ()), str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                found.setdefault(name, getattr(value, name))
    return {name: x for name, x in found.items() if not hasattr(x, "__torch_frozen__")}


def _parts_of_function(value: types.FunctionType, module: dict[str, Any]) -> Any:
    keys: list[Any] = list(value.__code__.co_freevars)
    children: list[Any] = list(value.__closure__ or ())
    if value.__globals__ is module:
        found = module_variables(value)
        keys += found
        children += found.values()
    for name, default in (value.__kwdefaults__ or {}).items():
        keys.append(f"default {name}")
        children.append(default)
    for number, default in enumerate(value.__defaults__ or ()):
        keys.append(f"default {number}")
        children.append(default)
    return ("function", tuple(keys), tuple(children)) if keys else None


def cells_of(step: types.FunctionType) -> dict[str, types.CellType]:
    """The variables that a step shares with the function around it."""
    return dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))


def module_variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables of its module that a function may read, by `global name`."""
    module = function.__globals__
    named = {name: module[name] for name in _names(function.__code__) if name in module}
    return {f"global {k}": x for k, x in named.items() if not isinstance(x, types.ModuleType | type)}


def _names(code: types.CodeType) -> list[str]:
    """The global names that a function and those within it may read."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = {str(i.argval) for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME"))}
    return sorted(own.union(*map(_names, inner)))


def _fill(value: Any, kind: str, keys: tuple[Any, ...], children: tuple[Any, ...]) -> None:
    """Let a container hold what it is said to, if it does not."""
    if kind == "cell":
        _fill_cell(value, children)
    elif kind == "list":
        if len(value) != len(children) or any(a is not b for a, b in zip(value, children, strict=True)):
            value.clear()
            value.extend(children)
    elif kind == "dict":
        items = [(k, x) for k, x in zip(keys, children, strict=True) if not _is_attribute(value, k)]
        now = list(dict.items(value))
        if len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, items, strict=True)):
            dict.clear(value)
            for key, x in items:
                dict.__setitem__(value, key, x)
        _fill_attributes(value, {k: x for k, x in zip(keys, children, strict=True) if _is_attribute(value, k)})
    elif kind == "set":
        if value != set(children):
            value.clear()
            value.update(children)
    elif kind == "object":
        _fill_attributes(value, dict(zip(keys, children, strict=True)))


def _is_attribute(value: Any, key: Any) -> bool:
    return isinstance(key, str) and key.startswith(".") and hasattr(value, "__dict__") and key[1:] in vars(value)


def _fill_cell(cell: types.CellType, children: tuple[Any, ...]) -> None:
    try:
        now: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        now = ()
    if not children and now:
        del cell.cell_contents
    elif children and (not now or now[0] is not children[0]):
        cell.cell_contents = children[0]


def _fill_attributes(value: Any, attributes: dict[str, Any]) -> None:
    now = _attributes(value)
    wanted = {key[1:]: x for key, x in attributes.items()}
    own = getattr(value, "__dict__", {})
    for name in now.keys() - wanted.keys():
        own.pop(name, None) if name in own else object.__delattr__(value, name)
    for name, x in wanted.items():
        if name not in now or now[name] is not x:
            if name in own or hasattr(value, "__dict__"):
                own[name] = x
            else:
                object.__setattr__(value, name, x)


def drop(cells: dict[str, types.CellType], names: frozenset[str]) -> None:
    """Leave variables without a value."""
    for name in names & cells.keys():
        _fill_cell(cells[name], ())


def in_words(path: Path) -> str:
    """A path as one would write it."""
    name, *keys = path
    words = str(name)
    for key in keys:
        if isinstance(key, str) and key.startswith("."):
            words += key
        elif isinstance(key, str) and key.startswith("global "):
            words = key.removeprefix("global ")
        elif key != "":
            words += f"[{key!r}]"
    return words


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves that are no tensors are the same constant."""
    return a is b or (type(a) is type(b) and isinstance(a, (*PLAIN, enum.Enum)) and a == b)
