"""The state of a decode step that is updated in place: what it may be made of, and whether a step has kept its form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nsa_compile.memory import memory
from nsa_compile.program.functional import share_elements

__all__ = ["check_state", "cloned", "describe_difference", "differing", "tensors_of"]

Part = tuple[Any, ...]  # the way to a part of a value: keys and places
_NO_PAIR: Part = ("what is returned", "no pair")  # in the place of a part


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors of a state; torch's pytree would tie a compiled step to the state of its registry."""
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    parts = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


def check_state(state: Any) -> None:
    """That a state is made of tensors, each with elements of its own.

    Raises:
        ValueError: it is not.
    """
    _check_kind(state, ())
    tensors = tensors_of(state)
    if len({memory(x) for x in tensors}) == len(tensors) or not share_elements(tensors):
        return
    twice = next(x for i, x in enumerate(tensors) if any(share_elements([x, other]) for other in tensors[:i]))
    raise ValueError(
        f"two tensors of the state, of shape {list(twice.shape)}, share memory, so a step that updates one in place "
        "would change the other; pass x.clone() for one of them"
    )


def _check_kind(value: Any, path: Part) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _check_kind(part, (*path, key))
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            _check_kind(part, (*path, i))
    elif isinstance(value, Tensor):
        if 0 in value.stride() and any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True)):
            raise ValueError(
                f"{_named(path)} is expanded, so its elements share memory and cannot be updated in place; pass "
                "x.contiguous()"
            )
    elif value is not None:
        raise ValueError(
            f"{_named(path)} is of type {type(value).__name__}; a compiled decode step updates tensors, None, and "
            "tuples, lists and dicts of these"
        )


def differing(state: Any, returned: Any) -> Part | None:
    """The first part of the new state that cannot be written to the tensors of the old one, or None. It is traced."""
    if not isinstance(returned, tuple | list) or len(returned) < 2:
        return _NO_PAIR
    return _differing(state, returned[0], ())


def _differing(old: Any, new: Any, path: Part) -> Part | None:
    if isinstance(old, Tensor):
        same = isinstance(new, Tensor) and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        return None if same else path
    if old is None:
        return None if new is None else path
    if isinstance(old, dict):
        if not isinstance(new, dict) or sorted(old) != sorted(new):
            return path
        pairs = [(key, old[key], new[key]) for key in sorted(old)]
    else:
        if not isinstance(new, tuple | list) or len(old) != len(new):
            return path
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
    for key, a, b in pairs:
        found = _differing(a, b, (*path, key))
        if found is not None:
            return found
    return None


def describe_difference(name: str, part: Part, state: Any, returned: Any) -> str:
    """What `differing` has found, in one line."""
    if part == _NO_PAIR:
        return f"{name} returns {_described(returned)}, where it returns (state, logits)"
    old, new = state, returned[0]
    for key in part:
        old, new = old[key], new[key]
    rule = "the new state has the parts of the old one"
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        rule = (
            "a compiled step writes the new state to the tensors of the old one, which keep their shapes, dtypes and "
            "devices: allocate each cache at its full length, and convert what you write to it"
        )
    return f"{name} returns {_described(new)} for {_named(part)}, which was {_described(old)}; {rule}"


def cloned(value: Any) -> Any:
    """The same value with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [cloned(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _named(path: Sequence[Any]) -> str:
    return f"state[{']['.join(map(repr, path))}]" if path else "the state"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    if isinstance(value, dict):
        return f"a dict with {sorted(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
