"""Linear and convolutional layers whose weights somebody promised not to write to: cast once, and packed where it pays.

On a CPU with bf16 units oneDNN wants large weights in a layout of its own, and reorders them at each call. Torch has
the two halves of that as ops, which its compiler uses; here the reordering is done once, with the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from autoamp.cast_cache import CastCache

__all__ = ["PinnedLayer", "pinned_layer"]

# Torch hands a smaller product of matrices to no library, so packing it would take another kernel.
_SMALLEST = 16 * 16 * 16


class PinnedLayer:
    """The casts of one layer's weight and bias.

    Attributes:
        bias: What was cast for a bias, to tell this layer from another use of its weight.
        narrow_bias: The cast of it.
        weight: The cast of the weight, None where it is packed.
        packed: The weight in oneDNN's own layout, or None.
    """

    __slots__ = ("bias", "narrow_bias", "packed", "version", "version_of_bias", "weight", "width")

    def __init__(self, bias: Any, narrow_bias: Tensor | None, weight: Tensor, packs: bool) -> None:
        self.bias = bias
        self.narrow_bias = narrow_bias
        self.width = weight.shape[-1]
        # oneDNN does not broadcast a bias.
        packs = packs and (narrow_bias is None or narrow_bias.shape == weight.shape[:1])
        self.packed: Tensor | None = _packed(weight) if packs else None
        self.weight = weight if self.packed is None else None
        self.version = weight._version
        self.version_of_bias = 0 if narrow_bias is None else narrow_bias._version

    def is_intact(self) -> bool:
        """Tell whether nobody has written to the casts, which others may have got too."""
        weight, bias = self.weight, self.narrow_bias
        return (weight is None or weight._version == self.version) and (
            bias is None or bias._version == self.version_of_bias
        )

    def packed_serves(self, x: Tensor) -> bool:
        """Tell whether the packed weight can be used for this input: no derivative, transform or mode looks on."""
        return (
            not x.is_nested
            and x.shape[-1:] == (self.width,)
            and x.is_cpu
            and torch._C._get_mkldnn_enabled()
            and forward_ad._current_level < 0
            and not is_functorch_wrapped_tensor(x)
            and not torch._C._len_torch_dispatch_stack()
        )

    def linear(self, x: Tensor) -> Tensor:
        """Return what ``linear`` returns for ``x``, which has the dtype of the casts."""
        linear: Any = torch.ops.mkldnn._linear_pointwise.default
        return linear(x, self.packed, self.narrow_bias, "none", [], "")  # type: ignore[no-any-return]


def pinned_layer(
    cache: CastCache, weight: Any, bias: Any, cast: Callable[[Parameter], Tensor], *, packs: bool
) -> PinnedLayer | None:
    """Cast the weight and bias of a layer at its first use, and keep the casts; None where they cannot be kept.

    Args:
        cache: Whose pins hold the promise for both.
        weight: What the op got for a weight.
        bias: What it got for a bias, None for none.
        cast: Casts a parameter, and keeps what it made with the parameter's pin.
        packs: Whether the op is ``linear``, which has a form for packed weights.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    pins, narrow = [], []
    for parameter in parameters:
        pin = cache.pins.get(id(parameter))
        if pin is None or type(parameter) is not Parameter or parameter.layout is not torch.strided:
            return None
        made = cast(parameter)
        if pin.held() is not made:
            return None
        pins.append(pin)
        narrow.append(made)
    layer = PinnedLayer(bias, None if bias is None else narrow[1], narrow[0], packs)
    with cache.lock:
        # A block may have ended in another thread meanwhile.
        if any(cache.pins.get(id(parameter)) is not pin for parameter, pin in zip(parameters, pins, strict=True)):
            return None
        if layer.packed is not None:
            # Whoever asks for the plain cast gets it made anew.
            pins[0].cast = None
        pins[0].layer = layer
    return layer


def _packed(weight: Tensor) -> Tensor | None:
    if (
        weight.dtype is not torch.bfloat16
        or not weight.is_cpu
        or weight.dim() != 2
        or weight.numel() <= _SMALLEST
        or not torch.backends.mkldnn.is_available()
        or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    with torch.inference_mode(False), torch.no_grad():
        reorder: Any = torch.ops.mkldnn._reorder_linear_weight.default
        return reorder(weight)  # type: ignore[no-any-return]
