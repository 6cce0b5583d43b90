"""Running recorded module calls again."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import math
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.findings import CannotReplay, Trial, backward_finding, output_finding
from autoamp.diagnostics.inspector import Inspector, flaw_of, named_inputs, sum_of, worst_of
from autoamp.diagnostics.records import RandomStates, Record
from autoamp.diagnostics.verdicts import Overflow
from autoamp.scaling import is_sharded
from autoamp.stepping import several_processes
from autoamp.tensors import iter_tensors, map_tensors

__all__ = [
    "CannotReplay",
    "KeptState",
    "RecordedCall",
    "kept_state",
    "replay",
    "unfit",
    "unwrapped",
]


class KeptState:
    """Random generators, and what modules have beside their parameters, as they were when each was first kept.

    Of lists, dicts, sets and generators of random numbers that are attributes of modules the contents are kept too;
    what lies deeper is not.
    """

    def __init__(self) -> None:
        self._states = RandomStates.now(all_of_them=True)
        self._modules: dict[Module, _Attributes] = {}

    def keep(self, module: Module) -> None:
        """Keep what a module has."""
        if module not in self._modules:
            self._modules[module] = _Attributes(module)

    def restore(self) -> None:
        """Put all back."""
        self._states.restore()
        for attributes in self._modules.values():
            attributes.put_back()


@contextlib.contextmanager
def kept_state(modules: Sequence[Module]) -> Iterator[None]:
    """Put all of `KeptState` back at the end of a ``with`` statement, in which gradients are recorded."""
    state = KeptState()
    for module in modules:
        for each in module.modules():
            state.keep(each)
    try:
        with torch.enable_grad():
            yield
    finally:
        state.restore()


def _write(buffer: Tensor, value: Tensor) -> None:
    """Give a buffer another value, unless it has it. A graph that is kept for another backward pass stays valid."""
    if buffer.dtype is not value.dtype or not torch.equal(buffer, value):
        with torch.no_grad():
            # Not counted as a write, since whoever reads the buffer finds what was there.
            buffer.data.copy_(value)


def _set_buffer(root: Module, path: str, value: Tensor | None) -> None:
    """Give a model a buffer's value: in place where it fits, else as another tensor."""
    owner, _, name = path.rpartition(".")
    buffers = vars(root.get_submodule(owner))["_buffers"]
    if value is not None and buffers[name] is not None and buffers[name].shape == value.shape:
        _write(buffers[name], value)
    else:
        buffers[name] = None if value is None else value.clone()


class _Attributes:
    """What a module has beside its parameters and modules: buffers, counters, caches, generators.

    Args:
        module: The module.
    """

    def __init__(self, module: Module) -> None:
        self._own = vars(module)
        self._before = dict(self._own)
        self._put_back: list[Callable[[], object]] = []
        for name, value in self._before.items():
            if name == "_buffers":
                tensors = [one for one in value.values() if one is not None]
                self._put_back += [functools.partial(_write, one, one.detach().clone()) for one in tensors]
            elif name.startswith("_") and name in _OF_TORCH:
                continue
            if isinstance(value, (list, collections.deque)):
                self._put_back.append(functools.partial(_refill, value, value.extend, list(value)))
            elif isinstance(value, (dict, set)):
                self._put_back.append(functools.partial(_refill, value, value.update, value.copy()))
            elif isinstance(value, torch.Generator):
                self._put_back.append(functools.partial(value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                self._put_back.append(functools.partial(value.setstate, value.getstate()))
            elif isinstance(value, numpy.random.Generator):
                state = copy.deepcopy(value.bit_generator.state)
                self._put_back.append(functools.partial(setattr, value.bit_generator, "state", state))

    def put_back(self) -> None:
        """Put all back."""
        for name in [name for name in self._own if name not in self._before]:
            del self._own[name]
        for name, value in self._before.items():
            if self._own.get(name, self) is not value:
                self._own[name] = value
        for put_back in self._put_back:
            put_back()


def _refill(container: Any, add: Callable[[Any], object], contents: Any) -> None:
    """Give a container what it held."""
    if len(container) != len(contents) or any(
        one is not other for one, other in zip(_flat(container), _flat(contents), strict=True)
    ):
        container.clear()
        add(contents)


def _flat(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


_OF_TORCH = frozenset(vars(Module()))


def _with_collectives(root: Module) -> str | None:
    """Return the class of what talks to other ranks in a model, which may not be run again at the same time."""
    for each in root.modules():
        kinds = {kind.__name__ for kind in type(each).__mro__}
        if several_processes() and kinds & _COLLECTIVE:
            return type(each).__name__
    if any(is_sharded(param) for param in root.parameters()):
        return "DTensors"
    return None


# As parts of a model. A DistributedDataParallel that is the whole model is taken off.
_COLLECTIVE = frozenset(
    ("SyncBatchNorm", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "PipelineStage")
)


def unwrapped(module: Module) -> Module:
    """Return the model within a wrapper that reduces gradients over ranks: its own calls reduce nothing."""
    inner = getattr(module, "module", None)
    wraps = any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)
    return inner if wraps and isinstance(inner, Module) else module


def unfit(module: Module) -> str | None:
    """Return why calls of a module cannot be run again, as far as the module itself tells; None where they can."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "the model is a compiled region"
    if isinstance(module, (torch.jit.ScriptModule, types.FunctionType)):
        return "the model is a TorchScript module"
    if type(module).__name__ in ("FullyShardedDataParallel", "DataParallel"):
        return f"{type(module).__name__} gathers the model from several devices"
    return None


def replay(record: Record, casts: Casts, *, wide: bool = False, check: bool = True) -> Trial:
    """Run a recorded call again.

    Args:
        record: The call.
        casts: How threads cast.
        wide: Compute in fp32.
        check: Compare the outputs with those of the step, unless all is wide.

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
    if (name := _with_collectives(root)) is not None:
        raise CannotReplay(f"the model has collectives of its own, those of {name}")
    again: list[Tensor] = []

    def leaf(kept: Tensor) -> Tensor:
        fresh = kept.detach()
        if id(kept) in record.wanted:
            fresh.requires_grad_()
        again.append(fresh)
        return fresh

    args, kwargs = map_tensors(record.inputs, leaf)
    own = {name.removeprefix("module.") if root is not module else name: b for name, b in record.buffers.items()}
    for name, value in own.items():
        _set_buffer(root, name, value)
    record.random.restore()
    inspector = Inspector(root, wide=wide)
    switches = (False, True) if wide else record.switches
    kind = casts.device_type
    region = torch.autocast(kind, record.autocast or torch.float16, enabled=record.autocast is not None and not wide)
    with contextlib.nullcontext() if record.autocast is None else region, _switched(casts, switches), inspector:
        outputs = root(*args, **kwargs)
    found = [o if o.is_floating_point() and o.layout is torch.strided else None for o in iter_tensors(outputs)]
    result = Trial(inspector, found, named_inputs(root, args, kwargs))
    result.leaves = {name: p for name, p in root.named_parameters() if p.requires_grad}
    result.leaves.update({f"input {name}": t for name, t in result.inputs if t.requires_grad})
    if check and not wide:
        _check_same(record, result)
    return result


@contextlib.contextmanager
def _switched(casts: Casts, switches: Any) -> Iterator[None]:
    token = casts.local.set(*switches)
    try:
        yield
    finally:
        casts.local.reset(token)


def _check_same(record: Record, again: Trial) -> None:
    """Raise where a replay did not give what the step did; see `CannotReplay`."""
    if len(again.outputs) != len(record.outputs):
        raise CannotReplay("run again, the model gave other outputs")
    for output, before in zip(again.outputs, record.outputs, strict=True):
        if (output is None) is not (before is None):
            raise CannotReplay("run again, the model gave other outputs")
        if output is None or before is None:
            continue
        now, then = float(sum_of(output.detach())), float(before)
        rough = 1e-2 * float(output.detach().float().abs().sum()) if math.isfinite(now) else 0.0
        if not (now == then or (math.isnan(now) and math.isnan(then)) or abs(now - then) <= rough):
            raise CannotReplay(
                "run again, the model gave other outputs: it draws random numbers of Python or numpy, or its weights "
                "or buffers have changed"
            )


# -- what is found in calls --


class RecordedCall:
    """A recorded call of which trials are made.

    Args:
        record: The call.
        casts: How threads cast.
        scale: The loss scale by which gradients came back to the outputs.

    Raises:
        CannotReplay: See `replay`.
    """

    def __init__(self, record: Record, casts: Casts, scale: float) -> None:
        self.record = record
        self._casts = casts
        self._scale = scale
        self._half = replay(record, casts)
        self._wide: Trial | None = None
        self._gradients: Sequence[Tensor | None] = ()

    def trial(self, scale: float, *, wide: bool = False) -> Trial:
        """Run the backward pass at a loss scale, of the call that ran again in half precision or in fp32."""
        if wide and self._wide is None:
            self._wide = replay(self.record, self._casts, wide=True)
        again = self._wide if wide and self._wide is not None else self._half
        if self._gradients:
            given = [one.float() if wide and one is not None else one for one in self._gradients]
            again.backward_by([None if one is None else one * (scale / self._scale) for one in given])
        return again

    def forward_finding(self) -> Overflow | None:
        """Return the finding where an output is not finite and spoils the gradients; None where none does."""
        outputs = [number for number in self._flawed_outputs() if self.record.takes_part(number)]
        return None if not outputs or self._finite_at_one() else self._first_finding(outputs, intended=False)

    def suspect(self) -> Overflow | None:
        """Return the finding for an output that is harmless as a rule: without gradients, or -inf maybe on purpose."""
        outputs = self._half.outputs
        return self._first_finding(
            [
                number
                for number in self._flawed_outputs()
                if self.record.takes_part(number) or not getattr(outputs[number], "requires_grad", True)
            ],
            intended=True,
        )

    def backward_finding(self, loss: int) -> Overflow | None:
        """Return the finding for gradients that are not finite though those at the outputs are, in a loss's pass."""
        self._gradients = self.record.gradients_of(loss)
        return backward_finding(self, self.trial(self._scale), self._scale)

    def _flawed_outputs(self) -> list[int]:
        return [number for number, one in enumerate(self._half.outputs) if one is not None and flaw_of(one)]

    def _first_finding(self, outputs: Sequence[int], *, intended: bool) -> Overflow | None:
        self._gradients = ()
        findings = (output_finding(self, self._half, number, intended=intended) for number in outputs)
        return next((found for found in findings if found is not None), None)

    def _finite_at_one(self) -> bool:
        """Tell whether all gradients are finite at a loss scale of 1: no inf of the forward pass is to blame then."""
        for loss in self.record.passes if self._scale > 1.0 else ():
            self._gradients = self.record.gradients_of(loss)
            if worst_of(self._gradients) is not None or self.trial(1.0).flawed():
                return False
        return self._scale > 1.0
