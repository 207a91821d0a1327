"""Recurrent attentions, described: their sizes and their useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nsa_compile.models.pattern import Pattern, require_int, require_positive
from nsa_compile.models.zoo.zoo_variant import ZooVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig


class Recurrent(ZooVariant):
    """Base of the attentions that keep a state of one size: no query meets a key of another token."""

    # Products of the state `[K, V]` with a vector, for each head and token: one that writes, one that reads.
    products = 2

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        return 0

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        state = self.products * model.n_heads * model.head_dim * model.value_dim
        return [*super().multiplies(model, seq_len), state, self.beside(model)]

    def beside(self, model: NSAConfig) -> int:
        """Multiplies a token of gates and convolutions, beside projections and state."""
        return 0


@dataclass(frozen=True)
class LinearPattern(Pattern):
    """Nothing: the state is as large as a head's keys and values make it."""


class Linear(Recurrent):
    """Linear attention (arXiv 2006.16236)."""

    pattern = LinearPattern
    layer_class = "linear:LinearAttention"

    def beside(self, model: NSAConfig) -> int:
        return model.n_heads * model.head_dim  # the normaliser's product


@dataclass(frozen=True)
class RetNetPattern(Pattern):
    """Nothing: decays are fixed. The paper's heads are 256 wide, and their values, v_head_dim, twice that."""


class RetNet(Recurrent):
    """Multi-scale retention (arXiv 2307.08621)."""

    pattern = RetNetPattern
    layer_class = "retnet:Retention"

    def beside(self, model: NSAConfig) -> int:
        return model.dim * model.n_heads * model.value_dim  # the output's gate


@dataclass(frozen=True)
class GLAPattern(Pattern):
    """Sizes of GLA, beside its 4 heads, whose keys are together half as wide as the model, and values as wide as it."""

    gate_rank: int = 16
    """Width between the two projections that decide how much is forgotten."""
    gate_temperature: float = 16.0
    """Root of a sigmoid that a decay is, ``τ``: the higher, the nearer to 1 it begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "gate_temperature")


class GLA(Recurrent):
    """Gated linear attention (arXiv 2312.06635)."""

    pattern = GLAPattern
    layer_class = "gla:GatedLinearAttention"

    def beside(self, model: NSAConfig) -> int:
        decay = model.pattern.gate_rank * (model.dim + model.n_kv_heads * model.head_dim)
        return decay + model.dim * model.n_heads * model.value_dim


@dataclass(frozen=True)
class Mamba2Pattern(Pattern):
    """Sizes of Mamba-2, beside head_dim = 128, its state N, v_head_dim = 64, its P, and heads that are together twice
    as wide as the model. There are no heads of keys and values; n_kv_heads says nothing here."""

    conv: int = 4
    """Tokens that the short convolution reads, the token's own included."""
    groups: int = 1
    """Groups of heads that share B and C, its keys and queries."""


class Mamba2(Recurrent):
    """A state space model as attention (arXiv 2405.21060)."""

    pattern = Mamba2Pattern
    layer_class = "mamba2:Mamba2Layer"

    def mistake(self, model: NSAConfig) -> str | None:
        if model.n_heads % model.pattern.groups == 0:
            return None
        return f"n_heads = {model.n_heads} must be a multiple of pattern.groups = {model.pattern.groups}"

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        inner, of_groups = model.n_heads * model.value_dim, model.pattern.groups * model.head_dim
        channels = inner + 2 * of_groups
        projections = model.dim * (inner + channels + model.n_heads + inner)
        return [projections, channels * model.pattern.conv, self.products * inner * model.head_dim]


@dataclass(frozen=True)
class ConvolvedPattern(Pattern):
    """Sizes of a recurrence whose queries, keys and values go through a short convolution."""

    conv: int = 4
    """Tokens that the short convolution reads, the token's own included."""


class Delta(Recurrent):
    """Base of the delta rules: what a key finds is read before it is written."""

    pattern: ClassVar[type[Pattern]] = ConvolvedPattern
    products = 3

    def beside(self, model: NSAConfig) -> int:
        channels = (model.n_heads + model.n_kv_heads) * model.head_dim + model.n_kv_heads * model.value_dim
        return channels * model.pattern.conv + model.dim * model.n_heads


class DeltaNet(Delta):
    """Linear attention by the delta rule (arXiv 2406.06484)."""

    layer_class = "delta_net:DeltaNetAttention"


class GatedDeltaNet(Delta):
    """The delta rule with a decay of each head (arXiv 2412.06464)."""

    layer_class = "gated_delta_net:GatedDeltaNetAttention"

    def beside(self, model: NSAConfig) -> int:
        return super().beside(model) + model.dim * model.n_heads * (1 + model.value_dim)


@dataclass(frozen=True)
class KDAPattern(ConvolvedPattern):
    """Sizes of KDA, beside its heads, of keys and of values, of 128."""

    gate_rank: int | None = None
    """Width between the two projections of the decay, and of the output's gate; null takes that of a value head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_rank is not None:
            require_int(self, "gate_rank", 1)


class KDA(Delta):
    """The delta rule with a decay of each channel (arXiv 2510.26692)."""

    pattern = KDAPattern
    layer_class = "kda:KimiDeltaAttention"

    def beside(self, model: NSAConfig) -> int:
        rank = model.pattern.gate_rank or model.value_dim
        low_rank = 2 * model.dim + model.n_heads * (model.head_dim + model.value_dim)
        return super().beside(model) + rank * low_rank
