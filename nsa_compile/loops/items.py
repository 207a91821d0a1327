"""What a `for` loop goes over, by position: a range, slices of tensors, lists of tensors, and `zip`, `enumerate` and
`reversed` of these.

An iterator hides where it stands; these do not, so that a step can be traced at a position that is a symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Anything", "Items", "goes_over", "items_of_call"]


class Items:
    """Items that can be had by position."""

    def __len__(self) -> int:
        raise NotImplementedError

    def at(self, index: Any) -> Any:
        """The item of a position, which may be a symbol."""
        raise NotImplementedError

    def as_written(self) -> Iterable[Any]:
        """What Python goes over."""
        raise NotImplementedError

    def stacked(self) -> Items:
        """The same items, with the rows of one tensor in the place of a list's."""
        return self

    def lists(self) -> list[Any]:
        """The lists and tuples of tensors among them."""
        return []


class Positions(Items):
    """A range."""

    def __init__(self, numbers: range) -> None:
        self.start, self.step, self.length = numbers.start, numbers.step, len(numbers)

    def __len__(self) -> int:
        return self.length

    def at(self, index: Any) -> Any:
        return self.start + index * self.step

    def as_written(self) -> Iterable[int]:
        return range(self.start, self.start + self.length * self.step, self.step)


class Rows(Items):
    """The slices of a tensor at each index of a dimension, as `unbind` gives them."""

    def __init__(self, tensor: Tensor, dim: int = 0) -> None:
        self.tensor, self.dim = tensor, dim

    def __len__(self) -> int:
        return self.tensor.shape[self.dim]

    def at(self, index: Any) -> Tensor:
        return self.tensor.select(self.dim, index)

    def as_written(self) -> Iterable[Tensor]:
        return self.tensor.unbind(self.dim)


class Pieces(Items):
    """Slices of `size` indices of a dimension, as `split` gives them where the dimension is a multiple of it."""

    def __init__(self, tensor: Tensor, size: int, dim: int = 0) -> None:
        self.tensor, self.size, self.dim = tensor, size, dim

    def __len__(self) -> int:
        return self.tensor.shape[self.dim] // self.size

    def at(self, index: Any) -> Tensor:
        return self.tensor.narrow(self.dim, index * self.size, self.size)

    def as_written(self) -> Iterable[Tensor]:
        return self.tensor.split(self.size, self.dim)


class Listed(Items):
    """The tensors of a list or tuple, all alike, from its first or from its last one on."""

    def __init__(self, tensors: list[Tensor] | tuple[Tensor, ...], *, turned: bool = False) -> None:
        self.tensors, self.turned = tensors, turned

    def __len__(self) -> int:
        return len(self.tensors)

    def as_written(self) -> Iterable[Tensor]:
        return reversed(self.tensors) if self.turned else self.tensors

    def stacked(self) -> Items:
        return Rows(torch.stack(list(self.as_written())))

    def lists(self) -> list[Any]:
        return [self.tensors]


class Numbered(Items):
    """`enumerate`."""

    def __init__(self, items: Items, start: int) -> None:
        self.items, self.start = items, start

    def __len__(self) -> int:
        return len(self.items)

    def at(self, index: Any) -> tuple[Any, Any]:
        return self.start + index, self.items.at(index)

    def as_written(self) -> Iterable[Any]:
        return enumerate(self.items.as_written(), self.start)

    def stacked(self) -> Items:
        return Numbered(self.items.stacked(), self.start)

    def lists(self) -> list[Any]:
        return self.items.lists()


class Zipped(Items):
    """`zip`."""

    def __init__(self, parts: list[Items]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return min(map(len, self.parts))

    def at(self, index: Any) -> tuple[Any, ...]:
        return tuple(part.at(index) for part in self.parts)

    def as_written(self) -> Iterable[Any]:
        return zip(*(part.as_written() for part in self.parts), strict=False)

    def stacked(self) -> Items:
        return Zipped([part.stacked() for part in self.parts])

    def lists(self) -> list[Any]:
        return [x for part in self.parts for x in part.lists()]


class Anything(Items):
    """Items that Python alone can go over: each takes the place of its position."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def at(self, index: Any) -> Any:
        return index

    def as_written(self) -> Iterable[Any]:
        return self.items


def goes_over(value: Any) -> Items:
    """The items of what stands behind `in`."""
    if isinstance(value, Items):
        return value
    if isinstance(value, range):
        return Positions(value)
    if type(value) in (Tensor, torch.nn.Parameter) and value.dim() > 0:
        return Rows(value)
    if type(value) in (list, tuple) and value and _are_alike(value):
        return Listed(value)
    return Anything(value)


def _are_alike(values: list[Any] | tuple[Any, ...]) -> bool:
    kinds = {(x.shape, x.dtype, x.device, x.requires_grad) for x in values if type(x) is Tensor}
    return len(kinds) == 1 and all(type(x) is Tensor for x in values)


def items_of_call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What a call gives to go over; as `Items` where their positions are known."""
    found = _zipped(function, args, named) or _sliced(function, args, named)
    if found is not None:
        return found
    return function(*(x.as_written() if isinstance(x, Items) else x for x in args), **named)


def _zipped(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Items | None:
    if function is reversed and len(args) == 1:
        whole = args[0].as_written() if isinstance(args[0], Items) else args[0]
        if isinstance(whole, range):
            return goes_over(whole[::-1])
        found = goes_over(whole)
        return Listed(found.tensors, turned=True) if isinstance(found, Listed) else None
    if function not in (enumerate, zip) or not args:
        return None
    parts = [goes_over(x) for x in (args if function is zip else args[:1])]
    if any(isinstance(part, Anything) for part in parts):
        return None
    if function is enumerate:
        start = args[1] if len(args) == 2 else named.get("start", 0)
        return Numbered(parts[0], start) if type(start) is int else None
    if named.get("strict") and len({len(part) for part in parts}) > 1:
        return None  # Python says so, when it comes to the shortest's end
    return Zipped(parts)


def _sliced(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Items | None:
    """`x.unbind(…)`, `x.split(…)`, `x.chunk(…)`, as methods and as functions of torch."""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Tensor):
        args = (owner, *args)
    elif function not in (torch.unbind, torch.split, torch.chunk):
        return None
    if not args or type(args[0]) not in (Tensor, torch.nn.Parameter) or args[0].dim() == 0:
        return None
    tensor, *rest = args
    if name == "unbind":
        dim = rest[0] if rest else named.get("dim", 0)
        return Rows(tensor, dim) if type(dim) is int and -tensor.dim() <= dim < tensor.dim() else None
    if name not in ("split", "chunk"):
        return None
    pieces = function(*args[1:], **named) if owner is not None else function(*args, **named)
    dim = rest[1] if len(rest) > 1 else named.get("dim", 0)
    sizes = {piece.shape[dim] for piece in pieces}
    return Pieces(tensor, sizes.pop(), dim) if len(sizes) == 1 and 0 not in sizes else None
