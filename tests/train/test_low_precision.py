"""Matrix products in float8 and int8: close to native ones, where they are meant to be, and refused where they are not.

Float8 is emulated here; on the GPU the products themselves are torchao's, and so are its tests.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile.config import load_config
from nsa_compile.errors import UserError
from nsa_compile.extras import no_messages
from nsa_compile.machine.preflight import check_run
from nsa_compile.models import NSATransformer
from nsa_compile.train.low_precision import LINEAR_LAYERS, convert_linear_layers
from tests.processes import train

pytest.importorskip("torchao")

# Most that rounding moves a typical operand: half a unit in the last of the two bits of e5m2, which gradients become;
# half of a 127th of a row's greatest value, which is up to four times a typical one.
ROUNDING = {"float8": 2.0**-3, "int8": 4 / 254}
ON_CPU = not torch.cuda.is_available()


def model_of(overrides, kind="native"):
    config = load_config(overrides=overrides)
    torch.manual_seed(0)
    model = NSATransformer(config.model)
    converted = None if kind == "native" else convert_linear_layers(model, kind, emulate=True)
    return model, converted


def loss_and_gradients(model, dtype=torch.float32):
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.deep(but=["nsa-False-dtype0-int8"])
@pytest.mark.parametrize("kind", ["float8", "int8"])
@pytest.mark.parametrize(
    ("attention", "compiled", "dtype"),
    [("nsa", False, torch.float32), ("dense", True, torch.float32), ("dense", True, torch.bfloat16)],
)
def test_losses_and_gradients_are_native_up_to_rounding(tiny_overrides, kind, attention, compiled, dtype):
    overrides = tiny_overrides(**{"model.head_dim": 16, "model.attention": attention})
    native, _ = model_of(overrides)
    model, (done, layers) = model_of(overrides, kind)
    assert done == layers == len(LINEAR_LAYERS)
    assert list(model.state_dict()) == list(native.state_dict())
    if compiled:
        torch._dynamo.reset()
        nsa_compile.compile_blocks(model, nested="aot_eager")
    expected, gradients = loss_and_gradients(native, dtype)
    loss, found = loss_and_gradients(model, dtype)
    assert loss == pytest.approx(expected, rel=1e-3)
    differences = []
    for name, gradient in gradients.items():
        assert found[name] is not None, name
        differences.append(((found[name] - gradient).norm() / gradient.norm()).item())
    assert max(differences) < 2 * ROUNDING[kind]  # a product has two operands
    assert max(differences) > ROUNDING[kind] / 10  # and they were rounded


@pytest.mark.deep
def test_float8_layers_go_through_the_passes(tiny_overrides):
    """They are constants and foreign functions in the graph, which the verifier has to take."""
    overrides = tiny_overrides(**{"model.head_dim": 16})
    eager, _ = model_of(overrides, "float8")
    model, _ = model_of(overrides, "float8")
    torch._dynamo.reset()
    nsa_compile.compile_blocks(model, nested="eager", on_decline="error")
    expected, gradients = loss_and_gradients(eager)
    loss, found = loss_and_gradients(model)
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 0.02 * gradient.norm(), name


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_gates_phi_head_and_sizes_that_do_not_fit_stay(tiny_overrides, kind):
    model, converted = model_of(
        tiny_overrides(**{"model.head_dim": 8, "model.n_heads": 2, "model.n_kv_heads": 1}), kind
    )
    # Keys and values are 3 branches of one head of 8.
    assert converted == (5, 7)
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert {name for name, module in linear if type(module) is not torch.nn.Linear} == {
        f"blocks.0.{name}" for name in LINEAR_LAYERS - {"attention.k", "attention.v"}
    }


def test_int8_follows_autocast(tiny_overrides):
    model, _ = model_of(tiny_overrides(**{"model.head_dim": 16}), "int8")
    layer = model.blocks[0].attention.q
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 5, 32)).dtype == torch.bfloat16
    assert layer(torch.randn(2, 5, 32)).dtype == torch.float32
    strided = torch.randn(32, 2, 5).permute(1, 2, 0)
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()))


@pytest.mark.skipif(not ON_CPU, reason="there is a GPU")
def test_float8_on_a_cpu_is_refused_in_one_line(tiny_overrides, tmp_path):
    result = train(tiny_overrides(**{"train.matmul": "float8"}))
    assert result.returncode == 2
    assert result.stderr == (
        "error: train.matmul = 'float8' needs a GPU of compute capability 8.9: a CPU would only emulate it, slower "
        "than float32; use --set train.matmul=native\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_cpu_without_units_for_int8_is_refused(tiny_overrides, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    config = load_config(overrides=tiny_overrides(**{"train.matmul": "int8", "train.device": "cpu"}))
    with pytest.raises(UserError, match=r"train\.matmul = 'int8' .*; use --set train\.matmul=native"):
        check_run(config)


@pytest.mark.parametrize(
    ("kind", "capability", "refused"),
    [("float8", (8, 0), "8.9"), ("float8", (8, 9), None), ("int8", (7, 5), "8.0"), ("int8", (9, 0), None)],
)
def test_gpus_are_asked_for_their_capability(tiny_overrides, monkeypatch, kind, capability, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # One of them is new.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability if i else (10, 0))
    config = load_config(overrides=tiny_overrides(**{"train.matmul": kind}))
    if refused is None:
        check_run(config)
        return
    with pytest.raises(UserError, match=f"needs GPUs of compute capability {refused}, and there is one of"):
        check_run(config)


@pytest.mark.parametrize(("key", "value"), [("model.dim", 40), ("train.seq_len", 40)])
def test_sizes_must_be_multiples_of_16(tiny_overrides, key, value):
    with pytest.raises(UserError, match=f"{key} = {value} must be a multiple of 16 for train.matmul = 'float8'"):
        load_config(overrides=tiny_overrides(**{"train.matmul": "float8", key: value}))


@pytest.mark.skipif(not (ON_CPU and torch.cpu._is_vnni_supported()), reason="no int8 on this CPU")
def test_a_run_in_int8_on_two_processes_trains_and_says_so(tiny_overrides):
    changes = {"train.matmul": "int8", "model.attention": "dense", "train.steps": 6}
    changes |= {"compile.enabled": "true", "compile.nested": "aot_eager"}
    result = train(tiny_overrides(**changes), "--nproc", "2")
    assert result.returncode == 0, result.stderr
    assert "int8 matrix products in 5 of the 7 linear layers of the blocks\n" in result.stderr
    summary = json.loads(result.stdout)
    assert summary["val_loss_end"] < summary["val_loss_start"]


def test_what_torchao_tells_at_its_import_is_not_told(caplog):
    with no_messages():
        logging.getLogger("torchao").warning("no library for hardware that is not here")
    logging.getLogger("torchao").warning("another")
    assert caplog.messages == ["another"]
