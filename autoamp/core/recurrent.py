"""Recurrent layers: the check of their input, and the half copy of their weights for cuDNN.

That copy is made at once, in the layout that cuDNN takes as it is. Of weights that were cast one by one torch would
make that layout at each call, with a copy of each and a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from autoamp.core.casts import CastState
from autoamp.core.flat_weights import RECURRENT_LAYERS, flat_layout
from autoamp.torch_private import is_intercepted, is_transformed

# How many arguments each of these ops takes, in both of its forms.
_ARGUMENTS = 9


class _FlatCopy(torch.autograd.Function):
    """Weights in another dtype, all in one tensor: one kernel casts them, and one their gradients."""

    @staticmethod
    def forward(ctx: Any, layout: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        # Elements between weights are never read, but a nan there would show in a check of the whole tensor.
        flat = torch.zeros(layout[0], dtype=dtype, device=weights[0].device)
        places = zip(layout[1], weights, strict=True)
        copies = tuple(flat.narrow(0, start, weight.numel()).view(weight.shape) for start, weight in places)
        torch._foreach_copy_(copies, weights)
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = [torch.empty_like(grad, dtype=ctx.dtype) for grad in grads]
        torch._foreach_copy_(wide, grads)
        return None, None, *wide


def build_recurrent(original: Any, casts: CastState) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Build the way of one of `RECURRENT_LAYERS` under the policy fp16, on CUDA.

    Args:
        original: One of `RECURRENT_LAYERS`.
        casts: The casts of the handle.
    """
    kind = RECURRENT_LAYERS[original]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or torch.compiler.is_dynamo_compiling() or len(args) != _ARGUMENTS or is_intercepted():
            return NotImplemented
        # The op's other form takes a packed sequence, whose sizes come second.
        packed = isinstance(args[3], (list, tuple))
        place = 3 if packed else 2
        weights, count, bidirectional = args[place], args[place + 2], bool(args[place + 5])
        if not _can_lie_in_one(casts, weights, count * (2 if bidirectional else 1)):
            return NotImplemented
        given = casts.args_to_half(args[:place])
        if given[0].dtype is not casts.dtype or not torch.cudnn_is_acceptable(given[0]):
            return NotImplemented
        shapes = tuple(weight.shape for weight in weights)
        layer = kind, count, bidirectional, not packed and bool(args[8])
        layout = flat_layout(casts.dtype, weights[0].device, shapes, *layer)
        return original(*given, _narrowed(casts, weights, layout), *args[place + 1 :])

    return run


def _can_lie_in_one(casts: CastState, weights: Any, layers: int) -> bool:
    """Whether these are the weights of an ordinary recurrent layer, all in fp32 and to be cast."""
    return (
        isinstance(weights, (list, tuple))
        and all(type(weight) in (Parameter, Tensor) and weight.dtype is torch.float32 for weight in weights)
        and all(weight.is_contiguous() and casts.eligible(weight) and not is_transformed(weight) for weight in weights)
        and layers > 0
        and len(weights) in (2 * layers, 3 * layers, 4 * layers, 5 * layers)
        and weights[0].dim() == 2
    )


def _narrowed(casts: CastState, weights: Sequence[Tensor], layout: Any) -> list[Tensor]:
    """Return the weights in half, from one flat tensor: an earlier one where that still holds."""
    made: dict[int, Tensor] = {}

    def convert(weight: Tensor) -> Tensor:
        if not made:
            copies = _FlatCopy.apply(layout, casts.dtype, *weights)  # type: ignore[no-untyped-call]
            made.update(zip(map(id, weights), copies, strict=True))
        return made[id(weight)]

    cache, param_casts = casts.cache, casts.local.param_casts
    parameters = [weight for weight in weights if type(weight) is Parameter]
    is_kept = cache.pins or (param_casts is not None and any(id(weight) in param_casts for weight in parameters))
    if len(parameters) < len(weights) or not is_kept:
        if param_casts is not None:
            # As with any other weight, casts are kept from the second use on.
            param_casts.update(dict.fromkeys(map(id, parameters)))
        return [convert(weight) for weight in weights]
    narrow = [cache.cast(weight, convert) for weight in parameters]
    # Where some of them were written to all are cast anew, since they have to lie in one tensor.
    return [convert(weight) for weight in weights] if made else narrow


def build_check_input(original: Any, casts: CastState) -> Any:
    """Build the replacement of ``nn.RNNBase.check_input``: every check of the original's but the one on dtypes.

    The layer's input may be in half precision beside fp32 weights, and the other way round, since both will be cast.
    """

    def check_input(self: Any, input: Tensor, batch_sizes: Tensor | None) -> Any:
        weight = self._flat_weights[0]
        if (
            input.dtype != weight.dtype
            and casts.local.now().on is not False
            and casts.eligible(input)
            and casts.eligible(weight)
        ):
            # The original reads dtype and shape alone; a meta tensor has both and costs nothing.
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        return original(self, input, batch_sizes)

    return check_input
