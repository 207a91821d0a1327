"""One operator of a step at several steps together.

A value is a pair: the tensor, and whether it has a leading dimension of steps or is the same at all of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from nsa_compile.analyses.known import promotes_by_rank
from nsa_compile.ir.aten import COMPARISONS, MATMUL_ADD, WHERE, arguments, aten, is_inexact, operand
from nsa_compile.ir.lowering import CONTIGUOUS
from nsa_compile.ir.scans import Declined, example, first_line, place_of
from nsa_compile.ops import ranked

Value = tuple[Any, bool]


def spread(value: Value, steps: int) -> Tensor:
    """A value at each step, `[S, ...]`."""
    tensor, has_steps = value
    return tensor if has_steps else tensor.unsqueeze(0).expand(steps, *tensor.shape)


def apply_at_steps(node: fx.Node, operands: dict[fx.Node, Value]) -> Value:
    """One operator, batched over the operands that have steps.

    Raises:
        Declined: it has no batched form that does to each step what the operator does to it.
    """
    with_steps = [n for n, (_, has_steps) in operands.items() if has_steps]
    if node.target is operator.getitem:
        source, has_steps = operands[operand(node)]
        return source[place_of(node)], has_steps
    # torch.vmap then leaves the padding index out of the gradient (torch 2.13).
    padded = node.target is aten.embedding.default and arguments(node).padding_idx != -1
    if padded and operands[operand(node)][1]:
        raise Declined("embedding with a padding_idx in weights that differ from step to step", node)
    if not with_steps:
        return _call(node, {n: tensor for n, (tensor, _) in operands.items()}), False
    if node.target is aten.embedding.default and arguments(node).scale_grad_by_freq:
        raise Declined("embedding with scale_grad_by_freq, which counts the indices of one step alone", node)
    if node.target in _MATMULS:
        return _batched_matmul(node, operands), True
    if node.target in _PICKS and not operands[operand(node)][1]:
        return _picked(node, operands), True
    if (count := first_places_read(node)) and ranked.takes(operands[operand(node)][0], count):
        return (None, ranked.first_places(operands[operand(node)][0], count)), True
    if (reduction := _OF_ALL.get(node.target)) is not None:
        (x, _) = operands[operand(node)]
        return reduction(x.flatten(1), 1), True
    if node.target in _MEDIANS and example(node).dtype.is_floating_point:
        raise Declined(f"{node.target}: batched, its gradient would go to one of several equal elements", node)
    if node.target in CONTIGUOUS:
        x, has_steps = operands[operand(node)]
        operands = {**operands, operand(node): (x.contiguous(), has_steps)}
    if node.target is aten.roll.default and not example(node).dim():
        return operands[operand(node)]  # torch.vmap rolls the steps (torch 2.13)
    if (result := _without_vmap(node, operands)) is not None:
        _check_batched(node, result)
        return result, True
    casts = _casts_of_numbers(node)
    operands = {n: (x.to(casts[n]) if n in casts else x, has_steps) for n, (x, has_steps) in operands.items()}
    same = {n: tensor for n, (tensor, has_steps) in operands.items() if not has_steps}

    def one_step(*rows: Tensor) -> Any:
        return _call(node, {**same, **dict(zip(with_steps, rows, strict=True))})

    try:
        with _no_vmap_fallback():
            result = torch.vmap(one_step)(*(operands[n][0] for n in with_steps))
    except Exception as error:
        why = "torch.vmap has no rule for it" if "vmap fallback" in str(error) else first_line(error)
        raise Declined(f"{node.target} cannot be batched over steps: {why}", node) from error
    _check_batched(node, result)
    return result, True


# torch.vmap takes the extreme of all elements by its index, and gives one of several equal ones all of the gradient,
# which eager mode shares among them (torch 2.13).
_OF_ALL: dict[Any, Callable[..., Tensor]] = {aten.max.default: torch.amax, aten.min.default: torch.amin}
_PICKS = (aten.gather.default, aten.index_select.default)
_MATMULS = {aten.mm.default, aten.bmm.default} | MATMUL_ADD
_MEDIANS = (aten.median.default, aten.nanmedian.default)
# Of one element as their second operand, and of no other, the kernels for half precision on the CPU read the number as
# it is, and compute in float32 (compared with eager mode for every operator on several tensors; torch 2.13).
IN_OPMATH = {aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode, aten.floor_divide.default}
HALF = (torch.float16, torch.bfloat16)
# In half precision these round a number of a wider dtype, and so do their gradients; those of `pow`, say, do not.
_ROUNDING = (
    IN_OPMATH
    | WHERE
    | set(COMPARISONS)
    | {
        aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.addcmul.default, aten.fmod.Tensor,
        aten.remainder.Tensor, aten.copysign.Tensor, aten.hypot.default, aten.logaddexp.default,
        aten.logaddexp2.default, aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default,
        aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.logical_and.default,
        aten.logical_or.default, aten.logical_xor.default,
    }
)  # fmt: skip


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if not isinstance(node.target, OpOverload):
        raise Declined(f"{node.target} is no operator on tensors, and has no batched form", node)
    return node.target(*args, **kwargs)


def _without_vmap(node: fx.Node, operands: dict[fx.Node, Value]) -> Tensor | None:
    """An operator on two operands of which torch.vmap makes another one; None for any other operator."""
    target: Any = node.target
    if target in IN_OPMATH and not isinstance(node.args[1], fx.Node):
        # The number would become a tensor, and be cast.
        return _call(node, {n: tensor for n, (tensor, _) in operands.items()})
    if reads_unrounded_number(node):
        # In float32, as the kernel computes it; so are its gradients.
        dtype = example(node).dtype
        x, number = _in_line(node, operands)
        return target(x.to(dtype).to(torch.float32), number.to(torch.float32), **node.kwargs).to(dtype)
    if target is aten.ldexp.Tensor:
        # It would be taken apart, and have another gradient: where an integer exponent is negative, eager mode's is 0.
        return target(*_in_line(node, operands))
    return None


def reads_unrounded_number(node: fx.Node) -> bool:
    """Whether an operator in half precision reads, at one step, one number of another dtype without rounding it."""
    if node.target not in IN_OPMATH or example(node).dtype not in HALF or example(node).device.type != "cpu":
        return False
    number = node.args[1]
    return isinstance(number, fx.Node) and example(number).numel() == 1 and example(number).dtype != example(node).dtype


def _in_line(node: fx.Node, operands: dict[fx.Node, Value]) -> list[Tensor]:
    """The operands of a pointwise operator, such that they meet at several steps as they do at one."""
    return [_with_rank(operands[operand(node, i)], example(node).dim()) for i in range(len(node.args))]


def _with_rank(value: Value, rank: int) -> Tensor:
    """A value that meets others of a rank: its steps come before all of the dimensions."""
    tensor, has_steps = value
    if not has_steps:
        return tensor
    return tensor.reshape(tensor.shape[0], *([1] * (rank + 1 - tensor.dim())), *tensor.shape[1:])


def _casts_of_numbers(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """The dtypes to which a pointwise operator, at one step, casts its operands without dimensions.

    They weigh less in the common dtype than tensors with dimensions do, which they become when batched: vmap would
    compute `where(mask, float64, float32[D])` in float64, and compare an int64 with int8s without wrapping around.

    Raises:
        Declined: gradients would be those of a number that is rounded to half precision, and eager mode's are not.
    """
    target: Any = node.target
    if torch.Tag.pointwise not in target.tags or not promotes_by_rank(node):
        return {}
    conditions = {node.args[i] for i, a in enumerate(target._schema.arguments) if a.name in ("condition", "mask")}
    operands = [x for x in node.args if isinstance(x, fx.Node | int | float) and x not in conditions]
    common = example(node).dtype
    if common == torch.bool:
        common = elementwise_dtypes(
            *(example(x) if isinstance(x, fx.Node) else x for x in operands),
            type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH,
        )[1]
    numbers = [x for x in operands if isinstance(x, fx.Node) and example(x).dim() == 0]
    # A number on the CPU beside tensors of another device is read there as it is, and has no batched form.
    numbers = [x for x in numbers if example(x).device == example(node).device]
    if common in HALF:
        # An integer weighs less than these whatever its dimensions, and gradients read it as it is.
        numbers = [x for x in numbers if is_inexact(example(x).dtype)]
        wider = [example(x).dtype for x in numbers if example(x).dtype != common]
        if wider and target not in _ROUNDING:
            raise Declined(f"{target} in {common} reads a number in {wider[0]}, which its gradient may not round", node)
    return dict.fromkeys(numbers, common)


def _check_batched(node: fx.Node, result: Any) -> None:
    """Whether a result at several steps has the shape and dtype of its node at each.

    Raises:
        Declined: it has not; the operator's batched form is not what it does to one step.
    """
    expected: Any = example(node)
    pairs = [(result, expected)] if isinstance(result, Tensor) else list(zip(result, expected, strict=True))
    for batched, one in pairs:
        if isinstance(one, Tensor) and (batched.shape[1:] != one.shape or batched.dtype != one.dtype):
            raise Declined(
                f"{node.target} is {one.dtype}{list(one.shape)} at one step and {batched.dtype}"
                f"{list(batched.shape[1:])} batched",
                node,
            )


@contextlib.contextmanager
def _no_vmap_fallback() -> Iterator[None]:
    """Let vmap refuse an operator without a batching rule; its fallback is a loop, traced once for each step."""
    functorch: Any = torch._C._functorch
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(enabled)


def _picked(node: fx.Node, operands: dict[fx.Node, Value]) -> Tensor:
    """What S steps pick along a dimension of something that is the same at all of them, as one step would pick it:
    torch.vmap repeats it for each step, and so does its gradient."""
    given = arguments(node)
    x, (index, _) = operands[operand(node)][0], operands[given.index]
    steps, dim = index.shape[0], given.dim % max(x.dim(), 1)
    if not x.dim():
        x, index = x[None], index.reshape(steps, 1)
    if node.target is aten.index_select.default:
        found = x.index_select(dim, index.reshape(-1)).unflatten(dim, (steps, index.numel() // steps))
    else:
        together = index.movedim(0, dim).flatten(dim, dim + 1)
        found = _gathered(x, dim, together).unflatten(dim, (steps, index.shape[1 + dim]))
    return found.movedim(dim, 0).reshape(steps, *example(node).shape)


def _gathered(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.gather(dim, index)`; of whole rows, where the index is the same along all that comes after them."""
    behind = range(dim + 1, x.dim())
    whole = len(behind) > 0 and all(index.shape[d] == x.shape[d] and index.stride(d) == 0 for d in behind)
    if not whole or index.shape[:dim] != x.shape[:dim]:
        return x.gather(dim, index)
    for _ in behind:
        index = index.select(-1, 0)  # [*before, n]
    rows = x.flatten(0, dim)
    first = torch.arange(rows.shape[0] // x.shape[dim], device=x.device) * x.shape[dim]
    found = rows.index_select(0, (index.reshape(-1, index.shape[-1]) + first[:, None]).flatten())
    return found.unflatten(0, index.shape)


def first_places_read(node: fx.Node) -> int | None:
    """How many indices of a descending sort along the last dimension are read, if nothing else of it is."""
    if node.target not in (aten.sort.default, aten.sort.stable) or not arguments(node).descending:
        return None
    rank = example(operand(node)).dim()
    if not rank or arguments(node).dim % rank != rank - 1 or any(place_of(n) != 1 for n in node.users):
        return None
    cuts = [cut for n in node.users for cut in n.users]
    if not cuts or any(cut.target is not aten.slice.Tensor for cut in cuts):
        return None
    given = [arguments(cut) for cut in cuts]
    if any(x.dim % rank != rank - 1 or x.start not in (None, 0) or x.step not in (None, 1) for x in given):
        return None
    ends = [x.end for x in given]
    return max(ends) if all(isinstance(end, int) and end >= 0 for end in ends) else None


def _batched_matmul(node: fx.Node, operands: dict[fx.Node, Value]) -> Tensor:
    """A product of matrices at S steps, with or without something added.

    An operand that is the same at all steps is not copied S times, and its gradient is never one for each step: the
    steps join the rows (or columns) of the other one.
    """
    adds = node.target in MATMUL_ADD
    a, b = (operands[operand(node, i + adds)] for i in range(2))
    one_matrix = example(node).dim() == 2
    factors: Any = node.kwargs
    beta, alpha = factors.get("beta", 1), factors.get("alpha", 1)
    added: Any = operands[operand(node)] if adds else (None, False)
    extra, extra_steps = added
    if adds and one_matrix and a[1] and not b[1] and not extra_steps and _is_one_row(extra):
        return _by_rows(a[0], lambda rows: torch.addmm(extra, rows, b[0], beta=beta, alpha=alpha))
    if a[1] or b[1]:
        product = (_batched_mm if one_matrix else _batched_bmm)(a, b)
    else:  # only what is added has steps
        product = (torch.mm if one_matrix else torch.bmm)(a[0], b[0]).unsqueeze(0)
    if extra is None:
        return product
    if beta == 0:  # then what is added is not read: it may be NaN
        return alpha * product
    # It may have fewer dimensions than the product, before which the steps come.
    extra = _with_rank((extra if extra_steps else extra.unsqueeze(0), True), product.dim() - 1)
    return beta * extra + alpha * product


def _is_one_row(x: Tensor) -> bool:
    return x.dim() < 2 or x.shape[0] == 1


def _by_rows(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """`[S, m, k]`, multiplied as one matrix of rows to `[S, m, n]`."""
    steps, m, k = x.shape
    if m > 1 and x.stride(0) < x.stride(1):  # its rows lie in memory as [m, S, k]: those of a batch-first input
        return multiply(x.transpose(0, 1).reshape(m * steps, k)).unflatten(0, (m, steps)).transpose(0, 1)
    return multiply(x.reshape(steps * m, k)).unflatten(0, (steps, m))


def _batched_mm(a: Value, b: Value) -> Tensor:
    """`[m, k] @ [k, n]`, either of them or both at S steps."""
    (x, x_steps), (y, y_steps) = a, b
    if x_steps and y_steps:
        return torch.bmm(x, y)
    if x_steps:
        return _by_rows(x, lambda rows: torch.mm(rows, y))
    return _by_rows(y.transpose(1, 2), lambda rows: torch.mm(rows, x.t())).transpose(1, 2)


def _batched_bmm(a: Value, b: Value) -> Tensor:
    """`[b, m, k] @ [b, k, n]`, either of them or both at S steps."""
    (x, x_steps), (y, y_steps) = a, b
    if x_steps and y_steps:
        return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
    if x_steps:
        steps, batch, m, k = x.shape
        product = torch.bmm(x.transpose(0, 1).reshape(batch, steps * m, k), y)
        return product.view(batch, steps, m, y.shape[-1]).transpose(0, 1)
    steps, batch, k, n = y.shape
    product = torch.bmm(x, y.permute(1, 2, 0, 3).reshape(batch, k, steps * n))
    return product.view(batch, x.shape[1], steps, n).permute(2, 0, 1, 3)
