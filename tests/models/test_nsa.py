"""The decode step against the paper: values and gradients against the oracle, and what must hold end to end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given

from nsa_compile.branches import BRANCHES
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern, nsa_attention
from nsa_compile.models.transformer import apply_rope
from nsa_compile.verification.oracle import nsa_attention_oracle, nsa_branches_oracle, selection_margin
from tests.strategies import NSAProblem, nsa_problems

PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=4, window=8)

QUERY_HEADS = 4


def tiny_model(seed: int = 0, **changes) -> NSATransformer:
    """Two layers in float64: a window of 8, four of the selection blocks."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": 19, "dim": 16, "n_layers": 2, "n_heads": QUERY_HEADS, "n_kv_heads": 2, "head_dim": 4,
        "pattern": PATTERN, "mlp_hidden": 32,
    }  # fmt: skip
    model = NSATransformer(NSAConfig(**{**config, **changes})).double()
    # The initial weights are so small that attention is almost a mean; make what it does visible.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(parameter.shape[-1] ** -0.5 / parameter.std())
    return model


def tokens_for(model: NSATransformer, B: int, S: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (B, S), generator=torch.Generator().manual_seed(seed))


def assume_unambiguous(problem: NSAProblem, tensors) -> None:
    """A difference of rounding size between two block scores may go either way; an exact tie may not."""
    if problem.contents in ("normal", "small integers", "large"):
        assume(selection_margin(tensors[0], tensors[1], **problem.selection) > 1e-9)


def value_and_grads(function, tensors) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    out = function(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * weight).sum(), tensors, allow_unused=True)
    return out.detach(), tuple(torch.zeros_like(x) if g is None else g for x, g in zip(tensors, grads, strict=True))


# ----------------------------------------------------------------------------------------------- against the oracle


@given(problem=nsa_problems())
def test_attention_equals_the_oracle(problem):
    tensors = problem.tensors()
    assume_unambiguous(problem, tensors)
    phi = problem.block_phi
    actual = value_and_grads(lambda *x: nsa_attention(*x, pattern=problem.pattern, phi=phi), tensors)
    expected = value_and_grads(lambda *x: nsa_attention_oracle(*x, **problem.oracle_arguments)[0], tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(problem=nsa_problems(contents=("normal",)))
def test_low_precision_is_as_good_as_its_rounding(dtype, problem):
    """The error against float64 is a few roundings of the output's size: of the scores, the weights and the output."""
    tensors = problem.tensors(dtype)
    eps = torch.finfo(dtype).eps
    # The heads' scores are rounded before the softmax, so blocks this close may swap places.
    assume(selection_margin(tensors[0], tensors[1], **problem.selection) > 16 * problem.h * eps)
    actual = nsa_attention(*tensors, pattern=problem.pattern, phi=problem.block_phi)
    expected, _ = nsa_attention_oracle(*tensors, **problem.oracle_arguments)
    assert actual.dtype == dtype
    scale = max(float(v.detach().abs().max()) for v in tensors[2:7:2])
    assert float((actual.double() - expected).abs().max()) <= 16 * eps * scale


@pytest.mark.parametrize("shared", [False, True])
def test_shared_keys_and_values_are_the_selected_branchs(shared):
    q, k_cmp, v_cmp, k, v, k_win, v_win, gates = EXAMPLE.tensors()
    if shared:
        k_win = v_win = None
    actual = nsa_attention(q, k_cmp, v_cmp, k, v, k_win, v_win, gates, pattern=EXAMPLE.pattern)
    k_win, v_win = (k, v) if shared else (k_win, v_win)
    expected, _ = nsa_attention_oracle(q, k_cmp, v_cmp, k, v, k_win, v_win, gates, **EXAMPLE.oracle_arguments)
    torch.testing.assert_close(actual, expected)


EXAMPLE = NSAProblem(
    B=2, S=40, G=2, h=2, D=4, Dv=3, l=4, d=2, l_sel=4, n=4, w=6, num_initial=1, num_local=2,
    index_convention="minus", phi="mean", contents="normal", strided=False, seed=0,
)  # fmt: skip


@pytest.mark.deep(but=["1"])
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_each_branch_alone(branch):
    """One gate open: the oracle's branch, and no gradient into the keys and values of the others."""
    *tensors, gates = EXAMPLE.tensors()
    one = torch.zeros_like(gates).index_fill(-1, torch.tensor(branch), 1.0)
    out = nsa_attention(*tensors, one, pattern=EXAMPLE.pattern)
    branches, _ = nsa_branches_oracle(*tensors, **EXAMPLE.oracle_arguments)
    torch.testing.assert_close(out, branches[branch])
    grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True)
    for i, grad in enumerate(grads[1:]):
        flows = grad is not None and bool((grad != 0).any())
        assert flows == (i // 2 == branch), f"gradient of input {i + 1} with only branch {branch} open"


FEWER_BRANCHES = [("compressed", "window"), ("compressed", "selected"), ("compressed",), ("window",)]


@pytest.mark.deep(but=["compressed+selected"])
@pytest.mark.parametrize("branches", FEWER_BRANCHES, ids="+".join)
def test_a_branch_that_is_not_there_equals_one_whose_gate_is_zero(branches):
    """In values and in gradients, the oracle having all three."""
    *tensors, gates = EXAMPLE.tensors()
    there = [BRANCHES.index(branch) for branch in branches]

    def shut(*x):
        return nsa_attention_oracle(*x, gates * torch.eye(3)[there].sum(0), **EXAMPLE.oracle_arguments)[0]

    actual = value_and_grads(
        lambda *x: nsa_attention(*x, gates[..., there], pattern=EXAMPLE.pattern, branches=branches), tensors
    )
    torch.testing.assert_close(actual, value_and_grads(shut, tensors), rtol=1e-9, atol=1e-10)


def test_gates_and_branches_have_one_order():
    *tensors, gates = EXAMPLE.tensors()
    with pytest.raises(ValueError, match=r"branches = \['window', 'compressed'\] must be \['compressed', 'window'\]"):
        nsa_attention(*tensors, gates[..., :2], pattern=EXAMPLE.pattern, branches=("window", "compressed"))


def test_only_the_selected_branch_reads_the_order_within_a_distant_block():
    """What retrieval of more than one token needs: of a block that is a mean, the others know the sum alone."""
    S, block = 40, slice(8, 12)
    for branches in (BRANCHES, ("compressed", "window")):
        model = tiny_model(
            n_layers=1, phi="mean", branches=branches,
            # Ten blocks, all selected; those of either kind lie side by side.
            pattern=SparsePattern(compress_block=4, compress_stride=4, select_block=4, num_selected=10, window=8),
        )  # fmt: skip
        tokens = tokens_for(model, 2, S)
        swapped = tokens.clone()
        swapped[:, block] = tokens[:, block].flip(1)
        assert (tokens != swapped).any(1).all()
        far = slice(block.stop + model.config.pattern.window, None)
        change = (model(tokens) - model(swapped))[:, far].abs().amax(-1)
        assert (change.min() > 1e-6) if "selected" in branches else (change.max() < 1e-12)


def test_no_visible_block_is_zero_not_nan():
    *tensors, gates = EXAMPLE.tensors()
    only_compressed = torch.zeros_like(gates).index_fill(-1, torch.tensor(0), 1.0)
    out = nsa_attention(*tensors, only_compressed, pattern=EXAMPLE.pattern)
    first = EXAMPLE.l - 1  # the first token with a block
    assert (out[:, :first] == 0).all()
    assert (out[:, first:] != 0).all()
    grads = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
    assert all(g.isfinite().all() for g in grads if g is not None)
    assert (grads[0][:, :first] == 0).all()


def test_sequence_shorter_than_a_compressed_block():
    tensors = [x[:, :3].detach().requires_grad_() for x in EXAMPLE.tensors()]
    actual = value_and_grads(lambda *x: nsa_attention(*x, pattern=EXAMPLE.pattern), tensors)
    expected = value_and_grads(lambda *x: nsa_attention_oracle(*x, **EXAMPLE.oracle_arguments)[0], tensors)
    torch.testing.assert_close(actual, expected)


# ------------------------------------------------------------------------------------------------------- the future


@pytest.mark.deep(but=["5-dense", "23-dense"])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("cut", [5, 23])
def test_later_tokens_change_no_earlier_logits(attention, cut):
    """More tokens than the window, more blocks than are selected; the cut is within a block of either kind."""
    model, S = tiny_model(attention=attention), 40
    before = tokens_for(model, 2, S)
    after = torch.cat([before[:, :cut], (before[:, cut:] + 1) % model.config.vocab_size], 1)
    a, b = model(before), model(after)
    torch.testing.assert_close(a[:, :cut], b[:, :cut], rtol=0, atol=1e-12)
    assert (a[:, cut:] - b[:, cut:]).abs().amax(-1).min() > 1e-3


def test_later_keys_change_no_earlier_selection():
    """Only the keys that decide the selection change, and only the selected branch is seen."""
    q, k_cmp, *rest, gates = EXAMPLE.tensors()
    only_selected = torch.zeros_like(gates).index_fill(-1, torch.tensor(1), 1.0)
    # The first token whose selection may see token 21 is 21 itself; blocks that end later hold it too.
    moved = torch.cat([k_cmp[:, :21], -20 * k_cmp[:, 21:]], 1)
    a, b = (nsa_attention(q, k, *rest, only_selected, pattern=EXAMPLE.pattern) for k in (k_cmp, moved))
    assert torch.equal(a[:, :21], b[:, :21])
    assert not torch.equal(a[:, 21:], b[:, 21:])


# ------------------------------------------------------------------------------------------- one model, three paths


@pytest.mark.deep(but=["changes4"])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"phi": "mean"}, {"shared_kv": True}, {"v_head_dim": 6}, {"attention": "dense"},
        {"branches": ("compressed", "window")}, {"branches": ("window",), "shared_kv": True},
        {"compress_rotated": True},
    ],
)  # fmt: skip
def test_decoding_equals_the_forward_pass(changes):
    """In values and in gradients."""
    model = tiny_model(**changes)
    tokens = tokens_for(model, 2, 26)
    runs = []
    for logits in (decode(model, tokens), model(tokens)):
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        runs.append((logits.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-10)


def test_decoding_with_room_to_spare():
    """Caches longer than the sequence: rows that are never written change nothing."""
    model = tiny_model()
    tokens = tokens_for(model, 1, 14)
    state = model.init_state(1, 37)
    for t in range(14):
        state, logits = model.decode_step(state, tokens[:, t])
    torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=1e-9, atol=1e-10)


@pytest.mark.deep(but=["changes3", "changes7"])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"phi": "mean"}, {"shared_kv": True}, {"attention": "dense"},
        *({"branches": branches} for branches in FEWER_BRANCHES),
    ],
)  # fmt: skip
def test_every_parameter_gets_a_gradient(changes):
    model = tiny_model(**changes)
    tokens = tokens_for(model, 2, 24)
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
        if name != "embedding.weight":  # tokens that do not occur have none
            assert (rows != 0).any(1).all(), f"a row of {name} gets no gradient"


# ------------------------------------------------------------------------------------------------------------- RoPE


def test_rope_scores_depend_on_relative_position_only():
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, 8, generator=rng, dtype=torch.float64).expand(30, 3, 8) for _ in range(2))
    position = torch.arange(30)
    scores = torch.einsum("ihd,jhd->hij", apply_rope(q, position, 100.0), apply_rope(k, position, 100.0))
    for shift in (1, 7):
        torch.testing.assert_close(scores[:, shift:, shift:], scores[:, :-shift, :-shift], rtol=0, atol=1e-12)
    assert (scores[:, 10, 3] - scores[:, 10, 4]).abs().min() > 1e-3


@pytest.fixture
def shifted(monkeypatch):
    """`shifted(k)`: from now on every token is k positions further on, for RoPE."""

    def shift(by_query: int, by_key: int | None = None) -> None:
        by_key = by_query if by_key is None else by_key

        def rope(x, position, theta):
            return apply_rope(x, position + (by_query if x.shape[-2] == QUERY_HEADS else by_key), theta)

        for layer in ("nsa_layer", "dense_layer"):
            monkeypatch.setattr(f"nsa_compile.models.{layer}.apply_rope", rope)

    return shift


def decode(model, tokens) -> torch.Tensor:
    """The logits of each token, by the decode step."""
    state = model.init_state(tokens.shape[0], tokens.shape[1])
    rows = []
    for t in range(tokens.shape[1]):
        state, logits = model.decode_step(state, tokens[:, t])
        rows.append(logits)
    return torch.stack(rows, 1)


@pytest.mark.deep(but=["changes0-forward"])
@pytest.mark.parametrize("run", [lambda model, tokens: model(tokens), decode], ids=["forward", "decode"])
@pytest.mark.parametrize("changes", [{"attention": "dense"}, {}, {"shared_kv": True}])
def test_logits_depend_on_relative_position_only(changes, run, shifted):
    """Through the whole model: all positions shifted alike change nothing, queries shifted against keys do."""
    model = tiny_model(**changes)
    tokens = tokens_for(model, 2, 26)
    expected = run(model, tokens)
    for by in (1, 1000):
        shifted(by)
        torch.testing.assert_close(run(model, tokens), expected, rtol=1e-8, atol=1e-8)
    shifted(1, 0)
    assert (run(model, tokens) - expected).abs().max() > 1e-2


def test_rope_is_the_same_for_every_head():
    """Rotating each head alone equals rotating them together; over flattened heads it would not."""
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    together = apply_rope(x, torch.arange(5), 10000.0)
    for head in range(3):
        assert torch.equal(together[:, head], apply_rope(x[:, head : head + 1], torch.arange(5), 10000.0)[:, 0])


def test_rope_keeps_lengths_and_position_zero():
    x = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = apply_rope(x, torch.arange(9), 10000.0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    assert torch.equal(turned[0], x[0])
    assert not torch.allclose(turned[1:], x[1:])


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_stride": 3}, r"compress_block = 4 must be a multiple of compress_stride = 3"),
        ({"select_block": 5}, r"select_block = 5 must be a multiple of compress_stride = 2"),
        ({"num_selected": 2}, r"num_selected = 2 must be at least num_initial \+ num_local = 1 \+ 2"),
        ({"window": 0}, r"window = 0 must be at least 1"),
        ({"num_local": 0}, r"num_local = 0 must be at least 1"),
        ({"compress_block": 4.0}, r"compress_block = 4.0 must be an integer"),
        ({"index_convention": "plus"}, r"index_convention = 'plus' must be one of minus, paper_v2"),
    ],
)
def test_pattern_errors_name_field_value_and_rule(changes, message):
    sizes = {"compress_block": 4, "compress_stride": 2, "select_block": 4, "num_selected": 4, "window": 8}
    with pytest.raises(ValueError, match=message):
        SparsePattern(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3}, r"n_heads = 3 must be a multiple of n_kv_heads = 2"),
        ({"head_dim": 5}, r"head_dim = 5 must be even"),
        ({"phi": "median"}, r"phi = 'median' must be one of mlp, mean"),
        ({"n_layers": 0}, r"n_layers = 0 must be at least 1"),
        ({"branches": "window"}, r"branches = 'window' must be a list of one or more of compressed, selected, window"),
        ({"branches": ()}, r"branches = \[\] must be a list of one or more of"),
        ({"branches": ["window", "sliding"]}, r"branches = \['window', 'sliding'\] must be a list of one or more of"),
        ({"branches": ["window", "window"]}, r"branches = \['window', 'window'\] must name each branch once"),
        ({"branches": ["selected", "window"]}, r"branches = \['selected', 'window'\] must include 'compressed'"),
    ],
)
def test_model_errors_name_field_value_and_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(**changes)


def test_attention_refuses_shapes_that_do_not_fit():
    names = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates")
    good = dict(zip(names, EXAMPLE.tensors(), strict=True))
    for name in names[1:]:
        with pytest.raises(ValueError, match=name):
            nsa_attention(**{**good, name: good[name][:, 1:]}, pattern=EXAMPLE.pattern)
    with pytest.raises(ValueError, match="phi"):
        nsa_attention(**good, pattern=EXAMPLE.pattern, phi="median")
    with pytest.raises(ValueError, match=r"gates has shape .*, 3\]; with this q it must be .*, 2\]"):
        nsa_attention(**good, pattern=EXAMPLE.pattern, branches=("compressed", "window"))
    with pytest.raises(ValueError, match="must include 'compressed'"):
        nsa_attention(**good, pattern=EXAMPLE.pattern, branches=("selected", "window"))
    with pytest.raises(ValueError, match="length 0"):
        nsa_attention(*(x[:, :0] for x in EXAMPLE.tensors()), pattern=EXAMPLE.pattern)
