"""Programs that came out wrong once, found by `benchmarks/model_programs.py`: shrunk, named, and held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import scan
from nsa_compile.capture.refusals import ScanRefused
from nsa_compile.passes import raise_attention, unroll_buffers

pytestmark = pytest.mark.deep(every=4, of_file=True)

D = 2


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def compiled(run, nested="eager", **options):
    return torch.compile(run, backend="nsa_compile", options={"nested": nested, "cache": False}, **options)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def cached(x):
    """A scan that is batched: the sums over a cache of what came in until then."""

    def step(c, row):
        k = c.index_copy(0, row["t"].view(1), row["x"].unsqueeze(0))
        return k, k.sum(0)

    return scan(step, x.new_zeros(x.shape), {"x": x, "t": torch.arange(x.shape[0])})[1]


def test_a_write_in_place_in_a_step_behind_a_batched_scan():
    """Dead code was removed from the steps of all scans once the first was batched; writes looked unused there."""

    def run(x):
        def step(c, a):
            k = c.clone()
            k.select(0, 0).copy_(a.amax(0) * 2)
            return k, k.sum(0)

        y = cached(x)
        return scan(step, x.new_full(x.shape, 0.5), y)[1]

    x = rows(3, D)
    torch.testing.assert_close(compiled(run, fullgraph=True)(x), run(x))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.multinomial(torch.ones(3), 2),
        lambda: torch.normal(0.0, 1.0, (2, 3)),
        lambda: torch.empty(3).normal_(),
        lambda: torch.rand(2),
    ],
    ids=["multinomial", "normal", "normal_", "rand"],
)
def test_numbers_that_nobody_reads_are_drawn_beside_a_write(draw):
    """They were dropped as soon as the graph wrote to anything, so whatever was drawn next was another number."""

    def run(x):
        final, y = scan(lambda c, row: (c * 0.5 + row, c), x.new_zeros(D), x)
        final[:1].mul_(2)
        draw()
        return final, y

    x, states = rows(3, D), []
    for function in (run, compiled(run, fullgraph=True)):
        torch.manual_seed(3)
        final, y = function(x)
        states.append((final, y, torch.get_rng_state()))
    torch.testing.assert_close(states[0], states[1])


def test_a_cache_overwritten_as_a_whole_still_asks_for_its_gradient():
    """No value of the first cache is left in the last one, and eager's has a gradient all the same: zeros."""

    def run(x, k):
        def step(c, row):
            return torch.where((torch.arange(len(x)) == row["t"]).view(-1, 1), row["x"].unsqueeze(0), c), row["x"]

        return scan(step, k, {"x": x, "t": torch.arange(len(x))})[0]

    x, k = rows(4, D), rows(4, D).requires_grad_()
    final = compiled(run, fullgraph=True)(x, k)
    torch.testing.assert_close(final, run(x, k))
    (gradient,) = torch.autograd.grad(final.sum(), [k])
    assert not gradient.any()


def test_a_counter_that_is_known_before_the_program_runs_goes_through_autograd():
    """Its table was a real tensor among the fakes of aot_eager."""

    def run(x):
        def step(c, row):
            return torch.where(c > 1, 0, c + 1).to(torch.uint8), row * 2

        return scan(step, torch.full((), 1, dtype=torch.uint8), x)

    x = rows(5, D)
    torch.testing.assert_close(compiled(run, "aot_eager", fullgraph=True)(x), run(x))


def test_compiling_within_a_checkpointed_region():
    """What was traced while compiling counted as saved by the region, which then could not be computed again."""
    fast = compiled(lambda x: scan(lambda c, row: (c * 0.5 + row, c.sin()), x.new_zeros(D), x)[1], fullgraph=True)
    x = rows(4, D).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(fast, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), [x])
    (wanted,) = torch.autograd.grad(fast(x).sum(), [x])
    torch.testing.assert_close(gradient, wanted)
    assert nsa_compile.last_report() is not None


def equal_gradients(run, *inputs, nested="eager"):
    """Values, what asks for gradients, and the gradients of all inputs, compiled and as written."""
    results = []
    for function in (run, compiled(run, nested, fullgraph=True)):
        given = [x.clone().requires_grad_(x.requires_grad) for x in inputs]
        outputs = function(*given)
        flags = [y.requires_grad for y in outputs]
        loss = sum((y * torch.arange(1, y.numel() + 1).view(y.shape)).sum() for y in outputs if y.requires_grad)
        leaves = [x for x in given if x.requires_grad]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if any(flags) else None
        results.append((outputs, flags, gradients))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("recurrence", [True, False])
def test_data_takes_a_value_out_of_its_gradient(recurrence):
    """`.data` left no node behind where a graph was traced anew: gradients flowed through it."""

    def run(x, w):
        def step(c, row):
            new = (c * 0.5 if recurrence else 0) + row * w
            return new, new.data + new * w

        y = scan(step, x.new_zeros(D), (x * w).data * 2)[1]
        y.put_(torch.tensor([0]), torch.ones(1, dtype=x.dtype))
        return y, y.data

    equal_gradients(run, rows(3, D), rows(D).requires_grad_())


def test_a_write_through_as_strided():
    """Torch's derivative of `as_strided_scatter`, which functionalization makes of it, is wrong."""

    def run(x, w):
        y = scan(lambda c, row: (c, row * w), x.new_zeros(D), x)[1]
        y.as_strided(y.shape, y.stride())[0] = y[0] * 1.5
        return (y,)

    equal_gradients(run, rows(3, D), rows(D).requires_grad_())


def test_running_statistics_of_an_output_that_nobody_reads():
    """The schema of `native_batch_norm` does not say that it writes, so it went with its output."""
    layers = [torch.nn.BatchNorm1d(D, dtype=torch.float64) for _ in range(2)]

    def run(x, layer):
        layer(scan(lambda c, row: (c, row * 2), x.new_zeros(D), x)[1])

    run(rows(4, D), layers[0])
    compiled(run, fullgraph=True)(rows(4, D), layers[1])
    assert layers[1].running_mean.abs().sum() > 0
    torch.testing.assert_close(layers[1].state_dict(), layers[0].state_dict())


def test_gradients_turned_on_within_no_grad_in_a_graph_that_writes():
    def run(x, w):
        with torch.enable_grad():
            y = scan(lambda c, row: (c, row * w), x.new_zeros(D), x)[1]
            y.mul_(2)
            return (y,)

    x, w = rows(3, D), rows(D).requires_grad_()
    with torch.no_grad():
        (y,) = compiled(run, fullgraph=True)(x, w)
    (gradient,) = torch.autograd.grad(y.sum(), [w])
    torch.testing.assert_close(gradient, 2 * x.sum(0))


def test_a_carry_that_loses_its_gradient_on_the_way():
    """Two carries are swapped, and one of them is computed from what has no gradient."""

    def run(x, first):
        def step(c, row):
            return {"a": c["b"], "b": row.tanh(), "c": c["c"] * 0.5 + row}, row

        final = scan(step, {"a": first, "b": first * 2, "c": x.new_zeros(D)}, x)[0]
        return final["a"], final["b"], final["c"], first * 1

    equal_gradients(run, rows(3, D), rows(D).requires_grad_())


def test_a_cache_of_no_rows_asks_for_its_gradient():
    def run(x, w):
        return cached(x * w), x * w

    equal_gradients(run, rows(3, 0, D), rows(D).requires_grad_())


def test_parameters_of_a_result_that_nobody_reads_may_be_written_to():
    """The loop kept them for its backward pass, where the loop as written would not."""

    def run(x, w):
        return scan(lambda c, row: (c * 0.5 + row, (row @ w) * c), x.new_zeros(D), x)[0]

    x, w = rows(3, D).requires_grad_(), rows(D, D).requires_grad_()
    final = compiled(run, fullgraph=True)(x, w)
    with torch.no_grad():
        w.mul_(0.9)
    torch.testing.assert_close(torch.autograd.grad(final.sum(), [x]), torch.autograd.grad(run(x, w).sum(), [x]))


def test_constants_of_a_loop_beside_a_batched_scan_go_through_autograd():
    def run(x):
        def step(c, row):
            k = c.clone()
            k[(torch.arange(3) == row["t"]).view(-1, 1).expand(3, D)] = 0.5
            return k, (k * torch.tensor([1.0, 2.0])).sum(0)

        y = cached(x)
        return scan(step, x.new_zeros(3, D), {"t": torch.arange(len(x)), "y": y})[1], y

    x = rows(3, D)
    torch.testing.assert_close(compiled(run, "aot_eager", fullgraph=True)(x), run(x))


def test_a_checkpointed_loop_beside_a_batched_scan():
    """Graphs within graphs lost what they hold once another one was removed."""

    def run(x):
        def average():
            return scan(lambda c, row: (c * 0.5 + row, c), x.new_zeros(D), x)[1]

        return (cached(torch.utils.checkpoint.checkpoint(average, use_reentrant=False)),)

    equal_gradients(run, rows(3, D).requires_grad_())


@pytest.mark.deep
def test_a_size_that_a_graph_that_writes_hands_on():
    def run(x):
        size = x.shape[0]
        y = scan(lambda c, row: (c * 0.5 + row, c), x.new_zeros(D), x)[1]
        y.relu_()
        torch._dynamo.graph_break()
        return y * size

    fast = compiled(run)
    for length in (3, 4, 5):
        torch.testing.assert_close(fast(rows(length, D)), run(rows(length, D)))


def writes_a_row(row):
    z = row.clone()
    z[0] *= 3
    z[:, 1] = z[:, 0] * 2
    return z


WRITES = {
    "rows and columns": writes_a_row,
    "select_scatter": lambda row: torch.select_scatter(row, row[0] * 3, -1, -1),
    "fill_diagonal_": lambda row: row.clone().fill_diagonal_(0.5),
    "fill_diagonal_ of a part": lambda row: row[1:].clone().fill_diagonal_(0.5) + row[:1],
    "as_strided": lambda row: row[1].as_strided((D,), (1,)) + row,
}


@pytest.mark.deep(but=["fill_diagonal_ of a part-False"])
@pytest.mark.parametrize("recurrence", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_writes_within_a_step(write, recurrence):
    """torch.vmap writes a row several times, and gradients counted each; as_strided counted from the first row."""

    def run(x):
        return scan(lambda c, row: (c * 0.5 + row if recurrence else c, WRITES[write](row) * c), x[0] + 1, x)

    equal_gradients(run, rows(3, D, D).requires_grad_())


def test_a_padding_index_in_weights_of_each_step():
    """torch.vmap leaves the padding index of an embedding out of the gradient."""

    def run(x, w):
        tokens = torch.tensor([[0, 1], [1, 2]])
        return scan(lambda c, r: (c, torch.nn.functional.embedding(r[1], r[0], padding_idx=1)), x, (w, tokens))

    equal_gradients(run, rows(D), rows(2, 3, D).requires_grad_())


def test_a_loop_that_draws_and_that_nobody_reads_beside_a_write():
    """It was dropped with its results, so whatever was drawn next was another number."""

    def run(x):
        scan(lambda c, row: (c * 0.5 + row * torch.bernoulli(torch.full_like(row, 0.5)), c), x.new_zeros(D), x)
        return x.clone().fill_(1)

    states = []
    for function in (run, compiled(run, fullgraph=True)):
        torch.manual_seed(3)
        function(rows(3, D))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_result_that_is_written_to_before_backward():
    """tanh keeps its result for the backward pass, and that was the memory which the caller got."""

    def run(x):
        return scan(lambda c, row: (c, row.tanh()), x[0], x)[1].transpose(0, 1)

    gradients = []
    for function in (run, compiled(run, fullgraph=True), compiled(run, "aot_eager", fullgraph=True)):
        x = rows(3, D).requires_grad_()
        y = function(x)
        y.mul_(2)
        gradients.append(torch.autograd.grad(y.sum(), [x]))
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


@pytest.mark.deep
def test_a_write_that_a_known_predicate_leaves_out_still_asks_for_its_gradient():
    def run(x, w):
        def step(c, r):
            return torch.where(r["t"] < 0, c.index_copy(0, r["t"].view(1), (r["x"] * w).unsqueeze(0)), c), r["x"]

        return scan(step, torch.zeros_like(x), {"x": x, "t": torch.arange(len(x))})[0], x * w

    equal_gradients(run, rows(3, D), rows(D).requires_grad_())


def test_two_arguments_that_become_one(caplog):
    """The write to one of them was not seen by whoever reads the other, as there were two when it was compiled."""

    def run(a, b):
        y = scan(lambda c, row: (c * 0.5 + row, c), a[0] * 0, a)[1]
        b.add_(1)
        return y + a.sum()

    fast, x = compiled(run, fullgraph=True), rows(3, D)
    torch.testing.assert_close(fast(x.clone(), rows(3, D)), run(x.clone(), rows(3, D)))
    for _ in range(2):
        a, b = x.clone(), x.clone()
        torch.testing.assert_close(fast(a, a[:]), run(b, b[:]))
        torch.testing.assert_close(a, b)
    assert caplog.text.count("shares its memory with another one") == 1


def has_gradients(run, *inputs):
    """Which results have a gradient, as written and compiled."""
    return [[y.requires_grad for y in function(*inputs)] for function in (run, *(compiled(run, n) for n in NESTED))]


NESTED = ("eager", "aot_eager")


@pytest.mark.deep
def test_results_have_a_gradient_where_the_loop_has_one():
    """A row that is read before anything is written has none; a write that no step reaches has one, of zeros."""

    def run(x, w):
        def step(c, r):
            here = torch.arange(2).view(-1, 1) == r["t"]
            first = torch.where(here, r["x"] @ w, c["first"])
            return {"late": torch.where(r["t"] >= 1, first, c["late"]), "first": first}, c["first"].sum(0)

        init = {"late": x.new_zeros(2, D), "first": x.new_zeros(2, D)}
        final, y = scan(step, init, {"x": x, "t": torch.arange(len(x))})
        return final["late"], final["first"], y

    for length in (1, 2):
        eager, *compiled_ones = has_gradients(run, rows(length, D), rows(D, D).requires_grad_())
        assert eager == [True, True, length > 1]
        assert compiled_ones == [eager, eager]


def test_a_result_that_is_overwritten_as_a_whole_still_asks_for_its_gradient():
    def run(x, w):
        y = scan(lambda c, row: (c * 0.5 + row, c * w), x.new_zeros(D), x)[1]
        y.copy_(x * 2)
        return (y,)

    eager, *compiled_ones = has_gradients(run, rows(3, D), rows(D).requires_grad_())
    assert compiled_ones == [eager, eager] == [[True], [True]]


def test_a_write_to_a_piece_of_a_result_without_gradient():
    """Dynamo was told that every result of a scan has a gradient, and autograd forbids writes to pieces of such."""

    def run(x, w):
        final, y = scan(lambda c, row: (c + 1, row * w), x.new_zeros(D), x)
        final.chunk(2)[0].zero_()
        return final, y

    equal_gradients(run, rows(3, D), rows(D).requires_grad_())


def test_a_weight_that_is_updated_behind_a_loop_whose_gradient_nobody_asks_for():
    """The loop kept the weight for a backward pass that does not need it, and found it changed there."""

    def run(x, w):
        final, y = scan(lambda c, row: (c * row, row @ w), x[0] + 1, x)
        with torch.no_grad():
            w.mul_(0.9)
        y.abs_()
        return final

    gradients = []
    for function in (run, compiled(run, fullgraph=True)):
        x = rows(3, D).requires_grad_()
        gradients.append(torch.autograd.grad(function(x, rows(D, D).requires_grad_() + 0).sum(), [x]))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(("first", "where"), [(0, slice(None, None, 2)), (1, 0)], ids=["strided", "row of a view"])
def test_the_sizes_of_an_input_that_is_written_to_do_not_vary(first, where):
    """Torch took the copy that is handed on for a tensor of varying size, and had no name for it in its guards."""

    def run(x):
        y = x * 1.5
        x[where] = 0.5
        scan(lambda c, row: (c, {}), {}, y)
        return {}

    x, y = rows(3 + first, 1, 2, 2)[first:], rows(3 + first, 1, 2, 2)[first:]
    compiled(run, "aot_eager", fullgraph=True, dynamic=False)(x)
    run(y)
    torch.testing.assert_close(x, y)


def test_a_scan_over_constants_beside_a_write_is_batched():
    def run(x):
        x.add_(1)
        return x + scan(lambda c, t: (c, t * 2), torch.zeros(D), torch.arange(5.0))[1].sum()

    torch.testing.assert_close(compiled(run, fullgraph=True)(rows(D)), run(rows(D)))
    assert nsa_compile.last_report().left_alone is None


def test_a_step_traced_within_a_checkpointed_region(monkeypatch):
    """Tracing saved tensors in the region's name; it was computed again in the middle of its own forward pass."""

    def run(x, w):
        return checkpoint(lambda x: scan(lambda c, row: (c * 0.5 + row @ w, c), x[0], x)[1], x, use_reentrant=False)

    monkeypatch.setattr("nsa_compile.program.loops._differentiable", lambda inputs: [])  # so that it is traced late
    equal_gradients(run, rows(3, D).requires_grad_(), rows(D, D).requires_grad_())


def test_a_write_to_one_of_two_arguments_that_share_memory_at_first(caplog):
    """AOTAutograd's own assertion came out, of inputs by number."""

    def run(a, b, w):
        b.mul_(2)
        return scan(lambda c, row: (c * 0.5 + row * w, c), a[0] * 0, a)[1]

    fast = compiled(run, "aot_eager", fullgraph=True)
    for _ in range(2):
        one, other, w = rows(4, D), rows(4, D), rows(D).requires_grad_()
        torch.testing.assert_close(fast(one[:3], one[1:], w), run(other[:3], other[1:], w))
        torch.testing.assert_close(one, other)
    assert caplog.text.count("shares its memory with another one") == 1


def test_a_weight_written_through_data_behind_a_loop():
    """Autograd does not see such a write, so eager gradients are those of the weight as it is when they are taken."""

    def run(x, w):
        y = scan(lambda c, row: (c * row, row @ w), x[0], x)[1]
        w.data.add_(0.1)
        return (y,)

    equal_gradients(run, rows(3, D).requires_grad_(), rows(D, D).requires_grad_())


def test_batch_normalization_of_nothing():
    """The operator that says what it writes refuses an empty batch; eager mode takes one."""

    def run(x, mean, variance):
        y = scan(lambda c, row: (c, row * 2), x.new_zeros(()), x)[1]
        return torch.nn.functional.batch_norm(y.reshape(-1, D), mean, variance, training=True), mean, variance

    given = [(rows(3, 0, D), torch.zeros(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)) for _ in range(2)]
    torch.testing.assert_close(compiled(run, fullgraph=True)(*given[0]), run(*given[1]))


def autocast(run):
    def under_autocast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return run(*inputs)

    return under_autocast


def average_of_products(x, w):
    return scan(lambda c, row: (c * 0.5 + (row @ w).float(), row @ w), x[0] * 0, x)[1]


def doubled_average_of_products(x, w):
    y = average_of_products(x, w)
    y.mul_(2)
    return y


def sums_of_products(x, w):
    return scan(lambda c, row: (c, scan(lambda c, z: (c + z @ w, z), row * 0, row[None])[0]), x[0], x)[1]


@pytest.mark.parametrize(
    "run",
    [
        autocast(doubled_average_of_products),
        autocast(lambda x, w: checkpoint(average_of_products, x, w, use_reentrant=False)),
        autocast(sums_of_products),
    ],
    ids=["beside a write", "around a region", "around a scan in a step"],
)
def test_autocast_around_a_loop(run):
    """The loop ran without it: a graph made functional, a region and a step do not say where it was entered."""
    x, w = rows(3, D).float(), rows(D, D).float()
    torch.testing.assert_close(compiled(run, fullgraph=True)(x, w), run(x, w), rtol=0, atol=0)


@pytest.mark.parametrize("check", [False, "passes"])
def test_autocast_around_a_loop_beside_a_batched_scan_and_a_write(check):
    """The verifier ran the loop without it, and took the pass to have broken it."""

    @autocast
    def run(x, w):
        y = scan(lambda c, row: ((c * 0.5 + row @ w).tanh(), row @ w), (x[0] * 0).bfloat16(), x)[1]
        z = scan(lambda c, row: (c, row @ w), x[0], x)[1]
        y.mul_(2)
        return y, z

    x, w = rows(3, D).float(), rows(D, D).float()
    fast = torch.compile(run, backend="nsa_compile", options={"nested": "eager", "cache": False, "check": check})
    torch.testing.assert_close(fast(x, w), run(x, w))
    assert [scan.batched for scan in nsa_compile.last_report().scans] == [False, True]


def test_a_shared_region_under_autocast_and_without_it_is_refused_in_one_line():
    region = torch.compiler.nested_compile_region(average_of_products)

    def run(x, w):
        return region(x, w), autocast(region)(x, w)

    with pytest.raises(RuntimeError, match="under autocast and without it"):
        compiled(run, fullgraph=True)(rows(3, D).float(), rows(D, D).float())


def test_a_known_counter_beside_a_cache_that_asks_for_its_gradient():
    """What is known before the program runs was traced as a constant, a fake tensor of another kind than the rest."""

    def run(x):
        def step(c, row):
            here = (torch.arange(5) == c["n"].long()).view(-1, 1)
            return {"n": (c["n"] + 1).to(torch.uint8), "k": torch.where(here, row.unsqueeze(0), c["k"])}, {}

        # The rows of x are never reached, so the cache has a gradient of zeros.
        final, _ = scan(step, {"n": torch.full((), 7, dtype=torch.uint8), "k": x.new_zeros(5, D)}, x)
        return final["k"], x * 1, final["n"]

    eager, *compiled_ones = has_gradients(run, rows(3, D).requires_grad_())
    assert compiled_ones == [eager, eager]


@pytest.mark.parametrize("again", [False, True])
def test_a_view_taken_under_no_grad_beside_a_write_stays_a_view(again):
    """It says that it has a gradient, and has none; made functional, it became a copy with a gradient of zeros."""

    def run(x):
        with torch.no_grad():
            y = x[1:]
            count = torch.zeros(2)
            count.add_(1)
        return y[:1] if again else y, scan(lambda c, row: (c * 0.5 + row, c), x[0], x)[1] * count

    x = rows(3, D).requires_grad_()
    y, z = compiled(run, fullgraph=True)(x)
    torch.testing.assert_close((y, z), run(x))
    assert y.data_ptr() == x[1:].data_ptr()


@pytest.mark.deep
def test_inductor_gets_numbers_it_computes_with_exactly():
    """In float32, integers above 2²⁴ are others; of an arange, the gradient through fmod is wrong (torch 2.13)."""

    def run(x, ids):
        positions, count = torch.arange(6), torch.tensor(2)

        def step(c, row):
            (cache, n), (x, i) = c, row
            cache = torch.where((positions == n % 6)[:, None], x, cache)
            read = torch.where((positions == torch.fmod(n, 6))[:, None], x, cache).sum(0)
            return (cache, n - 1), (read, (i * 16777619) ^ i)

        (cache, n), (read, hashed) = scan(step, (torch.zeros_like(x), count), (x, ids))
        return cache, read, n, hashed

    x, ids = rows(6, D).requires_grad_(), torch.arange(1, 7, dtype=torch.int32)
    fast = nsa_compile.compile(run, cache=False)
    (cache, read, *integers), expected = fast(x, ids), run(x, ids)
    assert all(map(torch.equal, integers, expected[2:]))
    (gradient,) = torch.autograd.grad((read * rows(6, D)).sum() + cache.sum(), x)
    (wanted,) = torch.autograd.grad((expected[1] * rows(6, D)).sum() + expected[0].sum(), x)
    torch.testing.assert_close(gradient, wanted)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(D, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = scan(lambda c, row: (c * 0.5 + row * self.mean, c), x[0], x)[1]
        self.count = self.count + 1
        return y


def test_a_buffer_replaced_behind_a_scan_whose_step_was_the_first_to_read_the_module():
    """Dynamo forgot the module with the step, and what was assigned to it afterwards."""
    model = Counting()
    fast = compiled(model, fullgraph=True)
    for _ in range(2):
        fast(rows(3, D))
    assert model.count == 2


@pytest.mark.deep(but=["False-eager"])
@pytest.mark.parametrize("nested", NESTED[:1])
@pytest.mark.parametrize("deep", [False, True])
def test_a_loop_that_draws_is_run_even_if_nobody_needs_what_it_draws(nested, deep):
    """A later scan read its rows, until that one was batched and did not need them."""

    def draw(x):
        return scan(lambda c, row: (c, F.dropout(row, 0.5)), (), x)[1]

    def run(x):
        drawn = scan(lambda c, row: (c, draw(row)), (), x[:, None])[1][:, 0] if deep else draw(x)
        first = {"a": x[0] * 0, "k": x[0]}
        return scan(lambda c, t: ({"a": torch.tanh(t[1]), "k": c["k"]}, t[0] * 2), first, (x, drawn))[1]

    x, states = rows(3, D), []
    for function in (run, compiled(run, nested, fullgraph=True)):
        function(x)
        torch.manual_seed(0)
        function(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class Assigned:
    pass


class Assigning(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.last = 0, None

    def forward(self, x):
        own = Assigned()
        own.factor = 1
        self.count += 1
        for layer in range(3):
            own.factor = layer + 1
            x = scan(lambda c, row: (c * 0.5 + row, c + row), x[0], x)[1] * own.factor
            own.last = x[-1]
        self.last, self.calls = x, self.calls + 1
        return x + own.last


@pytest.mark.deep
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_attributes_assigned_to_before_and_after_a_scan(nested, fullgraph):
    """What was assigned to an object again, after a scan, was lost; its old value was read."""
    inputs = [rows(3, D).requires_grad_(), rows(3, D).requires_grad_()]
    models = Assigning(), Assigning()
    fast = compiled(models[1], nested, fullgraph=fullgraph)
    for _ in range(2):
        results = [run(x) for run, x in zip((models[0], fast), inputs, strict=True)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y, x in zip(results, inputs, strict=True)))
    assert [(model.calls, int(model.count)) for model in models] == [(2, 2)] * 2
    torch.testing.assert_close(models[0].last, models[1].last)


SEEN = []


def test_a_list_appended_to_behind_a_scan_whose_step_was_the_first_to_read_it():
    def run(x):
        y = scan(lambda c, row: (c * 0.5 + row, c * len(SEEN)), x[0], x)[1]
        SEEN.append(len(x))
        return y

    fast, x = compiled(run, fullgraph=True), rows(3, D)
    assert not fast(x).any()
    assert SEEN == [3]
    assert fast(x).any()


def test_two_equal_loops_have_results_of_their_own():
    """AOTAutograd computed them once, and a write to the results of one reached those of the other."""

    def run(x):
        return [scan(lambda c, row: (c * 0.5 + row, c), x[0], x) for _ in range(2)]

    (a, b), (c, d) = compiled(run, "aot_eager", fullgraph=True)(rows(3, D).requires_grad_())
    assert len({x.untyped_storage().data_ptr() for x in (a, b, c, d)}) == 4


@pytest.mark.deep(but=["aot_eager"])
@pytest.mark.parametrize("nested", ["aot_eager", "inductor"])
def test_a_loop_with_dropout_in_a_checkpointed_region(nested):
    """torch keeps the generator's state for an operator by the device of its first tensors, and looks into no list."""

    def recurrence(x):
        def step(c, row):
            c = 0.5 * c + torch.dropout(row, 0.5, True)
            return c, c * 2

        return scan(step, torch.zeros_like(x[0]), x)[1]

    x = rows(5, D).requires_grad_()
    y = nsa_compile.compile(lambda x: checkpoint(recurrence, x, use_reentrant=False), nested=nested, cache=False)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    # y is linear in x under the mask of the forward pass.
    torch.testing.assert_close((gradient * x).sum(), y.sum())


@pytest.mark.parametrize("nested", NESTED)
def test_what_is_overwritten_as_a_whole_hears_of_a_gradient_of_zeros(nested):
    """Eager mode gives zeros to what was overwritten, where they meet a NaN, too; it was dropped."""

    def run(x, w, v):
        y = scan(lambda c, row: (c, (row * v * 0).sqrt()), x[0], x)[1]
        y[...] = x * w
        return y

    inputs = [rows(3, D), *(rows(D).requires_grad_() for _ in range(2))]
    gradients = []
    for function in (run, compiled(run, nested, fullgraph=True)):
        gradients.append(torch.autograd.grad(function(*inputs).sum(), inputs[1:], allow_unused=True))
    torch.testing.assert_close(*gradients, equal_nan=True)
    assert gradients[0][1].isnan().all()


def test_a_first_cache_that_is_overwritten_as_a_whole_has_a_gradient_of_zeros():
    """It had none, beside results that have one of other inputs, and an optimizer with weight decay left it alone."""

    def run(x, k, late):
        def step(c, r):
            here = (torch.arange(4) == r["t"])[:, None]
            return {"k": torch.where(here, r["x"], c["k"]), "late": r["x"] * 2}, c["k"].sum(0) * r["x"] + c["late"]

        final, y = scan(step, {"k": k, "late": late}, {"x": x, "t": torch.arange(4)})
        return final["k"], final["late"], y[1:]

    x, k, late = (x.requires_grad_() for x in (rows(4, D), rows(4, D), rows(D)))
    for i in range(3):
        gradients = [
            torch.autograd.grad(function(x, k, late)[i].sum(), [x, k, late], allow_unused=True)
            for function in (run, compiled(run, fullgraph=True))
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.deep(but=["eager-False"])
@pytest.mark.parametrize("recurrence", [True, False])
@pytest.mark.parametrize("nested", NESTED)
def test_a_step_that_reads_a_tensor_and_a_view_of_it(nested, recurrence):
    """Dynamo refused it, since the step might write to one of the two."""

    def run(x, a):
        turned = a.T
        return scan(lambda c, row: (a @ (c if recurrence else row) @ a.mT + row, turned @ c @ a), x[0], x)

    equal_gradients(run, rows(3, D, D), rows(D, D).requires_grad_(), nested=nested)


def test_a_step_that_writes_to_a_view_of_what_it_reads_is_refused():
    a = rows(D, D)

    def run(x):
        b = a.T

        def step(c, row):
            b.mul_(2)
            return c + a @ row, a @ c

        return scan(step, x[0], x)

    with pytest.raises(ValueError, match="it writes in place to its carry, to its input or to a tensor from outside"):
        compiled(run, fullgraph=True)(rows(3, D))


def test_an_open_slice_of_a_new_tensor_is_written_to_at_all_steps():
    """torch.vmap overflowed at the slice's end, the greatest integer, and the loop stayed."""

    def run(x):
        def step(c, row):
            z = row.new_zeros(2, D)
            z[:, 1:] = row[1:]
            return row, z + c

        return scan(step, x[0], x)

    x = rows(3, D)
    torch.testing.assert_close(nsa_compile.compile(run, nested="eager", cache=False)(x), run(x))
    assert nsa_compile.last_report().scans[0].batched


def test_a_step_traced_while_it_runs_draws_nothing():
    """Behind a write, gradients are known at the first call alone: the step was traced again then, and really drew."""
    w = rows(D, D)

    def run(x):
        h = x.clone().mul_(2)

        def step(c, row):
            return c, (row @ w)[torch.randperm(D)]

        return scan(step, x[0], h)[1]

    x = rows(3, D).requires_grad_()
    states = []
    for function in (run, compiled(run, fullgraph=True)):
        torch.manual_seed(0)
        function(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_loop_in_inference_mode_with_gradients_enabled_within():
    def run(x):
        with torch.enable_grad():
            return scan(lambda c, row: (c * 0.5 + row, c), x[0], x)[1]

    x = rows(3, D).requires_grad_()
    with torch.inference_mode():
        y = compiled(run, fullgraph=True)(x)
        torch.testing.assert_close(y, run(x))
        assert not y.requires_grad


def test_a_gradient_of_a_loop_within_a_compiled_function_in_a_checkpoint():
    """Dynamo traced the loop's backward pass, and read a second time what a checkpoint hands out once."""

    def run(x, w):
        print(end="")
        y = scan(lambda c, row: (c * 0.5 + row @ w, c.tanh()), x[0], x)[1]
        return y, torch.autograd.grad(y.sum(), w, retain_graph=True)[0]

    x, w = rows(3, D), rows(D, D).requires_grad_()
    gradients = []
    for function in (run, compiled(run)):
        y, inner = checkpoint(function, x, w, use_reentrant=False)
        gradients.append((inner, torch.autograd.grad(y.square().sum(), w)[0]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("nested", NESTED)
def test_a_result_without_gradient_that_is_added_to(nested):
    """What Dynamo said of a result was what became of it: the write got a gradient, and `out=` was refused."""

    def run(x):
        y = scan(lambda c, row: (c, (row * 2).detach()), x[0], x)[1]
        torch.mul(y, 3, out=y)
        y += x
        return y

    equal_gradients(run, rows(3, D).requires_grad_(), nested=nested)


@pytest.mark.deep
def test_gradients_of_rows_that_each_step_replaces_under_inductor():
    """Inductor added up the gradients of a cache's rows behind the kernel that reads their sum."""

    def run(x):
        def step(c, row):
            k = c.clone()
            k.select(0, 0).copy_(row)
            y = ((k @ row).softmax(-1)[:, None] * c).sum(0)
            z = torch.full_like(c, 0.5)
            z.narrow(0, 0, 1).copy_(y[None])
            return k, ((z * row.tanh()).sum(-1).softmax(-1)[:, None] * z).sum(0)

        return scan(step, torch.full_like(x, 0.5), x)[1]

    equal_gradients(run, rows(6, 3).requires_grad_(), nested="inductor")
    assert nsa_compile.last_report().scans[0].batched


def test_a_view_of_another_output_where_inputs_share_memory():
    """AOTAutograd took the number of the output that is viewed for that of an input, and returned another one's."""

    def run(x, twin, w):
        def step(c, row):
            c = torch.tanh(c + row * w)
            return c, (c * 2, c * 3, c * 5)

        twin.mul_(2)
        a, b, c = scan(step, x.new_zeros(D), x)[1]
        return a, b, c, b.view(-1)

    def arguments():
        x = rows(3, D)
        return x, x[:], rows(D).requires_grad_()

    seen, wanted = compiled(run, "aot_eager", fullgraph=True)(*arguments()), run(*arguments())
    torch.testing.assert_close(seen, wanted)
    assert seen[3].data_ptr() == seen[1].data_ptr()


def test_a_row_of_an_input_that_is_written_to_is_transposed_in_place():
    """The output was made again from the input by the views that are operators; `t_` changes one without another."""

    def run(x):
        x[0].fill_(3)
        (_, earlier), _ = scan(lambda c, row: ((row, c[0]), row.sum()), (x.new_zeros(D, D), x.new_zeros(D, D)), x)
        earlier.t_()
        return earlier

    torch.testing.assert_close(compiled(run, fullgraph=True)(rows(3, D, D)), run(rows(3, D, D)))


@pytest.mark.parametrize("draw", [torch.randn_like, torch.bernoulli])
def test_random_numbers_of_transposed_rows(draw):
    """A loop made the rows contiguous; eager mode draws in the order in which a row's elements lie in memory."""

    def run(x):
        return scan(lambda c, row: (c, draw(row)), {}, x)[1]

    x = rows(3, 2, 4).abs().clamp(max=1).permute(2, 1, 0)
    seen = []
    for function in (run, compiled(run, fullgraph=True)):
        torch.manual_seed(0)
        seen.append(function(x))
    torch.testing.assert_close(*seen)


def test_what_no_result_of_a_loop_depends_on_is_overwritten_before_the_backward_pass():
    """The backward pass of the loop went on to what its unused inputs were made of, with gradients of zero."""

    def run(x, w):
        h = x * 1
        unused = h.exp()
        row = torch.tanh(x.sum() * w)
        y = scan(lambda c, xs: (c * 0.5 + row, c), row, unused)[1]
        unused.detach().mul_(2)
        return y

    equal_gradients(run, rows(3, D).requires_grad_(), rows(D))


@pytest.mark.parametrize("nested", NESTED)
def test_the_steps_of_a_loop_are_written_to_behind_it(nested):
    """They were kept for the gradient of a carry that nobody asked for, and found in another version."""

    def run(x, t):
        def step(c, t):
            filled = c[1].index_fill(0, t.view(1), 0.5)
            return (c[0] * 0.5, torch.where(t > 0, filled, c[1] * 0.25)), ()

        return scan(step, (x, x * 2), t)[0][0]

    gradients = []
    for function in (run, compiled(run, nested, fullgraph=True)):
        x, t = rows(3, D).requires_grad_(), torch.arange(3)
        y = function(x, t)
        t.add_(1)
        gradients.append(torch.autograd.grad(y.square().sum(), x))
    torch.testing.assert_close(*gradients)


@pytest.mark.deep(but=["aot_eager"])
@pytest.mark.parametrize("nested", [*NESTED, "inductor"])
def test_a_conjugate_in_a_step(nested):
    """What AOTAutograd compiles runs operators that do not see conjugate views: `c.conj() * x` was `c * x`."""

    def run(x):
        z = torch.view_as_complex(x)
        y = scan(lambda c, row: (c * 0.5 + row, (c.conj() * row, (c * row.conj()).conj().imag)), z[0] * 1, z)[1]
        return torch.view_as_real(y[0]), y[1]

    equal_gradients(run, rows(3, D, 2).requires_grad_(), nested=nested)


@pytest.mark.deep(but=["inductor-False"])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("nested", [*NESTED, "inductor"])
def test_an_input_that_is_a_negated_view(nested, batched):
    """Inductor read what lies in memory, without the sign."""

    def run(x):
        return cached(x) if batched else scan(lambda c, row: (torch.tanh(c + row), c), x[0], x)[1]

    x = torch.view_as_complex(rows(3, D, 2)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(compiled(run, nested, fullgraph=True)(x), run(x))
    fast = compiled(run, nested, fullgraph=True)
    torch.testing.assert_close(fast(x.resolve_neg()), run(x))
    torch.testing.assert_close(fast(x), run(x))


def test_a_negated_view_that_is_written_to_under_inductor():
    def run(x):
        y = cached(x * 2)
        x.mul_(3)
        return y

    inputs = [torch.view_as_complex(rows(3, D, 2)).conj().imag for _ in range(2)]
    torch.testing.assert_close(compiled(run, "inductor", fullgraph=True)(inputs[0]), run(inputs[1]))
    torch.testing.assert_close(*inputs)

    def left_alone(x, w):
        with torch.no_grad():
            w.mul_(2)
        y = cached(x) + w
        x.mul_(3)
        return y

    w = torch.ones(D, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"give it x\.resolve_neg\(\)"):
        compiled(left_alone, "inductor", fullgraph=True)(inputs[0], w)


@pytest.mark.parametrize("batched", [True, False])
def test_a_loop_under_anomaly_detection(batched):
    """The step could not be traced: whether its gradients hold NaN was asked then."""

    def run(x):
        return cached(x) if batched else scan(lambda c, row: (torch.tanh(c + row), c), x[0], x)[1]

    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        equal_gradients(run, rows(3, D).requires_grad_())
        assert torch.is_anomaly_enabled()


def attention(scores, first=torch.zeros_like):
    """One query a step over caches that begin as `first` makes them; `scores(s, t, P)` masks the scores `s [S]`."""

    def run(q, k, v):
        P = torch.arange(len(q))

        def step(caches, row):
            t, q, k, v = row
            K, V = (torch.where((t == P)[:, None], x, c) for x, c in zip((k, v), caches, strict=True))
            return (K, V), scores(K @ q, t, P).softmax(-1) @ V

        return scan(step, (first(k), first(v)), (P, q, k, v))[1]

    return run


def attention_over_two_sets(mask, values=1):
    """One softmax over a cache and four fixed keys; `mask(scores, t, P)` of both, and products with `values` values."""

    def run(q, k, v, fixed_k, fixed_v):
        P = torch.arange(len(q))

        def step(caches, row):
            t, q, k, v = row
            K, V = (torch.where((t == P)[:, None], x, c) for x, c in zip((k, v), caches, strict=True))
            weights = torch.cat([mask(fixed_k @ q, t, torch.arange(4)), mask(K @ q, t, P)]).softmax(-1)
            y = weights[:4] @ fixed_v + weights[4:] @ V
            return (K, V), torch.cat([y, *(weights[4:] @ V**i for i in range(2, values + 1))])

        return scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (P, q, k, v))[1]

    return run


INF = float("inf")


@pytest.mark.deep(but=["shape0-best alone"])
@pytest.mark.parametrize(
    "scores",
    [
        lambda s, t, P: s.masked_fill(s < s.masked_fill(t < P, -1e9).topk(2).values[-1], -INF),
        lambda s, t, P: s.masked_fill((s < s.index_select(0, t.view(1))) | (t < P), -INF),
        lambda s, t, P: s.masked_fill((s != s.masked_fill(t < P, -INF).amax()) | (t < P), -INF),
        lambda s, t, P: torch.maximum(s, s.masked_fill(t < P, -INF).amax()).masked_fill(t < P, -INF) + 0.1 * s,
    ],
    ids=["top-2", "own score", "best alone", "maximum"],
)
@pytest.mark.parametrize("shape", [(6, 4), (9, 16), (24, 33)])
def test_scores_that_are_compared_with_themselves(scores, shape):
    """The operator computes products again, rounded in another way: the best score was less than itself."""
    equal_gradients(attention(scores), *(x.clone().requires_grad_() for x in rows(3, *shape)))


@pytest.mark.deep(but=["minimum"])
@pytest.mark.parametrize(
    "scores",
    [
        lambda s, t, P: s.masked_fill(t < P, -INF).clamp(-5, 5),
        lambda s, t, P: torch.minimum(s, torch.where(t < P, -INF, 9.0)),
        lambda s, t, P: torch.maximum(s, P - 0.5 * t).masked_fill(t < P, -INF),
    ],
    ids=["clamp", "minimum", "maximum"],
)
def test_scores_whose_derivatives_write_in_place(scores):
    """They were no program, which was found in the backward pass."""
    equal_gradients(attention(scores), *(x.clone().requires_grad_() for x in rows(3, 9, 6)))


@pytest.mark.deep(but=["one key--1.7976931348623157e+308-zeros_like"])
@pytest.mark.parametrize("first", [torch.ones_like, torch.zeros_like])
@pytest.mark.parametrize("floor", [torch.finfo(torch.float64).min, -1e30])
@pytest.mark.parametrize("kept", ["no key", "one key"])
def test_an_added_mask_that_keeps_no_score(kept, floor, first):
    """All weights are the same, and a sum passes gradients on: they reach rows that are not written yet."""

    def scores(s, t, P):
        hidden = t < P
        return s + torch.where(hidden | (t % 2 == 1) if kept == "no key" else hidden, floor, torch.zeros_like(s))

    equal_gradients(attention(scores, first), *(x.clone().requires_grad_() for x in rows(3, 9, 6)))


@pytest.mark.deep(but=["-10000.0-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("floor", ["lowest", "lowest, added", -1e9, -1e4])
def test_two_sets_of_keys_of_which_none_is_kept(floor, dtype):
    """Beside 10^9 a log-sum-exp does not tell how many keys a set has: each set got all of the weights."""

    def mask(s, t, P):
        hidden = (t < P) | (t % 2 == 1)
        lowest = torch.finfo(dtype).min
        if floor == "lowest, added":
            return s + torch.where(hidden, lowest, torch.zeros_like(s))
        return s.masked_fill(hidden, lowest if floor == "lowest" else floor)

    inputs = [x.to(dtype).requires_grad_() for x in (*rows(3, 9, 6), *rows(2, 4, 6))]
    equal_gradients(attention_over_two_sets(mask), *inputs)


@pytest.mark.deep
@pytest.mark.parametrize("S", [1, 2, 9])
def test_two_sets_of_keys_whose_weights_meet_values_twice(S):
    inputs = [x.clone().requires_grad_() for x in (*rows(3, S, 6), *rows(2, 4, 6))]
    equal_gradients(attention_over_two_sets(lambda s, t, P: s.masked_fill(t < P, -INF), values=2), *inputs)


@pytest.mark.deep
def test_logits_beside_scores_that_are_made_at_each_step():
    """A score of no product, such as a sink that depends on the token, put beside the others."""

    def run(q, k, v, sink):
        P = torch.arange(len(q))

        def step(caches, row):
            t, q, k, v, sink = row
            K, V = (torch.where((t == P)[:, None], x, c) for x, c in zip((k, v), caches, strict=True))
            logits = torch.where(t % 3 == 1, -INF, (sink * 2).tanh() + t)
            weights = torch.cat([logits, (K @ q).masked_fill(t < P, -INF)]).softmax(-1)
            return (K, V), weights[2:] @ V

        return scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (P, q, k, v, sink))[1]

    inputs = [x.clone().requires_grad_() for x in (*rows(3, 9, 6), rows(9, 2))]
    equal_gradients(run, *inputs)
    assert [found.operator for found in nsa_compile.last_report().attention] == ["scored_attention"]


@pytest.mark.deep
def test_weights_of_unwritten_rows_that_lead_to_another_softmax():
    """A product with zeros in the place of rows that are not written yet was taken for scores, without the zeros."""

    def run(x, state):
        P = torch.arange(len(x))

        def step(carries, row):
            x, t = row
            cache = torch.where(t % 2 == 1, torch.where((t == P)[:, None], x, carries[0]), carries[0])
            weights = (cache * torch.tanh(x)).sum(-1).masked_fill(t < P, -INF).softmax(-1)
            y = torch.einsum("...r,...rd->...d", weights, carries[0])
            q = y.softmax(-1)
            state = carries[1] + q.unsqueeze(-1) * y.unsqueeze(-2)
            return (cache, state), (q.unsqueeze(-2) @ state).squeeze(-2)

        return scan(step, (torch.zeros(x.shape, dtype=x.dtype), state), (x, P))[1]

    equal_gradients(run, rows(5, 3).requires_grad_(), rows(3, 3).requires_grad_())


@pytest.mark.deep(but=["<lambda>1"])
@pytest.mark.parametrize("first", [torch.zeros_like, lambda x: x.new_zeros(x.shape), lambda x: torch.full_like(x, 0)])
def test_a_cache_of_zeros_like_its_rows_is_one_of_zeros(first):
    """Under a finite fill, rows that are not written yet have weights; what these meet is zero."""
    inputs = [x.clone().requires_grad_() for x in rows(3, 9, 6)]
    equal_gradients(attention(lambda s, t, P: s.masked_fill(t < P, -30.0), first), *inputs)
    assert nsa_compile.last_report().scans[0].guards_kept == []


@pytest.mark.deep(but=["max"])
@pytest.mark.parametrize("pick", [torch.max, torch.min, torch.median, torch.nanmedian])
def test_one_of_several_equal_elements(pick):
    """Eager mode shares the gradient of an extreme of all elements among equal ones, batched it went to the first."""

    def run(x):
        return scan(lambda c, row: (c, (pick(row), pick(row, -1)[0])), x.new_zeros(1), x)[1]

    equal_gradients(run, torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]], dtype=torch.float64).requires_grad_())


def test_circular_padding_in_a_step():
    """It is made of an empty tensor and writes to views of it, which were dropped: memory as it was came out."""

    def run(x):
        return scan(lambda c, row: (c, F.pad(row[None], (2, 1), mode="circular")[0]), x.new_zeros(1), x)[1]

    equal_gradients(run, rows(3, 2, 4).requires_grad_())


def test_rolling_a_number():
    """torch.vmap rolled the steps."""
    equal_gradients(lambda x: scan(lambda c, row: (c, row.roll(1) * x), x.new_zeros(1), x)[1], rows(3).requires_grad_())


@pytest.mark.deep(but=["aot_eager"])
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
def test_the_derivative_of_rrelu_is_the_noise_that_it_draws(nested):
    """In a graph made functional it was memory that nobody had written to."""
    mean = torch.zeros(3, dtype=torch.float64)

    def run(x):
        _, y = scan(lambda c, row: (c + row, c * 2 + row), torch.zeros_like(x[0]), x)
        mean.copy_(y.detach().mean(0))
        return torch.nn.functional.rrelu(y, training=True)

    results = []
    for function in (run, compiled(run, nested, fullgraph=True)):
        x = rows(5, 3).requires_grad_()
        torch.manual_seed(1)
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    torch.testing.assert_close(*results)


def test_what_a_part_that_stays_a_loop_yields_has_a_gradient():
    """It had none for the scan that takes it next, of whose results nothing but a first value is left."""

    def run(first, x):
        def overwrite(c, row):
            c = c.index_fill(0, (row > 9).sum().view(1), 2.0)
            return c, c.sum() * row

        def leave(c, token):
            row, t = token
            return torch.where(t % 2 == 1, row, c), ()

        rows_of_one = scan(overwrite, first, x)[1]
        return (scan(leave, torch.zeros_like(x[0]), (rows_of_one, torch.arange(len(x))))[0],)

    equal_gradients(run, rows(1, 2).requires_grad_(), rows(1, 2))


@pytest.mark.parametrize("outside", [True, False])
def test_gradients_asked_for_within_no_grad_around_a_checkpoint(outside):
    """The verifier let torch's own scan compute gradients, which failed."""

    def run(x, c):
        with torch.enable_grad():
            part = lambda: scan(lambda c, row: (c, row * c.sum()), c, x)[1]  # noqa: E731
            return torch.utils.checkpoint.checkpoint(part, use_reentrant=False)

    x, c = rows(3, 2), rows(2).requires_grad_()
    with torch.set_grad_enabled(outside):
        expected, actual = run(x, c), compiled(run, "eager", fullgraph=True)(x, c)
    assert actual.requires_grad
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), c) for y in (actual, expected)))


def test_a_floor_in_low_precision_meets_the_floor_of_another_mask():
    """A mask was filled with -1e9, where the scores hold what bfloat16 makes of it: what a padding bias had put to a
    floor stood out, in rows that keep nothing else."""
    keep = torch.ones(4, 4, dtype=torch.bool).tril()

    def run(k, q):
        def step(c, row):
            keys = c.clone()
            scores = keys @ row["q"] + torch.zeros(4, dtype=c.dtype).masked_fill(torch.arange(4) < 1, -1e9)
            return c, scores.masked_fill(~row["keep"], -1e9).softmax(-1) @ c

        return scan(step, k, {"q": q, "keep": keep})[1]

    k, q = rows(4, 2).bfloat16(), rows(4, 2).bfloat16()
    torch.testing.assert_close(compiled(run, "eager", fullgraph=True)(k, q), run(k, q), rtol=0.02, atol=0.02)


def test_a_cache_of_one_row_is_written_in_another_precision():
    """The row took the place of the cache, in its own dtype."""

    def run(c, x):
        def step(c, row):
            c = torch.slice_scatter(c, row.float().unsqueeze(1), 1, 0, 1)
            return c, c.sum(1)

        return scan(step, c, x)[1]

    c, x = rows(2, 1, 3).bfloat16(), rows(1, 2, 3).bfloat16()
    torch.testing.assert_close(compiled(run, "eager", fullgraph=True)(c, x), run(c, x), rtol=0, atol=0)


def test_rows_of_a_view_whose_base_was_written_to_without_gradients():
    """To take a row of it, for its layout alone, was an error of autograd."""

    def run(x):
        with torch.no_grad():
            part = x.narrow(0, 0, len(x))
            x[..., :1].expand(x.shape)[..., 0].add_(1)
            return scan(lambda c, row: (c, row * 2), torch.zeros(()), part)[1]

    x = rows(2, 2, 2).requires_grad_()
    torch.testing.assert_close(compiled(run, "eager", fullgraph=True)(x * 1), run(x * 1))


@pytest.mark.deep(but=["disabled1"])
@pytest.mark.parametrize("disabled", [(), ("raise_attention",)])
def test_attention_in_low_precision_under_autocast(disabled):
    """Its products are in float32, in the dtype of its weights, and autocast took them down once more."""

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):

            def step(c, row):
                seen = (torch.arange(4) <= row["t"]) & (torch.arange(4) > row["t"] - 2)
                y = F.scaled_dot_product_attention(row["x"].unsqueeze(-2), c, c, attn_mask=seen)
                here = (torch.arange(4) == row["t"])[:, None] & (row["t"] == 0)
                return torch.where(here, row["x"].unsqueeze(1), c), y

            return scan(step, torch.zeros(2, 4, 2), {"x": x, "t": torch.arange(4)})[1]

    x = rows(4, 2, 2).float()
    actual = nsa_compile.compile(run, nested="eager", cache=False, disable=disabled)(x)
    torch.testing.assert_close(actual, run(x), rtol=1e-2, atol=1e-2, equal_nan=True)


def test_gradients_that_are_turned_on_within():
    """Compiled where they are off, one query was left to an operator without a derivative, whose gradient was zero."""

    def run(x):
        with torch.enable_grad():
            x = x * 1

            def step(c, row):
                c = torch.where((torch.arange(1) == row["t"])[:, None], row["x"].unsqueeze(1), c)
                return c, F.scaled_dot_product_attention(row["x"].unsqueeze(1), c, c).squeeze(1)

            return scan(step, torch.zeros(2, 1, 3, dtype=x.dtype), {"x": x, "t": torch.arange(1)})[1]

    x = rows(1, 2, 3).bfloat16().requires_grad_()
    with torch.no_grad():
        actual, expected = nsa_compile.compile(run, nested="eager", cache=False)(x), run(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (actual, expected)))


@pytest.mark.deep
def test_counters_of_data_under_inductor():
    """The operator yielded a part of a longer tensor, which Inductor asserts that it does not."""

    def run(x):
        def step(c, row):
            count, mean = c
            count = count + (row.sum() > 0).to(count.dtype)
            mean = torch.maximum(mean, row)
            return (count, mean), torch.where(count > 1, row, mean)

        return scan(step, (torch.zeros((), dtype=torch.int32), x[0]), x)[1]

    x = rows(5, 3).requires_grad_()
    torch._dynamo.reset()
    actual, expected = compiled(run, "inductor", fullgraph=True)(x), run(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (actual, expected)))


@pytest.mark.deep
def test_results_are_written_to_before_gradients_under_inductor():
    """Inductor took away the copy of what attention keeps for its backward pass, where a view was between."""

    def run(x):
        def step(c, row):
            k = c.clone()
            k.narrow(1, 0, 1).copy_((row["x"] * 2).unsqueeze(1))
            scores = torch.einsum("...d,...rd->...r", row["x"], k)
            weights = torch.where(row["keep"], scores, torch.full_like(scores, -1e9)).softmax(-1).nan_to_num(0.0)
            return c, torch.einsum("...r,...rd->...d", weights, c)

        keep = torch.ones(5, 5, dtype=torch.bool).tril()
        return scan(step, torch.zeros(2, 5, 2, dtype=x.dtype), {"x": x, "keep": keep})[1]

    x = rows(5, 2, 2).requires_grad_()
    torch._dynamo.reset()
    results = compiled(run, "inductor", fullgraph=True)(x), run(x)
    for y in results:
        with torch.no_grad():
            y.add_(3)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, torch.ones_like(y).cumsum(0))[0] for y in results))


def test_two_results_of_one_step_under_inductor():
    """Two clones of one tensor came out as one: Inductor takes each away by itself."""

    def run(x, w):
        def step(c, row):
            new = (torch.tanh(row) @ w).unsqueeze(1)
            c = c.scatter(1, torch.tensor(0).expand(new.shape), new)
            return c, c.select(1, 0)

        return scan(step, torch.full((1, 1, 2), 0.5, dtype=x.dtype), x)

    x, w = rows(1, 1, 2).requires_grad_(), rows(2, 2).requires_grad_()
    torch._dynamo.reset()
    last, outputs = compiled(run, "inductor", fullgraph=True)(x, w)
    expected = run(x, w)[1].detach().clone()
    with torch.no_grad():
        last.zero_()
    torch.testing.assert_close(outputs, expected)


@pytest.mark.deep
def test_rows_that_a_view_was_taken_of_by_the_caller_under_inductor():
    """Of one step, what a step found: Inductor took away the clones, and the results were the caller's tensor."""

    def run(x, init):
        return scan(lambda c, row: (c * 0.9 + row * 0.1, c), init, x)[1]

    for grad in (True, False):
        torch._dynamo.reset()
        init = rows(4, 2)[1:-1]
        with torch.set_grad_enabled(grad):
            compiled(run, "inductor", fullgraph=True)(rows(1, 2, 2), init).zero_()
        assert bool(init.ne(0).all())


@pytest.mark.deep
def test_a_result_is_written_to_after_a_loop_read_it_under_inductor():
    """The loop, which reads a view of the other result, found what is written to that afterwards."""

    def run(x, slots, k, w):
        keep = torch.ones(5, 5, dtype=torch.bool).tril()

        def step(c, row):
            here = torch.where((torch.arange(5) == row["t"]).view(-1, 1), (row["x"] @ w).unsqueeze(1), k)
            scores = (here * row["x"].unsqueeze(-2)).sum(-1)
            scores = torch.where(torch.arange(5) <= row["t"] + 1, scores, float("-inf"))
            weights = torch.softmax(torch.cat([torch.zeros_like(scores[..., :1]), scores], -1), -1)[..., 1:]
            y = (weights.unsqueeze(-1) * here).sum(-2)
            new = torch.where(row["t"] >= 1, c.index_copy(1, row["t"].view(1), row["x"].unsqueeze(1)), c)
            scores = torch.einsum("...d,...rd->...r", y, new).masked_fill(~row["keep"], torch.finfo(x.dtype).min)
            return new, (y, torch.einsum("...r,...rd->...d", torch.softmax(scores, -1), c))

        y, z = scan(step, torch.zeros(3, 5, 1, dtype=x.dtype), {"x": x, "t": slots, "keep": keep})[1]
        y[y > 0.1] = 0.1
        return y, z

    torch._dynamo.reset()
    given = rows(5, 3, 1), torch.tensor([0, 2, 1, 1, 0]), rows(3, 5, 1), rows(1, 1).requires_grad_()
    torch.testing.assert_close(compiled(run, "inductor", fullgraph=True)(*given), run(*given))


@pytest.mark.deep
def test_rows_picked_by_a_bounded_step_number_under_inductor():
    """Inductor followed the index to the step number and failed to bound it."""

    def run(x, init):
        def step(c, row):
            c = c.clone()
            c.select(1, 0).copy_(row["x"])
            return c, c.index_select(1, (row["t"] - 1).clamp(min=0).view(1)).squeeze(1)

        t = torch.arange(4)
        new = scan(lambda c, row: (c, row["x"] / (row["t"] + 1)), x[0], {"x": x, "t": t})[1]
        return scan(step, init, {"x": new, "t": t})[1]

    torch._dynamo.reset()
    given = rows(4, 3, 2), rows(2, 3, 3).permute(2, 1, 0)
    torch.testing.assert_close(compiled(run, "inductor", fullgraph=True)(*given), run(*given))


@pytest.mark.deep(but=["eager"])
@pytest.mark.parametrize("nested", ["eager", "inductor"])
def test_copies_of_every_dtype(nested):
    """What a scan returns twice, as it got it, is two tensors of their own, bit for bit."""
    dtypes = (torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16, torch.bfloat16, torch.float64)
    given = [rows(4, 3).to(dtype) for dtype in dtypes]

    def run(*given):
        return scan(lambda c, row: (c, (*row, *row)), torch.zeros(2), given)[1]

    torch._dynamo.reset()
    results = compiled(run, nested, fullgraph=True)(*given)
    assert len({x.data_ptr() for x in (*results, *given)}) == 3 * len(dtypes)
    for x, y in zip(results, given * 2, strict=True):
        assert x.dtype == y.dtype
        assert x.contiguous().view(torch.uint8).equal(y.view(torch.uint8))


@pytest.mark.deep
def test_programs_that_differ_in_a_constant_alone_under_inductor():
    """AOTAutograd's kept programs are known by the shapes of their constants: the second took the first one's."""
    lowest = torch.finfo(torch.float32).min

    def attention(bias):
        def run(x):
            def step(c, row):
                c = torch.where((torch.arange(6) == row["t"]).view(-1, 1), row["x"], c)
                scores = (c @ row["x"] + bias).masked_fill(torch.arange(6) > row["t"], lowest)
                return c, scores.softmax(-1) @ c

            return scan(step, torch.zeros(6, D), {"x": x, "t": torch.arange(6)})[1]

        return run

    x = rows(6, D).float()
    for value in (-torch.inf, -2.0, lowest):
        torch._dynamo.reset()
        run = attention(torch.tensor([value, value, 0.0, 0.0, 0.0, 0.0]))
        torch.testing.assert_close(compiled(run, "inductor", fullgraph=True)(x), run(x), equal_nan=True)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("number", "shape"), [(torch.int64, ()), (torch.int64, (1,)), (torch.float64, ())], ids=str)
def test_a_number_of_another_dtype_beside_half_precision(dtype, number, shape):
    """It was rounded to half precision. Eager mode rounds some, and multiplies and divides by others as they are."""

    def run(m, n):
        def step(c, row):
            x, n = row
            scaled = x * n, x / n, x * 2049.3, x / 2049.3
            return c, (*scaled, n * x, n / x, x + n, n - x, torch.where(x > 3, x, n), torch.maximum(x, n), x > n)

        return scan(step, torch.zeros(2), (m, n))[1]

    m, n = (rows(3, 4) + 3).to(dtype).requires_grad_(), torch.tensor([257, 2049, 4099]).to(number).view(3, *shape)
    results = compiled(run, "aot_eager", fullgraph=True)(m, n), run(m, n)
    assert nsa_compile.last_report().scans[0].batched
    torch.testing.assert_close(*results, rtol=0, atol=0)
    weights = [rows(3, 4).to(dtype)] * 4
    gradients = [torch.autograd.grad(found[:4], m, weights) for found in results]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("divide", [torch.floor_divide, lambda x, n: torch.div(x, n, rounding_mode="trunc")])
def test_a_quotient_in_half_precision_that_is_cut_off(divide):
    """257 was 256, and the quotient another integer."""
    x, n = torch.tensor([254.0, 257.0, 512.0, 3.0], dtype=torch.bfloat16), torch.tensor([257, 513])

    def run(x, n):
        return scan(lambda c, row: (c, (divide(x, row), divide(x, row.view(1)))), torch.zeros(2), n)[1]

    torch.testing.assert_close(compiled(run, fullgraph=True)(x, n), run(x, n), rtol=0, atol=0)


def test_an_exponent_in_double_precision_beside_half_precision():
    """It was rounded, and less 1 it was another one in the gradient."""

    def run(x, n):
        return (scan(lambda c, row: (c, row[0] ** row[1]), torch.zeros(2), (x, n))[1],)

    x = (rows(3, 4).abs() * 300 + 200).to(torch.bfloat16).requires_grad_()
    equal_gradients(run, x, torch.tensor([1.0038, 1.0, 0.5], dtype=torch.float64))


def test_a_decay_that_is_rounded_to_the_precision_of_its_state():
    """The parallel form multiplied by the decay as it is kept, and eager mode rounds a first factor."""
    x, decay = torch.zeros(8, 3, dtype=torch.bfloat16), torch.full((8,), 0.9982)

    def run(x, decay):
        def step(c, row):
            c = row[1] * (c + row[0])
            return c, c

        return scan(step, torch.ones(3, dtype=x.dtype), (x, decay))[1]

    found = compiled(run, fullgraph=True)(x, decay)
    assert nsa_compile.last_report().scans[0].recurrences[0].form == "a running sum"
    torch.testing.assert_close(found, run(x, decay), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_a_lookup_whose_gradient_is_of_its_own_kind(options):
    """The indices of all steps were counted together, where each step counts its own."""

    def run(weights, index):
        return scan(lambda c, i: (c, F.embedding(i, weights, **options)), torch.zeros(2), index)[1]

    weights, index = rows(3, D).requires_grad_(), torch.tensor([[0, 1], [0, 0], [2, 0]])
    gradients = []
    for function in (run, compiled(run, "aot_eager", fullgraph=True)):
        (gradient,) = torch.autograd.grad(function(weights, index).sum(), weights)
        gradients.append(gradient.to_dense())
    torch.testing.assert_close(*gradients)


def test_ldexp_by_negative_integers():
    """torch.vmap takes it apart, and eager mode's own gradient, which is zero there, was lost."""

    def run(x, n):
        return scan(lambda c, row: (c, (torch.ldexp(*row), torch.ldexp(row[0], row[1].view(1)))), x[0], (x, n))[1]

    equal_gradients(run, rows(3, D).requires_grad_(), torch.tensor([-4, -3, 1]), nested="aot_eager")


@pytest.mark.deep(but=["0.5-<lambda>2"])
@pytest.mark.parametrize("pick", [lambda k, i: k[i], lambda k, i: k.index_select(0, i), lambda k, i: k.T[:, i].T])
@pytest.mark.parametrize("first", [0.0, 0.5])
def test_rows_that_one_head_picks_by_an_index(pick, first):
    """A product with a vector has a dimension less, which what was noted of its columns did not."""

    def run(q, k, v):
        positions = torch.arange(len(q))

        def step(c, row):
            t, q, k, v = row
            here = (positions == t).view(-1, 1)
            keys, values = torch.where(here, k, c[0]), torch.where(here, v, c[1])
            best = (keys @ q).masked_fill(positions > t, -1e9).topk(2)[1]
            return (keys, values), (pick(keys, best) @ q).softmax(-1) @ pick(values, best)

        init = torch.full_like(k, first), torch.full_like(v, first)
        return (scan(step, init, (positions, q, k, v))[1],)

    equal_gradients(run, *(rows(3, 6, 4)[i].requires_grad_() for i in range(3)))
    assert nsa_compile.last_report().scans[0].batched


@pytest.mark.deep
def test_a_norm_of_the_rows_that_heads_pick():
    """The guard of picked rows took its device from what follows them, which was no single tensor."""

    def run(q, k):
        positions = torch.arange(len(q))

        def step(keys, row):
            t, q, k = row
            keys = torch.where((positions == t).view(-1, 1), k, keys)
            best = (q @ keys.T).masked_fill(positions > t, -torch.inf).topk(2, -1)[1]
            scores = torch.einsum("hd,hkd->hk", q, F.layer_norm(keys[best], (4,)))
            return keys, torch.einsum("hk,hkd->hd", scores.masked_fill(best > t, -torch.inf).softmax(-1), keys[best])

        return (scan(step, torch.zeros_like(k), (positions, q, k))[1],)

    equal_gradients(run, rows(6, 3, 4).requires_grad_(), rows(6, 4).requires_grad_())
    assert nsa_compile.last_report().scans[0].batched


@pytest.mark.deep(but=["is_attention"])
@pytest.mark.parametrize("where", ["analyse", "record_of", "is_attention", "scan_results"])
def test_a_ring_that_cannot_be_unrolled_for_a_reason_unforeseen(where, monkeypatch):
    """Whatever goes wrong there is a note in the report, and the step is the one that it was."""
    original, calls = getattr(unroll_buffers, where), []

    def fails(*args, **kwargs):
        calls.append(where)
        if where == "scan_results" and len(calls) == 1:  # the scan has been changed at the second
            return original(*args, **kwargs)
        raise RuntimeError("unforeseen")

    def run(q, k):
        def step(ring, row):
            t, q, k = row
            slots = torch.arange(3)
            ring = torch.where((slots == t % 3).view(-1, 1), k, ring)
            return ring, (ring @ q).masked_fill(slots > t, -torch.inf).softmax(-1) @ ring

        return scan(step, k.new_zeros(3, D), (torch.arange(len(q)), q, k))

    monkeypatch.setattr(unroll_buffers, where, fails)
    equal_gradients(run, rows(6, D).requires_grad_(), rows(6, D).requires_grad_())
    (entry,) = (p for p in nsa_compile.last_report().passes if p.name == "unroll_buffers")
    assert calls
    assert entry.declines[0].reason.endswith("unforeseen")
    assert not entry.changed


@pytest.mark.deep(but=["{'mode': 'sum', 'sparse': True}"])
@pytest.mark.parametrize("options", [{}, {"mode": "max"}, {"mode": "sum", "sparse": True}], ids=str)
def test_bags_of_embeddings(options):
    """Below autograd, torch takes an operator for them that has no gradient."""

    def run(weights, index):
        return scan(lambda c, i: (c, F.embedding_bag(i, weights, **options)), torch.zeros(2), index)[1]

    weights, index = rows(4, D).requires_grad_(), torch.tensor([[[0, 1]], [[0, 0]], [[3, 2]]])
    results = []
    for function in (run, compiled(run, "aot_eager", fullgraph=True)):
        y = function(weights, index)
        (gradient,) = torch.autograd.grad((y * rows(*y.shape)).sum(), weights)
        results.append((y, gradient.to_dense()))
    torch.testing.assert_close(*results)


def test_conjugates_that_are_views():
    """They were copied as pairs of real numbers, which a view does not have: torch wrote to the log, or it crashed."""

    def run(z):
        return scan(lambda c, row: (c * 0.5 + row, (row.conj(), row, c.conj())), z[0], z)

    def given(z):
        return scan(lambda c, row: (c, (row, row)), z[0], z.conj())

    z = torch.complex(rows(3, D), rows(3, D) + 1)
    for function in (run, given):
        torch._dynamo.reset()
        found = compiled(function, "aot_eager", fullgraph=True)(z)
        assert nsa_compile.last_report().scans[0].batched
        torch.testing.assert_close(found, function(z))


@pytest.mark.parametrize(
    ("function", "way_out"),
    [(lambda x: F.one_hot(x.long()), "give it num_classes"), (torch.combinations, "torch.arange(n)")],
    ids=["one_hot", "combinations"],
)
def test_the_way_out_of_a_function_whose_result_has_any_length(function, way_out):
    """It was said that the step reads a number, as `k[t]` does."""

    def run(x):
        return scan(lambda c, row: (c, function(row)), x[0], x)[1]

    with pytest.raises(ScanRefused) as refusal:
        compiled(run, fullgraph=True)(rows(3, 4).abs())
    assert way_out in str(refusal.value)
    assert "k[t]" not in str(refusal.value)


def test_the_place_of_carries_that_are_computed_from_one_another():
    """A carry itself comes from no line, and the place was unknown."""

    def run(x):
        def step(c, row):
            new = c["a"] * c["b"].tanh() + row  # the line that is named
            return {"a": new, "b": new.sin() * c["b"]}, new

        return scan(step, {"a": x[0], "b": x[1]}, x)[1]

    compiled(run, fullgraph=True)(rows(3, D))
    (decline,) = nsa_compile.last_report().scans[0].declines
    file, line = decline.location.rsplit(":", 1)
    assert "computed from one another" in decline.reason
    assert "the line that is named" in Path(file).read_text().splitlines()[int(line) - 1]


@pytest.mark.deep(but=["<lambda>0", "<lambda>2"])
@pytest.mark.parametrize("write", [lambda x, w: x.T[None], lambda x, w: (x @ w).T[None], lambda x, w: w.T[None] * 1])
def test_a_norm_of_groups_that_lie_apart(write):
    """Its kernel takes one layout alone, and the copy into it was left out."""

    def run(x, w):
        return (scan(lambda c, row: (c, F.group_norm(write(row, w), 2)), x[0, 0], x)[1],)

    equal_gradients(run, rows(3, 4, 4).requires_grad_(), rows(4, 4).requires_grad_())


def test_a_counter_of_16_bits_is_rounded_under_inductor():
    """It stays at 256, where Inductor counted on in float32."""

    def run(x):
        def step(n, row):
            n = n + 1
            return n, row / n

        return scan(step, torch.tensor(252, dtype=torch.bfloat16), x)

    torch._dynamo.reset()
    x = torch.full((10,), 256.0, dtype=torch.double)
    for a, b in zip(compiled(run, "inductor", fullgraph=True)(x), run(x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.deep
def test_a_bias_by_distance_over_all_keys_where_each_step_has_its_cache():
    """An operator of one query at a time was given an element for each distance of all of them."""

    def run(q, k, v, bias):
        S = len(q)

        def step(c, row):
            t, q, k, v = row
            p = torch.arange(S)
            K, V = torch.where((p == t)[:, None], k, c[0]), torch.where((p == t)[:, None], v, c[1])
            return (K, V), (K @ q + bias[(t - p).clamp(-3, 3) + 3]).softmax(-1) @ V

        return scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (torch.arange(S), q, k, v))[1]

    torch._dynamo.reset()
    given = (*rows(3, 9, 4).unbind(), rows(7))
    torch.testing.assert_close(compiled(run, "eager", fullgraph=True)(*given), run(*given))
    assert nsa_compile.last_report().scans[0].batched


def write_unseen(x):
    with torch.no_grad():
        x.clamp_(-1, 1)


def halve(x):
    with torch.no_grad():
        x[0] = 0.5


@pytest.mark.deep(but=["aot_eager-data"])
@pytest.mark.parametrize(
    "write",
    [
        write_unseen,
        halve,
        lambda x: x.detach().mul_(2),
        lambda x: x.data.mul_(2),
        torch.nn.init.zeros_,
        lambda x: F.relu(x.detach(), inplace=True),
        lambda x: F.embedding(torch.tensor([0]), x.view(1, -1), max_norm=0.5),
    ],
    ids=["no_grad", "an element", "detach", "data", "init", "relu", "embedding"],
)
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
def test_a_write_of_a_step_that_autograd_does_not_see(write, nested):
    """What was written took the place of what had the gradient: it was lost, without a word."""

    def run(x):
        def step(c, row):
            y = c * 0.5 + row
            write(y)
            return y, y * 1

        return scan(step, torch.zeros_like(x[0]), x)

    equal_gradients(run, rows(4, 3).requires_grad_(), nested=nested)


def test_a_write_of_a_step_to_what_no_gradient_reaches():
    """A near miss: it is batched."""

    def run(x):
        def step(c, row):
            with torch.no_grad():
                mask = row * 3
                mask.clamp_(0, 1)
            z = torch.full_like(c, 0.5)
            z.narrow(0, 0, 1).copy_(row[:1])
            return c * mask + row, c * z

        return scan(step, torch.zeros_like(x[0]), x)

    equal_gradients(run, rows(4, 3).requires_grad_())
    assert nsa_compile.last_report().scans[0].batched


E8 = torch.float8_e4m3fn
ROUNDED = {  # a step of a carry, and the dtypes of carry, first and second input
    "eight bits": (lambda c, a, b: (c * 0.5 + a).to(E8).to(c.dtype), torch.float64),
    "bfloat16": (lambda c, a, b: (c * 0.5 + a).bfloat16().to(c.dtype), torch.float64),
    "half, infinite": (lambda c, a, b: (c * 0.5 + a * 1e5).half().to(c.dtype), torch.float64),
    "extreme": (lambda c, a, b: torch.maximum(c.to(E8).to(c.dtype), a), torch.float64),
    "uint8": (lambda c, a, b: c.to(torch.uint8).long() + a + 200, torch.int64),
    "int32": (lambda c, a, b: c.int().long() * 3 + a * 10**8, torch.int64),
    "sum": (lambda c, a, b: c.sum(1, keepdim=True, dtype=torch.int8).long() + a + 100, torch.int64),
    "mean": (lambda c, a, b: c.mean(1, keepdim=True, dtype=torch.bfloat16).to(c.dtype) * 0.5 + a, torch.float64),
}
MIXED = {
    "sum of conditions": (lambda c, a, b: c + b + b, torch.float64, torch.float64, torch.bool),
    "factors of conditions": (lambda c, a, b: c * b + c * (b | ~b) + a, torch.float64, torch.float64, torch.bool),
    "number and condition": (lambda c, a, b: a + 0.9 * c * b, torch.float64, torch.float64, torch.bool),
    "numbers chosen": (
        lambda c, a, b: 0.3 * c * torch.where(b, 0.9, 0.1) + a,
        torch.float64,
        torch.float64,
        torch.bool,
    ),
    "product of bytes": (lambda c, a, b: c * b * b / 1e4 + a, torch.float64, torch.float64, torch.uint8),
    "difference of a byte": (lambda c, a, b: c - b, torch.float64, torch.float64, torch.uint8),
    "sum of bytes": (lambda c, a, b: a - c - b - b, torch.float64, torch.float64, torch.uint8),
    "quotient of integers": (lambda c, a, b: (c + b) / 3 / (b + 3), torch.float64, torch.float64, torch.int64),
    "bytes, to a maximum": (lambda c, a, b: torch.maximum(c + b + b, a), torch.float64, torch.float64, torch.uint8),
    "bytes, to a minimum": (lambda c, a, b: torch.minimum(c - b, a), torch.float64, torch.float64, torch.uint8),
    "integers": (lambda c, a, b: c + b * 10**9 + b * 10**9, torch.int64, torch.int64, torch.int32),
    "single precision": (lambda c, a, b: c * 0.7 * b + b + b, torch.float64, torch.float64, torch.float32),
    "half precision": (lambda c, a, b: c * 0.5 + b * 2e4 + b * 2e4, torch.float64, torch.float64, torch.bfloat16),
    "complex": (lambda c, a, b: (0.3 + 0.4j) * c * b + a, torch.complex128, torch.float64, torch.float32),
}


def drawn(dtype, seed):
    if dtype.is_floating_point:
        return torch.randn(5, 4, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 101, (5, 4, 1)).to(dtype)


def carried(step, dtype, a, b):
    x, beside = drawn(a, 0).requires_grad_(a.is_floating_point), drawn(b, 1)

    def run(x, beside):
        return scan(lambda c, row: (step(c, *row),) * 2, torch.ones(4, 1, dtype=dtype), (x, beside))

    found = []
    for function in (run, compiled(run, fullgraph=True)):
        y = function(x, beside)
        grad = torch.autograd.grad(y[1].abs().double().sin().sum(), x) if y[1].requires_grad else None
        found.append((y, grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.deep(but=["uint8"])
@pytest.mark.parametrize(("step", "dtype"), ROUNDED.values(), ids=ROUNDED)
def test_a_state_is_rounded_at_each_step(step, dtype):
    """Casts were left out of recurrences: a state that is rounded to less than it is kept in was not."""
    carried(step, dtype, dtype, dtype)


@pytest.mark.deep(but=["complex"])
@pytest.mark.parametrize(("step", "dtype", "a", "b"), MIXED.values(), ids=MIXED)
def test_a_state_beside_other_dtypes(step, dtype, a, b):
    """What stands beside a state was added and multiplied in its own dtype: True and True were True, bytes began at 0
    again, and numbers in float32."""
    carried(step, dtype, a, b)
    assert nsa_compile.last_report().scans[0].batched


@pytest.mark.parametrize("first", [float("nan"), -float("inf")])
def test_a_first_state_that_is_not_finite(first):
    """It was multiplied with zero where a condition replaces it, and stayed NaN for ever."""

    def run(x, seen):
        return scan(lambda c, row: (torch.where(row[1], row[0], c),) * 2, torch.full((D,), first), (x.float(), seen))

    x = rows(5, D)
    torch.testing.assert_close(compiled(run, fullgraph=True)(x, x > 0), run(x, x > 0), equal_nan=True)


@pytest.mark.deep(but=["dtype4"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, E8, torch.float8_e5m2])
def test_a_carry_of_a_dtype_that_torch_does_not_compare(dtype):
    def run(x):
        return scan(lambda c, row: (row, c.float()), torch.zeros((), dtype=dtype), x)

    x = torch.arange(6).to(dtype)
    for a, b in zip(compiled(run, fullgraph=True)(x), run(x), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float())


@pytest.mark.deep(but=["True-weights"])
@pytest.mark.parametrize(
    ("scores", "weights"),
    [(lambda s: s, lambda w: w.to(E8).to(w.dtype)), (lambda s: s.to(E8).to(s.dtype), lambda w: w)],
    ids=["weights", "scores"],
)
@pytest.mark.parametrize("cap", [False, True])
def test_attention_with_eight_bits_on_the_way(scores, weights, cap):
    """Such a cast is there to round, as in training for quantization; it was left out as those to half precision."""

    def run(x):
        at = torch.arange(len(x))

        def step(c, row):
            t, row = row
            k = torch.where((at == t)[:, None], row, c)
            s = scores(k @ row)
            s = 3 * s.tanh() if cap else s
            return k, weights(s.masked_fill(at > t, -torch.inf).softmax(0)) @ k

        return scan(step, torch.zeros_like(x), (at, x))[1].unsqueeze(0)

    equal_gradients(run, rows(5, 4).requires_grad_())


def test_gradients_of_a_step_without_autocast_under_it():
    """A loop's backward step computed products in bfloat16, though those of the step are in float32."""

    def run(x, w):
        def step(c, row):
            with torch.autocast("cpu", enabled=False):
                y = (c @ w + row).tanh()
            return y, y

        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (scan(step, x[0] * 0, x)[1],)

    equal_gradients(run, rows(5, 4).float().requires_grad_(), rows(4, 4).float().requires_grad_())


def test_an_analysis_that_fails_leaves_the_softmax_alone(monkeypatch):
    """Whatever it meets that nobody thought of: the scan is compiled without it."""

    def fails(*_):
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(raise_attention, "walk_up", fails)
    monkeypatch.setattr(raise_attention, "key_sets", fails)

    def run(x):
        at = torch.arange(len(x))

        def step(c, row):
            k = torch.where((at == row[0])[:, None], row[1], c)
            return k, (k @ row[1]).masked_fill(at > row[0], -torch.inf).softmax(0) @ k

        return (scan(step, torch.zeros_like(x), (at, x))[1],)

    equal_gradients(run, rows(4, 3).requires_grad_())
    report = nsa_compile.last_report()
    assert report.scans[0].batched
    assert any("it cannot be analysed: unforeseen" in d.reason for p in report.passes for d in p.declines)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


@pytest.mark.deep(but=["dtype1-eager"])
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_derivative_of_ones_own_of_a_carry_that_starts_without_gradient(nested, dtype):
    """Dynamo left it out, as if the carry never had a gradient."""

    def run(x):
        def step(c, row):
            new = Reversed.apply(c) * 0.5 + row
            return new, new * 1

        return tuple(y.abs() for y in scan(step, torch.zeros(3, dtype=dtype), x))

    equal_gradients(run, rows(5, 3).requires_grad_(), nested=nested)


@pytest.mark.deep(but=["gather"])
@pytest.mark.parametrize(
    "pick", [lambda k, at: k.index_select(1, at), lambda k, at: k.gather(1, at[None])], ids=["index_select", "gather"]
)
def test_features_picked_by_data_of_a_single_row(pick):
    """What agrees for all elements is kept once; the one step of all features was read at the numbers picked."""

    def run(x):
        def step(c, row):
            t, x, chosen = row
            k = torch.where((torch.arange(1) == t)[:, None], x, c)
            return k, pick(k, chosen)

        return scan(step, torch.zeros_like(x), (torch.arange(1), x, x.argsort(1)))

    equal_gradients(run, rows(1, 3).requires_grad_(), nested="aot_eager")


@pytest.mark.deep(but=["two-True"])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda c, u: c[-3:-2].copy_(u),
        lambda c, u: c[-3:-2].add_(u),
        lambda c, u: c[-3:-2, -2:-1].copy_(u[:1]),
    ],
    ids=["copy", "add", "two"],
)
def test_a_write_to_a_row_counted_from_behind(write, fresh):
    """torch.vmap made an index of both ends, and did not count it from behind."""

    def run(x, kept):
        def step(state, u):
            c = torch.zeros(4, D, dtype=x.dtype) if fresh else state.clone()
            write(c, u)
            return state, c

        return scan(step, kept, x)[1]

    equal_gradients(run, rows(5, D).requires_grad_(), rows(4, D).requires_grad_())


@pytest.mark.deep(but=["detached"])
@pytest.mark.parametrize("read", ["compared", "detached", "added"])
def test_values_of_a_ranking_that_are_only_compared(read):
    """Gradients reach no block whose rows are not all written through a comparison; through a sum they do."""

    def run(x, queries):
        positions, blocks = torch.arange(8), torch.arange(4)

        def step(cache, row):
            t, key, q = row
            cache = torch.where((positions == t)[:, None], key, cache)
            scores = cache.unflatten(0, (4, 2)).mean(1) @ q
            scores = scores.masked_fill(blocks > t // 2, -INF).masked_fill(blocks == t // 2, INF)
            best, index = (scores.detach() if read == "detached" else scores).sort(descending=True, stable=True)
            chosen = torch.zeros(4, dtype=torch.bool).scatter(0, index[:2], best[:2] > -INF)
            kept = chosen.repeat_interleave(2) & (positions <= t)
            y = (cache @ q).masked_fill(~kept, -INF).softmax(0) @ cache
            return cache, y + torch.where(best.isfinite(), best, 0.0).sum() if read == "added" else y

        return scan(step, torch.zeros(8, D, dtype=x.dtype), (positions, x, queries))[1]

    equal_gradients(run, *(r.requires_grad_() for r in rows(2, 8, D).unbind()))
    if read != "added":
        assert nsa_compile.last_report().scans[0].guards_kept == []


@pytest.mark.deep(but=["-10000.0-8"])
@pytest.mark.parametrize("batch", [3, 8])
@pytest.mark.parametrize("fill", [-INF, -1e4])
def test_a_mask_that_is_made_with_as_many_sequences_as_steps(batch, fill):
    """Known numbers at each step, with a dimension that only the numbers that are chosen have."""

    def run(x):
        positions = torch.arange(8)

        def step(cache, row):
            t, row = row
            cache = torch.where((positions == t)[:, None], row[:, None], cache)
            scores = (cache @ row[..., None])[..., 0]
            scores = scores + torch.zeros_like(scores).masked_fill(positions > t, fill)
            return cache, scores.softmax(-1)[:, None] @ cache

        return scan(step, torch.zeros(batch, 8, D, dtype=x.dtype), (positions, x))[1]

    equal_gradients(run, rows(8, batch, D).requires_grad_())


def test_what_torch_fails_to_map_over_steps_is_declined_in_words():
    def run(x):
        def step(c, row):
            t, row = row
            return c + row.sum(), row + torch.zeros_like(row).index_fill(-1, t.view(1), 1.0)

        return scan(step, torch.zeros((), dtype=x.dtype), (torch.arange(D), x))[1:]

    equal_gradients(run, rows(D, D).requires_grad_())
    reasons = [d.reason for p in nsa_compile.last_report().passes for d in p.declines]
    assert "aten.index_fill.int_Scalar cannot be batched over steps: torch fails in its own code" in reasons


def _hook_on_the_final_carry(x, w):
    c, ys = scan(lambda c, row: ((c := c * 0.5 + row * w), c * 3), x[0] * 0, x)
    c.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return c, ys


def _hook_on_what_all_steps_read(x, w):
    w = w * 1

    def step(c, row):
        w.register_hook(lambda gradient: gradient * 2)
        c = c * 0.5 + row * w
        return c, c * 3

    return scan(step, x[0] * 0, x)


@pytest.mark.parametrize(
    ("program", "way_out"),
    [
        (_hook_on_the_final_carry, r"on a copy, x = x.clone\(\)"),
        (_hook_on_what_all_steps_read, "once, before the scan"),
    ],
)
def test_a_hook_on_what_other_steps_read_is_refused(program, way_out):
    """It would be given the gradient of one step, or of the last carry alone, where the loop's is that of all."""
    x, w = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    with pytest.raises(Exception, match=f"a hook .*; register it {way_out}"):
        nsa_compile.compile(program, nested="eager", cache=False)(x, w)


def test_a_maximum_of_integers_that_wrap_around():
    """`max(c + y, x)` of these is not the largest of all sums."""

    def run(x, y):
        return scan(lambda c, row: (torch.maximum(c + row[1], row[0]), c), torch.zeros(1, dtype=x.dtype), (x, y))

    x = torch.tensor([[-100], [-128], [-128]], dtype=torch.int8).repeat(4, 1)
    y = torch.tensor([[100], [100], [0]], dtype=torch.int8).repeat(4, 1)
    for found, expected in zip(nsa_compile.compile(run, nested="eager", cache=False)(x, y), run(x, y), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda t, x: torch.full((3,), t) // 2, "it fills a tensor"),  # of floats, to Dynamo
        (lambda t, x: torch.full((3,), fill_value=t > 2), "it fills a tensor"),
        (lambda t, x: torch.full_like(x, t), "it fills a tensor"),
        (lambda t, x: x.new_full((3,), t), "it fills a tensor"),
        (lambda t, x: torch.bincount(x.argsort(), minlength=4), "it calls bincount"),
        (lambda t, x: (x * 2).register_hook(lambda gradient: gradient).remove() or x, "it removes a hook"),
        (lambda t, x: sum((x for _ in range(t)), x), "it reads a number out of a tensor"),
        (lambda t, x: torch.roll(x, t, 0), "it reads a number out of a tensor"),
        (lambda t, x: torch.ones(3, 3).tril(t) @ x, "it reads a number out of a tensor"),
    ],
)
def test_what_no_step_can_do_is_refused(make, reason):
    def run(x):
        return scan(lambda c, row: (c, make(*row)), torch.zeros(1), (torch.arange(4), x))[1]

    with pytest.raises(Exception, match=reason):
        nsa_compile.compile(run, nested="eager", cache=False)(torch.randn(4, 3, requires_grad=True))


def test_a_tensor_filled_with_a_float():
    def run(x):
        return scan(lambda c, row: (c, torch.full((3,), row) * torch.full((3,), 2)), torch.zeros(1), x)[1]

    x = torch.randn(4)
    torch.testing.assert_close(nsa_compile.compile(run, nested="eager", cache=False)(x), run(x))


@pytest.mark.deep(but=["positions"])
@pytest.mark.parametrize("mask", ["flags", "bias", "positions"])
def test_masks_that_grow_in_a_carry_are_known_in_long_sequences(mask):
    steps, positions = 320, torch.arange(320)
    first = {
        "flags": torch.zeros(steps, dtype=torch.bool),
        "bias": torch.full((steps,), -torch.inf),
        "positions": torch.full((steps,), steps),
    }[mask]

    def run(x):
        def step(carry, row):
            (seen, cache), (t, x) = carry, row
            at = positions == t
            seen = {"flags": lambda: seen | at, "bias": lambda: torch.where(at, 0.0, seen),
                    "positions": lambda: torch.where(at, t, seen)}[mask]()  # fmt: skip
            cache = torch.where(at[:, None], x, cache)
            hidden = {"flags": lambda: ~seen, "bias": lambda: seen < 0, "positions": lambda: seen > t}[mask]()
            return (seen, cache), (cache @ x).masked_fill(hidden, -torch.inf).softmax(-1) @ cache

        (_, cache), y = scan(step, (first, torch.zeros_like(x)), (positions, x))
        return cache, y

    equal_gradients(run, torch.randn(steps, 4, dtype=torch.float64, requires_grad=True))
    assert [choice.operator for choice in nsa_compile.last_report().attention] == ["window_attention"]


@pytest.mark.deep(but=["dtype1--1"])
@pytest.mark.parametrize(("dtype", "number"), [(torch.uint8, 300), (torch.uint8, -1), (torch.int8, 200)])
def test_a_state_of_bytes_and_a_number_that_is_none(dtype, number):
    def run(x):
        def step(c, row):
            c = c * (row + 1) + number
            return c, (row.double() * 0.1).tanh() @ torch.ones(D, D, dtype=torch.float64) + c

        return scan(step, torch.zeros(4, D, dtype=dtype), x)

    x = torch.arange(20 * 4 * D).reshape(20, 4, D).to(dtype)
    torch.testing.assert_close(compiled(run, fullgraph=True)(x), run(x))
    assert [r.form for r in nsa_compile.last_report().scans[0].recurrences] == ["a running sum"]


# What a step makes of the weights of a query that keeps no key; of some readers nothing of the NaN is left but in rows
# that are not written yet.
READERS = {
    "itself": lambda w, k, row, m, now: w,
    "how many are NaN": lambda w, k, row, m, now: w.isnan().sum() + 0 * row,
    "another row where all are NaN": lambda w, k, row, m, now: torch.where(w.isnan().all(), row, w.nan_to_num(0) @ k),
    "the rows backwards": lambda w, k, row, m, now: w @ k.flip(0),
    "the weights backwards": lambda w, k, row, m, now: w.flip(0) @ k,
    "the weights of the newest alone": lambda w, k, row, m, now: (w[:, None] * k)[-1],
    "the rows but the first": lambda w, k, row, m, now: w[1:] @ k[1:],
    "the rows backwards, of weights that are masked again": lambda w, k, row, m, now: (
        w.masked_fill(~now, 0) @ k.flip(0)
    ),
    "the best": lambda w, k, row, m, now: k.index_select(0, w.topk(2)[1]).sum(0),
    "the first that is zero": lambda w, k, row, m, now: k.index_select(0, (w == 0).long().argmax().view(1)).sum(0),
    "the rows but those until now": lambda w, k, row, m, now: w.masked_fill(torch.arange(len(w)) < 4, 0) @ k,
    "their logarithms": lambda w, k, row, m, now: (w + 1).log(),
    "the largest": lambda w, k, row, m, now: w.amax() * row,
    "two by two": lambda w, k, row, m, now: w.view(-1, 2).sum(1) @ k[:4],
    "zeros by their own size": lambda w, k, row, m, now: torch.where(w > 0.1, w, 0.0) @ k,
    "twice": lambda w, k, row, m, now: torch.stack([w, w * 2]).sum(0) @ k,
}
WHOLE_ROWS = {
    "values": lambda w, k, row, m, now: w @ k,
    "values by einsum": lambda w, k, row, m, now: torch.einsum("s,sd->d", w, k) * row,
    "values, halved": lambda w, k, row, m, now: (w / 2).unsqueeze(0) @ k,
    "their sum": lambda w, k, row, m, now: (w @ k) / (w.sum() + 1),
    "zeros by nan_to_num": lambda w, k, row, m, now: w.nan_to_num(0) @ k,
    "zeros by isnan": lambda w, k, row, m, now: torch.where(w.isnan(), 0, w) @ k,
    "zeros by the mask": lambda w, k, row, m, now: w.masked_fill(~(m & now), 0.0) @ k,
    "zeros by where": lambda w, k, row, m, now: torch.where(m & now, w, 0.0) @ k,
}


# How a step hides keys by what it is given: a mask that keeps nothing at the first steps, a bias of -inf, or logarithms
# of zeros, or of negative numbers, which are NaN.
HIDDEN = {
    "mask": (lambda s, m: s.masked_fill(~m, -torch.inf), lambda kept: kept),
    "bias": (lambda s, m: s + m, lambda kept: torch.where(kept, 0.0, -torch.inf).double()),
    "logarithm": (lambda s, m: s + m.log(), lambda kept: kept.double()),
    "logarithm less another": (lambda s, m: s - (1 - m).log().neg() - m.sum().log(), lambda kept: 1 - kept.double()),
    "NaN": (
        lambda s, m: s + m.log(),
        lambda kept: torch.where(kept.any(1, keepdim=True), 1.0, -1.0).expand(8, 8).double(),
    ),
}


def without_keys(read, finite, how):
    """Weights of which none is kept at the first steps, read in one way or another."""
    hide, _ = HIDDEN[how]

    def run(q, k, mask, kept):
        positions = torch.arange(len(q))

        def step(cache, row):
            t, q, k, m, kept = row
            cache = torch.where((positions == t)[:, None], k, cache)
            w = hide(cache @ q, m).masked_fill(positions > t, -torch.inf).softmax(-1)
            return cache, read(w, cache, q, kept, positions <= t)

        y = scan(step, torch.zeros_like(k), (positions, q, k, mask, kept))[1]
        return (y,) if not finite else (y, y.nan_to_num(0.5))

    return run


@pytest.mark.deep(but=["the rows backwards, of weights that are masked again-bias", "the largest-mask"])
@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("name", [*READERS, *WHOLE_ROWS])
def test_readers_of_weights_where_no_key_is_kept(name, how):
    """Weights of rows that are not written yet came out as 0, and NaN got lost in whatever looked at them alone."""
    whole = WHOLE_ROWS.get(name)
    run = without_keys(whole or READERS[name], whole is None, how)
    q, k = rows(2, 8, D)
    positions = torch.arange(8)
    kept = (positions <= positions[:, None]) & (positions >= 3)
    given = q, k, HIDDEN[how][1](kept), kept
    expected = run(*given)
    assert expected[0].isnan().any() or whole is None or "zeros" in name
    torch.testing.assert_close(compiled(run, fullgraph=True)(*given), expected, equal_nan=True)
    if whole is not None and how in ("mask", "bias"):  # and they are no copies of the cache
        assert nsa_compile.last_report().scans[0].batched
        assert not nsa_compile.last_report().scans[0].guards_kept


@pytest.mark.deep(but=["2"])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_short_buffer_that_shifts_is_made_of_slices(tmp_path, stride):
    """Rows of a short convolution's state were picked by index, and its gradient scattered: twice the time."""

    def run(x, kernel):
        def step(state, row):
            state = torch.cat([state[stride:], row])
            return state, (state * kernel).sum(0)

        return scan(step, x.new_zeros(4, D), x)[1]

    x, kernel = rows(7, stride, D).requires_grad_(), rows(4, D).requires_grad_()
    found = nsa_compile.compile(run, nested="eager", cache=False, dump_dir=str(tmp_path))
    y, expected = found(x, kernel), run(x, kernel)
    torch.testing.assert_close(y, expected)
    gradients = (torch.autograd.grad(out.square().sum(), (x, kernel)) for out in (y, expected))
    torch.testing.assert_close(*gradients)
    (batched,) = tmp_path.glob("*batch_prefill_after.py")
    assert "index_select" not in batched.read_text()


def _masked_by(fill):
    return lambda c, positions, t: torch.where((positions > t)[:, None], fill(c), c).transpose(0, 1).reshape(4, -1)


@pytest.mark.deep(but=["new_zeros-eager"])
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "read",
    [
        _masked_by(torch.zeros_like),
        _masked_by(torch.ones_like),
        _masked_by(lambda c: c.new_zeros(c.shape)),
        _masked_by(lambda c: torch.full_like(c, 2.0)),
    ],
    ids=["zeros_like", "ones_like", "new_zeros", "full_like"],
)
def test_a_constant_of_one_number_has_the_strides_that_were_traced(read, nested):
    """torch's copy of a number that is repeated lies otherwise than the number: a view of what came of it failed."""

    def run(x):
        positions = torch.arange(4)

        def step(c, row):
            t, x = row
            c = torch.where((positions == t)[None, :, None], x[:, None], c)
            return c, read(c, positions, t)

        return scan(step, x.new_zeros(2, 4, 3), (positions, x))[1]

    x = rows(4, 2, 3)
    torch.testing.assert_close(compiled(run, nested=nested)(x), run(x))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_state_that_is_rolled_lies_as_it_does(steps):
    """torch's stand-in of what `roll` yields lies otherwise than what it yields: a view of that failed."""

    def run(x, c):
        def step(c, x):
            c = c * 0.5 + x
            return c, c.permute(2, 0, 1).roll(1, 2).reshape(-1)

        return scan(step, c, x)[1]

    x, c = rows(steps, 2, 2, 3), rows(2, 2, 3)
    torch.testing.assert_close(compiled(run)(x, c), run(x, c))


@pytest.mark.deep(but=["1"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_part_of_a_carry_that_no_step_has_written_has_a_gradient_of_zeros(steps):
    """A loop within a batched step was taken to hand a gradient to all that it reads."""

    def run(q):
        def step(c, row):
            t, x = row
            c = c.clone()
            c[-1].index_copy_(0, t.view(1), c.mean((0, 1))[None])
            c[3, -1] = x
            return c, (x * 1, c[0])

        return scan(step, torch.zeros(4, len(q), 1, dtype=q.dtype), (torch.arange(len(q)), q))[1][1]

    q = rows(steps, 1).requires_grad_()
    y, expected = compiled(run)(q), run(q)
    torch.testing.assert_close(y, expected)
    gradients = (torch.autograd.grad(out.sum(), q) for out in (y, expected))
    torch.testing.assert_close(*gradients)
