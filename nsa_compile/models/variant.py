"""An attention as one object, and the attentions that `model.attention` can name. Imports no torch.

`docs/own-operator.md` adds another one.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from nsa_compile.models.pattern import Pattern, SparsePattern

if TYPE_CHECKING:
    from torch import Tensor

    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer, NSATransformer

# A line for each: its name, and the module and class that describe it.
REGISTERED = {
    "nsa": "nsa_compile.models.nsa_variant:NSA",
    "dense": "nsa_compile.models.dense_variant:Dense",
    "gqa": "nsa_compile.models.zoo.masked_variants:GQA",
    "streaming": "nsa_compile.models.zoo.masked_variants:Streaming",
    "gpt_oss": "nsa_compile.models.zoo.masked_variants:GptOss",
    "longformer": "nsa_compile.models.zoo.masked_variants:Longformer",
    "bigbird": "nsa_compile.models.zoo.masked_variants:BigBird",
    "moba": "nsa_compile.models.zoo.masked_variants:MoBA",
    "quest": "nsa_compile.models.zoo.masked_variants:Quest",
    "infllm_v2": "nsa_compile.models.zoo.masked_variants:InfLLM",
    "dsa": "nsa_compile.models.zoo.indexed_variants:DSA",
    "msa": "nsa_compile.models.zoo.indexed_variants:MSA",
    "qsa": "nsa_compile.models.zoo.indexed_variants:QSA",
    "csa": "nsa_compile.models.zoo.indexed_variants:CSA",
    "hca": "nsa_compile.models.zoo.indexed_variants:HCA",
    "hybrid": "nsa_compile.models.hybrid_variant:Hybrid",
    "linear": "nsa_compile.models.zoo.recurrent_variants:Linear",
    "retnet": "nsa_compile.models.zoo.recurrent_variants:RetNet",
    "gla": "nsa_compile.models.zoo.recurrent_variants:GLA",
    "mamba2": "nsa_compile.models.zoo.recurrent_variants:Mamba2",
    "delta_net": "nsa_compile.models.zoo.recurrent_variants:DeltaNet",
    "gated_delta_net": "nsa_compile.models.zoo.recurrent_variants:GatedDeltaNet",
    "kda": "nsa_compile.models.zoo.recurrent_variants:KDA",
}


@dataclass(frozen=True)
class LayerRow:
    """What a run writes down about the attention of one layer: a line of ``attention.jsonl``, which adds the ``step``.

    An attention with statistics adds columns: numbers, or ``None`` for what could not be measured.

    Attributes:
        layer: counted from 0.
    """

    layer: int


class Panel(NamedTuple):
    """A curve for each layer, over the steps; a ``share`` has an axis from 0 to 1, anything else one from 0 on."""

    column: str
    share: bool = True
    label: str = ""
    title: str = ""


class Picture(NamedTuple):
    """Panels of one picture, line by line. It is drawn where the column of the first one was ever measured."""

    name: str
    caption: str
    lines: Sequence[Sequence[Panel]]


class AttentionVariant(ABC):
    """All that the package knows of one attention. What has a value here may be left as it is.

    Args:
        name: its value of ``model.attention``.

    Attributes:
        pattern: class of ``model.pattern``, its sizes. Attentions may share one, as NSA and dense attention do.
        auxiliary: its layers have a loss of their own, as an indexer has that no gradient reaches otherwise; training
            adds their sum to the loss of the tokens.
        alike: its layers are equal, so that one of them stands for all.
        shown_sizes: fields of ``pattern`` that a run and the headline of a profile are told by, by their symbols; it
            has a use for each.
        selects: what the field ``num_selected`` counts.
        scanned: its layer is a :func:`nsa_compile.scan` over the tokens, so it is slow uncompiled, and a loop that is
            left in what is compiled is a fallback.
        verified: ``nsa-compile verify`` has properties of it.
        ranges_expected: named ranges that a compiled step must have, and what it says if one is missing.
        row: what its statistics are of a layer.
        gated: the columns ``gate_<branch>`` of ``row`` are mean gates of NSA's branches, which the watchdog watches.
        columns: of the report's table: those of ``row`` that it shows, and what it calls them.
        legend: of that table, after the words "Of each layer after step N: ".
        pictures: of the report.
    """

    pattern: ClassVar[type[Pattern]] = SparsePattern
    shown_sizes: ClassVar[Mapping[str, str]] = {}
    selects: ClassVar[str] = "blocks"
    auxiliary: ClassVar[bool] = False
    alike: ClassVar[bool] = True
    scanned: ClassVar[bool] = True
    verified: ClassVar[bool] = False
    ranges_expected: ClassVar[Mapping[str, str]] = {}
    row: ClassVar[type[LayerRow]] = LayerRow
    gated: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, str]] = {"layer": "layer"}
    legend: ClassVar[str] = ""
    pictures: ClassVar[Sequence[Picture]] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def layer(self, model: NSAConfig) -> AttentionLayer:
        """The layer of one block, made here so that only a model imports torch."""

    @abstractmethod
    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        """Query-key pairs that one head of one layer works on in a sequence of ``seq_len`` tokens."""

    @abstractmethod
    def multiplies(self, model: NSAConfig, seq_len: int) -> Sequence[float]:
        """Multiplies a token of each part of a layer beside its query-key pairs: projections, gates, φ and the like."""

    def of_layer(self, model: NSAConfig, index: int) -> NSAConfig:
        """The model's configuration as its layer ``index`` has it, with that layer's attention and sizes."""
        return model

    def mistake(self, model: NSAConfig) -> str | None:
        """What it asks of the model's keys beyond their own rules and does not get, beginning with the key."""
        return None

    def min_seq_len(self, model: NSAConfig) -> tuple[int, str]:
        """The shortest sequence to train on, and the rule behind "must be at least"."""
        return 1, "1"

    def sizes(self, settings: Mapping[str, Any]) -> str:
        """The sizes among the settings of a profile that tell this attention from one of other sizes: ``, w = 512``."""
        return "".join(f", {symbol} = {settings[name]}" for symbol, name in self.shown_sizes.items())

    def statistics(self, model: NSATransformer, tokens: Tensor) -> list[Any]:
        """A ``row`` for each layer of ``model`` on ``tokens`` ``[B, S]`` int64; none where there are no statistics."""
        return []


def find(name: str) -> AttentionVariant:
    """The attention of that name, one of ``REGISTERED``."""
    return _load(name, REGISTERED[name])


@cache
def _load(name: str, place: str) -> AttentionVariant:
    variant: AttentionVariant = pkgutil.resolve_name(place)(name)
    return variant
