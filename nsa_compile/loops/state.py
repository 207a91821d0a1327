"""The state of a loop: what Python objects hold before and after a step, as paths to tensors, numbers and constants.

A path is a tuple of keys from a variable of the loop on, as `("cache", ".layers", 0, ".keys")`. Containers (variables,
lists, tuples, dicts, objects with attributes, closures) are entered; everything else is a leaf.
"""

from __future__ import annotations

import array
import collections
import collections.abc
import contextlib
import ctypes
import dis
import enum
import functools
import logging
import operator
import pickle
import struct
import types
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from nsa_compile.loops.lists import Appended, GrowingList
from nsa_compile.memory import ARRAYS

Path = tuple[Any, ...]
GLOBAL = "global "  # before the name of a variable of a module
ITEMS = "__nsa_items"  # the variable that holds what a loop goes over
_NOTHING = object()
# What an object may hold; a loop whose state is larger than this is not one.
LIMIT = 200_000


READS_A_NUMBER = "it reads a number out of a tensor, so that its way depends on data"


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
    type: Any  # its class then: a step may assign to `__class__`
    kind: str
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


@dataclass
class Snapshot:
    """What the variables of a loop held at some moment."""

    containers: dict[Path, Container]
    leaves: dict[Path, Any]
    same: dict[Path, Path]  # a mutable object, or a tensor, that has been found at another path
    module: dict[str, Any]  # the variables of the loop's module, of which some are among these
    contents: dict[Path, Any] = field(default_factory=dict)  # of leaves that may be written to
    held: list[tuple[Any, list[Any]]] = field(default_factory=list)  # each container, and all that is in it

    def restore(self) -> None:
        """Put everything back in its place."""
        for path, content in self.contents.items():
            write_content(self.leaves[path], content)
        self.install({})

    def install(self, values: dict[Path, Any]) -> None:
        """Put everything back in its place, with other objects at some paths."""
        built: dict[Path, Any] = {}
        for path in [p for p in (*self.containers, *self.leaves, *self.same) if len(p) == 1]:
            value = self._build(path, values, built)
            if is_global(path) and self.module.get(path[0].removeprefix(GLOBAL), _NOTHING) is not value:
                self.module[path[0].removeprefix(GLOBAL)] = value

    def roots(self) -> dict[str, Any]:
        """The variables, with what they held."""
        names = [p for p in (*self.containers, *self.leaves, *self.same) if len(p) == 1]
        return {p[0]: self._original(self.same.get(p, p)) for p in names}

    def in_memory(self) -> dict[Path, Any]:
        """The tensors, and the arrays, among the leaves."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, (Tensor, *ARRAYS))}

    def change(self) -> Path | None:
        """Where something is other than it was when it was looked at, if there is such a place."""
        if self._holds_the_same():
            return None
        now = survey(self.roots(), of_library=True)  # an object may have been replaced by one that holds the same
        here, there = now.structure(), self.structure()
        if here != there:
            return next(path for path in (*here, *there) if here.get(path) != there.get(path))
        for path, leaf in self.leaves.items():
            if path not in now.leaves or not equal(now.leaves[path], leaf):
                return path
        return next((p for p, content in self.contents.items() if now.contents.get(p) != content), None)

    def _holds_the_same(self) -> bool:
        """Whether every container holds the very objects that it held."""
        for value, was in self.held:
            now = _held_by(value)
            if len(now) != len(was) or not all(map(operator.is_, now, was)):
                return False
        return all(content_of(self.leaves[p]) == content for p, content in self.contents.items())

    def _build(self, path: Path, values: dict[Path, Any], built: dict[Path, Any]) -> Any:
        if path in self.same:
            first = self.same[path]
            return built[first] if first in built else values.get(first, self._original(first))
        if path in values:
            built[path] = values[path]
        elif (container := self.containers.get(path)) is not None:
            built[path] = container.value
            take_class(container.value, container.type)
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
        is_function = container.kind == "function"
        kind = Same(container.value.__code__) if is_function else container.type
        if isinstance(container.value, collections.defaultdict):
            kind = kind, Same(container.value.default_factory)
        return container.kind, kind, keys

    def structure(self) -> dict[Path, Any]:
        """All paths that are no leaves, and what they are."""
        return {path: self.shape_of(path) for path in (*self.containers, *self.same)}


def look(step: types.FunctionType, last: Collection[str] = ()) -> Snapshot:
    """What the variables of a loop hold now, given its step.

    Functions of the module that the loop stands in are entered as closures are, since they read its variables.

    Args:
        last: variables that come behind the others: what they share with one of these is known by its name.

    Raises:
        NotFollowed: something is reachable whose changes cannot be seen.
    """
    variables = {**module_variables(step), **cells_of(step)}
    ordered = sorted(variables.items(), key=lambda item: item[0] in last)
    return _survey(dict(ordered), step.__globals__)


def survey(variables: dict[str, Any], *, of_library: bool = False) -> Snapshot:
    """What some variables hold, functions apart from what these may read, to be compared later.

    Raises:
        NotFollowed: something is reachable whose changes cannot be seen, unless it is a library's.
    """
    return _survey(variables, {}, keep=True, of_library=of_library)


def _survey(
    variables: dict[str, Any], module: dict[str, Any], *, keep: bool = False, of_library: bool = False
) -> Snapshot:
    snapshot = Snapshot({}, {}, {}, module)
    first: dict[int, Path] = {}
    waiting: list[tuple[Path, Any]] = [((name,), x) for name, x in reversed(variables.items())]
    while waiting:
        path, value = waiting.pop()
        known = first.get(id(value))
        if known is not None:
            snapshot.same[path] = known
            continue
        parts = parts_of(value, module)
        if parts is None:
            if not of_library:
                _refuse_hidden_state(value, path)
            if isinstance(value, Tensor) and not of_library:
                _refuse_attributes_that_change(value, path)
            snapshot.leaves[path] = value
            if (content := content_of(value)) is not None:
                snapshot.contents[path] = content
            if isinstance(value, Tensor | Appended):
                first[id(value)] = path
            continue
        kind, keys, children = parts
        if kind != "tuple":
            first[id(value)] = path
        if not of_library and isinstance(value, collections.defaultdict):
            _refuse_hidden_state(value.default_factory, path)
        if not of_library and kind == "dict" and any(map(_told_apart_by_address, value)):
            raise NotFollowed(f"{in_words(path)} has keys that are told apart by their addresses")
        if not of_library and kind == "set" and any(isinstance(x, Tensor) for x in value):
            raise NotFollowed(f"{in_words(path)} is a set of tensors, which are told apart by their addresses")
        if not of_library and kind in ("list", "tuple", "set", "partial") and _may_hold_more(value):
            raise NotFollowed(f"{in_words(path)} is a {type(value).__name__}, which may have attributes of its own")
        snapshot.containers[path] = Container(value, type(value), kind, keys, children)
        if keep:
            snapshot.held.append((value, _held_by(value)))
        waiting += [((*path, key), child) for key, child in reversed(list(zip(keys, children, strict=True)))]
        if len(snapshot.containers) + len(snapshot.leaves) > LIMIT:
            raise NotFollowed(f"its variables reach more than {LIMIT} objects")
    return snapshot


def _refuse_attributes_that_change(value: Tensor, path: Path) -> None:
    for name, x in vars(value).items() if type(value) in (Tensor, torch.nn.Parameter) else ():
        if isinstance(x, list | dict | set) or (hasattr(x, "__dict__") and not isinstance(x, _KNOWN_ATTRIBUTES)):
            what = f"{in_words(path)}.{name} is a {type(x).__name__} that is kept at a tensor"
            raise NotFollowed(f"{what}, where a step may change it unseen")


_KNOWN_ATTRIBUTES = (Tensor, torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def _told_apart_by_address(key: Any) -> bool:
    """Whether a key of a dict is no other one that holds the same; a class, a function and the like never changes."""
    if isinstance(key, (*PLAIN, *_OPAQUE, types.FunctionType, types.BuiltinFunctionType, types.MethodType, tuple)):
        return False
    return isinstance(key, Tensor) or type(key).__hash__ is object.__hash__


def _refuse_hidden_state(value: Any, path: Path) -> None:
    if hasattr(value, "__next__") and not isinstance(value, type):
        raise NotFollowed(f"{in_words(path)} is an iterator ({type(value).__name__}), whose state cannot be seen")
    hides = isinstance(value, _VIEWS) or (isinstance(value, frozenset) and not all(isinstance(x, PLAIN) for x in value))
    if hides:
        raise NotFollowed(
            f"{in_words(path)} is a {type(value).__name__}, through which a step may change what it shows"
        )
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType) and hasattr(owner, "__next__"):
        what = f"a method of an iterator ({type(owner).__name__})"
        raise NotFollowed(f"{in_words(path)} is {what}, whose state cannot be seen")
    if isinstance(value, types.BuiltinMethodType) and isinstance(owner, list | dict | set | collections.deque):
        raise NotFollowed(f"{in_words(path)} is a method of a {type(owner).__name__}; call it by the name of that")


_VIEWS = (types.MappingProxyType, collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)
_GENERATORS = (numpy.random.Generator, numpy.random.RandomState)


def content_of(value: Any) -> Any:
    """What a leaf holds that may be written to: numbers of an array, the state of a generator of random numbers,
    attributes of a tensor, what a logger lets through; none of a function, which would be no leaf if it had some. None
    if there is nothing."""
    if isinstance(value, logging.Logger):
        return value.getEffectiveLevel(), value.disabled, value.manager.disable
    if isinstance(value, _GENERATORS):
        return pickle.dumps(_bits_of(value).state)
    if isinstance(value, ARRAYS) and not (isinstance(value, numpy.ndarray) and value.dtype.hasobject):
        return bytes(value.tobytes() if hasattr(value, "tobytes") else value)  # those of ctypes lie in memory, too
    if isinstance(value, types.FunctionType):
        return tuple((name, Same(x)) for name, x in _attributes_of_function(value).items())
    if type(value) in (Tensor, torch.nn.Parameter) and vars(value):
        return tuple((name, Same(x)) for name, x in vars(value).items())
    return None


def _bits_of(value: Any) -> Any:
    return value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator


def write_content(value: Any, content: Any) -> None:
    if content_of(value) == content:
        return
    if isinstance(value, logging.Logger):
        return  # whoever has set it has set it
    if isinstance(value, _GENERATORS):
        _bits_of(value).state = pickle.loads(content)
    elif isinstance(value, Tensor | types.FunctionType):
        vars(value).clear()
        vars(value).update((name, x.value) for name, x in content)
    elif isinstance(value, numpy.ndarray):
        value[...] = numpy.frombuffer(content, value.dtype).reshape(value.shape)
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, content)
    elif isinstance(value, memoryview | ctypes._SimpleCData):
        memoryview(value).cast("B")[:] = content
    else:
        value[:] = content


class Same:
    """An object as part of a key: the same one. The key keeps it alive, so that no other takes its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


class Unseen:
    """An object of this package's own, which is no state of a loop."""


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPAQUE = (
    *_NUMBERS, types.ModuleType, type, enum.Enum, torch.Size, torch.device, torch.dtype, torch.Generator,
    logging.Logger, logging.Handler, ctypes._SimpleCData, Unseen,
)  # fmt: skip


def parts_of(value: Any, module: dict[str, Any]) -> tuple[str, tuple[Any, ...], tuple[Any, ...]] | None:
    """Kind, keys and children of a container; None for a leaf."""
    if isinstance(value, types.CellType):
        try:
            return "cell", ("",), (value.cell_contents,)
        except ValueError:
            return "cell", (), ()
    if isinstance(value, (Tensor, Appended, *_OPAQUE)):
        return None
    if isinstance(value, GrowingList):
        return "rows", tuple(value.parts()), tuple(value.parts().values())
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
        return _parts_of_partial(value)
    if isinstance(value, weakref.ref):
        return "reference", ("to",), (value(),)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value, module)
    attributes = _attributes(value)
    if attributes or hasattr(value, "__dict__"):
        return "object", tuple(f".{name}" for name in attributes), tuple(attributes.values())
    return None


@functools.cache
def _holds_attributes_alone(kind: type) -> bool:
    """Whether an object of a class holds nothing but what is in its `__dict__`."""
    inside = (dict, list, tuple, set, types.FunctionType, types.MethodType, functools.partial, collections.deque)
    slots = any(vars(k).get("__slots__") for k in kind.__mro__)
    return not issubclass(kind, inside) and not slots


def _held_by(value: Any) -> list[Any]:
    """The objects in a container, keys and names of attributes among them: quick to compare."""
    if type(value) in (list, tuple):
        return list(value)
    own = getattr(value, "__dict__", {})
    if isinstance(value, dict):
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return [*kind.keys(value), *kind.values(value), *own, *own.values()]
    kind = type(value)
    if type(own) is dict and own and _holds_attributes_alone(kind):
        return [*own, *own.values()]
    _, _, children = parts_of(value, {}) or (None, (), ())
    return [*children, *own]


def _parts_of_partial(value: functools.partial[Any]) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    attributes = vars(value)
    keys = ("def", "args", "named", *(f".{name}" for name in attributes))
    return "partial", keys, (value.func, value.args, value.keywords, *attributes.values())


def take_class(value: Any, kind: type) -> None:
    """Let an object be of a class again that it was of."""
    if type(value) is not kind:
        value.__class__ = kind


def _may_hold_more(value: Any) -> bool:
    """Whether a list, a tuple or the like may have attributes beside what it holds."""
    return bool(_attributes(value)) if type(value) is functools.partial else hasattr(value, "__dict__")


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots_of(value).items():
        with contextlib.suppress(AttributeError):  # nothing may be in it
            found.setdefault(name, slot.__get__(value))
    return {name: x for name, x in found.items() if not hasattr(x, "__torch_frozen__")}


def _slots_of(value: Any) -> dict[str, types.MemberDescriptorType]:
    """The slots of an object whose class Python's code has defined, by the names of their attributes."""
    kind: Any = type(value)
    return _slots(kind)


@functools.cache
def _slots(kind: Any) -> dict[str, types.MemberDescriptorType]:
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


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
    attributes = _attributes_of_function(value)
    keys += [f".{name}" for name in attributes]
    children += attributes.values()
    return ("function", tuple(keys), tuple(children)) if keys else None


def _attributes_of_function(value: types.FunctionType) -> dict[str, Any]:
    """Those that torch's compiler has not put there, when the function was called first."""
    return {name: x for name, x in vars(value).items() if not name.startswith("__dynamo_")}


def cells_of(step: types.FunctionType) -> dict[str, types.CellType]:
    """The variables that a step shares with the function around it."""
    return dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))


def module_variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables of its module that a function may read, by `global name`."""
    module = function.__globals__
    named = {name: module[name] for name in _names(function.__code__) if name in module}
    return {f"{GLOBAL}{k}": x for k, x in named.items() if not isinstance(x, types.ModuleType | type)}


def is_global(path: Path) -> bool:
    """Whether a path is a variable of the module that the loop stands in."""
    return len(path) == 1 and str(path[0]).startswith(GLOBAL)


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
        # A dict with an order of its own keeps that beside what a dict holds.
        own: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        now = list(own.items(value))
        if len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, items, strict=True)):
            own.clear(value)
            for key, x in items:
                own.__setitem__(value, key, x)
        _fill_attributes(value, {k: x for k, x in zip(keys, children, strict=True) if _is_attribute(value, k)})
    elif kind == "set":
        if value != set(children):
            value.clear()
            value.update(children)
    elif kind == "object":
        _fill_attributes(value, dict(zip(keys, children, strict=True)))
    elif kind == "rows":
        if any(a is not b for a, b in zip(value.parts().values(), children, strict=True)):
            value.hold(*children)
    elif kind == "function":
        _fill_function(value, dict(zip(keys, children, strict=True)))
    elif kind == "partial":
        call, attributes = children[:3], dict(zip(keys[3:], children[3:], strict=True))
        if any(a is not b for a, b in zip((value.func, value.args, value.keywords), call, strict=True)):
            value.__setstate__((*call, vars(value)))
        _fill_attributes(value, attributes)


def _fill_function(value: types.FunctionType, parts: dict[Any, Any]) -> None:
    for name, x in ((k.removeprefix(GLOBAL), x) for k, x in parts.items() if k.startswith(GLOBAL)):
        if value.__globals__.get(name, _NOTHING) is not x:
            value.__globals__[name] = x
    given = [k for k in parts if k.startswith("default ")]
    named = {k.removeprefix("default "): parts[k] for k in given if not k.removeprefix("default ").isdigit()}
    placed = tuple(parts[k] for k in given if k.removeprefix("default ").isdigit())
    if any(a is not b for a, b in zip(value.__defaults__ or (), placed, strict=True)):
        value.__defaults__ = placed
    if any((value.__kwdefaults__ or {}).get(name, _NOTHING) is not x for name, x in named.items()):
        value.__kwdefaults__ = named
    _fill_attributes(value, {k: x for k, x in parts.items() if k.startswith(".")})


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
            if hasattr(value, "__dict__") and name not in _slots_of(value):
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
    if name == ITEMS:
        return "what it goes over"
    words = str(name).removeprefix(GLOBAL)
    for key in keys:
        if isinstance(key, str) and key.startswith("."):
            words += key
        elif isinstance(key, str) and key.startswith(GLOBAL):
            words = key.removeprefix(GLOBAL)
        elif key != "":
            words += f"[{key!r}]"
    return words


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves that are no tensors are the same constant."""
    return a is b or (type(a) is type(b) and isinstance(a, (*PLAIN, enum.Enum)) and distinct(a) == distinct(b))


def distinct(value: Any) -> Any:
    """A constant by itself; a float or complex number by its bits, for 0.0 equals -0.0, and nan does not equal nan."""
    return struct.pack("2d", value.real, value.imag) if isinstance(value, float | complex) else value
