"""Running a whole step of the program several times, on demand, to find what overflows in it.

The step is a function of the program. While it is rehearsed its losses are scaled as a trial says, its backward passes
leave no gradients, and it ends where an optimizer is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoamp.auto_scaling import reached_by
from autoamp.casting import Casts
from autoamp.diagnostics.findings import CannotReplay, Trial, backward_finding, output_finding
from autoamp.diagnostics.inspector import Inspector, flaw_of
from autoamp.diagnostics.replay import KeptState
from autoamp.diagnostics.verdicts import NotLocated, Overflow
from autoamp.patching import PatchSet
from autoamp.scaling import scaled_loss

__all__ = ["Rehearsal", "StepReached", "explain_step"]


class StepReached(BaseException):
    """Leaves a rehearsed step at its ``optimizer.step()``, or where enough was seen."""


class Rehearsal(Trial):
    """One trial of a step. Its outputs are the losses, as they were before scaling.

    Args:
        scale: What losses are scaled by.
        inspector: What looks on.
    """

    def __init__(self, scale: float, inspector: Inspector) -> None:
        super().__init__(inspector, inputs=inspector.inputs)
        self.passes = 0
        self._scale = scale
        # The losses that were scaled, by their ids.
        self._scaled: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def scaled(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield a loss multiplied by the scale of the trial: what ``scale_loss`` does in a rehearsal."""
        self.outputs.append(loss)
        scaled = scaled_loss(loss, self._scale)
        self._scaled[id(scaled)] = scaled
        yield scaled

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
        self.leaves = self._named(reached_by([root for root, _ in pairs])[0])
        if not pairs or not self.leaves:
            return
        gradients = []
        for root, one in pairs:
            if id(root) not in self._scaled:
                self.outputs.append(root)
                one = (torch.ones_like(root) if one is None else one) * self._scale
            gradients.append(torch.ones_like(root) if one is None else one)
        self.passes += 1
        self.differentiate([root for root, _ in pairs], gradients)
        if self.failure is not None or self.flawed():
            raise StepReached

    def _named(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        root = self.inspector.root
        names = {} if root is None else {id(param): name for name, param in root.named_parameters()}
        return {
            names.get(id(leaf), f"tensor {number} of shape {tuple(leaf.shape)}"): leaf
            for number, leaf in enumerate(leaves)
        }


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
    try:
        first = stage.trial(scale)
        if not first.outputs:
            return Overflow(NotLocated("the step neither returned a loss nor ran a backward pass"), loss_scale=scale)
        bad = next((number for number, loss in enumerate(first.outputs) if loss is not None and flaw_of(loss)), None)
        if bad is not None:
            found = output_finding(stage, first, bad, intended=True)
        else:
            found = backward_finding(stage, first, scale)
    except CannotReplay as error:
        found = Overflow(NotLocated(str(error)))
    finally:
        stage.state.restore()
    return None if found is None else replace(found, loss_scale=scale)


class _Stage:
    """What a step is rehearsed on.

    Attributes:
        state: Random generators and modules as they were at first, and are each time.
    """

    def __init__(self, step: Callable[[], Any], casts: Casts, use: Callable[[Rehearsal | None], None]) -> None:
        self._step = step
        self._casts = casts
        self._use = use
        self.state = KeptState()

    def trial(self, scale: float, *, wide: bool = False) -> Rehearsal:
        """Run the step once."""
        self.state.restore()
        self._casts.cache.clear()
        rehearsal = Rehearsal(scale, Inspector(wide=wide))
        rehearsal.inspector.entered = self.state.keep
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
