"""`check="first"`: planted faults are caught and named, healthy programs pass, the user's state stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import nsa_compile
from nsa_compile.errors import Miscompiled
from nsa_compile.passes.pipeline import register
from nsa_compile.program import first_call
from nsa_compile.program.eager_loop import EagerLoop


def seeded(*shape: int, seed: int = 0, **options) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**options)


def compiled(fn, **options):
    torch._dynamo.reset()
    return nsa_compile.compile(fn, **{"check": "first", "nested": "eager", "cache": False, **options})


def told() -> str:
    return nsa_compile.last_report().first_call


# --------------------------------------------------------------------------------------------- healthy programs


def attention(x, w):
    """Causal attention over a cache: batched."""
    t, steps = torch.arange(x.shape[0]), x.shape[0]

    def step(cache, inputs):
        row, i = inputs
        cache = torch.where((torch.arange(steps) == i)[:, None], row @ w, cache)
        scores = (cache @ row).masked_fill(torch.arange(steps) > i, -1e30)
        return cache, scores.softmax(-1) @ cache

    return nsa_compile.scan(step, x.new_zeros(steps, x.shape[1]), (x, t))[1]


def root_of_last_row(y):
    """NaN in the last row, whose gradient reaches every row, compiled or not."""
    return torch.cat([y[:-1], (y[-1:] - 99).sqrt()])


def recurrent(x, w):
    """A recurrence: stays a loop."""

    def step(h, row):
        h = torch.tanh(h @ w + row)
        return h, 2 * h

    h, y = nsa_compile.scan(step, x.new_zeros(x.shape[1]), x)
    return h, y.sum(0)


def nested(x, w):
    def step(h, row):
        return nsa_compile.scan(lambda g, s: (g * s.tanh(), g), h, row)[0], h

    return nsa_compile.scan(step, x.new_ones(()), x @ w)[1]


def regions(x, w):
    y = torch.utils.checkpoint.checkpoint(attention, x, w, use_reentrant=False)
    return torch.utils.checkpoint.checkpoint(attention, y, w, use_reentrant=False)


def whole_numbers(x, w):
    def step(best, row):
        return torch.maximum(best, row.argmax()), row.argmax()

    return nsa_compile.scan(step, torch.full((), -1), x @ w)


def without_gradient(x, w):
    with torch.no_grad():
        scale = attention(x, w)
    return scale * x


def fully_masked(x, w):
    y = attention(x, w)
    return torch.full_like(y, -torch.inf).softmax(-1) + y, (y > 0) / 0.0


def mixed(x, w):
    """Names its own precision inside."""
    h = (x.float() @ w.float()).to(torch.bfloat16)
    return attention(h, torch.eye(x.shape[1], dtype=torch.bfloat16)).float()


PROGRAMS = [attention, recurrent, nested, regions, whole_numbers, without_gradient, fully_masked, mixed]


@pytest.mark.deep(but=["whole_numbers-eager"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_healthy_programs_pass(program, backend):
    fn = compiled(program, nested=backend)
    fn(seeded(7, 4).requires_grad_(), seeded(4, 4, seed=1).requires_grad_())
    assert told().startswith("equal to the loop at the first call"), told()


@pytest.mark.deep(but=["recurrent-dtype0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("program", [attention, recurrent])
def test_other_precisions_pass(program, dtype):
    fn = compiled(program)
    fn(seeded(9, 4, dtype=dtype).requires_grad_(), seeded(4, 4, seed=1, dtype=dtype).requires_grad_())
    assert told().startswith("equal to the loop"), told()


@pytest.mark.deep(but=["recurrent-inference_mode"])
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
@pytest.mark.parametrize("program", [attention, recurrent])
def test_modes_around_the_call_pass(program, mode):
    fn = compiled(program)
    x, w = seeded(9, 4).requires_grad_(), seeded(4, 4, seed=1).requires_grad_()
    with mode():
        fn(x, w)
    assert told().startswith("equal to the loop"), told()


@pytest.mark.deep
def test_the_torch_compile_option_is_the_same():
    torch._dynamo.reset()
    options = {"check": "first", "nested": "eager", "cache": False}
    torch.compile(attention, backend="nsa_compile", options=options)(seeded(5, 4), seeded(4, 4))
    assert told().startswith("equal to the loop")


@pytest.mark.deep
def test_each_shape_is_compared_once(monkeypatch):
    calls = []
    healthy = first_call.compare
    monkeypatch.setattr(first_call, "compare", lambda *args: calls.append(1) or healthy(*args))
    fn, w = compiled(attention), seeded(4, 4)
    for steps in (5, 5, 6, 5, 6):
        fn(seeded(steps, 4), w)
    assert len(calls) == 2


@pytest.mark.deep(but=["4"])
@pytest.mark.parametrize("jitters", [4, 0])
def test_rounding_that_turns_a_choice_around_is_no_fault(monkeypatch, jitters):
    """A sum that is its threshold: the loop decides one way, and what adds in another order the other."""

    @register("reorder")
    def reorder(gm: fx.GraphModule, context) -> bool:
        """Be off by a rounding."""
        (scores,) = gm.graph.find_nodes(op="call_method", target="sum")
        with gm.graph.inserting_after(scores):
            new = gm.graph.call_function(torch.mul, (scores, 1 + 2**-22))
        new.meta = dict(scores.meta)
        scores.replace_all_uses_with(new)
        new.args = (scores, *new.args[1:])
        gm.recompile()
        return True

    def program(x, w):
        chosen = torch.where((x.sum(-1) > 1.125)[:, None], x, -x)
        return nsa_compile.scan(lambda h, row: (h, row @ w), x.new_zeros(1), chosen)[1]

    monkeypatch.setattr(first_call, "JITTERS", jitters)
    x = seeded(6, 4)
    x[2] = torch.tensor([0.375, 0.375, 0.25, 0.125])
    try:
        if not jitters:
            with pytest.raises(Miscompiled, match="pass reorder"):
                compiled(program)(x, seeded(4, 4, seed=1))
            return
        compiled(program)(x, seeded(4, 4, seed=1))
    finally:
        reorder.unregister()
    assert told().startswith("equal to the loop")


# ------------------------------------------------------------------------------------------------ planted faults


@pytest.fixture
def planted(request):
    """`planted(name, change)` registers a pass that puts `change(graph, node)` behind the first output."""

    def plant(name: str, change) -> None:
        @register(name)
        def fault(gm: fx.GraphModule, context) -> bool:
            """Change the first output."""
            output = gm.graph.output_node()
            values = list(output.args[0])
            with gm.graph.inserting_before(output):
                new = change(gm.graph, values[0])
            new.meta = dict(values[0].meta)
            output.args = ((new, *values[1:]),)
            gm.recompile()
            return True

        request.addfinalizer(fault.unregister)

    return plant


class Half(torch.autograd.Function):
    """The same value, and half the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def half(x):
    return Half.apply(x)


FAULTS = {
    "scales": lambda graph, y: graph.call_function(torch.mul, (y, 1.0001)),
    "transposes": lambda graph, y: graph.call_method("clone", (graph.call_method("t", (y,)),)),
    "detaches": lambda graph, y: graph.call_method("detach", (y,)),
    "loses_nan": lambda graph, y: graph.call_method("nan_to_num", (y,)),
    "shifts": lambda graph, y: graph.call_method("roll", (y, 1, 0)),
}


@pytest.mark.deep(but=["shifts-all steps-1"])
@pytest.mark.parametrize(
    ("fault", "steps", "calls"),
    [
        *((fault, "all steps", 2 if fault == "scales" else 1) for fault in FAULTS),
        ("shifts", "the first steps", 1),
        ("loses_nan", "the first steps", 1),
    ],
)
def test_a_fault_is_caught_and_named(planted, fault, steps, calls, monkeypatch):
    if steps == "the first steps":
        monkeypatch.setattr(first_call, "BUDGET", 2**17)
    planted(fault, FAULTS[fault])
    fn, x, w = compiled(attention), seeded(4, 4).requires_grad_(), seeded(4, 4, seed=1).requires_grad_()
    if fault == "loses_nan":
        fn = compiled(lambda x, w: root_of_last_row(attention(x, w)))
    for _ in range(calls):  # it stays an error
        with pytest.raises(Miscompiled, match=f"^pass {fault}: the compiled program differs from its loop: ") as caught:
            fn(x, w)
        assert "\n" not in str(caught.value)


@pytest.mark.deep
def test_a_fault_in_half_of_a_gradient(planted):
    planted("halves", lambda graph, y: graph.call_function(half, (y,)))
    with pytest.raises(Miscompiled, match=r"pass halves: .* the gradient of input"):
        compiled(attention)(seeded(5, 4), seeded(4, 4, seed=1).requires_grad_())


@pytest.mark.deep(but=["268435456"])
@pytest.mark.parametrize("budget", [2**28, 2**17])
def test_a_wrong_pass_of_the_package_is_named(monkeypatch, budget):
    from nsa_compile.analyses import batched_body

    monkeypatch.setattr(first_call, "BUDGET", budget)

    def window(x):
        def step(rows, row):
            rows = torch.cat([rows[1:], row[None]])
            return rows, rows.sum(0)

        return nsa_compile.scan(step, x.new_zeros(3, x.shape[1]), x)[1]

    monkeypatch.setattr(batched_body, "_take", lambda tensor, rows, constant: tensor[:1].expand(len(rows), -1))
    with pytest.raises(Miscompiled, match=r"^pass batch_prefill: "):
        compiled(window)(seeded(6, 4))


@pytest.mark.deep
def test_a_wrong_nested_backend_is_named(monkeypatch):
    from nsa_compile import backend

    healthy = backend.compile_nested
    monkeypatch.setattr(
        backend, "compile_nested", lambda *a, **k: lambda *xs: [1.001 * y for y in healthy(*a, **k)(*xs)]
    )
    with pytest.raises(Miscompiled, match=r"^nested backend aot_eager: "):
        compiled(attention, nested="aot_eager")(seeded(6, 4), seeded(4, 4, seed=1))


def test_an_unwritten_buffer_is_caught(planted):
    """The last output of the functional graph is what a buffer becomes."""

    @register("forgets")
    def forgets(gm: fx.GraphModule, context) -> bool:
        """Leave the buffer as it was."""
        output = gm.graph.output_node()
        *values, written = output.args[0]
        with gm.graph.inserting_before(output):
            new = gm.graph.call_function(torch.mul, (written, 0))
        new.meta = dict(written.meta)
        output.args = ((*values, new),)
        gm.recompile()
        return True

    try:
        with pytest.raises(Miscompiled, match=r"pass forgets: .*input .*mean.* after the call is off"):
            compiled(Normalized())(seeded(6, 4))
    finally:
        forgets.unregister()


# -------------------------------------------------------------------------------------------- the user's state


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x):
        y = attention(self.norm(x), self.linear.weight)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y


@pytest.mark.deep
@pytest.mark.parametrize("steps", ["all steps", "the first steps"])
def test_state_is_untouched(steps, monkeypatch):
    if steps == "the first steps":
        monkeypatch.setattr(first_call, "BUDGET", 2**17)
    outcomes = []
    for check in (False, "first"):
        torch.manual_seed(0)
        model, x = Normalized(), seeded(8, 4).requires_grad_()
        model.linear.weight.grad = torch.ones(4, 4)
        calls = []
        model.linear.weight.register_hook(lambda g, calls=calls: calls.append(1))
        y = compiled(model, check=check)(x)
        before_backward = model.linear.weight.grad.clone()
        y.square().sum().backward()
        state = [*model.state_dict().values(), torch.get_rng_state(), y, x.grad, before_backward]
        outcomes.append([len(calls), torch.is_grad_enabled(), *[p.grad for p in model.parameters()], *state])
    assert told().startswith("equal to the loop")
    for without, with_check in zip(*outcomes, strict=True):
        equal = torch.equal(without, with_check) if isinstance(without, Tensor) else without == with_check
        assert equal or without is with_check is None


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_random_programs_draw_the_same(backend):
    def program(x, w):
        return attention(nn.functional.dropout(x, 0.5), w) + torch.rand(4)

    results = []
    for check in (False, "first"):
        torch.manual_seed(5)
        results.append((compiled(program, nested=backend, check=check)(seeded(6, 4), seeded(4, 4)), torch.rand(3)))
    assert told().startswith("equal to the loop")
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inputs_that_are_views_of_one_tensor(monkeypatch):
    def program(a, b, w):
        return attention(a, w) + b

    base = seeded(6, 8)
    fn = compiled(program)
    fn(base[:, :4], base[:, 4:], seeded(1, 4).expand(4, 4))
    assert told().startswith("equal to the loop")


@pytest.mark.deep
def test_a_tensor_in_the_middle_of_a_graph_is_written_to():
    def program(x, w):
        x.mul_(2)
        return attention(x, w)

    leaf = seeded(5, 4).requires_grad_()
    results = []
    for check in (False, "first"):
        x = leaf * 1
        compiled(program, check=check)(x, seeded(4, 4)).sum().backward()
        results.append((x.detach(), leaf.grad))
        leaf.grad = None
    assert told().startswith("equal to the loop"), told()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------------- cost


@pytest.mark.deep
def test_long_loops_make_their_first_steps_only(monkeypatch):
    made = []
    run = EagerLoop.run

    def counted(self, *args):
        result = run(self, *args)
        made.append(self.steps_made)
        return result

    monkeypatch.setattr(EagerLoop, "run", counted)
    monkeypatch.setattr(first_call, "BUDGET", 2**20)
    compiled(attention)(seeded(64, 4).requires_grad_(), seeded(4, 4, seed=1))
    assert "of 64 steps" in told()
    steps = [n for n in made if n]
    assert 0 < max(steps) < 32
    assert len(steps) == 2, "the loop in its own precision, and the judge"


def test_memory_for_gradients_is_bounded(monkeypatch):
    """Where all steps together would keep too much, each segment of the loop is computed again."""
    from nsa_compile.program import eager_loop

    monkeypatch.setattr(eager_loop, "KEPT_ELEMENTS", 10)
    segments = []
    again = eager_loop.checkpoint
    monkeypatch.setattr(eager_loop, "checkpoint", lambda *a, **k: segments.append(a[1:3]) or again(*a, **k))
    compiled(recurrent)(seeded(9, 4).requires_grad_(), seeded(4, 4, seed=1).requires_grad_())
    assert told().startswith("equal to the loop")
    assert segments[:3] == [(0, 3), (3, 6), (6, 9)]


def test_a_loop_without_a_prefix_is_run_whole_and_that_is_said(monkeypatch, caplog):
    monkeypatch.setattr(first_call, "BUDGET", 1)
    monkeypatch.setattr(first_call, "used_results", lambda node: None)
    compiled(attention)(seeded(6, 4), seeded(4, 4))
    assert "6 of 6 steps" in told()
    assert [r.message for r in caplog.records if "no prefix" in r.message]


@pytest.mark.parametrize("program", [recurrent, regions, nested])
def test_prefixes_of_other_programs(program, monkeypatch):
    monkeypatch.setattr(first_call, "BUDGET", 2**17)
    compiled(program)(seeded(8, 4).requires_grad_(), seeded(4, 4, seed=1).requires_grad_())
    assert told().startswith("equal to the loop")
    assert " of " in told()


# ------------------------------------------------------------------------------------------ what is not compared


def test_what_cannot_be_compared_is_said(caplog, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no loop today")

    monkeypatch.setattr(EagerLoop, "run", fail)
    compiled(attention)(seeded(6, 4), seeded(4, 4))
    assert told() == "not compared with the loop: the loop itself raises ValueError: no loop today"
    assert len([r for r in caplog.records if "not compared" in r.message]) == 1


@pytest.mark.deep
def test_random_programs_under_inductor_are_not_compared(monkeypatch):
    from nsa_compile import backend

    healthy = backend.compile_nested
    monkeypatch.setattr(backend, "compile_nested", lambda gm, inputs, nested, **k: healthy(gm, inputs, "eager", **k))
    compiled(lambda x, w: attention(x, w) + torch.rand(4), nested="inductor")(seeded(6, 4), seeded(4, 4))
    assert told().startswith("not compared with the loop: it draws random numbers")


@pytest.mark.deep
def test_random_programs_of_which_a_prefix_is_run_are_not_compared(monkeypatch):
    monkeypatch.setattr(first_call, "BUDGET", 2**17)
    compiled(lambda x, w: attention(x, w) + torch.rand(4))(seeded(9, 4), seeded(4, 4))
    assert told().startswith("not compared with the loop: it draws random numbers")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inputs_are_moved_by_roundings(dtype):
    x = seeded(40, dtype=dtype)
    (up,), (down,) = (first_call._jittered([x], sign * 8 * torch.finfo(dtype).eps, 0) for sign in (1, -1))
    assert bool((up != x).all())
    assert torch.allclose(up.double() - x.double(), x.double() - down.double(), rtol=0.3)


@pytest.mark.deep
def test_the_first_call_of_which_something_is_promised_is_compared(planted, caplog):
    planted("scales", FAULTS["scales"])
    fn, x, w = compiled(attention), seeded(6, 4), seeded(4, 4)
    for _ in range(2):
        fn(x * torch.nan, w)
    assert len([r for r in caplog.records if "holds NaN" in r.message]) == 1
    with pytest.raises(Miscompiled, match="pass scales"):
        fn(x, w)


def test_other_values_of_the_option_are_refused():
    with pytest.raises(ValueError, match="check is 'always'; it must be one of False, True, passes, first"):
        nsa_compile.compile(attention, check="always")


def test_the_option_shares_kept_results():
    from nsa_compile.passes.pipeline import Options, pipeline_key

    assert pipeline_key(Options(check="first")) == pipeline_key(Options())
