"""Running a whole step of the program several times, on demand, to find what overflows in it.

The step is a function of the program. While it is rehearsed its losses are scaled as a trial says, its backward passes
leave no gradients, and it ends where an optimizer is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import Backward, Inspector, Origin, flaw_of
from autoamp.diagnostics.records import RandomStates
from autoamp.diagnostics.replay import (
    Attributes,
    Replayed,
    finest_scale,
    found_backward,
    origin_finding,
    with_all_names,
    write,
)
from autoamp.diagnostics.verdicts import NotLocated, Overflow, ScaleSearch
from autoamp.patching import PatchSet
from autoamp.scaling import scaled_loss

__all__ = ["Rehearsal", "StepReached", "explain_step"]


class StepReached(BaseException):
    """Leaves a rehearsed step at its ``optimizer.step()``, or where enough was seen."""


@dataclass(eq=False)
class Rehearsal:
    """One trial of a step.

    Attributes:
        scale: What losses are scaled by.
        wide: Whether it computes in fp32.
        inspector: What looks on.
        losses: The losses, as they were before scaling.
        flawed: The names of parameters whose gradients are not finite.
        watch: What looked on at the last backward pass: where gradients are not finite, the one that gave these.
    """

    scale: float
    wide: bool
    inspector: Inspector
    losses: list[Tensor] = field(default_factory=list)
    flawed: dict[int, str] = field(default_factory=dict)
    watch: Backward | None = None
    names: dict[int, str] = field(default_factory=dict)
    passes: int = 0

    @contextlib.contextmanager
    def scaled(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield a loss multiplied by the scale of the trial: what ``scale_loss`` does in a rehearsal."""
        self.losses.append(loss)
        scaled = scaled_loss(loss, self.scale)
        self._own_scale.add(id(scaled))
        self._kept.append(scaled)
        yield scaled

    def __post_init__(self) -> None:
        self._own_scale: set[int] = set()
        self._kept: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        """Scale a loss and run its backward pass."""
        with self.scaled(loss) as scaled:
            self.run([scaled], None)

    def step_reached(self) -> BaseException:
        """Return what leaves the step where an optimizer is called."""
        return StepReached()

    def run(self, roots: Any, given: Any) -> None:
        """Run a backward pass that leaves no gradients: what ``torch.autograd.backward`` does in a rehearsal."""
        roots = [roots] if isinstance(roots, Tensor) else list(roots)
        given = [None] * len(roots) if given is None else [given] if isinstance(given, Tensor) else list(given)
        pairs = [(root, one) for root, one in zip(roots, given, strict=True) if root.requires_grad]
        leaves = _leaves([root for root, _ in pairs])
        if not pairs or not leaves:
            return
        gradients = []
        for root, one in pairs:
            if id(root) not in self._own_scale:
                self.losses.append(root)
                one = (torch.ones_like(root) if one is None else one) * self.scale
            gradients.append(torch.ones_like(root) if one is None else one)
        self.passes += 1
        watch = self.watch = Backward(self.inspector)
        with watch.watching():
            found = torch.autograd.grad(
                [root for root, _ in pairs], leaves, gradients, retain_graph=True, allow_unused=True
            )
        flawed = {
            id(leaf): self._name_of(leaf)
            for leaf, one in zip(leaves, found, strict=True)
            if one is not None and flaw_of(one) is not None
        }
        if flawed:
            self.flawed = flawed
            raise StepReached

    def _name_of(self, leaf: Tensor) -> str:
        if not self.names:
            root = self.inspector.root
            self.names = {} if root is None else {id(p): name for name, p in root.named_parameters()}
        return self.names.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}")


def _leaves(roots: list[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward pass from some roots reaches."""
    found: dict[int, Tensor] = {}
    waiting, known = [root.grad_fn for root in roots], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        variable = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if variable is not None:
            found[id(variable)] = variable
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values())


def explain_step(
    step: Callable[[], Any], casts: Casts, scale: float, use: Callable[[Rehearsal | None], None]
) -> Overflow | None:
    """Rehearse a step, and return what overflows in it; None where nothing does.

    Args:
        step: Computes a loss, and returns it or runs its backward pass, scaled as the program does or not at all.
        casts: How threads cast.
        scale: The loss scale.
        use: Lets ``scale_loss`` and optimizers use a rehearsal; None ends that.
    """
    stage = _Stage(step, casts, use)
    with stage.kept():
        first = stage.trial(scale)
        if not first.passes and not first.losses:
            return Overflow(NotLocated("the step neither returned a loss nor ran a backward pass"), loss_scale=scale)
        found = _finding(stage, first, scale)
    return None if found is None else replace(found, loss_scale=scale)


class _Stage:
    """What a step is rehearsed on: it finds random generators and modules as they were at first, each time."""

    def __init__(self, step: Callable[[], Any], casts: Casts, use: Callable[[Rehearsal | None], None]) -> None:
        self._step = step
        self._casts = casts
        self._use = use
        self._states = RandomStates.now(all_of_them=True)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._attributes: dict[Module, Attributes] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put all back at the end of a ``with`` statement."""
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        self._states.restore()
        for buffer, value in self._buffers.values():
            write(buffer, value)
        for attributes in self._attributes.values():
            attributes.put_back()

    def _keep(self, module: Module) -> None:
        if module not in self._attributes:
            self._attributes[module] = Attributes(module)
        for buffer in module.buffers(recurse=False):
            if id(buffer) not in self._buffers:
                self._buffers[id(buffer)] = buffer, buffer.detach().clone()

    def trial(self, scale: float, *, wide: bool = False) -> Rehearsal:
        """Run the step once."""
        self._restore()
        self._casts.cache.clear()
        rehearsal = Rehearsal(scale, wide, Inspector(wide=wide))
        rehearsal.inspector.entered = self._keep
        self._use(rehearsal)
        patches = PatchSet()
        patches.replace(torch.autograd, "backward", _rehearsed_backward(rehearsal))
        off = self._casts.switched(False, forced_off=True) if wide else contextlib.nullcontext()
        try:
            with torch.enable_grad(), off, rehearsal.inspector:
                result = self._step()
            if not rehearsal.passes and isinstance(result, Tensor) and result.requires_grad:
                rehearsal.backward(result)
        except StepReached:
            pass
        finally:
            patches.restore()
            self._use(None)
            self._casts.cache.clear()
        return rehearsal


def _rehearsed_backward(rehearsal: Rehearsal) -> Any:
    def backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        rehearsal.run(tensors, grad_tensors if grad_variables is None else grad_variables)

    return backward


def _finding(stage: _Stage, first: Rehearsal, scale: float) -> Overflow | None:
    bad = next((loss for loss in first.losses if flaw_of(loss) is not None), None)
    if bad is not None:
        origin = first.inspector.origin_of(bad)
        found = _forward(stage, first, origin)
        return found
    if not first.flawed or first.watch is None:
        return None
    parameter = next(iter(first.flawed.values()))
    made = first.watch.producer(lambda tensor: id(tensor) in first.flawed)
    if scale > 1.0 and not stage.trial(1.0).flawed:
        finite = finest_scale(scale, lambda factor: not stage.trial(scale * factor).flawed)
        return found_backward(made, ScaleSearch(finite), parameter)
    source = None if made is None else made[0].source
    if source is not None and not source.intended:
        return replace(_forward(stage, first, source), parameter=parameter)
    wide = stage.trial(1.0, wide=True)
    in_fp32 = None if wide.watch is None else wide.watch.producer(lambda tensor: id(tensor) in wide.flawed)
    found = found_backward(made, None, parameter, in_fp32, finite_in_fp32=not wide.flawed)
    return with_all_names(found, first.inspector, wide.inspector, wide.watch)


def _forward(stage: _Stage, first: Rehearsal, origin: Origin) -> Overflow:
    root = first.inspector.root or Module()
    again = Replayed(first.inspector, [], first.inspector.inputs, {}, root)

    def widened() -> Origin | None:
        wide = stage.trial(1.0, wide=True)
        bad = next((loss for loss in wide.losses if flaw_of(loss) is not None), None)
        if bad is not None:
            return wide.inspector.origin_of(bad)
        return next((one for one in wide.inspector.origins if not one.intended), None) if wide.flawed else None

    return origin_finding(origin, again, widened)
