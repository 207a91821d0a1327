"""The branches of NSA and the named ranges of a compiled layer: each name stands here once. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

Branch = Literal["compressed", "selected", "window"]
BRANCHES: tuple[Branch, ...] = get_args(Branch)
"""The three attentions of NSA, in the order of eq. 5."""

BRANCH_OF: dict[str, Branch] = {
    "nsa.cmp": "compressed",
    "nsa.sel": "selected",
    "nsa.sel.ranges_v2": "selected",
    "nsa.win": "window",
}
"""The branch whose attention a range is around."""

RANGES = ("nsa.proj", *BRANCH_OF, "nsa.attention", "nsa.gate", "nsa.mlp", "nsa.loop")
"""Every range of a layer, in the order in which a profile lists them."""
