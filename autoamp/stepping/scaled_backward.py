"""Backward passes of a scaled loss: which parameters they reach, and those whose gradients they leave scaled.

A block unscales the gradients of its own optimizers. Gradients of other parameters that the same loss reaches stay
multiplied by the scale, and so do all gradients of a pass that begins after its block has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.errors import UsageError
from autoamp.scaling import Scale, is_same_scale
from autoamp.stepping.checked_grads import Mark, is_same_gradient, mark_of
from autoamp.stepping.guard import StepGuard
from autoamp.torch_private import at_end_of_pass, engine_reaches, start_no_graph

__all__ = ["BackwardWatch", "LeftScaled"]


class LeftScaled:
    """Parameters whose gradients a block left scaled, as long as nobody wrote to these gradients."""

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()

    def note(self, params: Iterable[Tensor], scale: Scale, block: str) -> None:
        """Take note of what a block left scaled.

        Args:
            params: The parameters.
            scale: Of the block.
            block: The optimizers that the block was given.
        """
        for param in params:
            if param.grad is not None:
                self._of[param] = mark_of(param.grad), scale, block

    def forget(self, params: Iterable[Tensor]) -> None:
        """Take note that the gradients of these parameters are unscaled, which torch counts as no write."""
        if self._of:
            for param in params:
                self._of.pop(param, None)

    def refuse(self, optimizer: str, params: Iterable[Tensor]) -> None:
        """Raise UsageError if an optimizer is about to step by a gradient that is scaled still.

        Args:
            optimizer: The name of its class.
            params: What it steps, and the half parameters whose masters it steps.
        """
        if not self._of:
            return
        left = {param: self._of[param] for param in params if param in self._of}
        scaled = [param for param, (mark, *_) in left.items() if _is_left(param, mark)]
        if scaled:
            _, scale, block = left[scaled[0]]
            raise UsageError(
                f"{optimizer} would step by gradients that are multiplied by the loss scale {float(scale):g}, in "
                f"{len(scaled)} of its parameters, the first of shape {tuple(scaled[0].shape)}: the scale_loss block "
                f"that made them was given {block} alone. Pass all optimizers of the loss, as in scale_loss(loss, "
                "[first, second]), or clear the gradients of this one before its own backward pass"
            )
        # What was written to, or replaced, is the program's from now on.
        self.forget(left)


def _is_left(param: Tensor, mark: Mark) -> bool:
    return param.grad is not None and is_same_gradient(mark, param.grad)


class BackwardWatch:
    """Sees which backward passes a scaled loss begins, and refuses one that begins after the block has ended.

    `torch.autograd.grad` of the scaled loss is no such pass: it writes no gradient of a parameter.

    Args:
        loss: The program's.
        scaled: What the block yields, made of it.
        scale: Of the block.
        guards: Of the block's optimizers.
        others: Returns the parameters of all optimizers but those of these guards, and those whose gradients have this
            scale, which another open block is going to unscale.
        left_scaled: Takes note of the parameters of others whose gradients a pass within the block leaves scaled.

    Attributes:
        block: The names of the block's optimizers.
        proven: Whether a pass of the scaled loss was seen, in this block or in an earlier one of these optimizers.
    """

    def __init__(
        self,
        loss: Tensor,
        scaled: Tensor,
        scale: Scale,
        guards: Sequence[StepGuard],
        others: Callable[[Sequence[StepGuard], Scale], list[Tensor]],
        left_scaled: LeftScaled,
    ) -> None:
        self._left_scaled = left_scaled
        self.block = ", ".join(guard.name for guard in guards) or "no optimizer"
        self.proven = all(guard.proven for guard in guards)
        self._scale = scale
        # The scaled loss may outlive its block by much.
        self._guards = [weakref.ref(guard) for guard in guards]
        self._others = others
        self._has_ended = self._loss_passed = False
        self._hook: Any = None
        if loss.requires_grad and scaled is not loss:
            if not self.proven:
                self._hook = loss.register_hook(self._loss_passes)
            scaled.register_hook(self._scaled_passes)

    def end(self) -> None:
        """Take note that the block has ended."""
        self._has_ended = True
        if self._hook is not None:
            self._hook.remove()

    def check(self) -> None:
        """Raise UsageError where the loss was run backward and not the scaled one."""
        if self._loss_passed and not self.proven:
            raise UsageError(
                f"loss.backward() was called inside the scale_loss block of {self.block}, and its gradients are not "
                "scaled. "
                "Call scaled_loss.backward(), where scaled_loss is the value that the with statement yields"
            )

    def _loss_passes(self, _: Tensor) -> None:
        self._loss_passed = True

    def _scaled_passes(self, _: Tensor) -> None:
        self.proven = True
        guards = [guard for reference in self._guards if (guard := reference()) is not None]
        others = self._others(guards, self._scale)
        if not self._has_ended:
            reached = [param for param in others if engine_reaches(param)]
            if reached:
                # The gradients are there at the end of the pass. What the program writes to them in the block counts.
                at_end_of_pass(lambda: self._left_scaled.note(reached, self._scale, self.block))
            return
        # Gradients that delay_unscale left scaled, or those of another open block, may have the same scale.
        unscaled = [guard.grads.leaves() for guard in guards if not is_same_scale(guard.grads.scale, self._scale)]
        if any(engine_reaches(param) for params in (*unscaled, others) for param in params):
            raise UsageError(
                f"scaled_loss.backward() was called after its scale_loss block of {self.block} had ended, and leaves "
                f"gradients multiplied by the loss scale {float(self._scale):g}. Indent it into the with block"
            )


# The hook runs in the backward pass of a compiled step too, and Dynamo of torch 2.13 calls weak references wrongly.
start_no_graph(BackwardWatch._scaled_passes)
