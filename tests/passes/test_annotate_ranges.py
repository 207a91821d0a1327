"""annotate_ranges: which node belongs to which range, and that programs with ranges compute the same bits."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import nsa_compile
from nsa_compile import ranges
from nsa_compile.ir import markers
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.passes import verifier
from nsa_compile.passes.pipeline import Options
from tests.attention_programs import entry

PATTERN = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)
BLOCK = {"nsa.proj", "nsa.cmp", "nsa.sel", "nsa.sel.ranges_v2", "nsa.win", "nsa.gate", "nsa.mlp"}


def build(changes=None, **options):
    """A compiled model of one block. Passes' results are not kept: a test shall see the passes at work."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8}
    model = NSATransformer(NSAConfig(**sizes, pattern=PATTERN, **(changes or {})))
    return nsa_compile.compile_blocks(model, cache=False, **options)


def tokens(length=64):
    return torch.randint(16, (2, length), generator=torch.Generator().manual_seed(0))


def results(model):
    """Output and gradients."""
    out = model(tokens())
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture
def opened(monkeypatch):
    """The ranges a program opens, as `(name, category)` in their order; balance is checked by the client's tests."""
    seen = []
    monkeypatch.setattr(ranges, "push", lambda name, category: seen.append((name, category)))
    return seen


@pytest.mark.deep
@pytest.mark.parametrize(
    ("nested", "attention", "changes"),
    [
        pytest.param("aot_eager", "sparse", {}, marks=pytest.mark.deep),  # Inductor's is sparse, too
        ("aot_eager", "dense", {"phi": "mean", "shared_kv": True}),
        ("inductor", "sparse", {"phi": "mean", "shared_kv": True}),
    ],
)
def test_every_range_is_there_in_both_directions_and_changes_no_bit(opened, nested, attention, changes):
    plain = results(build(changes, nested=nested, attention=attention))
    assert entry(nsa_compile.last_report(), "annotate_ranges").skipped == "not asked for"
    assert {category for _, category in opened} == {"pass"}

    opened.clear()
    ranged = results(build(changes, nested=nested, attention=attention, nvtx=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, ranged, strict=True))
    seen = defaultdict(set)
    for name, category in opened:
        seen[category].add(name)
    assert seen == {
        "pass": {p.name for p in nsa_compile.last_report().passes if not p.skipped},
        "forward": BLOCK,
        "backward": BLOCK,
    }


def captured(options, fn, *inputs):
    """The graph of a function after the passes."""
    graphs = []

    def keep(gm, example_inputs):
        from nsa_compile.backend import optimize, specialize_shapes

        specialize_shapes(gm, example_inputs)
        optimize(gm, options, example_inputs)
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    return graphs[0]


def labels(gm):
    """The labels of each kind of operator."""
    found = defaultdict(set)
    for node in gm.graph.nodes:
        found[getattr(node.target, "__name__", str(node.target))].add(markers.label_of(node))
    return found


def options(**changes):
    return Options(**{"nested": "eager", "cache": False, "nvtx": True, "attention": "sparse", **changes})


def block():
    torch.manual_seed(0)
    config = NSAConfig(vocab_size=16, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, pattern=PATTERN)
    return NSATransformer(config).blocks[0]


def test_operators_belong_to_the_range_of_their_branch():
    """And what the user has labelled stays as it is."""
    model = block()

    def fn(x):
        with torch.fx.traceback.annotate({markers.LABEL: "nsa.mlp"}):
            y = x.tanh()
        return model(y)

    found = labels(captured(options(), fn, torch.randn(1, 64, 32)))
    assert found["tanh"] == {"nsa.mlp"}
    assert found["compressed_attention.default"] == {"nsa.cmp"}
    assert found["selected_attention.default"] == {"nsa.sel.ranges_v2"}
    assert found["window_attention.default"] == {"nsa.win"}
    # Projections of queries, keys and values, of the gates, of the output, and three of the feed-forward layer.
    assert found["linear"] == {"nsa.proj", "nsa.gate", "nsa.mlp"}
    assert found["silu"] >= {"nsa.mlp"}


@pytest.mark.deep
def test_where_all_blocks_are_selected_attention_still_belongs_to_the_selected_branch():
    found = labels(captured(options(), block(), torch.randn(1, 24, 32)))  # three blocks of eight
    assert found["window_attention.default"] == {"nsa.sel.ranges_v2", "nsa.win"}


def test_a_loop_that_stays_is_one_range(opened):
    def step(total, x):
        total = (total + x).sin()
        return total, total * 2

    def fn(x):
        return nsa_compile.scan(step, torch.zeros(4), x)[1]

    x = torch.randn(8, 4)
    torch._dynamo.reset()
    compiled = nsa_compile.compile(fn, nested="aot_eager", cache=False, nvtx=True)
    torch.testing.assert_close(compiled(x), fn(x))
    assert ("nsa.loop", "forward") in opened


@pytest.mark.deep
def test_a_decode_step_with_ranges_does_what_it_does_without(opened):
    models = [build(nested="eager") for _ in range(2)]
    outputs = []
    for model, asked in zip(models, (False, True), strict=True):
        step = nsa_compile.compile_decode_step(model, nested="aot_eager", cache=False, nvtx=asked)
        state = model.init_state(2, 16)
        found = []
        for t in range(3):
            state, logits = step(state, tokens()[:, t])
            found.append(logits)
        outputs.append(torch.stack(found))
    assert torch.equal(*outputs)
    assert {name for name, category in opened if category == "forward"} >= {"nsa.cmp", "nsa.sel.ranges_v2", "nsa.mlp"}


def test_labels_are_a_change_the_verifier_sees():
    gm = captured(options(nvtx=False), lambda x: x.sin(), torch.randn(3))
    before = verifier.fingerprint(gm)
    markers.set_label(next(node for node in gm.graph.nodes if node.op == "call_method"), "nsa.mlp")
    assert verifier.fingerprint(gm) != before


def test_inductors_caches_tell_programs_with_other_labels_apart():
    gm = captured(options(nvtx=False), lambda x: x.sin(), torch.randn(3))
    node = next(node for node in gm.graph.nodes if node.op == "call_method")
    keys = []
    for name in ("nsa.mlp", "nsa.proj"):
        markers.set_label(node, name)
        (hook,) = markers.inductor_config(gm).values()
        keys.append(hook.uuid())
    assert keys[0] != keys[1]
