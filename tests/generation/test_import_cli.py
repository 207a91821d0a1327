"""`import`: a model of fla's configuration and key names, against that design in float64, query by query."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.functional import rms_norm, silu

pytest.importorskip("safetensors")

from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import nsa_compile
from nsa_compile.cli import cli, main
from nsa_compile.generation.exported import read_exported
from nsa_compile.generation.imported import _fla

# As fla's NSAConfig.save_pretrained writes it, without what no model depends on.
CONFIG = {
    "model_type": "nsa", "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "qkv_bias": False, "block_size": 4, "block_counts": 4, "window_size": 6, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "hidden_ratio": 4, "intermediate_size": None, "hidden_act": "swish",
    "norm_eps": 1e-6, "fuse_norm": True,
}  # fmt: skip
HIDDEN = 32


def fla_weights(tied=False):
    """Random weights by the names of fla's `NSAForCausalLM`."""
    generator = torch.Generator().manual_seed(0)
    dim, heads, groups, width = 16, 4, 2, 8
    shapes = {"model.embeddings.weight": (23, dim), "model.norm.weight": (dim,)}
    if not tied:
        shapes["lm_head.weight"] = (23, dim)
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "attn_norm.weight": (dim,), layer + "mlp_norm.weight": (dim,),
            layer + "attn.q_proj.weight": (heads * width, dim), layer + "attn.k_proj.weight": (groups * width, dim),
            layer + "attn.v_proj.weight": (groups * width, dim), layer + "attn.g_proj.weight": (heads * 3, dim),
            layer + "attn.o_proj.weight": (dim, heads * width), layer + "mlp.gate_proj.weight": (HIDDEN, dim),
            layer + "mlp.up_proj.weight": (HIDDEN, dim), layer + "mlp.down_proj.weight": (dim, HIDDEN),
        }  # fmt: skip
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    # Scores of about 1, so that attention is not a mean.
    return {name: 1 + value / 8 if value.dim() == 1 else value / 2 for name, value in drawn.items()}


def rotated(x):
    """RoPE of heads `[S, H, D]`, halves paired."""
    length, _, width = x.shape
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * frequency
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def attention(q, k, v, gates):
    """fla's NSA of one sequence: `q` `[S, Hq, D]`, `k` and `v` `[S, G, D]`, `gates` `[S, Hq, 3]`."""
    length, heads, width = q.shape
    groups, size, count, window = k.shape[1], CONFIG["block_size"], CONFIG["block_counts"], CONFIG["window_size"]
    out = torch.zeros_like(q)
    for t in range(length):
        own = t // size
        complete = (t + 1) // size  # blocks that end no later than t
        for group in range(groups):
            members = range(group * heads // groups, (group + 1) * heads // groups)
            means = [k[c * size : (c + 1) * size, group].mean(0) for c in range(complete)]
            values = [v[c * size : (c + 1) * size, group].mean(0) for c in range(complete)]
            importance = [0.0] * (own + 1)
            compressed = {head: torch.zeros(width, dtype=q.dtype) for head in members}
            for head in members:
                if complete:
                    weights = (torch.stack(means) @ q[t, head] / math.sqrt(width)).softmax(0)
                    compressed[head] = weights @ torch.stack(values)
                    for c in range(complete):
                        importance[c] += weights[c].item() / len(members)
            for forced in (0, own, own - 1):
                if forced >= 0:
                    importance[forced] = 1.0
            best = sorted(range(own + 1), key=lambda c: (-importance[c], c))[:count]
            chosen = sorted(s for c in best for s in range(c * size, (c + 1) * size) if s <= t)
            near = range(max(0, t - window + 1), t + 1)
            for head in members:
                branches = [compressed[head]]
                for rows in (chosen, near):
                    rows = list(rows)
                    branches.append((k[rows, group] @ q[t, head] / math.sqrt(width)).softmax(0) @ v[rows, group])
                out[t, head] = sum(gate * branch for gate, branch in zip(gates[t, head], branches, strict=True))
    return out


def reference(weights, tokens):
    """Logits `[S, V]` of one sequence."""
    x = weights["model.embeddings.weight"][tokens]
    for i in range(CONFIG["num_hidden_layers"]):
        w = {name.removeprefix(f"model.layers.{i}."): value for name, value in weights.items()}
        y = rms_norm(x, (16,), w["attn_norm.weight"], 1e-6)
        q, k, v = ((y @ w[f"attn.{n}_proj.weight"].T).unflatten(-1, (-1, 8)) for n in "qkv")
        gates = (y @ w["attn.g_proj.weight"].T).unflatten(-1, (-1, 3)).sigmoid()
        x = x + attention(rotated(q), rotated(k), v, gates).flatten(1) @ w["attn.o_proj.weight"].T
        y = rms_norm(x, (16,), w["mlp_norm.weight"], 1e-6)
        hidden = silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + hidden @ w["mlp.down_proj.weight"].T
    x = rms_norm(x, (16,), weights["model.norm.weight"], 1e-6)
    return x @ weights.get("lm_head.weight", weights["model.embeddings.weight"]).T


def fla_folder(folder, weights, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    names = sorted(weights)
    for i, part in enumerate((names[::2], names[1::2])):  # in two files, as of a large model
        save_file({name: weights[name] for name in part}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    return folder


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.deep
@pytest.mark.parametrize("tied", [False, True])
def test_an_imported_model_has_the_logits_of_the_design(tmp_path, tied):
    weights = fla_weights(tied)
    source = fla_folder(tmp_path / "fla", weights, tie_word_embeddings=tied)
    (source / "tokenizer.json").write_text("{}")
    said = invoke("import", source, "--out", tmp_path / "ours")
    assert said.stdout == f"{tmp_path / 'ours'}: config.json, model.safetensors, tokenizer.json of '{source}'\n"
    exported = read_exported(tmp_path / "ours")
    assert (exported.tokenizer, exported.seq_len) == (None, 64)
    model = exported.model
    tokens = torch.randint(23, (2, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens)
        nsa_compile.compile_blocks(model, nested="eager", cache=False)
        compiled = model(tokens)
    wanted = torch.stack([reference(weights, row) for row in tokens])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(compiled, wanted, rtol=1e-9, atol=1e-10)


def test_the_config_may_leave_out_what_has_a_default_in_fla(tmp_path):
    """A length of the training, and fewer heads for keys than for queries."""
    source = fla_folder(tmp_path / "fla", fla_weights())
    values = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    (source / "config.json").write_text(json.dumps(values))
    assert invoke("import", source, "--out", tmp_path / "ours").exit_code == 0
    assert read_exported(tmp_path / "ours").seq_len is None
    values = {**CONFIG, "tie_word_embeddings": False, "num_kv_heads": None}
    assert _fla(values).n_kv_heads == CONFIG["num_heads"]


def test_a_folder_without_a_tokenizer_is_imported_with_a_note(tmp_path):
    source = fla_folder(tmp_path / "fla", fla_weights())
    said = invoke("import", source, "--out", tmp_path / "ours")
    assert (said.exit_code, said.stdout) == (0, f"{tmp_path / 'ours'}: config.json, model.safetensors of '{source}'\n")
    assert said.stderr == f"note: '{source}' has no tokenizer, so '{tmp_path / 'ours'}' takes tokens and not text\n"


def test_transformers_reads_what_was_imported(tmp_path):
    pytest.importorskip("transformers")
    from nsa_compile.hf import NSAForCausalLM

    weights = {name: value.bfloat16() for name, value in fla_weights().items()}
    invoke("import", fla_folder(tmp_path / "fla", weights), "--out", tmp_path / "ours")
    model = NSAForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.head.weight, weights["lm_head.weight"])
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape == (1, 7)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "is of model_type 'bert'; it must be 'nsa' or 'llama' or 'mistral'"),
        ({"qkv_bias": True}, "qkv_bias = True must be False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' must be 'swish'"),
        ({"window_size": 0}, "window = 0 must be at least 1"),
        ({"block_counts": 2}, "num_selected = 2 must be at least num_initial + num_local"),
        ({"block_counts": None}, "num_selected = None must be an integer"),
        (
            {"num_hidden_layers": 3},
            "by config.json, model.layers.2.attn_norm.weight of the shape [16] is missing, and 9 more do not fit; take",
        ),
        (
            {"num_hidden_layers": 1},
            "by config.json, model.layers.1.attn.g_proj.weight of the shape [12, 16] has no place in it, and 9 more",
        ),
        ({"vocab_size": 24}, "lm_head.weight must have the shape [24, 16] and has [23, 16], and 1 more do not fit"),
        ({"hidden_size": 8}, "lm_head.weight must have the shape [23, 8] and has [23, 16], and 22 more do not fit"),
        ({"num_heads": "four"}, "n_heads = 'four' must be an integer"),
        ("no key", "lacks 'block_size'"),
        ("no weights", "has no file of safetensors"),
        ("pickle", "is no file of safetensors"),
        ("[", "cannot be read"),
        ("[]", "is of model_type None"),
        ("nowhere", "cannot be read"),
    ],
)
def test_what_is_no_model_of_fla_is_refused_in_one_line(tmp_path, capsys, change, said):
    source = fla_folder(tmp_path / "fla", fla_weights(), **(change if isinstance(change, dict) else {}))
    files = sorted(source.glob("*.safetensors"))
    if change == "no key":
        values = {name: value for name, value in CONFIG.items() if name != "block_size"}
        (source / "config.json").write_text(json.dumps(values))
    elif change == "no weights":
        for file in files:
            file.rename(file.with_suffix(".bin"))
    elif change == "pickle":
        torch.save({"x": torch.zeros(1)}, files[0])
    elif change == "nowhere":
        source = tmp_path / "nowhere"
    elif isinstance(change, str):
        (source / "config.json").write_text(change)
    with pytest.raises(SystemExit) as ended:
        main(["import", str(source), "--out", str(tmp_path / "ours")])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert said in error
    assert not (tmp_path / "ours").exists()
