"""BigBird's attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class BigBirdPattern(Pattern):
    """Blocks that a query of BigBird sees.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 64
    """Tokens of a block, ``b``."""
    num_window: int = 3
    """Blocks up to the query's own, ``w``, that it sees."""
    num_global: int = 2
    """Blocks at the start of the sequence, ``g``, that every query sees."""
    num_random: int = 3
    """Blocks before the query's own, ``r``, that are drawn for it once and for all, some perhaps twice."""

    def __post_init__(self) -> None:
        require_int(self, "block", 1)
        require_int(self, "num_window", 1)
        require_int(self, "num_global", 0)
        require_int(self, "num_random", 0)


def drawn_block(block: Any, head: Any, draw: Any) -> Any:
    """The number of a block before `block`, 0 if there is none, that the `draw`-th draw of a `head` gives its queries.

    Of integers, or of tensors of them. Large primes stand for chance.
    """
    return (block * 7919 + head * 104729 + draw * 1299709) % 1000003 % (block + (block == 0))


class BigBird(AttentionVariant):
    """A window of blocks, global blocks and drawn blocks (arXiv 2007.14062), without what is later than the query."""

    pattern = BigBirdPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.bigbird import BigBirdAttention

        return BigBirdAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        """The mean of the heads, rounded down."""
        p = model.pattern
        total = 0
        for own in range(-(-seq_len // p.block)):
            queries = min(p.block, seq_len - own * p.block)
            near = {*range(min(p.num_global, own)), *range(max(0, own - p.num_window + 1), own)}
            for head in range(model.n_heads):
                others = near | {drawn_block(own, head, draw) for draw in range(p.num_random)} - {own}
                total += queries * len(others) * p.block + queries * (queries + 1) // 2
        return total // model.n_heads

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]
