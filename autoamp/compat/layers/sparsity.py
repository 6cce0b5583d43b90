"""`apex.contrib.sparsity`: weights of which two in four are zero, for GPUs that multiply such matrices faster.

The method is that of Mishra et al. 2021, Accelerating Sparse Deep Neural Networks, arXiv:2104.08378. Of each four
weights of a trained model, along the input channels, the two of smallest magnitude are set to 0, and stay 0 while
training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from autoamp.errors import UsageError, kind_of
from autoamp.stepping import master_of

__all__ = ["ASP", "create_mask", "m4n2_1d"]

logger = logging.getLogger(__name__)

_LAYERS: dict[type[Module], list[str]] = {
    torch.nn.Linear: ["weight"], torch.nn.Conv1d: ["weight"], torch.nn.Conv2d: ["weight"], torch.nn.Conv3d: ["weight"]
}  # fmt: skip
# Outputs and inputs must be multiples of these: the GPU's instructions take no other sizes, so pruning gains nothing.
_MULTIPLES = (8, 16)


def m4n2_1d(matrix: Tensor, density: float = 0.5) -> Tensor:
    """Return a mask of 0 and 1, fp32, for the two values of largest magnitude in each four along a row.

    Args:
        matrix: Shape ``(rows, columns)``; the mask has the same.
        density: No effect.
    """
    rows, columns = matrix.shape
    groups = F.pad(matrix.detach().float().abs(), (0, -columns % 4)).view(-1, 4)
    mask = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=1).indices, 1.0)
    return mask.view(rows, -1)[:, :columns].contiguous()


def create_mask(tensor: Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> Tensor:
    """Return a mask of zeros and ones for a weight, of its shape and dtype.

    Args:
        tensor: Shape ``(columns,)``, ``(rows, columns)``, or ``(out, in, *kernel)`` of a convolution, which is pruned
            along ``in``.
        pattern: ``"m4n2_1d"``.
        density: The share of weights that stay: 0.5.

    Raises:
        UsageError: The pattern is another one, or the density is not 0.5.
    """
    if pattern != "m4n2_1d":
        raise UsageError(f"pattern={pattern!r} is not provided; use 'm4n2_1d', or pass a function as mask_calculator")
    if density != 0.5:
        raise UsageError(f"density={density} is not supported; two in four are 0.5")
    if tensor.dim() < 2:
        return m4n2_1d(tensor.view(1, -1)).view(tensor.shape).to(tensor.dtype)
    # One matrix for each place in the kernel: its rows are the outputs, its columns the inputs.
    matrix = tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
    matrix = matrix.permute(2, 0, 1)
    mask = torch.stack([m4n2_1d(each) for each in matrix])
    return mask.permute(1, 2, 0).reshape(tensor.shape).to(tensor.dtype)


class _Pruned:
    """One weight, its mask, and, if ``keeps``, the values that the mask set to 0."""

    def __init__(self, name: str, module: Module, leaf: str, weight: Tensor, keeps: bool) -> None:
        self.name, self.weight = name, weight
        self._module, self._mask, self._taken = module, f"__{leaf}_mma_mask", f"__{leaf}_mma_pruned_p"
        self._keeps = keeps
        # Buffers with Apex's names, so that checkpoints hold them.
        module.register_buffer(self._mask, torch.ones_like(weight, dtype=torch.bool))
        if keeps:
            module.register_buffer(self._taken, torch.zeros_like(weight, device="cpu"))

    @property
    def mask(self) -> Tensor:
        return self._module.get_buffer(self._mask)

    @property
    def is_sparse(self) -> bool:
        return not bool(self.mask.all())

    def compute(self, calculate: Callable[[Tensor], Tensor]) -> None:
        """Give the weight its values back where it is masked, then mask it by a new mask.

        Raises:
            UsageError: The pruned values were not kept, or the mask has another shape.
        """
        if self.is_sparse:
            self.restore()
        mask = calculate(self.weight).to(self.weight.device, torch.bool)
        if mask.shape != self.weight.shape:
            raise UsageError(
                f"the mask of {self.name} has shape {tuple(mask.shape)}, the weight {tuple(self.weight.shape)}; "
                "the function that was given as mask_calculator must return one of the weight's shape"
            )
        if self._keeps:
            self._module.get_buffer(self._taken).copy_(self.weight * ~mask)
        self.mask.copy_(mask)
        self.apply()

    def restore(self) -> None:
        """Add the pruned values to the weight again. UsageError: they were not kept."""
        if not self._keeps:
            raise UsageError(
                f"the pruned values of {self.name} were not kept; use "
                "ASP.init_model_for_pruning(..., allow_recompute_mask=True)"
            )
        taken = self._module.get_buffer(self._taken)
        for tensor in self._values():
            tensor.add_(taken.to(tensor.device))
        taken.zero_()
        self.mask.fill_(True)

    def apply(self) -> None:
        for tensor in self._values():
            tensor.mul_(self.mask)

    def apply_to_gradient(self) -> None:
        if self.weight.grad is not None:
            self.weight.grad.mul_(self.mask)

    def _values(self) -> Iterator[Tensor]:
        """Yield the weight, and its fp32 master where it has one."""
        yield self.weight
        master = master_of(self.weight)
        if master is not None:
            yield master


class _Pruning:
    """The pruned weights of a model, and the hooks on the optimizer that hold their zeros."""

    def __init__(self, calculate: Callable[[Tensor], Tensor], weights: list[_Pruned]) -> None:
        self.calculate, self.weights = calculate, weights
        self.hooks: list[Any] = []

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        for weight in self.weights:
            weight.apply_to_gradient()

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        for weight in self.weights:
            weight.apply()


class ASP:
    """Automatic sparsity, two in four, for one model and one optimizer at a time in a process.

    `init_model_for_pruning` prepares the model, `init_optimizer_for_pruning` its optimizer, and `compute_sparse_masks`
    prunes; `prune_trained_model` does all three. From then on pruned weights are 0 after every step of the optimizer.
    Input channels are not permuted, as Apex did to lose less accuracy.
    """

    _pruning: _Pruning | None = None

    @classmethod
    def init_model_for_pruning(
        cls, model: Module, mask_calculator: str | Callable[[Tensor], Tensor] = "m4n2_1d", verbosity: int = 3,
        whitelist: Sequence[type[Module]] = tuple(_LAYERS), allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (), allow_recompute_mask: bool = False,
        custom_layer_dict: dict[type[Module], list[str]] | None = None, allow_permutation: bool = True,
    ) -> None:  # fmt: skip
        """Give the weights of a model masks, which prune nothing until `compute_sparse_masks`.

        Args:
            model: On its device, and cast already.
            mask_calculator: A pattern of `create_mask`, or a function that returns a mask given a weight.
            verbosity: No effect: what happens is logged.
            whitelist: The classes of layers whose weights are pruned; subclasses do not count.
            allowed_layer_names: Only layers of these names, where given.
            disallowed_layer_names: No layers of these names.
            allow_recompute_mask: Whether pruned values are kept in the memory of the host. A later
                `compute_sparse_masks`, and `restore_pruned_weights`, need them.
            custom_layer_dict: The names of the weights of further classes of layers, which are added to ``whitelist``.
            allow_permutation: No effect: channels are not permuted.

        Raises:
            UsageError: A model was prepared already, the pattern is unknown, or a class is in ``whitelist`` whose
                weights ``custom_layer_dict`` does not name.
        """
        if cls._pruning is not None:
            raise UsageError("ASP has a model already; it prunes one at a time: call ASP.reset() before the next")
        known = {**_LAYERS, **(custom_layer_dict or {})}
        wanted = (*whitelist, *(custom_layer_dict or {}))
        unknown = [kind.__name__ for kind in wanted if kind not in known]
        if unknown:
            raise UsageError(f"the weights of {', '.join(unknown)} are not known; name them in custom_layer_dict")
        if isinstance(mask_calculator, str):
            create_mask(torch.zeros(1, 4), mask_calculator)
            mask_calculator = create_mask
        weights = []
        for name, module in list(model.named_modules()):
            if type(module) not in wanted or name in disallowed_layer_names:
                continue
            if allowed_layer_names is None or name in allowed_layer_names:
                weights += _pruned(name, module, known[type(module)], allow_recompute_mask)
        cls._pruning = _Pruning(mask_calculator, weights)

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Set masked gradients to 0 before every step of an optimizer, and masked weights after it.

        Raises:
            UsageError: It is no `torch.optim.Optimizer`, an optimizer was prepared already, or no model was.
        """
        pruning = cls._prepared()
        if pruning.hooks:
            raise UsageError("ASP has an optimizer already; call ASP.reset() before the next")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"Expected a torch.optim.Optimizer, got {kind_of(optimizer)}")
        pruning.hooks = [
            optimizer.register_step_pre_hook(pruning.before_step), optimizer.register_step_post_hook(pruning.after_step)
        ]  # fmt: skip

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Prune the weights, by masks computed from what they are now.

        Raises:
            UsageError: They are pruned already and the pruned values were not kept, a mask has another shape than its
                weight, or no model was prepared.
        """
        pruning = cls._prepared()
        for weight in pruning.weights:
            weight.compute(pruning.calculate)
            logger.info("%s: %.1f %% zeros", weight.name, 100.0 - 100.0 * float(weight.mask.float().mean()))

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Give the weights their pruned values back; the masks prune nothing then.

        Raises:
            UsageError: The pruned values were not kept, or no model was prepared.
        """
        for weight in cls._prepared().weights:
            if weight.is_sparse:
                weight.restore()

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Tell whether the weights are pruned. UsageError: some are and some are not, or no model was prepared."""
        found = {weight.is_sparse for weight in cls._prepared().weights}
        if len(found) > 1:
            raise UsageError("some weights are masked and some are not; call ASP.compute_sparse_masks()")
        return found == {True}

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Tell whether a model was prepared."""
        return cls._pruning is not None

    @classmethod
    def prune_trained_model(cls, model: Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a model and its optimizer, and prune the weights of linear layers and 2d convolutions.

        Raises:
            UsageError: As for the three methods that do it.
        """
        cls.init_model_for_pruning(model, "m4n2_1d", whitelist=[torch.nn.Linear, torch.nn.Conv2d])
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(
        cls, allow_permutation: bool = True, save_permutation_graph: bool = False, permutation_output_dir: str = "."
    ) -> None:
        """Do nothing: channels are not permuted."""

    @classmethod
    def reset(cls) -> None:
        """Forget the model, and take the hooks off the optimizer; weights, masks and pruned values stay as they are."""
        for hook in cls._pruning.hooks if cls._pruning is not None else ():
            hook.remove()
        cls._pruning = None

    @classmethod
    def _prepared(cls) -> _Pruning:
        if cls._pruning is None:
            raise UsageError("ASP has no model; call ASP.init_model_for_pruning(model) first")
        return cls._pruning


def _pruned(name: str, module: Module, leaves: list[str], keeps: bool) -> list[_Pruned]:
    """Return the weights of a module that can be pruned; a warning is logged for those of other sizes."""
    found = []
    for leaf, weight in module.named_parameters():
        if leaf not in leaves or not weight.requires_grad:
            continue
        if weight.dim() < 2 or any(size % factor for size, factor in zip(weight.shape, _MULTIPLES, strict=False)):
            logger.warning(
                "%s.%s of shape %s is not pruned: outputs must be a multiple of %d, inputs of %d",
                name, leaf, tuple(weight.shape), *_MULTIPLES,
            )  # fmt: skip
            continue
        # A dotted name belongs to a child's weight, and the name of a buffer may have no dots.
        found.append(_Pruned(f"{name}.{leaf}", module, leaf.rpartition(".")[2], weight, keeps))
    return found
