"""The weights of recurrent layers in one flat tensor, in the layout that cuDNN takes without a copy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, RNNBase

from autoamp.torch_private import flatten_recurrent_weights

RECURRENT_LAYERS = {torch.gru: "GRU", torch.lstm: "LSTM", torch.rnn_relu: "RNN_RELU", torch.rnn_tanh: "RNN_TANH"}
"""Torch's name of the kind of layer, by op, which `torch._VF` has too."""


@torch.no_grad()
def lay_out(weights: Sequence[Tensor], kind: str, count: int, bidirectional: bool, batch_first: bool) -> None:
    """Move the weights of a recurrent layer to one flat tensor, in cuDNN's layout.

    Args:
        weights: In the order of the op's argument.
        kind: The kind of layer, as in `RECURRENT_LAYERS`.
        count: How many layers there are.
        bidirectional: Whether each goes in both directions.
        batch_first: Whether the batch is the first dimension of the input.
    """
    # Of a layer in one direction: two or three with a projection, and two biases.
    each = len(weights) // (count * (2 if bidirectional else 1))
    gates = {"GRU": 3, "LSTM": 4}.get(kind, 1)
    with torch.cuda.device_of(weights[0]):
        flatten_recurrent_weights(
            weights, each, weights[0].shape[1], torch.backends.cudnn.rnn.get_cudnn_mode(kind),
            weights[0].shape[0] // gates, weights[each - 1].shape[0] if each in (3, 5) else 0, count, batch_first,
            bidirectional,
        )  # fmt: skip


@functools.cache
def flat_layout(
    dtype: torch.dtype, device: torch.device, shapes: tuple[torch.Size, ...], *layer: Any
) -> tuple[int, tuple[int, ...]]:
    """Return how many elements the flat tensor of a recurrent layer has, and where in it each weight begins.

    Args:
        dtype: The dtype of the weights.
        device: Their device.
        shapes: Their shapes.
        layer: The further arguments of `lay_out`, which moves empty weights here.
    """
    weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    lay_out(weights, *layer)
    size = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    return size, tuple(int(weight.storage_offset()) for weight in weights)


def flatten_weights(module: RNNBase) -> None:
    """Move a recurrent layer's weights into one flat tensor, as cuDNN takes them. The parameters stay the same objects.

    `RNNBase.flatten_parameters` does so for other dtypes. It leaves bf16 alone, which cuDNN takes too, and would copy
    at each call. Where cuDNN would not take the weights they stay as they are.
    """
    module.flatten_parameters()
    weights: list[Any] = module._flat_weights
    if (
        all(type(weight) is Parameter and weight.dtype is torch.bfloat16 for weight in weights)
        and all(map(torch.cudnn_is_acceptable, weights))
        and len({weight.device for weight in weights}) == 1
        # A weight that stands in two places cannot lie in both.
        and len({weight.data_ptr() for weight in weights}) == len(weights)
    ):
        lay_out(weights, module.mode, module.num_layers, bool(module.bidirectional), module.batch_first)
