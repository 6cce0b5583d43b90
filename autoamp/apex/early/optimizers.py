"""The optimizers of early 2019 (Apex before `apex.amp.initialize`), with the attributes that programs of then read.

`FusedAdam` takes the arguments of early 2019 and of later Apex. `FP16_Optimizer` is `autoamp.FP16_Optimizer` with the
attributes of the early one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.apex import fp16_utils, optimizers
from autoamp.apex.early.checkpoints import converted_state
from autoamp.apex.early.scalers import Iterations, PokedDynamicScaler, PokedStaticScaler
from autoamp.apex.formulas import clipped
from autoamp.errors import UsageError
from autoamp.scaling import DynamicLossScaler, widened
from autoamp.tensors import flatten, unflatten


class FusedAdam(optimizers.FusedAdam):
    """`autoamp.optimizers.FusedAdam` that takes the arguments of early 2019 too.

    With ``bias_correction=False``, as in BERT scripts, the step is the same as in early 2019 and later. With
    ``bias_correction=True`` it is the later one: it corrects the averages, where the early one corrected the learning
    rate, which changes what ``eps`` and ``weight_decay`` do.

    Args:
        params: Parameters or groups of them. ``max_grad_norm`` may be one of a group's options.
        lr: The learning rate.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the root of the second average.
        adam_w_mode: Whether the weight decay is decoupled (AdamW), or added to the gradient.
        weight_decay: The factor of the weight decay.
        amsgrad: Not supported; must be False.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.
        capturable: Whether the learning rate and the number of steps are tensors on the device.
        master_weights: Whether half parameters have fp32 masters in the optimizer's state.
        eps_inside_sqrt: Whether ``eps`` is added under the root, not to it.
        max_grad_norm: The gradients of each group are scaled down to this norm, after unscaling; 0 for no clipping.
        use_mt: No effect: every step is a multi-tensor one.
        amp_scale_adjustment: No effect.

    Raises:
        UsageError: ``amsgrad=True``.
    """

    # What `step` was given, for as long as it runs: gradients by parameter, the scale, norms by the id of a group.
    _given: dict[Tensor, Tensor] | None = None
    _scale = 1.0
    _norms: Mapping[int, Any] = {}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad, set_grad_none, capturable,
            master_weights,
        )  # fmt: skip
        self._eps_inside_sqrt = bool(eps_inside_sqrt)
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)

    def step(
        self,
        closure: Any = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | None = 1.0,
        grad_norms: Sequence[Any] | None = None,
        **scaling: Any,
    ) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the loss again, with gradients; its value is returned.
            grads: The gradients, in place of those of the parameters: a list, or a list for each group. A parameter
                with None in it stays as it is.
            output_params: Tensors of any dtype, likewise; the new values are written to them too.
            scale: The gradients are divided by it; None, as later callers pass, is 1.
            grad_norms: The norm of each group's gradients before the division; it is computed where there is none.
            **scaling: See `autoamp.optimizers.FusedAdam.step`.

        Raises:
            UsageError: The lists do not fit the groups. Nothing was written.
        """
        given = self._by_param("grads", grads)
        outputs = self._by_param("output_params", output_params)
        if grad_norms is not None and len(grad_norms) != len(self.param_groups):
            raise UsageError(
                f"FusedAdam.step: {len(grad_norms)} grad_norms for {len(self.param_groups)} groups; give one a group"
            )
        norms = {id(group): norm for group, norm in zip(self.param_groups, grad_norms or (), strict=False)}
        try:
            self._given, self._scale, self._norms = given, 1.0 if scale is None else scale, norms
            loss = super().step(closure, **scaling)
        finally:
            self._given, self._scale, self._norms = None, 1.0, {}
        if outputs:
            with torch.no_grad():
                torch._foreach_copy_(list(outputs.values()), list(outputs))
        return loss

    def _by_param(self, name: str, given: Any) -> dict[Tensor, Tensor] | None:
        """Return tensors by parameter, given a list of them or a list for each group; None for None."""
        if given is None:
            return None
        lists = list(given)
        if not lists or lists[0] is None or isinstance(lists[0], Tensor):
            lists = [lists]
        groups, lists = [group["params"] for group in self.param_groups], [list(tensors) for tensors in lists]
        found, wanted = list(map(len, lists)), list(map(len, groups))
        if found != wanted:
            raise UsageError(
                f"FusedAdam.step: {name} has lists of {found} tensors, the groups have {wanted} parameters; give a "
                "list for each group"
            )
        pairs = zip(itertools.chain(*groups), itertools.chain(*lists), strict=True)
        return {param: tensor for param, tensor in pairs if tensor is not None}

    def _gradient(self, param: Tensor) -> Tensor | None:
        return param.grad if self._given is None else self._given.get(param)

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        grads = super()._prepared(group, grads)
        limit = group["max_grad_norm"]
        if not grads or (self._scale == 1.0 and limit <= 0):
            return grads
        grads = list(torch._foreach_mul(widened(grads), 1.0 / self._scale))
        if limit <= 0:
            return grads
        given = self._norms.get(id(group))
        norm = torch.nn.utils.get_total_norm(grads) if given is None else torch.as_tensor(given) / self._scale
        return clipped(grads, norm, limit)


class ContribFusedAdam(FusedAdam):
    """`FusedAdam` with its arguments in the order of early 2019, as `apex.contrib.optimizers` still has them."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay=weight_decay, amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm,
        )  # fmt: skip


class GroupsOfMasters:
    """Gives what has the groups of an optimizer, and its masters or None, the lists that programs read."""

    param_groups: Any
    _masters: Any

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each half parameter with its master."""
        return [] if self._masters is None else self._masters.pairs

    def _by_group(self, found: Mapping[int, Tensor]) -> list[list[Tensor]]:
        return [[found[id(param)] for param in group["params"] if id(param) in found] for group in self.param_groups]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half parameters of the model, a list for each group."""
        return self._by_group({id(master): half for half, master in self._pairs()})

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of ``fp16_groups``, in the same order."""
        return self._by_group({id(master): master for _, master in self._pairs()})

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that have no masters, since they are in fp32 in the model, a list for each group."""
        masters = {id(master) for _, master in self._pairs()}
        return [[param for param in group["params"] if id(param) not in masters] for group in self.param_groups]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Half parameters of the model."""
        return [half for half, _ in self._pairs()]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters, in the same order."""
        return [master for _, master in self._pairs()]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """Parameters that are stepped themselves."""
        return [param for group in self.fp32_from_fp32_groups for param in group]


class FP16_Optimizer(Iterations, GroupsOfMasters, fp16_utils.FP16_Optimizer):  # noqa: N801
    """`autoamp.FP16_Optimizer` with the attributes that programs of early 2019 read and write.

    The arguments are those of `autoamp.FP16_Optimizer`. ``cur_scale`` is there twice: on ``loss_scaler``, as in
    `apex.fp16_utils`, and on the optimizer, as in `apex.optimizers`.
    """

    _static_scaler, _dynamic_scaler = PokedStaticScaler, PokedDynamicScaler
    # What `Iterations` reads and writes.
    _scaler = fp16_utils.FP16_Optimizer.loss_scaler
    _steps = property(lambda self: self._guard.skips.steps)
    # Its name in `apex.fp16_utils`.
    loss_scale = Iterations.cur_scale
    # Programs save and load it; closures need no such note here.
    first_closure_call_this_step = True

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
        """See `autoamp.FP16_Optimizer.overflow`. What is written is the verdict on the last step."""
        return super().overflow

    @overflow.setter
    def overflow(self, overflow: bool) -> None:
        self._guard.skips.step.skipped_by = self.loss_scaler if overflow else None

    # Its name in `apex.contrib.optimizers`.
    fp32_groups = GroupsOfMasters.fp32_from_fp16_groups

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters of each group as one tensor of one dimension, whose memory is theirs from the first read on.

        Write to it before the model runs, as where a checkpoint is loaded: torch does not report writes through
        ``.data``.
        """
        self._masters.refresh()
        flats = [_flat(group) for group in self.fp32_groups]
        self._masters.copy_down()
        return flats

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"FP16_Optimizer has no {name!r}: parameters are not flattened; use fp16_groups and fp32_from_fp16_groups"
            if name == "fp16_groups_flat"
            else f"'FP16_Optimizer' object has no attribute {name!r}"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, or a checkpoint of early 2019: all of it, or nothing.

        Raises:
            CheckpointError: A key is missing or does not fit. The message names it.
        """
        known = isinstance(state_dict, Mapping)
        super().load_state_dict(converted_state(state_dict, self.fp32_groups) if known else state_dict)


def _flat(masters: Sequence[Tensor]) -> Tensor:
    """Return a group's masters as one tensor. Where they do not lie side by side yet, their data move into it."""
    ends = itertools.accumulate((master.nbytes for master in masters), initial=masters[0].data_ptr() if masters else 0)
    parts = [master.detach() for master in masters]
    if all(part.is_contiguous() and part.data_ptr() == at for part, at in zip(parts, ends, strict=False)) and parts:
        return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
    flat = flatten(parts) if parts else torch.empty(0)
    for master, part in zip(masters, unflatten(flat, masters), strict=True):
        master.data = part
    return flat
