"""Lists of tensors that a loop reads: at any length one program, and the lists that it leaves are those as written."""

from __future__ import annotations

import cProfile
import functools

import pytest
import torch

import nsa_compile
from nsa_compile.loops import LoopDeclined
from tests.loops.test_loops import D, compare, matches, rows


def attend(q, keys):
    return (keys @ q).softmax(0) @ keys


def stacked(x):
    keys, out = [], []
    for row in x:
        keys.append(row * 2)
        out.append(attend(row, torch.stack(keys, dim=1).T))
    return torch.stack(out), keys


def joined(x):
    cache, out = {"k": [], "v": [x[:1]]}, []
    for row in x.split(1):
        cache["k"].append(row * 2)
        cache["v"] += [row.sin()]
        out.append(torch.cat(cache["k"], dim=0).mean(0) + torch.concat(cache["v"])[1:].amax(0))
    return torch.stack(out), cache


def compressed(x):
    raw, blocks, out = [], [], []
    for t in range(x.shape[0]):
        raw.append(x[t])
        if len(raw) % 4 == 0:
            blocks.append(torch.stack(raw[-4:]).mean(0))
        out.append(attend(x[t], torch.stack(blocks)) if blocks else x[t] * 0)
    return torch.stack(out), raw, blocks


def shifted(x):
    window, out = [], []
    for row in x:
        window.append(row)
        if len(window) > 3:
            window.pop(0)
        out.append(sum(window) / len(window))
    return torch.stack(out), window


def sliced(x):
    window, out = [x[0], x[1]], []
    for row in x:
        window.append(row)
        window = window[-5:]
        out.append(attend(row, torch.stack(window)))
    return torch.stack(out), window


def looked_back(x):
    out = [x[0], x[1]]
    for t in range(2, x.shape[0]):
        out.append(out[-1] * 0.5 + out[-2] * 0.3 + x[t])
    return out


def by_place(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        seen.append(x[t])
        out.append(seen[-1] * seen[t // 2] + seen[max(0, t - 2)])
    return torch.stack(out)


def emptied(x):
    waiting, out = [], []
    for row in x:
        waiting.append(row)
        if len(waiting) == 3:
            out.append(torch.stack(waiting).mean(0))
            waiting.clear()
    return torch.stack(out), waiting


def replaced(x):
    waiting, out = [], []
    for row in x:
        waiting.append(row)
        if len(waiting) == 3:
            out.append(torch.stack(waiting).mean(0))
            waiting = []
    return torch.stack(out), waiting


def restarted(x):
    """Attention in chunks: the first statement of some steps makes both lists anew."""
    keys, values, out = [], [], []
    for t in range(x.shape[0]):
        if t % 4 == 0:
            keys, values = [], []
        keys.append(x[t])
        values.append(x[t] * 2)
        out.append((torch.stack(keys) @ x[t]).softmax(0) @ torch.stack(values))
    return torch.stack(out), keys


def joined_by_plus(x):
    seen, out = [x[0]], []
    for row in x:
        out.append(torch.stack(seen + [row]).mean(0))  # noqa: RUF005
        seen.append(row * 2)
    return torch.stack(out), seen


def joined_behind(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        if t % 3 == 1:
            seen.append(x[t] * 2)
        out.append(attend(x[t], torch.stack([x[t]] + seen)) * len([x[0]] + seen))  # noqa: RUF005
    return torch.stack(out), seen


def joined_with_each_other(x):
    near, far, out = [], [], []
    for t in range(x.shape[0]):
        near.append(x[t])
        near = near[-3:]
        if t % 3 == 2:
            far.append(torch.stack(near).amax(0))
        all_rows = torch.stack(near + far)
        out.append(attend(x[t], all_rows) + attend(x[t], torch.stack(far + near + [x[t]])))
    return torch.stack(out), near + far


def last_ones_one_by_one(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        seen.append(x[t] * 2)
        y = torch.stack([x[t], *seen[-3:]]).amax(0)
        for row in seen[-2:]:
            y = y * 0.5 + row * len(seen[-4:])
        out.append(y)
    return torch.stack(out), seen


def grown_while_one_goes_over_it(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        seen.append(x[t])
        last = seen[-2:]
        for row in last:
            if len(last) < 5:
                last.append(row * 2)
        more = [last.append(row) for row in last if len(last) < 7]
        out.append(sum(last) * len(more) + len(last))
    return torch.stack(out)


def by_two_names(x):
    seen, out = [], []
    same = seen
    for row in x:
        seen.append(row)
        out.append(torch.stack(same).mean(0) * len(same))
    assert same is seen
    return torch.stack(out), same


def both_ends(x):
    seen, out = [x[0], x[1]], []
    for t in range(2, x.shape[0]):
        seen.append(x[t])
        seen.append(seen.pop(0) + seen.pop())
        out.append(seen[0])
    return torch.stack(out), seen


PROGRAMS = [
    *(stacked, joined, compressed, shifted, sliced, looked_back, by_place, emptied, replaced, joined_by_plus),
    *(restarted, joined_behind, joined_with_each_other, last_ones_one_by_one, grown_while_one_goes_over_it),
    *(by_two_names, both_ends),
]


@pytest.mark.deep(but=["joined_with_each_other"])
@pytest.mark.parametrize("written", PROGRAMS, ids=lambda f: f.__name__)
def test_a_list_that_is_read(written, caplog):
    for length in (7, 45):  # more than there may be kinds of steps
        compare(written, *rows(length), on_decline="warn", batched=False)
    assert "runs as it is written" not in caplog.text


@pytest.mark.deep
def test_attention_over_a_list_is_attention():
    (x,) = rows(45)
    assert "attention to a window of 45" in matches(compare(stacked, x))


@pytest.mark.deep
def test_the_lists_are_those_that_were_given():
    def kept(x, seen):
        for row in x:
            seen.append(row)
            row = torch.stack(seen).sum(0)
        return row

    (x,) = rows(6)
    mine, yours = [x[0], x[1]], [x[0], x[1]]
    before = list(mine)
    compiled = nsa_compile.loop(kept, nested="eager", on_decline="error")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, mine), kept(x, yours))
    assert all(a is b for a, b in zip(mine[:2], before, strict=True))
    torch.testing.assert_close(torch.stack(mine), torch.stack(yours))


def cut_by_a_slice(row, seen):
    return seen[-2:] if len(seen) > 3 else seen


def begun_anew(row, seen):
    return [row] if len(seen) > 3 else seen


@pytest.mark.deep
@pytest.mark.parametrize("after", [cut_by_a_slice, begun_anew])
def test_what_a_list_that_is_given_gets_until_another_takes_its_place(after, caplog):
    def kept(x, seen):
        for row in x:
            seen.append(row)
            y = torch.stack(seen).sum(0)
            seen = after(row, seen)
        return y, seen

    (x,) = rows(9)
    compiled = nsa_compile.loop(kept, nested="eager")
    for _ in range(2):
        mine, yours = [x[0]], [x[0]]
        torch.testing.assert_close(compiled(x, mine), kept(x, yours))
        torch.testing.assert_close(mine, yours)
    assert caplog.text.count("another list takes the place of seen, which something else holds, too") == 1


@pytest.mark.deep
def test_what_a_dict_that_is_given_gets_until_another_takes_its_place():
    def kept(x, state):
        for t in range(x.shape[0]):
            if t == 3:
                state = {"sum": state["sum"] * 0.5}
            state["sum"] = state["sum"] + x[t]
        return state["sum"]

    (x,) = rows(9)
    compiled = nsa_compile.loop(kept, nested="eager")
    mine, yours = {"sum": x[0]}, {"sum": x[0]}
    torch.testing.assert_close(compiled(x, mine), kept(x, yours))
    torch.testing.assert_close(mine, yours)


def an_element_is_written(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        seen.append(x[t] * 2)
        if t == 3:
            seen[1].mul_(2)
        out.append(torch.stack(seen).sum(0))
    return torch.stack(out)


def it_is_written_after_it_was_appended(x):
    seen, out = [], []
    for row in x:
        key = row * 2
        seen.append(key)
        key.add_(1)
        out.append(torch.stack(seen).sum(0))
    return torch.stack(out)


def it_holds_one_tensor_many_times(x):
    h, seen, out = torch.zeros(D, dtype=x.dtype), [], []
    for row in x:
        h.add_(row.detach())
        seen.append(h)
        out.append(torch.stack(seen).sum(0) + row)
    return torch.stack(out)


def an_element_is_written_two_steps_later(x):
    seen, out, last, before = [], [], None, None
    for t in range(x.shape[0]):
        if before is not None:
            before.add_(1)
        seen.append(x[t] * 1)
        out.append(torch.stack(seen).sum(0))
        before, last = last, seen[t // 2]
    return torch.stack(out)


WRITTEN = [
    (an_element_is_written, "writes in place to an element"),
    (it_is_written_after_it_was_appended, "writes in place to an element"),
    (it_holds_one_tensor_many_times, "writes in place to h, which shares elements with a list that is read"),
    (
        an_element_is_written_two_steps_later,
        "writes in place to before, which shares elements with a list that is read",
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize(("written", "reason"), WRITTEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_list_whose_elements_are_written(written, reason):
    (x,) = rows(45)
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(written, nested="eager", on_decline="error")(x)
    assert torch.equal(nsa_compile.loop(written, nested="eager")(x), written(x))


def behind_another(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        seen.append(x[t])
        out.append(len([x] + seen) + x[t])  # noqa: RUF005
    return torch.stack(out)


def repeated(x):
    seen, out = [], []
    for t in range(x.shape[0]):
        seen.append(x[t])
        out.append(len(2 * seen) + x[t])
    return torch.stack(out)


@pytest.mark.deep
@pytest.mark.parametrize("run", [behind_another, repeated], ids=lambda f: f.__name__)
def test_the_length_of_lists_that_are_put_together(run):
    """That of a list that is only appended to was the number of one step's elements."""
    for length in (4, 45):
        compare(run, *rows(length), on_decline="warn", batched=False)


@pytest.mark.deep
def test_what_keeps_a_list_from_being_one_tensor_is_told():
    def run(x):
        seen, out = [], []
        for t in range(x.shape[0]):
            seen.append(x[t] * 2)
            out.append(torch.stack([*seen, x[t]]).amax(0))
        return torch.stack(out)

    with pytest.raises(LoopDeclined, match=r"too many different ways.*; seen is read element by element, or its"):
        nsa_compile.loop(run, nested="eager", on_decline="error")(*rows(90))


@pytest.mark.deep
def test_a_list_of_few_elements_of_other_shapes():
    def pair(x):
        out = []
        for row in x:
            found = [row, row[:2]]
            out.append(found[0] * found[1].sum())
        return torch.stack(out)

    def uneven(x):
        seen = [x[0, :2]]
        for t in range(x.shape[0]):
            if t == 2:
                seen.append(x[t])
            y = seen[-1].sum()
        return y

    compare(pair, *rows(7))
    compare(uneven, *rows(7), on_decline="warn", batched=False)


def renewed_by_a_slice(row, seen):
    return [*seen[-2:], row]


def renewed_by_copies(row, seen):
    return [*[x * 1 for x in seen][-3:], row]


@pytest.mark.deep
@pytest.mark.parametrize("renewed", [renewed_by_a_slice, renewed_by_copies])
def test_a_list_of_two_names_of_which_one_gets_another(renewed):
    def run(x):
        first = seen = [x[0]]
        for t in range(x.shape[0]):
            seen = renewed(x[t], seen)
        return torch.stack(seen).sum(), first

    (x,) = rows(7)
    ours, theirs = nsa_compile.loop(run, nested="eager", cache=False)(x), run(x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.deep
@pytest.mark.parametrize("is_filled", [False, True])
def test_a_tensor_that_a_cache_of_a_function_keeps(is_filled, caplog):
    @functools.lru_cache
    def table(n):
        return torch.arange(n) * 1.0

    def run(x):
        found = []
        for t in range(x.shape[0]):
            found.append(table(3))
            y = x[t] * 2
        return found, y

    if is_filled:
        table(3)
    found, _ = nsa_compile.loop(run, nested="eager", cache=False)(torch.ones(4, 3))
    assert all(x is table(3) for x in found)
    assert "(.clone())" in caplog.text


def taken_behind(M, row):
    M.append(row)
    M.pop()
    M.append(M[-1] * row)
    return M


def taken_behind_and_in_front(M, row):
    M += [row, M[-1] * row]
    M.pop(0)
    del M[-1]
    return M


def more_come_than_are_taken(M, row):
    M += [row, row.sin()]
    M.pop(0)
    return M


def all_of_them_taken(M, row):
    M.append(row)
    while len(M) > 1:
        M.pop()
    M.append(M[-1] * row)
    return M


def begun_again(M, row):
    M.clear()
    M.append(row)
    return M


def the_last_five(M, row):
    M.append(row)
    return M[-5:]


def a_slice_of_a_slice(M, row):
    M.append(row)
    return M[1:][:4]


def another_list_each_time(M, row):
    return [*M[1:], row]


def others_behind(M, row):
    return M + [row * 2]  # noqa: RUF005


def others_behind_a_part(M, row):
    return M[1:] + [row * 2, row]  # noqa: RUF005


def others_in_front(M, row):
    return [row * 2] + M  # noqa: RUF005


KEPT = [
    taken_behind, taken_behind_and_in_front, more_come_than_are_taken, all_of_them_taken, begun_again, the_last_five,
    a_slice_of_a_slice, another_list_each_time, others_behind, others_behind_a_part, others_in_front,
]  # fmt: skip


@pytest.mark.deep(but=["more_come_than_are_taken-7", "begun_again-1"])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("step", KEPT, ids=lambda f: f.__name__)
def test_what_a_list_held_before_stays_what_it_was(step, steps, caplog):
    def run(x):
        before = [x[0] * 1, x[1] * 2, x[2] * 3, x[3] * 4]
        M, out = list(before), []
        for t in range(steps):
            M = step(M, x[t] * 3)
            out.append(M[-1] + torch.stack(M).sum(0))
        which = [[i for i, other in enumerate(before) if m is other] for m in M]
        return torch.stack(out), M, before, which

    (x,) = rows(8)
    compare(run, x, batched=False, on_decline="warn")
    assert "runs as it is written" not in caplog.text


@pytest.mark.deep
def test_a_slice_that_a_step_adds_to_and_leaves():
    """What is taken from a list shares the memory of its rows; once that is found out, there is an end to it."""

    def run(x):
        seen, out = [x[0] * 1], []
        for t in range(x.shape[0]):
            last = seen[-3:]
            while len(last) < 4:
                last.append(last[-1] * 0.5)
            seen.append(last[0] + x[t])
            out.append(last[3])
        return out, last

    (x,) = rows(5)
    compare(run, x, batched=False, on_decline="warn")


@pytest.mark.deep
def test_a_first_call_may_be_profiled():
    (x,) = rows(7)
    profile = cProfile.Profile()
    compiled = nsa_compile.loop(last_ones_one_by_one, nested="eager", cache=False, on_decline="error")
    with profile:
        ours = compiled(x)
    torch.testing.assert_close(ours, last_ones_one_by_one(x))
    assert "explore" in {entry.code.co_name for entry in profile.getstats() if hasattr(entry.code, "co_name")}
