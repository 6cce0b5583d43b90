"""Runs recorded module calls again, forward and backward."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Sequence
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

__all__ = ["CannotReplay", "KeptState", "Replay", "gradients_of", "unwrapped"]

# A model of these classes is compiled, or gathered from several devices.
_WHOLE = frozenset(("OptimizedModule", "ScriptModule", "FullyShardedDataParallel", "DataParallel"))
# As parts of a model these talk to other ranks. A DistributedDataParallel that is the whole model is taken off.
_COLLECTIVE = frozenset(
    ("SyncBatchNorm", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "PipelineStage")
)
# Classes of a program's own may refuse to be cleared.
_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, set, list, collections.deque)


class CannotReplay(Exception):
    """A step cannot run again. The message says why."""


def gradients_of(
    leaves: Sequence[Tensor], roots: Sequence[Tensor], given: Sequence[Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves by those of roots, and keep the graph.

    Raises:
        CannotReplay: The backward pass raised, as that of some checkpoints does.
    """
    try:
        return torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise CannotReplay(f"the backward pass raised {type(error).__name__}: {first}") from None


class KeptState:
    """Random generators, and the attributes of modules, as they were when each module was first kept.

    Buffers get their values back. Lists, dicts, sets and generators that are attributes get their contents back, but
    not those of other objects.
    """

    def __init__(self) -> None:
        self._random = random_states()
        self._modules: set[Module] = set()
        self._containers: list[tuple[Any, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def keep(self, module: Module) -> None:
        """Keep the attributes of a module and of those within it."""
        for each in set(module.modules()) - self._modules:
            own = vars(each)
            values = [own, *own.values()]
            self._containers += [(value, value.copy()) for value in values if type(value) in _CONTAINERS]
            self._generators += [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in each.buffers(recurse=False)]
            self._modules.add(each)

    def restore(self) -> None:
        """Put all back."""
        set_random_states(self._random)
        for container, contents in self._containers:
            container.clear()
            add = getattr(container, "extend", None) or container.update
            add(contents)
        for generator, state in self._generators:
            generator.set_state(state)
        for buffer, value in self._buffers:
            # Not counted as a write: a graph that is kept for another backward pass stays valid.
            buffer.data.copy_(value)


def unwrapped(module: Module) -> Module:
    """Return the model within a wrapper that reduces gradients over ranks: its own calls reduce nothing."""
    inner = getattr(module, "module", None)
    wraps = any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)
    return inner if wraps and isinstance(inner, Module) else module


def _why_unfit(module: Module) -> str | None:
    """Return why calls of a module cannot run again, as far as the module itself tells; None if they can."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if kinds & _WHOLE or getattr(module, "_compiled_call_impl", None) is not None:
        return f"the model is compiled, or parts of it are elsewhere ({type(module).__name__})"
    root = unwrapped(module)
    parts = {kind.__name__ for each in root.modules() for kind in type(each).__mro__} & _COLLECTIVE
    if (parts and several_processes()) or any(is_sharded(param) for param in root.parameters()):
        return f"the model has collectives of its own, those of {next(iter(parts), 'DTensors')}"
    return None


def _named_inputs(root: Module, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that a module is called with, by the names of the arguments of its ``forward``."""
    given = inspect.signature(root.forward).bind(*args, **kwargs).arguments
    return [
        (name if isinstance(value, Tensor) else f"{name}[{number}]", tensor)
        for name, value in given.items()
        for number, tensor in enumerate(iter_tensors(value))
    ]


class Replay:
    """A recorded call that runs again. Unless ``wide`` its outputs are compared with those of the step.

    Args:
        record: The call.
        casts: How threads cast.
        scale: The loss scale of the gradients that came back to the outputs.
        wide: Whether to compute in fp32.

    Attributes:
        record: As given.
        scale: As given.
        half_dtype: That of the program's `torch.autocast` region around the call, or else that of the handle.
        root: The model, without its wrapper.
        inspector: Looked at the forward pass.
        outputs: The results; None for one without a floating dtype.
        leaves: The tensors that gradients are taken of, by name. The name of an input begins with ``"input "``.
        results: The gradients of the last backward pass, by the names of the leaves.
        flawed: The leaves whose gradients held inf or nan in that pass.
        watch: Looked at that pass.

    Raises:
        CannotReplay: The model, or an input, is not as it was.
    """

    def __init__(self, record: Record, casts: Casts, scale: float = 1.0, *, wide: bool = False) -> None:
        self.record = record
        self.scale = scale
        self.half_dtype = record.autocast or casts.dtype
        self._casts = casts
        self.root = root = _root_of(record)
        args, kwargs = map_tensors(record.inputs, lambda kept: kept.detach().requires_grad_(kept.requires_grad))
        self.inspector = Inspector(root, wide=wide)
        self.inspector.inputs = _named_inputs(root, args, kwargs)
        outputs = list(iter_tensors(self._run(root, args, kwargs, wide)))
        self.outputs = [o if o.is_floating_point() and o.layout is torch.strided else None for o in outputs]
        self.leaves: dict[str, Tensor] = {name: p for name, p in root.named_parameters() if p.requires_grad}
        self.leaves |= {f"input {name}": tensor for name, tensor in self.inspector.inputs if tensor.requires_grad}
        self.results: dict[str, Tensor] = {}
        self.flawed: dict[str, Tensor] = {}
        self.watch = Backward(self.inspector)
        sums = record.outputs
        if not wide and (len(outputs) != len(sums) or not all(map(_is_same, sums, self.outputs))):
            raise CannotReplay(
                "run again, the model gave other outputs: it draws from a generator of its own, or its weights or "
                "buffers have changed"
            )

    def _run(self, root: Module, args: Any, kwargs: Any, wide: bool) -> Any:
        record = self.record
        set_random_states(record.random)
        region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if record.autocast is not None:
            region = torch.autocast(self._casts.device_type, record.autocast, enabled=not wide)
        switches = (False, True) if wide else record.switches
        with self._casts.switched(*switches), region, self.inspector:
            return root(*args, **kwargs)

    @functools.cached_property
    def in_fp32(self) -> Replay:
        """The same call in fp32."""
        return Replay(self.record, self._casts, self.scale, wide=True)

    def backward(self, scale: float) -> dict[str, Tensor]:
        """Run the backward pass at a loss scale, and return the leaves whose gradients hold inf or nan.

        Raises:
            CannotReplay: The backward pass raised.
        """
        self.results, self.watch = {}, Backward(self.inspector)
        pairs = [
            # In half precision a small factor would be 0, and a sum may overflow.
            (output, (torch.stack(gradients).sum(0, dtype=torch.float32) * (scale / self.scale)).to(output.dtype))
            for number, gradients in self.record.gradients.items()
            if (output := self.outputs[number]) is not None and output.requires_grad
        ]
        if pairs and self.leaves:
            roots, given = zip(*pairs, strict=True)
            with self.watch:
                found = gradients_of(list(self.leaves.values()), roots, given)
            self.results = {name: one for name, one in zip(self.leaves, found, strict=True) if one is not None}
        self.flawed = {name: self.leaves[name] for name, one in self.results.items() if nonfinite_value(one)}
        return self.flawed

    def gradient_origin(self) -> Origin | None:
        """Return the call whose node made inf or nan of finite gradients; None if unknown."""
        return self.watch.origin(list(self.flawed.values()))


def _root_of(record: Record) -> Module:
    """Return the model of a recorded call, without its wrapper."""
    if (why := _why_unfit(record.module)) is not None:
        raise CannotReplay(why)
    if record.written_to():
        raise CannotReplay("inputs of the model were written to")
    return unwrapped(record.module)


def _is_same(before: Tensor | None, output: Tensor | None) -> bool:
    """Tell whether an output has the sum that it had in the step, but for rounding."""
    if before is None or output is None:
        return before is output
    value = output.detach()
    rough = 1e-2 * float(value.float().abs().sum().nan_to_num(0.0, posinf=0.0))
    return torch.allclose(fp32_sum(value), before, rtol=0.0, atol=rough, equal_nan=True)
