"""What a verdict on a step is found by: its tape, and the tensors of it that have names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.diagnostics.origins import Followed
from autoamp.diagnostics.step_recorder import RecordedStep, unwrapped
from autoamp.tape import Op, Ref, Rerun, Tape


@dataclass(frozen=True)
class Named:
    """A tensor of a step that has a name.

    Attributes:
        kind: ``"input"``, ``"weight"``, ``"grad"`` or ``"loss"``.
        name: That of the argument of ``forward``, or of the parameter or buffer.
        model: The class of the model.
        ref: What the tape calls it.
        has_grad: Whether an input requires gradients: as a rule an op computed it.
    """

    kind: str
    name: str
    model: str
    ref: Ref
    has_grad: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a verdict is found by, also on another machine.

    Attributes:
        tape: The step.
        named: Its tensors that have names.
        scale: The loss scale.
        half_dtype: That of the handle.
    """

    tape: Tape
    named: tuple[Named, ...]
    scale: float
    half_dtype: torch.dtype

    def follow(self, in_fp32: Callable[[Op], bool] = lambda op: False, **options: Any) -> Followed:
        """Run the tape again; the options are those of `Followed`."""
        inputs = frozenset(one.ref.memory for one in self.named if one.kind == "input")
        return Followed(self.tape, in_fp32, inputs=inputs, **options)

    def values(self, kind: str, half: Rerun, wide: Rerun) -> list[tuple[str, Tensor, Tensor]]:
        """Return the tensors of a kind with their names, as two runs that have ended computed them, both in fp32."""
        refs = {one.ref: one.name for one in self.named if one.kind == kind and 0 not in one.ref.size}
        return [(name, half.value(ref).float(), wide.value(ref).float()) for ref, name in refs.items()]


def named_tensors(step: RecordedStep, tape: Tape) -> tuple[Named, ...]:
    """Return the tensors of a step that have names."""
    found = [Named("loss", "loss", "", ref) for ref in step.loss_refs if ref is not None]
    for call in step.calls:
        root = unwrapped(call.module)
        model = type(root).__name__
        inputs = [(name, tensor, "input") for name, tensor in call.inputs()]
        weights = [(name, tensor, "weight") for name, tensor in (*root.named_parameters(), *root.named_buffers())]
        grads = [(name, step.grads.get(one, one.grad), "grad") for name, one in root.named_parameters()]
        for name, tensor, kind in inputs + weights + grads:
            # Sparse ones have no memory.
            if tensor is not None and tensor.layout is torch.strided and (ref := tape.find(tensor)) is not None:
                found.append(Named(kind, name, model, ref, kind == "input" and tensor.requires_grad))
    return tuple(dict.fromkeys(found))
