"""Adam and AdamW: Kingma and Ba 2015 (arXiv:1412.6980), Loshchilov and Hutter 2019 (arXiv:1711.05101)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.apex.amp_C.optimizers import multi_tensor_adam
from autoamp.apex.formulas import ADAM, ADAM_ON_DEVICE, Rule, clipped, write_back
from autoamp.apex.optimizers.groups import FusedOptimizer, require
from autoamp.core import widened
from autoamp.errors import UsageError


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with L2 regularisation, by multi-tensor functions, computed as `FusedOptimizer` says.

    Each parameter's state is ``exp_avg`` and ``exp_avg_sq``, the averages of its gradient and of the squares.

    The arguments are those of Apex, of early 2019 and of later. With ``bias_correction=True`` the step is the later
    one: it corrects the averages, where the early one corrected the learning rate, which changes what ``eps`` and
    ``weight_decay`` do.

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
        eps_inside_sqrt: Whether ``eps`` is added under the root, not to it.
        max_grad_norm: The gradients of each group are scaled down to this norm, after unscaling; 0 for no clipping. It
            may be one of a group's options.
        use_mt: No effect: every step is a multi-tensor one.
        amp_scale_adjustment: No effect.

    Raises:
        UsageError: ``amsgrad=True``; or ``capturable=True`` and a group has parameters on several devices.
    """

    multi_tensor_adam = staticmethod(multi_tensor_adam)
    _options = (*FusedOptimizer._options, "adam_w_mode", "master_weights", "capturable", "_eps_inside_sqrt")
    # Optimizers that were pickled before these options existed have no such attributes of their own.
    capturable = _eps_inside_sqrt = False
    # What `step` was given, for as long as it runs: gradients by parameter, the scale, norms by the id of a group.
    _given: dict[Tensor, Tensor] | None = None
    _scale = 1.0
    _norms: Mapping[int, Any] = {}

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True, capturable: bool = False, master_weights: bool = False, *,
        eps_inside_sqrt: bool = False, max_grad_norm: float = 0.0, use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:  # fmt: skip
        require(not amsgrad, "FusedAdam: amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")
        self.capturable = capturable
        self.master_weights = master_weights
        self.adam_w_mode = bool(adam_w_mode)
        self._eps_inside_sqrt = bool(eps_inside_sqrt)
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    @property
    def _rule(self) -> Rule:  # type: ignore[override]
        return ADAM_ON_DEVICE if self.capturable else ADAM

    @property
    def _has_masters(self) -> bool:  # type: ignore[override]
        return self.master_weights

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
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

    def step(
        self,
        closure: Any = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | None = 1.0,
        grad_norms: Sequence[Any] | None = None,
        **others: Any,
    ) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the loss again, with gradients; its value is returned.
            grads: The gradients, in place of those of the parameters: a list, or a list for each group. A parameter
                with None in it stays as it is.
            output_params: Tensors of any dtype, likewise; the new values are written to them too.
            scale: The gradients are divided by it; None, as later callers pass, is 1.
            grad_norms: The norm of each group's gradients before the division; it is computed where there is none.
            **others: Other arguments that some versions of Apex take; all must be None.

        Raises:
            UsageError: A gradient is sparse, or the lists do not fit the groups. Nothing was written.
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
            loss = super().step(closure, **others)
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

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers = {
            "beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"],
            "weight_decay": group["weight_decay"], "decoupled": self.adam_w_mode,
            "bias_correction": bool(group["bias_correction"]), "eps_inside_sqrt": self._eps_inside_sqrt,
        }  # fmt: skip
        if not self.capturable:
            return {**super()._numbers(group), **numbers}
        device = group["step"].device
        found_inf = getattr(self, "found_inf", torch.zeros((), device=device))
        found_inf = found_inf.to(device, torch.float32, non_blocking=True).reshape(())
        group["step"] += (found_inf == 0).to(group["step"].dtype)
        return {**numbers, "lr": group["lr"], "step": group["step"], "found_inf": found_inf}

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        scale: Tensor | None = getattr(self, "grad_scale", None)
        limit = group.get("max_grad_norm", 0.0)
        if scale is not None and grads:
            inverse = scale.to(grads[0].device, non_blocking=True).reshape(()).reciprocal()
            unscaled = list(torch._foreach_mul(widened(grads), inverse))
            # The optimizer's gradients are unscaled after the step, as after `GradScaler.unscale_`.
            write_back(grads, unscaled)
            grads = unscaled
        if not grads or (self._scale == 1.0 and limit <= 0):
            return grads
        grads = list(torch._foreach_mul(widened(grads), 1.0 / self._scale))
        if limit <= 0:
            return grads
        given = self._norms.get(id(group))
        norm = torch.nn.utils.get_total_norm(grads) if given is None else torch.as_tensor(given) / self._scale
        return clipped(grads, norm, limit)


def _to_device(group: dict[str, Any]) -> None:
    """Move the learning rate and the number of steps of a group to the device of its parameters."""
    devices = {param.device for param in group["params"]}
    require(
        len(devices) <= 1,
        f"FusedAdam: capturable=True takes groups on one device, and one is on {sorted(map(str, devices))}; "
        "make a group for each device",
    )
    # A group may have no parameters.
    device = next(iter(devices), torch.device("cpu"))
    group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
    group["step"] = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=device).clone()
