"""Runs recorded module calls again."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import Backward, Inspector, Origin, fp32_sum, nonfinite_value
from autoamp.diagnostics.records import Record, random_states, set_random_states
from autoamp.scaling import is_sharded
from autoamp.stepping import several_processes
from autoamp.tensors import iter_tensors, map_tensors

__all__ = ["CannotReplay", "KeptState", "RecordedCall", "Trial", "replay", "unfit", "unwrapped", "why_it_failed"]

# As parts of a model these talk to other ranks. A DistributedDataParallel that is the whole model is taken off.
_COLLECTIVE = frozenset(
    ("SyncBatchNorm", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "PipelineStage")
)
# Classes of a program's own may refuse to be cleared.
_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, set, list, collections.deque)


class CannotReplay(Exception):
    """A step cannot run again. The message says why."""


def why_it_failed(error: RuntimeError) -> str:
    """Return why a backward pass cannot run again, by the first line of the error that it raised."""
    first = str(error).partition("\n")[0]
    return f"running the step again raised {type(error).__name__}: {first}"


@dataclass(eq=False)
class Trial:
    """A recorded call that ran again.

    Attributes:
        inspector: Looked at the forward pass.
        outputs: The results; None for one without a floating dtype.
        leaves: The tensors that gradients are taken of, by name. The name of an input begins with ``"input "``.
        results: The gradients of the last backward pass.
        watch: Looked at that pass.
    """

    inspector: Inspector
    outputs: list[Tensor | None]
    leaves: dict[str, Tensor]
    results: dict[str, Tensor] = field(default_factory=dict)
    watch: Backward = field(init=False)

    def backward_by(self, gradients: Sequence[Tensor | None]) -> Backward:
        """Take the gradients of all leaves by those at the outputs, and keep them in ``results``.

        Raises:
            CannotReplay: The backward pass raised, as that of some checkpoints does.
        """
        self.results, self.watch = {}, Backward(self.inspector)
        pairs = [
            (output, gradient.to(output.dtype))
            for output, gradient in zip(self.outputs, gradients, strict=True)
            if output is not None and gradient is not None and output.requires_grad
        ]
        if pairs and self.leaves:
            roots, given = zip(*pairs, strict=True)
            leaves = list(self.leaves.values())
            try:
                with self.watch:
                    found = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                raise CannotReplay(why_it_failed(error)) from None
            self.results = {name: one for name, one in zip(self.leaves, found, strict=True) if one is not None}
        return self.watch

    def nonfinite_leaves(self) -> dict[str, Tensor]:
        """Return the leaves whose gradients hold inf or nan."""
        return {name: self.leaves[name] for name, one in self.results.items() if nonfinite_value(one)}

    def gradient_origin(self) -> Origin | None:
        """Return the call whose node made inf or nan of finite gradients; None if unknown."""
        return self.watch.origin(list(self.nonfinite_leaves().values()))


class KeptState:
    """Random generators, and the attributes of modules, as they were when each module was first kept.

    Buffers get their values back. Lists, dicts, sets and generators that are attributes get their contents back, but
    not those of other objects.
    """

    def __init__(self) -> None:
        self._random = random_states()
        self._modules: dict[Module, list[Callable[[], object]]] = {}

    def keep(self, module: Module) -> None:
        """Keep the attributes of a module."""
        if module not in self._modules:
            self._modules[module] = list(_ways_back(module))

    def restore(self) -> None:
        """Put all back."""
        set_random_states(self._random)
        for ways_back in self._modules.values():
            for put_back in ways_back:
                put_back()


def _ways_back(module: Module) -> Iterator[Callable[[], object]]:
    own = vars(module)
    for value in (own, *own.values()):
        if type(value) in _CONTAINERS:
            add = getattr(value, "extend", None) or value.update
            yield functools.partial(_refill, value, add, value.copy())
        elif isinstance(value, torch.Generator):
            yield functools.partial(value.set_state, value.get_state())
    for buffer in own["_buffers"].values():
        if buffer is not None:
            yield functools.partial(_write, buffer, buffer.detach().clone())


def _refill(container: Any, add: Callable[[Any], object], contents: Any) -> None:
    container.clear()
    add(contents)


def _write(buffer: Tensor, value: Tensor) -> None:
    # Not counted as a write: a graph that is kept for another backward pass stays valid.
    buffer.data.copy_(value)


def unwrapped(module: Module) -> Module:
    """Return the model within a wrapper that reduces gradients over ranks: its own calls reduce nothing."""
    inner = getattr(module, "module", None)
    wraps = any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)
    return inner if wraps and isinstance(inner, Module) else module


def unfit(module: Module) -> str | None:
    """Return why calls of a module cannot run again, as far as the module itself tells; None if they can."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "the model is a compiled region"
    if isinstance(module, torch.jit.ScriptModule):
        return "the model is a TorchScript module"
    if type(module).__name__ in ("FullyShardedDataParallel", "DataParallel"):
        return f"{type(module).__name__} gathers the model from several devices"
    root = unwrapped(module)
    talks = [each for each in root.modules() if {kind.__name__ for kind in type(each).__mro__} & _COLLECTIVE]
    if talks and several_processes():
        return f"the model has collectives of its own, those of {type(talks[0]).__name__}"
    if any(is_sharded(param) for param in root.parameters()):
        return "the model has collectives of its own, those of DTensors"
    return None


def _named_inputs(root: Module, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that a module is called with, by the names of the arguments of its ``forward``."""
    try:
        given = inspect.signature(root.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # A forward that is not a Python function has no signature.
        given = {f"args[{place}]": value for place, value in enumerate(args)} | kwargs
    return [
        (name if isinstance(value, Tensor) else f"{name}[{number}]", tensor)
        for name, value in given.items()
        for number, tensor in enumerate(iter_tensors(value))
    ]


def replay(record: Record, casts: Casts, *, wide: bool = False) -> Trial:
    """Run a recorded call again, and compare its outputs with those of the step unless ``wide``.

    Args:
        record: The call.
        casts: How threads cast.
        wide: Whether to compute in fp32.

    Raises:
        CannotReplay: The model, or an input, is not as it was.
    """
    module = record.module()
    if module is None:
        raise CannotReplay("the model is gone")
    if (why := unfit(module)) is not None:
        raise CannotReplay(why)
    if record.written_to():
        raise CannotReplay("inputs of the model were written to")
    root = unwrapped(module)
    args, kwargs = map_tensors(record.inputs, lambda kept: kept.detach().requires_grad_(kept.requires_grad))
    set_random_states(record.random)
    inspector = Inspector(root, wide=wide)
    inspector.inputs = _named_inputs(root, args, kwargs)
    region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if record.autocast is not None:
        region = torch.autocast(casts.device_type, record.autocast, enabled=not wide)
    token = casts.local.set(*((False, True) if wide else record.switches))
    try:
        with region, inspector:
            outputs = root(*args, **kwargs)
    finally:
        casts.local.reset(token)
    found = [o if o.is_floating_point() and o.layout is torch.strided else None for o in iter_tensors(outputs)]
    leaves: dict[str, Tensor] = {name: param for name, param in root.named_parameters() if param.requires_grad}
    leaves.update({f"input {name}": tensor for name, tensor in inspector.inputs if tensor.requires_grad})
    if not wide and (len(found) != len(record.outputs) or not all(map(_is_same, record.outputs, found))):
        raise CannotReplay(
            "run again, the model gave other outputs: it draws from a generator of its own, or its weights or buffers "
            "have changed"
        )
    return Trial(inspector, found, leaves)


def _is_same(before: Tensor | None, output: Tensor | None) -> bool:
    """Tell whether an output has the sum that it had in the step, but for rounding."""
    if before is None or output is None:
        return before is output
    value = output.detach()
    rough = 1e-2 * float(value.float().abs().sum().nan_to_num(0.0, posinf=0.0))
    return torch.allclose(fp32_sum(value), before, rtol=0.0, atol=rough, equal_nan=True)


class RecordedCall:
    """A recorded call that runs again in half precision, and in fp32 if that is asked for.

    Args:
        record: The call.
        casts: How threads cast.
        scale: The loss scale of the gradients that came back to the outputs.

    Attributes:
        record: As given.
        scale: As given.
        half: The run in half precision.

    Raises:
        CannotReplay: See `replay`.
    """

    def __init__(self, record: Record, casts: Casts, scale: float) -> None:
        self.record = record
        self.scale = scale
        self.half = replay(record, casts)
        self._casts = casts

    @functools.cached_property
    def wide(self) -> Trial:
        """The run in fp32."""
        return replay(self.record, self._casts, wide=True)

    def nonfinite_at(self, scale: float, loss: int, trial: Trial | None = None) -> dict[str, Tensor]:
        """Run the backward pass of a loss at a scale, in half precision as a rule; see `Trial.nonfinite_leaves`."""
        trial = trial or self.half
        given = self.record.gradients_of(loss)
        # In half precision a small factor would be 0.
        trial.backward_by([None if one is None else one.float() * (scale / self.scale) for one in given])
        return trial.nonfinite_leaves()
