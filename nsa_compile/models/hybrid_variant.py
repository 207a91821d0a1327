"""Layers of different attentions in one model, described. Imports no torch.

Three recurrent layers to one that reads tokens is the ratio of Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nsa_compile.models.pattern import Pattern
from nsa_compile.models.variant import REGISTERED, AttentionVariant, find

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer

HYBRID = "hybrid"


@dataclass(frozen=True)
class HybridPattern(Pattern):
    """Which attention each layer has, and their sizes."""

    layers: tuple[str, ...] = ("kda", "kda", "kda", "nsa")
    """Attentions of the layers from the first on, again from the start where the model has more; names as those of
    model.attention."""
    sizes: dict[str, dict[str, Any]] | None = None
    """Sizes of these attentions by name, each as model.pattern has them where that attention is alone; what is not
    given has its default."""

    def __post_init__(self) -> None:
        names = self.layers
        others = [name for name in REGISTERED if name != HYBRID]
        if not isinstance(names, list | tuple) or not names or any(name not in others for name in names):
            given = list(names) if isinstance(names, tuple) else names
            raise ValueError(f"layers = {given!r} must be a list of one or more of {', '.join(others)}")
        object.__setattr__(self, "layers", tuple(names))
        if not isinstance(self.sizes, Mapping | None):
            raise ValueError(f"sizes = {self.sizes!r} must give sizes by the names of layers")
        for name, sizes in (self.sizes or {}).items():
            if name not in names:
                layers = ", ".join(dict.fromkeys(names))
                raise ValueError(f"sizes.{name} = {sizes!r} must be of one of the layers, {layers}")
            if not isinstance(sizes, Mapping):
                raise ValueError(f"sizes.{name} = {sizes!r} must give sizes by their names")
            self.pattern_of(name)

    @classmethod
    def sections(cls) -> dict[str, Any]:
        patterns = {name: find(name).pattern for name in REGISTERED if name != HYBRID}
        return {"sizes": patterns, **{f"sizes.{name}": pattern for name, pattern in patterns.items()}}

    def pattern_of(self, attention: str) -> Pattern:
        """The sizes of one of the attentions."""
        from nsa_compile.models.config import from_plain

        try:
            return from_plain(find(attention).pattern, (self.sizes or {}).get(attention, {}))
        except ValueError as error:
            raise ValueError(f"sizes.{attention}.{error}") from None


class Hybrid(AttentionVariant):
    """Layers of different attentions, in turns."""

    pattern = HybridPattern
    alike = False

    def of_layer(self, model: NSAConfig, index: int) -> NSAConfig:
        names = model.pattern.layers
        attention = names[index % len(names)]
        return replace(model, attention=attention, pattern=model.pattern.pattern_of(attention))

    def mistake(self, model: NSAConfig) -> str | None:
        for index, name in enumerate(model.pattern.layers):
            try:
                self.of_layer(model, index)
            except ValueError as error:
                return _in_sizes(str(error), name)
        return None

    def min_seq_len(self, model: NSAConfig) -> tuple[int, str]:
        layers = [(layer.attention, *layer.variant.min_seq_len(layer)) for layer in model.layers()]
        name, least, rule = max(layers, key=lambda layer: layer[1])
        return least, _in_sizes(rule, name)

    def layer(self, model: NSAConfig) -> AttentionLayer:
        raise AssertionError("a layer is made from its own configuration, of_layer")

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        raise AssertionError("layers differ; each has its own configuration, of_layer")

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        raise AssertionError("layers differ; each has its own configuration, of_layer")


def _in_sizes(text: str, attention: str) -> str:
    """What is said of an attention's sizes, of where they are in a hybrid."""
    return text.replace("pattern.", f"pattern.sizes.{attention}.")
