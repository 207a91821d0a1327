"""What the functions that a step calls read of their modules and classes: a program is for these values alone."""

from __future__ import annotations

import copy
import dis
import gc
import itertools
import os
import sys
import types
from abc import get_cache_token
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from typing import Any

from torch._dynamo import eval_frame

from nsa_compile.loops.effects import BY_CALLER, effect_of
from nsa_compile.loops.python_numbers import (
    PythonType,
    frame_of_loop,
    holds_symbols,
    may_ask_what_it_is,
    note_again,
)
from nsa_compile.loops.source import STEP
from nsa_compile.loops.state import GLOBAL, PLAIN, NotFollowed, Snapshot, distinct, in_words, survey

__all__ = ["Changed", "Watched", "is_of_library"]

# Modules whose variables no author of a loop changes.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "nsa_compile", "sympy", "mpmath", "networkx",
}  # fmt: skip
_MISSING = object()


class Watched:
    """The variables that were read while a step was traced, and what they were.

    Args:
        seen: those of the loop's own module, by `global name`, that are looked at otherwise.
        module: all of that module's.
    """

    def __init__(self, seen: Collection[str], module: dict[str, Any]) -> None:
        self.seen = {name.removeprefix(GLOBAL) for name in seen}
        self.module = module
        # What is asked, for which name, and a value, by the address of the first and the second.
        self.values: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.answers: dict[Callable[[], Any], Any] = {}  # of functions that tell how torch or the system is set
        self.names: dict[int, _Names] = {}  # of variables of modules and of attributes, by the address of what has them
        self.unseen = _Unseen(module, self.seen)

    @contextmanager
    def noting(
        self, objects: Collection[Any], reached: Collection[Any]
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Yields the context in which what is called is noted. Where this one is left by an error, what was changed
        unseen is put back.

        Args:
            objects: those that the step may ask for something, modules and classes among them.
            reached: those that the loop's variables reach, which are looked at otherwise.

        Raises:
            Changed: something has changed that is none of the loop's variables.
            NotFollowed: a function that is called assigns to variables of its module, or asks whether a number `is`
                another.
        """
        self.unseen.known.update(map(id, reached))
        self.unseen.look_at(objects)
        notes = _Notes(self.unseen, objects)
        collects = gc.isenabled()
        gc.disable()  # what a finalizer does, wherever it happens to run, is no effect of the step
        try:
            try:
                yield notes.taken
            finally:
                if collects:
                    gc.enable()
        except BaseException:
            notes.put_back()
            raise
        notes.check()
        self._watch_called(notes)

    def _watch_called(self, notes: _Notes) -> None:
        """Watch what the functions that a trace has called may read."""
        holders = notes.holders
        asked = frozenset(name for code in notes.called for name in _names(code) - _of_nobody(code))
        for code, variables in notes.called.items():
            by_name = {x for x in _names(code) if x in variables} if "globals" in code.co_names else set()
            for name in {*_variables(code)[0], *by_name}:
                value = variables.get(name, _MISSING)
                if isinstance(value, types.ModuleType | type):
                    holders |= {value}
                elif isinstance(value, types.FunctionType):
                    self._watch(value, {x: getattr(value, x) for x in _OF_FUNCTIONS & asked})
                if variables is not self.module or name not in self.seen:
                    self._watch(variables, {name: _kept(value)})
            imported = (sys.modules.get(name) for name in _modules(code))
            holders |= {x for x in imported if isinstance(x, types.ModuleType) and not _is_installed(x)}
            self.names[id(variables)] = _Names(variables, asked)
        self._watch_attributes(holders, asked)
        asks_for_kinds = not _ASKS_FOR_KINDS.isdisjoint(asked)
        for function in (*notes.settings, *((get_cache_token,) if asks_for_kinds else ())):
            if (answer := _answer(function)) is not _MISSING:
                self.answers[function] = answer

    @contextmanager
    def changes_accepted(self) -> Iterator[None]:
        """Inside this context what a step has changed unseen is as it should be; put back if it is left by an error."""
        before = copy.copy(self.unseen)
        self.unseen.accept()
        try:
            yield
        except BaseException:
            before.put_back()
            raise

    def _watch(self, holder: Any, values: dict[str, Any]) -> None:
        self.values.update({(id(holder), name): (holder, name, value) for name, value in values.items()})

    def _watch_attributes(self, holders: Collection[Any], names: frozenset[str]) -> None:
        waiting, seen = list(holders), set[Any]()
        while waiting:
            holder = waiting.pop()
            if holder in seen:
                continue
            seen.add(holder)
            found = {
                name: x for name, x in vars(holder).items() if name in names or _is_special(holder, name, x, names)
            }
            if holder is sys and found.pop("modules", None) is not None:  # every import changes it
                self._watch(sys.modules, {name: _now(sys.modules, name) for name in names})
            self._watch(holder, {name: _kept(value) for name, value in found.items()})
            if is_of_library(holder):
                continue
            self.names[id(holder)] = _Names(holder, names)
            if isinstance(holder, type):
                waiting += [*holder.__mro__, *type.mro(type(holder))]
                asked = [x for x in _OF_CLASSES if x == "__bases__" or x in names]
                self._watch(holder, {x: _now(holder, x) for x in asked})
            waiting += [x for x in found.values() if isinstance(x, types.ModuleType | type)]

    def changed(self) -> str | None:
        """What is something else now, in words."""
        found = (name for holder, name, value in self.values.values() if not _same(_now(holder, name), value))
        told = (f"{f.__name__}()" for f, answer in self.answers.items() if not _same(_answer(f), answer))
        come = (name for names in self.names.values() if (name := names.come()) is not None)
        return next(itertools.chain(found, told, come), None) or self.unseen.changed_since()


class _Names:
    """The names of a module's variables, or of the attributes of a module or class. One that comes later may hide what
    a step reads, or be what it asks for.

    Args:
        holder: the variables, the module or the class.
        asked: the names that a step may ask for.
    """

    def __init__(self, holder: Any, asked: frozenset[str]) -> None:
        self.holder, self.asked = holder, asked
        self.before = frozenset(self._now())

    def come(self) -> str | None:
        """A name that a step may have asked for, and that is new."""
        now = self._now()
        if now.keys() == self.before:
            return None
        new = now.keys() - self.before
        if not self.asked.isdisjoint(_ALL_NAMES):
            return next(iter(now.keys() ^ self.before))
        if isinstance(self.holder, type) and new - _MADE_WHEN_ASKED:
            return next(iter(new - _MADE_WHEN_ASKED))
        return next((name for name in new if name in self.asked), None)

    def _now(self) -> Any:
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)


def _is_special(holder: Any, name: str, value: Any, asked: Collection[str]) -> bool:
    """Whether an attribute of a class is read by no name of the loop: a method, such as the `forward` of a module that
    torch calls, or any, where all are asked for."""
    if not isinstance(holder, type) or is_of_library(holder):
        return False
    return isinstance(value, _METHODS) or not _ALL_NAMES.isdisjoint(asked)


_METHODS = (types.FunctionType, property, classmethod, staticmethod, cached_property)
_OF_CLASSES = ("__bases__", "__subclasses__")
_ASKS_FOR_KINDS = {"isinstance", "issubclass", "singledispatch"}
_OF_FUNCTIONS = {"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"}
# By these a step may ask for any name, or for all.
_ALL_NAMES = {"dir", "vars", "__dict__", "globals", "getmembers"}
_MADE_WHEN_ASKED = {"__annotations__", "__abstractmethods__", "__doc__"}


class Changed(NotFollowed):
    """A step has changed what is none of its loop's variables. It may be a cache, which changes no result."""


class _Unseen:
    """What a step may change without being one of the loop's variables: objects of modules, and attributes of classes.

    What libraries hold is mostly caches, and large: it is compared once for each function that is called, not after
    each trace.

    Args:
        module: the variables of the loop's module.
        seen: those of them that are looked at otherwise.
    """

    def __init__(self, module: dict[str, Any], seen: Collection[str]) -> None:
        self.module, self.seen = module, seen
        self.known = set[int]()  # addresses of what is looked at
        self.surveys: list[Snapshot] = []
        self.of_libraries: list[Snapshot] = []  # checked in the first trace that calls what reads them
        self.holders: dict[Any, dict[str, Any]] = {}  # classes and modules, and their attributes

    def look(self, frame: types.FrameType) -> None:
        """Note what a function that has just been called may change."""
        code, variables = frame.f_code, frame.f_globals
        held = self.of_libraries if "-packages" in code.co_filename else self.surveys
        names = [n for n in _variables(code)[0] if not (variables is self.module and n in self.seen)]
        self._survey({f"{GLOBAL}{n}": variables[n] for n in names if n in variables}, held)
        modules = [variables[n] for n in names if isinstance(variables.get(n), types.ModuleType)]
        self.look_at(modules, of_libraries=held is self.surveys)
        for module in (m for m in modules if not _is_installed(m)):
            named = {f"{module.__name__}.{n}": vars(module)[n] for n in code.co_names if n in vars(module)}
            self._survey(named, held)
        if os in modules and {"environ", "getenv", "putenv"} & set(code.co_names):
            self._survey({"os.environ": os.environ._data}, held)  # pyrefly: ignore[missing-attribute]
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
            self._survey({k.__name__: k for k in kinds if k not in self.holders}, held)

    def look_at(self, objects: Collection[Any], *, of_libraries: bool = False) -> None:
        """Note the classes among them, and of the others, and the modules, those of libraries if that is asked for."""
        for x in objects:
            if not isinstance(x, types.ModuleType):
                kinds = x.__mro__ if isinstance(x, type) else type(x).__mro__
                self._survey({k.__name__: k for k in kinds if k not in self.holders}, self.surveys)
            elif (of_libraries or not _is_installed(x)) and vars(x) is not self.module:
                self.holders.setdefault(x, dict(vars(x)))

    def _survey(self, values: dict[str, Any], held: list[Snapshot]) -> None:
        new = {name: x for name, x in values.items() if id(x) not in self.known and not isinstance(x, types.ModuleType)}
        self.known.update(map(id, new.values()))
        for kind in (x for x in new.values() if isinstance(x, type) and not is_of_library(x)):
            self.holders[kind] = dict(vars(kind))
            inside = {f"{kind.__name__}.{name}": y for name, x in vars(kind).items() for y in _within(name, x)}
            self._survey(inside, held)
        found = {name: x for name, x in new.items() if not isinstance(x, type)}
        if found:
            held.append(survey(found, of_library=held is self.of_libraries))

    def changed(self) -> str | None:
        """What is other than it was, in words."""
        for holder in self.holders:
            for name in self._changed_in(holder):
                return f"{holder.__name__}.{name}"
        for held in (*self.surveys, *self.of_libraries):
            if (path := held.change()) is not None:
                return in_words(path)
        self.of_libraries.clear()
        return None

    def changed_since(self) -> str | None:
        """What is other than it was after the last trace, in words; of what libraries hold, nothing is."""
        found = (held.change() for held in self.surveys)
        return next((in_words(path) for path in found if path is not None), None)

    def accept(self) -> None:
        """Take everything as it is now."""
        self.holders = {holder: dict(vars(holder)) for holder in self.holders}
        self.surveys, self.of_libraries = (
            [survey(held.roots(), of_library=True) for held in surveys] for surveys in (self.surveys, self.of_libraries)
        )

    def put_back(self) -> None:
        """Everything as it was."""
        for holder, before in self.holders.items():
            for name in self._changed_in(holder):
                if name in before:
                    setattr(holder, name, before[name])
                else:
                    delattr(holder, name)
        for held in (*self.surveys, *self.of_libraries):
            held.restore()

    def _changed_in(self, holder: Any) -> list[str]:
        before, now = self.holders[holder], dict(vars(holder))
        found = [n for n in {**before, **now} if now.get(n, _MISSING) is not before.get(n, _MISSING)]
        # What a trace has imported, or lent to a module.
        passing = {
            n for n in found for x in (before.get(n), now.get(n)) if isinstance(x, types.ModuleType) or _is_lent(x)
        }
        return [n for n in found if n not in passing]


class _Notes:
    """What is called while a step is traced once.

    Args:
        unseen: what this may change.
        objects: those that the step may ask for something.
    """

    def __init__(self, unseen: _Unseen, objects: Collection[Any]) -> None:
        self.unseen = unseen
        self.called: dict[types.CodeType, dict[str, Any]] = {}
        self.holders: set[Any] = {y for x in objects for y in (x.__mro__ if isinstance(x, type) else type(x).__mro__)}
        self.holders |= {x for x in objects if isinstance(x, types.ModuleType)}
        self.assigned: list[tuple[dict[str, Any], str, Any, str]] = []
        self.lent: list[dict[str, Any]] = []  # variables of modules that `type` is put into while a step is followed
        # By address: to hash a code takes longer than to call it.
        self.libraries: dict[int, types.CodeType] = {}
        self.asking: dict[int, types.CodeType] = {}  # functions that may ask whether a number `is` another
        self.asked: list[str] = []
        self.harmless = set[type]()  # whose methods written in C have no effect
        self.harmless_functions = set[Any]()
        self.settings = set[Callable[[], Any]]()  # functions of torch that tell how it is set

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside this context what is called is noted."""
        before = sys.getprofile()
        sys.setprofile(self._noting())
        try:
            yield
        finally:
            note_again(before)
            for variables in self.lent:
                variables.pop("type", None)
            self.lent.clear()

    def _noting(self) -> Callable[[types.FrameType, str, Any], None]:
        """What `sys.setprofile` calls, millions of times.

        Raises:
            NotFollowed: a function written in C is about to be called, whose effect nobody would see.
        """
        harmless, functions, libraries, asking = self.harmless, self.harmless_functions, self.libraries, self.asking
        module = types.ModuleType

        def note(frame: types.FrameType, event: str, argument: Any) -> None:
            if event == "c_call":
                kind = type(getattr(argument, "__self__", None))
                if kind not in harmless and (kind is not module or argument not in functions):
                    self._refuse_effects(frame, argument, kind)
            elif event == "call":
                if id(frame.f_code) not in libraries:
                    self._note_call(frame)
            elif event == "return" and asking and id(frame.f_code) in asking and holds_symbols(frame):
                self.asked.append(f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}")

        return note

    def _note_call(self, frame: types.FrameType) -> None:
        code, variables = frame.f_code, frame.f_globals
        is_compiled = code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__
        if is_compiled and (at := frame_of_loop(frame.f_back)) is not None:
            why = "it calls a function that torch.compile has compiled; call the function itself"
            raise NotFollowed(why, f"{at.f_code.co_filename}:{at.f_lineno}")
        if str(variables.get("__name__", "")).partition(".")[0] in _LIBRARIES:
            self.libraries[id(code)] = code
            return
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            self.holders.update((owner if isinstance(owner, type) else type(owner)).__mro__)
        if code not in self.called:
            self.called[code] = variables
            if may_ask_what_it_is(code):
                self.asking[id(code)] = code
            if frame_of_loop(frame) is not None or code.co_name == "__del__":
                self.unseen.look(frame)
            names = _variables(code)[1]
            self.assigned.extend((variables, n, variables.get(n, _MISSING), code.co_name) for n in names)
            if "type" in code.co_names and "type" not in variables:
                variables["type"] = PythonType
                self.lent.append(variables)

    def _refuse_effects(self, frame: types.FrameType, function: Any, kind: type) -> None:
        effect = effect_of(function, frame.f_code.co_filename)
        if effect is not None and (at := frame_of_loop(frame)) is not None:
            effect = "logs" if frame.f_globals.get("__name__") == "logging" else effect
            raise NotFollowed(f"it {effect}", f"{at.f_code.co_filename}:{at.f_lineno}")
        if effect is None and kind is types.ModuleType:
            if function.__name__ not in BY_CALLER:
                self.harmless_functions.add(function)
            if _tells_a_setting(function):
                self.settings.add(function)
        elif effect is None and not issubclass(kind, type | types.NoneType) and not hasattr(kind, "locked"):
            self.harmless.add(kind)

    def check(self) -> None:
        """Put back what functions have assigned to variables of their modules.

        Raises:
            Changed: something else has changed; it is left as it is.
            NotFollowed: a function has assigned to such a variable, or asked whether a number `is` another; all is put
                back.
        """
        assigned = self._take_back_assignments()
        if self.asked or assigned:
            self.unseen.put_back()
        for place in self.asked:
            why = "it asks whether a number that changes from step to step `is` another"
            raise NotFollowed(f"{why}; compare it by ==", place)
        for name, function in assigned:
            who = "it" if function == STEP else function
            raise NotFollowed(f"{who} assigns to {name}, a variable of its module")
        if (what := self.unseen.changed()) is not None:
            raise Changed(f"it changes {what}, which is none of the loop's variables")

    def put_back(self) -> None:
        """Everything as it was before."""
        self._take_back_assignments()
        self.unseen.put_back()

    def _take_back_assignments(self) -> list[tuple[str, str]]:
        found = [(name, function) for variables, name, value, function in self.assigned
                 if variables.get(name, _MISSING) is not value]  # fmt: skip
        for variables, name, value, _ in reversed(self.assigned):
            variables[name] = value
            if value is _MISSING:
                del variables[name]
        return found


def _tells_a_setting(function: Any) -> bool:
    """Whether a function of torch or the system, written in C, is named as those that tell how it is set."""
    of = str(function.__module__).partition(".")[0]
    return of in ("torch", "sys", "posix", "nt") and function.__name__.lstrip("_").startswith(("get", "is", "are_"))


def _is_lent(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("nsa_compile.loops")


def _within(name: str, value: Any) -> list[Any]:
    """What an attribute of a class holds: functions, with two underscores as well, and what is not Python's own."""
    if isinstance(value, property):
        return [x for x in (value.fget, value.fset, value.fdel) if x is not None]
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    if isinstance(value, cached_property):
        return [value.func]
    return [value] if isinstance(value, types.FunctionType) or not name.startswith("__") else []


def _is_installed(module: types.ModuleType) -> bool:
    return is_of_library(module) or "-packages" in (getattr(module, "__file__", None) or "")


def is_of_library(value: Any) -> bool:
    """Whether a function or class is one of the libraries that no author of a loop changes."""
    return _root(value) in _LIBRARIES


def _root(value: Any) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name.partition(".")[0]


@cache
def _variables(code: types.CodeType) -> tuple[list[str], list[str]]:
    """The names of variables of its module that a function reads, and of those that it assigns to."""
    read, assigned = [], []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.append(str(instruction.argval))
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            assigned.append(str(instruction.argval))
    return sorted(set(read)), assigned


@cache
def _modules(code: types.CodeType) -> frozenset[str]:
    """The names of modules that a function imports, or may ask for by a name in its text."""
    imported = (str(i.argval) for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")
    return frozenset((*imported, *(x for x in code.co_consts if isinstance(x, str))))


def _of_nobody(code: types.CodeType) -> set[str]:
    """Names in a function of a package that say nothing of the user's classes: it looks at its own in that way."""
    return {*_ALL_NAMES, "__subclasses__"} if "-packages" in code.co_filename else set()


@cache
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that a function may ask somebody for: those in its text, quoted ones among them."""
    quoted = (x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
    return frozenset((*code.co_names, *quoted))


def _answer(function: Callable[[], Any]) -> Any:
    """What a function tells if nothing is given to it."""
    try:
        value = function()
    except (TypeError, RuntimeError):  # it tells something of what it is given
        return _MISSING
    return value if isinstance(value, PLAIN) else _MISSING


def _now(holder: Any, name: str) -> Any:
    if isinstance(holder, types.FunctionType):
        return getattr(holder, name)
    if isinstance(holder, type) and name in _OF_CLASSES:
        return holder.__bases__ if name == "__bases__" else len(type.__subclasses__(holder))
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, _MISSING)


def _kept(value: Any) -> Any:
    """A value that later ones can be compared with: a copy of what is written to in place."""
    return type(value)(value) if type(value) in (list, dict, set) else value


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, (*PLAIN, list, dict, set, tuple)):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    if isinstance(now, dict):
        return list(now) == list(before) and all(map(_same, now.values(), before.values()))
    return bool(distinct(now) == distinct(before))
