"""What a loop shares with the program around it: memory, caches of functions, threads, names."""

import collections
import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import sys
import threading
import types

import pytest
import torch

from nsa_compile import loop
from nsa_compile.loops import LoopDeclined
from nsa_compile.ops.loop import step
from nsa_compile.workarounds import TRACING

S, D = 6, 4


def rows_that_are_kept(x):
    rows, last, total = [], None, torch.zeros(D)
    for t in range(S):
        last = x[t]
        total = total + last
        rows.append(last)
    x.mul_(3)
    return last, torch.stack(rows), total


def a_row_that_is_written_to(x):
    for t in range(S):
        row = x[S - 1 - t]
    row.zero_()
    return x


def one_tensor_in_a_list_and_a_variable(x):
    h, hs = torch.zeros(D), []
    for t in range(S):
        h = 0.5 * h + x[t]
        hs.append(h)
    h.mul_(10)
    return torch.stack(hs), h


def one_tensor_in_two_lists(x):
    a, b = [], []
    for t in range(S):
        y = x[t] * 2
        a.append(y)
        b.append(y)
    a[0].add_(5)
    return torch.stack(b)


def one_tensor_at_several_places_of_a_list(x):
    found, y = [], x[0] + 1
    for t in range(S):
        if t % 3 == 2:
            y = x[t] * 2
        found.append(y)
    found[0].add_(1)
    found[-1].mul_(2)
    return torch.stack(found)


def a_view_of_the_state(x):
    h, v = torch.zeros(D), None
    for t in range(S):
        h = 0.5 * h + x[t]
        v = h[:2]
    v.mul_(10)
    return h


def a_view_of_the_state_in_a_list(x):
    h, hs = torch.zeros(D), []
    for t in range(S):
        h = 0.5 * h + x[t]
        hs.append(h.unsqueeze(1))
    h.mul_(10)
    return torch.cat(hs, 1)


def the_state_of_the_step_before(x):
    before, h = None, torch.zeros(D)
    for t in range(S):
        before = h
        h = h + x[t]
    before.add_(1)
    return before, h


def rows_handed_on(x):
    before, row = x[0], x[0]
    for t in range(1, S):
        before, row = row, x[t]
    before.fill_(7)
    row.add_(1)
    return x, before


def what_was_there_before(x):
    first, h, others = x + 1, x[0], []
    best = first
    for t in range(S):
        h = h * 0.5 + x[t]
        if t > S:
            best = h
        others.append(best)
    best.add_(1)
    return first, others[0], h


def rows_of_a_transposed_input(x):
    columns = []
    for t in range(D):
        columns.append(x.T[t][1:])
    x[2] = 0
    return torch.stack(columns)


def rows_that_a_loop_goes_over(x):
    kept = []
    for i, row in enumerate(x):
        kept.append(row[::2] if i else row[:2])
    x.add_(1)
    return torch.cat(kept)


def parts_that_do_not_overlap(x):
    a, b = [], []
    for t in range(S):
        one, other = (x[t] * 2).chunk(2)
        a.append(one)
        b.append(other)
    a[0].add_(1)
    return torch.stack(a), torch.stack(b)


class Cache:
    def __init__(self):
        self.k = torch.zeros(0, D)
        self.last = None

    def add(self, row):
        self.k = torch.cat([self.k, row[None]])
        self.last = self.k[-1:]


def a_view_in_an_object(x):
    cache = Cache()
    for t in range(S):
        cache.add(x[t])
    cache.last.mul_(10)
    return cache.k, cache.last


def one_tensor_in_a_list_that_is_read(x):
    a, b, found = [], [], []
    for t in range(S):
        h = x[t] * 2
        a.append(h)
        b.append(a[-1])
        found.append(torch.stack(a).sum(0))
    b[1].mul_(10)
    a[0].add_(1)
    return torch.stack(a), torch.stack(b), torch.stack(found)


def repeated_elements(x):
    found = []
    for t in range(S):
        wide = (x[t : t + 1] * 2).expand(3, D)
        found.append(wide)
    found[0][1].mul_(10)
    wide[2].add_(1)
    return torch.stack(found)


Pair = collections.namedtuple("Pair", "a b")


def a_named_tuple(x):
    pair = Pair(x[0], x[0])
    for t in range(S):
        pair = Pair(pair.a * 0.5 + x[t], pair.b + x[t])
    pair.a.mul_(2)
    return pair


SHARING = [
    one_tensor_in_a_list_that_is_read,
    repeated_elements,
    a_named_tuple,
    rows_that_are_kept,
    a_row_that_is_written_to,
    one_tensor_in_a_list_and_a_variable,
    one_tensor_in_two_lists,
    one_tensor_at_several_places_of_a_list,
    a_view_of_the_state,
    a_view_of_the_state_in_a_list,
    the_state_of_the_step_before,
    rows_handed_on,
    what_was_there_before,
    rows_of_a_transposed_input,
    rows_that_a_loop_goes_over,
    parts_that_do_not_overlap,
    a_view_in_an_object,
]


@pytest.mark.deep(but=["parts_that_do_not_overlap"])
@pytest.mark.parametrize("run", SHARING, ids=lambda run: run.__name__)
def test_a_write_after_the_loop_is_seen_where_it_is_in_the_loop(run):
    looped = loop(run, nested="eager", cache=False, on_decline="error")
    for seed in range(2):
        x = torch.randn(S, D, generator=torch.manual_seed(seed))
        ours, theirs = x.clone(), x.clone()
        torch.testing.assert_close(looped(ours), run(theirs))
        torch.testing.assert_close(ours, theirs)


def gradients_of(run, x, *, write):
    leaf = x.clone().requires_grad_()
    found = run(leaf * 1, write)
    loss = sum((y * (i + 1)).square().sum() for i, y in enumerate(found) if y.requires_grad)
    return [*found, torch.autograd.grad(loss, leaf)[0], *(torch.tensor(y.requires_grad) for y in found)]


def shared_by_a_variable(x, write):
    h, hs, row = x[0] * 0, [], None
    for t in range(S):
        row = x[t]
        h = h * 0.5 + row
        hs.append(h[None])
    if write:
        h.mul_(2)
        row.add_(1)
    return torch.cat(hs), h, row, x


def a_view_without_gradients(x, write):
    h, v = x[0] * 0, None
    for t in range(S):
        h = h * 0.5 + x[t]
        v = h.detach()
    if write:
        v.add_(1)
    return h, v


def elements_that_are_written_to(x, write):
    h, hs, read = x[0] * 0, [], []
    for t in range(S):
        h = h * 0.5 + x[t]
        hs.append(h)
        read.append(h * 2)
        y = torch.stack(read[-2:]).sum(0)
    if write:
        hs[2].mul_(2)
        hs[-1].exp_()
        read[1].add_(h)
    return torch.stack(hs), h, y, torch.stack(read)


@pytest.mark.deep(but=["shared_by_a_variable-True"])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("run", [shared_by_a_variable, a_view_without_gradients, elements_that_are_written_to])
def test_gradients_go_through_what_is_shared(run, write):
    looped = loop(run, nested="aot_eager", cache=False, on_decline="error")
    x = torch.randn(S, D, dtype=torch.float64)
    torch.testing.assert_close(*(gradients_of(f, x, write=write) for f in (looped, run)))


def overlapping_parts(x):
    a, b = None, None
    for t in range(S):
        y = x[t] * 2
        a, b = y[:2], y[1:]
    a.add_(1)
    return a, b


def an_element_of_a_list(x):
    last = None
    for row in list(x.unbind()):
        last = row * 1 if row is None else row
    last.add_(1)
    return x


def an_element_that_was_read(x):
    found = []
    for t in range(x.shape[0]):
        found.append(x[t] * 2)
        first = found[0]
    first.mul_(10)
    return torch.stack(found)


def elements_that_were_read(x):
    found = []
    for t in range(x.shape[0]):
        found.append(x[t] * 2)
        last = found[-2:]
    last[0].zero_()
    return torch.stack(found)


def test_one_object_is_one_object():
    def run(x):
        found, row = [], x[0]
        for t in range(S):
            if t % 3 == 0:
                row = x[t]
            found.append(row)
        return found

    found = loop(run, nested="eager", cache=False, on_decline="error")(torch.randn(S, D))
    assert [found[t] is found[t - 1] for t in range(1, S)] == [t % 3 != 0 for t in range(1, S)]


@pytest.mark.deep(but=["overlapping_parts-[ab] and [ab] share memory after the loop"])
@pytest.mark.parametrize(
    ("run", "why"),
    [
        (an_element_that_was_read, "first is what the loop has read from the list found"),
        (elements_that_were_read, "the lists found and last hold the same tensors"),
        (overlapping_parts, "[ab] and [ab] share memory after the loop"),
        (an_element_of_a_list, "keeps an element of the list that it goes over, as last"),
    ],
)
def test_what_cannot_be_shared_again_is_declined(run, why):
    x = torch.randn(64, D)  # a shorter list would be unrolled
    with pytest.raises(LoopDeclined, match=why):
        loop(run, nested="eager", on_decline="error")(x.clone())
    ours, theirs = x.clone(), x.clone()
    torch.testing.assert_close(loop(run, nested="eager")(ours), run(theirs))
    torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------- tensors from outside that come and go in the state


def an_entry_that_is_another_at_first(x):
    entries, h, found = {}, x[1], []
    for t in range(S):
        entries["bias"] = h if t > 0 else torch.zeros(D)
        found.append(entries["bias"] + h * 2)
    return torch.stack(found)


def an_attribute_that_is_another_at_some_steps(x):
    holder, z, h = types.SimpleNamespace(), x[0] * 2, None
    for t in range(S):
        holder.u = z
        if t < 3:
            holder.u = x[1] * 1
        h = z.clone() + holder.u
    return h, holder.u, z


def a_state_that_is_replaced_once(x):
    h, p, found = x[0], x[1], []
    for t in range(S):
        found.append(h * 2)
        h = h.contiguous()
        if t == 3:
            h = p
    return torch.stack(found), h


def test_a_view_of_what_does_not_lie_in_order():
    def run(x):
        n = x[0].view(2, 2)
        for t in range(S):
            if t == 3:
                n = n.t()
            p = n.contiguous().view(4)
        return p

    x = torch.randn(S, D)
    torch.testing.assert_close(loop(run, nested="eager", cache=False)(x), run(x))


@pytest.mark.deep(but=["a_state_that_is_replaced_once"])
@pytest.mark.parametrize(
    "run",
    [an_entry_that_is_another_at_first, an_attribute_that_is_another_at_some_steps, a_state_that_is_replaced_once],
)
def test_a_tensor_from_outside_takes_the_place_of_another(run):
    looped = loop(run, nested="aot_eager", cache=False)
    for _ in range(2):
        x = torch.randn(S, D, requires_grad=True)
        results = []
        for f in (looped, run):
            found = torch.utils._pytree.tree_leaves(f(x))
            loss = sum((y * (i + 1)).square().sum() for i, y in enumerate(found))
            results.append([*found, torch.autograd.grad(loss, x)[0]])
        torch.testing.assert_close(*results)


# ------------------------------------------------------------------------------------------- caches of functions


@functools.cache
def table(n):
    return torch.arange(n) * 1.0


@functools.lru_cache(maxsize=4)
def mask(n):
    return {"kept": [torch.ones(n, n, dtype=torch.bool).tril()]}


@functools.cache
def factor(n):
    return n**-0.5


def cached_tensors(x):
    found = []
    for t in range(S):
        scores = (x @ x[t]).masked_fill(~mask(S)["kept"][0][t], -torch.inf)
        found.append(scores.softmax(0) @ x * factor(D) + table(D))
    return torch.stack(found)


def test_caches_of_functions_hold_no_stand_ins():
    x = torch.randn(S, D)
    looped = loop(cached_tensors, nested="eager", cache=False, on_decline="error")
    torch.testing.assert_close(looped(x), cached_tensors(x))
    assert type(table(D)) is torch.Tensor
    torch.testing.assert_close(looped(x), cached_tensors(x))
    assert factor.cache_info().currsize, "a number stays"


# --------------------------------------------------------------------------------------------------------- threads


def decayed(x):
    h, found = torch.zeros(D), []
    for t in range(S):
        h = h * 0.5 + x[t]
        found.append(h)
    return torch.stack(found)


def test_threads_may_make_the_first_call_at_once(caplog, capsys):
    looped, x, found = loop(decayed, nested="aot_eager", cache=False), torch.randn(S, D), {}

    def call(number):
        found[number] = looped(x * number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        torch.testing.assert_close(found[number], decayed(x * number))
    assert not caplog.records
    print("seen")
    torch.manual_seed(0)
    assert capsys.readouterr().out == "seen\n"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.deep
def test_other_threads_print_and_apply_functions_while_loops_are_traced(capsys):
    stop, errors, acts = threading.Event(), [], []

    def elsewhere():
        while not stop.is_set():
            try:
                print("elsewhere")
                torch.manual_seed(3)
                Doubled.apply(torch.ones(1, requires_grad=True)).backward()
                torch.compile(lambda x: x, backend="eager")
            except BaseException as error:
                errors.append(error)
            acts.append(None)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    x = torch.randn(S, D)
    for _ in range(3):
        before = len(acts)
        torch.testing.assert_close(loop(decayed, nested="eager", cache=False)(x), decayed(x))
        assert len(acts) > before
    stop.set()
    thread.join()
    assert errors == []
    assert set(capsys.readouterr().out.splitlines()) == {"elsewhere"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_loops_without_gradients(mode):
    looped = loop(one_tensor_in_a_list_and_a_variable, nested="eager", cache=False, on_decline="error")
    with mode():
        for _ in range(2):
            x = torch.randn(S, D)
            ours, theirs = looped(x.clone()), one_tensor_in_a_list_and_a_variable(x.clone())
            torch.testing.assert_close(ours, theirs)
            assert [y.is_inference() for y in ours] == [y.is_inference() for y in theirs]
            assert not any(y.requires_grad for y in ours)


# ----------------------------------------------------------------------------------------------------------- names


def test_annotations(caplog):
    def run(x):
        found: list[torch.Tensor] = []
        h: torch.Tensor = torch.zeros(D)
        holder = types.SimpleNamespace()
        for t in range(S):
            y: torch.Tensor = x[t] * 2
            z: torch.Tensor
            for i in range(2):
                z: torch.Tensor = y + i
            holder.h: torch.Tensor = h + z
            h = holder.h
            found.append(h)
        return torch.stack(found)

    x = torch.randn(S, D)
    torch.testing.assert_close(loop(run, nested="eager")(x), run(x))
    assert not caplog.records


def by_text(x):
    found = []
    for t in range(S):
        found.append(eval("x[t] * 2") + t)
    return torch.stack(found)


def by_locals(x):
    for t in range(S):
        y = locals()["x"][t]
    return y


def unbound(x):
    for t in range(S):
        try:
            h = h + x[t]  # noqa: F821
        except UnboundLocalError:
            h = x[t]
    return h


@pytest.mark.parametrize(
    ("run", "why"),
    [(by_text, "calls eval"), (by_locals, "calls locals"), (unbound, "asks for an UnboundLocalError")],
)
def test_what_looks_for_variables_by_name_is_refused(run, why):
    with pytest.raises(LoopDeclined, match=f"cannot be compiled: line [0-9]+ of the function {why}"):
        loop(run)


def test_cond_runs_as_it_is_written(caplog):
    def run(x):
        found = []
        for t in range(S):
            found.append(torch.cond(x[t].sum() > 0, lambda z: z * 2, lambda z: z.sin(), (x[t],)))
        return torch.stack(found)

    x = torch.randn(S, D)
    torch.testing.assert_close(loop(run, nested="eager")(x), run(x))
    assert "it calls torch.compile, or a function of torch that does so" in caplog.text


by_compile = torch.compile(lambda x: x * 2, backend="eager")
OF_NUMPY = torch.ones(D).numpy()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (
            lambda x, t: by_compile(x[t]),
            "it calls a function that torch.compile has compiled; call the function itself",
        ),
        (lambda x, t: x[t] + torch.from_numpy(OF_NUMPY), "it makes a tensor of memory that it is given"),
        (lambda x, t: torch.vmap(torch.sum)(x[: t + 1]).sum() * x[t], "it calls a transform of torch.func"),
        (lambda x, t: torch.dot(x[t], x[t].double()), "torch refuses tensors of these dtypes: dot"),
        (lambda x, t: torch.nn.functional.linear(x[t], x[:D], x[t].double()), "torch refuses tensors of these dtypes"),
        (lambda x, t: torch.add(x[t], 1, out=torch.zeros(D, dtype=torch.int64)), "result type Float can't be cast"),
    ],
)
def test_why_a_step_is_not_followed(step, why, caplog):
    def run(x):
        found = []
        for t in range(S):
            found.append(step(x, t))
        return torch.stack(found)

    compiled, x = loop(run, nested="eager", cache=False), torch.randn(S, D)
    try:
        expected = run(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            compiled(x)
    else:
        torch.testing.assert_close(compiled(x), expected)
    assert why in caplog.text


def test_an_argument_that_is_missing_is_named_as_by_the_function():
    def run(x, scale):
        for t in range(S):
            y = x[t] * scale
        return y

    with pytest.raises(TypeError) as expected:
        run(torch.ones(S))
    with pytest.raises(TypeError, match=re.escape(str(expected.value))):
        loop(run)(torch.ones(S))


def test_a_set_of_tensors_is_not_followed(caplog):
    def run(x, known):
        found = []
        for t in range(S):
            found.append(x[t] * (x in known))
        return torch.stack(found)

    x = torch.randn(S, D)
    torch.testing.assert_close(loop(run, nested="eager", cache=False)(x, {x}), x)
    assert "known is a set of tensors, which are told apart by their addresses" in caplog.text


def test_what_a_loop_goes_over_has_no_name(caplog):
    def run(x):
        for b, a in zip(x[1:], x, strict=False):
            b += a
        return x

    x = torch.randn(S, D)
    torch.testing.assert_close(loop(run, nested="eager", cache=False)(x.clone()), run(x.clone()))
    assert "it writes in place to what it goes over" in caplog.text


class Base:
    def updated(self, row):
        self.h = self.h * 0.5 + row
        return self.h


class Derived(Base):
    def __init__(self):
        self.h = torch.zeros(D)

    @loop(nested="eager", cache=False, on_decline="error")
    def run(self, x):
        found = []
        for t in range(len(x)):
            found.append(super().updated(x[t]))
        return torch.stack(found)


@pytest.mark.deep
def test_the_class_of_a_method_may_change_its_own_programs():
    one = Derived()
    for length in (4, 5, 4):
        one.run(torch.ones(length, D))
    assert sys.getprofile() is None


# ------------------------------------------------------------------------------------- state that no variable leads to


def counted_by_a_class():
    n = 0

    class Token:
        def __init__(self, row):
            nonlocal n
            n += 1
            self.row, self.number = row, n

    def run(x):
        found = []
        for t in range(S):
            token = Token(x[t])
            found.append(token.row * token.number)
        return torch.stack(found)

    return run, lambda: n


def counted_by_a_property():
    counts = [0]

    class Counter:
        @property
        def next(self):
            counts[0] += 1
            return counts[0]

    counter = Counter()

    def run(x):
        found = []
        for t in range(S):
            found.append(x[t] * counter.next)
        return torch.stack(found)

    return run, lambda: counts[0]


def counted_by_a_descriptor():
    class Calls:
        n = 0

        def __get__(self, owner, kind):
            self.n += 1
            return self.n

    class Owner:
        calls = Calls()

    owner = Owner()

    def run(x):
        found = []
        for t in range(S):
            found.append(x[t] * owner.calls)
        return torch.stack(found)

    return run, lambda: vars(Owner)["calls"].n


def counted_by_a_default():
    numbers = collections.defaultdict(itertools.count(1).__next__)

    def run(x):
        found = []
        for t in range(S):
            found.append(x[t] * numbers["ab"[t % 2]])
        return torch.stack(found)

    return run, lambda: dict(numbers)


def counted_in_a_library():
    json.steps = 0

    def run(x):
        found = []
        for t in range(S):
            json.steps = json.steps + 1
            found.append(x[t] * json.steps)
        return torch.stack(found)

    return run, lambda: json.steps


def counted_in_memory():
    seen, number = memoryview(bytearray(1)), ctypes.c_int(0)

    def run(x):
        found = []
        for t in range(S):
            if t % 2:
                seen[0] += 1
            else:
                number.value += 2
            found.append(x[t] * seen[0] * number.value)
        return torch.stack(found)

    return run, lambda: (seen[0], number.value)


def counted_at_the_end_of_an_object():
    ended = []

    class Object:
        def __del__(self):
            ended.append(1)

    def run(x):
        found = []
        for t in range(S):
            one = Object()
            found.append(x[t] * bool(one))
        return torch.stack(found)

    return run, lambda: len(ended)


@pytest.mark.deep(but=["counted_by_a_descriptor", "counted_by_a_default"])
@pytest.mark.parametrize(
    "make",
    [
        counted_by_a_class, counted_by_a_property, counted_by_a_descriptor, counted_by_a_default, counted_in_a_library,
        counted_in_memory, counted_at_the_end_of_an_object,
    ],
)  # fmt: skip
def test_what_counts_out_of_sight_runs_as_it_is_written(make, caplog):
    (run, left), (other, left_by_other) = make(), make()
    looped, x = loop(other, nested="eager", cache=False), torch.randn(S, D)
    if make is counted_in_a_library:  # there is one
        expected = run(x), left()
        json.steps = 0
        torch.testing.assert_close((looped(x), left()), expected)
    else:
        for _ in range(2):
            torch.testing.assert_close(looped(x), run(x))
            assert left_by_other() == left()
    assert "runs as it is written" in caplog.text


def scaled(scale):
    def run(x):
        found = []
        for t in range(S):
            found.append(scale(x[t]))
        return torch.stack(found)

    return run


def of_a_method():
    numbers = [2.0]

    class Scale:
        def __call__(self, row):
            return row * numbers[0]

    return scaled(Scale()), lambda n: numbers.__setitem__(0, n)


def of_an_object_of_a_module(module):
    module.box = types.SimpleNamespace(v=2.0)
    return scaled(module.scale), lambda n: setattr(module.box, "v", n)


def of_a_module_of_the_loop(module):
    module.box = types.SimpleNamespace(v=2.0)
    return scaled(lambda row: row * helper.box.v), lambda n: setattr(helper.box, "v", n)


def of_a_hook_of_all_modules():
    handles = []

    def change(n):
        for handle in handles:
            handle.remove()
        handles[:] = [torch.nn.modules.module.register_module_forward_hook(lambda *_: _[2] * n)] if n != 2.0 else []

    return scaled(torch.nn.Identity()), change


def of_the_environment():
    os.environ["NSA_TEST_SCALE"] = "2.0"
    return (
        scaled(lambda row: row * float(os.environ["NSA_TEST_SCALE"])),
        lambda n: os.environ.update(NSA_TEST_SCALE=str(n)),
    )


helper = types.ModuleType("helper_of_the_loop")
exec("def scale(row):\n    return row * box.v\n", vars(helper))


@pytest.mark.deep
@pytest.mark.parametrize(
    "make",
    [
        of_a_method,
        functools.partial(of_an_object_of_a_module, helper),
        functools.partial(of_a_module_of_the_loop, helper),
        of_a_hook_of_all_modules,
        of_the_environment,
    ],
    ids=["method", "object of a module", "module", "hook", "environment"],
)
def test_what_changes_between_two_calls_is_seen(make):
    run, change = make()
    looped, x = loop(run, nested="eager", cache=False, on_decline="error"), torch.randn(S, D)
    try:
        for number in (2.0, 3.0, 2.0):
            change(number)
            torch.testing.assert_close(looped(x), run(x))
    finally:
        change(2.0)


@pytest.mark.deep
def test_a_loop_that_reads_what_always_changes_is_not_compiled_for_ever(caplog):
    run, change = of_a_method()
    looped, x = loop(run, nested="eager", cache=False), torch.randn(S, D)
    for number in range(12):
        change(float(number))
        torch.testing.assert_close(looped(x), run(x))
    (line,) = (r.message for r in caplog.records)
    assert "which it reads, changes from call to call" in line


def by_product(w):
    return lambda x: x * w


def by_sum(w):
    return lambda x: x + w


@pytest.mark.deep
def test_functions_that_hold_the_same_variables_are_not_the_same():
    """Their closures were compared, and not what they do."""

    @loop(nested="eager", cache=False, on_decline="error")
    def run(x, f):
        out = []
        for t in range(len(x)):
            out.append(f(x[t]))
        return torch.stack(out)

    x = torch.randn(S, D)
    for f in (by_product(3.0), by_sum(3.0), by_product(2.0)):
        torch.testing.assert_close(run(x, f), f(x))


def turned_and_written(x):
    listed, h = [r * 2 for r in x], 0
    for i, r in enumerate(reversed(listed)):
        h = h * 0.5 + r
        listed[i] = h
    return h, torch.stack(listed)


def zipped_with_itself_turned(x):
    listed, h = [r * 2 for r in x], 0
    for r, s in zip(listed, reversed(listed), strict=True):
        h = h * 0.5 + r * s
        listed[-1] = h
    return h, torch.stack(listed)


@pytest.mark.parametrize("written", [turned_and_written, zipped_with_itself_turned])
def test_a_list_that_is_gone_over_backwards_is_read_as_it_is_written(written, caplog):
    x = torch.randn(S, D)
    torch.testing.assert_close(loop(written, nested="eager", cache=False)(x), written(x))
    assert "it goes over a list that the step can change" in caplog.text


def test_a_list_backwards():
    @loop(nested="eager", cache=False, on_decline="error")
    def run(listed):
        h = 0
        for r in reversed(listed):
            h = h * 0.5 + r
        return h

    listed = list(torch.randn(S, D))
    h = 0
    for r in reversed(listed):
        h = h * 0.5 + r
    torch.testing.assert_close(run(listed), h)


def test_a_comprehension_has_variables_of_its_own():
    """It read none of the loop's, so nothing keeps an element of the list."""

    @loop(nested="eager", cache=False, on_decline="error")
    def run(x):
        listed, h = [r * 2 for r in x], 0
        for r in listed:
            h = h * 0.5 + r
        return h

    x = torch.randn(S, D)
    h = 0
    for row in x * 2:
        h = h * 0.5 + row
    torch.testing.assert_close(run(x), h)


def noted():
    pass


@pytest.mark.parametrize(
    ("owner", "reason"),
    [(noted, "it changes owner, a function, in place"), (functools.partial(noted), "may have attributes of its own")],
)
def test_an_attribute_that_a_function_did_not_have_is_not_left_to_it(owner, reason, caplog):
    def run(x):
        for t in range(len(x)):
            owner.n = getattr(owner, "n", 0) + 1
            owner.h = getattr(owner, "h", 0) * 0.5 + x[t] * owner.n
        return owner.h

    x, found = torch.randn(S, D), []
    for function in (run, loop(run, nested="eager", cache=False)):
        vars(owner).clear()
        found.append(function(x))
        assert (owner.n, type(owner.h)) == (S, torch.Tensor)
    torch.testing.assert_close(*found)
    assert reason in caplog.text


@pytest.mark.parametrize("clones", [True, False])
def test_a_write_by_a_mask_with_gradients_runs_as_written(clones, caplog):
    def run(x):
        b = torch.zeros_like(x)
        for t in range(len(x)):
            mask = torch.arange(len(x)) == t
            b = b.clone() if clones else b
            b[mask] = x[t]
        return b

    x = torch.randn(S, D, requires_grad=True)
    ours = loop(run, nested="eager", cache=False)(x)
    assert torch.equal(ours, run(x))
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, run(x))))
    assert "runs as it is written: it selects elements by their values" in caplog.text


class AttentionOverProjections(torch.nn.Module):
    """Reads what it has made before its loop, beside parameters that ask for gradients."""

    def __init__(self):
        super().__init__()
        self.key, self.query = (torch.nn.Linear(4, 4).double() for _ in range(2))

    def forward(self, x):
        k, out = self.key(x), []
        for t in range(x.shape[0]):
            out.append((k[: t + 1] @ self.query(x[t])).softmax(-1) @ k[: t + 1])
        return torch.stack(out)


@pytest.mark.deep
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_a_tensor_of_inference_mode_beside_parameters(first):
    torch.manual_seed(0)
    model, x = AttentionOverProjections(), torch.randn(7, 4, dtype=torch.float64)
    looped = loop(model.forward, nested="eager", cache=False)
    for mode in (first, torch.inference_mode, contextlib.nullcontext):
        with mode():
            torch.testing.assert_close(looped(x), model(x))


@pytest.mark.deep
def test_one_thread_traces_at_a_time(monkeypatch):
    """One traced the step of a recurrence while it ran, another the whole loop, and each took back the patches of the
    other."""
    alone = []
    trace = step._trace_joint
    monkeypatch.setattr(step, "_trace_joint", lambda *given: alone.append(TRACING._is_owned()) or trace(*given))

    def recurrent(x, w):
        h, out = x[0] * 0, []
        for t in range(x.shape[0]):
            h = torch.tanh(h @ w + x[t])
            out.append(h * x[t])
        return torch.stack(out)

    x, w = (torch.randn(n, 3, requires_grad=True) for n in (5, 3))
    looped = loop(recurrent, nested="eager", cache=False)
    looped(x, w).sum().backward()
    with torch.no_grad():  # other gradients than were captured: its step is traced while it runs
        looped(x.detach(), w)
    assert alone
    assert all(alone)
