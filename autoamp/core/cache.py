"""Kept casts: of parameters, while the outermost module call runs or they are pinned, and of the last activation.

A kept cast is returned again only while neither its source nor the cast itself has been written to, as far as torch
records it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.core.threads import KeptCast, ThreadState
from autoamp.torch_private import is_transformed, tracing_state


class _Pin:
    """A parameter that is promised not to be written to.

    Attributes:
        promises: How many `CastCache.pin` are around.
        kept: Its cast and the cast's version when it was made, None until there is one.
        layer: What the inference package made of the weights of a whole layer; it has ``parameters``, which are all
            pinned while it is here.
    """

    __slots__ = ("kept", "layer", "promises")

    def __init__(self) -> None:
        self.promises = 0
        self.kept: tuple[Tensor, int] | None = None
        self.layer: Any = None


class CastCache:
    """Casts of parameters, kept while the outermost module call runs, and the cast of the last activation.

    A cast is stale as soon as its parameter changes. Identity, version and address show most changes; nothing shows a
    write through ``.data``, numpy or a flat buffer. Such writes happen between module calls, so no cast is kept past
    the outermost one, with or without gradients. A module that writes so between two uses of one weight within its own
    call needs ``init(enable_caching=False)``. `pin` is the explicit promise that the weights stay.

    The cast of an activation is kept until the next one is cast: query, key and value often come from one tensor.

    Attributes:
        enabled: Whether module calls keep casts.
        pins: The pinned parameters, by ``id(parameter)``.
        lock: Taken while ``pins`` changes.
        local: Has the casts that this thread's running module call keeps.
    """

    def __init__(self, local: ThreadState, enabled: bool = True) -> None:
        self.enabled = enabled
        self.local = local
        self.pins: dict[int, _Pin] = {}
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def pin(self, parameters: list[Parameter]) -> Iterator[None]:
        """Keep the casts of these parameters, where no gradient is asked of them, within the ``with`` statement."""
        with self.lock:
            for parameter in parameters:
                self.pins.setdefault(id(parameter), _Pin()).promises += 1
        try:
            yield
        finally:
            with self.lock:
                for parameter in parameters:
                    self.pins[id(parameter)].promises -= 1
                    if not self.pins[id(parameter)].promises:
                        del self.pins[id(parameter)]
                for pin in self.pins.values():
                    if pin.layer is not None and any(id(one) not in self.pins for one in pin.layer.parameters):
                        pin.layer = None

    def clear(self) -> None:
        """Drop the casts of this thread's running module call."""
        if self.local.param_casts is not None:
            self.local.param_casts = {}
            self.local.last_activation = None

    def __len__(self) -> int:
        kept = sum(entry is not None for entry in (self.local.param_casts or {}).values())
        pins = list(self.pins.values())
        packed = sum(len(pin.layer.parameters) for pin in pins if pin.layer is not None)
        return kept + packed + sum(pin.kept is not None for pin in pins)

    def cast(self, parameter: Parameter, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(parameter)``, or the kept cast where it is still valid.

        The cast is kept where that is possible. Most callers come here from a parameter's second use on, and at the
        first call ``convert`` themselves: see `ThreadState.param_casts`.

        Args:
            parameter: fp32, of any shape.
            convert: Returns a tensor in the half dtype, of the same shape; part of the graph if gradients are on.
        """
        grad = torch.is_grad_enabled()
        # `torch.jit.trace` would record a kept cast as a constant.
        if self.pins and not (grad and parameter.requires_grad) and tracing_state() is None:
            pin = self.pins.get(id(parameter))
            if pin is not None:
                if pin.kept is None or pin.kept[0]._version != pin.kept[1]:
                    cast = cast_for_any_mode(parameter, convert)
                    if cast is parameter or not is_cacheable(cast):
                        return cast
                    pin.kept = cast, cast._version
                return pin.kept[0]
        param_casts = self.local.param_casts
        if param_casts is None:
            return convert(parameter)
        entry = param_casts.get(id(parameter))
        if (
            entry is not None
            and _is_valid(entry)
            and entry[1].requires_grad is (grad and parameter.requires_grad)
            # A wrapper of torch.func is dead outside its transform, and an inference tensor is not saved for backward.
            and not is_transformed(entry[1])
            and (not entry[1].is_inference() or torch.is_inference_mode_enabled())
        ):
            return entry[1]
        cast = cast_for_any_mode(parameter, convert) if torch.is_inference_mode_enabled() else convert(parameter)
        if cast is not parameter:
            # An inference tensor has no version, so no cast of it is kept. As parameters they are rare, so that the
            # exception costs less than a test for each parameter.
            with contextlib.suppress(RuntimeError):
                param_casts[id(parameter)] = (
                    parameter, cast, parameter._version, cast._version, parameter.data_ptr(),
                    parameter.untyped_storage(),
                )  # fmt: skip
        return cast

    def cast_activation(self, tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(tensor)``, or the kept cast where this activation was the last that was cast.

        Not for a tensor without gradients: numpy or a collective may write to it without a new version.

        Args:
            tensor: A floating-point tensor that requires gradients, of any shape.
            convert: Returns the tensor in the half dtype, as part of the graph.
        """
        last = self.local.last_activation
        # After a `detach_()` it is a leaf, and the cast belongs to the graph before that. On another stream the cast
        # may not be computed yet.
        state = tensor.is_leaf, None if tensor.is_cpu else torch.accelerator.current_stream(tensor.device)
        if (
            last is not None
            and last[0] is tensor
            and last[5] == state
            and last[1].requires_grad
            and torch.is_grad_enabled()
            and _is_valid(last)
        ):
            return last[1]
        cast = convert(tensor)
        if cast.requires_grad:
            try:
                # A wrapper of torch.func has no address, and is dead outside its transform.
                cast.data_ptr()
                self.local.last_activation = tensor, cast, tensor._version, cast._version, tensor.data_ptr(), state
            except RuntimeError:
                self.local.last_activation = None
        return cast


def _is_valid(kept: KeptCast) -> bool:
    """Whether neither the source nor the cast was written to, as far as torch records it."""
    source, cast, version, cast_version, address, _ = kept
    return source._version == version and cast._version == cast_version and source.data_ptr() == address


def is_cacheable(cast: Tensor) -> bool:
    """Whether later calls can use a cast: not a subclass, such as a fake tensor, nor a wrapper of `torch.func`."""
    return type(cast) is Tensor and not is_transformed(cast)


def cast_for_any_mode(parameter: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Cast without gradients, outside inference mode, so that the cast has a version and can be used in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return convert(parameter)
