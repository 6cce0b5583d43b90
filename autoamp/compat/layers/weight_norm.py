"""Reparameterizations with the names of `apex.reparameterization`: a weight computed from other parameters.

A hook before ``forward`` computes the weight, and the parameters are named as by `torch.nn.utils.weight_norm`:
``weight_g`` and ``weight_v`` for ``weight``. Apex's checkpoints have these names, and not those of
`torch.nn.utils.parametrizations.weight_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.errors import UsageError
from autoamp.torch_private import normed_weight

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]


class Reparameterization:
    """A weight of a module that is computed anew before each forward. Subclasses say from what and how.

    Args:
        name: The name of the weight in ``module``, dotted where a child holds it.
        dim: The dimension over which no norm is taken; None where it is taken over all.
        module: The module that has the hook.

    Attributes:
        reparameterization_names: The names of the parameters in the weight's place.
    """

    def __init__(self, name: str, dim: int | None, module: Module) -> None:
        self.name = name
        self.dim = dim
        self.module = module
        self.reparameterization_names: list[str] = []

    def compute_weight(self, module: Module, name: str) -> Tensor:
        """Return the weight ``name`` of ``module``, computed from the parameters in its place."""
        raise NotImplementedError

    def reparameterize(self, name: str, weight: Tensor, dim: int | None) -> tuple[list[str], list[Parameter]]:
        """Return the names of the parameters that take a weight's place, and these parameters."""
        raise NotImplementedError

    @staticmethod
    def get_module_and_name(module: Module, name: str) -> tuple[Module, str]:
        """Return the module that holds the parameter of a dotted name, and its name there.

        Raises:
            UsageError: There is no such parameter.
        """
        path, _, last = name.rpartition(".")
        try:
            holder = module.get_submodule(path)
        except AttributeError:
            holder = None
        if holder is None or not hasattr(holder, last):
            known = ", ".join(own for own, _ in module.named_parameters())
            raise UsageError(f"{type(module).__name__} has no parameter {name!r}; choose among: {known}")
        return holder, last

    @staticmethod
    def apply(
        module: Module,
        name: str,
        dim: int | None,
        reparameterization: type[Reparameterization] | None = None,
        hook_child: bool = True,
    ) -> Reparameterization | None:
        """Put a reparameterization on one parameter; see `apply_reparameterization`.

        Returns:
            The reparameterization, or None where the parameter is left alone: it is None or an embedding's, or has
            fewer than two dimensions.

        Raises:
            UsageError: There is no such parameter, or it is reparameterized already.
        """
        holder, own = Reparameterization.get_module_and_name(module, name)
        if own not in holder._parameters:
            raise UsageError(
                f"{name!r} of {type(module).__name__} is not a parameter; remove its reparameterization first"
            )
        weight = holder._parameters[own]
        if weight is None or weight.dim() < 2 or isinstance(holder, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            return None
        kind = Reparameterization if reparameterization is None else reparameterization
        fn = kind(own, dim, holder) if hook_child else kind(name, dim, module)
        fn.reparameterization_names, parameters = fn.reparameterize(own, weight, dim)
        del holder._parameters[own]
        for new, parameter in zip(fn.reparameterization_names, parameters, strict=True):
            holder.register_parameter(new, parameter)
        # A part of autograd's graph could not be deep-copied with the module.
        setattr(holder, own, fn.compute_weight(holder, own).detach())
        (holder if hook_child else module).register_forward_pre_hook(fn)
        return fn

    def get_params(self, module: Module) -> list[Any]:
        """Return the parameters in the weight's place. ``module`` is the one that holds them."""
        return [getattr(module, name) for name in self.reparameterization_names]

    def remove(self, module: Module) -> None:
        """Make the weight a parameter again, with its present value.

        ``module`` is the one with the hook. The hook stays: whoever calls this takes it off.
        """
        holder, own = self.get_module_and_name(module, self.name)
        weight = self.compute_weight(holder, own).detach()
        requires_grad = any(parameter.requires_grad for parameter in self.get_params(holder))
        delattr(holder, own)
        for name in self.reparameterization_names:
            del holder._parameters[name]
        holder.register_parameter(own, Parameter(weight, requires_grad))

    def __call__(self, module: Module, inputs: Any) -> None:
        """Compute the weight: the hook before ``forward``."""
        holder, own = self.get_module_and_name(module, self.name)
        setattr(holder, own, self.compute_weight(holder, own))


class WeightNorm(Reparameterization):
    """Weight norm (Salimans, Kingma 2016, arXiv:1602.07868): ``weight = g * v / |v|``.

    The norm is taken over all dimensions but ``dim``. The parameters are ``<name>_v``, shaped as the weight, and
    ``<name>_g``, where every dimension but ``dim`` has the size 1. With ``dim=None`` the norm is taken over all
    dimensions, and ``<name>_g`` has none.
    """

    def compute_weight(self, module: Module, name: str) -> Tensor:
        """Return the weight in the dtype of ``v``, computed in fp32 or fp64."""
        g, v = getattr(module, f"{name}_g"), getattr(module, f"{name}_v")
        dtype = torch.float64 if v.dtype is torch.float64 else torch.float32
        # To torch the dimension -1 means that the norm is taken over all of them.
        return normed_weight(v.to(dtype), g.to(dtype), -1 if self.dim is None else self.dim).to(v.dtype)

    def reparameterize(self, name: str, weight: Tensor, dim: int | None) -> tuple[list[str], list[Parameter]]:
        """Return the names and values of ``g``, the norms of a weight, and ``v``, a copy of the weight."""
        norm = torch.norm_except_dim(weight.detach(), 2, -1 if dim is None else dim)
        parameters = [Parameter(value, weight.requires_grad) for value in (norm, weight.detach().clone())]
        return [f"{name}_g", f"{name}_v"], parameters


def apply_weight_norm(module: Module, name: str = "", dim: int | None = 0, hook_child: bool = True) -> Module:
    """Put `WeightNorm` on a parameter of a module, or on all; see `apply_reparameterization`."""
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: Module, name: str = "", remove_all: bool = False) -> Module:
    """Take `WeightNorm` away again; see `remove_reparameterization`."""
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: Module,
    reparameterization: type[Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> Module:
    """Let a parameter of a module, or all of them, be computed from others before each forward.

    Parameters of fewer than two dimensions, and those of embeddings, are left alone. So are, without a name, parameters
    that stand in a weight's place already.

    Args:
        module: The module, changed in place.
        reparameterization: A subclass of `Reparameterization`.
        name: The parameter's name, dotted for a child's. Empty is every parameter of the module and its children.
        dim: The dimension over which no norm is taken; None where it is taken over all.
        hook_child: Whether the hook is on the module that holds the parameter, or on ``module``.

    Returns:
        The module. Optimizers must be built after this, since its parameters are new.

    Raises:
        UsageError: No ``reparameterization`` was given, there is no such parameter, or it has one already.
    """
    if reparameterization is None:
        raise UsageError("apply_reparameterization() needs a kind; pass reparameterization=WeightNorm, for example")
    taken = {
        f"{path}.{'.'.join([*hook.name.split('.')[:-1], own])}".removeprefix(".")
        for path, holder in module.named_modules()
        for _, hook in _hooks(holder, Reparameterization)
        for own in hook.reparameterization_names
    }
    for one in [name] if name else [one for one, _ in module.named_parameters() if one not in taken]:
        Reparameterization.apply(module, one, dim, reparameterization, hook_child)
    return module


def remove_reparameterization(
    module: Module,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> Module:
    """Make computed weights parameters again, with their present values.

    Args:
        module: The module, changed in place.
        reparameterization: The class of those that are removed; the base class is all of them.
        name: The parameter's name, dotted for a child's. Empty is every one of the module and its children.
        remove_all: Whether to remove all, whatever ``name`` is.

    Returns:
        The module.

    Raises:
        UsageError: A name was given that has no such reparameterization.
    """
    every = remove_all or not name
    found = False
    for path, holder in module.named_modules():
        for key, hook in _hooks(holder, reparameterization):
            if every or f"{path}.{hook.name}".removeprefix(".") == name:
                found = True
                hook.remove(holder)
                del holder._forward_pre_hooks[key]
    if not (found or every):
        raise UsageError(f"{name!r} of {type(module).__name__} has no {reparameterization.__name__} to remove")
    return module


def _hooks(module: Module, kind: type[Reparameterization]) -> Sequence[tuple[int, Reparameterization]]:
    return [(key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)]
