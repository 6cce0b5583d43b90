"""What is kept of the calls of models in a step that is not recorded, so that one that went wrong can run once more.

References are kept and no copies: the inputs, the outputs and the gradients of these. Large ones are kept as long as
the program keeps them itself. A tensor that was written to since is of no use.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import CastState
from autoamp.diagnostics.call_sites import Caller
from autoamp.diagnostics.origins import nonfinite_value
from autoamp.tape import CannotRerun
from autoamp.tensors import iter_tensors, map_tensors, version_of
from autoamp.torch_private import dispatch_modes, is_transformed, undisturbed

# So many calls of a step, and so many bytes that the program itself may not keep.
_MAX_CALLS, _MAX_BYTES = 16, 2**26
_TYPES = (Tensor, torch.nn.Parameter)


class KeptTensor:
    """A reference to a tensor, without its graph.

    Args:
        tensor: The tensor.
        is_strong: Whether it is kept alive.
    """

    __slots__ = ("_needs_grad", "_version", "_weak", "tensor")

    def __init__(self, tensor: Tensor, *, is_strong: bool = True) -> None:
        self._needs_grad, self._version = tensor.requires_grad, version_of(tensor)
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
        if not self._needs_grad or tensor.requires_grad:
            return tensor
        return tensor.detach().requires_grad_()


class KeptCall:
    """An outermost call of a module.

    Args:
        module: The module.
        caller: Where it is called.
        switches: How this thread casts.
        device_type: That of the handle.

    Attributes:
        outputs: The floating tensors among its outputs.
        grads: The gradients of outputs, by their place; None for one that came in several parts.
    """

    def __init__(self, module: Module, caller: Caller | None, switches: Any, device_type: str) -> None:
        self._module = weakref.ref(module)
        # One for a loss may be made for this call. Others live as long as the program keeps them.
        self._loss = module if next(module.parameters(), None) is None else None
        self.args: Any = ()
        self.kwargs: Any = {}
        self.outputs: list[KeptTensor] = []
        self.grads: dict[int, KeptTensor | None] = {}
        self.caller = caller
        self._switches = switches
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

    def bad_inputs(self) -> list[Tensor]:
        """Return those of its inputs that hold inf or nan. Raises CannotRerun if inputs are gone."""
        inputs = floating(map_kept((self.args, self.kwargs), KeptTensor.as_input))
        return [tensor for tensor in inputs if nonfinite_value(tensor)]

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
    def as_cast(self, casts: CastState) -> Iterator[None]:
        """Cast in a ``with`` statement as where the module was called."""
        autocast = contextlib.nullcontext() if self._autocast is None else torch.autocast(*self._autocast)
        with casts.switched(*self._switches), autocast, torch.enable_grad():
            yield

    def run(self, casts: CastState) -> list[Tensor]:
        """Call the module once more. What that writes is for the caller to undo.

        Returns:
            The floating tensors among its outputs.

        Raises:
            CannotRerun: The inputs are gone, or the outputs are others than in the step.
        """
        inputs = map_kept((self.args, self.kwargs), KeptTensor.as_input)
        torch.set_rng_state(self._random[0])
        if self._random[1] is not None:
            torch.cuda.set_rng_state(self._random[1])
        with self.as_cast(casts):
            outputs = floating(self.module(*inputs[0], **inputs[1]))
        with undisturbed():
            if len(outputs) != len(self.outputs) or not all(
                _is_same(new, old.get("an output")) for new, old in zip(outputs, self.outputs, strict=True)
            ):
                raise CannotRerun("the model gives other outputs when it is called again")
        return outputs


class KeptCalls:
    """The outermost calls of modules in one step.

    Attributes:
        calls: The calls, in their order.
        incomplete: Why calls of the step are missing; None if none are.
    """

    def __init__(self) -> None:
        self.calls: list[KeptCall] = []
        self.incomplete: str | None = None
        self._nbytes = 0

    def begin(
        self, module: Module, args: Any, kwargs: Any, switches: Any, device_type: str, caller: Caller | None
    ) -> KeptCall | None:  # fmt: skip
        """Keep the inputs of a call; see `KeptCall`. None if the call is not kept."""
        if self.incomplete is None and len(self.calls) == _MAX_CALLS:
            self.incomplete = f"the step has more than {_MAX_CALLS} calls of models"
        if self.incomplete is not None:
            return None
        call = KeptCall(module, caller, switches, device_type)
        call.args, call.kwargs = map_tensors((args, kwargs), self._keep)
        self.calls.append(call)
        return call

    def end(self, call: KeptCall, outputs: Any) -> None:
        """Keep the outputs of a call, and their gradients when these come."""
        for place, tensor in enumerate(floating(outputs)):
            call.outputs.append(self._keep(tensor))
            if tensor.grad_fn is not None:
                tensor.register_hook(_KeepGrad(self, call, place))

    def note_grad(self, call: KeptCall, place: int, grad: Tensor) -> None:
        """Keep the gradient of an output."""
        call.grads[place] = None if place in call.grads else self._keep(grad)

    def drop(self) -> None:
        """Drop what is kept, and keep no more."""
        self.calls, self.incomplete = [], "the step was dropped"

    def _keep(self, tensor: Tensor) -> KeptTensor:
        if type(tensor) not in _TYPES or tensor.layout is not torch.strided or is_transformed(tensor):
            raise CannotRerun(f"a tensor is a {type(tensor).__name__} of layout {tensor.layout}")
        # The memory of a device is not for this.
        is_strong = tensor.device.type == "cpu" and self._nbytes + tensor.nbytes <= _MAX_BYTES
        self._nbytes += tensor.nbytes if is_strong else 0
        return KeptTensor(tensor, is_strong=is_strong)


class _KeepGrad:
    """A hook of an output, which changes nothing."""

    # As for torch's own hooks: a tensor is pickled without it, and without a warning.
    __torch_unserializable__ = True

    def __init__(self, kept: KeptCalls, call: KeptCall, place: int) -> None:
        self._kept = kept
        self._call = call
        self._place = place

    def __call__(self, grad: Tensor) -> None:
        try:
            if self._kept.incomplete is None:
                self._kept.note_grad(self._call, self._place, grad)
        except CannotRerun as error:
            self._kept.incomplete = str(error)


def floating(value: Any) -> list[Tensor]:
    """Return the floating tensors in nested containers."""
    return [tensor for tensor in iter_tensors(value) if tensor.is_floating_point()]


def map_kept(value: Any, convert: Callable[[KeptTensor], Any]) -> Any:
    """Return nested arguments with each `KeptTensor` converted."""
    return map_tensors(value, lambda tensor: tensor, lambda one: convert(one) if isinstance(one, KeptTensor) else one)


def _is_same(new: Tensor, old: Tensor) -> bool:
    same = new.dtype is old.dtype and new.shape == old.shape
    return same and bool(((new == old) | (new.isnan() & old.isnan())).all())
