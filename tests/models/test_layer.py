"""NSAttention as a layer of somebody's own model: its arguments, packed documents, padding, decoding, compiling."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.backend import nsa_compile_backend
from nsa_compile.models import Documents, NSAConfig, NSATransformer, NSAttention, SparsePattern, documents, transformer
from tests.strategies import few

PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=4, window=6)
DIM = 12
SIZES = {"dim": DIM, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "pattern": PATTERN}
# Rows of 32 and of 40; one document is shorter than a block, one is a single token, one is not filled up.
LENGTHS = [37, 1, 20, 3, 32, 39]


def make_layer(**changes) -> NSAttention:
    torch.manual_seed(0)
    layer = NSAttention(**{**SIZES, **changes}).double()
    # The initial weights are so small that attention is almost a mean; make what it does visible.
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.mul_(parameter.shape[-1] ** -0.5 / parameter.std())
    return layer


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def value_and_grads(layer, function, x):
    y = function(x)
    weight = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def ids(lengths) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)) * 7 - 3, torch.tensor(lengths))


def each_alone(layer, lengths):
    """The uncompiled loop on each document of `x` `[1, S, dim]`."""
    return lambda x: torch.cat([layer(document) for document in x.split(lengths, dim=1)], dim=1)


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


def quick(layer, **options):
    """A copy of the layer, compiled in place."""
    layer = copy.deepcopy(layer)
    nsa_compile.compile_block(layer, **{"nested": "eager", "cache": False, **options})
    return layer


# ------------------------------------------------------------------------------------------------------- as a module


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim = 0 must be at least 1"),
        ({"dim": 8.0}, "dim = 8.0 must be an integer"),
        ({"n_kv_heads": 3}, "n_heads = 4 must be a multiple of n_kv_heads = 3"),
        ({"head_dim": 5}, "head_dim = 5 must be even"),
        ({"v_head_dim": 0}, "v_head_dim = 0 must be at least 1"),
        ({"phi": "max"}, "phi = 'max' must be one of mlp, mean"),
        ({"phi_hidden": -1}, "phi_hidden = -1 must be at least 1"),
        ({"shared_kv": 1}, "shared_kv = 1 must be true or false"),
        ({"branches": ["selected"]}, "must include 'compressed'"),
        ({"rope_theta": 0}, "rope_theta = 0 must be a positive number"),
        ({"pattern": 64}, "pattern = 64 must be a SparsePattern"),
    ],
)
def test_a_bad_size_is_named_with_its_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        NSAttention(**{**SIZES, **changes})


def test_parameters_have_the_names_and_first_values_that_checkpoints_know():
    torch.manual_seed(5)
    layer = NSAttention(**SIZES)
    torch.manual_seed(5)
    made = {name: nn.Linear(DIM, width, bias=False).weight for name, width in (("q", 16), ("k", 24), ("v", 24))}
    gate, out = nn.Linear(DIM, 12), nn.Linear(16, DIM, bias=False)
    made |= {"gate": gate.weight, "out": out.weight}
    state = layer.state_dict()
    assert all(torch.equal(state[f"{name}.weight"], weight) for name, weight in made.items())
    assert torch.equal(state["gate.bias"], gate.bias)
    phi = [f"phi_{of}.{name}" for of in "kv" for name in ("position", "up.weight", "down.weight")]
    assert list(state) == ["q.weight", "k.weight", "v.weight", "gate.weight", "gate.bias", "out.weight", *phi]


@pytest.mark.parametrize(
    "changes",
    [{}, {"phi": "mean", "shared_kv": True, "v_head_dim": 6, "rope_theta": 500.0}, {"branches": ["window"]},
     {"phi_hidden": 5}],
)  # fmt: skip
def test_the_layer_of_a_model_is_this_one(changes):
    model = NSATransformer(NSAConfig(vocab_size=5, n_layers=1, **{**SIZES, **changes})).double()
    theirs = model.blocks[0].attention
    ours = make_layer(**changes)
    ours.load_state_dict(theirs.state_dict())
    x = batch(2, 11)
    assert torch.equal(ours(x), theirs(x))


def test_x_of_another_width_is_one_line():
    with pytest.raises(ValueError, match=r"x has shape \[2, 9\]; it must be \[B, S, 12\]"):
        make_layer()(torch.zeros(2, 9))


@pytest.mark.deep(but=["False"])
@pytest.mark.parametrize("compiled", [False, True])
def test_uncompiled_it_says_so_once(monkeypatch, caplog, compiled):
    monkeypatch.setattr(transformer, "_said", set())
    layer = quick(make_layer()) if compiled else make_layer()
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        for _ in range(2):
            layer(batch(1, 5))
            copy.deepcopy(make_layer() if not compiled else layer)
    lines = [record.message for record in caplog.records]
    said = "NSAttention runs uncompiled, as a slow loop over the tokens; nsa_compile.compile_block(layer) compiles it"
    assert lines == ([] if compiled else [said])


def test_a_model_of_the_package_leaves_that_to_who_runs_it(monkeypatch, caplog):
    monkeypatch.setattr(transformer, "_said", set())
    model = NSATransformer(NSAConfig(vocab_size=5, n_layers=1, **SIZES))
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        model(torch.zeros(1, 5, dtype=torch.int64))
    assert caplog.records == []


@pytest.mark.deep
def test_a_copy_and_a_file_of_a_compiled_layer_have_its_weights_and_no_program():
    layer = quick(make_layer())
    x = batch(1, 9)
    y = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x), y)
        with torch.no_grad():
            other.out.weight.zero_()
        assert not other(x).any()
    assert torch.equal(layer(x), y)


# ---------------------------------------------------------------------------------------------------------- documents


SHARED = {"phi": "mean", "shared_kv": True}


@pytest.mark.deep(but=["loop-doc_ids-changes1"])
@pytest.mark.parametrize(
    ("form", "how", "changes"),
    [
        ("loop", "cu_seqlens", {}),
        ("loop", "doc_ids", SHARED),
        ("loop", "documents", {}),
        ("compiled in place", "doc_ids", {}),
        ("compiled as a whole", "documents", SHARED),
    ],
)
def test_a_packed_document_gives_what_it_gives_alone(form, how, changes):
    layer = make_layer(**changes)
    x = batch(1, sum(LENGTHS))
    expected = value_and_grads(layer, each_alone(layer, LENGTHS), x)
    given = {
        "cu_seqlens": {"cu_seqlens": starts(LENGTHS)},
        "doc_ids": {"doc_ids": ids(LENGTHS)[None]},
        "documents": {"documents": Documents.of(cu_seqlens=starts(LENGTHS).int())},
    }[how]
    run = layer
    if form == "compiled in place":
        nsa_compile.compile_block(layer, nested="eager", cache=False)
    elif form == "compiled as a whole":
        run = nsa_compile.compile(layer, nested="eager", cache=False)
    assert_same(value_and_grads(layer, lambda x: run(x, **given), x), expected)
    if form != "loop":
        assert all(scan.batched for scan in nsa_compile.last_report().scans)


@few(4)
@given(data=st.data())
def test_documents_of_any_lengths(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    layer = make_layer()
    x = batch(1, sum(lengths))
    expected = value_and_grads(layer, each_alone(layer, lengths), x)
    assert_same(value_and_grads(layer, lambda x: layer(x, cu_seqlens=starts(lengths)), x), expected)


@pytest.mark.deep
def test_a_whole_model_runs_on_rows():
    model = NSATransformer(NSAConfig(vocab_size=5, n_layers=2, **SIZES)).double()
    tokens = torch.arange(60)[None] ** 2 % 5
    made = Documents.of(cu_seqlens=starts([37, 23]))
    packed = made.pack([model(rows) for rows in made.unpack(tokens)])
    torch.testing.assert_close(packed, torch.cat([model(tokens[:, :37]), model(tokens[:, 37:])], dim=1))


@pytest.mark.deep
def test_documents_of_several_sequences():
    layer = make_layer()
    x = batch(2, 40)
    expected = value_and_grads(
        layer, lambda x: torch.cat([each_alone(layer, [25, 15])(x[:1]), each_alone(layer, [9, 31])(x[1:])]), x
    )
    doc_ids = torch.stack([ids([25, 15]), ids([9, 31])])
    assert_same(value_and_grads(layer, lambda x: layer(x, doc_ids=doc_ids), x), expected)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("form", "dtype"), [("loop", torch.bool), ("loop", torch.uint8), ("compiled in place", torch.int64)]
)
def test_padding_on_either_side_is_as_if_it_were_not_there(form, dtype):
    layer = make_layer()
    x = batch(4, 23)
    parts = [slice(0, 23), slice(5, 23), slice(0, 14), slice(3, 9)]
    mask = torch.zeros(4, 23, dtype=dtype)
    for row, part in zip(mask, parts, strict=True):
        row[part] = 1

    def alone(x):
        y = torch.zeros_like(x)
        for i, part in enumerate(parts):
            y[i, part] = layer(x[i : i + 1, part])[0]
        return y

    expected = value_and_grads(layer, alone, x)
    run = layer if form == "loop" else quick(layer)
    actual = value_and_grads(run, lambda x: run(x, mask), x)
    assert_same(actual, expected)
    assert not actual[0][~mask.bool()].any()
    assert not actual[1][~mask.bool()].any()


@pytest.mark.deep
def test_padding_and_documents_together():
    layer = make_layer()
    x = batch(2, 30)
    doc_ids = torch.stack([ids([12, 18]), ids([30])])
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 25:] = mask[1, :4] = False

    def alone(x):
        first = torch.cat([each_alone(layer, [12, 13])(x[:1, :25]), torch.zeros_like(x[:1, 25:])], dim=1)
        return torch.cat([first, torch.cat([torch.zeros_like(x[1:, :4]), layer(x[1:, 4:])], dim=1)])

    expected = value_and_grads(layer, alone, x)
    assert_same(value_and_grads(layer, lambda x: layer(x, mask, doc_ids=doc_ids), x), expected)


@pytest.mark.deep
@pytest.mark.parametrize("form", ["loop", "compiled in place"])
def test_nothing_of_a_document_comes_near_another(form):
    """Not even NaN, of which 0 · NaN would be one."""
    layer = make_layer() if form == "loop" else quick(make_layer())
    x = batch(1, sum(LENGTHS)).detach()
    expected = layer(x, cu_seqlens=starts(LENGTHS))
    spoilt = x.clone()
    spoilt[:, 38:58] = torch.nan  # the third
    spoilt.requires_grad_()
    y = layer(spoilt, cu_seqlens=starts(LENGTHS))
    others = ids(LENGTHS) != ids(LENGTHS)[38]
    assert torch.equal(y[:, others], expected[:, others])
    (gradient,) = torch.autograd.grad(y.sum(), spoilt)
    assert gradient[:, others].isfinite().all()


@few(40)
@given(data=st.data())
def test_rows_hold_each_token_once(data):
    shape = data.draw(st.sampled_from([(1, 90), (3, 41), (2, 1)]))
    numbers = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=90, max_size=90)))[: shape[1]]
    doc_ids = numbers.cumsum(0).expand(shape)
    mask = doc_ids % 3 != data.draw(st.integers(0, 3))
    if not mask.any():
        return
    made = Documents.of(attention_mask=mask, doc_ids=doc_ids)
    tokens = torch.arange(1, 1 + shape[0] * shape[1]).view(shape)
    rows = made.unpack(tokens)
    assert torch.equal(made.pack(rows), tokens * mask)
    # A row is consecutive tokens of one document, then the last one again.
    known = dict(zip(tokens.flatten().tolist(), doc_ids.flatten().tolist(), strict=True))
    held = []
    for row in [row for batch in rows for row in batch.tolist()]:
        end = row.index(row[-1]) + 1
        assert row[:end] == list(range(row[0], row[0] + end))
        assert set(row[end:]) <= {row[-1]}
        assert len({known[token] for token in row}) == 1
        assert len(row) == documents.row_length(end)
        held += row[:end]
    assert sorted(held) == tokens[mask].tolist()


def test_rows_are_few_and_little_is_filled_up():
    lengths = {length: documents.row_length(length) for length in range(1, 16385)}
    assert all(row <= 32 or row < 1.125 * length for length, row in lengths.items())
    assert [lengths[length] for length in (1, 33, 64, 65, 512, 513, 4096)] == [32, 36, 64, 72, 512, 576, 4096]
    shapes = {(4**n, row) for row in lengths.values() for n in range(8) if 4**n * row <= 16384}
    assert len(shapes) < documents.SHAPES
    # What is said of the sizes of batches, seen.
    made = Documents.of(cu_seqlens=torch.arange(0, 23 * 32 + 1, 32))
    assert [len(rows) for rows in made.rows] == [16, 4, 1, 1, 1]


@pytest.mark.deep
def test_a_compiled_layer_meets_few_programs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = [make_layer() for _ in range(2)]
    for layer in layers:
        options = {"nested": "eager", "cache": False}
        # Documents' shapes are bounded, so a limit does not stop training at a length that was not met before.
        layer.compile(backend=nsa_compile_backend, fullgraph=True, dynamic=False, options=options, recompile_limit=1)
    for lengths in ([37, 38, 39, 40, 12], [40, 38, 37, 39, 1], [5, 40, 37, 40, 38]):
        for layer in layers:
            layer(batch(1, sum(lengths)).detach(), cu_seqlens=starts(lengths))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one of [4, 40], one of [1, 32], for both"


B = torch.bool


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]])}, "attention_mask has a hole in row 0, .* position 3"),
        ({"attention_mask": torch.zeros(2, 4, dtype=B)}, "attention_mask keeps no token of the batch"),
        ({"attention_mask": torch.tensor([[1, 2, 0, 0]])}, "attention_mask holds 2; it must be 1"),
        (
            {"attention_mask": torch.ones(1, 4)},
            "attention_mask has dtype torch.float32; it must be of integers or",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=B)}, r"shape \[1, 1, 4, 4\]; it must be \[B, S\]"),
        ({"doc_ids": torch.tensor([[0, 1, 1, 0]])}, "document 0 of doc_ids goes on at position 3 of row 0"),
        ({"doc_ids": torch.zeros(4)}, "doc_ids has dtype torch.float32"),
        ({"doc_ids": torch.zeros(4, dtype=torch.int64)}, r"doc_ids has shape \[4\]; it must be \[B, S\]"),
        (
            {"doc_ids": torch.zeros(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 4, dtype=B)},
            "of one batch",
        ),
        ({"doc_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"x has shape \[1, 4, 12\]; the documents are of \[2, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, r"x has shape \[1, 4, 12\]; the documents are of \[1, 5\]"),
        ({"cu_seqlens": torch.tensor([1, 4])}, r"cu_seqlens\[0\] = 1; cu_seqlens must start with 0 and rise"),
        ({"cu_seqlens": torch.tensor([0, 3, 3, 4])}, r"cu_seqlens\[2\] = 3; cu_seqlens must start with 0 and rise"),
        ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens has shape \[1\]; it must be \[documents \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens has dtype torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 4]), "attention_mask": torch.ones(1, 4, dtype=B)}, "give it without"),
    ],
)
def test_what_is_no_document_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_layer()(batch(1, 4), **arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.deep
def test_rows_lie_where_the_batch_is(monkeypatch):
    unpack, seen = Documents.unpack, []
    monkeypatch.setattr(Documents, "unpack", lambda self, x: seen.append(self) or unpack(self, x))
    make_layer().to("meta")(batch(1, 9).to("meta"), torch.arange(9)[None] > 3)
    make_layer().to("meta")(batch(1, 9).to("meta"), cu_seqlens=torch.tensor([0, 4, 9]))
    assert {x.device.type for made in seen for x in (*made.rows, made.place, made.real) if x is not None} == {"meta"}


def test_documents_are_given_once():
    made = Documents.of(cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="give one of them"):
        make_layer()(batch(1, 4), documents=made, doc_ids=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"Documents\.of needs"):
        Documents.of()


def test_a_compiled_function_is_told_that_it_cannot_read_documents():
    layer = make_layer()
    fast = nsa_compile.compile(layer, nested="eager", cache=False)
    with pytest.raises(ValueError, match=r"make documents = Documents\.of\(\.\.\.\) before it"):
        fast(batch(1, 6), cu_seqlens=torch.tensor([0, 2, 6]))


# ------------------------------------------------------------------------------------------- what training does to it


@pytest.mark.deep
def test_recomputed_for_the_backward_pass():
    layer = make_layer()
    x = batch(1, sum(LENGTHS))
    given = {"cu_seqlens": starts(LENGTHS)}
    expected = value_and_grads(layer, lambda x: layer(x, **given), x)
    fast = quick(layer, nested="aot_eager")
    for run in (layer, fast):
        actual = value_and_grads(run, lambda x, run=run: checkpoint(run, x, use_reentrant=False, **given), x)
        assert_same(actual, expected)


@pytest.mark.deep
def test_under_autocast_as_good_as_the_loop():
    """bfloat16 autocast over float32 weights: values and gradients, judged by float64 without autocast."""
    # Every block is selected: which ones are would otherwise hang on the rounding of their scores, in the loop as well.
    exact_layer = make_layer(pattern=SparsePattern(4, 2, 4, num_selected=16, window=6))
    layer = copy.deepcopy(exact_layer).float()
    given = {"cu_seqlens": starts(LENGTHS)}

    def run(layer, precise=False):
        x = batch(1, sum(LENGTHS)).detach().to(layer.out.weight.dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            y = layer(x, **given)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return y.detach(), *torch.autograd.grad((y.double() * weight).sum(), [x, *layer.parameters()])

    exact = run(exact_layer, precise=True)
    loop = run(layer)
    actual = run(quick(layer, nested="aot_eager"))
    assert actual[0].dtype == torch.bfloat16
    for a, e, x in zip(actual, loop, exact, strict=True):
        assert a.dtype == e.dtype
        assert rms(a - x) <= 2 * rms(e - x) + torch.finfo(torch.bfloat16).eps / 2 * rms(x)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize(
    ("rows", "t", "rule"),
    [
        (2, torch.tensor(0.0), "t is a torch.float32; it must be a tensor torch.int64"),
        (2, torch.tensor(True), "t is a torch.bool; it must be a tensor torch.int64"),
        (2, torch.tensor([0, 1, 2]), r"t has shape \[3\]; with this state it must be \[\] or \[2\]"),
        (1, torch.tensor(0), r"x has shape \[1, .*\]; with this state it must be \[2, dim\]"),
    ],
)
def test_a_token_that_does_not_go_with_the_state_is_refused(rows, t, rule):
    layer = make_layer()
    with pytest.raises(ValueError, match=rule):
        layer.decode_step(layer.init_state(2, 4), batch(rows, 1).detach()[:, 0], t)


def test_a_state_has_room_for_no_fewer_tokens_than_none():
    with pytest.raises(ValueError, match="max_len is -1; it must be 0 or more"):
        make_layer().init_state(2, -1)


def test_decoding_goes_on_where_a_prefill_ends():
    layer = make_layer()
    x = batch(2, 21).detach()
    whole = layer(x)
    lengths = torch.tensor([9, 14])
    state, y = layer.prefill(x[:, :14], lengths, max_len=21)
    torch.testing.assert_close(y[0, :9], whole[0, :9])
    torch.testing.assert_close(y[1], whole[1, :14])
    for i in range(7):
        t = lengths + i
        state, o = layer.decode_step(state, x[torch.arange(2), t], t)
        torch.testing.assert_close(o, whole[torch.arange(2), t])
