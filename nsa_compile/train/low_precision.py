"""Linear layers whose matrix products are computed in float8 or int8, by torchao.

Weights, their gradients and what passes between layers keep their type: each product scales and rounds its two
operands, forward and backward, and gives back the type it was given. So checkpoints, optimizers and DDP see the same
model.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn

from nsa_compile.extras import no_messages

# Of each block. Not the gates of the branches and φ, which are small and run in the loop over tokens; nor embedding and
# head, whose rounding shows in every logit.
LINEAR_LAYERS = frozenset(
    ["attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down"]
)
# The units that multiply such numbers take rows of this many.
MULTIPLE = 16


def convert_linear_layers(model: nn.Module, kind: str, emulate: bool = False) -> tuple[int, int]:
    """Let the linear layers of ``model.blocks`` multiply in low precision, in place; before the blocks are compiled.

    Layers whose sizes are no multiples of ``MULTIPLE`` stay as they are.

    Args:
        model: has ``blocks`` with the ``LINEAR_LAYERS``; its parameters and their names stay.
        kind: ``"float8"``, scaled by tensor; or ``"int8"``, scaled by row and column.
        emulate: compute what float8 rounds to without the hardware for it, for tests; int8 runs anywhere.

    Returns:
        How many layers were converted, of how many.
    """
    blocks: Any = model.blocks
    layers = [module for block in blocks for name, module in block.named_modules() if name in LINEAR_LAYERS]
    chosen = {module for module in layers if not any(size % MULTIPLE for size in module.weight.shape)}
    if kind == "float8":
        float8 = import_torchao("torchao.float8")
        config = float8.Float8LinearConfig(emulate=emulate)
        float8.convert_to_float8_training(blocks, module_filter_fn=lambda module, _: module in chosen, config=config)
    else:
        int8_linear = import_torchao("nsa_compile.train.int8_linear").Int8Linear
        for module in chosen:
            module.__class__ = int8_linear
    return len(chosen), len(layers)


def import_torchao(name: str) -> Any:
    """Import a module of torchao, which takes seconds, or one of ours that imports it, without its messages."""
    with no_messages():
        module = importlib.import_module(name)
    # Said once for each kind of state when an optimizer's first step is compiled; it concerns a cache only.
    warnings.filterwarnings("ignore", message="OptimState.*_stable_hash_for_caching")
    return module
