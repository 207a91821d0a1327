"""docs/what-compiles.md is true: each row of its tables is run, compared with eager mode, and its verdict is what came
out.

A program here is a function of `compile`: the identity for eager mode, `nsa_compile.compile` for the other run. It
returns what is to be equal: values, gradients, and the state that it leaves behind.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import logging
import pickle
import random
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import backend, scan
from nsa_compile.passes.report import Report

PAGE = Path(__file__).parent.parent / "docs" / "what-compiles.md"
PROGRAMS: dict[str, Callable] = {}
ROUNDED: set[str] = set()  # programs whose values are rounded to bfloat16 on the way
S, D = 6, 4
LOWEST = torch.finfo(torch.float64).min


def program(function: Callable) -> Callable:
    PROGRAMS[function.__name__] = function
    return function


def rounded(function: Callable) -> Callable:
    ROUNDED.add(function.__name__)
    return program(function)


def rows(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (S, D)), dtype=torch.float64)


def trained(function: Callable, *inputs: Tensor, parameters: Any = ()) -> Any:
    """Values, gradients of inputs and parameters, and the inputs after the call."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = function(*leaves)
    wanted = [x for x in [*leaves, *parameters] if x.requires_grad]
    loss = sum(y.square().sum() for y in pytree.tree_leaves(outputs) if isinstance(y, Tensor) and y.requires_grad)
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if isinstance(loss, Tensor) else ()
    return outputs, gradients, leaves


def attention(x: Tensor) -> Any:
    """Causal attention over a cache, written row after row."""
    positions = torch.arange(x.shape[0])

    def step(cache, row):
        t, x = row
        cache = torch.where((positions == t)[:, None], x, cache)
        scores = cache @ x
        return cache, scores.masked_fill(positions > t, torch.finfo(scores.dtype).min).softmax(-1) @ cache

    return scan(step, torch.zeros_like(x), (positions, x))


def average(x: Tensor) -> Any:
    """An exponential average: a recurrence."""

    def step(c, row):
        c = 0.9 * c + 0.1 * row
        return c, c * 2

    return scan(step, x.new_zeros(x.shape[1:]), x)


def written(write: Callable) -> Callable:
    """A model with a cache, whose step sets `cache = write(cache, t, x)`."""

    def run(x):
        def step(cache, row):
            t, x = row
            cache = write(cache, t, x)
            return cache, (cache @ x).masked_fill(torch.arange(S) > t, LOWEST).softmax(-1) @ cache

        return scan(step, torch.zeros_like(x), (torch.arange(S), x))

    return run


# ------------------------------------------------------------------------------------------------------------ steps


@program
def causal_attention(compile):
    return trained(compile(attention), rows())


@program
def attention_without_a_softmax(compile):
    def loop(x):
        positions = torch.arange(S)

        def step(cache, row):
            t, x = row
            cache = torch.where((positions == t)[:, None], x, cache)
            return cache, ((cache @ x).relu() * (positions <= t)) @ cache

        return scan(step, torch.zeros_like(x), (positions, x))[1]

    return trained(compile(loop), rows())


@program
def exponential_average(compile):
    return trained(compile(average), rows())


@program
def lstm_cell(compile):
    cell = nn.LSTMCell(D, D, dtype=torch.float64)

    def run(x):
        def step(state, row):
            state = cell(row, state)
            return state, state[0]

        return scan(step, (x.new_zeros(2, D), x.new_zeros(2, D)), x)

    return trained(compile(run), rows(S, 2, D), parameters=list(cell.parameters()))


@program
def no_carry(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c, row.tanh()), (), x)), rows())


@program
def window_by_cat(compile):
    def run(x):
        def step(window, row):
            window = torch.cat([window[1:], row[None]])
            return window, window.square().sum(0)

        return scan(step, x.new_zeros(3, D), x)

    return trained(compile(run), rows())


@program
def window_by_roll(compile):
    def run(x):
        def step(window, row):
            window = torch.where(torch.arange(3)[:, None] == 2, row, window.roll(-1, 0))
            return window, window.square().sum(0)

        return scan(step, x.new_zeros(3, D), x)

    return trained(compile(run), rows())


@program
def window_by_slices(compile):
    def run(x):
        def step(window, row):
            new = torch.empty_like(window)
            new[:-1] = window[1:]
            new[-1] = row
            return new, new.square().sum(0)

        return scan(step, x.new_zeros(3, D), x)

    return trained(compile(run), rows())


@program
def window_of_more_than_the_state(compile):
    def run(x):
        def step(last, row):
            window = torch.cat([last, row[None]])
            return window[1:], window.square().sum(0)

        return scan(step, x.new_zeros(2, D), x)

    return trained(compile(run), rows())


@program
def cut_when_full(compile):
    def write(cache, t, x):
        moved = torch.where(t < 3, cache, cache.roll(-1, 0))
        return moved.index_copy(0, t.clamp(max=2).view(1), x[None])

    def run(x):
        def step(cache, row):
            t, x = row
            cache = write(cache, t, x)
            return cache, (cache @ x).masked_fill(torch.arange(3) > t, LOWEST).softmax(-1) @ cache

        return scan(step, x.new_zeros(3, D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def ring_buffer(compile):
    return trained(
        compile(written(lambda cache, t, x: torch.where((torch.arange(S) == t % 3)[:, None], x, cache))), rows()
    )


@program
def written_by_where(compile):
    return trained(compile(written(lambda cache, t, x: torch.where((torch.arange(S) == t)[:, None], x, cache))), rows())


@program
def written_by_index_copy(compile):
    return trained(compile(written(lambda cache, t, x: cache.index_copy(0, t.view(1), x[None]))), rows())


@program
def written_by_index_put(compile):
    return trained(compile(written(lambda cache, t, x: cache.index_put((t.view(1),), x[None]))), rows())


@program
def written_by_scatter(compile):
    return trained(compile(written(lambda cache, t, x: cache.scatter(0, t.expand(1, D), x[None]))), rows())


@program
def written_by_one_hot(compile):
    return trained(compile(written(lambda cache, t, x: cache + F.one_hot(t, S).to(x.dtype)[:, None] * x)), rows())


@program
def written_by_blend(compile):
    def write(cache, t, x):
        at = F.one_hot(t, S).to(x.dtype)[:, None]
        return cache * (1 - at) + at * x

    return trained(compile(written(write)), rows())


@program
def written_to_a_slice_of_columns(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = torch.where(torch.arange(S) == t, x[:, None], cache)
            return cache, cache.sum(1)

        return scan(step, x.new_zeros(D, S), (torch.arange(S), x))

    return trained(compile(run), rows())


@rounded
def bfloat16_cache(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = torch.where((torch.arange(S) == t)[:, None], x.to(torch.bfloat16), cache)
            return cache, cache.to(x.dtype).sum(0)

        return scan(step, torch.zeros(S, D, dtype=torch.bfloat16), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def written_to_a_copy_with_a_list(compile):
    def write(cache, t, x):
        cache = cache.clone()
        cache[t.view(1)] = x[None]
        return cache

    return trained(compile(written(write)), rows())


@program
def written_to_a_page(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = cache.clone()
            cache[t // 2, t % 2] = x
            keys = cache.flatten(0, 1)
            return cache, (keys @ x).masked_fill(torch.arange(S) > t, LOWEST).softmax(-1) @ keys

        return scan(step, x.new_zeros(S // 2, 2, D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def sums_of_pages(compile):
    def run(x):
        def step(sums, row):
            t, x = row
            sums = sums.clone()
            sums[t // 2] += x
            return sums, sums @ x

        return scan(step, x.new_zeros(S // 2, D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def written_to_a_copy_by_index_copy_(compile):
    return trained(compile(written(lambda cache, t, x: cache.clone().index_copy_(0, t.view(1), x[None]))), rows())


@program
def written_to_a_copy_with_a_mask(compile):
    def write(cache, t, x):
        cache = cache.clone()
        cache[torch.arange(S) == t] = x
        return cache

    return trained(compile(written(write)), rows())


@program
def written_by_position(compile):
    def write(cache, t, x):
        cache = cache.clone()
        cache[t] = x
        return cache

    return trained(compile(written(write)), rows())


@program
def written_by_position_second(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = cache.clone()
            cache[:, t] = x
            return cache, (x @ cache).masked_fill(torch.arange(S) > t, LOWEST).softmax(-1) @ cache.t()

        return scan(step, torch.zeros_like(x.t()), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def one_cache_for_keys_and_values(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = cache.clone()
            cache[0, t] = x
            cache[1, t] = x * 2
            K, V = cache
            return cache, (K @ x).masked_fill(torch.arange(S) > t, LOWEST).softmax(-1) @ V

        return scan(step, x.new_zeros(2, *x.shape), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def written_twice_in_one_step(compile):
    index = torch.zeros(2, dtype=torch.int64)
    return trained(
        compile(written(lambda cache, t, x: cache.index_copy(0, index + t, torch.stack([x, 2 * x])))), rows()
    )


@program
def written_in_place(compile):
    return trained(compile(written(lambda cache, t, x: cache.index_copy_(0, t.view(1), x[None]))), rows())


@program
def carry_added_to_in_place(compile):
    def run(x):
        def step(c, row):
            c += row
            return c, c * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def row_written_to_in_place(compile):
    def run(x):
        def step(c, row):
            row.mul_(2)
            return c + row, row * 1

        return scan(step, x.new_zeros(D), x)

    return trained(compile(lambda x: run(x.clone())), rows())


@program
def closure_written_to_in_place(compile):
    def run(x):
        total = x.new_zeros(D)

        def step(c, row):
            total.add_(row.detach())
            return c + row, row * 2

        carry, ys = scan(step, x.new_zeros(D), x)
        return carry, ys, total

    return trained(compile(run), rows())


@program
def buffer_written_to_in_a_step(compile):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            def step(c, row):
                self.n.add_(1)
                return c + row, row * 2

            return scan(step, x.new_zeros(D), x)

    model = Counting()
    return trained(compile(model), rows()), model.n


@program
def buffer_replaced_in_a_step(compile):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            def step(c, row):
                self.n = self.n + 1
                return c + row, row * 2

            return scan(step, x.new_zeros(D), x)

    model = Counting()
    return trained(compile(model), rows()), model.n


@program
def list_appended_to_in_a_step(compile):
    def run(x):
        seen = []

        def step(c, row):
            seen.append(row * 2)
            return c + row, row * 2

        carry, ys = scan(step, x.new_zeros(D), x)
        return carry, ys, torch.stack(seen)

    return trained(compile(run), rows())


@program
def python_counter_in_a_step(compile):
    calls = {"n": 0}

    def run(x):
        def step(c, row):
            calls["n"] += 1
            return c + row * calls["n"], row * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows()), torch.tensor(calls["n"])


@program
def attribute_counter_in_a_step(compile):
    class Counting(nn.Module):
        n = 0

        def forward(self, x):
            def step(c, row):
                self.n += 1
                return c + row * self.n, row * 2

            return scan(step, x.new_zeros(D), x)

    model = Counting()
    return trained(compile(model), rows()), torch.tensor(model.n)


@program
def read_by_position(compile):
    def run(x):
        def step(c, row):
            t, y = row
            return c, x[t] * y

        return scan(step, x.new_zeros(D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def read_by_index_select(compile):
    def run(x):
        def step(c, row):
            t, y = row
            return c, x.index_select(0, t.view(1))[0] * y

        return scan(step, x.new_zeros(D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def prefix_by_position(compile):
    def run(x):
        def step(c, row):
            t, y = row
            return c, x[: t + 1].sum(0) * y

        return scan(step, x.new_zeros(D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def prefix_by_mask(compile):
    def run(x):
        def step(c, row):
            t, y = row
            return c, (x * (torch.arange(S) <= t)[:, None]).sum(0) * y

        return scan(step, x.new_zeros(D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def number_by_item(compile):
    def run(x):
        def step(c, row):
            return c + row, row * row.sum().item()

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def number_by_int(compile):
    def run(x):
        def step(c, row):
            t, y = row
            return c + y, y * int(t)

        return scan(step, x.new_zeros(D), (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def branch_on_data(compile):
    def run(x):
        def step(c, row):
            if row.sum() > 0:
                c = c + row
            return c, c * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def selection_by_mask_of_data(compile):
    def run(x):
        def step(c, row):
            return c + row[row > 0].sum(), row * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def printing_step(compile):
    def run(x):
        def step(c, row):
            print(end="")
            return c + row, row * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


def mapped(step: Callable) -> Callable:
    """A scan without a carry, of one function of a row."""
    return lambda x: scan(lambda c, row: (c, step(row)), (), x)


@program
def numpy_random_in_a_step(compile):
    return trained(compile(mapped(lambda row: row * np.random.rand())), rows())


@program
def numpy_seeded_in_a_step(compile):
    def step(row):
        np.random.seed(0)
        return row

    return trained(compile(mapped(step)), rows())


@program
def clock_in_a_step(compile):
    return trained(compile(mapped(lambda row: row * time.time())), rows())


@program
def seed_in_a_step(compile):
    def step(row):
        torch.manual_seed(0)
        return row + torch.rand(D)

    return trained(compile(mapped(step)), rows())


@program
def generator_in_a_step(compile):
    generator = torch.Generator()
    return trained(compile(mapped(lambda row: row + torch.rand(D, generator=generator))), rows())


@program
def logging_in_a_step(compile):
    def step(row):
        logging.getLogger("step").info("a row")
        return row

    return trained(compile(mapped(step)), rows())


@program
def address_in_a_step(compile):
    return trained(compile(mapped(lambda row: row * (row.data_ptr() % 2))), rows())


@program
def strides_in_a_step(compile):
    return trained(compile(mapped(lambda row: row if row.is_contiguous() else row * 2)), rows().t())


@program
def strides_of_contiguous_rows_in_a_step(compile):
    return trained(compile(mapped(lambda row: row if row.is_contiguous() else row * 2)), rows())


@program
def gradient_read_in_a_step(compile):
    return trained(compile(mapped(lambda row: row if row.grad is None else row * 2)), rows())


@program
def gradient_taken_in_a_step(compile):
    def step(row):
        return torch.autograd.grad(row.square().sum(), row, create_graph=True)[0]

    return trained(compile(mapped(step)), rows())


@program
def hook_in_a_step(compile):
    def step(row):
        y = row * 2
        y.register_hook(lambda gradient: gradient * 3)
        return y

    return trained(compile(mapped(step)), rows())


def clipped_on_its_way_back(take: Callable) -> Callable:
    """An average whose step clips the gradient of what `take` makes of the carry."""

    def run(x):
        def step(c, row):
            c = take(c)
            c.register_hook(lambda gradient: gradient.clamp(-1, 1))
            c = c * 0.5 + row
            return c, c * 3

        return scan(step, x[0] * 2, x)

    return run


@program
def hook_on_a_copy_of_a_carry(compile):
    return trained(compile(clipped_on_its_way_back(torch.clone)), rows())


@program
def hook_on_a_carry(compile):
    return trained(compile(clipped_on_its_way_back(lambda c: c)), rows())


@program
def output_of_a_named_tuple(compile):
    pair = collections.namedtuple("pair", ["once", "twice"])
    return trained(compile(mapped(lambda row: pair(row, row * 2))), rows())


@program
def one_hot_in_a_step(compile):
    classes = torch.arange(S) % D

    def run(x, classes):
        return scan(lambda c, row: (c, row[0] * F.one_hot(row[1], D)), (), (x, classes))

    return compile(run)(rows(), classes)


@program
def carry_of_another_shape(compile):
    def run(x):
        return scan(lambda c, row: (torch.cat([c, row]), row * 2), x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def carry_of_another_dtype(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c + row, row * 2), torch.zeros(D), x)), rows())


@program
def carry_of_another_structure(compile):
    return trained(compile(lambda x: scan(lambda c, row: ((c, c), row * 2), x.new_zeros(D), x)), rows())


@program
def carry_without_a_key(compile):
    init = {"a": torch.zeros(D), "b": torch.zeros(D)}
    return trained(compile(lambda x: scan(lambda c, row: ({"a": c["a"] + row}, row * 2), init, x)), rows())


@program
def carry_in_another_order(compile):
    def step(c, row):
        a, b = c.values()  # in the order of the first, whatever the step before has returned
        return {"b": b + 1, "a": a * 0.5 + row}, a - b

    def run(x):
        final, y = scan(step, {"a": x.new_zeros(D), "b": x.new_zeros(D)}, x)
        return final["a"], final["b"], y

    return trained(compile(run), rows())


@program
def carry_that_is_a_number(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c + 1, row * c), 0, x)), rows())


@program
def output_that_is_a_number(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c + row, (row * 2, 1)), x.new_zeros(D), x)), rows())


@program
def output_of_none(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c + row, None), x.new_zeros(D), x)), rows())


@program
def output_of_a_class_of_torch(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c + row, row.max(-1)), x.new_zeros(D), x)), rows())


@program
def raising_step(compile):
    def step(c, row):
        if row.shape[0] != 99:
            raise ValueError("bad width")
        return c, row

    return trained(compile(lambda x: scan(step, x.new_zeros(D), x)), rows())


@program
def sizes_that_do_not_fit(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c, row @ c[1:]), x.new_zeros(D), x)), rows())


@program
def dtypes_that_do_not_fit(compile):
    def step(c, row):
        return c, torch.nn.functional.linear(row, c.expand(D, D), row.half())

    return trained(compile(lambda x: scan(step, x.new_zeros(D), x)), rows())


@program
def attribute_set_in_a_step(compile):
    def step(c, row):
        row.seen = True
        return c, row

    return trained(compile(lambda x: scan(step, x.new_zeros(D), x)), rows())


@program
def three_results(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c, row, row), x.new_zeros(D), x)), rows())


@program
def strided_read_in_a_step(compile):
    return trained(compile(lambda x: scan(lambda c, row: (row.T, c.as_strided((2,), (1,))), x[0], x)), rows(S, D, D))


@program
def strided_read_from_an_offset(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c, row.as_strided((2,), (1,), 1)), x[0], x)), rows())


@program
def inverse_in_a_recurrence(compile):
    def step(c, row):
        c = c + row[:, None] * row
        return c, torch.linalg.solve(c, row)

    return trained(compile(lambda x: scan(step, torch.eye(D, dtype=x.dtype), x)), rows())


@program
def repeats_by_a_tensor(compile):
    def run(x):
        times = torch.tensor([1, 2, 0, 1])
        return scan(lambda c, row: (c, row.repeat_interleave(times)), x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def carry_of_a_dataclass(compile):
    @dataclasses.dataclass
    class State:
        mean: Tensor

    return trained(compile(lambda x: scan(lambda c, row: (State(c.mean + row), row), State(x.new_zeros(D)), x)), rows())


@program
def statistics_that_check_their_input(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c, torch.cov(row.view(2, -1))), x.new_zeros(D), x)), rows())


@program
def output_is_the_carry(compile):
    return trained(compile(lambda x: scan(lambda c, row: (c + row,) * 2, x.new_zeros(D), x)), rows())


@program
def literal_in_a_step(compile):
    def run(x):
        def step(c, row):
            return c, row * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=row.dtype)

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def dict_of_tensors(compile):
    def run(x):
        def step(c, row):
            return {"sum": c["sum"] + row["x"]}, {"y": (row["x"] * 2, c["sum"].sin())}

        return scan(step, {"sum": x.new_zeros(D)}, {"x": x})

    return trained(compile(run), rows())


# --------------------------------------------------------------------------------------------------- counters, masks


@program
def counter_in_the_carry(compile):
    def run(x):
        def step(state, row):
            t, cache = state
            cache = torch.where((torch.arange(S) == t)[:, None], row, cache)
            return (t + 1, cache), (cache @ row).masked_fill(torch.arange(S) > t, LOWEST).softmax(-1) @ cache

        return scan(step, (torch.zeros((), dtype=torch.int64), torch.zeros_like(x)), x)

    return trained(compile(run), rows())


@program
def countdown(compile):
    def run(x):
        def step(n, row):
            return n - 1, row * n

        return scan(step, torch.full((), 2, dtype=torch.int64), x)

    return trained(compile(run), rows())


@program
def arg_max_from_minus_one(compile):
    def run(x):
        def step(state, row):
            best, where = state
            t, y = row
            better = y.sum() > best
            return (torch.where(better, y.sum(), best), torch.where(better, t, where)), where.clone()

        start = (x.new_full((), -1e30), torch.full((), -1, dtype=torch.int64))
        return scan(step, start, (torch.arange(S), x))

    return trained(compile(run), rows())


@program
def previous_token_from_minus_one(compile):
    def run(tokens):
        def step(previous, token):
            return token.clone(), token - previous

        return scan(step, torch.full((), -1, dtype=torch.int32), tokens)

    return compile(run)(torch.randint(0, 9, (S,), dtype=torch.int32))


@program
def bfloat16_counter(compile):
    def run(x):
        def step(n, row):
            return n + 1, row * n

        return scan(step, torch.zeros((), dtype=torch.bfloat16), x)

    return trained(compile(run), rows())


@program
def seen_flag(compile):
    def run(x):
        def step(seen, row):
            seen = seen | (row.sum() > 0)
            return seen, row * seen

        return scan(step, torch.zeros((), dtype=torch.bool), x)

    return trained(compile(run), rows())


@program
def left_padding_of_minus_infinity(compile):
    bias = torch.tensor([-torch.inf] * 2 + [0.0] * (S - 2), dtype=torch.float64)

    def run(x):
        positions = torch.arange(S)

        def step(cache, row):
            t, x = row
            cache = torch.where((positions == t)[:, None], x, cache)
            scores = (cache @ x + bias).masked_fill(positions > t, torch.finfo(x.dtype).min)
            return cache, scores.softmax(-1) @ cache

        return scan(step, torch.zeros_like(x), (positions, x))

    return trained(compile(run), rows())


@program
def fully_masked_rows(compile):
    def run(x):
        positions = torch.arange(S)

        def step(cache, row):
            t, x = row
            cache = torch.where((positions == t)[:, None], x, cache)
            weights = (cache @ x).masked_fill(positions >= t, -torch.inf).softmax(-1)
            return cache, weights @ cache

        return scan(step, torch.zeros_like(x), (positions, x))

    return compile(run)(rows())


# ------------------------------------------------------------------------------------------- statements around a scan


@program
def written_to_before(compile):
    def run(x):
        h = x * 2
        h[:2].mul_(3)
        return attention(h)

    return trained(compile(run), rows())


@program
def written_to_after(compile):
    def run(x):
        _, y = attention(x)
        return F.relu(y, inplace=True)

    return trained(compile(run), rows())


@program
def input_written_to(compile):
    def run(x, state):
        state.add_(x.detach().sum(0))
        return attention(x + state.detach())

    f, state = compile(run), rows(D)
    return trained(lambda x: f(x, state), rows()), state


@program
def batch_norm_in_training(compile):
    norm = nn.BatchNorm1d(D, dtype=torch.float64)
    model = nn.Sequential(norm)
    f = compile(lambda x: attention(model(x)))
    return trained(f, rows(), parameters=list(norm.parameters())), dict(norm.named_buffers())


@program
def dropout_before(compile):
    return trained(compile(lambda x: attention(F.dropout(x, 0.5))), rows())


@program
def dropout_in_a_step(compile):
    def run(x):
        return scan(lambda c, row: (c, F.dropout(row, 0.5)), x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def random_slots(compile):
    def run(x):
        def step(cache, row):
            slot, x = row
            cache = torch.where((torch.arange(S) == slot)[:, None], x, cache)
            return cache, cache.sum(0)

        return scan(step, torch.zeros_like(x), (torch.randperm(S), x))

    f = compile(run)
    return trained(f, rows()), trained(f, rows())


@program
def in_place_statement_under_no_grad(compile):
    weight = nn.Parameter(rows(D, D))

    def run(x):
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)
        return attention(x @ weight)

    return trained(compile(run), rows(), parameters=[weight]), weight


@program
def written_to_by_data(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = cache.index_copy(0, t.view(1), x[None])
            return cache, cache.square().sum(0)

        cache, y = scan(step, torch.zeros_like(x), (torch.arange(S), x))
        cache.data.mul_(2)
        return y

    # What autograd saves in eager mode is overwritten, and not watched: here it saves copies.
    copies = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
    with copies if compile(run) is run else contextlib.nullcontext():
        return trained(compile(run), rows())


# ------------------------------------------------------------------------------------------------------- composition


@program
def checkpoint_around(compile):
    return trained(compile(lambda x: checkpoint(lambda x: attention(x.tanh())[1], x, use_reentrant=False)), rows())


@program
def checkpoint_around_a_loop(compile):
    return trained(compile(lambda x: checkpoint(lambda x: average(x.tanh())[1], x, use_reentrant=False)), rows())


@program
def checkpoint_around_the_compiled_function(compile):
    f = compile(attention)
    return trained(lambda x: checkpoint(f, x.tanh(), use_reentrant=False), rows())


@program
def checkpoint_in_a_step(compile):
    w = rows(D, D).requires_grad_()

    def run(x):
        def step(c, row):
            y = checkpoint(lambda v: (v @ w).tanh(), row, use_reentrant=False)
            return c + y, y * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows(), parameters=[w])


@program
def vmap_around(compile):
    return trained(compile(lambda x: torch.vmap(attention)(x)), rows(2, S, D))


@program
def vmap_around_a_loop(compile):
    return trained(compile(lambda x: torch.vmap(average)(x)), rows(2, S, D))


@program
def branch_around_a_scan(compile):
    def run(x):
        return torch.cond(x.sum() > 0, lambda x: average(x)[1] * 2, lambda x: average(x)[1], (x,))

    return trained(compile(run), rows())


@program
def vmap_around_the_compiled_function(compile):
    f = compile(attention)
    return trained(lambda x: torch.vmap(f)(x), rows(2, S, D))


@program
def vmap_in_a_step(compile):
    w = rows(3, D, D).requires_grad_()

    def run(x):
        def step(c, row):
            y = torch.vmap(lambda m: m @ row)(w)
            return c + y.sum(0), y

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows(), parameters=[w])


@rounded
def autocast_around_the_call(compile):
    w = torch.randn(D, D, requires_grad=True)
    f = compile(lambda x: attention(x @ w))

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f(x)

    return trained(run, rows().float(), parameters=[w])


@rounded
def autocast_around_a_scan(compile):
    w = torch.randn(D, D, requires_grad=True)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(x @ w)

    return trained(compile(run), rows().float(), parameters=[w])


@rounded
def autocast_in_a_step(compile):
    w = torch.randn(D, D, requires_grad=True)

    def run(x):
        def step(c, row):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = row @ w
            return c, y.float().tanh()

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows().float(), parameters=[w])


@rounded
def autocast_in_the_step_of_a_loop(compile):
    w = torch.randn(D, D, requires_grad=True)

    def run(x):
        def step(c, row):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = (c + row) @ w
            return y.float().tanh(), y.float()

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows().float(), parameters=[w])


@program
def inference_mode_around_the_call(compile):
    f = compile(attention)
    with torch.inference_mode():
        return f(rows())


@program
def inference_mode_around_the_call_of_a_loop(compile):
    f = compile(average)
    with torch.inference_mode():
        return f(rows())


@program
def inference_mode_inside(compile):
    def run(x):
        with torch.inference_mode():
            return attention(x)

    return compile(run)(rows())


@program
def no_grad_around_the_call(compile):
    f = compile(attention)
    with torch.no_grad():
        return f(rows().requires_grad_())


@program
def no_grad_around_a_scan(compile):
    def run(x):
        with torch.no_grad():
            _, y = attention(x)
        return y * x

    return trained(compile(run), rows())


@program
def no_grad_in_a_step(compile):
    def run(x):
        def step(c, row):
            with torch.no_grad():
                scale = row.square().sum()
            return c, row * scale

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def no_grad_in_the_step_of_a_loop(compile):
    def run(x):
        def step(c, row):
            with torch.no_grad():
                scale = (c + row).square().sum()
            c = torch.tanh(c + row * scale)
            return c, c * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def inference_mode_in_a_step(compile):
    def run(x):
        def step(c, row):
            with torch.inference_mode():
                y = row * 2
            return c, y

        return scan(step, x.new_zeros(D), x)

    return compile(run)(rows())


@program
def scan_in_a_step(compile):
    def run(x):
        def step(c, row):
            inner, ys = scan(lambda a, b: (a * 0.5 + b, a.sin()), c, row)
            return inner, ys

        return scan(step, x.new_zeros(()), x)

    return trained(compile(run), rows())


@program
def attention_in_the_step_of_a_loop(compile):
    def run(x):
        def step(c, row):
            _, y = attention(row + c)
            return y.tanh(), y.sum(0)

        return scan(step, x.new_zeros(S, D), x)

    return trained(compile(run), rows(3, S, D))


@program
def scans_in_turn(compile):
    return trained(compile(lambda x: average(attention(x)[1])), rows())


@program
def scans_that_share_a_cache(compile):
    def half(cache, x, start):
        positions = torch.arange(S)

        def step(cache, row):
            t, x = row
            cache = torch.where((positions == t)[:, None], x, cache)
            return cache, (cache @ x).masked_fill(positions > t, LOWEST).softmax(-1) @ cache

        return scan(step, cache, (torch.arange(start, start + len(x)), x))

    def run(x):
        cache, first = half(torch.zeros_like(x), x[: S // 2], 0)
        cache, second = half(cache, x[S // 2 :], S // 2)
        return cache, first, second

    return trained(compile(run), rows())


@program
def outputs_that_are_views_of_state(compile):
    def run(x):
        def step(cache, row):
            t, x = row
            cache = torch.where((torch.arange(S) == t)[:, None], x, cache)
            return cache, (cache[0], cache[:2].t())

        cache, ys = scan(step, torch.zeros_like(x), (torch.arange(S), x))
        return cache, cache[1:], ys

    f = compile(run)
    cache, tail, ys = f(rows())
    tail.add_(1)
    ys[0].mul_(2)
    return cache, tail, ys


@program
def input_returned_as_it_is(compile):
    f = compile(lambda x: (x, x[1:], attention(x)))
    x = rows()
    same, tail, _ = f(x)
    tail.add_(1)
    return x, same, torch.tensor(same is x)


@program
def initial_carry_returned_as_it_is(compile):
    f = compile(lambda x, init: scan(lambda c, row: (c, row * c), init, x)[0])
    x, init = rows(), rows(D)
    final = f(x, init)
    final = final * 2
    return final, init


@program
def tensors_closed_over(compile):
    w, mask = rows(D, D).requires_grad_(), torch.rand(S, D) > 0.3
    return trained(compile(lambda x: attention(x @ w * mask)), rows(), parameters=[w])


@program
def tensors_closed_over_by_the_step(compile):
    w, b = rows(D, D).requires_grad_(), rows(D)

    def run(x):
        return scan(lambda c, row: (torch.tanh(c @ w + row + b), c @ w), x.new_zeros(D), x)

    return trained(compile(run), rows(), parameters=[w])


class Layer(nn.Module):
    """Attention with a projection and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            x = F.dropout(x, 0.25)
        positions = torch.arange(x.shape[0])

        def step(cache, row):
            t, x = row
            cache = torch.where((positions == t)[:, None], x, cache)
            scores = (cache @ self.q(x) * self.scale).masked_fill(positions > t, LOWEST)
            return cache, scores.softmax(-1) @ cache

        return scan(step, torch.zeros_like(x), (positions, x))[1]


@program
def parameters_and_buffers(compile):
    layer = Layer()
    return trained(compile(layer), rows(), parameters=list(layer.parameters())), dict(layer.named_buffers())


@program
def train_and_eval(compile):
    layer = Layer()
    f = compile(layer)
    results = []
    for mode in (True, False, True, False):
        layer.train(mode)
        results.append(trained(f, rows(), parameters=list(layer.parameters())))
    return results, dict(layer.named_buffers())


@program
def deepcopy_of_a_compiled_module(compile):
    layer = Layer().eval()
    f = compile(layer)
    first = f(rows())
    twin = copy.deepcopy(f)
    with torch.no_grad():
        next(twin.parameters()).mul_(2)
    return first, twin(rows()), f(rows())


@program
def pickle_of_a_module_compiled_in_place(compile):
    layer = Layer().eval()
    if compile is not eager:
        layer.compile(backend="nsa_compile", fullgraph=True, options={"nested": "eager"})
    first = layer(rows())
    twin = pickle.loads(pickle.dumps(layer))
    return first, twin(rows())


@program
def state_dict_of_a_compiled_module(compile):
    layer, other = Layer().eval(), Layer().eval()
    f, g = compile(layer), compile(other)
    f(rows())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    g(rows())
    other.load_state_dict(torch.load(file))
    return f(rows()), g(rows())


@program
def export(compile):
    if compile is eager:
        return Layer().eval()(rows())
    layer = Layer().eval()
    x = rows()
    return torch.export.export(layer, (x,), strict=False).module()(x)


@program
def strict_export(compile):
    if compile is eager:
        return Layer().eval()(rows())
    layer = Layer().eval()
    x = rows()
    return torch.export.export(layer, (x,), strict=True).module()(x)


@program
def func_grad_around_the_compiled_function(compile):
    f = compile(lambda x: attention(x)[1])
    return torch.func.grad(lambda x: f(x).square().sum())(rows())


@program
def func_grad_inside(compile):
    return compile(torch.func.grad(lambda x: attention(x)[1].square().sum()))(rows())


@program
def func_grad_of_a_loop_inside(compile):
    return compile(torch.func.grad(lambda x: average(x)[1].square().sum()))(rows())


@program
def func_grad_in_a_step(compile):
    def run(x):
        def step(c, row):
            return c, torch.func.grad(lambda v: v.sin().sum())(row)

        return scan(step, x.new_zeros(D), x)

    return compile(run)(rows())


@program
def functional_call_inside(compile):
    layer = Layer().eval()
    weights = {k: v.detach().clone() for k, v in layer.named_parameters()}
    f = compile(lambda w, x: torch.func.functional_call(layer, {"q.weight": w}, (x,)))
    return trained(lambda x, w: f(w, x), rows(), weights["q.weight"])


@program
def functional_call_around_the_compiled_module(compile):
    layer = Layer().eval()
    f = compile(layer)
    weights = {k: v.detach().clone() for k, v in f.named_parameters()}
    return trained(lambda x, w: torch.func.functional_call(f, {next(iter(weights)): w}, (x,)), rows(), rows(D, D))


@program
def jacobian_vector_product_around(compile):
    f = compile(lambda x: attention(x)[1])
    x = rows()
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))


@program
def second_derivatives(compile):
    f = compile(lambda x: attention(x)[1].square().sum())
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


@program
def second_derivatives_of_a_loop(compile):
    f = compile(lambda x: average(x.sin())[1].square().sum())
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def tanhs(x):
    """A scan that stays a loop."""
    return scan(lambda c, row: ((c + row).tanh(),) * 2, torch.zeros_like(x[0]), x)[1]


@program
def second_derivatives_of_what_stays_a_loop(compile):
    """Nothing that the backward pass reads has a history: neither the gradient of a sum nor what the loop has kept."""
    f = compile(tanhs)
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum() + f(x).sum(), x)


@program
def batched_gradients_of_a_loop(compile):
    f = compile(tanhs)
    x = rows().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, torch.stack([y, y * 2]).detach(), is_grads_batched=True)


@program
def dual_tensors_go_in(compile):
    f = compile(tanhs)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(rows(), rows())
        return torch.autograd.forward_ad.unpack_dual(f(x) * x)


@program
def gradients_turned_on_in_a_step(compile):
    def step(c, row):
        with torch.enable_grad():
            c = c * 0.5 + row
        return c, c * 2

    f = compile(lambda x: scan(step, torch.zeros_like(x[0]), x)[0])
    x = rows().requires_grad_()
    with torch.no_grad():
        y = f(x)
    return torch.autograd.grad(y.sum(), x)


@program
def hooks_on_parameters_and_outputs(compile):
    layer = Layer().eval()
    seen: dict[str, Tensor] = {}
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    layer.register_full_backward_hook(lambda module, gi, go: seen.update(output=go[0].clone()))
    f = compile(layer)
    x = rows().requires_grad_()
    f(x).square().sum().backward()
    return x.grad, [seen[name] for name in sorted(seen)]


@program
def hook_on_a_tensor_inside(compile):
    def run(x):
        h = x * 2
        h.register_hook(lambda g: g * 3)
        return attention(h)

    return trained(compile(run), rows())


@program
def graph_breaks_around(compile):
    def run(x):
        h = x.sin()
        torch._dynamo.graph_break()
        carry, y = attention(h)
        torch._dynamo.graph_break()
        return carry, y.cos()

    return trained(compile(run, fullgraph=False), rows())


@program
def step_that_breaks_the_graph(compile):
    def run(x):
        def step(c, row):
            torch._dynamo.graph_break()
            return c + row, row * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run, fullgraph=False), rows())


class Pair:
    """A carry of a class of one's own, which pytree takes apart by functions of one's own."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b


def _parts(pair: Pair) -> tuple[list[Tensor], None]:
    torch._dynamo.graph_break()
    return [pair.a, pair.b], None


pytree.register_pytree_node(Pair, _parts, lambda parts, _: Pair(*parts))


@program
def carry_that_breaks_the_graph(compile):
    def run(x):
        pair, ys = scan(
            lambda c, row: (Pair(c.b + row, c.a * 0.5), c.a * 1), Pair(x.new_zeros(D), x.new_zeros(D)), x.sin()
        )
        return pair.a, ys.cos()

    return trained(compile(run, fullgraph=False), rows())


@program
def named_tuple_as_carry(compile):
    State = collections.namedtuple("State", ["mean", "peak"])

    def run(x):
        def step(state, row):
            state = State(state.mean * 0.5 + row, torch.maximum(state.peak, row))
            return state, state.peak - state.mean

        carry, ys = scan(step, State(x.new_zeros(D), x.new_zeros(D)), x)
        return carry.mean, carry.peak, ys

    return trained(compile(run), rows())


@program
def foreign_backend(compile):
    if compile is eager:
        return average(rows())
    return torch.compile(average, backend="aot_eager")(rows())


@program
def backend_of_ones_own(compile):
    def aot(gm, inputs):
        return lookup_backend("aot_eager")(gm, inputs)

    return trained(average if compile is eager else torch.compile(average, backend=aot), rows())


@program
def ddp_around_the_compiled_module(compile):
    def run():
        layer = nn.parallel.DistributedDataParallel(compile(Layer().eval()))
        x = rows().requires_grad_()
        layer(x).square().sum().backward()
        return x.grad, [p.grad for p in layer.parameters()]

    with group_of_one():
        return run()


@program
def ddp_inside(compile):
    def run():
        layer = nn.parallel.DistributedDataParallel(Layer().eval())
        x = rows().requires_grad_()
        compile(layer, fullgraph=False)(x).square().sum().backward()
        return x.grad, [p.grad for p in layer.parameters()]

    with group_of_one():
        return run()


@contextlib.contextmanager
def group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # A model that outlives its group ends it, and torch then waits for a thread that waits for Python (torch 2.13).
        torch._dynamo.reset()
        gc.collect()
        torch.distributed.destroy_process_group()


@program
def cond_in_a_step(compile):
    def run(x):
        def step(c, row):
            y = torch.cond(row.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (row,))
            return c + y, y * 2

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


class Doubled(torch.autograd.Function):
    """x * 2 with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


@program
def autograd_function_in_a_step(compile):
    def run(x):
        def step(c, row):
            y = Doubled.apply(row)
            return c + y, y.sin()

        return scan(step, x.new_zeros(D), x)

    return trained(compile(run), rows())


@program
def autograd_function_around(compile):
    return trained(compile(lambda x: attention(Doubled.apply(x))), rows())


@program
def complex_numbers(compile):
    return trained(compile(lambda x: torch.view_as_real(average(torch.complex(x, x))[1])), rows())


@program
def complex_rows_with_gradients(compile):
    return trained(compile(lambda x: torch.view_as_real(average(torch.view_as_complex(x))[1])), rows(S, D, 2))


@program
def length_of_one(compile):
    return trained(compile(attention), rows(1, D))


@program
def length_of_one_in_a_loop(compile):
    return trained(compile(average), rows(1, D))


@program
def length_of_none(compile):
    return trained(compile(attention), rows(0, D))


@program
def batch_of_none(compile):
    return trained(compile(average), rows(S, 0, D))


@program
def batch_of_one(compile):
    return trained(compile(average), rows(S, 1, D))


# --------------------------------------------------------------------------------------------------------------- run


def eager(function: Any, **options: Any) -> Any:
    return function


def compiled_with(nested: str) -> Callable:
    def compile(function, **options):
        return nsa_compile.compile(function, nested=nested, **options)

    return compile


def run(program: Callable, compile: Callable) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    result = program(compile)
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result), torch.get_rng_state()


def assert_equal(actual: Any, expected: Any, tolerance: float) -> None:
    """Up to `tolerance` times the largest element of each tensor."""

    def compare(actual: Any, expected: Any) -> None:
        size = 0.0
        if isinstance(expected, Tensor) and expected.numel():
            size = float(expected.detach().to(torch.complex128).abs().nan_to_num(0).max())
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(size, 1.0), equal_nan=True)

    found, wanted = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    for a, e in zip(found, wanted, strict=True):
        compare(a, e)


OF_SCANS = ("batched", "batched, its recurrence in parallel", "batched, its recurrence a loop", "stays a loop")


def verdict_of(name: str, nested: str = "eager") -> str:
    """What comes of a program.

    Raises:
        AssertionError: it is compiled, and not equal to eager mode.
    """
    reports: list[Report] = []
    original = backend.optimize

    def optimize(*args, **options):
        result = original(*args, **options)
        reports.append(result[0])
        return result

    function = PROGRAMS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "optimize", optimize)
        try:
            actual = run(function, compiled_with(nested))
        except Exception as error:
            return f'one line: "{str(error).strip().splitlines()[0]}"'
    assert_equal(actual, run(function, eager), 2e-2 if name in ROUNDED else 1e-10)
    if any(r.left_alone for r in reports):
        return "left alone"
    found = {s.verdict for r in reports for s in r.scans}
    return "; ".join(verdict for verdict in OF_SCANS if verdict in found) or "unrolled"


ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
VERDICTS = {name: verdict for name, _, verdict in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_every_row_has_a_program_and_every_program_a_row():
    names = [name for name, _, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(PROGRAMS)


@pytest.mark.deep(every=8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_verdict_is_what_comes_out(name):
    check_verdict(name, verdict_of(name))


@pytest.mark.deep(but=["bfloat16_counter"])
@pytest.mark.parametrize(
    "name",
    [
        "causal_attention",
        "exponential_average",
        "bfloat16_counter",
        "batch_norm_in_training",
        "checkpoint_around_a_loop",
        "vmap_around",
        "autocast_around_a_scan",
        "hooks_on_parameters_and_outputs",
        "graph_breaks_around",
        "batch_of_none",
    ],
)
def test_so_it_is_through_aot_autograd(name):
    check_verdict(name, verdict_of(name, "aot_eager"))


def check_verdict(name: str, actual: str) -> None:
    stated = VERDICTS[name]
    if stated.startswith("one line: "):
        assert actual.startswith("one line: "), actual
        assert stated.removeprefix("one line: ").strip('"') in actual
    else:
        assert actual == stated


@pytest.mark.parametrize("name", ["carry_that_is_a_number", "output_that_is_a_number", "length_of_none"])
def test_what_is_no_scan_is_the_same_error_in_eager_mode(name):
    line = VERDICTS[name].removeprefix("one line: ").strip('"')
    for compile in (eager, compiled_with("eager")):
        with pytest.raises(ValueError, match=re.escape(line)):
            run(PROGRAMS[name], compile)


@pytest.mark.parametrize("fault", [lambda x: x.relu().tolist(), lambda x: x.item(), lambda x: x[x > 0].sum()])
def test_a_refusal_names_the_line_of_the_step(fault):
    """Not only that of the scan, which is elsewhere where a model has many layers."""

    def of_a_row(row):
        return fault(row) * row

    def step(c, row):
        return c + row, of_a_row(row)

    with pytest.raises(RuntimeError) as caught:
        nsa_compile.compile(lambda x: scan(step, x[0], x), nested="eager")(rows(S, 1))
    assert f"ed at {__file__}:{fault.__code__.co_firstlineno}: " in str(caught.value).splitlines()[0]


def test_a_call_that_torch_does_not_have_is_refused():
    """Torch explains it by an empty line."""
    with pytest.raises(RuntimeError, match=r"it raises TypeError sort: sort\(\) takes"):
        nsa_compile.compile(lambda x: scan(lambda c, r: (c, r.sort(-1, descending=True, stable=True)[0]), x[0], x))(
            rows()
        )


def test_an_assert_that_always_fails_is_refused():
    found = {}  # by exec, since pytest rewrites what stands in this file
    exec('def step(c, row):\n    assert row.shape[0] == 99, "bad width"\n    return c, row', found)
    with pytest.raises(RuntimeError, match="an assert of it fails, whatever numbers it is given"):
        nsa_compile.compile(lambda x: scan(found["step"], x[0], x), nested="eager")(rows())


@pytest.mark.parametrize("name", ["aot_eager", "eager", "inductor"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_no_backend_but_ours_gets_a_scan(name, fullgraph):
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=re.escape('compile with backend="nsa_compile"')) as caught:
        torch.compile(average, backend=name, fullgraph=fullgraph)(rows())
    assert f"test_what_compiles.py:{average.__code__.co_firstlineno + 7} was compiled by the backend '{name}'" in str(
        caught.value
    )


def test_a_loop_that_torch_leaves_uncompiled_is_said_to_be_once_a_place(caplog, monkeypatch):
    monkeypatch.setattr("nsa_compile.scanning._said", set())  # other tests may have been told already
    run(PROGRAMS["carry_that_breaks_the_graph"], compiled_with("eager"))
    assert "runs step by step, as torch.compile left it uncompiled" in caplog.text

    torch._dynamo.reset()
    fast = torch.compile(average, backend="nsa_compile", options={"nested": "eager"})
    place = f"{Path(__file__).name}:{average.__code__.co_firstlineno + 7} runs step by step"
    average(rows())
    assert place not in caplog.text, "nobody wanted it compiled"
    for _ in range(2):
        torch.vmap(fast)(rows(2, S, D))  # which torch runs as it is, and from then on the function by itself, too
        fast(rows())
    assert caplog.text.count(place) == 1


def test_a_step_that_cannot_be_captured_is_refused_with_graph_breaks_allowed_too():
    def reads(x):
        return scan(lambda c, t: (c, x[: t + 1].sum(0)), x.new_zeros(D), torch.arange(S))

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="it reads a number out of a tensor"):
        torch.compile(reads, backend="nsa_compile", options={"nested": "eager"})(rows())


SHAPES = [(2, 6), (2, 9), (3, 9), (1, 9), (4, 1), (0, 5), (1, 1), (5, 7), (2, 6)]


@pytest.mark.deep
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_any_sequence_of_batch_sizes_and_lengths(dynamic, caplog, monkeypatch):
    reports = []
    original = backend.optimize
    monkeypatch.setattr(backend, "optimize", lambda *args: reports.append(found := original(*args)) or found)
    caplog.set_level("INFO")
    torch._dynamo.reset()

    def batched_attention(x):
        positions = torch.arange(x.shape[1])

        def step(cache, row):
            t, y = row
            cache = torch.where((positions == t)[None, :, None], y[:, None], cache)
            scores = torch.einsum("bsd,bd->bs", cache, y).masked_fill(positions > t, -torch.inf)
            return cache, torch.einsum("bs,bsd->bd", scores.softmax(-1), cache)

        return scan(step, torch.zeros_like(x), (positions, x.transpose(0, 1)))[1].transpose(0, 1)

    fast = torch.compile(batched_attention, backend="nsa_compile", dynamic=dynamic, options={"nested": "eager"})
    for batch, length in SHAPES:
        x = rows(batch, length, D)
        caplog.clear()
        assert_equal(trained(fast, x), trained(batched_attention, x), 1e-10)
        lines = [r for r in caplog.records if "compiling for the sizes" in r.message]
        assert len(lines) <= 1
        assert not [r for r in caplog.records if r.name.startswith("torch") and r.levelno >= logging.WARNING]
    assert len(reports) == len(set(SHAPES)), "one program a shape"
    assert all(s.batched for report, _ in reports for s in report.scans)
    with pytest.raises(ValueError, match="scan: xs have length 0"):
        fast(rows(2, 0, D))


def test_a_step_has_iterators_of_its_own():
    def run(x):
        def step(c, row):
            both = (2 * y for y in (c, row))
            return next(both), next(both) * sum(range(3)) + sum(i * row for i, _ in enumerate("ab"))

        return scan(step, x[0], x)

    torch.testing.assert_close(nsa_compile.compile(run, nested="eager")(x := rows()), run(x))


def test_what_a_captured_step_cannot_follow_is_refused_in_one_line():
    def draws(x):
        return scan(lambda c, row: (row, c * random.uniform(0, 1)), x[0], x)

    def scaled(x, scale):
        return scan(lambda c, row: (row, c * scale), x[0], x)

    def asks(x):
        return scan(lambda c, row: (row, row.clone().requires_grad_() * c), x[0], x)

    def takes_from(items):
        def run(x):
            taken = iter(items())
            return scan(lambda c, row: (row, c * next(taken)), x[0], x)

        return run

    numbers = dict.fromkeys([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    for items in (lambda: (n for n in numbers), lambda: numbers, lambda: range(9), lambda: itertools.cycle(numbers)):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="it takes the next item of an iterator from outside of it"):
            nsa_compile.compile(takes_from(items), nested="eager")(rows())
    fast = torch.compile(scaled, backend="nsa_compile", options={"nested": "eager"})
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"it calls requires_grad_\(\)"):
        nsa_compile.compile(asks, nested="eager")(rows())
    with pytest.raises(RuntimeError, match="it draws from Python's random, once for all steps"):
        nsa_compile.compile(draws, nested="eager")(rows())
    torch.testing.assert_close(fast(x := rows(), 0.5), scaled(x, 0.5))
    with pytest.raises(RuntimeError, match="it reads a Python float that is another one from call to call"):
        fast(x, 0.25)


@pytest.mark.deep(but=["True-<lambda>0-aot_eager"])
@pytest.mark.parametrize("nested", ["aot_eager", "eager"])
@pytest.mark.parametrize("function", [tanhs, lambda x: average(x)[1], lambda x: attention(x)[1]])
@pytest.mark.parametrize("inner", [False, True])
def test_second_derivatives_are_refused_and_no_zeros(function, nested, inner):
    """AOTAutograd's own refusal lies on the way to inputs that it saves alone: a Hessian of a sum was zero."""
    torch._dynamo.reset()
    compiled = nsa_compile.compile(function, nested=nested)
    x = rows().requires_grad_()

    def loss(x):
        return compiled(x.sin() if inner else x).square().sum()

    with pytest.raises(RuntimeError, match="has no second derivatives; take them of the function as written"):
        torch.autograd.functional.hvp(loss, x, torch.ones_like(x))
    (first,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(first, torch.autograd.grad(function(x.sin() if inner else x).square().sum(), x)[0])


def test_a_result_keeps_no_input_in_memory():
    torch._dynamo.reset()
    compiled = nsa_compile.compile(lambda x: average(x)[1].sum(), nested="aot_eager")
    leaf = rows().requires_grad_()
    given = leaf.sin()
    memory, result = weakref.ref(given), compiled(given)
    result.backward()
    del given
    assert memory() is None
    assert result.requires_grad


FRAMES = {
    "a loop": tanhs,
    "a recurrence in parallel": lambda x: average(x)[1],
    "attention": lambda x: attention(x)[1],
    "a loop within a batched step": lambda x: scan(
        lambda c, row: ((c + row).tanh(), (c @ row) * row.sin()), torch.zeros_like(x[0]), x
    )[1],
}


@pytest.mark.deep
@pytest.mark.parametrize("name", FRAMES)
def test_no_frame_of_the_caller_is_kept(name):
    """Why a carry is no buffer was kept with its traceback, and so everything that its frames held."""

    def called(compiled):
        of_the_caller, x = torch.zeros(3), rows().requires_grad_()
        compiled(x).sum().backward()
        return weakref.ref(of_the_caller), weakref.ref(x)

    torch._dynamo.reset()
    compiled = nsa_compile.compile(FRAMES[name], nested="eager", cache=False)
    alive = called(compiled)
    gc.collect()
    assert [x() for x in alive] == [None, None]


@pytest.mark.deep(but=["a recurrence in parallel"])
@pytest.mark.parametrize("name", FRAMES)
def test_hooks_of_all_modules_see_no_graph(name):
    torch._dynamo.reset()
    x, seen = rows().requires_grad_(), []
    compiled = nsa_compile.compile(FRAMES[name], nested="eager", cache=False)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        for _ in range(2):
            torch.autograd.grad(compiled(x).sum(), x)
    finally:
        handle.remove()
    assert seen == []
