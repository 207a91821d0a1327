"""`NSAForCausalLM` against `NSATransformer`, and each text of a batch against itself alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

import nsa_compile
from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.generation import generate as module
from nsa_compile.generation.generate import generate
from nsa_compile.generation.sampling import Sampling
from nsa_compile.hf import NSACache, NSAConfig, NSAForCausalLM, modeling
from nsa_compile.hf.tokenizer import fast_tokenizer
from tests.models.test_nsa import tiny_model

EAGER = {"nested": "eager", "cache": False}


def wrapped(**changes):
    """A model of `transformers`, in float64, and the one of ours with the same weights."""
    torch.manual_seed(0)
    ours = tiny_model(n_layers=2, **changes)
    model = NSAForCausalLM(NSAConfig.of(ours.config)).double().eval()
    model.model.load_state_dict(ours.state_dict())
    return model, ours


@pytest.fixture(scope="module")
def pair():
    return wrapped()


@pytest.fixture
def model(pair):
    return pair[0]


def random_tokens(*shape):
    return torch.randint(0, 19, shape, generator=torch.Generator().manual_seed(1))


def ragged(lengths, side):
    """Tokens `[B, S]` and their mask, with padding on a side."""
    width = max(lengths)
    column = torch.arange(width)
    each = torch.tensor(lengths)[:, None]
    mask = (column < each) if side == "right" else (column >= width - each)
    return random_tokens(len(lengths), width), mask.long()


def test_logits_are_those_of_the_model_within(pair):
    model, ours = pair
    tokens = random_tokens(2, 13)
    assert torch.equal(model(tokens).logits, ours(tokens))
    assert torch.equal(model(tokens, logits_to_keep=3).logits, ours(tokens)[:, -3:])


def test_the_loss_is_that_of_the_next_token(pair):
    model, ours = pair
    tokens = random_tokens(2, 9)
    labels = tokens.clone()
    labels[:, :4] = -100
    wanted = torch.nn.functional.cross_entropy(ours(tokens)[:, 3:-1].flatten(0, 1), tokens[:, 4:].flatten())
    torch.testing.assert_close(model(tokens, labels=labels).loss.double(), wanted, rtol=1e-6, atol=0)


def test_the_loss_is_the_same_with_padding_on_either_side(model):
    losses = []
    for side in ("left", "right"):
        _, mask = ragged([5, 11, 2], side)
        tokens = torch.zeros_like(mask)
        tokens[mask.bool()] = random_tokens(18)
        losses.append(model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_on_either_side_changes_nothing(model, side, use_cache):
    tokens, mask = ragged([5, 11, 1], side)
    logits = model(tokens, attention_mask=mask, use_cache=use_cache).logits
    for row, there, found in zip(tokens, mask.bool(), logits, strict=True):
        alone = model(row[there][None]).logits[0]
        torch.testing.assert_close(found[there], alone)
        torch.testing.assert_close(found[-1], alone[-1])


@pytest.mark.parametrize("mask", [[[1, 0, 1], [1, 1, 1]], [[0, 0, 0], [1, 1, 1]]])
def test_other_masks_are_refused(model, mask):
    with pytest.raises(ValueError, match="row 0 of attention_mask must be 1"):
        model(random_tokens(2, 3), attention_mask=torch.tensor(mask))


def test_a_cache_of_another_kind_is_refused(model):
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="cache is a DynamicCache; it must be an NSACache"):
        model(random_tokens(1, 3), cache=DynamicCache())


@pytest.mark.parametrize("name", ["position_ids", "inputs_embeds", "output_hidden_states"])
def test_what_the_model_does_not_do_is_refused(model, name):
    with pytest.raises(ValueError, match=f"does not take {name}"):
        model(random_tokens(1, 3), **{name: True})


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_generate_selects_is_recorded_and_replayed(pair, side):
    """In the columns of the tokens, whatever their padding."""
    model, ours = pair
    tokens, mask = ragged([5, 11, 1], side)
    cache = NSACache(record_selection=True)
    with pytest.raises(ValueError, match="no selection was recorded"):
        _ = cache.selection
    read = tokens[:, :8] if side == "right" else tokens
    there = mask[:, : read.shape[1]]
    if side == "left":
        arguments = {"attention_mask": there, "cache": cache, "max_new_tokens": 6, "do_sample": False}
        tokens = model.generate(read, **arguments)
        mask = torch.cat([there, torch.ones(3, 6).long()], 1)[:, :-1]
        tokens = tokens[:, :-1]  # the last token drawn is read by nobody
    else:
        model(read, attention_mask=there, cache=cache, use_cache=True)
        tokens, mask = read, there
    assert cache.selection.shape == (*tokens.shape, 2, 2, 4)
    for row, real, selection in zip(tokens, mask.bool(), cache.selection, strict=True):
        assert torch.equal(selection[real], ours(row[real][None], return_selection=True)[1][0])
        assert bool((selection[~real] == -1).all())
    other = cache.selection.flip(1).clamp(min=0)
    logits = model(tokens, attention_mask=mask, selection=other).logits
    for row, real, selection, found in zip(tokens, mask.bool(), other, logits, strict=True):
        torch.testing.assert_close(found[real], ours(row[real][None], selection[real][None])[0])
    with pytest.raises(ValueError, match="selection was given with a cache"):
        model(tokens, attention_mask=mask, selection=other, use_cache=True)
    with pytest.raises(ValueError, match="selection has shape"):
        model(tokens, attention_mask=mask, selection=other[:, 1:])


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_the_same_bit_for_bit(tmp_path, tied):
    model, _ = wrapped(tie_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    again = NSAForCausalLM.from_pretrained(tmp_path)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert (again.model.head.weight is again.model.embedding.weight) == tied
    assert again.config.sizes() == model.config.sizes()


def test_the_auto_classes_know_it(model, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).sizes() == model.config.sizes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is NSAForCausalLM
    tokens = random_tokens(1, 5)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


SERVED = """
import sys
from transformers import AutoModelForCausalLM

folder, again = sys.argv[1:]
assert "nsa_compile" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__ == "nsa_compile.hf.modeling"
model.save_pretrained(again)
import transformers
assert transformers.NSAForCausalLM is type(model)
"""


@pytest.mark.deep
def test_trust_remote_code_finds_the_package_again_and_again(model, tmp_path):
    folders = [tmp_path / name for name in ("first", "second", "third")]
    model.save_pretrained(folders[0])
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    for folder, again in itertools.pairwise(folders):
        command = [sys.executable, "-c", SERVED, str(folder), str(again)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert {path.suffix for path in again.iterdir()} == {".json", ".py", ".safetensors"}
        assert [path.name for path in again.glob("*.py")] == ["nsa_compile_model.py"]


def test_weights_that_a_file_lacks_begin_as_in_a_new_model(model, tmp_path):
    from safetensors.torch import load_file, save_file

    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = ["model.blocks.0.attention.phi_k.position", "model.blocks.1.attention.q.weight", "model.norm.weight"]
    for name in lost:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    found = NSAForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert torch.equal(found[lost[2]], torch.ones_like(found[lost[2]]))
    assert all(0.005 < found[name].std() < 0.05 for name in lost[:2])


def test_a_pickle_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        NSAForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(Exception, match="header"):
        NSAForCausalLM.from_pretrained(tmp_path)


def test_a_configuration_is_checked():
    sizes = {"vocab_size": 8, "dim": 8, "n_layers": 1, "n_heads": 3, "n_kv_heads": 2, "head_dim": 4}
    with pytest.raises(ValueError, match="n_heads = 3 must be a multiple of n_kv_heads = 2"):
        NSAConfig(**sizes)
    with pytest.raises(ValueError, match="dim is missing and has no default"):
        NSAConfig(**{name: value for name, value in sizes.items() if name != "dim"})
    assert NSAConfig(**{**sizes, "n_heads": 2}).hidden_size == 8


@pytest.fixture
def small(monkeypatch):
    """Caches that soon have to grow, programs of few rows."""
    monkeypatch.setattr(module, "LEAST_EAGER_ROOM", 8)
    monkeypatch.setattr(module, "LEAST_ROOM", 32)
    monkeypatch.setattr(module, "LEAST_PROMPT", 8)


@pytest.mark.deep(but=["left-False"])
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_greedy_text_is_the_one_that_it_is_alone(pair, compiled, side):
    model, ours = pair
    if compiled:
        model, _ = wrapped()
        model.compile_generation(**EAGER)
    tokens, mask = ragged([3, 7, 1], side)
    texts = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row, there, text in zip(tokens, mask.bool(), texts, strict=True):
        wanted = generate(ours, row[there], 12, Sampling(temperature=0), torch.Generator())
        assert text[len(row) :].tolist() == wanted.tolist()


@pytest.mark.deep(but=["how0"])
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}])
def test_the_cache_changes_nothing(model, how):
    tokens, mask = ragged([4, 6], "left")
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(model.generate(tokens, attention_mask=mask, max_new_tokens=9, use_cache=use_cache, **how))
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.deep
@pytest.mark.usefixtures("small")
def test_a_static_cache_is_a_compiled_step(pair, monkeypatch):
    model, _ = wrapped()
    monkeypatch.setattr(modeling, "Decoder", functools.partial(modeling.Decoder, **EAGER))
    prompt = random_tokens(1, 5)
    texts = [model.generate(prompt, max_new_tokens=9, cache_implementation=kind).tolist() for kind in (None, "static")]
    assert model._decoder.compiled
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="cache_implementation = 'offloaded' must be 'dynamic', 'static' or left out"):
        model.generate(prompt, max_new_tokens=2, cache_implementation="offloaded")


def test_a_text_ends_at_a_stop_string(model):
    tokenizer = fast_tokenizer(ByteTokenizer())
    prompt = random_tokens(1, 5)
    text = model.generate(prompt, max_new_tokens=9)[0].tolist()
    stop = tokenizer.decode(text[6:8])
    found = model.generate(prompt, max_new_tokens=9, stop_strings=[stop], tokenizer=tokenizer)[0].tolist()
    assert found == text[:8]


@pytest.mark.usefixtures("small")
def test_a_text_goes_on_from_the_cache_that_was_returned(model):
    prompt = random_tokens(1, 5)
    begun = model.generate(prompt, max_new_tokens=6, return_dict_in_generate=True)
    cache = begun.cache
    assert isinstance(cache, NSACache)
    assert (cache.get_seq_length(), int(cache.state.t)) == (10, 10)  # the last token drawn is not in it
    longer = torch.cat([begun.sequences, random_tokens(1, 3)], dim=1)
    wanted = model.generate(longer, max_new_tokens=6)
    assert model.generate(longer, max_new_tokens=6, cache=cache).tolist() == wanted.tolist()


def test_what_the_state_cannot_do_is_refused(model):
    prompt = random_tokens(1, 4)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(prompt, max_new_tokens=4, prompt_lookup_num_tokens=2)
    with pytest.raises(NotImplementedError, match="cannot forget tokens"):
        model(prompt, use_cache=True).cache.crop(1)


def test_tokens_that_follow_the_cache_have_no_padding(model):
    cache = model(random_tokens(2, 4), use_cache=True).cache
    with pytest.raises(ValueError, match="has a 0 for a token that follows"):
        model(random_tokens(2, 2), attention_mask=torch.tensor([[1] * 6, [1] * 5 + [0]]), cache=cache)


WRONG = {
    "cache holds 3 sequences, and input_ids 2": lambda m, x: m(x[:2, 6:], cache=m(x[:, :6], use_cache=True).cache),
    "input_ids is None": lambda m, x: m(),
    "does not take inputs_embeds": lambda m, x: m(inputs_embeds=torch.zeros(1, 5, 8)),
    "labels were given with logits_to_keep": lambda m, x: m(x, labels=x, logits_to_keep=4),
    r"input_ids has shape \[9\]; it must be \[B, S\]": lambda m, x: m(x[0]),
    r"input_ids has shape \[1, 0\]": lambda m, x: m.generate(x[:1, :0], max_new_tokens=2),
    "no token after the 6 that cache holds": lambda m, x: m.generate(
        x[:, :3], cache=m(x[:, :6], use_cache=True).cache, max_new_tokens=2
    ),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_mistake_is_one_clear_line(model, rule):
    with pytest.raises(ValueError, match=rule):
        WRONG[rule](model, random_tokens(3, 9))


def cache_of_another(model, **changes):
    config = NSAConfig.of(dataclasses.replace(model.config.sizes(), **changes))
    return NSAForCausalLM(config).double()(random_tokens(2, 5), use_cache=True).cache


@pytest.mark.parametrize("changes", [{"n_layers": 1}, {"n_kv_heads": 1}, {"head_dim": 2}])
def test_a_cache_of_another_model_is_refused(model, changes):
    with pytest.raises(ValueError, match="cache was filled by a model of other layers or sizes"):
        model(random_tokens(2, 3), cache=cache_of_another(model, **changes))


def test_a_cache_of_the_same_sizes_is_taken(model):
    """Whose weights filled it nobody can see."""
    assert model(random_tokens(2, 3), cache=cache_of_another(model, phi="mean")).logits.shape[1] == 3


def test_logits_of_columns(model):
    x, columns = random_tokens(2, 9), torch.tensor([0, 5])
    assert torch.equal(model(x, logits_to_keep=columns).logits, model(x).logits[:, columns])
    with_cache = model(x, logits_to_keep=columns, use_cache=True).logits
    torch.testing.assert_close(with_cache, model(x).logits[:, columns])


@pytest.mark.deep
def test_compiled_blocks_give_the_logits_of_the_loop(pair):
    model, _ = wrapped()
    tokens, mask = ragged([9, 12], "left")
    wanted = pair[0](tokens, attention_mask=mask, labels=tokens)
    nsa_compile.compile_blocks(model.model, **EAGER)
    found = model(tokens, attention_mask=mask, labels=tokens)
    assert nsa_compile.last_report().scans[0].name
    torch.testing.assert_close((found.logits, found.loss), (wanted.logits, wanted.loss))


@pytest.mark.deep
@pytest.mark.usefixtures("small")
def test_a_copy_of_a_model_generates_by_its_own_weights(pair):
    model, _ = wrapped()
    model.compile_generation(**EAGER)
    prompt = random_tokens(1, 3)
    texts = [model.generate(prompt, max_new_tokens=9).tolist()]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.head.weight.neg_()
    texts += [each.generate(prompt, max_new_tokens=9).tolist() for each in (copied, model)]
    assert texts[0] == texts[2] != texts[1]


def test_a_model_with_dense_attention_does_the_same():
    model, ours = wrapped(attention="dense")
    prompt = random_tokens(1, 5)
    wanted = generate(ours, prompt[0], 6, Sampling(temperature=0), torch.Generator())
    assert model.generate(prompt, max_new_tokens=6)[0, 5:].tolist() == wanted.tolist()


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_the_trainer_trains_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    model, _ = wrapped()
    model.float()
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(6, 12)]
    before = model.state_dict()["model.blocks.0.attention.q.weight"].clone()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], save_steps=3, use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    assert trainer.train().global_step == 3
    assert not torch.equal(before, model.state_dict()["model.blocks.0.attention.q.weight"])
    assert trainer.evaluate()["eval_loss"] > 0
    saved = NSAForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.state_dict().items())


@pytest.mark.deep
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compiled", [False, True])
def test_several_threads_may_generate_at_once(pair, compiled):
    model, ours = wrapped()
    if compiled:
        torch._dynamo.reset()
        model.compile_generation(**EAGER)
    prompts = [random_tokens(1, length) for length in (1, 3, 5, 9, 12, 14, 17, 30)]
    begin = threading.Barrier(len(prompts))

    def text(prompt):
        begin.wait()
        return model.generate(prompt, max_new_tokens=9, do_sample=False)[0, prompt.shape[1] :].tolist()

    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(text, prompts))
    alone = [generate(ours, prompt[0], 9, Sampling(temperature=0), torch.Generator()) for prompt in prompts]
    assert found == [tokens.tolist() for tokens in alone]
