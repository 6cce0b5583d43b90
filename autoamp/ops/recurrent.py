"""What recurrent layers check of their input: not its dtype, since input and weights are cast together later.

`nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells call ops that the lists cover. Before that `nn.RNNBase.check_input` would
refuse an input whose dtype is not the weights'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.patching import imitate

__all__ = ["build_check_input"]


def build_check_input(original: Any, casts: Casts) -> Any:
    """Build the replacement of ``nn.RNNBase.check_input``: every check of the original's but the one on dtypes.

    The layer's input may be in half precision beside fp32 weights, and the other way round, since both will be cast.
    """

    def check_input(self: Any, input: Tensor, batch_sizes: Tensor | None) -> Any:
        weight = self._flat_weights[0]
        if (
            input.dtype != weight.dtype
            and casts.state() is not False
            and casts.eligible(input)
            and casts.eligible(weight)
        ):
            # The original reads dtype and shape alone; a meta tensor has both and costs nothing.
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        return original(self, input, batch_sizes)

    return imitate(check_input, original)
