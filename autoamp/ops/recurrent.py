"""Recurrent layers: the check of their input, and the half copy of their weights for cuDNN.

That copy is made at once, in the layout that cuDNN takes as it is. Of weights that were cast one by one torch would
make that layout at each call, with a copy of each and a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from autoamp.casting import (
    RECURRENT_LAYERS,
    Casts,
    FlatLayout,
    RecurrentLayer,
    cudnn_layout_of,
)
from autoamp.patching import imitate
from autoamp.torch_private import (
    dispatch_modes,
    in_dual_level,
    in_function_mode,
    is_any_autocast_enabled,
    is_transformed,
    tracing_state,
)

__all__ = ["build_check_input", "build_recurrent"]

# How many arguments each of these ops takes, in both of its forms.
_ARGUMENTS = 9


@functools.cache
def _flat_copy() -> Any:
    """Return the function that copies weights, made at its first use: most programs have no recurrent layer."""

    class FlatCopy(torch.autograd.Function):
        """Weights in another dtype, all in one tensor: one kernel forward and one backward."""

        @staticmethod
        def forward(ctx: Any, layout: FlatLayout, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
            ctx.set_materialize_grads(False)
            ctx.dtype = weights[0].dtype
            views = layout.views(weights, dtype)
            torch._foreach_copy_(views, weights)
            return tuple(views)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            wanted = [grad if needs else None for grad, needs in zip(grads, ctx.needs_input_grad[2:], strict=True)]
            given = [grad for grad in wanted if grad is not None]
            wide = [torch.empty_like(grad, dtype=ctx.dtype) for grad in given]
            if given:
                torch._foreach_copy_(wide, given)
            found = iter(wide)
            return None, None, *(None if grad is None else next(found) for grad in wanted)

    return FlatCopy.apply


def build_recurrent(
    original: Any,
    casts: Casts,
    find_layout: Callable[[RecurrentLayer, Sequence[Tensor]], FlatLayout] = cudnn_layout_of,
    takes: Callable[[Tensor], bool] = torch.cudnn_is_acceptable,
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Build the way of one of `RECURRENT_LAYERS` under the policy fp16, on CUDA.

    Args:
        original: One of `RECURRENT_LAYERS`.
        casts: The casts of the handle.
        find_layout: Finds the layout of a layer's weights.
        takes: Tells whether cuDNN takes an input.
    """
    layouts: dict[RecurrentLayer, FlatLayout] = {}
    kind, gates = RECURRENT_LAYERS[original]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            kwargs
            or torch.compiler.is_dynamo_compiling()
            or len(args) != _ARGUMENTS
            or is_any_autocast_enabled()
            or in_function_mode()
            or dispatch_modes()
            or in_dual_level()
            or tracing_state() is not None
        ):
            return NotImplemented
        # The op's other form takes a packed sequence, whose sizes come second.
        place = 3 if isinstance(args[3], (list, tuple)) else 2
        weights = args[place]
        layer = _layer(kind, gates, weights, args, place == 3, casts.dtype)
        if layer is None or not all(map(casts.eligible, weights)) or any(map(is_transformed, weights)):
            return NotImplemented
        given = casts.args_to_half(args[:place])
        if given[0].dtype is not casts.dtype or not takes(given[0]):
            return NotImplemented
        if layer not in layouts:
            layouts[layer] = find_layout(layer, weights)
        return original(*given, _narrowed(casts, weights, layouts[layer]), *args[place + 1 :])

    return run


def _layer(
    kind: str, gates: int, weights: Any, args: Sequence[Any], packed: bool, dtype: torch.dtype
) -> RecurrentLayer | None:
    """Describe the layer of a call; None where it is no ordinary one with weights in fp32."""
    if not isinstance(weights, (list, tuple)) or not isinstance(args[0], Tensor):
        return None
    for weight in weights:
        if type(weight) not in (Parameter, Tensor) or weight.dtype is not torch.float32 or not weight.is_contiguous():
            return None
    count, bidirectional = args[5 if packed else 4], bool(args[8 if packed else 7])
    shapes = tuple(weight.shape for weight in weights)
    layer = RecurrentLayer(kind, gates, shapes, dtype, count, bidirectional, not packed and bool(args[8]))
    groups = count * (2 if bidirectional else 1)
    if not groups or len(weights) % groups or layer.each not in (2, 3, 4, 5) or len(shapes[0]) != 2:
        return None
    return layer


def _narrowed(casts: Casts, weights: Sequence[Tensor], layout: FlatLayout) -> list[Tensor]:
    """Return the weights in half, from one flat tensor: an earlier one where that still holds."""
    made: dict[int, Tensor] = {}

    def convert(weight: Tensor) -> Tensor:
        if not made:
            made.update(zip(map(id, weights), _flat_copy()(layout, casts.dtype, *weights), strict=True))
        return made[id(weight)]

    cache, entries = casts.cache, casts.local.entries
    parameters = [weight for weight in weights if type(weight) is Parameter]
    is_kept = cache.pins or (entries is not None and any(id(weight) in entries for weight in parameters))
    if len(parameters) < len(weights) or not is_kept:
        if entries is not None:
            # As with any other weight, casts are kept from the second use on.
            entries.update(dict.fromkeys(map(id, parameters)))
        return [convert(weight) for weight in weights]
    narrow = [cache.cast(weight, convert) for weight in parameters]
    # Where some of them were written to all are cast anew, since they have to lie in one tensor.
    return [convert(weight) for weight in weights] if made else narrow


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
