"""What runs later or in another thread casts as its caller did.

That is what `torch.utils.checkpoint` runs again in backward, the backward of a custom function, and the threads of
`torch.nn.DataParallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from autoamp.casting import Casts
from autoamp.patching import imitate

__all__ = ["build_function_backward", "build_function_context", "build_parallel_apply", "build_recompute"]


def build_recompute(original: Any, casts: Casts, position: int) -> Any:
    """Build the replacement of a function of `torch.utils.checkpoint` that takes another to call it again in backward.

    By then the module around it has returned, and with it the precision that it ran in; on CUDA the thread differs too.

    Args:
        original: A function or a staticmethod.
        casts: Whose switches that function is to find as they are now.
        position: Its place among the arguments.
    """
    if isinstance(original, staticmethod):
        return staticmethod(build_recompute(original.__func__, casts, position))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:position], casts.remembered(args[position]), *args[position + 1 :], **kwargs)

    return imitate(replacement, original)


def build_function_context(original: Any, casts: Casts) -> Any:
    """Build the replacement of the constructor of a custom function's context: it notes how its thread casts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._autoamp_switches = casts, casts.switches()

    return imitate(init, original, "torch.autograd.function", "BackwardCFunction.__init__")


def build_function_backward(original: Any, casts: Casts) -> Any:
    """Build the replacement of ``BackwardCFunction.apply``: a custom function's backward casts as its forward did.

    The thread may be another one, of autograd's own on CUDA, and ``with`` statements around the forward have ended.
    """

    def apply(self: Any, *args: Any) -> Any:
        noted, switches = vars(self).get("_autoamp_switches", (None, None))
        if noted is not casts or switches == casts.switches() or not casts.is_open:
            return original(self, *args)
        return casts.local.bound(original, *switches)(self, *args)

    return imitate(apply, original)


def build_parallel_apply(original: Any, casts: Casts) -> Any:
    """Build the replacement of ``torch.nn.parallel.parallel_apply``: its threads cast as the one that calls it."""

    def parallel_apply(modules: Sequence[Module], *args: Any, **kwargs: Any) -> Any:
        return original([casts.remembered(module) for module in modules], *args, **kwargs)

    return imitate(parallel_apply, original)
