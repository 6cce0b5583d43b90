"""Weight norm by the names of `apex.reparameterization`, whose checkpoints have ``weight_g`` and ``weight_v``.

`torch.nn.utils.parametrizations.weight_norm` gives these parameters other names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.errors import UsageError
from autoamp.torch_private import normed_weight


class WeightNorm:
    """Weight norm (Salimans, Kingma 2016, arXiv:1602.07868): ``weight = g * v / |v|``, computed before each forward.

    The norm is taken over all dimensions but ``dim``. The parameters are ``<name>_v``, shaped as the weight, and
    ``<name>_g``, where every dimension but ``dim`` has the size 1. With ``dim=None`` the norm is taken over all
    dimensions, and ``<name>_g`` has none.

    Args:
        name: The name of the weight in its module.
        dim: The dimension over which no norm is taken; None where it is taken over all.
    """

    def __init__(self, name: str, dim: int | None) -> None:
        self.name = name
        # To torch the dimension -1 means that the norm is taken over all of them.
        self.dim = -1 if dim is None else dim

    def compute_weight(self, module: Module) -> Tensor:
        """Return the weight in the dtype of ``v``, computed in fp32 or fp64."""
        g, v = getattr(module, f"{self.name}_g"), getattr(module, f"{self.name}_v")
        dtype = torch.float64 if v.dtype is torch.float64 else torch.float32
        return normed_weight(v.to(dtype), g.to(dtype), self.dim).to(v.dtype)

    def __call__(self, module: Module, inputs: Any) -> None:
        """Compute the weight: the hook before ``forward``."""
        setattr(module, self.name, self.compute_weight(module))

    def apply(self, module: Module, weight: Tensor) -> None:
        """Replace the weight of a module by ``g`` and ``v``."""
        del module._parameters[self.name]
        values = {"g": torch.norm_except_dim(weight.detach(), 2, self.dim), "v": weight.detach().clone()}
        for part, value in values.items():
            module.register_parameter(f"{self.name}_{part}", Parameter(value, weight.requires_grad))
        # A part of autograd's graph could not be deep-copied with the module.
        setattr(module, self.name, self.compute_weight(module).detach())
        module.register_forward_pre_hook(self)

    def remove(self, module: Module) -> None:
        """Make the weight a parameter again, with its present value. The hook stays."""
        weight = self.compute_weight(module).detach()
        delattr(module, self.name)
        parts = [module._parameters.pop(f"{self.name}_{part}") for part in "gv"]
        requires_grad = any(part is not None and part.requires_grad for part in parts)
        module.register_parameter(self.name, Parameter(weight, requires_grad))


def apply_weight_norm(module: Module, name: str = "", dim: int | None = 0, hook_child: bool = True) -> Module:
    """Put `WeightNorm` on a parameter of a module, or on all of them.

    Parameters of fewer than two dimensions, and those of embeddings, are left alone. So are, without a name, the
    parameters of an earlier weight norm.

    Args:
        module: The module, changed in place.
        name: The parameter's name, dotted for a child's. Empty is every parameter of the module and its children.
        dim: The dimension over which no norm is taken; None where it is taken over all.
        hook_child: No effect: the hook is always on the module that holds the parameter.

    Returns:
        The module. Optimizers must be built after this, since its parameters are new.

    Raises:
        UsageError: There is no such parameter, or it has a weight norm already.
    """
    params = dict(module.named_parameters())
    parts = {f"{weight}_{part}" for weight, *_ in _normed(module) for part in "gv"}
    if name and name not in params:
        raise UsageError(f"{type(module).__name__} has no parameter {name!r}; choose among: {', '.join(params)}")
    for full in [name] if name else [one for one in params if one not in parts]:
        path, _, own = full.rpartition(".")
        holder = module.get_submodule(path)
        if params[full].dim() > 1 and not isinstance(holder, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            WeightNorm(own, dim).apply(holder, params[full])
    return module


def remove_weight_norm(module: Module, name: str = "", remove_all: bool = False) -> Module:
    """Make weights parameters again, with their present values.

    Args:
        module: The module, changed in place.
        name: The parameter's name, dotted for a child's. Empty is every one of the module and its children.
        remove_all: Whether to remove all, whatever ``name`` is.

    Returns:
        The module.

    Raises:
        UsageError: A name was given that has no weight norm.
    """
    normed = _normed(module)
    if name and not remove_all:
        normed = [one for one in normed if one[0] == name]
        if not normed:
            raise UsageError(f"{name!r} of {type(module).__name__} has no weight norm to remove")
    for _, holder, key, hook in normed:
        hook.remove(holder)
        del holder._forward_pre_hooks[key]
    return module


def _normed(module: Module) -> list[tuple[str, Module, int, WeightNorm]]:
    """Return the weight norms in a module: the weight's dotted name, its holder, the key of the hook, the hook."""
    return [
        (f"{path}.{hook.name}".removeprefix("."), holder, key, hook)
        for path, holder in module.named_modules()
        for key, hook in holder._forward_pre_hooks.items()
        if isinstance(hook, WeightNorm)
    ]
