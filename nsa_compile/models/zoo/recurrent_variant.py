"""Recurrent attentions, described: their useful work, and the sizes that several share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig


@dataclass(frozen=True)
class ConvolvedPattern(Pattern):
    """Sizes of a recurrence whose queries, keys and values go through a short convolution.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    conv: int = 4
    """Tokens that the short convolution reads, the token's own included."""

    def __post_init__(self) -> None:
        require_int(self, "conv", 1)


class Recurrent(AttentionVariant):
    """Base of the attentions that keep a state of one size: no query meets a key of another token."""

    # Products of the state `[K, V]` with a vector, for each head and token: one that writes, one that reads.
    products = 2

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        return 0

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        state = self.products * model.n_heads * model.head_dim * model.value_dim
        return [projections(model, kv_sets=1), state, self.beside(model)]

    def beside(self, model: NSAConfig) -> int:
        """Multiplies a token of gates and convolutions, beside projections and state."""
        return 0


class Delta(Recurrent):
    """Base of the delta rules: what a key finds is read before it is written."""

    pattern: ClassVar[type[Pattern]] = ConvolvedPattern
    products = 3

    def beside(self, model: NSAConfig) -> int:
        channels = (model.n_heads + model.n_kv_heads) * model.head_dim + model.n_kv_heads * model.value_dim
        return channels * model.pattern.conv + model.dim * model.n_heads
