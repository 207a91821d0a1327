"""`convert` and `import` of the Llama family: against transformers' own model, and how close the start is to dense."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from nsa_compile.cli import cli, main
from nsa_compile.generation.converted import Gates, to_sparse
from nsa_compile.generation.exported import Exported, read_exported
from nsa_compile.models import NSATransformer, SparsePattern

SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
OPTIONS = ["--compress-block", 8, "--compress-stride", 4, "--select-block", 8, "--num-selected", 4, "--window", 32]


def llama(folder, shards="1GB", **changes):
    """A Llama of random weights, in float64, as transformers writes it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Scores of about 1, so that attention is not a mean; norms that are not 1.
            value.copy_(1 + torch.randn_like(value) / 8 if "norm" in name else torch.randn_like(value) / 3)
    model.save_pretrained(folder, max_shard_size=shards)
    return model.eval()


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


def tokens_of(length):
    return torch.randint(37, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rms_norm_eps": 0.1, "head_dim": 10, "num_key_value_heads": 1, "shards": "10KB"},
    ],
)
def test_an_imported_llama_has_the_logits_of_transformers(tmp_path, changes):
    theirs = llama(tmp_path / "llama", **changes)
    assert (len(list((tmp_path / "llama").glob("*.safetensors"))) > 1) == ("shards" in changes)
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    said = invoke("import", tmp_path / "llama", "--out", tmp_path / "ours")
    assert said.stdout.startswith(f"{tmp_path / 'ours'}: config.json, ")
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    ours = read_exported(tmp_path / "ours")
    assert (ours.model.config.attention, ours.tokenizer, ours.seq_len) == ("dense", None, 64)
    tokens = tokens_of(41)
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_converted_model_begins_as_the_dense_one_as_far_as_window_and_selection_reach(tmp_path):
    theirs = llama(tmp_path / "llama")
    said = invoke("convert", tmp_path / "llama", "--out", tmp_path / "ours", *OPTIONS)
    assert said.stdout.startswith(f"{tmp_path / 'ours'}: config.json, ")
    assert "model.attention" not in said.stderr
    assert "--set model.shared_kv=true" in said.stderr
    ours = read_exported(tmp_path / "ours").model
    assert (ours.config.phi, ours.config.pattern.window) == ("mean", 32)
    tokens = tokens_of(48)
    with torch.no_grad():
        dense = theirs(tokens).logits
        difference = (ours(tokens) - dense).abs().amax(dim=(0, 2))
    # Before the first block is compressed nothing but rounding differs; then one hundredth of a mean is added.
    assert difference[:7].max() < 1e-5
    assert 1e-4 < difference[7:32].max() < 0.3 < dense.std()
    # Behind both, a start of another kind would be as good.
    assert difference[32:].max() > difference[:32].max()


@pytest.mark.parametrize("gates", [Gates(1e-12, 0.5, 0.5), Gates(1e-12, 1e-12, 1 - 1e-12), Gates(1e-12, 0.3, 0.7)])
def test_shared_gates_give_dense_attention_within_the_window(tmp_path, gates):
    theirs = llama(tmp_path / "llama")
    invoke("import", tmp_path / "llama", "--out", tmp_path / "dense")
    pattern = SparsePattern(8, 4, 8, 4, 32)
    sparse = to_sparse(read_exported(tmp_path / "dense"), pattern, gates).model
    tokens = tokens_of(40)
    with torch.no_grad():
        difference = (sparse(tokens) - theirs(tokens).logits).abs().amax(dim=(0, 2))
    assert difference[:32].max() < 1e-5
    assert difference[33:].max() > 1e-3


def test_gates_that_do_not_add_up_to_one_are_not_dense(tmp_path):
    llama(tmp_path / "llama")
    invoke("import", tmp_path / "llama", "--out", tmp_path / "dense")
    dense = read_exported(tmp_path / "dense")
    sparse = to_sparse(dense, SparsePattern(8, 4, 8, 4, 32), Gates(1e-12, 0.5, 0.6)).model
    tokens = tokens_of(8)
    with torch.no_grad():
        assert (sparse(tokens) - dense.model(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "is of model_type 'gpt2'; it must be"),
        ({"attention_bias": True}, "attention_bias = True must be False"),
        ({"mlp_bias": True}, "mlp_bias = True must be False"),
        ({"sliding_window": 128}, "sliding_window = 128 must be None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' must be 'silu'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, "rope_type = 'llama3' must be 'default'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = 'linear' must be"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 must be"),
        ({"rope_parameters": {}, "rope_theta": "x"}, "rope_theta = 'x' must be a positive number"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} must be None"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight of the shape [24] is missing, and 8 more"),
        ({"hidden_size": 16}, "lm_head.weight must have the shape [37, 16] and has [37, 24], and 20 more"),
        ("no key", "lacks 'intermediate_size'"),
        ("bias", "by config.json, model.layers.0.self_attn.q_norm.weight of the shape [8] has no place in it"),
        ("pickle", "is no file of safetensors"),
        ("only a pickle", "has no file of safetensors"),
        ("shard", "is no file of safetensors"),
        ("index", "cannot be read"),
        ("outside", "names '../x.safetensors', which must be a file beside it"),
        ("nowhere", "must be the directory of a run"),
        ("sparse", "attention = 'nsa' must be 'dense'"),
        ("sizes", "compress_block = 9 must be a multiple of compress_stride = 4"),
        ("hub", "'hf:a/b/c' must have the form hf:ORG/NAME"),
    ],
)
def test_what_does_not_map_is_refused_in_one_line(tmp_path, capsys, change, said):
    source, options = tmp_path / "llama", list(OPTIONS)
    llama(source)
    config, weights = source / "config.json", source / "model.safetensors"
    if isinstance(change, dict):
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    elif change == "no key":
        values = json.loads(config.read_text())
        del values["intermediate_size"]
        config.write_text(json.dumps(values))
    elif change == "bias":
        save_file({**load_file(weights), "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, weights)
    elif change == "pickle":
        torch.save({"x": torch.zeros(1)}, weights)
    elif change == "only a pickle":
        weights.rename(source / "pytorch_model.bin")
    elif change in ("shard", "index", "outside"):
        name = {"shard": "model-2.safetensors", "outside": "../x.safetensors"}.get(change)
        text = json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}) if name else "[]"
        (source / "model.safetensors.index.json").write_text(text)
    elif change == "nowhere":
        source = tmp_path / "nowhere"
    elif change == "sparse":
        invoke("convert", source, "--out", tmp_path / "sparse", *OPTIONS)
        source = tmp_path / "sparse"
    elif change == "sizes":
        options[1] = 9
    elif change == "hub":
        source = "hf:a/b/c"
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in ("convert", source, "--out", tmp_path / "ours", *options)])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1), error
    assert said in error
    assert not (tmp_path / "ours").exists()


def test_a_converted_model_keeps_its_dtype_and_learns(tmp_path):
    """Gates lie where a sigmoid has a gradient, in every branch."""
    torch.manual_seed(0)
    from nsa_compile.models import NSAConfig

    dense = NSATransformer(NSAConfig(37, 24, 1, 4, 2, 8, attention="dense")).bfloat16()
    sparse = to_sparse(Exported(dense, "byte", 40), SparsePattern(8, 4, 8, 4, 8))
    assert (sparse.tokenizer, sparse.seq_len, sparse.model.embedding.weight.dtype) == ("byte", 40, torch.bfloat16)
    assert torch.equal(sparse.model.blocks[0].attention.k.weight, dense.blocks[0].attention.k.weight)
    model = sparse.model.float()
    model(tokens_of(40)).square().sum().backward()
    assert (model.blocks[0].attention.gate.bias.grad.view(4, 3).abs().sum(0) > 0).all()
