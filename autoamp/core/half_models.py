"""Models in half precision (O2, O3): their parameters and buffers are cast in place, and can be cast back.

The patched module call casts what goes into such a model and what comes out of it, by its `ModelBoundary`. The model
itself has only a tag, which a deep copy has too. Its ``state_dict()`` is fp32, from the masters where there are some,
and what is loaded reaches the masters unrounded. The fp32 values of buffers are stored beside the half ones. Sums and
counts in half buffers that a model writes as it trains stop growing, which is warned of.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.core.attach import link_of, load_master, master_of, release_master
from autoamp.core.casts import CastState, Token
from autoamp.core.masters import fit_state
from autoamp.core.settings import ModuleTags
from autoamp.core.special_calls import flatten_weights
from autoamp.errors import warn_user
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, dtype_name, map_tensors
from autoamp.torch_private import MODULES_OF_NORMS

_FLOATS = frozenset({*HALF_DTYPES, torch.float32})


@dataclasses.dataclass(frozen=True, slots=True)
class ModelBoundary:
    """In which dtypes a model's call takes its floating inputs and gives its outputs, and whether it casts within.

    Attributes:
        inputs: The dtype that inputs are cast to; None leaves them.
        outputs: The dtype that outputs are cast to; None leaves them.
        casts: Whether the casts of the lists are on within the call, whatever they are elsewhere; None leaves them.
            `HALF_MODEL` turns on those of the rules for half models.
        doubles: Whether inputs in fp64 are cast too. False for models with fp64 parameters.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts: bool | str | None = None
    doubles: bool = False

    def switch(self, casts: CastState) -> list[Token]:
        """Turn casts on or off in this thread as the model has them; return the tokens that `ThreadState.reset` takes.

        Args:
            casts: Those of the handle.
        """
        local = casts.thread
        # A ``disable_casts`` around, in this thread, goes before.
        if self.casts and local.now().forced_off is not True:
            return [local.set(self.casts, forced_off=False)]
        # Where casts are on, they are because of other models, or of the half model around an fp32 part.
        return [local.set(False)] if self.casts is False else []


class _OfThread(threading.local):
    gives_halves = False
    """Whether ``state_dict`` of a half model gives its parameters as they are."""


class CastModels:
    """The models of a handle that are in half precision, or whose inputs and outputs are cast.

    Attributes:
        originals: By ``id(parameter)`` the fp32 values that parameters had before they were cast, from which masters
            are made. Cleared when the optimizers have their masters.
        boundaries: In which dtypes models take inputs and give outputs, at each call and at those of copies.
        halves: The models that are in half precision.
    """

    def __init__(self) -> None:
        self.originals: dict[int, Tensor] = {}
        self.boundaries: ModuleTags[ModelBoundary] = ModuleTags(self._model_copied)
        self.halves: weakref.WeakSet[Module] = weakref.WeakSet()
        self._wide_buffers: Any = WeakIdKeyDictionary()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._told_of_copies: weakref.WeakSet[Module] = weakref.WeakSet()
        self._thread = _OfThread()

    @torch.no_grad()
    def cast(self, model: Module, dtype: torch.dtype, *, keep_norms: bool = False, kept: Iterable[Module] = ()) -> None:
        """Cast a model's floating parameters and buffers in place: parameters stay the same objects.

        Args:
            model: Any module. Parameters and buffers that occur more than once stay shared. fp64 is left alone.
            dtype: fp32, fp16 or bf16.
            keep_norms: Whether the parameters and running statistics of batch and instance norms stay as they are.
            kept: Modules whose parameters and buffers stay as they are.
        """
        buffers: dict[int, Tensor] = {}
        stay = {id(one) for part in kept for one in (*part._parameters.values(), *part._buffers.values())}

        def is_cast(tensor: Tensor) -> bool:
            return tensor.dtype in _FLOATS and tensor.dtype is not dtype and id(tensor) not in stay

        for module in model.modules():
            if keep_norms and isinstance(module, MODULES_OF_NORMS):
                continue
            for parameter in module._parameters.values():
                if parameter is None or not is_cast(parameter):
                    continue
                grad, parameter.grad = parameter.grad, None
                if dtype is torch.float32:
                    # The values of the master, which outlives its optimizer, or without one the original values.
                    wide = release_master(parameter)
                    wide = self.originals.get(id(parameter)) if wide is None else wide
                    parameter.data = parameter.data.float() if wide is None else wide.detach()
                else:
                    if parameter.dtype is torch.float32:
                        self.originals[id(parameter)] = parameter.data
                    parameter.data = parameter.data.to(dtype)
                parameter.grad = None if grad is None else grad.to(dtype)
            for name, buffer in module._buffers.items():
                # A tensor without dimensions does not widen half ones. As a counter in half it would soon stand still.
                if buffer is not None and is_cast(buffer) and (buffer.dim() or dtype is torch.float32):
                    if id(buffer) not in buffers:
                        buffers[id(buffer)] = self._cast_buffer(buffer, dtype)
                    module._buffers[name] = buffers[id(buffer)]
            if isinstance(module, torch.nn.RNNBase):
                # cuDNN wants its weights in one piece of memory, and the cast has allocated each by itself.
                flatten_weights(module)
        if dtype in HALF_DTYPES:
            self.halves.add(model)

    def _cast_buffer(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype is torch.float32:
            wide = self._wide_buffer(buffer)
            return buffer.float() if wide is None else wide
        half = buffer.to(dtype)
        if buffer.dtype is torch.float32:
            self._wide_buffers[half] = buffer
        return half

    def _wide_buffer(self, buffer: Tensor) -> Tensor | None:
        """Return the fp32 values of a half buffer, None where there are none or the buffer was written to since."""
        wide: Tensor | None = self._wide_buffers.get(buffer)
        return wide if wide is not None and torch.equal(wide.to(buffer.dtype), buffer) else None

    def step_halves(self, optimizer: Any) -> None:
        """Cast the state of an optimizer without masters to its parameters' dtypes, now and when they are cast back."""
        fit_state(optimizer)
        self._optimizers.add(optimizer)

    @property
    def active(self) -> bool:
        """Whether there are models, or copies of them."""
        return self.boundaries.any

    @torch.no_grad()
    def let_go(self, modules: Container[Module] | None = None) -> None:
        """Cast the half models among these modules, by default all, back to fp32, and what they take and give no more.

        The optimizers must step the models' own parameters again by then.
        """
        self.boundaries.take_all(modules)
        for model in list(self.halves):
            if modules is None or model in modules:
                self.halves.remove(model)
                self.cast(model, torch.float32)
        for optimizer in self._optimizers:
            fit_state(optimizer)
        self.originals.clear()

    def is_half(self, module: Module) -> bool:
        """Whether a module is a half model or a part of one."""
        return any(module is part for model in self.halves for part in model.modules())

    def _involves_halves(self, module: Module) -> bool:
        """Whether a module is or has a half model or a copy of one, or is a part of a half model."""
        given = map(self.boundaries.get, module.modules())
        return any(one is not None and one.inputs in HALF_DTYPES for one in given) or self.is_half(module)

    def around_state_dict(self, original: Any) -> Any:
        """Return what gives the fp32 values of half models."""
        models, thread = self, self._thread

        def state_dict(self: Module, *args: Any, **kwargs: Any) -> Any:
            # torch calls this anew for each child; the outermost call does the work, once.
            if thread.gives_halves or not models._involves_halves(self):
                return original(self, *args, **kwargs)
            thread.gives_halves = True
            try:
                destination, prefix, keep_vars = _state_arguments(*args, **kwargs)
                others = set(destination or ())
                state = original(self, *args, **kwargs)
            finally:
                thread.gives_halves = False
            wide = {prefix + name: master_of(one) for name, one in self.named_parameters(remove_duplicate=False)}
            for name, buffer in self.named_buffers(remove_duplicate=False):
                wide[prefix + name] = models._wide_buffer(buffer)
            for key in state.keys() - others:
                value = wide.get(key)
                if value is not None:
                    state[key] = value if keep_vars else value.detach()
                elif isinstance(state[key], Tensor) and state[key].dtype in HALF_DTYPES:
                    state[key] = state[key].float()
            return state

        return state_dict

    def average_made(self, average: Module) -> None:
        """Warn of an average of weights that half precision rounds at each update."""
        if self._involves_halves(average):
            warn_user(
                f"AveragedModel keeps its average of {type(average.module).__name__} in half precision, which rounds "
                "small updates away; average model.state_dict() in fp32, as docs/howto/ema.md does"
            )

    def _model_copied(self, model: Module) -> None:
        """Warn once of the first deep copy of a half model that is trained: an average kept in it would be rounded."""
        frame: types.FrameType | None = sys._getframe()
        while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("autoamp", "copy"):
            frame = frame.f_back
        # Of the copy in an `AveragedModel` that tells itself, and others that torch makes are its own.
        by_torch = frame is None or str(frame.f_globals.get("__name__")).startswith("torch.")
        trains = any(link_of(one) is not None for one in model.parameters()) or len(self._optimizers) > 0
        if by_torch or not trains or model not in self.halves or model in self._told_of_copies:
            return
        self._told_of_copies.add(model)
        half = next((one.dtype for one in model.parameters() if one.dtype in HALF_DTYPES), None)
        if half is not None:
            warn_user(
                f"the copy of {type(model).__name__} is in {dtype_name(half)} and has no master weights; an average of "
                "weights (EMA) that is kept in it loses small updates: copy the model before initialize(), or call "
                ".float() on the copy, as docs/howto/ema.md does"
            )

    def around_export(self, original: Any) -> Any:
        """Return what exports a model with its half parameters, and without their gradients in fp32.

        The exporter of ONNX for traces tells parameters from constants by ``state_dict``, and fake tensors refuse the
        gradients.
        """
        thread = self._thread

        def export(mod: Any, *args: Any, **kwargs: Any) -> Any:
            params = list(mod.parameters()) if isinstance(mod, Module) else []
            wide = [(one, one.grad) for one in params if one.grad is not None and one.grad.dtype is not one.dtype]
            thread.gives_halves, before = True, thread.gives_halves
            try:
                for parameter, _ in wide:
                    parameter.grad = None
                return original(mod, *args, **kwargs)
            finally:
                thread.gives_halves = before
                for parameter, grad in wide:
                    parameter.grad = grad

        return export

    def around_load_state_dict(self, original: Any) -> Any:
        """Return what loads fp32 values into half models."""
        models = self

        def load_state_dict(self: Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            result = original(self, state_dict, *args, **kwargs)
            if models._involves_halves(self):
                models._load_wide(self, state_dict)
            return result

        return load_state_dict

    @torch.no_grad()
    def _load_wide(self, module: Module, state_dict: Mapping[str, Any]) -> None:
        """Write a checkpoint's values, whose rounded ones were just loaded, to masters and fp32 values of buffers."""
        for name, buffer in module.named_buffers(remove_duplicate=False):
            value = _unrounded(state_dict.get(name), buffer)
            if value is not None and buffer in self._wide_buffers:
                # A copy: the checkpoint's tensor may be written to later.
                self._wide_buffers[buffer] = value.float().clone()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            # No master follows its parameter before this: the value that was loaded may be the master itself.
            value = _unrounded(state_dict.get(name), parameter)
            if value is not None:
                load_master(parameter, value)


def _unrounded(value: Any, half: Tensor) -> Tensor | None:
    """Return what a half tensor was loaded from; None where a hook of the module has loaded something else."""
    if not isinstance(value, Tensor) or value.shape != half.shape:
        return None
    value = value.to(device=half.device)
    return value if torch.equal(value.to(half.dtype), half) else None


def cast_structure(value: Any, dtype: torch.dtype | None, *, doubles: bool = False) -> Any:
    """Cast the floating tensors in nested containers, dataclasses and objects with a ``to`` method; None casts none.

    Complex, integer and sparse tensors are left alone, and without ``doubles`` fp64 ones. Nothing is written to:
    containers and dataclasses whose tensors change are built anew, and of objects what their ``to`` returns is taken.
    """
    if dtype is None:
        return value
    sources = _FLOATS | {torch.float64} if doubles else _FLOATS

    def convert(tensor: Tensor) -> Tensor:
        castable = tensor.dtype in sources and tensor.layout in CASTABLE_LAYOUTS
        return tensor.to(dtype) if castable else tensor

    def other(leaf: Any) -> Any:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _cast_dataclass(leaf, convert, other)
        if callable(getattr(leaf, "to", None)) and not isinstance(leaf, (type, Module)):
            with _CastFloatsOnly():
                return leaf.to(dtype)
        return leaf

    return map_tensors(value, convert, other)


class _CastFloatsOnly(TorchFunctionMode):
    """A mode in which `Tensor.to` and `Tensor.type` do not change the dtype of integer, bool and complex tensors.

    The ``to`` of an object may pass the dtype on to all tensors in it, and an index of 2049 would become 2048 in fp16.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.type) and not args[0].is_floating_point():
            rest = [arg for arg in args[1:] if not isinstance(arg, torch.dtype)]
            if len(rest) < len(args) - 1 or "dtype" in kwargs:
                kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
                return func(args[0], *rest, **kwargs) if rest or kwargs else args[0]
        return func(*args, **kwargs)


def _cast_dataclass(value: Any, convert: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Return a dataclass's instance with converted fields; the instance itself where none changes."""
    new = {field.name: map_tensors(getattr(value, field.name), convert, other) for field in dataclasses.fields(value)}
    if all(item is getattr(value, name) for name, item in new.items()):
        return value
    # Not `dataclasses.replace`, which calls __init__: that may do more than set fields.
    rebuilt = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(rebuilt, name, item)
    return rebuilt


def _state_arguments(destination: Any = None, prefix: str = "", keep_vars: bool = False) -> tuple[Any, str, bool]:
    """Return the arguments of `torch.nn.Module.state_dict`, however they were passed."""
    return destination, prefix, keep_vars
