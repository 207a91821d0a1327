"""What must hold of every attention of `nsa_compile/models/zoo`, whatever its paper says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import nsa_compile
from nsa_compile.models import NSAConfig
from nsa_compile.models.transformer import ScannedAttention
from nsa_compile.passes.report import Report

# A reference written from the paper: the output [B, S, dim], of the configuration, the parameters by name, and x. Of a
# layer with a loss of its own a pair of output and loss.
Reference = Callable[[NSAConfig, dict[str, Tensor], Tensor], Any]


def make_config(attention: str, pattern: dict[str, Any] | None = None, **changes: Any) -> NSAConfig:
    """A small model; four query heads in two groups."""
    from nsa_compile.models.config import from_plain

    sizes = {"vocab_size": 256, "dim": 12, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "v_head_dim": 4}
    return from_plain(NSAConfig, {**sizes, "attention": attention, "pattern": pattern, **changes})


def make_layer(config: NSAConfig, seed: int = 0) -> ScannedAttention:
    """The layer in float64, with weights large enough for attention to be far from uniform."""
    torch.manual_seed(seed)
    layer = config.variant.layer(config).double()
    layer.says_uncompiled = False
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def make_input(config: NSAConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, config.dim, dtype=torch.float64, generator=generator)


def values_and_gradients(f: Callable[..., Any], x: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of `f(parameters, x)` and its loss, and the gradients of a projection of both for x and parameters."""
    x = x.detach().clone().requires_grad_()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    o, *loss = outputs if isinstance(outputs := f(parameters, x), tuple) else (outputs,)
    weight = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(7))
    total = sum(loss, start=(o * weight).sum())
    given = torch.autograd.grad(total, [x, *parameters.values()], allow_unused=True)
    inputs = {"x": x, **parameters}
    gradients = {
        name: torch.zeros_like(of) if gradient is None else gradient
        for (name, of), gradient in zip(inputs.items(), given, strict=True)
    }
    return {"o": o.detach(), "loss": torch.stack([total * 0, *loss]).sum().detach(), **gradients}


def check_reference(layer: ScannedAttention, reference: Reference, x: Tensor) -> None:
    """Values and gradients of the layer are those of the reference."""
    parameters = dict(layer.named_parameters())
    asked = {"return_auxiliary": True} if layer.auxiliary else {}
    ours = values_and_gradients(lambda p, x: torch.func.functional_call(layer, p, (x,), asked), x, parameters)
    theirs = values_and_gradients(lambda p, x: reference(layer.config, p, x), x, parameters)
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=1e-9, atol=1e-9, msg=lambda text, of=name: f"{of}: {text}"
        )


def check_decoding(layer: ScannedAttention, x: Tensor, room: int = 3) -> None:
    """Token by token is the same as the sequence, in larger caches, and with sequences at different positions."""
    batch, length = x.shape[:2]
    expected = layer(x)
    state = layer.init_state(batch, length + room)
    for t in range(length):
        state, o = layer.decode_step(state, x[:, t], torch.tensor(t))
        torch.testing.assert_close(o, expected[:, t], rtol=1e-9, atol=1e-9)
    # The last sequence is ahead of the others.
    lengths = torch.full((batch,), max(1, length // 3))
    lengths[-1] = max(1, length // 2)
    state, _ = layer.prefill(x[:, : int(lengths.max())], lengths, length + room)
    while bool((lengths < length).all()):
        state, o = layer.decode_step(state, x[torch.arange(batch), lengths], lengths)
        torch.testing.assert_close(o, expected[torch.arange(batch), lengths], rtol=1e-9, atol=1e-9)
        lengths = lengths + 1


def check_causality(layer: ScannedAttention, x: Tensor) -> None:
    """A later token changes nothing before it, neither values nor what gradients reach."""
    length = x.shape[1]
    for cut in {1, length // 2, length - 1} - {0, length}:
        changed = x.clone()
        changed[:, cut:] = torch.randn_like(changed[:, cut:]) * 3
        assert torch.equal(layer(x)[:, :cut], layer(changed)[:, :cut])
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x)[:, :cut].square().sum(), x)
        assert not gradient[:, cut:].any()


def check_compiled(layer: ScannedAttention, x: Tensor) -> Report:
    """The compiled layer, by operators where there is one, is the loop, in values and gradients. What became of it."""
    torch._dynamo.reset()
    compiled = nsa_compile.compile(layer, nested="eager", cache=False, attention="sparse")
    x = x.detach().requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    found = []
    for f in (layer, compiled):
        o, *loss = f(x, return_auxiliary=True) if layer.auxiliary else (f(x),)
        total = sum(loss, start=o.square().sum())
        found.append([o, *loss, *torch.autograd.grad(total, [x, *parameters], allow_unused=True)])
    for expected, given in zip(*found, strict=True):
        assert (given is None or not given.any()) == (expected is None or not expected.any())
        if expected is not None and given is not None:
            torch.testing.assert_close(given, expected, rtol=1e-8, atol=1e-9)
    report = nsa_compile.last_report()
    assert report is not None
    return report


def check_auxiliary(layer: ScannedAttention, x: Tensor) -> None:
    """The layer's own loss teaches the indexer and nothing else, and the output teaches all but the indexer."""
    x = x.detach().requires_grad_()
    o, loss = layer(x, return_auxiliary=True)
    assert torch.equal(o, layer(x))
    assert loss.shape == ()
    assert loss > 0
    names, parameters = zip(*layer.named_parameters(), strict=True)
    for value, of_indexer in ((loss, True), (o.square().sum(), False)):
        gradients = torch.autograd.grad(value, [x, *parameters], retain_graph=True, allow_unused=True)
        reached = {name for name, g in zip(["x", *names], gradients, strict=True) if g is not None and g.any()}
        assert reached == {name for name in ["x", *names] if name.startswith("index") == of_indexer}
