"""Loops as people write them, compiled, against the loops as written: values, gradients and the state left behind."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile.loops import LoopDeclined

D = 4


def rows(length: int, count: int = 1, width: int = D) -> list[torch.Tensor]:
    torch.manual_seed(length)
    return [torch.randn(length, width, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def compare(function, *args, batched=True, raised=True, others=(), on_decline="error", **options):
    """Compile a loop, and compare it with itself as written, twice, so that a kept program is compared, too."""
    compiled = nsa_compile.loop(function, on_decline=on_decline, nested="eager", **options)
    leaves = [x for x in (*args, *others) if isinstance(x, torch.Tensor) and x.requires_grad]
    for _ in range(2):
        results = [pytree.tree_leaves(f(*args)) for f in (compiled, function)]
        assert len(results[0]) == len(results[1])
        for ours, theirs in zip(*results, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert ours == theirs
                continue
            torch.testing.assert_close(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad
            if theirs.requires_grad:
                weight = torch.randn_like(theirs)
                grads = [
                    torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True, retain_graph=True)
                    for y in (ours, theirs)
                ]
                for a, b in zip(*grads, strict=True):
                    torch.testing.assert_close(
                        torch.zeros(()) if a is None else a.sum(),
                        torch.zeros(()) if b is None else b.sum(),
                        check_dtype=False,
                    )
                    if b is not None:
                        torch.testing.assert_close(a, b)
    report = nsa_compile.last_report()
    if batched:
        assert [scan.batched for scan in report.scans] == [True]
        assert not raised or report.declines == []
    return report


def matches(report):
    return " ".join(text for entry in report.passes for text in entry.matches)


def test_a_cache_that_grows():
    def attention(q, k, v):
        keys, values = k.new_zeros(0, D), v.new_zeros(0, D)
        out = []
        for t in range(q.shape[0]):
            keys = torch.cat([keys, k[t][None]])
            values = torch.cat([values, v[t : t + 1]])
            out.append(torch.softmax(keys @ q[t] / D**0.5, -1) @ values)
        return torch.stack(out)

    assert "attention to a window of 9" in matches(compare(attention, *rows(9, 3)))


@pytest.mark.deep
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_of_torchs_own_module(need_weights):
    module = torch.nn.MultiheadAttention(D, 2, dropout=0.0, batch_first=True).double()

    def attention(x):
        out = []
        for t in range(x.shape[0]):
            so_far = x[None, : t + 1]
            out.append(module(so_far[:, -1:], so_far, so_far, need_weights=need_weights)[0][0, 0])
        return torch.stack(out)

    found = matches(compare(attention, *rows(9), others=tuple(module.parameters())))
    assert need_weights or "attention to a window of 9" in found


@pytest.mark.deep
def test_a_cache_that_is_there_from_the_start():
    def attention(q, keys):
        out = []
        for t in range(q.shape[0]):
            keys = torch.cat([keys, q[t][None]])
            out.append(torch.softmax(keys @ q[t], -1) @ keys)
        return torch.stack(out), keys

    compare(attention, *rows(9), *rows(3))


@pytest.mark.deep
def test_a_window_and_blocks_at_another_rate():
    def attention(x):
        keys, blocks = x.new_zeros(0, D), x.new_zeros(0, D)
        out = []
        for t in range(x.shape[0]):
            keys = torch.cat([keys, x[t][None]])
            if t + 1 >= 4 and (t + 1 - 4) % 2 == 0:
                blocks = torch.cat([blocks, keys[t + 1 - 4 : t + 1].mean(0, keepdim=True)])
            y = torch.softmax(keys[max(0, t + 1 - 5) :] @ x[t], -1) @ keys[max(0, t + 1 - 5) :]
            if blocks.shape[0] > 0:
                y = y + torch.softmax(blocks @ x[t], -1) @ blocks
            out.append(y)
        return torch.stack(out), keys, blocks

    found = matches(compare(attention, *rows(19)))
    assert "window of 5" in found
    assert "blocks of 4 with stride 2" in found


def test_keys_that_are_cut_off_at_the_front():
    def attention(x):
        keys = x.new_zeros(0, D)
        out = []
        for t in range(x.shape[0]):
            keys = torch.cat([keys, x[t][None]])[-5:]
            out.append(torch.softmax(keys @ x[t], -1) @ keys)
        return torch.stack(out), keys

    assert "window of 5" in matches(compare(attention, *rows(17)))


def test_outputs_written_in_place_and_steps_left_early():
    def attention(x):
        y = torch.zeros_like(x)
        for t in range(x.shape[0]):
            if t % 3 == 2:
                continue
            y[t] = torch.softmax(x[: t + 1] @ x[t], -1) @ x[: t + 1]
        return y

    compare(attention, *rows(11))


class Cache:
    def __init__(self):
        self.keys, self.seen = None, 0

    def update(self, k):
        self.keys = k[None] if self.keys is None else torch.cat([self.keys, k[None]])
        self.seen += 1
        return self.keys


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(D, D, dtype=torch.float64)

    def forward_step(self, x, cache):
        keys = cache.update(self.project(x))
        return torch.softmax(keys @ x, -1) @ keys


@pytest.mark.deep
def test_a_module_and_its_cache_object():
    module = Attention()

    def prefill(x):
        cache = Cache()
        out = []
        for x_t in range(x.shape[0]):
            out.append(module.forward_step(x[x_t], cache))
        return torch.stack(out), cache.keys, cache.seen, type(cache).__name__

    compare(prefill, *rows(8), others=module.parameters())


def test_state_in_tuples_and_dicts_and_numbers():
    def attention(x):
        state = {"kv": None, "count": 0}
        out = []
        for t in range(x.shape[0]):
            if state["kv"] is None:
                state["kv"] = (x[t][None], 2 * x[t][None])
            else:
                k, v = state["kv"]
                state["kv"] = (torch.cat([k, x[t][None]]), torch.cat([v, 2 * x[t][None]]))
            state["count"] += 2
            k, v = state["kv"]
            out.append(torch.softmax(k @ x[t], -1) @ v * state["count"])
        return torch.stack(out), state

    compare(attention, *rows(8))


@pytest.mark.deep
def test_the_first_rows_and_a_window():
    def attention(x):
        keys = x.new_zeros(0, D)
        out = []
        for t in range(x.shape[0]):
            keys = torch.cat([keys, x[t][None]])
            kept = torch.cat([keys[:2], keys[max(2, t + 1 - 3) :]])
            out.append(torch.softmax(kept @ x[t], 0) @ kept)
        return torch.stack(out)

    compare(attention, *rows(9), raised=False)


def test_rows_picked_by_what_is_computed():
    def attention(x):
        out = []
        for t in range(x.shape[0]):
            scores = x[: t + 1] @ x[t]
            best, at = torch.topk(scores, min(3, t + 1))
            out.append(torch.softmax(best, 0) @ x[at] + x[scores.argmax()])
        return torch.stack(out)

    compare(attention, *rows(9), raised=False)


@pytest.mark.deep
def test_rows_that_are_there_at_some_steps_only_before_others():
    """Memory keys stand before the blocks once there are blocks, and what is picked stands before a window."""

    def attention(x, memory):
        keys, blocks, run = x[:0], x[:0], x[:0]
        out = []
        for t in range(x.shape[0]):
            keys = torch.cat([keys, x[t][None]])
            run = torch.cat([run, x[t][None]])
            seen = torch.cat([memory, blocks]) if blocks.shape[0] > 0 else blocks
            scores = seen @ x[t]
            y = torch.softmax(scores, 0) @ seen
            if run.shape[0] % 4 == 0:
                blocks = torch.cat([blocks, run.mean(0, keepdim=True)])
                run = run[-2:]
            near = keys[-(t % 4 + 1) :]
            picked = min(2, scores.shape[0] // 2)
            if picked > 0:
                best, at = scores[memory.shape[0] :].topk(min(picked, scores.shape[0] - memory.shape[0]))
                near = torch.cat([blocks[at] * best[:, None], near])
            out.append(y + torch.softmax(near @ x[t], 0) @ near)
        return torch.stack(out), keys, blocks, run

    compare(attention, *rows(19), *rows(2), raised=False)


def test_rows_filled_up_to_whole_blocks():
    def blocks(x):
        out = []
        for t in range(x.shape[0]):
            keys = x[: t + 1]
            padded = torch.nn.functional.pad(keys, (0, 0, 0, -(t + 1) % 4))
            means = padded.view(-1, 4, D).mean(1)
            out.append(torch.softmax(means @ x[t], 0) @ means)
        return torch.stack(out)

    compare(blocks, *rows(10), raised=False)


@pytest.mark.deep
def test_an_object_that_holds_itself():
    class Node:
        def __init__(self):
            self.me, self.total = self, 0

    def total(x):
        node = Node()
        for t in range(x.shape[0]):
            node.me.total = node.total + x[t]
        return node.total

    compare(total, *rows(6))


def _divided_by_the_position(x, t):
    return x[t] / t


def _divided_by_a_sum_of_rows(x, t):
    return x[t] / x[:t].abs().sum()


def _softmax_of_masked_rows(x, t):
    kept = torch.arange(x.shape[0]) < t
    return torch.softmax((x @ x[t]).masked_fill(~kept, -math.inf), 0) @ x


def _sum_of_exponentials(x, t):
    return x[t] * torch.logsumexp(x[:t], 0) + (x[:t] - x[:t].amax(0)).exp().sum(0)


def _best_of_few(x, t):
    best, at = (x[:t] @ x[t]).topk(min(3, t))
    return (best[:, None] * x[at]).sum(0)


def _logarithm_of_the_position(x, t):
    return x[t] * math.log(t) + x[t] * torch.tensor([1.0 / t], dtype=x.dtype)


@pytest.mark.deep
@pytest.mark.parametrize(
    "later",
    [
        _divided_by_the_position,
        _divided_by_a_sum_of_rows,
        _softmax_of_masked_rows,
        _sum_of_exponentials,
        _best_of_few,
        _logarithm_of_the_position,
    ],
)
def test_what_would_be_infinite_at_a_step_that_takes_another_way(later):
    """The program computes it there, too: a gradient of zero times infinity is NaN."""

    def loop(x):
        out = []
        for t in range(x.shape[0]):
            out.append(later(x, t) if t > 0 else x[t])
        return torch.stack(out)

    compare(loop, *rows(7), raised=False)


@pytest.mark.deep
def test_a_state_that_changes_its_dtype():
    def decayed(x):
        state = torch.zeros(D, dtype=torch.float32)
        for t in range(x.shape[0]):
            state = 0.9 * state + x[t]
        return state

    compare(decayed, *rows(7), batched=False, on_decline="warn")


def test_whole_blocks_of_rows():
    def attention(x):
        out = []
        for t in range(x.shape[0]):
            blocks = (t + 1) // 4
            if blocks == 0:
                out.append(torch.zeros_like(x[t]))
                continue
            keys = x[: blocks * 4].view(blocks, 4, D).mean(1)
            out.append(torch.softmax(keys @ x[t], 0) @ keys)
        return torch.stack(out)

    compare(attention, *rows(13))


@pytest.mark.deep
def test_a_tensor_that_is_written_in_place_is_the_same_tensor():
    def fill(x, y):
        for t in range(x.shape[0]):
            y[t] = x[t] * 2

    x, y = rows(5)[0].detach(), torch.zeros(5, D, dtype=torch.float64)
    nsa_compile.loop(fill, on_decline="error", nested="eager")(x, y)
    torch.testing.assert_close(y, 2 * x)


def _appended_and_written(x):
    buffer, out = torch.zeros_like(x), []
    for t in range(x.shape[0]):
        buffer[t] = x[t]
        out.append(buffer)
    return torch.stack(out)


def _seen_by_a_view(x):
    y = x.detach().clone()
    first = None
    for t in range(x.shape[0]):
        first = y[:2]
        y[t] = x[t] + first.sum(0)
    return y, first


def _printed(x):
    for t in range(x.shape[0]):
        print(t)
    return x


def _drawn(x):
    out = []
    for t in range(x.shape[0]):
        out.append(x[t] * random.random())
    return torch.stack(out)


def _dropped(x):
    out = []
    for t in range(x.shape[0]):
        out.append(torch.nn.functional.dropout(x[t]))
    return torch.stack(out)


def _picked_by_truth(x):
    out = []
    for t in range(x.shape[0]):
        out.append(x[t][x[t] > 0].sum())
    return torch.stack(out)


def _taken_for_an_error(x):
    out = []
    for t in range(x.shape[0]):
        try:
            out.append(x[t] * float(x[t].sum()))
        except Exception:
            out.append(x[t])
    return torch.stack(out)


def _extreme_of_nothing(x):
    out = []
    for t in range(x.shape[0]):
        out.append(x[:t].amax(0))
    return torch.stack(out)


@pytest.mark.deep(but=["_taken_for_an_error-depends on data"])
@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (_appended_and_written, "writes in place to buffer, which shares elements with the tensors appended to out"),
        (_seen_by_a_view, "writes in place to y, which shares elements with first"),
        (_printed, "prints"),
        (_drawn, "draws random numbers by a Random"),
        (_dropped, "draws random numbers"),
        (_picked_by_truth, "has a size that depends on data"),
        (_taken_for_an_error, "depends on data"),
        (_extreme_of_nothing, "without identity"),
    ],
)
def test_what_a_program_would_do_otherwise_is_declined(written, reason):
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(written, on_decline="error")(rows(6)[0].detach())


def test_variables_are_what_they_are_after_the_loop():
    def last(x):
        total = x.new_zeros(D)
        for t in range(2, x.shape[0], 2):
            row = x[t] * t
            total = total + row
            half = t // 2
        return total, row, t, half

    compare(last, *rows(9))


def test_a_loop_is_left_as_it_is_where_its_way_depends_on_data(caplog):
    def gated(x):
        total = x.new_zeros(D)
        for t in range(x.shape[0]):
            if x[t].sum() > 0:
                total = total + x[t]
        return total

    x = rows(7)[0]
    torch.testing.assert_close(nsa_compile.loop(gated)(x), gated(x))
    assert "reads a number out of a tensor" in caplog.text
    with pytest.raises(LoopDeclined, match=r"depends on data \(.*test_loops.py:\d+\)"):
        nsa_compile.loop(gated, on_decline="error")(x)


@pytest.mark.deep
def test_a_list_that_is_read_back_is_never_wrong():
    def history(x):
        seen, out = [], []
        for t in range(x.shape[0]):
            seen.append(x[t])
            out.append(torch.stack(seen).mean(0))
        return torch.stack(out)

    x = rows(60)[0]
    torch.testing.assert_close(nsa_compile.loop(history)(x), history(x))


@pytest.mark.deep
def test_a_row_too_many_raises_as_the_loop_does():
    def ahead(x):
        out = []
        for t in range(x.shape[0]):
            out.append(x[t + 1])
        return torch.stack(out)

    for function in (ahead, nsa_compile.loop(ahead)):
        with pytest.raises(IndexError):
            function(rows(5)[0])


@pytest.mark.deep
def test_the_variables_are_as_before_where_a_loop_is_declined():
    def broken(x, cache):
        for t in range(x.shape[0]):
            cache.append(x[t])
            if t == 3 and float(x[t].sum()) > 1e9:
                cache.clear()
        return cache

    x = rows(5)[0]
    assert len(nsa_compile.loop(broken)(x, [])) == 5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("for t in range(3):\n        if t == 1:\n            break", "has a break"),
        ("for t in range(3):\n        return t", "returns from within the loop"),
        ("pass", "no `for` loop"),
        ("for t in range(3):\n        pass\n    for s in range(3):\n        pass", "2 loops"),
    ],
)
def test_a_function_without_such_a_loop(tmp_path, source, reason):
    path = tmp_path / "written.py"
    path.write_text(f"def written():\n    {source}\n")
    scope = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(scope["written"])


def writes_to_what_was_appended_two_steps_ago(x):
    a = b = c = None
    out = []
    for t in range(x.shape[0]):
        if c is not None:
            c.add_(1)
        c, b, a = b, a, x[t] * 2
        out.append(a)
    return torch.stack(out)


def writes_to_a_part_that_came_by_another_name(x):
    whole, part, later = torch.zeros(2 * D, dtype=x.dtype), None, None
    out = []
    for t in range(x.shape[0]):
        if later is not None:
            later.add_(1)
        out.append(whole + 0)
        later = part
        part = whole[:D] if t % 3 == 0 else None
    return torch.stack(out)


@pytest.mark.deep(but=["writes_to_a_part_that_came_by_another_name"])
@pytest.mark.parametrize(
    "written", [writes_to_what_was_appended_two_steps_ago, writes_to_a_part_that_came_by_another_name]
)
def test_a_write_to_what_another_holds_since_steps_ago(written):
    x = rows(9)[0].detach()
    with pytest.raises(LoopDeclined, match=r"it writes in place to (c|later), which shares elements"):
        nsa_compile.loop(written, on_decline="error", nested="eager")(x)
    assert torch.equal(nsa_compile.loop(written)(x), written(x))


def over_rows(x):
    h, out = torch.zeros(D, dtype=x.dtype), []
    for row in x:
        h = h * 0.5 + row
        out.append(h)
    return torch.stack(out), h


def over_unbound(x):
    total, out = 0.0, []
    for t, row in enumerate(x.T.unbind(1), 2):
        total = total * 0.5 + row * t
        out.append(total)
    return torch.stack(out), t, row


def over_pairs(q, k):
    seen, out = [], []
    for a, b in zip(torch.unbind(q), k.split(1, dim=0), strict=True):
        seen.append(b)
        keys = torch.cat(seen)
        out.append((a @ keys.T).softmax(-1) @ keys)
    return torch.stack(out)


def over_chunks(x):
    h, out = torch.zeros(D, dtype=x.dtype), []
    for n, chunk in enumerate(x.split(3)):
        out.append(chunk + h * n)
        h = h + chunk.sum(0)
    return torch.cat(out)


def over_a_list(x):
    rows, h, out = tuple(x.sin().unbind()), torch.zeros(D, dtype=x.dtype), []
    for i, (row, other) in enumerate(zip(rows, x.chunk(len(rows)), strict=False)):
        h = h + row * other[0]
        out.append(h / (i + 1))
    return torch.stack(out)


def backwards(x):
    h, out = torch.zeros(D, dtype=x.dtype), []
    for t in reversed(range(1, x.shape[0])):
        h = h * 0.5 + x[t] * t
        out.append(h)
    return torch.stack(out[::-1]), t


def backwards_over_rows(x):
    h, out = torch.zeros(D, dtype=x.dtype), []
    for row in reversed(x.unbind()):
        h = h * 0.5 + row
        out.append(h)
    return torch.stack(out)


@pytest.mark.deep
@pytest.mark.parametrize(
    "written",
    [over_rows, over_unbound, over_chunks, over_a_list, backwards, backwards_over_rows],
    ids=lambda f: f.__name__,
)
def test_a_loop_may_go_over_rows(written):
    for length in (6, 9):
        compare(written, *rows(length))


def test_a_loop_may_go_over_several_at_once():
    assert "attention to a window of 9" in matches(compare(over_pairs, *rows(9, 2)))


def over_a_generator(x):
    h = torch.zeros(D, dtype=x.dtype)
    for row in (r for r in x):
        h = h * 0.5 + row
    return h


def over_uneven_chunks(x):
    h = torch.zeros(D, dtype=x.dtype)
    for chunk in x.split(4):
        h = h + chunk.sum(0)
    return h


def over_a_list_that_grows(x):
    waiting = [x[0], x[1]]
    for row in waiting:
        if len(waiting) < 5:
            waiting.append(row * 2)
    return torch.stack(waiting)


def over_a_list_that_is_written(x):
    buffers = tuple(torch.zeros(D, dtype=x.dtype) for _ in range(5))
    for i, buffer in enumerate(buffers):
        buffer.add_(x[i].detach())
        buffers[0].add_(1)
    return torch.stack(buffers)


def over_a_zip_of_its_own(x):
    def zip(a):
        return [(row, 2) for row in a]

    h = torch.zeros(D, dtype=x.dtype)
    for row, n in zip(x.unbind()):
        h = h + row * n
    return h


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (over_a_generator, "it goes over a generator; it may go over a range"),
        (over_uneven_chunks, "it goes over a tuple"),
        (over_a_list_that_grows, "it goes over a list that the step can change"),
        (over_a_list_that_is_written, "it goes over a list of tensors, and writes in place"),
        (over_a_zip_of_its_own, "it goes over a list"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loop_over_something_else_runs_as_written_and_says_so(written, reason, caplog):
    (x,) = rows(7)
    ours, theirs = nsa_compile.loop(written)(x), written(x)
    assert torch.equal(ours, theirs)
    assert reason in caplog.text
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(written, on_decline="error")(x)


def test_reports_name_the_loop_and_its_variables(caplog):
    def run(x):
        h, keys, ys = x.new_zeros(2), x.new_zeros(0, 2), []
        for t in range(x.shape[0]):
            keys = torch.cat([keys, x[t : t + 1]])
            h = torch.tanh(h + x[t])
            ys.append(h + keys.sort(0).values[-1])
        return torch.stack(ys)

    x = torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(nsa_compile.loop(run, nested="eager", cache=False)(x), run(x))
    assert "batch_prefill computes h of the loop step by step: the recurrence has no parallel form" in caplog.text
    (report,) = nsa_compile.last_report().scans
    assert report.name == "loop"
    assert "dropped the guards of keys" in str(nsa_compile.last_report().passes)


def test_masks_meet_truths_of_the_position():
    def blocks(x):
        M, out = torch.zeros(4, D, dtype=x.dtype), []
        for t in range(x.shape[0]):
            is_full = (torch.arange(4) == t // 3) & ((t + 1) % 3 == 0)
            M = torch.where(is_full[:, None], x[t], M)
            shown = ((x[t] > 0) | (t > 2)) ^ (t % 2 == 0)
            out.append(M.sum(0) * shown + (x[t] > 0) * t * (t > 1))
        return torch.stack(out)

    (x,) = rows(9)
    compare(blocks, x, raised=False)


def normalized_over_rows(x):
    out = []
    for t in range(x.shape[0]):
        out.append(torch.nn.functional.layer_norm(x[: t + 1].T, (t + 1,)).sum(1))
    return torch.stack(out)


def left_by_inference_mode(x):
    for t in range(x.shape[0]):
        with torch.inference_mode():
            total = x[t].sum()
    return total


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (normalized_over_rows, "normalizes over a dimension that grows; write it with mean and var"),
        (left_by_inference_mode, r"made under inference_mode; write torch.no_grad\(\)"),
    ],
)
def test_what_to_write_instead_is_told(written, reason):
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(written, on_decline="error", nested="eager")(rows(5)[0])


def test_a_module_is_no_function():
    with pytest.raises(LoopDeclined, match=r"module.forward = nsa_compile.loop\(module.forward\)"):
        nsa_compile.loop(torch.nn.Linear(D, D))


def test_batch_norm_between_steps():
    norm = torch.nn.BatchNorm1d(D, dtype=torch.float64).eval()

    def run(x):
        h, out = x[0], []
        for t in range(x.shape[0]):
            h = norm(h * 0.5 + x[t])
            out.append(h)
        return torch.stack(out)

    x = torch.randn(5, 2, D, dtype=torch.float64, requires_grad=True)
    report = compare(run, x, batched=False, others=tuple(norm.parameters()), on_decline="warn")
    assert not any("fake tensors" in d.reason for scan in report.scans for d in scan.declines)
