"""One block of a configured model with fixed weights and inputs: what the compiler is profiled, compared and searched
with."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nsa_compile.backend import compile_block
from nsa_compile.config import RunConfig
from nsa_compile.models import NSATransformer
from nsa_compile.train.distributed.group import choose_device
from nsa_compile.train.distributed.world import World

# How much worse than the eager loop a compiled program may be before rounding no longer explains it.
TOLERATED = 2.0


class Probe:
    """The first block of `config`'s model, an input `x` `[1, S, dim]` and a gradient from above of the same shape.

    Weights and tensors are drawn from the run's seed, so that they are the same at every call.
    """

    def __init__(self, config: RunConfig, seq_len: int) -> None:
        config.require_equal_layers()
        self.config = config
        self.device = choose_device(config, World())
        torch.manual_seed(config.run.seed)
        model = NSATransformer(dataclasses.replace(config.model, n_layers=1))
        tokens = torch.randint(config.model.vocab_size, (1, seq_len))
        with torch.no_grad():
            x = model.embedding(tokens)
        self.block: nn.Module = model.blocks[0].to(self.device)
        self.x = x.to(self.device)
        self.gradient = torch.randn_like(x).to(self.device)
        # Of the arithmetic: with bf16 the weights stay float32.
        self.dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32

    def compiled(self, **options: Any) -> nn.Module:
        """A copy of the block, to be compiled with these `passes.pipeline.Options` when it is first called."""
        block = copy.deepcopy(self.block)
        compile_block(block, **{"cache": False, **options})
        return block

    def forward(self, block: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The block's input, of which a gradient is wanted, and its output, in the run's precision."""
        x = self.x.clone().requires_grad_()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return x, block(x)

    def backward(self, output: Tensor) -> None:
        """Leave gradients in the input and the parameters behind `output`."""
        output.backward(self.gradient.to(output.dtype))

    def outcome(self, block: nn.Module) -> list[Tensor]:
        """The output of a block, then the gradients of its input and of its parameters, all in float64."""
        block.zero_grad(set_to_none=True)
        x, y = self.forward(block)
        self.backward(y)
        gradients = [x.grad, *(p.grad for p in block.parameters())]
        return [y.detach().double(), *(torch.zeros(()) if g is None else g.double() for g in gradients)]

    def loop(self) -> list[Tensor]:
        """The outcome of the uncompiled block: the readable loop, in the run's precision."""
        return self.outcome(copy.deepcopy(self.block))

    def exact(self) -> list[Tensor]:
        """The outcome of the uncompiled block in float64, the oracle."""
        block = copy.deepcopy(self.block).double()
        x = self.x.double().requires_grad_()
        y = block(x)
        y.backward(self.gradient.double())
        return [y.detach(), *(torch.zeros(()) if p.grad is None else p.grad for p in (x, *block.parameters()))]


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far an outcome is from the oracle: the root mean square of the difference over that of the oracle.

    `value` is of the block's output, `gradient` of all gradients taken together; `band` is the worst tensor's error as
    a multiple of what rounding explains: `TOLERATED` times the eager loop's own error and half a unit in the last
    place.
    """

    value: float
    gradient: float
    band: float

    @property
    def explained(self) -> bool:
        """Whether rounding explains all of it; NaN is never explained."""
        return self.band <= 1


def errors(actual: Sequence[Tensor], loop: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> Errors:
    """Judge an outcome by the oracle and by the error of the eager loop in the same precision."""
    half_unit = torch.finfo(dtype).eps / 2 * max(map(_rms, exact))
    bands = [_rms(a - x) / (TOLERATED * _rms(e - x) + half_unit) for a, e, x in zip(actual, loop, exact, strict=True)]
    together = [torch.cat([x.flatten() for x in outcome[1:]]) for outcome in (actual, exact)]
    return Errors(
        value=_rms(actual[0] - exact[0]) / _rms(exact[0]),
        gradient=_rms(together[0] - together[1]) / _rms(together[1]),
        # A NaN anywhere must win, and max would lose it.
        band=max(bands) if all(b == b for b in bands) else float("nan"),
    )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
