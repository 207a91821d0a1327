"""Rules for blocks of a dimension that grows: those that are taken, pooled or convolved, and for what pads it.

A block that is not full is none, as torch has it, so that each reads rows that exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from nsa_compile.loops.body import Axis, Body, Dim, Val
from nsa_compile.loops.rules import aten, dim_of, nodes_of, place_of, rule, sizes_of, with_dim
from nsa_compile.loops.state import NotFollowed


def _padded(body: Body, value: Val, dim: int, before: Any, after: Any, number: float) -> Val:
    """Rows with so many more before and behind them that hold a number."""
    if not isinstance(before, int) or before < 0:
        raise NotFollowed("pads or cuts the front by a number that changes from step to step, or is negative")
    if not before and isinstance(after, int) and not after:
        return value
    value = body.from_the_first(value, dim)
    count = body.count_of(value.dims[dim]) + before + after
    if isinstance(value.dims[dim], Axis):
        value = body.filled(value, dim, number)
    new = dim_of(body, count)
    more = sizes_of([new])[0] - value.example.shape[dim] - before
    behind = [0, 0] * (len(value.dims) - 1 - dim)
    node = body.emit(aten.constant_pad_nd.default, value.node, [*behind, before, more], number)
    return Val(node, with_dim(value.dims, dim, new))


@rule(aten.constant_pad_nd.default)
def _pad(body: Body, a: Any) -> Val:
    if isinstance(a.value, np.ndarray | Val):
        raise NotFollowed("pads with a number that changes from step to step")
    value, rank = a.self, len(a.self.dims)
    for i in range(len(a.pad) // 2):
        value = _padded(body, value, rank - 1 - i, a.pad[2 * i], a.pad[2 * i + 1], a.value)
    return value


def _blocks(body: Body, value: Val, dim: int, size: int, step: int) -> Val:
    """Blocks of `size` elements along a dimension, one at each `step`; their elements are a last dimension."""
    value = body.from_the_first(value, dim)
    axis = value.dims[dim]
    if value.example.shape[dim] < size:
        raise NotFollowed("takes blocks that are longer than the loop")
    node = body.emit(aten.unfold.default, value.node, dim, size, step)
    width = node.meta["example_value"].shape[dim]
    new: Dim = width
    if isinstance(axis, Axis):
        new = Axis.of(width, 0, np.maximum((axis.count - size) // step + 1, 0))
    return Val(node, (*with_dim(value.dims, dim, new), size))


@rule(aten.unfold.default)
def _unfold(body: Body, a: Any) -> Val:
    dim = place_of(a.dimension, len(a.self.dims))
    if not isinstance(a.size, int) or not isinstance(a.step, int):
        raise NotFollowed("takes blocks of a size that changes from step to step")
    return _blocks(body, a.self, dim, a.size, a.step)


def _pooled(body: Body, a: Any, padding: float, what: Callable[[fx.Node], fx.Node]) -> Val:
    """Each block of the last two dimensions as one number; `padding` stands beyond their ends."""
    if a.ceil_mode:
        raise NotFollowed("pools blocks that are not full")
    given = (a.kernel_size, a.stride or a.kernel_size, a.padding)
    kernel, stride, beyond = ([*x] * 2 if len(x) == 1 else list(x) for x in given)
    value, rank = a.self, len(a.self.dims)
    for dim, size, step, count in zip((rank - 2, rank - 1), kernel, stride, beyond, strict=True):
        value = _blocks(body, _padded(body, value, dim, count, count, padding), dim, size, step)
    node = body.emit(aten.reshape.default, value.node, [*value.example.shape[:rank], kernel[0] * kernel[1]])
    result = Val(what(node), value.dims[:rank])
    for d, own in enumerate(result.dims):
        if isinstance(own, Axis) and not math.isfinite(padding) and any(beyond):
            result = body.filled(result, d, 0)
    return result


@rule(aten.avg_pool2d.default)
def _avg_pool(body: Body, a: Any) -> Val:
    if a.divisor_override is not None:
        raise NotFollowed("divides the sums of blocks by a number of its own")
    if any(a.padding) and not a.count_include_pad:
        raise NotFollowed("leaves what stands beyond the rows out of its means")
    return _pooled(body, a, 0, lambda blocks: body.emit(aten.mean.dim, blocks, [-1]))


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(body: Body, a: Any) -> list[Val | None]:
    if any(d != 1 for d in a.dilation):
        raise NotFollowed("pools elements that do not lie side by side")
    # Of equal elements the first has the gradient; amax would share it.
    return [_pooled(body, a, -math.inf, lambda blocks: body.item(body.emit(aten.max.dim, blocks, -1), 0)), None]


@rule(aten.convolution.default)
def _convolution(body: Body, a: Any) -> Val:
    """A convolution along one dimension as products with blocks."""
    value, weight, channels = a.input, a.weight, a.input.dims[1]
    is_plain = not a.transposed and all(d == 1 for d in a.dilation)
    if len(value.dims) != 3 or not is_plain or isinstance(channels, Axis) or a.groups not in (1, channels):
        raise NotFollowed("is a convolution that is dilated, of several dimensions, or of groups of channels")
    outputs, _, size = weight.dims
    blocks = _blocks(body, _padded(body, value, 2, a.padding[0], a.padding[0], 0), 2, size, a.stride[0])
    n, c, m, k = blocks.example.shape
    if a.groups == 1:
        rows = body.emit(aten.permute.default, blocks.node, [0, 2, 1, 3])
        rows = body.emit(aten.reshape.default, rows, [n, m, c * k])
        columns = body.emit(aten.reshape.default, weight.node, [outputs, c * k])
        columns = body.emit(aten.permute.default, columns, [1, 0])
        node = body.emit(aten.permute.default, body.emit(torch.matmul, rows, columns), [0, 2, 1])
    elif outputs == channels:
        product = body.emit(aten.mul.Tensor, blocks.node, body.emit(aten.reshape.default, weight.node, [c, 1, k]))
        node = body.emit(aten.sum.dim_IntList, product, [-1])
    else:
        raise NotFollowed("is a convolution that makes several channels of each")
    if a.bias is not None:
        node = body.emit(aten.add.Tensor, node, body.emit(aten.reshape.default, nodes_of(a.bias), [outputs, 1]))
    dims: tuple[Dim, ...] = (value.dims[0], outputs, blocks.dims[2])
    return Val(node, dims)
