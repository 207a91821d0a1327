"""Low-rank adapters (LoRA, arXiv 2106.09685), by the library peft: few weights that are trained beside frozen ones.

A checkpoint holds all of them. Whoever reads it for another purpose gets the sum, a model like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nsa_compile.config import LoraSection
from nsa_compile.extras import no_messages

# peft's names of what it puts into a linear layer.
_BASE, _A, _B = "base_layer", "lora_A.default.weight", "lora_B.default.weight"


def add_adapters(model: nn.Module, config: LoraSection) -> int:
    """Give the linear layers that `config.targets` names adapters, in place, and freeze everything else.

    The model computes what it did: an adapter begins as zero. Before its blocks are compiled.

    Returns:
        How many layers got one.
    """
    with no_messages():
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        adapters = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))
        inject_adapter_in_model(adapters, model)
    return sum(isinstance(module, LoraLayer) for module in model.modules())


def merged(weights: Mapping[str, Tensor], config: LoraSection) -> dict[str, Tensor]:
    """The weights of a model with adapters as those of one without: `W + alpha / rank · B A`.

    Raises:
        KeyError, RuntimeError: they are not those of such a model.
    """
    found = {}
    for name, value in weights.items():
        layer, adapted, kind = name.rpartition(f".{_BASE}.")
        if not adapted:
            if not name.endswith((_A, _B)):
                found[name] = value
        elif kind == "weight":
            product = weights[f"{layer}.{_B}"].double() @ weights[f"{layer}.{_A}"].double()
            found[f"{layer}.weight"] = torch.add(value.double(), product, alpha=config.alpha / config.rank).to(
                value.dtype
            )
        else:
            found[f"{layer}.{kind}"] = value
    return found
