"""Loops that people who had not read the code wrote, and that once came out wrong or crashed: each is what it is as
written, in values, gradients and what it leaves behind, at a first and at a second call; or it is declined by name."""

from __future__ import annotations

import array
import bisect
import collections
import contextvars
import copy
import functools
import io
import itertools
import logging
import math
import random
import re
import time
import types
import weakref

import numpy
import pytest
import torch
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import loop
from nsa_compile.loops import LoopDeclined

S, D = 7, 3
LOG: list = []
HELD: list = []
ROWS = torch.zeros(D, dtype=torch.float64)
ORDER: collections.OrderedDict = collections.OrderedDict(a=1.0, b=2.0, c=3.0)
TEXT = io.StringIO()
RNG, OTHER = numpy.random.default_rng(0), random.Random(0)
VARIABLE = contextvars.ContextVar("variable", default=0)
add_to_held = HELD.append
log = logging.getLogger("of_a_step")


class Counter:
    n = 0

    @classmethod
    def count(cls, row):
        cls.n += 1
        return row * cls.n


class Cache:
    def __init__(self):
        self.rows = []


class Owner:
    n = 0


OWNER = Owner()
REFERENCE = weakref.ref(OWNER)


def helper(row):
    helper.n += 1
    return row * helper.n


def logging_helper(row):
    LOG.append(row * 2)
    return row


def default_helper(row, seen=[]):  # noqa: B006
    seen.append(row * 1)
    return row * len(seen) if len(seen) > 100 else row


part = functools.partial(lambda seen, row: (seen.append(row * 1), row)[1], [])


def reset():
    LOG.clear()
    HELD.clear()
    ROWS.zero_()
    ORDER.clear()
    ORDER.update(a=1.0, b=2.0, c=3.0)
    TEXT.seek(0)
    TEXT.truncate()
    default_helper.__defaults__[0].clear()
    part.args[0].clear()
    Counter.n = OWNER.n = helper.n = 0
    NAMES.clear()
    NAMES["a"] = 1.0
    OTHER.seed(0)
    RNG.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
    numpy.random.seed(0)
    torch.manual_seed(0)
    globals()["NUMBERS"] = itertools.count()


def left_behind():
    """What a loop has left outside of its function."""
    tensors = [*LOG, *HELD, *default_helper.__defaults__[0], *part.args[0], ROWS.clone()]
    numbers = Counter.n, OWNER.n, helper.n, list(ORDER.items()), TEXT.getvalue(), RNG.random(), OTHER.random()
    return tensors, (*numbers, float(numpy.random.rand()), float(torch.rand(())), torch.is_grad_enabled())


def mapped(of_step):
    """A loop that stacks what a function of the rows and the position gives."""

    def run(x):
        ys = []
        for t in range(len(x)):
            ys.append(of_step(x, t))
        return torch.stack(ys)

    run.__name__ = of_step.__name__
    return run


# -- loops that compile


def state_that_is_promoted(x):
    h, ys = torch.zeros(D, dtype=torch.bfloat16), []
    for t in range(len(x)):
        h = h + x[t]
        ys.append(h)
    return torch.stack(ys)


def state_of_integers_that_is_promoted(x):
    total = torch.tensor(0)
    for t in range(len(x)):
        total = total + x[t].square().sum()
    return total


def read_by_a_lambda(x):
    h, ys = torch.zeros(D, dtype=x.dtype), []
    get = lambda: h  # noqa: E731
    for t in range(len(x)):
        h = get() + x[t]
        ys.append(h)
    return torch.stack(ys)


@mapped
def asked_for_its_type(x, t):
    return x[t] if isinstance(t, int) and not isinstance(t, bool) else x[t] * 2


@mapped
def matched_by_its_type(x, t):
    match t:
        case int(n):
            return x[n] * 3
    return x[t]


@mapped
def divided_with_a_remainder(x, t):
    whole, rest = divmod(t, 4)
    return x[whole] * rest


def one_list_of_two_names(x):
    a = []
    b = a
    for t in range(len(x)):
        a.append(x[t])
        b.append(x[t] * 5)
    return torch.stack(a), len(b)


def one_list_in_two_places(x):
    lists, cache = [[]] * 2, Cache()
    rows = cache.rows
    for t in range(len(x)):
        lists[0].append(x[t])
        lists[1].append(x[t] * 5)
        rows.append(x[t] * 2)
    return torch.stack(lists[0]), torch.stack(cache.rows)


def kept_at_one_step(x):
    h = x[0] * 0
    for t in range(len(x)):
        h = h * 0.5 + x[t]
        if t == 2:
            early = h + 1
        if t % 3 == 2:
            where = t
    return early, h, where


def one_tensor_of_two_names(x):
    h = x[0] * 0
    for t in range(len(x)):
        h = h * 0.5 + x[t]
        a = h
    return h, a


@mapped
def counted_from_behind(x, t):
    K = x[: t + 1]
    return K[torch.tensor(-1)] + K[[0, -1]].sum(0) * 2 + x[torch.arange(t + 1) - 1].sum(0)


@mapped
def placed_from_behind(x, t):
    return torch.zeros(t + 1, D, dtype=x.dtype).index_put((torch.tensor([-1]),), x[t])[t]


@mapped
def indices_with_a_position_among_them(x, t):
    return x[: t + 1][[0, t // 2]].sum(0)


@mapped
def picked_by_a_remainder(x, t):
    return x[torch.arange(t + 1) % 3].sum(0)


@mapped
def attribute_of_a_function(x, t):
    return helper(x[t])


@mapped
def behind_a_reference(x, t):
    REFERENCE().n += 1
    return x[t] * REFERENCE().n


def written_to_a_tensor_of_the_module(x):
    ys = []
    for t in range(len(x)):
        ROWS.add_(x[t].detach())
        ys.append(ROWS.clone() * x[t])
    return torch.stack(ys)


def appended_to_a_list_of_the_module(x):
    ys = []
    for t in range(len(x)):
        LOG.append(x[t] * 2)
        ys.append(x[t] * 3)
    return torch.stack(ys)


@mapped
def taken_from_an_ordered_dict(x, t):
    key, value = ORDER.popitem(last=False)
    ORDER[key] = value
    return x[t] * value


@mapped
def divided_by_zero_at_a_step(x, t):
    try:
        return x[t] / (1 // (t - 3)) + 5 % (t - 2)
    except ZeroDivisionError:
        return x[t] * 2


@mapped
def shifted_by_a_negative_number(x, t):
    try:
        return x[t] * (1 << (3 - t))
    except ValueError:
        return -x[t]


@mapped
def large_on_the_way(x, t):
    return x[t] * ((10 ** (t * 4)) % 7 + (t * 12345678901 * (t + 12345678901)) % 11)


def a_truth_or_a_number(x):
    ys = []
    for t in range(len(x)):
        w = (t > 2) if t % 2 else t
        ys.append(x[t] * w)
    return torch.stack(ys), w


def searched_list_of_numbers(x):
    found, ys = [], []
    for t in range(len(x)):
        found.append(t % 3)
        ys.append(x[found.index(t % 3)] + 10 * x[bisect.bisect([1, 2, 4], t)])
    return torch.stack(ys), found


@mapped
def the_type_itself(x, t):
    return x[t] if type(t) is int else x[t] * 2


@mapped
def the_type_of_a_tensor(x, t):
    y = x[: t + 1]
    return x[t] * (2 if type(y) is torch.Tensor else 1) + {torch.Tensor: y.sum(0)}.get(y.__class__, 0)


@mapped
def kinds_of_kinds(x, t):
    return x[t] * (isinstance(type(x), type) + isinstance(t, type) + len(type("Made", (), {"n": 3}).__name__))


@mapped
def norms_of_all_rows(x, t):
    y = x[: t + 1]
    return x[t] * (y.norm(p=1) + torch.linalg.vector_norm(y, 3) + torch.linalg.vector_norm(y[:, 0], torch.inf))


@mapped
def one_row_squeezed(x, t):
    return x[t] * x[: t + 1].squeeze().softmax(0).sum()


@mapped
def one_row_squeezed_by_name(x, t):
    return x[t] * x[t:].squeeze(0).dim()


@mapped
def numbers_that_bfloat16_holds(x, t):
    return x[t].bfloat16() * t


def a_deque_with_a_length(x):
    for t in range(len(x)):
        made = collections.deque([x[t], t], maxlen=5)
    return made[0] * made.maxlen, len(made)


def an_ordered_dict_that_is_made(x):
    for t in range(len(x)):
        made = collections.OrderedDict(h=x[t], n=t)
    made.move_to_end("h")
    return made["h"], list(made)


COMPILED = [
    numbers_that_bfloat16_holds, a_deque_with_a_length, an_ordered_dict_that_is_made,
    one_row_squeezed, one_row_squeezed_by_name, the_type_itself, the_type_of_a_tensor, kinds_of_kinds,
    norms_of_all_rows,
    divided_by_zero_at_a_step, shifted_by_a_negative_number, large_on_the_way, a_truth_or_a_number,
    searched_list_of_numbers,
    state_that_is_promoted, state_of_integers_that_is_promoted, read_by_a_lambda, asked_for_its_type,
    matched_by_its_type, divided_with_a_remainder, one_list_of_two_names, one_list_in_two_places, kept_at_one_step,
    one_tensor_of_two_names, counted_from_behind, placed_from_behind, indices_with_a_position_among_them,
    picked_by_a_remainder, attribute_of_a_function, behind_a_reference, written_to_a_tensor_of_the_module,
    appended_to_a_list_of_the_module, taken_from_an_ordered_dict,
]  # fmt: skip


# -- loops that do what no program would do


def an_iterator(x):
    items, h = iter([0.5] * len(x)), x[0] * 0
    for t in range(len(x)):
        h = h * next(items) + x[t]
    return h


NUMBERS = itertools.count()


def counting_helper(row):
    return row * next(NUMBERS)


@mapped
def an_iterator_of_a_helper(x, t):
    return counting_helper(x[t])


NAMES: dict = collections.OrderedDict(a=1.0)


class Naming:
    def of(self, row):
        key, value = NAMES.popitem()
        NAMES[key + "a"] = value
        return row * len(key)


NAMING = Naming()


@mapped
def a_key_of_a_method(x, t):
    return NAMING.of(x[t])


@mapped
def a_truth_itself(x, t):
    late = t > 3
    return x[t] if late is True else x[t] * 2


@mapped
def a_number_itself(x, t):
    nothing = t if t else 0
    return x[t] if nothing is 0 else x[t] * 2  # noqa: F632


@mapped
def a_norm_of_a_negative_order(x, t):
    return torch.linalg.vector_norm(x[: t + 1].abs() + 1, -1, dim=0)


@mapped
def a_number_that_bfloat16_does_not_hold(x, t):
    return x[t].bfloat16() * (t + 257)


@mapped
def an_order_that_changes(x, t):
    return x[t].norm(p=t + 1)


def a_product_that_leaves_out_a_dimension_of_one_row(x):
    rows, ys = [], []
    for t in range(S):
        rows.append(x[t])
        ys.append(torch.einsum("sd,d->s", torch.stack(rows, 0), x[t]).sum())
    return torch.stack(ys)


def a_product_of_three_with_rows_that_grow_from_one(x):
    rows, ys = [], []
    for t in range(S):
        rows.append(x[t])
        ys.append(torch.einsum("sd,d,d->s", torch.stack(rows, 0), x[t], x[t]).sum())
    return torch.stack(ys)


def an_error_that_is_kept(x):
    ys, error = [], None
    for t in range(len(x)):
        try:
            if t > 1:
                raise KeyError(t)
        except KeyError as raised:
            error = raised
        ys.append(x[t])
    return torch.stack(ys) * len(repr(error))


def a_namespace_that_is_made(x):
    for t in range(len(x)):
        made = types.SimpleNamespace(h=x[t])
    return made.h


@mapped
def a_copy_by_the_module_copy(x, t):
    return x[t] * copy.copy(x[t] * 1)


def an_attribute_of_what_is_appended(x):
    ys = []
    for t in range(len(x)):
        y = x[t] * 2
        y.tag = t
        ys.append(y)
    return [y * (1 + getattr(y, "tag", 9)) for y in ys]


@mapped
def the_text_of_a_tensor(x, t):
    return x[t] * len(repr(x[: t + 1]))


@mapped
def a_tensor_in_a_text(x, t):
    return x[t] * len(f"{x[t]}")


@mapped
def what_a_tensor_is_a_view_of(x, t):
    return x[t] if x[: t + 1]._base is x else x[t] * 2


@mapped
def whether_a_tensor_is_a_leaf(x, t):
    return x[t] if x[t].is_leaf else x[t] * 2


@mapped
def what_made_a_tensor(x, t):
    return x[t] if x[t].grad_fn is None else x[t] * 2


def whether_a_state_requires_a_gradient(x):
    h, ys = torch.zeros(D, dtype=x.dtype), []
    for t in range(len(x)):
        ys.append(h * (2 if h.requires_grad else 1) + x[t])
        h = h * 0.5 + x[t]
    return torch.stack(ys)


def the_layout_of_a_state(x):
    h, ys = torch.zeros(D, D, dtype=x.dtype), []
    for t in range(len(x)):
        ys.append(x[t] * (2 if h.is_contiguous() else 1))
        h = (h + x[t]).t()
    return torch.stack(ys)


def an_attribute_of_what_is_left(x):
    for t in range(len(x)):
        y = x[t] * 2
        y.tag = t
    return y * (2 if hasattr(y, "tag") else 1)


@mapped
def the_text_of_a_position(x, t):
    return x[t] * {"step_1": 2.0}.get(f"step_{t}", 1.0)


@mapped
def a_place_in_a_dict(x, t):
    return x[t] * {1: 2.0}.get(t, 1.0)


@mapped
def an_attribute_of_int(x, t):
    return x[t] * (2 if hasattr(t, "real") else 3)


def sizes_that_are_kept(x):
    h = x[0] * 0
    for t in range(len(x)):
        h = h + x[t]
        size = x[:t].shape
    return h, size


def another_list_in_its_place(x):
    a = []
    b = a
    for t in range(len(x)):
        a.append(x[t])
        if t == 3:
            a = []
    return torch.stack(a), torch.stack(b)


@mapped
def a_list_of_a_helper(x, t):
    return logging_helper(x[t])


@mapped
def a_method_of_a_list(x, t):
    add_to_held(x[t] * 1)
    return x[t] * 2


@mapped
def an_attribute_of_a_class(x, t):
    return Counter.count(x[t])


@mapped
def a_context_variable(x, t):
    VARIABLE.set(VARIABLE.get() + 1)
    return x[t] * 2


@mapped
def numbers_of_numpy(x, t):
    return x[t] * float(numpy.random.rand())


@mapped
def numbers_of_a_generator(x, t):
    return x[t] * float(RNG.random())


@mapped
def numbers_of_python(x, t):
    return x[t] * OTHER.random()


@mapped
def a_clock(x, t):
    return x[t] * min(time.perf_counter(), 1.0)


@mapped
def a_line_of_a_log(x, t):
    log.warning("step")
    return x[t]


@mapped
def a_line_of_a_file(x, t):
    TEXT.write("step\n")
    return x[t]


@mapped
def the_seed(x, t):
    torch.manual_seed(3)
    return x[t]


@mapped
def a_version(x, t):
    return x[t] * x._version


def an_array(x):
    n = numpy.zeros(3)
    for t in range(len(x)):
        n[t % 3] += 1
        y = x[t] * float(n[t % 3])
    return y, n.tolist()


def bytes_that_count(x):
    n, m = bytearray(1), array.array("i", [0])
    for t in range(len(x)):
        n[0] += 1
        m[0] += 2
        y = x[t] * n[0] * m[0]
    return y, list(n), list(m)


def an_attribute_of_a_tensor(x):
    x.n = 0
    for t in range(len(x)):
        x.n += 1
        y = x[t] * x.n
    return y, x.n


def gradients_switched(x):
    for t in range(len(x)):
        torch.set_grad_enabled(not torch.is_grad_enabled())
        y = x[t] * 2
    torch.set_grad_enabled(True)
    return y


@mapped
def rounded_to_tens(x, t):
    return x[t] * round(t * 7, -1)


def an_integer_beyond_64_bits(x):
    n, ys = 12345678901, []
    for t in range(len(x)):
        n = n * 1000003 + t
        ys.append(x[n % len(x)])
    return torch.stack(ys), n


def an_integer_that_becomes_a_fraction(x):
    w, ys = 1, []
    for t in range(len(x)):
        w = w / 2 if t % 2 else w * 3
        ys.append(x[t] * w)
    return torch.stack(ys), w


class Rows(list):
    pass


class Waiting(collections.deque):
    pass


class Pair(tuple):
    pass


class First:
    pass


class Second:
    pass


class Private:
    __slots__ = ("__count", "last")

    def __init__(self):
        self.__count = 0

    def count(self):
        self.__count += 1
        return self.__count


class Slot:
    __slots__ = ("h",)


class SlotAndMore(Slot):
    pass


MODULE = types.ModuleType("of_a_user")


def counting(make):
    """A loop that counts in an attribute of what `make` gives."""

    def run(x):
        made, ys = make(x), []
        made.n = 0
        for t in range(len(x)):
            made.n += 1
            ys.append(x[t] * made.n)
        return torch.stack(ys), made.n

    run.__name__ = f"counting_in_a_{type(make(torch.zeros(1))).__name__}"
    return run


def counting_in_a_module_of_the_module(x):
    MODULE.n, ys = 0, []
    for t in range(len(x)):
        MODULE.n += 1
        ys.append(x[t] * MODULE.n)
    return torch.stack(ys), MODULE.n


def counting_in_a_class_of_the_function(x):
    class Local:
        n = 0

    ys = []
    for t in range(len(x)):
        Local.n += 1
        ys.append(x[t] * Local.n)
    return torch.stack(ys), Local.n


def counting_behind_a_view(x):
    held, ys = First(), []
    held.n, view = 0, types.MappingProxyType({"held": held})
    for t in range(len(x)):
        view["held"].n += 1
        ys.append(x[t] * held.n)
    return torch.stack(ys), held.n


def a_list_with_an_attribute_that_is_made(x):
    for t in range(len(x)):
        made = Rows([x[t]])
        made.n = t
    return made[0] * made.n


def a_reference_that_is_made(x):
    held, ys = First(), []
    for t in range(len(x)):
        reference = weakref.ref(held)
        ys.append(x[t])
    return torch.stack(ys), reference() is held


def another_class_at_a_step(x):
    held, ys = First(), []
    for t in range(len(x)):
        if t == 1:
            held.__class__ = Second
        ys.append(x[t])
    return torch.stack(ys), type(held).__name__


def counting_in_a_private_slot(x):
    held, ys = Private(), []
    for t in range(len(x)):
        ys.append(x[t] * held.count())
    return torch.stack(ys), held.count()


def a_slot_of_a_base(x):
    held, ys = SlotAndMore(), []
    held.h = 0
    for t in range(len(x)):
        held.h = held.h + x[t]
        ys.append(held.h)
        made = SlotAndMore()
        made.h, made.more = x[t], t
    return torch.stack(ys), held.h, made.h, made.more


def calling_itself(x, depth=1):
    ys = []
    for t in range(len(x)):
        ys.append(x[t] + (calling_itself(x, depth - 1).sum() if depth else 0))
    return torch.stack(ys)


INDICES = torch.tensor([3, 1, 4, 1, 5, 0, 3])


def a_row_picked_by_a_tensor(x):
    table, ys = x * 2, []
    for t in range(len(x)):
        row = table[INDICES[t]]
        ys.append(row * x[t])
        chosen = (table * x[t])[INDICES[t]]  # of a tensor that nobody else has
        ys.append(chosen)
    chosen.mul_(2)
    return torch.stack(ys)


def a_row_picked_before_its_table_is_written_to(x):
    table, ys = x * 2, []
    for t in range(len(x)):
        row = table[INDICES[t]] * 0.5
        table[t] = row
        ys.append(row)
    return torch.stack(ys)


def a_picked_row_that_is_written_to(x):
    table, ys = x * 2, []
    for t in range(len(x)):
        table[INDICES[t]].add_(x[t])
        ys.append(table.sum(0))
    return torch.stack(ys)


def a_picked_row_that_is_halved(x):
    table, ys = x * 2, []
    for t in range(len(x)):
        row = table[INDICES[t], :2]
        row *= 0.5
        ys.append(row * 1)
    return torch.stack(ys), table


def a_picked_row_whose_table_is_written_to(x):
    table, ys = x * 2, []
    for t in range(len(x)):
        row = table[INDICES[t]]
        table[t] = x[t]
        ys.append(row.detach())
    return torch.stack(ys)


def a_picked_row_that_is_left(x):
    table = x * 2
    for t in range(len(x)):
        row = table[INDICES[t]]
    row.mul_(0)
    return table


def two_picked_rows_of_one_tensor(x):
    ys, zs = [], []
    for t in range(len(x)):
        made = x * x[t]
        ys.append(made[INDICES[t]])
        zs.append(made[INDICES[0]])
    ys[0].mul_(0)
    return torch.stack(zs)


def an_array_of_a_row(x):
    ys = []
    for t in range(len(x)):
        ys.append(x[t] * float(x[t].detach().numpy().sum()))
    return torch.stack(ys)


def the_memory_of_a_state(x):
    c, ys = torch.zeros(D, dtype=x.dtype), []
    for t in range(len(x)):
        c.set_(x[t].detach().clone())
        ys.append(c * 1 + x[t])
    return torch.stack(ys)


def parts_that_are_taken_for_copies(x):
    table, ys = x * 2, []
    for t in range(len(x)):
        first, _ = table.unsafe_chunk(2)
        first.add_(1)
        ys.append(table.sum(0) * t)
    return torch.stack(ys)


def two_parts_of_one_tensor(x):
    ys = []
    for t in range(len(x)):
        made = x[t] * 2
        ys.append(made[:2])
        ys.append(made[1:])
    return torch.stack([y.sum() for y in ys])


def one_tensor_in_a_list_that_is_read(x):
    h, rows, ys = x[0] * 2, [], []
    for t in range(len(x)):
        rows.append(h)
        ys.append(torch.stack(rows).sum(0) + x[t])
    h.add_(1)
    return torch.stack(rows), torch.stack(ys)


def a_list_that_begins_with_what_it_gets(x):
    h, ys = x.detach()[0] * 2, []
    rows = [h]
    for t in range(len(x)):
        rows.append(h)
        ys.append(rows[-1] * x[t])
        h = x[t].detach() * 1
    rows[0].mul_(3)
    return torch.stack(rows), torch.stack(ys).sum(0).detach(), x.sum(0)


def an_input_in_a_list_that_is_read(x):
    held, rows, ys = x.detach().clone(), [], []
    for t in range(len(x)):
        rows.append(held)
        ys.append(rows[-1][t] + x[t])
    rows[0].mul_(2)
    return held, torch.stack(ys)


def padding_that_pads_nothing(x):
    rows, ys = x[:0], []
    for t in range(len(x)):
        rows = torch.cat([rows, x[t : t + 1]])
        copy = torch.nn.functional.pad(rows, (0, 0, 0, 0))
        copy.mul_(2)
        ys.append(copy.sum(0) - rows.sum(0))
    return torch.stack(ys), rows


COMPILED += [
    a_row_picked_by_a_tensor,
    a_row_picked_before_its_table_is_written_to,
    one_tensor_in_a_list_that_is_read,
    a_list_that_begins_with_what_it_gets,
    an_input_in_a_list_that_is_read,
    padding_that_pads_nothing,
    a_product_that_leaves_out_a_dimension_of_one_row,
]
COMPILED += [another_class_at_a_step, counting_in_a_private_slot, a_slot_of_a_base, calling_itself]
COUNTING = [
    counting(make)
    for make in (lambda x: Rows(), lambda x: Waiting(), lambda x: Pair([1]), lambda x: functools.partial(len))
]
DECLINED = {
    **dict.fromkeys(COUNTING, "which may have attributes of its own"),
    counting(lambda x: types.ModuleType("made")): "changes made.n",
    counting_in_a_module_of_the_module: "changes of_a_user.n",
    counting_in_a_class_of_the_function: "changes Local.n",
    an_array_of_a_row: "makes an array of a tensor",
    the_memory_of_a_state: r"makes a tensor of memory that it is given, as torch.from_numpy and set_\(\) do",
    parts_that_are_taken_for_copies: "calls unsafe_chunk",
    two_parts_of_one_tensor: "tensors appended to ys share memory after the loop",
    a_picked_row_that_is_written_to: r"writes in place to K\[i\]",
    a_picked_row_that_is_halved: r"writes in place to K\[i\]",
    a_picked_row_whose_table_is_written_to: r"reads K\[i\], .* after a write to K",
    a_picked_row_that_is_left: r"row holds K\[i\]",
    two_picked_rows_of_one_tensor: r"[yz]s\[0\] holds K\[i\]",
    counting_behind_a_view: "view is a mappingproxy, through which a step may change",
    a_list_with_an_attribute_that_is_made: "which may have attributes of its own",
    a_reference_that_is_made: "reference becomes a reference that the loop has made",
    rounded_to_tens: "rounds a number that changes from step to step to tens",
    an_integer_beyond_64_bits: "beyond 64 bits",
    an_integer_that_becomes_a_fraction: "w is an integer at some steps, and none at others",
    an_iterator: "is an iterator",
    a_key_of_a_method: "changes NAMES",
    an_iterator_of_a_helper: "NUMBERS is an iterator",
    a_truth_itself: "asks whether a number that changes from step to step `is` another",
    a_number_itself: "asks whether a number that changes from step to step `is` another",
    a_norm_of_a_negative_order: "a norm of a negative order",
    a_number_that_bfloat16_does_not_hold: "bfloat16 does not hold it",
    an_order_that_changes: "has no rule for arguments that change from step to step",
    a_product_of_three_with_rows_that_grow_from_one: "dimensions in another order at some steps than at others",
    an_error_that_is_kept: "error becomes a KeyError that the loop has made",
    a_namespace_that_is_made: "made becomes a SimpleNamespace that the loop has made",
    a_copy_by_the_module_copy: r"copies a tensor by copy\.copy",
    an_attribute_of_what_is_appended: r"sets \.tag of a tensor that it leaves",
    the_text_of_a_tensor: "makes text of a tensor",
    a_tensor_in_a_text: "makes text of a tensor",
    what_a_tensor_is_a_view_of: r"reads \._base",
    whether_a_tensor_is_a_leaf: r"reads \.is_leaf",
    what_made_a_tensor: r"reads \.grad_fn",
    whether_a_state_requires_a_gradient: "asks whether a tensor requires a gradient",
    the_layout_of_a_state: "asks for the layout of a tensor",
    an_attribute_of_what_is_left: r"sets \.tag of a tensor that it leaves",
    the_text_of_a_position: "makes text of a number that changes",
    a_place_in_a_dict: "looks up a number that changes",
    an_attribute_of_int: "asks for .real of a number that changes",
    sizes_that_are_kept: "size becomes a Size of numbers that change",
    another_list_in_its_place: "another list takes the place of a",
    a_method_of_a_list: "add_to_held is a method of a list",
    an_attribute_of_a_class: "changes Counter.n",
    a_context_variable: "uses a ContextVar",
    numbers_of_numpy: "draws random numbers",
    numbers_of_a_generator: "changes RNG",
    numbers_of_python: "draws random numbers by a Random",
    a_clock: "calls time.perf_counter",
    a_line_of_a_log: "it logs",
    a_line_of_a_file: "writes a StringIO",
    the_seed: "calls torch.manual_seed",
    a_version: "reads ._version",
    an_array: "changes n, a ndarray",
    bytes_that_count: "changes [mn], an? (array|bytearray)",
    an_attribute_of_a_tensor: "changes x, a Tensor",
    gradients_switched: "leaves gradients",
}


def observed(run, x):
    """What a loop yields, its gradient, and what it leaves behind."""
    reset()
    found = torch.utils._pytree.tree_leaves(run(x))
    tensors = [y for y in found if isinstance(y, torch.Tensor)]
    loss = sum((y * (i + 1)).square().sum() for i, y in enumerate(tensors))
    gradient = torch.autograd.grad(loss, x)[0] if loss.requires_grad else torch.zeros(())
    kept, numbers = left_behind()
    return [*tensors, gradient, *kept], [y for y in found if not isinstance(y, torch.Tensor)], numbers


def compare(run, looped):
    for call in range(2):
        torch.manual_seed(call)
        rows = torch.randn(S, D, dtype=torch.float64)
        (ours, values, left), (theirs, *rest) = (observed(f, rows.clone().requires_grad_()) for f in (looped, run))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        assert [values, left] == rest


@pytest.mark.deep(but=["placed_from_behind"])
@pytest.mark.parametrize("run", COMPILED, ids=lambda run: run.__name__)
def test_it_compiles(run, caplog):
    compare(run, loop(run, nested="aot_eager", cache=False))
    assert "runs as it is written" not in caplog.text


@pytest.mark.deep(every=9)
@pytest.mark.parametrize("run", DECLINED, ids=lambda run: run.__name__)
def test_it_is_declined_and_runs_as_written(run, caplog):
    compare(run, loop(run, nested="aot_eager", cache=False))
    assert re.search(DECLINED[run], caplog.text), caplog.text


@mapped
def a_list_of_a_default(x, t):
    return default_helper(x[t])


@mapped
def a_list_of_a_partial(x, t):
    return part(x[t])


@pytest.mark.deep
@pytest.mark.parametrize("run", [a_list_of_a_helper, a_list_of_a_default, a_list_of_a_partial])
def test_lists_of_other_functions(run):
    compare(run, loop(run, nested="aot_eager", cache=False))


def test_a_transform_around_it(caplog):
    looped = loop(read_by_a_lambda, nested="aot_eager", cache=False)
    x = torch.randn(2, S, D)
    torch.testing.assert_close(torch.vmap(looped)(x), torch.vmap(read_by_a_lambda)(x))
    assert "within a transform of torch.func" in caplog.text


@pytest.mark.deep
def test_a_checkpoint_around_it():
    looped = loop(read_by_a_lambda, nested="aot_eager", cache=False)
    for _ in range(2):
        x = torch.randn(S, D, requires_grad=True)
        ours, theirs = (
            torch.autograd.grad(checkpoint(f, x, use_reentrant=False).square().sum(), x)
            for f in (looped, read_by_a_lambda)
        )
        torch.testing.assert_close(ours, theirs)


class Base:
    def step(self, h, row):
        return h * 0.5 + row


class Derived(Base):
    def __init__(self):
        self.__h = None

    def run(self, x):
        for t in range(len(x)):
            self.__h = x[t] if self.__h is None else super().step(self.__h, x[t])
        h, self.__h = self.__h, None
        return h


def test_a_method_with_super_and_a_private_name():
    looped = loop(Derived.run, nested="aot_eager", cache=False)
    x = torch.randn(S, D)
    torch.testing.assert_close(looped(Derived(), x), Derived().run(x))
    assert nsa_compile.last_report() is not None


def test_compiled_twice():
    looped = loop(read_by_a_lambda, nested="eager", cache=False)
    with pytest.raises(ValueError, match=r"read_by_a_lambda is compiled by nsa_compile\.loop"):
        nsa_compile.compile(looped)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"nsa_compile\.loop compiles it by itself"):
        nsa_compile.compile(lambda x: looped(x * 2), nested="eager")(torch.randn(S, D))


def test_gradients_on_within_a_loop_without(caplog):
    @mapped
    def run(x, t):
        with torch.enable_grad():
            return x[t] * 2

    x = torch.randn(S, D, requires_grad=True)
    looped = loop(run, nested="eager", cache=False)
    with torch.no_grad():
        y = looped(x)
    assert "turns gradients on" in caplog.text
    assert not y.requires_grad  # the stack around the step


@pytest.mark.deep
def test_zero_and_minus_zero_are_two_numbers():
    def run(x, scale):
        ys = []
        for t in range(len(x)):
            ys.append(x[t] * math.copysign(1, scale))
            scale = -scale
        return torch.stack(ys)

    looped = loop(run, nested="eager", cache=False)
    x = torch.randn(S, D)
    for scale in (0.0, -0.0, math.nan, -math.nan):
        torch.testing.assert_close(looped(x, scale), run(x, scale))


def test_a_lambda_whose_line_is_half_a_statement():
    for made in (lambda x: x, lambda x: -x):
        with pytest.raises(LoopDeclined, match="it is no function with a def statement"):
            loop(made)


@pytest.mark.deep
def test_weights_that_are_cached_around_a_loop():
    """A trace left its stand-in for the weight behind."""
    layer = weight_norm(torch.nn.Linear(D, D))

    def run(x):
        h = torch.zeros(D)
        for t in range(len(x)):
            h = torch.tanh(layer(h) + x[t])
        return h

    x, looped = torch.randn(S, D), loop(run, nested="eager", cache=False)
    with parametrize.cached():
        torch.testing.assert_close(looped(x), run(x))
    with parametrize.cached():
        torch.testing.assert_close(looped(x), run(x))
    assert nsa_compile.last_report() is not None


@pytest.mark.deep
def test_a_cache_of_no_rows_at_the_only_step():
    def run(x):
        h, rows = x.sum(0), x[:0]
        for t in range(len(x)):
            if t > 0:
                continue
            h = h * 0.5 + (rows @ x[t]).softmax(0) @ rows
            rows = torch.cat([rows[1:], x[t][None]])
        return h

    x = torch.randn(S, D)
    torch.testing.assert_close(loop(run, nested="eager", cache=False)(x), run(x))


@pytest.mark.deep
def test_a_list_that_is_read_without_gradients_at_some_steps():
    """Its rows had no gradient from there on: the list was stacked where the step turns gradients off."""

    def read(x, how):
        rows, ys = [], []
        for t in range(len(x)):
            rows.append(x[t].clone())
            if t % 2 == 0:
                with torch.no_grad():
                    y = how(rows)
            else:
                y = how(rows)
            ys.append(y)
        return sum(ys)

    x = torch.randn(S, D, dtype=torch.float64, requires_grad=True)
    for how in (lambda a: torch.stack(a).sum(0), lambda a: torch.cat(a)[-D:] * 2, lambda a: a[-1] * a[0], sum):
        torch._dynamo.reset()
        looped = loop(read, nested="eager", cache=False)
        ours, theirs = (torch.autograd.grad(f(x, how).sum(), x)[0] for f in (looped, read))
        torch.testing.assert_close(ours, theirs)


def test_a_comprehension_of_a_variable_with_the_name_of_the_position():
    """The position was lost to what comes after the loop."""

    def run(x):
        rows, ys = [x[0]], []
        for t in range(len(x)):
            rows.append(x[t])
            ys.append(sum([t * 2 for t in rows[-2:]]))
        return torch.stack(ys) * t

    compare(run, loop(run, nested="eager", cache=False))


def a_first_value_that_is_replaced(x, m):
    last, ys = m[0], []
    for t in range(len(x)):
        if t % 2 == 0:
            last = x[t]
        ys.append(last * 2)
    return torch.stack(ys)


def a_first_value_that_is_read(x, m):
    last, ys = m[0], []
    for t in range(len(x)):
        if t % 2 == 1:
            last = x[t]
        ys.append(last * 2)
    return torch.stack(ys)


def a_first_cache_that_is_replaced(x, m):
    rows, ys = m, []
    for t in range(len(x)):
        if t % 3 == 0:
            rows = x[:0]
        rows = torch.cat([rows, x[t][None]])
        ys.append(rows.sum(0))
    return torch.stack(ys)


def a_first_list_that_is_replaced(x, m):
    rows, ys = [m[0]], []
    for t in range(len(x)):
        if t % 3 == 0:
            rows = []
        rows.append(x[t])
        ys.append(torch.stack(rows).sum(0))
    return torch.stack(ys)


def a_last_value_that_is_lost(x, m):
    last, ys = x[0], []
    for t in range(len(x)):
        ys.append(last * 2)
        last = x[t] * m[0] if t == len(x) - 1 else x[t]
    return torch.stack(ys)


def a_last_value_that_is_returned(x, m):
    last, ys = x[0], []
    for t in range(len(x)):
        ys.append(last * 2)
        last = x[t] * m[0] if t == len(x) - 1 else x[t]
    return torch.stack(ys), last


def a_first_value_by_identity(x, m):
    first = last = m[0] * 1
    for row in x:
        last = row if last is first else last + row
    return last


def a_first_value_that_is_written_to(x, m):
    total = x[0] * 0
    for row in x:
        total.add_(row * m[0])
    return total


def a_value_that_moves_on_before_it_is_read(x, m):
    a, b, ys = m[0], x[0], []
    for t in range(len(x)):
        if t > 3:
            ys.append(a + b)
        a, b = b, x[t]
    return torch.stack(ys)


@pytest.mark.deep(but=["a_first_list_that_is_replaced-aot_eager"])
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "run",
    [a_first_value_that_is_replaced, a_first_value_that_is_read, a_first_cache_that_is_replaced,
     a_first_list_that_is_replaced, a_last_value_that_is_lost, a_last_value_that_is_returned,
     a_value_that_moves_on_before_it_is_read, a_first_value_by_identity, a_first_value_that_is_written_to],
    ids=lambda run: run.__name__,
)  # fmt: skip
def test_no_gradient_where_the_loop_as_written_has_none(run, nested):
    """An optimizer leaves what has none alone, and lets what has zeros decay."""
    x, m = (torch.randn(S, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    looped = loop(run, nested=nested, cache=False, on_decline="error")
    for _ in range(2):
        ours, theirs = (
            torch.autograd.grad(sum(y.square().sum() for y in torch.utils._pytree.tree_leaves(f(x, m))), (x, m),
                                allow_unused=True)
            for f in (looped, run)
        )  # fmt: skip
        assert [g is None for g in ours] == [g is None for g in theirs]
        torch.testing.assert_close([g for g in ours if g is not None], [g for g in theirs if g is not None])


def what_stands_behind_the_last_step(x, m):
    h = m[0]
    for row in x:
        y = row * 2
        h = h + y
    else:
        h = h * y + row
    return h


def test_the_else_of_a_loop_reads_its_variables():
    x, m = (torch.randn(S, D, dtype=torch.float64) for _ in range(2))
    looped = loop(what_stands_behind_the_last_step, nested="eager", cache=False, on_decline="error")
    torch.testing.assert_close(looped(x, m), what_stands_behind_the_last_step(x, m))
