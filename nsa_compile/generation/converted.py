"""A dense model made an NSA model that begins close to it, to be trained on.

All branches read the dense model's keys and values (`shared_kv`), and φ is their mean after RoPE, so that a compressed
score is the mean of the dense scores of its block. The compressed branch gives averages where a dense model has
values of single tokens; it starts almost closed, and chooses the blocks of the selected branch all the same. The
window and the selected branch start with gates that add up to 1: a query that both let see all tokens before it, up to
the smaller of `w` and `n · l'`, has the output of dense attention from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from nsa_compile.branches import BRANCHES
from nsa_compile.generation.exported import Exported
from nsa_compile.models import NSATransformer, SparsePattern


@dataclass(frozen=True)
class Gates:
    """What the gates of every head are at the start, whatever the token.

    Each lies between 0 and 1 and reaches neither, where a sigmoid has no gradient left.
    """

    compressed: float
    selected: float
    window: float


# Chosen by benchmarks/convert.py among shares of the selected branch.
START = Gates(compressed=0.01, selected=0.5, window=0.5)


def to_sparse(dense: Exported, pattern: SparsePattern, gates: Gates = START) -> Exported:
    """The NSA model of a dense one, in its dtype; everything but the gates is the dense model's.

    Raises:
        ValueError: the model is not dense, or the configuration cannot be.
    """
    config = dense.model.config
    if config.attention != "dense":
        raise ValueError(f"attention = {config.attention!r} must be 'dense'")
    config = replace(
        config, attention="nsa", pattern=pattern, phi="mean", shared_kv=True, compress_rotated=True, branches=BRANCHES
    )
    weights = dense.model.state_dict()
    model = NSATransformer(config).to(weights["embedding.weight"].dtype)
    start = torch.tensor([math.log(g / (1 - g)) for g in (gates.compressed, gates.selected, gates.window)])
    for name, value in model.state_dict().items():
        if name.endswith("attention.gate.weight"):
            weights[name] = torch.zeros_like(value)
        elif name.endswith("attention.gate.bias"):
            weights[name] = start.to(value.dtype).repeat(config.n_heads)
    model.load_state_dict(weights)
    return dense._replace(model=model)
