"""Every attention of the zoo within `transformers`: files, dtypes, and the losses that layers have of their own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from nsa_compile.hf import NSAConfig, NSAForCausalLM
from nsa_compile.models import NSATransformer
from nsa_compile.models.variant import find
from tests.models.zoo.test_zoo import ZOO, small

INDEXED = [name for name in ZOO if find(name).auxiliary]


def made(name):
    torch.manual_seed(0)
    return NSAForCausalLM(NSAConfig.of(small(name)))


def tokens_of(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ZOO)
def test_a_saved_model_gives_the_same_logits(name, tmp_path):
    model, tokens = made(name).eval(), tokens_of(2, 15)
    model.save_pretrained(tmp_path)
    assert torch.equal(NSAForCausalLM.from_pretrained(tmp_path).eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", ["retnet", "mamba2", "gated_delta_net"])
def test_every_weight_that_a_file_lacks_begins_as_in_a_new_model(name, tmp_path):
    from safetensors.torch import load_file, save_file

    model = made(name)
    model.save_pretrained(tmp_path)
    kept = "model.embedding.weight"
    save_file({kept: load_file(tmp_path / "model.safetensors")[kept]}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(7)
    again = NSAForCausalLM.from_pretrained(tmp_path).model
    torch.manual_seed(7)
    expected = dict(NSATransformer(small(name)).named_parameters()) | {"embedding.weight": model.model.embedding.weight}
    for key, found in again.named_parameters():
        assert torch.equal(found, expected[key]), key


def test_retention_in_low_precision_forgets_as_in_high():
    """Decays near 1 round to 1 in bfloat16."""
    layer = made("retnet").model.blocks[0].attention
    states = []
    for dtype in (torch.float64, torch.bfloat16):
        layer = layer.to(dtype)
        state = layer.init_state(1, 1)
        state = state._replace(s=torch.ones_like(state.s))
        for t in range(200):
            state, _ = layer.decode_step(state, torch.zeros(1, layer.config.dim, dtype=dtype), torch.tensor(t))
        states.append(state.s)
    torch.testing.assert_close(states[1].double(), states[0], rtol=1e-4, atol=0)


@pytest.mark.deep(but=["qsa"])
@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_learns_where_labels_are_given(name):
    model, tokens = made(name), tokens_of(2, 15)
    logits, own = model.model(tokens, return_auxiliary=True)
    of_tokens = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss = model(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, of_tokens + own)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for key, p in model.named_parameters() if "index" in key)
    torch.testing.assert_close(model.eval()(tokens, labels=tokens).loss, of_tokens)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_teaches_an_indexer_nothing(side):
    model, tokens, width = made("msa"), tokens_of(2, 15), 15
    lengths = [15, 9]
    begin = [0, 0] if side == "right" else [0, 6]
    place = torch.arange(width) - torch.tensor(begin)[:, None]
    mask = (place >= 0) & (place < torch.tensor(lengths)[:, None])
    rows = torch.where(mask, tokens.take_along_dim(place.clamp(0, width - 1), 1), 3)
    labels = rows.masked_fill(~mask, -100)
    whole = model(rows, attention_mask=mask.long(), labels=labels).loss
    each = [model.model(tokens[i : i + 1, :n], return_auxiliary=True) for i, n in enumerate(lengths)]
    of_tokens = sum(
        torch.nn.functional.cross_entropy(logits[0, :-1], tokens[i, 1:n], reduction="sum")
        for i, (n, (logits, _)) in enumerate(zip(lengths, each, strict=True))
    ) / (sum(lengths) - 2)
    own = sum(n * loss for n, (_, loss) in zip(lengths, each, strict=True)) / sum(lengths)
    torch.testing.assert_close(whole, of_tokens + own)


def test_micro_batches_of_a_step_teach_an_indexer_once():
    model, tokens = made("msa"), tokens_of(4, 15)
    parts = [model(half, labels=half, num_items_in_batch=torch.tensor(4 * 14)).loss for half in tokens.split(2)]
    torch.testing.assert_close(sum(parts), model(tokens, labels=tokens).loss)
