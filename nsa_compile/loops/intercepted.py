"""Functions of torch in a form that a trace with symbolic integers can follow."""

from __future__ import annotations

import math
import types
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.loops.einsum import einsum
from nsa_compile.loops.lists import GrowingList
from nsa_compile.loops.state import READS_A_NUMBER, NotFollowed
from nsa_compile.workarounds import cosine_similarity

_INDICES = {torch.int64, torch.int32, torch.int16, torch.int8}


def _has_symbol(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return any(map(_has_symbol, x))
    return isinstance(x, torch.SymInt | torch.SymFloat)


def parts_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _basic(x: Tensor, index: Any) -> Tensor | None:
    """`x[index]` as selects and slices, or None where an index is a tensor or a list."""
    parts = list(parts_of(index))
    if not all(p is None or p is Ellipsis or isinstance(p, int | slice | torch.SymInt) for p in parts):
        return None
    if any(isinstance(p, bool) for p in parts):
        return None
    taken = sum(p is not None and p is not Ellipsis for p in parts)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    dim = 0
    for part in parts:
        if part is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            if part != slice(None):
                x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, 1 if part.step is None else part.step)
            dim += 1
        else:
            x = torch.select(x, dim, part)
    return x


def _needs_care(index: Any) -> bool:
    parts = parts_of(index)
    return any(_has_symbol(p) or (isinstance(p, slice) and _has_symbol([p.start, p.stop, p.step])) for p in parts)


def picks_a_row(index: Any) -> bool:
    """Whether an index begins with a number in a tensor."""
    first, *others = parts_of(index) or (None,)
    if not _is_number(first) and any(map(_is_number, others)):
        raise NotFollowed(
            "it picks by a number in a tensor, as T[:, i]; T[:, i[None]] keeps a dimension of one, and is followed"
        )
    return _is_number(first)


def shows_a_row(index: Any) -> bool:
    """Whether what such an index picks is part of the tensor; by a list, or numbers in a dimension, it is a copy."""
    parts = parts_of(index)
    basic = (int, slice, torch.SymInt, types.NoneType, types.EllipsisType)
    return picks_a_row(index) and all(_is_number(p) or isinstance(p, basic) for p in parts)


def _is_number(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype in _INDICES


def _picked(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...], Tensor]:
    """A copy of the row that an index begins with, the rest of the index, and the row's number, `[1]`: torch would
    take the number out of the tensor."""
    first, *rest = parts_of(index)
    number = first.long()[None]
    return x[number].squeeze(0), tuple(rest), number


def _getitem(x: Tensor, index: Any) -> Any:
    if picks_a_row(index):
        row, rest, _ = _picked(x, index)
        return row[rest] if rest else row
    if not _needs_care(index):
        return NotImplemented
    found = _basic(x, index)
    return found if found is not None else x[_with_tensors(index)]


def _with_tensors(index: Any) -> Any:
    parts = parts_of(index)
    return tuple(_tensor(p) if isinstance(p, torch.SymInt | list) and _has_symbol(p) else p for p in parts)


def _setitem(x: Tensor, index: Any, value: Any) -> Any:
    if picks_a_row(index):
        row, rest, number = _picked(x, index)
        _set(row, rest, value)
        x.index_put_((number,), row[None])
        return None
    if not _needs_care(index):
        return NotImplemented
    _set(x, index, value)
    return None


def _set(x: Tensor, index: Any, value: Any) -> None:
    view = _basic(x, index)
    if view is None:
        x[_with_tensors(index)] = value
    elif isinstance(value, Tensor):
        while value.dim() > view.dim() and value.shape[0] == 1:
            value = value.squeeze(0)
        view.copy_(value)
    elif isinstance(value, torch.SymInt | torch.SymFloat):
        view.copy_(_tensor(value, dtype=x.dtype, device=x.device))
    else:
        view.fill_(value)


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    """`torch.tensor` of symbolic numbers."""
    if not _has_symbol(data) or requires_grad:
        return NotImplemented
    if isinstance(data, list | tuple):
        parts = [_as_tensor(x, dtype, device) for x in data]
        return torch.stack(parts)
    if dtype is None:
        dtype = torch.int64 if isinstance(data, torch.SymInt) else torch.get_default_dtype()
    return torch.full((), cast(int, data), dtype=dtype, device=device)


def _new_tensor(x: Tensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    return _tensor(data, dtype=dtype or x.dtype, device=device or x.device, requires_grad=requires_grad)


def _as_tensor(data: Any, dtype: Any, device: Any) -> Tensor:
    made = _tensor(data, dtype=dtype, device=device)
    return torch.tensor(data, dtype=dtype, device=device) if made is NotImplemented else made


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as torch's documentation spells it."""
    if dropout_p:
        return NotImplemented
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(heads, -3) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        kept = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    if attn_mask is not None:
        is_mask = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_mask else scores + attn_mask
        return torch.ops.aten._safe_softmax(scores, -1) @ value  # zeros for a query that keeps no key
    return scores.softmax(-1) @ value


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Padding with a number, as tensors of it joined."""
    if mode != "constant" or not _has_symbol([*pad, *input.shape]):
        return NotImplemented
    is_new = False
    for place in range(len(pad) // 2):
        dim = input.dim() - 1 - place
        parts = [input]
        for at, count in ((0, pad[2 * place]), (len(parts), pad[2 * place + 1])):
            if isinstance(count, int) and count < 0:
                return NotImplemented
            if not isinstance(count, int) or count:
                shape = [*input.shape[:dim], count, *input.shape[dim + 1 :]]
                parts.insert(at * len(parts), input.new_full(shape, value or 0))
        input = torch.cat(parts, dim) if len(parts) > 1 else input
        is_new |= len(parts) > 1
    return input if is_new else input.clone()


def _squeeze(x: Tensor, dim: Any = None) -> Any:
    """Whether a size is 1 is a condition of the loop's own: torch would take it that one which changes is not."""
    if not _has_symbol(x.shape):
        return NotImplemented
    asked = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    return torch.ops.aten.squeeze.dims(x, [d for d in asked if x.shape[d] == 1])


def _squeeze_in_place(x: Tensor, dim: Any = None) -> Any:
    if not _has_symbol(x.shape):
        return NotImplemented
    raise NotFollowed("it squeezes a tensor in place, whose sizes change from step to step; write x = x.squeeze()")


def _stack(tensors: Any, dim: int = 0) -> Any:
    """The elements of a list that grows, along a dimension of their own."""
    if not isinstance(tensors, GrowingList):
        return NotImplemented
    if tensors.length() < 1:
        raise RuntimeError("stack expects a non-empty TensorList")
    rows = tensors.read_rows()
    return rows if dim == 0 else rows.movedim(0, dim).contiguous()


def _cat(tensors: Any, dim: int = 0) -> Any:
    """The elements of a list that grows, end to end."""
    if not isinstance(tensors, GrowingList):
        return NotImplemented
    if tensors.length() < 1:
        raise RuntimeError("torch.cat(): expected a non-empty list of Tensors")
    rows = tensors.read_rows()
    dim = dim % (rows.dim() - 1)
    apart = rows.movedim(0, dim)
    return apart.squeeze(dim + 1).contiguous() if apart.shape[dim + 1] == 1 else apart.flatten(dim, dim + 1)


REPLACED: dict[Any, Any] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    torch.squeeze: _squeeze,
    Tensor.squeeze: _squeeze,
    Tensor.squeeze_: _squeeze_in_place,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    Tensor.new_tensor: _new_tensor,
    F.scaled_dot_product_attention: _attention,
    F.pad: _pad,
    torch.einsum: einsum,
    torch.cosine_similarity: cosine_similarity,
    torch.stack: _stack,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
}

_BASE: Any = Tensor._base
_DATA: Any = Tensor.data  # pyrefly: ignore[missing-attribute]
_GRAD: Any = Tensor.grad
_GRAD_FN: Any = Tensor.grad_fn
_IS_LEAF: Any = Tensor.is_leaf
_REQUIRES_GRAD: Any = Tensor.requires_grad  # pyrefly: ignore[missing-attribute]
_VERSION: Any = Tensor._version

DATA = _DATA.__get__
DETACH_IN_PLACE = {Tensor.detach_, torch.detach_}

REFUSED: dict[Any, str] = {
    _DATA.__set__: "it sets .data of a tensor",
    _GRAD.__get__: "it reads .grad",
    _GRAD.__set__: "it sets .grad",
    _REQUIRES_GRAD.__set__: "it sets .requires_grad",
    Tensor.requires_grad_: "it calls requires_grad_()",
    _VERSION.__get__: "it reads ._version",
    Tensor.set_: "it sets the memory of a tensor",
    Tensor.backward: "it calls backward()",
    Tensor.register_hook: "it registers a hook",
    Tensor.data_ptr: "it asks for an address",
    Tensor.tolist: READS_A_NUMBER,
    Tensor.is_nonzero: READS_A_NUMBER,
    torch.is_nonzero: READS_A_NUMBER,
    Tensor.__format__: "it makes text of a tensor",
    Tensor.__reduce_ex__: "it copies a tensor by copy.copy, or pickles one; write x.clone() or x.detach()",
    torch.autograd.grad: "it calls torch.autograd.grad",
}

# Parts of a tensor that torch's tracing takes for copies.
REFUSED |= {
    getattr(owner, f"unsafe_{name}"): f"it calls unsafe_{name}, whose parts share memory unseen; call {name}"
    for owner in (torch, Tensor)
    for name in ("chunk", "split", "split_with_sizes")
}

# What a loop's own code may not ask of a tensor: a trace has another one in its place.
NOT_ASKED: dict[Any, str] = {
    _BASE.__get__: "it reads ._base",
    _GRAD_FN.__get__: "it reads .grad_fn",
    _IS_LEAF.__get__: "it reads .is_leaf",
    _REQUIRES_GRAD.__get__: "it asks whether a tensor requires a gradient",
    Tensor.is_contiguous: "it asks for the layout of a tensor",
    Tensor.stride: "it asks for the layout of a tensor",
    Tensor.storage_offset: "it asks for the layout of a tensor",
    Tensor.untyped_storage: "it asks for the memory of a tensor",
    Tensor._is_view: "it asks whether a tensor is a view",
    Tensor.is_conj: "it asks whether a tensor is conjugated",
    Tensor.is_neg: "it asks whether a tensor is negated",
    Tensor.is_inference: "it asks whether a tensor is one of inference mode",
}
# What a program is made for, of tensors that are no state of the loop.
KNOWN_OUTSIDE = {
    _IS_LEAF.__get__, _REQUIRES_GRAD.__get__, Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset,
}  # fmt: skip
