"""Prompts and tokens for which caches have no room are refused, at the model and at the layer."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import nsa_compile
from nsa_compile.models import NSAttention
from nsa_compile.models.transformer import check_prompts, check_room
from tests.models.test_nsa import tiny_model, tokens_for


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(
    ("lengths", "max_len", "line"),
    [
        (None, 10, "max_len = 10 must be at least 24, the tokens that are read"),
        ([0, 24], 30, "a length of 0 must be from 1 to 24, the tokens of a row"),
        ([-1, 24], 30, "a length of -1 must be from 1 to 24"),
        ([1, 25], 30, "a length of 25 must be from 1 to 24"),
        ([24], 30, r"lengths is torch.int64 \[1\]; it must be torch.int64 \[2\]"),
        ([1.0, 2.0], 30, r"lengths is torch.float32 \[2\]; it must be torch.int64 \[2\]"),
    ],
)
def test_a_prompt_without_room(attention, lengths, max_len, line):
    model = tiny_model(attention=attention, n_layers=1)
    tokens = tokens_for(model, 2, 24)
    lengths = None if lengths is None else torch.tensor(lengths)
    for prefill in (model.prefill, nsa_compile.compile_prefill(model, nested="eager", cache=False)):
        with pytest.raises(ValueError, match=line):
            prefill(tokens, lengths, max_len)
    given = torch.tensor([24, 24]) if lengths is None else lengths
    with pytest.raises(ValueError, match=line):
        model.blocks[0].attention.prefill(torch.zeros(2, 24, model.config.dim, dtype=torch.float64), given, max_len)


@pytest.mark.parametrize("t", [torch.tensor([3, 4]), torch.tensor(4), torch.tensor([-1, 0])])
def test_a_token_without_room(t):
    layer = NSAttention(dim=16, n_heads=2, n_kv_heads=1, head_dim=8)
    state = layer.init_state(2, 4)
    with pytest.raises(ValueError, match=r"a token at position (4|-1) has no row in caches for 4 tokens"):
        layer.decode_step(state, torch.zeros(2, 16), t)
    layer.decode_step(state, torch.zeros(2, 16), torch.tensor([3, 0]))


def test_numbers_where_tensors_belong():
    layer = NSAttention(dim=16, n_heads=2, n_kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match=r"t is a int; it must be a tensor torch.int64, \[\] or \[B\]"):
        layer.decode_step(layer.init_state(2, 4), torch.zeros(2, 16), 0)
    with pytest.raises(ValueError, match=r"lengths is a list; it must be a tensor torch.int64 \[2\]"):
        layer.prefill(torch.zeros(2, 4, 16), [4, 4], 4)


class _Recorded(TorchDispatchMode):
    """What is called of torch's operators, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_device_checks_by_itself_and_is_not_waited_for():
    with FakeTensorMode():
        t = torch.zeros(2, dtype=torch.int64, device="cuda")
        for check in (lambda: check_room(t, 4), lambda: check_prompts(t, (2, 4), 4)):
            with _Recorded() as called:
                check()
            assert called.names[-1] == "aten._assert_async.msg"
            assert not {"aten._local_scalar_dense.default", "aten.item.default"} & set(called.names)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sequence_without_tokens(compiled):
    layer = NSAttention(dim=16, n_heads=2, n_kv_heads=1, head_dim=8)
    if compiled:
        nsa_compile.compile_block(layer, nested="eager", cache=False)
    with pytest.raises(ValueError, match=r"^x has shape \[1, 0, 16\]; attention needs at least one token$"):
        layer(torch.zeros(1, 0, 16))
