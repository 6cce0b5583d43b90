"""What is kept of a step that is not recorded, so that the one call that went wrong can run once more.

These are the calls of models, and those of torch's functions between them, such as those of the loss. References are
kept and no copies: arguments, results, and the gradients of a model's outputs. Large ones of models are kept as long as
the program keeps them itself. A tensor that was written to since is of no use.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.casting import CastState
from autoamp.diagnostics.call_sites import WRITERS, Caller, bare_name, user_frame
from autoamp.diagnostics.origins import nonfinite_value
from autoamp.diagnostics.second_calls import why_not_again
from autoamp.patching import original_of
from autoamp.stepping import has_written_masters
from autoamp.tape import CannotRerun
from autoamp.tensors import iter_tensors, map_tensors, version_of
from autoamp.torch_private import Unnoticed, dispatch_modes, insert_modes, is_transformed, remove_modes, undisturbed

# A program that computes more than that between models is not looked at there.
_MAX_CALLS, _MAX_BYTES = 64, 2**26


class KeptTensor:
    """A reference to a tensor, without its graph.

    Args:
        tensor: The tensor.
        is_strong: Whether it is kept alive.

    Attributes:
        tensor: The tensor, if it is kept alive.
        needs_grad: Whether it requires gradients.
    """

    __slots__ = ("_version", "_weak", "needs_grad", "tensor")

    def __init__(self, tensor: Tensor, *, is_strong: bool = True) -> None:
        self.needs_grad, self._version = tensor.requires_grad, version_of(tensor)
        self._weak = None if is_strong else weakref.ref(tensor)
        self.tensor: Any = None
        if is_strong and tensor.grad_fn is None:
            self.tensor = tensor
        elif is_strong:
            # Not seen by the program's own modes.
            with undisturbed() if dispatch_modes() else contextlib.nullcontext():
                self.tensor = tensor.detach()

    @property
    def is_stale(self) -> bool:
        """Whether a tensor that is kept alive was written to."""
        return version_of(self.tensor) != self._version

    def get(self, what: str = "a tensor") -> Tensor:
        """Return the tensor, as a leaf if it has a graph.

        Args:
            what: What it is, for an error.

        Raises:
            CannotRerun: It is gone, or was written to.
        """
        tensor = self.tensor if self._weak is None else self._weak()
        if tensor is None:
            raise CannotRerun(f"{what} of the model was not kept, because it is large")
        if version_of(tensor) != self._version:
            raise CannotRerun(f"{what} of the model was written to since")
        return tensor if tensor.grad_fn is None else tensor.detach()

    def as_input(self) -> Tensor:
        """Return the tensor as an input, which requires gradients if it did."""
        tensor = self.get("an input")
        return tensor.detach().requires_grad_() if self.needs_grad and not tensor.requires_grad else tensor


class KeptCall:
    """An outermost call of a model.

    Args:
        module: The model.
        args, kwargs: The arguments, with a `KeptTensor` in the place of each tensor.
        casts: How this thread casts.
        caller: Where it is called.

    Attributes:
        caller: As given.
        outputs: The floating tensors among its outputs.
        grads: The gradients of outputs, by their place; None for one that came in several parts.
    """

    def __init__(self, module: Module, args: Any, kwargs: Any, casts: CastState, caller: Caller | None) -> None:
        self._module = weakref.ref(module)
        # One for a loss may be made for this call. Others live as long as the program keeps them.
        self._alive = module if next(module.parameters(), None) is None else None
        self._given = args, kwargs
        self.outputs: list[KeptTensor] = []
        self.grads: dict[int, KeptTensor | None] = {}
        self.caller = caller
        self._casts, self._switches = casts, casts.mode()
        device_type = casts.device_type
        is_cast = torch.is_autocast_enabled(device_type)
        self._autocast = (device_type, torch.get_autocast_dtype(device_type)) if is_cast else None
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    @property
    def module(self) -> Module:
        """The module. Raises CannotRerun if it is gone."""
        module = self._module()
        if module is None:
            raise CannotRerun("a model of the step is gone")
        return module

    def inputs(self) -> Any:
        """Return its ``args`` and ``kwargs``. Raises CannotRerun if inputs are gone."""
        return _map_kept(self._given, KeptTensor.as_input)

    def is_finite(self) -> bool:
        """Whether all outputs were finite. Raises CannotRerun if that is not known."""
        return not nonfinite_value(*(output.get("an output") for output in self.outputs))

    def seeds(self) -> list[Tensor | None]:
        """Return the gradients of the outputs; None for an output without one.

        Raises:
            CannotRerun: They were not kept.
        """
        if None in self.grads.values():
            raise CannotRerun("gradients came to an output of the model in several parts")
        kept = (self.grads.get(place) for place in range(len(self.outputs)))
        return [None if one is None else one.get("the gradient of an output") for one in kept]

    @contextlib.contextmanager
    def as_cast(self) -> Iterator[None]:
        """Cast in a ``with`` statement as where the module was called."""
        autocast = contextlib.nullcontext() if self._autocast is None else torch.autocast(*self._autocast)
        with self._casts.switched(*self._switches), autocast, torch.enable_grad():
            yield

    def run(self) -> list[Tensor]:
        """Call the module once more. What that writes is for the caller to undo.

        Returns:
            The floating tensors among its outputs.

        Raises:
            CannotRerun: It may write to what cannot be put back, the inputs are gone, or the outputs are others than in
                the step.
        """
        if why := why_not_again(self.module):
            raise CannotRerun(why)
        if has_written_masters():
            # The call would copy them into the model.
            raise CannotRerun("master weights were written to since the model was called")
        args, kwargs = self.inputs()
        cpu, gpu = self._random
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        with self.as_cast():
            outputs = floating(self.module(*args, **kwargs))
        with undisturbed():
            if len(outputs) != len(self.outputs) or not all(
                _is_same(new, old.get("an output")) for new, old in zip(outputs, self.outputs, strict=True)
            ):
                raise CannotRerun("the model gives other outputs when it is called again")
        return outputs


def floating(value: Any) -> list[Tensor]:
    """Return the floating tensors in nested containers."""
    return [tensor for tensor in iter_tensors(value) if tensor.is_floating_point()]


def _map_kept(value: Any, convert: Callable[[KeptTensor], Any]) -> Any:
    """Return nested arguments with each `KeptTensor` converted."""
    return map_tensors(value, lambda tensor: tensor, lambda one: convert(one) if isinstance(one, KeptTensor) else one)


def unwrapped(module: Module) -> Module:
    """Return the model within a wrapper that reduces gradients over ranks."""
    inner = getattr(module, "module", None)
    wraps = any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)
    return inner if wraps and isinstance(inner, Module) else module


def _is_same(new: Tensor, old: Tensor) -> bool:
    same = new.dtype is old.dtype and new.shape == old.shape
    return same and bool(((new == old) | (new.isnan() & old.isnan())).all())


def key_of(tensor: Tensor) -> Any:
    """Return what a tensor is known by as long as its memory is kept."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class OutsideCall(NamedTuple):
    """A call of a function of torch outside of models.

    Attributes:
        func: The function.
        args, kwargs: The arguments, with a `KeptTensor` in the place of each tensor.
        caller: The line of the program.
        results: The floating tensors that it returned.
        context: The call of a model before it, which cast as this one did.
    """

    func: Any
    args: Any
    kwargs: Any
    caller: Caller | None
    results: list[KeptTensor]
    context: KeptCall

    def run(self) -> list[Tensor]:
        """Call the function once more, and return the floating tensors that it returns."""
        args, kwargs = _map_kept((self.args, self.kwargs), KeptTensor.get)
        with self.context.as_cast():
            return floating(self.func(*args, **kwargs))


class OutsideCalls(Unnoticed, TorchFunctionMode):
    """Keeps the functions of torch that this thread calls between `resume` and `pause`, until `drop`.

    The values tell which call made inf or nan of finite values.

    It keeps no more once a step had too many calls there, or too large values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True
        self._context: Any = None
        self._calls: list[OutsideCall] = []
        self._nbytes = 0

    def resume(self, context: KeptCall) -> None:
        """Keep calls from now on, after the call of a model."""
        self._context = context
        if self._is_on:
            insert_modes(self)

    def pause(self) -> None:
        """Keep no more, until `resume`."""
        remove_modes(self)

    def drop(self) -> None:
        """Drop the calls."""
        self._context, self._calls, self._nbytes = None, [], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        func, kwargs = original_of(func), kwargs or {}
        if not self._is_on or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        kept = map_tensors((args, kwargs), self._keep)
        result = func(*args, **kwargs)
        if results := [self._keep(tensor) for tensor in floating(result)]:
            caller = Caller.of(user_frame(sys._getframe(1)))
            self._calls.append(OutsideCall(func, kept[0], kept[1], caller, results, self._context))
        if len(self._calls) > _MAX_CALLS or self._nbytes > _MAX_BYTES:
            self._is_on = False
            self.drop()
        return result

    def _keep(self, tensor: Tensor) -> Any:
        # One of a transform is known by no memory.
        is_plain = tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        # On a device its memory counts, and the host knows too late what went wrong.
        if not is_plain or is_transformed(tensor) or tensor.device.type != "cpu":
            self._is_on = False
            return tensor
        self._nbytes += tensor.nbytes
        return KeptTensor(tensor)

    def origin_of(self, key: Any) -> OutsideCall | None:
        """Return the call that made the inf or nan in a tensor of finite values; None if it came from elsewhere.

        Args:
            key: The `key_of` the tensor.

        Raises:
            CannotRerun: A value on the way was written to.
        """
        return self._origin(key, len(self._calls)) if self._is_on else None

    def _origin(self, key: Any, end: int) -> OutsideCall | None:
        made = [place for place in range(end) if any(key_of(one.tensor) == key for one in self._calls[place].results)]
        if not made:
            return None
        place = made[-1]
        call = self._calls[place]
        kept: list[KeptTensor] = []
        _map_kept((call.args, call.kwargs), kept.append)
        given = [(one, nonfinite_value(one.tensor)) for one in kept if one.tensor.is_floating_point()]
        for value in ("nan", "inf"):
            for one in (one for one, found in given if found == value and not one.is_stale):
                origin = self._origin(key_of(one.tensor), place)
                # An inf that was written on purpose is not the cause of what a function makes nan of it.
                is_mask = value == "inf" and origin is not None and bare_name(origin.func) in WRITERS
                return call if is_mask and nonfinite_value(*(one.tensor for one in call.results)) == "nan" else origin
        for one in (one for one, _ in given if one.is_stale):
            if (origin := self._origin(key_of(one.tensor), place)) is not None:
                return origin
            raise CannotRerun("a tensor outside of the model was written to since")
        return call
