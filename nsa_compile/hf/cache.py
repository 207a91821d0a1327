"""The state of the decode step as `transformers` hands it from token to token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from nsa_compile.models.transformer import ModelState, NSATransformer


class NSACache(Cache):
    """A `ModelState`, and how many columns of tokens have been read, padding included.

    Its caches have room for more tokens than they hold, and grow.

    Args:
        record_selection: keep which blocks each token reads, for `selection`.
    """

    def __init__(self, *, record_selection: bool = False) -> None:
        super().__init__(layers=[])
        self.state: ModelState | None = None
        self.room = self.columns = 0
        self.filled_by = 0  # the address of the model
        self.record_selection = record_selection
        self.selections: list[Tensor] = []  # of the columns that each forward pass has read

    @property
    def selection(self) -> Tensor:
        """The blocks that the token of each column has read, int32 `[B, columns, layers, G, n]`, -1 for padding.

        Raises:
            ValueError: nothing was recorded.
        """
        if not self.selections:
            raise ValueError("no selection was recorded; give the model an NSACache(record_selection=True) to fill")
        return torch.cat(self.selections, dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # as long as there is memory

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # `generate` then cuts off the tokens that have been read

    @property
    def is_croppable(self) -> bool:
        return False  # a completed block cannot be taken back

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("the state of NSA's decode step cannot forget tokens; read the shorter text anew")

    def reset(self) -> None:
        self.state, self.room, self.columns = None, 0, 0
        self.selections = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def check(self, model: NSATransformer, rows: int) -> None:
        """Refuse to go on with other sequences than those that were read, or with another model.

        Raises:
            ValueError: one line that names what does not fit.
        """
        assert self.state is not None
        if len(self.state.t) != rows:
            raise ValueError(f"cache holds {len(self.state.t)} sequences, and input_ids {rows}; they must be the same")
        if self.filled_by == id(model):
            return
        own = model.init_state(rows, self.room)
        if [_sizes(layer) for layer in own.layers] != [_sizes(layer) for layer in self.state.layers]:
            raise ValueError(
                "cache was filled by a model of other layers or sizes; let this model read the text itself"
            )
        self.filled_by = id(model)

    def grow(self, model: NSATransformer, room: int) -> None:
        """Make room for `room` tokens; what the caches hold stays."""
        assert self.state is not None
        larger = model.init_state(len(self.state.t), room)
        for new, old in zip(larger.caches(), self.state.caches(), strict=True):
            new[tuple(slice(0, size) for size in old.shape)] = old
        self.state, self.room = larger._replace(t=self.state.t), room

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of the state, and what is recorded."""
        self.selections = [function(selection) for selection in self.selections]
        if self.state is not None:
            self.state = self.state.with_caches(function(self.state.t), map(function, self.state.caches()))


def _sizes(layer: Any) -> Any:
    """What the state of a layer is, but for its numbers."""
    return type(layer), [None if x is None else (x.shape, x.dtype) for x in layer]
