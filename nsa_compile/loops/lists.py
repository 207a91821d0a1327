"""Lists of a loop: one that a step only appends to, and one that it reads, as the rows of one tensor that grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Appended", "GrowingList", "IsRead", "NotRows", "elements_of", "may_be_rows", "separate"]

Path = tuple[Any, ...]


class IsRead(BaseException):
    """A step reads a list that it was taken only to append to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path


class NotRows(IsRead):
    """A step does with a list what cannot be done with the rows of a tensor; `reason` tells what, where it is known."""

    def __init__(self, path: Path, reason: str | None = None) -> None:
        super().__init__(path)
        self.reason = reason


class _Unread:
    """What no function on tensors takes: those that read a list past its methods find it first."""

    def __init__(self, why: IsRead) -> None:
        self.why = why

    def _refuse(self, *_: Any) -> Any:
        raise self.why

    # What searches or sorts a list compares its elements.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A list that torch reads is an argument of its own.
        lists = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Appended | GrowingList)]
        raise list.__getitem__(lists[0], 0).why


class Appended(list):
    """A list that a step may only append to; it holds what this step has appended, behind something that is none."""

    def __init__(self, path: Path) -> None:
        super().__init__([_Unread(IsRead(path))])

    @property
    def items(self) -> list[Any]:
        return list.__getitem__(self, slice(1, None))

    def append(self, value: Any) -> None:
        list.append(self, value)

    def extend(self, values: Any) -> None:
        for value in values:
            list.append(self, value)

    def __iadd__(self, values: Any) -> Any:
        self.extend(values)
        return self


class GrowingList(list):
    """A list of tensors of one shape, as the rows of one tensor.

    It holds what a step has appended, behind something that is no tensor; between two steps, that is none.

    Attributes:
        rows: `[n, …]`, or None as long as there was no element.
        of: which of the loop's lists its first elements are of, those that were there before the loop.
        first, kept: which of that list's elements these are, and how many.
        appended: the tensors appended in this step.
        cut: whether elements have been taken away in this step.
        few: whether it is the end of another list, of a fixed length at most.
    """

    handed: ClassVar[
        list[Any]
    ] = []  # tensors that are elements, or have views that are; a write to one is not followed

    with_gradients: ClassVar[bool] = True  # whether they are on around the loop: a list is no part of a step's no_grad

    def __init__(self, path: Path, elements: Iterable[Tensor] = ()) -> None:
        super().__init__([_Unread(NotRows(path))])
        elements = list(elements)
        self.hold(torch.stack(elements) if elements else None, str(path), 0, len(elements))

    def hold(self, rows: Any, of: str, first: Any, kept: Any) -> None:
        """Be what a step begins with."""
        self.rows, self.of, self.first, self.kept = rows, of, first, kept
        self._forget()

    def _forget(self) -> None:
        """Forget what a step has done."""
        self.appended: list[Tensor] = []
        self.cut = self.few = False
        self._joined: Any = None
        self._part: Any = None  # of a slice: which elements of its list it has
        self._is_mixed = False  # whether it may have some of before behind others

    def parts(self) -> dict[str, Any]:
        """What `hold` takes."""
        return {".rows": self.rows, ".of": self.of, ".first": self.first, ".kept": self.kept}

    @property
    def _why(self) -> IsRead:
        return list.__getitem__(self, 0).why

    @property
    def waiting(self) -> list[Any]:
        """Those of them that are not in the rows yet."""
        return list.__getitem__(self, slice(1, None))

    def begin(self) -> None:
        """Forget what was appended before, by a step that was given up as well."""
        list.__delitem__(self, slice(1, None))
        self._forget()
        if self.rows is not None:
            self.handed.append(self.rows)

    def all_rows(self) -> Any:
        """The elements, stacked; None where there are none."""
        if not self.waiting:
            return self.rows
        of = len(self.waiting), self.rows
        if self._joined is None or any(a is not b for a, b in zip(of, self._joined[0], strict=True)):
            with torch.set_grad_enabled(self.with_gradients):
                new = torch.stack(self.waiting)
                if self.rows is not None:
                    new = torch.cat([self.rows, new])
            self.handed.append(new)
            self._joined = of, new  # asked for again, it is the same tensor
        return self._joined[1]

    def read_rows(self) -> Any:
        """The elements, stacked as a step does that: without gradients, where it has turned them off."""
        rows = self.all_rows()
        return rows.clone() if self.with_gradients and not torch.is_grad_enabled() else rows

    def settle(self) -> None:
        """Take what waits into the rows.

        Raises:
            NotRows: it has elements from before the loop, and not in front.
        """
        if self._is_mixed:
            raise self._why
        self._take_part()
        self.rows = self.all_rows()
        self.appended += self.waiting
        list.__delitem__(self, slice(1, None))

    def length(self) -> Any:
        """The number of elements, which may be a symbol; `len` makes a number of it."""
        return (0 if self.rows is None else self.rows.shape[0]) + len(self.waiting)

    def __bool__(self) -> bool:
        return bool(self.length() > 0)

    def added(self, start: Any) -> Any:
        """What `sum` gives."""
        return start + self.read_rows().sum(0) if self.length() > 0 else start

    def append(self, value: Any) -> None:
        known = _form(self.waiting[0]) if self.waiting else None if self.rows is None else _form_of_rows(self.rows)
        if not isinstance(value, Tensor) or (known is not None and _form(value) != known):
            raise self._why
        self.handed.append(value)
        list.append(self, value)

    def extend(self, values: Any) -> None:
        if isinstance(values, GrowingList):
            raise self._why
        for value in values:
            self.append(value)

    def __iadd__(self, values: Any) -> Any:
        self.extend(values)
        return self

    def __add__(self, values: Any) -> Any:
        if isinstance(values, GrowingList):
            found = self._with(self._joined_with(self.all_rows(), values.all_rows()), self)
            found._is_mixed |= values._may_hold_some_of_before
            return found
        if type(values) is not list:
            _raise(values if isinstance(values, Appended) else self)
        found = self._with(self.rows, self)
        for value in (*self.waiting, *values):
            found.append(value)
        return found

    def __radd__(self, values: Any) -> Any:
        if type(values) is not list:
            raise self._why
        first = self._with(None)
        first.extend(values)
        return first + self if values else self._with(self.all_rows(), self)

    def _joined_with(self, first: Any, second: Any) -> Any:
        if first is None or second is None:
            return second if first is None else first
        if _form_of_rows(first) != _form_of_rows(second):
            raise self._why
        with torch.set_grad_enabled(self.with_gradients):
            rows = torch.cat([first, second])
        self.handed.append(rows)
        return rows

    def _with(self, rows: Any, begins_as: GrowingList | None = None) -> GrowingList:
        """A list of other rows, of which the first may be those of another list."""
        found = GrowingList(self._why.path)
        found.rows = rows
        if begins_as is not None:
            found.of, found.first, found.kept = begins_as.of, begins_as.first, begins_as.kept
            found._part, found._is_mixed = begins_as._part, begins_as._is_mixed
        return found

    @property
    def _may_hold_some_of_before(self) -> bool:
        return type(self.kept) is not int or self.kept > 0

    def _take_part(self) -> None:
        """Find out which elements of before a slice has: a question for a slice that stays, or loses some."""
        if self._part is not None and self._may_hold_some_of_before:
            start, stop = (min(bound, self.kept) for bound in self._part)
            self.first, self.kept = self.first + start, stop - start
        self._part = None

    def instead(self, values: list[Any]) -> GrowingList:
        """A list of other elements, which takes the place of this one."""
        found = self._with(None if self.rows is None else self._between(self.rows, 0, 0))
        found.extend(values)
        return found

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._sliced(index)
        if not isinstance(index, int | torch.SymInt) or isinstance(index, bool):
            raise self._why
        length = self.length()
        if index < 0:
            index = index + length
        if index < 0 or index >= length:
            raise IndexError("list index out of range")
        for back, value in enumerate(reversed(self.waiting), 1):
            if index == length - back:
                return value
        with torch.set_grad_enabled(self.with_gradients):
            return self.rows[index]

    def _sliced(self, index: slice) -> GrowingList:
        if index.step not in (None, 1):
            raise self._why
        length, rows = self.length(), self.all_rows()
        start = 0 if index.start is None else index.start
        stop = length if index.stop is None else index.stop
        start, stop = (max(x + length, 0) if x < 0 else min(x, length) for x in (start, stop))
        start, stop = (0, 0) if start >= stop else (start, stop)
        if rows is not None:
            rows = self._between(rows, start, stop)
        self._take_part()
        found = self._with(rows, self)
        found._part = start, stop
        found.few = type(index.start) is int and index.start < 0
        return found

    def __len__(self) -> int:
        if not self.few:
            raise self._why
        length = 0
        while length < self.length():  # a condition of the step's for each
            length += 1
        return length

    def __iter__(self) -> Any:
        if not self.few:
            raise self._why
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[Any]:
        at = 0
        while at < self.length():  # it may get more meanwhile
            yield self[at]
            at += 1

    def _between(self, rows: Any, start: Any, stop: Any) -> Any:
        with torch.set_grad_enabled(self.with_gradients):
            return rows[start:stop]

    def pop(self, index: Any = -1) -> Any:
        length = self.length()
        if index not in (0, -1) or length < 1:
            raise self._why
        value = self[index]
        self.settle()
        self.rows = self._between(self.rows, *((1, None) if index == 0 else (None, length - 1)))
        self.cut = True
        if self._may_hold_some_of_before:
            if index == 0 and self.kept > 0:
                self.first, self.kept = self.first + 1, self.kept - 1
            elif index == -1 and self.kept == length:
                self.kept = self.kept - 1
        return value

    def __delitem__(self, index: Any) -> None:
        if isinstance(index, slice) or index not in (0, -1):
            raise self._why
        self.pop(index)

    def clear(self) -> None:
        self.settle()
        if self.rows is not None:
            self.rows = self._between(self.rows, 0, 0)
        self.cut, self.kept = True, 0


BETWEEN = GrowingList._between.__name__  # where in the program the rows of a slice, or of an empty list, are made


def _form(value: Tensor) -> tuple[Any, ...]:
    """What the rows of one tensor have in common."""
    return value.dtype, value.device, value.dim(), *value.shape


def _form_of_rows(rows: Tensor) -> tuple[Any, ...]:
    """That of each row, where there may be none."""
    return rows.dtype, rows.device, rows.dim() - 1, *rows.shape[1:]


def may_be_rows(value: Any) -> bool:
    """Whether a list holds tensors of one shape alone, or nothing."""
    if type(value) is not list:
        return False
    return all(type(x) is Tensor and x.layout == torch.strided and _form(x) == _form(value[0]) for x in value)


def elements_of(found: GrowingList, before: list[Any]) -> list[Any]:
    """The tensors of the list, given those of the list of before that it may begin with."""
    rows = [] if found.rows is None else separate(found.rows)
    return [*before[found.first : found.first + found.kept], *rows[found.kept :]]


class _Separate(torch.autograd.Function):
    """Rows as tensors that are no views: torch refuses to write in place to one of several views with a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Any:
        own = rows.clone(memory_format=torch.contiguous_format)
        memory, first, step = own.untyped_storage(), own.storage_offset(), own.stride(0)
        layout = own.shape[1:], own.stride()[1:]
        return tuple(own.new_empty(0).set_(memory, first + t * step, *layout) for t in range(len(own)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.stack(gradients)


def separate(rows: Tensor) -> list[Tensor]:
    """The rows of a tensor, each for itself."""
    wanted = rows.requires_grad and torch.is_grad_enabled() and len(rows) > 0
    return list(_Separate.apply(rows) if wanted else rows.unbind(0))


def _raise(read: Any, *_: Any, **__: Any) -> Any:
    raise next(list.__iter__(read)).why


# Those of `list` itself would read the elements past the methods above.
_OTHERS = "getitem setitem delitem len iter reversed contains add radd mul rmul imul eq ne lt gt le ge repr"
_METHODS = [f"__{name}__" for name in _OTHERS.split()]
_METHODS += "index count insert pop remove reverse sort copy clear".split()  # noqa: SIM905
for _kind in (Appended, GrowingList):
    for _name in _METHODS:
        if _name not in vars(_kind):
            setattr(_kind, _name, _raise)
