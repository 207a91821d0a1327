"""torchao's linear layer with int8 products, fit for compiled blocks. To be imported where it is used only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingLinear


@dataclass(frozen=True)
class _Products:
    """Which products are computed in int8. torchao's own class is mutable, and Dynamo takes only frozen ones."""

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True


class Int8Linear(Int8MixedPrecisionTrainingLinear):
    """A linear layer that rounds both operands of its three products to int8, by rows and columns; weights stay.

    Beyond torchao's, it takes tensors of any strides and follows autocast.
    """

    # Not torchao's subclass of the weights, which checkpoints and optimizers would have to know.
    config: Any = _Products()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # torchao takes views of inputs and gradients as matrices, which works for any strides if they are matrices.
        return super().forward(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
