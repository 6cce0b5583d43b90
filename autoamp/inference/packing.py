"""Where oneDNN's kernels for packed weights may be called: for which weights and inputs.

Packed is what lies in a layout of oneDNN's own, which only its kernels read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.torch_private import is_intercepted, is_transformed, mkldnn, mkldnn_enabled


class Packed:
    """The packed weights of one layer, kept with the pin of the first weight while all are pinned.

    An object of this class itself has none, and stands with the pin of a weight that cannot be packed.

    Args:
        parameters: The weights and biases.
        narrowed: Their casts, in the same order.
        args: The arguments of the op's first call.

    Attributes:
        parameters: What was cast and packed.
    """

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: tuple[Any, ...]) -> None:
        self.parameters = parameters

    @staticmethod
    def weights_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the weights and biases among two or more arguments of the op; none where these cannot be packed."""
        return (args[1], args[2]) if len(args) > 2 and args[2] is not None else (args[1],)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN packs weights of this dtype, on this CPU."""
    return (
        weight.dtype is torch.bfloat16
        and weight.is_cpu
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and mkldnn.has_bf16()
    )


def may_call_onednn(x: Tensor) -> bool:
    """Whether an op of oneDNN's own may be called for ``x``, in place of torch's.

    Not where a mode, a tracer, forward-mode derivatives or a transform of `torch.func` would have to see torch's op, in
    a region of torch.autocast, or where the user turned oneDNN off.
    """
    return (
        x.is_cpu
        and (x.dtype is torch.bfloat16 or (x.dtype is torch.float32 and x.layout is torch.strided))
        and not x.is_nested
        and mkldnn_enabled()
        and not is_transformed(x)
        and not is_intercepted()
    )
