"""The statistics are those of the model's own step: nothing of NSA is computed beside it."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

import nsa_compile
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern, nsa, nsa_statistics
from nsa_compile.models.nsa import nsa_attention, observed_nsa_attention

PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=5, window=6)


def make_model(**changes):
    torch.manual_seed(0)
    config = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "pattern": PATTERN, "mlp_hidden": 32, **changes}
    return NSATransformer(NSAConfig(vocab_size=19, dim=16, n_layers=2, **config)).double()


def attention_statistics(model, tokens):
    """As the trainer asks for them."""
    return model.config.variant.statistics(model, tokens)


def tokens(length=44):
    return torch.randint(19, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.deep
def test_another_step_has_other_statistics(monkeypatch):
    """What is reported follows the definition of the step, whatever that comes to."""
    before = attention_statistics(make_model(), tokens())
    gated_branches = nsa._gated_branches

    def without_window(state, token, *rest):
        state, (compressed, selected, window), selection = gated_branches(state, token, *rest)
        return state, [compressed, selected, 0 * window], selection

    def latest_blocks(p_cmp, t, max_len, pattern):
        block = torch.arange(-(-max_len // pattern.select_block))
        score = torch.where(block <= t // pattern.select_block, block.double(), -torch.inf).expand(*p_cmp.shape[:2], -1)
        best, index = torch.sort(score, dim=-1, descending=True, stable=True)
        n = pattern.num_selected
        return torch.where(best[..., :n] > -torch.inf, index[..., :n], -1)

    monkeypatch.setattr(nsa, "_gated_branches", without_window)
    monkeypatch.setattr(nsa, "select_blocks", latest_blocks)
    after = attention_statistics(make_model(), tokens())
    for layer, changed in zip(before, after, strict=True):
        assert layer.share_window > 0.1
        assert changed.share_window == 0
        # Five blocks up to the query's own: three are free, at most five blocks behind the query.
        assert changed.distance_p90 < 4 * PATTERN.select_block + 4 < layer.distance_p90


@pytest.mark.parametrize("changes", [{}, {"shared_kv": True, "phi": "mean"}, {"v_head_dim": 3}])
def test_the_gated_branches_add_up_to_the_output(changes):
    inputs = make_model(**changes).blocks[0].attention.attention_inputs(torch.randn(1, 20, 16).double())
    output, gated = observed_nsa_attention(**inputs)
    assert torch.equal(output, nsa_attention(**inputs))
    assert gated.shape == (1, 20, 4, 3, changes.get("v_head_dim", 4))
    torch.testing.assert_close(gated.sum(-2), output)


@pytest.mark.deep
def test_room_for_every_block_leaves_no_choice_out():
    """The operator of the selected branch is given no indices then; the statistics are the same as with them."""
    roomy = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=11, window=6)
    layer = attention_statistics(make_model(pattern=roomy), tokens())[0]
    free = [(t, j) for t in range(44) for j in range(11) if 1 <= j < t // 4 - 1]
    distances = [t - (4 * j + 3) for t, j in free]
    assert layer.distance_mean == pytest.approx(sum(distances) / len(distances))


@pytest.mark.deep
def test_what_cannot_be_observed_is_said(monkeypatch, caplog):
    monkeypatch.setattr(nsa_statistics, "_OPTIONS", {"attention": "dense"})
    assert attention_statistics(make_model(), tokens()) == []
    assert "no statistics of the attention: the compiler put in no operator for the selected branch" in caplog.text
    torch._dynamo.reset()
    monkeypatch.setattr(nsa_statistics, "_OPTIONS", {"disable": ("resolve_carries",), "cache": False})
    assert attention_statistics(make_model(), tokens()) == []
    assert "no statistics of the attention: the compiler left the loop over the tokens in place" in caplog.text


@pytest.mark.deep
def test_the_first_call_changes_nothing_of_the_training():
    model = nsa_compile.compile_blocks(make_model(), nested="eager", cache=False)
    model.checkpoint_blocks({0})
    model(tokens()).sum().backward()
    report, rng = nsa_compile.last_report(), torch.get_rng_state()
    assert report is not None
    observed = attention_statistics(model, tokens())
    assert nsa_compile.last_report() is report
    assert torch.equal(torch.get_rng_state(), rng)
    plain = attention_statistics(make_model(), tokens())
    assert [asdict(layer) for layer in observed] == [asdict(layer) for layer in plain]
