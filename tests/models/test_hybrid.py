"""A model whose layers have different attentions."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import nsa_compile
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.errors import UserError
from nsa_compile.estimation.estimate import estimate_memory, measure_step
from nsa_compile.models import NSATransformer
from nsa_compile.models.flops import forward_flops_per_token
from nsa_compile.profiles.audit import audit_attention
from nsa_compile.profiles.passes_cli import explain_model
from nsa_compile.profiles.probe import Probe
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests.models.zoo import judge

LAYERS = ["gated_delta_net", "gla", "moba"]
SIZES = {"moba": {"block": 4, "num_selected": 2}, "gated_delta_net": {"conv": 3}}


def make_config(layers=LAYERS, sizes=SIZES, n_layers=5, **changes):
    return judge.make_config("hybrid", {"layers": layers, "sizes": sizes}, n_layers=n_layers, **changes)


def make_model(config):
    torch.manual_seed(0)
    return NSATransformer(config).double()


def tokens_for(config, length):
    return torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def test_layers_take_turns_and_have_their_own_sizes():
    config = make_config()
    model = make_model(config)
    names = [type(block.attention).__name__ for block in model.blocks]
    turn = ["GatedDeltaNetAttention", "GatedLinearAttention", "MoBAttention"]
    assert names == [*turn, *turn[:2]]
    assert model.blocks[0].attention.conv.weight.shape[1] == 3
    assert model.blocks[2].attention.config.pattern == judge.make_config("moba", SIZES["moba"]).pattern
    assert model.blocks[1].attention.config.pattern == judge.make_config("gla").pattern


def test_by_default_three_recurrent_layers_go_to_one_that_reads_tokens():
    assert judge.make_config("hybrid").pattern.layers == ("kda", "kda", "kda", "nsa")


def test_a_hybrid_of_one_attention_is_that_attention():
    alone = judge.make_config("moba", SIZES["moba"], n_layers=2)
    mixed = make_config(["moba"], {"moba": SIZES["moba"]}, n_layers=2)
    tokens = tokens_for(alone, 13)
    assert torch.equal(make_model(alone)(tokens), make_model(mixed)(tokens))
    assert forward_flops_per_token(alone, 13) == forward_flops_per_token(mixed, 13)


def test_useful_work_is_that_of_the_layers():
    def flops(**changes):
        return forward_flops_per_token(make_config(**changes), 20)

    none_of_layers = 2 * 12 * 256  # the head
    alone = {name: flops(layers=[name], sizes={name: SIZES.get(name, {})}, n_layers=1) for name in LAYERS}
    total = sum(alone[LAYERS[i % 3]] - none_of_layers for i in range(5)) + none_of_layers
    assert flops() == pytest.approx(total)


def test_token_by_token_is_the_same_as_the_sequence():
    config = make_config()
    model, tokens = make_model(config), tokens_for(config, 11)
    expected = model(tokens)
    state = model.init_state(2, 12)
    for t in range(11):
        state, logits = model.decode_step(state, tokens[:, t])
        torch.testing.assert_close(logits, expected[:, t], rtol=1e-9, atol=1e-9)
    state, logits = model.prefill(tokens, torch.tensor([5, 9]), 12)
    torch.testing.assert_close(logits, expected[torch.arange(2), torch.tensor([4, 8])], rtol=1e-9, atol=1e-9)


def test_a_token_without_room_in_a_later_layer_is_refused():
    config = make_config()
    model = make_model(config)
    state = model.init_state(2, 4)
    assert model.blocks[0].attention.room(state.layers[0]) is None
    full = state._replace(t=torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="a token at position 4 has no row in caches for 4 tokens"):
        model.decode_step(full, torch.tensor([0, 0]))
    endless = make_model(make_config(["gla", "kda"], None))
    endless.decode_step(endless.init_state(2, 4)._replace(t=torch.tensor([3, 400])), torch.tensor([0, 0]))


def test_what_is_compiled_is_the_loop():
    torch._dynamo.reset()
    config = make_config(n_layers=3)
    model, tokens = make_model(config), tokens_for(config, 13)
    compiled = nsa_compile.compile(model, nested="eager", cache=False)
    parameters = list(model.parameters())
    found = [[o := f(tokens), *torch.autograd.grad(o.square().sum(), parameters)] for f in (model, compiled)]
    for expected, given in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-8, atol=1e-9)


def test_a_layer_with_a_loss_of_its_own_among_others():
    sizes = {"dsa": {"num_selected": 5, "q_rank": 6, "kv_rank": 5, "rope_dim": 2, "index_heads": 2, "index_dim": 4}}
    config = make_config(["gla", "dsa"], sizes, n_layers=4)
    assert config.auxiliary
    assert not make_config().auxiliary
    model = make_model(config)
    logits, loss = model(tokens_for(config, 9), return_auxiliary=True)
    assert torch.equal(logits, model(tokens_for(config, 9)))
    loss.backward()
    assert model.blocks[1].attention.index_q.weight.grad.any()
    assert model.blocks[0].attention.q.weight.grad is None


def overrides(tiny_overrides, **changes):
    pattern = {"layers": LAYERS, "sizes": SIZES}
    values = [f"model.pattern.{key}={json.dumps(value)}" for key, value in pattern.items()]
    kept = [key for key in tiny_overrides(**changes) if not key.startswith("model.pattern.")]
    return [*kept, "model.attention=hybrid", *values]


@pytest.mark.deep
def test_it_trains_and_writes_text(tiny_overrides):
    torch._dynamo.reset()
    settings = ["compile.enabled=true", "compile.nested=eager", "optim.lr=0.01", "model.n_layers=4"]
    config = load_config(overrides=[*overrides(tiny_overrides), *settings])
    directory = create_run_directory(config)
    summary = run(config, load_corpus(config), directory)
    assert summary["val_loss_end"] < summary["val_loss_start"]
    assert (directory / "sample.txt").stat().st_size > 0
    assert load_config(str(directory / "config.resolved.yaml")).model == config.model


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("layers=[]", r"^model.pattern.layers = \[\] must be a list of one or more of nsa, dense, "),
        ("layers=gla", "^model.pattern.layers = 'gla' must be a list"),
        ("layers=[gla, hybrid]", r"^model.pattern.layers = \['gla', 'hybrid'\] must be a list"),
        ("layers=[gla, [nsa]]", r"^model.pattern.layers = \['gla', \['nsa'\]\] must be a list"),
        ("layers=[gla, csa]", "^model.n_kv_heads = 2 must be 1: all queries share one head of keys"),
        ("layers=[gla, dsa]", r"^model.pattern.sizes.dsa.rope_dim = 64 must be below head_dim = \d+; "),
        ("sizes=3", "^model.pattern.sizes = 3 is not allowed: it is a section, with keys of its own; set one of those"),
        (
            "sizes.nsa=3",
            "^model.pattern.sizes.nsa = 3 is not allowed: it is a section, with keys of its own; set one of those",
        ),
        ("sizes.gla.gate_rank=3", "^model.pattern.sizes.gla = .* must be of one of the layers, kda, nsa; "),
        ("sizes.nsa.window=0", "^model.pattern.sizes.nsa.window = 0 must be at least 1"),
        ("sizes.nsa.windw=8", "^unknown configuration key .* did you mean 'model.pattern.sizes.nsa.window'"),
        (
            "sizes.nsa.compress_block=1024",
            "^train.seq_len = 512 must be at least model.pattern.sizes.nsa.compress_block",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(override, line):
    with pytest.raises(UserError, match=line) as error:
        load_config(overrides=["model.attention=hybrid", f"model.pattern.{override}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tool",
    [
        lambda config: estimate_memory(config, torch.device("cpu")),
        lambda config: measure_step(config, torch.device("cpu")),
        lambda config: audit_attention(config),
        lambda config: Probe(config, 32),
        lambda config: explain_model(config),
    ],
    ids=["estimate", "measure", "audit", "probe", "explain"],
)
def test_what_looks_at_one_block_refuses_layers_that_differ(tool, tiny_overrides):
    config = load_config(overrides=overrides(tiny_overrides))
    with pytest.raises(
        UserError, match=r"^model.attention = hybrid has layers that differ, .*model.attention=gated_delta_net$"
    ):
        tool(config)


def test_sizes_are_plain_data():
    config = make_config()
    from nsa_compile.models.config import NSAConfig, from_plain

    assert from_plain(NSAConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config
