"""`FP16_Optimizer`: any optimizer over half parameters, stepped in fp32, that scales the loss itself."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoamp.apex.fp16_utils.checkpoints import load_or_restore, matched, state_of_scaler
from autoamp.apex.fp16_utils.fp16util import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
)
from autoamp.apex.fp16_utils.loss_scaler import Iterations, PokedDynamicScaler, PokedStaticScaler
from autoamp.apex.fp16_utils.masters import GroupsOfMasters, flat_masters
from autoamp.core import (
    DynamicLossScaler,
    GuardHost,
    LossScaler,
    MasterWeights,
    RequestedGroup,
    ScaledBlock,
    ScalesItself,
    StepGuard,
    current_runtime,
    is_optimizer,
    joint_norm,
    refuse_inner_groups,
    scaled_loss,
)
from autoamp.errors import CheckpointError, UsageError, kind_of

_NO_COPY = (
    "an FP16_Optimizer cannot be copied or pickled: its masters belong to the parameters of one model; copy or save "
    "its state_dict(), and load that into an FP16_Optimizer of the other model"
)


class FP16_Optimizer(Iterations, GroupsOfMasters, torch.optim.Optimizer, ScalesItself):
    """Steps fp32 masters of half parameters and copies them into these; skips steps whose gradients overflowed.

    A `torch.optim.Optimizer` in every respect: LR schedulers, hooks and ``isinstance`` work. It may be built before or
    after ``model.half()``. It cannot be copied or pickled; `state_dict` can. Programs read and write the scale as
    ``loss_scale``, as in `apex.fp16_utils`, or as ``cur_scale``, as in `apex.optimizers` of early 2019.

    Args:
        init_optimizer: The optimizer that does the arithmetic. In its groups fp32 masters replace its half parameters.
        static_loss_scale: The loss scale unless it is dynamic; None is 1.0.
        dynamic_loss_scale: Whether the scale adapts to overflows.
        dynamic_loss_args: For a dynamic scale: ``init_scale`` (default 2**16), ``scale_factor`` (2), by which an
            overflow divides the scale, and ``scale_window`` (2000), the number of steps without an overflow after which
            the scale is multiplied by it.
        verbose: Has no effect, and exists because Apex has it. Skips are logged to ``autoamp.core``.

    Attributes:
        optimizer: The optimizer given, whose ``param_groups`` and ``state`` are this one's too.

    Raises:
        UsageError: ``init_optimizer`` is no optimizer, or an `FP16_Optimizer`; or ``dynamic_loss_args`` has an unknown
            key.
        LossScaleError: The loss scale or an argument of the dynamic one is out of range.
    """

    # What `Iterations` reads and writes.
    _scaler = property(lambda self: self.loss_scaler)
    _steps = property(lambda self: self._guard.history.steps)
    loss_scale = Iterations.cur_scale
    # Its name in `apex.contrib.optimizers`.
    fp32_groups = GroupsOfMasters.fp32_from_fp16_groups
    # Programs save and load it; closures need no such note here.
    first_closure_call_this_step = True

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
    ) -> None:
        if isinstance(init_optimizer, FP16_Optimizer):
            raise UsageError("init_optimizer is an FP16_Optimizer already; give it the optimizer that it was made from")
        if not is_optimizer(init_optimizer):
            raise UsageError(f"init_optimizer takes an optimizer, not {kind_of(init_optimizer)}")
        scaler: LossScaler
        if dynamic_loss_scale:
            scaler = _dynamic_scaler(dynamic_loss_args or {})
        else:
            scaler = PokedStaticScaler(1.0 if static_loss_scale is None else static_loss_scale)
        self.optimizer, self.verbose = init_optimizer, verbose
        runtime = current_runtime()
        # At O2 the handle may have given the optimizer masters and a guard. The masters are used here, the guard goes.
        theirs = None if runtime is None else runtime.optimizers.hand_over(init_optimizer)
        if theirs is None:
            refuse_inner_groups(init_optimizer)
        self._masters = MasterWeights(init_optimizer) if theirs is None else theirs
        # Of a pass that the program begins itself, while no handle is active, nobody else hears.
        self._masters.hear_passes()
        self._guard = StepGuard(init_optimizer, _owner, masters=self._masters)
        self.loss_scaler = scaler
        if runtime is not None:
            runtime.casts.yield_to("FP16_Optimizer", {half.dtype for half, _ in self._masters.pairs})
            runtime.optimizers.steps.add_own(scaler)
        # Groups and state are the inner optimizer's. This sets up the rest of what Optimizer.__init__ does.
        self.__setstate__({"defaults": getattr(init_optimizer, "defaults", {})})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, with fp32 masters in place of half parameters."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state by master. A half parameter finds the state of its master."""
        return _State(self.optimizer.state, self._masters.get)

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler."""
        return self._guard.grads.own_scalers[0]

    @loss_scaler.setter
    def loss_scaler(self, scaler: LossScaler) -> None:
        self._guard.grads.own_scalers = [scaler]

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale adapts to overflows. UsageError: the other value is written."""
        return isinstance(self.loss_scaler, DynamicLossScaler)

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, dynamic: bool) -> None:
        if bool(dynamic) is not self.dynamic_loss_scale:
            raise UsageError(
                f"dynamic_loss_scale={dynamic!r} does not fit a scale that was made with {self.dynamic_loss_scale}; "
                f"build the FP16_Optimizer with dynamic_loss_scale={bool(dynamic)}"
            )

    @property
    def overflow(self) -> bool:
        """Whether gradients since the last step overflowed; where there are none, whether that step was a skip.

        Waits for the device. What is written is the verdict on the last step.
        """
        return self._guard.grads.overflowed()

    @overflow.setter
    def overflow(self, overflow: bool) -> None:
        self._guard.history.step.skipped_by = self.loss_scaler if overflow else None

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters of each group as one tensor of one dimension, whose memory is theirs from the first read on.

        Write to it before the model runs, as where a checkpoint is loaded: torch does not report writes through
        ``.data``.
        """
        self._masters.refresh()
        flats = [flat_masters(group) for group in self.fp32_groups]
        self._masters.round_into_model()
        return flats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its half parameters get masters."""
        self.optimizer.add_param_group(param_group)
        self._masters.add_missing_masters()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of a scaled loss, in place of ``loss.backward()``.

        Args:
            loss: A floating tensor of one element. It is scaled in fp32.
            update_master_grads: Whether gradients are unscaled and checked right away. If not, they stay scaled, and
                those of several backward passes add up, until `update_master_grads` or `step` is called.
            retain_graph: As for ``Tensor.backward``.

        Raises:
            UsageError: Masters were written to after the last step, the model has other weights, and without a handle
                nothing has copied the masters into it before it ran.
        """
        runtime = current_runtime()
        if self._masters.masters_to_model() and runtime is None:
            raise UsageError(
                "masters were written to since the last step, and the loss comes from a model with other weights; "
                "call optimizer.model_from_masters() after the write, before the model runs"
            )
        self._guard.owner().refuse_scaled(self._guard)
        if runtime is not None:
            scale = self.loss_scaler.scale_without_sync()
            runtime.optimizers.steps.note(loss, scale, waits=True)
        block = ScaledBlock([self._guard], self.loss_scaler, delay_unscale=not update_master_grads)
        with block as scale:
            scaled = scaled_loss(loss, scale)
            if runtime is not None:
                block.watch(loss, scaled, runtime.optimizers.still_scaled)
            scaled.backward(retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Unscale and check the gradients that ``backward(..., update_master_grads=False)`` left scaled."""
        self._guard.owner().refuse_scaled(self._guard)
        self._masters.collect()
        self._guard.grads.finish_delayed()

    def masters_from_model(self) -> None:
        """Set the masters to the half parameters, after weights were written through ``.data`` between steps."""
        self._masters.read_model()

    def model_from_masters(self) -> None:
        """Set the half parameters to the masters, after these were written to outside of a step.

        Not needed while a handle of autoamp is active, except for writes through ``.data``, nor if `zero_grad` comes
        between the write and the next call of the model.
        """
        self._masters.round_into_model()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them into the half parameters, unless the gradients overflowed.

        Args:
            closure: Clears the gradients, runs the model and ``optimizer.backward(loss)``, and returns the loss.

        Returns:
            What the inner optimizer's ``step`` returns; for a skip None, or the loss if the closure was evaluated.

        Raises:
            NonFiniteGradientsError: There were too many skips in a row, or gradients overflowed in the middle of one.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True, *, set_grads_to_None: bool | None = None) -> None:
        """Clear the gradients of masters and half parameters.

        Args:
            set_to_none: Whether they are set to None. If not, to 0.
            set_grads_to_None: The name of ``set_to_none`` in Apex.
        """
        self._masters.masters_to_model()
        if set_to_none if set_grads_to_None is None else set_grads_to_None:
            self._masters.clear()
        else:
            self._masters.share_gradients()
            super().zero_grad(set_to_none=False)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale down all gradients of the step so that their norm, taken together, is at most ``max_norm``.

        Gradients that are still scaled are unscaled and checked first. Waits for the device.

        Args:
            max_norm: The limit of the norm.
            norm_type: The p of the p-norm, above 0; ``inf`` is the largest absolute value.

        Returns:
            The norm before clipping, or -1.0 if the gradients overflowed and nothing was clipped. If fp32 does not hold
            it, it is inf, and the gradients are 0, as with `torch.nn.utils.clip_grad_norm_`.

        Raises:
            UsageError: ``norm_type`` is not above 0.
        """
        self._guard.owner().refuse_scaled(self._guard)
        norm = joint_norm([self._guard], norm_type)
        if self.overflow:
            return -1.0
        self._guard.grads.clip(norm, max_norm)
        return float(norm)

    def sync_over(self, group: Any, *, replicas: int | None = None) -> None:
        """Let all ranks of a process group agree on each step; see `autoamp.Handle.sync_over`.

        Args:
            group: The process group, ``torch.distributed.group.WORLD`` for all ranks.
            replicas: How many of its ranks have the same parameters; None for all of them.

        Raises:
            UsageError: There is no process group, this rank is not in it, or ``replicas`` does not divide its size.
        """
        self._guard.grads.asked = RequestedGroup.from_arguments(group, replicas)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients of the step, a list for each group, or None if they overflowed.

        Gradients that are still scaled are unscaled and checked first. Waits for the device.
        """
        self.update_master_grads()
        if self.overflow:
            return None
        return [[None if p.grad is None else p.grad.data for p in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the scaler and the inner optimizer, and the masters, by the keys that Apex has.

        The masters in it are the fp32 tensors themselves, not copies.
        """
        self._masters.refresh()
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self._guard.history.step.skipped,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_groups,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, and copy masters into half parameters.

        Raises:
            CheckpointError: A key is missing or does not fit, or the checkpoint is one of Apex of early 2019. The
                message names the key. Weights, state, options and scale are what they were.
        """
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"the state is {kind_of(state_dict)}; pass what FP16_Optimizer.state_dict() returned")
        if "cur_scale" in state_dict:
            raise CheckpointError(
                "key 'cur_scale' is that of an FP16_Optimizer of early 2019, whose checkpoints no longer load; load it "
                "with autoamp 0.2 and save it again; nothing was loaded"
            )
        for key in ("loss_scaler", "dynamic_loss_scale", "optimizer_state_dict", "fp32_from_fp16"):
            if key not in state_dict:
                raise CheckpointError(f"key {key!r} is missing; pass what FP16_Optimizer.state_dict() returned")
        dynamic = self.dynamic_loss_scale
        overflow = bool(state_dict.get("overflow", False))
        if state_dict["dynamic_loss_scale"] is not dynamic:
            raise CheckpointError(
                f"key 'dynamic_loss_scale' is {state_dict['dynamic_loss_scale']!r}, and this optimizer was built with "
                f"{dynamic}"
            )
        scaler_state = state_of_scaler(state_dict["loss_scaler"])
        self.loss_scaler.check_state_dict(scaler_state, "loss_scaler")
        self._masters.add_missing_masters()
        pairs = matched(self.fp32_groups, state_dict["fp32_from_fp16"])
        load_or_restore(self.optimizer, state_dict["optimizer_state_dict"])
        self.loss_scaler.load_state_dict(scaler_state)
        self.overflow = overflow
        with torch.no_grad():
            for master, value in pairs:
                master.copy_(value)
        self._masters.round_into_model()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"FP16_Optimizer has no {name!r}: parameters are not flattened; use fp16_groups and fp32_from_fp16_groups"
            if name == "fp16_groups_flat"
            else f"'FP16_Optimizer' object has no attribute {name!r}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(_NO_COPY)

    def __repr__(self) -> str:
        return f"FP16_Optimizer({self.optimizer!r}, loss_scale={self.loss_scale:g})"


class _State(UserDict[Any, Any]):
    """A view of an optimizer's state, in which a half parameter finds what is stored by its master."""

    def __init__(self, state: Any, stepped: Callable[[Any], Any]) -> None:
        self.data = state
        self._stepped = stepped

    def __getitem__(self, parameter: Any) -> Any:
        return self.data[self._stepped(parameter)]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self.data[self._stepped(parameter)] = value

    def __delitem__(self, parameter: Any) -> None:
        del self.data[self._stepped(parameter)]

    def __contains__(self, parameter: object) -> bool:
        return self._stepped(parameter) in self.data


def _owner() -> GuardHost[StepGuard]:
    """Return what the guard of an `FP16_Optimizer` asks and tells: the active handle, if there is one."""
    runtime = current_runtime()
    return GuardHost() if runtime is None else runtime.optimizers


def _dynamic_scaler(given: Mapping[str, float]) -> PokedDynamicScaler:
    """Return the dynamic scaler for legacy arguments. UsageError: there is no such argument."""
    defaults = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 2000}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise UsageError(f"dynamic_loss_args has no {unknown[0]!r}; choose among {', '.join(defaults)}")
    init_scale, factor, window = map(float, {**defaults, **given}.values())
    # The legacy scaler has no highest scale, and programs give it 2**32 to begin with.
    highest = max(init_scale, 2.0**24)
    return PokedDynamicScaler(init_scale, factor, 1.0 / factor, int(window), max_loss_scale=highest)
