"""Networks cast to half by hand, and fp32 masters of their parameters: the legacy `apex.fp16_utils.fp16util`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.core import flatten_weights
from autoamp.errors import UsageError
from autoamp.tensors import flatten, map_tensors, unflatten
from autoamp.torch_private import MODULES_OF_BATCH_NORM


class tofp16(Module):
    """A layer that casts its floating input to fp16."""

    def forward(self, input: Any) -> Any:
        """Return ``input``, a tensor or nested containers of tensors, with floating tensors in fp16."""
        return map_tensors(input, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor)


def BN_convert_float(module: Module) -> Module:
    """Cast the batch norms in a module, itself included, to fp32, in place, and return the module.

    Batch norms without parameters (``affine=False``) are left as they are.
    """
    for part in module.modules():
        if isinstance(part, MODULES_OF_BATCH_NORM) and part.affine:
            part.float()
    return module


def network_to_half(network: Module) -> Module:
    """Cast a network to fp16, in place, and put a cast of the input to fp16 before it.

    Batch norms are in fp32, unless they have no parameters.

    Returns:
        ``nn.Sequential(tofp16(), network)``.
    """
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, their gradients and its buffers to ``dtype``, in place.

    Those of its children are left as they are. The parameters stay the same objects, the buffers do not.

    Args:
        module: The module.
        dtype: A floating-point dtype.
    """
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_floating_point():
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if grad is None else grad.to(dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Cast the floating parameters and buffers of a network to ``dtype``, in place, and return the network.

    Batch norms are left as they are, unless they have no parameters.

    Args:
        network: The network.
        dtype: A floating-point dtype.
    """
    for module in network.modules():
        if not (isinstance(module, MODULES_OF_BATCH_NORM) and module.affine):
            convert_module(module, dtype)
            if isinstance(module, torch.nn.RNNBase):
                flatten_weights(module)
    return network


class FP16Model(Module):
    """A network cast to fp16 by `convert_network`, whose floating inputs are cast to fp16 at each call.

    Args:
        network: The network, which is cast in place.

    Attributes:
        network: The network.
    """

    def __init__(self, network: Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        """Call the network with inputs cast to fp16, and return what it returns."""
        return self.network(*(tofp16()(value) for value in inputs))


def prep_param_lists(model: Module, flat_master: bool = False) -> tuple[list[Parameter], list[Parameter]]:
    """Pair a model's trainable parameters with fp32 masters.

    Args:
        model: The model.
        flat_master: Whether there is a single master, with the elements of all parameters, in one dimension. All
            parameters must be of one dtype then.

    Returns:
        ``(model_params, master_params)``: the parameters that require gradients, and fp32 copies of their shapes. With
        ``flat_master`` the second list has one parameter, whose gradient is 0; else the masters have no gradients until
        `model_grads_to_master_grads` is called.

    Raises:
        UsageError: ``flat_master`` with parameters of several dtypes, or without parameters that require gradients.
    """
    model_params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if flat_master:
        dtypes = {parameter.dtype for parameter in model_params}
        if len(dtypes) != 1:
            raise UsageError(
                f"flat_master=True takes parameters of one dtype, not {sorted(map(str, dtypes))}; use False"
            )
        flat = Parameter(flatten([parameter.data for parameter in model_params]).float())
        flat.grad = torch.zeros_like(flat)
        return model_params, [flat]
    return model_params, [Parameter(parameter.detach().clone().float()) for parameter in model_params]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of model parameters to their masters, in fp32.

    Args:
        model_params: The first list that `prep_param_lists` returned.
        master_params: The second.
        flat_master: As for `prep_param_lists`. A parameter without a gradient counts as one with a gradient of 0 then;
            else its master has no gradient either.
    """
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = flatten(grads).float()
        return
    for model_param, master in zip(model_params, master_params, strict=True):
        master.grad = None if model_param.grad is None else model_param.grad.to(torch.float32, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters into the model parameters, rounded to their dtypes, in one multi-tensor pass.

    Args:
        model_params: The first list that `prep_param_lists` returned.
        master_params: The second.
        flat_master: As for `prep_param_lists`.
    """
    sources = list(unflatten(master_params[0].data, model_params)) if flat_master else list(master_params)
    if sources:
        torch._foreach_copy_(list(model_params), sources)


def to_python_float(value: Tensor | Sequence[float]) -> float:
    """Return a number, as a Python float.

    Args:
        value: A tensor of one element, whose device is waited for; or a sequence, of which the first is taken.
    """
    return value.item() if isinstance(value, Tensor) else float(value[0])


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients in place, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: Tensors with gradients, or one.
        max_norm: The highest norm of all gradients taken together.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        The norm before that, a tensor without dimensions.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
