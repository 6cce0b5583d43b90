"""Adam and AdamW: Kingma and Ba 2015 (arXiv:1412.6980), Loshchilov and Hutter 2019 (arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.formulas import ADAM, adam_on_device_, write_back
from autoamp.optimizers.groups import FusedOptimizer, evaluated, in_parts, require, scaling_of
from autoamp.scaling import widened


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with L2 regularisation, by multi-tensor functions, computed as `FusedOptimizer` says.

    Each parameter's state is ``exp_avg`` and ``exp_avg_sq``, the averages of its gradient and of the squares.

    With ``capturable=True`` it also takes a `torch.amp.GradScaler`: ``scaler.step(optimizer)`` unscales the gradients,
    half ones too. If they hold inf or nan, parameters and state stay as they are. The host does not wait for the device
    to learn that.

    Args:
        params: Floating parameters of any shapes, or groups of them as `torch.optim.Optimizer` takes.
        lr: The learning rate.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        betas: The decay of the gradient's average, and of the average of its square.
        eps: Added to the root of the second average.
        adam_w_mode: Whether the decay is decoupled (AdamW). If not, it is added to the gradient.
        weight_decay: The factor of the parameter in the decay; 0 for none.
        amsgrad: Not supported; must be False.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.
        capturable: Whether ``group["lr"]`` (fp32) and ``group["step"]`` (int32) are tensors without dimensions on the
            device of the group's parameters. A step then never waits for the device, and a CUDA graph can capture it.
        master_weights: Whether fp32 copies of the half parameters are stepped, and the parameters set to them after
            each step. The copies are in the state, as ``master_param``.

    Raises:
        UsageError: ``amsgrad=True``; or ``capturable=True`` and a group has parameters on several devices.
    """

    _rule = ADAM
    _options = (*FusedOptimizer._options, "adam_w_mode", "master_weights", "capturable", "_eps_inside_sqrt")
    # Whether eps is added under the root of the second average. A subclass may set it.
    _eps_inside_sqrt = False
    # Optimizers that were pickled before this option existed have no such attribute of their own.
    capturable = False

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True, capturable: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        require(not amsgrad, "FusedAdam: amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")
        self.capturable = capturable
        self.master_weights = master_weights
        self.adam_w_mode = bool(adam_w_mode)
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves unscaling and skipping to ``step``."""
        return self.capturable

    @property
    def param_groups_master(self) -> list[dict[str, Any]] | None:
        """The copies that are stepped, a ``{"params": copies}`` for each group; None without ``master_weights``."""
        if not self.master_weights:
            return None
        return [{"params": self._masters(group["params"])} for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            UsageError: The optimizer is capturable, and the group has parameters on several devices.
        """
        super().add_param_group(param_group)
        if self.capturable:
            _to_device(self.param_groups[-1])

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` of a capturable optimizer or another returned; see `FusedOptimizer`."""
        super().load_state_dict(state_dict)
        for group in self.param_groups if self.capturable else ():
            _to_device(group)

    def step(self, closure: Any = None, **scaling: Any) -> Any:
        """Take one step. Parameters without a gradient stay as they are.

        Args:
            closure: Evaluates the loss again, with gradients; its value is returned.
            **scaling: ``grad_scaler``, the `torch.amp.GradScaler` that scaled the loss, where this is called in place
                of ``scaler.step(optimizer)``. The signature does not name it, because torch passes its scaler to every
                ``step`` that does, and warns.

        Raises:
            UsageError: A gradient is sparse; the optimizer is not capturable and gets an enabled scaler; or an argument
                of another name is not None.
        """
        scaler = scaling.pop("grad_scaler", None)
        given = [name for name, value in scaling.items() if value is not None]
        require(not given, f"FusedAdam.step() got {', '.join(given)}; call step(), which takes gradients from .grad")
        if scaler is None or not scaler.is_enabled():
            return super().step(closure)
        require(self.capturable, "FusedAdam.step(grad_scaler=...) wants capturable=True; use scaler.step(optimizer)")
        loss = evaluated(closure)
        try:
            self.grad_scale, self.found_inf = scaling_of(scaler, self)
            super().step()
        finally:
            # `scaler.step` sets both attributes itself and deletes them, so neither may outlast a step.
            del self.grad_scale, self.found_inf
        return loss

    def _step(self) -> None:
        if not self.capturable:
            super()._step()
            return
        for group in self.param_groups:
            self._step_on_device(group)

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
        return {
            "lr": group["lr"] if self.capturable else float(group["lr"]), "beta1": group["betas"][0],
            "beta2": group["betas"][1], "eps": group["eps"], "weight_decay": group["weight_decay"],
            "step": group["step"], "decoupled": self.adam_w_mode, "bias_correction": bool(group["bias_correction"]),
            "eps_inside_sqrt": self._eps_inside_sqrt,
        }  # fmt: skip

    def _left_by_kernel(self, lists: Sequence[list[Tensor]], numbers: dict[str, Any]) -> Sequence[list[Tensor]]:
        return self._rule.step_by_kernel(lists, self._masters if self.master_weights else None, **numbers)

    def _step_on_device(self, group: dict[str, Any]) -> None:
        if not group["params"]:
            return
        device = group["params"][0].device
        skip = torch.zeros((), dtype=torch.bool, device=device)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            skip = found_inf.to(device, non_blocking=True).reshape(()) > 0
        group["step"] += (~skip).to(group["step"].dtype)
        numbers = self._numbers(group)
        lists = self._tensors(group, *self._rule.states)
        for params, grads, *states in in_parts(
            *self._left_by_kernel(lists, {**numbers, "found_inf": skip.to(torch.float32)})
        ):
            values = self._values(params)
            adam_on_device_(values, widened(grads), *states, skip=skip, **numbers)
            write_back(params, values)

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None or not grads:
            return grads
        inverse = scale.to(grads[0].device, non_blocking=True).reshape(()).reciprocal()
        grads = list(torch._foreach_mul(widened(grads), inverse))
        # The optimizer's gradients are unscaled after the step, as after `GradScaler.unscale_`.
        write_back([grad for param in group["params"] if (grad := self._gradient(param)) is not None], grads)
        return grads

    def _values(self, params: list[Tensor]) -> list[Tensor]:
        """Return what is stepped: the parameters, with fp32 copies of half ones; or the copies in the state."""
        return self._masters(params) if self.master_weights else widened(params)


def _to_device(group: dict[str, Any]) -> None:
    """Move the learning rate and the number of steps of a group to the device of its parameters."""
    devices = {param.device for param in group["params"]}
    if len(devices) > 1:
        raise UsageError(
            f"FusedAdam: capturable=True takes groups on one device, and one is on {sorted(map(str, devices))}; "
            "make a group for each device"
        )
    for device in devices:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        group["step"] = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=device).clone()
