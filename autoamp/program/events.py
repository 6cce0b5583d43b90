"""The events of a program, one method of `Subscriber` for each."""

# The methods of `Subscriber` have no body, since nobody calls them.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class Subscriber:
    """Hears what the program does, while a handle is active. A subclass overrides the events that it wants.

    Torch is patched for an event only if a subscriber overrides its method, so that other events cost nothing. The
    methods of this class are never called.

    The methods ``around_NAME`` are given a function and return one that is called in its place. All others are told.
    """

    @property
    def is_listening(self) -> bool:
        """Whether torch is patched for this subscriber: asked when patches are put in place, and by `Program.update`.

        Other subscribers may need the same patch, so a subscriber that does not listen may still be told.
        """
        return True

    # -- the handle --

    def started(self) -> None:
        """Torch was patched: the handle is active."""

    def stopped(self) -> None:
        """Torch is about to be restored, for a while or for good."""

    # -- modules --

    def around_module_call(self, original: Function) -> Function:
        """``torch.nn.Module.__call__``."""

    def around_state_dict(self, state_dict: Function) -> Function:
        """``torch.nn.Module.state_dict``."""

    def around_load_state_dict(self, load_state_dict: Function) -> Function:
        """``torch.nn.Module.load_state_dict``."""

    def average_made(self, average: torch.nn.Module) -> None:
        """A `torch.optim.swa_utils.AveragedModel` was made, with a deep copy of a model."""

    def around_export(self, export: Function) -> Function:
        """A function of torch that makes a graph of a model: ``torch.jit.trace``, ``torch.onnx.export`` and others."""

    def runs_later(self, function: Function) -> Function:
        """A function is to run in a backward pass, for a checkpoint, or in another thread. Returns the one to run."""

    # -- autocast --

    def autocast_entered(self, region: torch.autocast) -> None:
        """A `torch.autocast` region has begun. torch enters regions too, which are not the program's."""

    def autocast_left(self, region: torch.autocast, error: BaseException | None) -> None:
        """A `torch.autocast` region is about to end, by an error or without one."""

    # -- backward passes --

    def around_backward(self, backward: Function) -> Function:
        """``torch.autograd.backward``, which `Tensor.backward` calls."""

    def grad_retained(self, tensor: Tensor) -> None:
        """``Tensor.retain_grad`` was called."""

    def hook_registered(self, hook: Function, tensor: Tensor | None, *, accumulated: bool) -> Function:
        """The program registers a hook that gets gradients. Returns the hook to register.

        Args:
            hook: The hook.
            tensor: The tensor that it is registered at; None for a module, or for all modules.
            accumulated: Whether it is called with the tensor, after the gradient was added to its ``.grad``.
        """

    def function_called(self, context: Any) -> None:
        """The forward of a custom `torch.autograd.Function` begins, with this context."""

    def around_function_backward(self, apply: Function) -> Function:
        """The backward of a custom `torch.autograd.Function`, called with its context."""

    def clips_gradients(self, function: str, params: Iterable[Tensor]) -> None:
        """A function of `torch.nn.utils` is about to clip gradients, or to take their norm for that.

        Args:
            function: Its name.
            params: What it was given: parameters, or for ``get_total_norm`` their gradients.
        """

    # -- optimizers --

    def optimizer_made(self, optimizer: Any) -> None:
        """``Optimizer.__init__`` or ``__setstate__`` has returned. That of a subclass may go on."""

    def around_step(self, step: Function) -> Function:
        """``step`` of a class of optimizers of torch, called with the optimizer.

        A call may come twice, nested: that of torch's wrapper, which runs hooks, and that of the step within it. What
        was bound before torch was patched calls the second alone.
        """

    def around_state_made(self, make: Function) -> Function:
        """What `torch.distributed.checkpoint` calls with an optimizer before it reads or loads the state of it."""

    def step_ended(self, step: Any) -> None:
        """A step was taken or skipped, as `autoamp.stepping.Step` tells."""

    def unguarded_step(self, optimizer: Any) -> None:
        """An optimizer without a guard is about to step."""

    def refuses_step(self, optimizer: Any, guard: Any) -> bool:
        """An optimizer is about to step, by gradients that no loss scale checked. Returns whether to skip the step.

        Args:
            optimizer: The optimizer.
            guard: Its `autoamp.stepping.StepGuard`; None without.
        """

    # -- the program's own loss scaling --

    def scaler_made(self, scaler: torch.amp.GradScaler) -> None:
        """``GradScaler.__init__`` has returned. That of a subclass may go on."""

    def loss_scaled(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """``GradScaler.scale(outputs)`` has returned."""

    def around_unscale(self, unscale: Function) -> Function:
        """``GradScaler.unscale_``."""

    def around_scaler_step(self, step: Function) -> Function:
        """``GradScaler.step``."""
