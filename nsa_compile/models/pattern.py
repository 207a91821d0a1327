"""Sizes of an attention as plain data: the keys of ``model.pattern``. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

IndexConvention = Literal["minus", "paper_v2"]
# No dimension of a tensor is larger.
MAX_SIZE = 2**31 - 1


def require_int(owner: object, name: str, minimum: int) -> None:
    value = getattr(owner, name)
    # bool is an int to Python; `n_layers: true` is a mistake all the same.
    if type(value) is not int:
        raise ValueError(f"{name} = {value!r} must be an integer")
    if value < minimum:
        raise ValueError(f"{name} = {value} must be at least {minimum}")
    if value > MAX_SIZE:
        raise ValueError(f"{name} = {value} must be at most {MAX_SIZE}")


def require_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{name} = {value!r} must be one of {', '.join(choices)}")


def require_bool(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} must be true or false")


def require_positive(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e300:
        raise ValueError(f"{name} = {value!r} must be a positive number")


@dataclass(frozen=True)
class Pattern:
    """Sizes of an attention. A subclass has a default for each, and explains it by a text below it.

    An integer is at least 1, or 0 where ``from_zero`` names it; rules of its own a subclass adds to ``__post_init__``.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    from_zero: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in (int, "int"):
                require_int(self, field.name, 0 if field.name in self.from_zero else 1)

    @classmethod
    def sections(cls) -> dict[str, Any]:
        """Fields that have keys of their own, by dotted name: their names, or the class of patterns that they are."""
        return {}


@dataclass(frozen=True)
class SparsePattern(Pattern):
    """Which keys a query of NSA sees: the paper's block sizes and counts."""

    from_zero = ("num_initial",)

    compress_block: int = 32
    """Tokens pooled into one compressed key, ``l`` (eq. 7)."""
    compress_stride: int = 16
    """Tokens between the starts of neighbouring compressed blocks, ``d``; divides ``l`` and ``l'``."""
    select_block: int = 64
    """Tokens of one selection block, ``l'`` (eq. 9)."""
    num_selected: int = 16
    """Selection blocks that a query attends to, ``n``, those that are always selected included (eq. 11)."""
    window: int = 512
    """Tokens of the sliding window, ``w``, the query's own included (section 3.3.3)."""
    num_initial: int = 1
    """Blocks at the start of the sequence that are always selected; they count towards ``n``."""
    num_local: int = 2
    """Blocks up to and including the query's own that are always selected; they count towards ``n``."""
    index_convention: IndexConvention = "minus"
    """Index of the compressed block in eq. 9: minus is (l'/d)·j + m − n, paper_v2 the index as printed in the paper's
    second version, (l'/d)·j − m − n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "index_convention", get_args(IndexConvention))
        for name, symbol in (("compress_block", "l"), ("select_block", "l'")):
            if getattr(self, name) % self.compress_stride:
                raise ValueError(
                    f"{name} = {getattr(self, name)} must be a multiple of compress_stride = {self.compress_stride} "
                    f"(the paper's d divides {symbol})"
                )
        if self.num_selected < self.num_initial + self.num_local:
            raise ValueError(
                f"num_selected = {self.num_selected} must be at least num_initial + num_local = "
                f"{self.num_initial} + {self.num_local}, because the blocks that are always selected count towards n"
            )
