"""Networks cast by hand, and fp32 masters beside their parameters: the legacy `apex.fp16_utils.fp16util`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.casting import flatten_weights
from autoamp.errors import UsageError
from autoamp.tensors import map_tensors
from autoamp.torch_private import MODULES_OF_BATCH_NORM, flatten, unflatten

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(Module):  # noqa: N801
    """A layer that casts its floating input to fp16."""

    def forward(self, input: Any) -> Any:
        """Return ``input``, a tensor or a nest of tensors, in fp16."""
        return map_tensors(input, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor)


def BN_convert_float(module: Module) -> Module:  # noqa: N802
    """Cast the batch norms in a module, itself included, to fp32, in place. Returns the module."""
    for part in module.modules():
        if isinstance(part, MODULES_OF_BATCH_NORM) and part.affine:
            part.float()
    return module


def network_to_half(network: Module) -> Module:
    """Cast a network to fp16 with batch norms in fp32, and put a cast of the input before it.

    Returns:
        ``nn.Sequential(tofp16(), network)``. The network is cast in place.
    """
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters and buffers that a module holds itself, its children's not, in place."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_floating_point():
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if grad is None else grad.to(dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Cast a network in place, batch norms with parameters excepted. Returns the network."""
    for module in network.modules():
        if not (isinstance(module, MODULES_OF_BATCH_NORM) and module.affine):
            convert_module(module, dtype)
            if isinstance(module, torch.nn.RNNBase):
                flatten_weights(module)
    return network


class FP16Model(Module):
    """A network cast to fp16, batch norms excepted, with its inputs cast on the way in.

    Attributes:
        network: The network, cast in place.
    """

    def __init__(self, network: Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        """Call the network with fp16 inputs."""
        return self.network(*(tofp16()(value) for value in inputs))


def prep_param_lists(model: Module, flat_master: bool = False) -> tuple[list[Parameter], list[Parameter]]:
    """Pair a model's trainable parameters with fp32 masters.

    Args:
        model: Its trainable parameters are taken.
        flat_master: One master for all, flattened. All parameters must be of one dtype.

    Returns:
        ``(model_params, master_params)``. The masters have gradients of their own only after
        `model_grads_to_master_grads`. With ``flat_master`` the second list holds one parameter.

    Raises:
        UsageError: ``flat_master`` with parameters of several dtypes.
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
    """Copy the gradients of model parameters to their masters, in fp32."""
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
    """Copy the masters into the model parameters, in one multi-tensor pass."""
    sources = list(unflatten(master_params[0].data, model_params)) if flat_master else list(master_params)
    if sources:
        torch._foreach_copy_(list(model_params), sources)


def to_python_float(value: Tensor | Sequence[float]) -> float:
    """Return the one number in a tensor or a sequence."""
    return value.item() if isinstance(value, Tensor) else float(value[0])


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the total norm of gradients in place and return the norm before; `torch.nn.utils.clip_grad_norm_`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
