"""`amp_C`'s functions by compiled kernels, where they take the lists as a whole.

Each tells whether a kernel did it. If not, nothing was written, and torch's functions do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import kernels

__all__ = ["axpby", "norms", "scaled", "stepped"]

# A finite number times at most 1 is finite in its own dtype, and in those behind it.
_RANGES = (torch.float16, torch.bfloat16, torch.float32)


def stepped(noop_flag: Tensor, lists: Sequence[list[Tensor]], kernel: str, *args: Any, **options: Any) -> bool:
    """Step by a kernel, unless the flag is set; it is read on the device.

    Args:
        noop_flag: One element.
        lists: All that the kernel reads and writes.
        kernel: Its name.
        *args: What it takes.
        **options: What it takes by name.
    """
    package = _package(lists)
    if package is None:
        return False
    found_inf = noop_flag.to(lists[0][0].device, torch.float32, non_blocking=True).reshape(-1)
    return kernels.attempt(getattr(package, kernel), *args, **options, found_inf=found_inf)


def scaled(inputs: list[Tensor], outputs: list[Tensor], scale: float) -> Tensor | None:
    """Write ``input * scale`` to the outputs; return whether inputs, and so outputs, have inf or nan, as one element.

    None where no kernel did it, or where a product may leave the outputs' range, which it does not look for.
    """
    package = _package([inputs, outputs])
    if package is None or not abs(scale) <= 1.0:
        return None
    if _RANGES.index(outputs[0].dtype) < _RANGES.index(inputs[0].dtype):
        return None
    found = _zero(inputs)
    targets = inputs if _are_same(inputs, outputs) else outputs
    return found if kernels.attempt(package.scale_, inputs, targets, inv_scale=scale, found_inf=found) else None


def axpby(a: float, xs: list[Tensor], b: float, ys: list[Tensor], outputs: list[Tensor], check: int) -> Tensor | None:
    """Write ``a * x + b * y`` to the outputs; return whether there is inf or nan where it is looked for.

    ``check`` is 0 for ``xs``, 1 for ``ys``, -1 for both. None where no kernel did it.
    """
    package = _package([xs, ys, outputs])
    if package is None:
        return None
    if _are_same(xs, outputs):
        # The kernel writes to its second summand.
        a, xs, b, ys, check = b, ys, a, xs, check if check < 0 else 1 - check
    found = _zero(xs)
    ran = kernels.attempt(
        package.axpby_, a, xs, b, ys, None if _are_same(ys, outputs) else outputs, found_inf=found,
        check_xs=check != 1, check_ys=check != 0,
    )  # fmt: skip
    return found if ran else None


def norms(
    tensors: list[Tensor], factor: float | Tensor = 1.0, outputs: list[Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return the 2-norm of tensors times a factor, shape ``(1,)``, and that of each, shape ``(n,)``.

    The products are written to the outputs, where there are any. None where no kernel did it.
    """
    package = _package([tensors] if outputs is None else [tensors, outputs])
    if package is None:
        return None
    each, total = tensors[0].new_empty(len(tensors), dtype=torch.float32), _zero(tensors)
    scale: dict[str, Any] = {"inv_scale": factor}
    if isinstance(factor, Tensor):
        scale = {"grad_factor": factor.to(tensors[0].device, torch.float32)}
    targets = tensors if outputs is not None and _are_same(tensors, outputs) else outputs
    return (
        (total, each) if kernels.attempt(package.scale_, tensors, targets, **scale, norms=each, total=total) else None
    )


def _package(lists: Sequence[list[Tensor]]) -> Any:
    """Return the package of kernels where one call takes all of these tensors, else None."""
    found = [package for package, _ in kernels.by_kind(*lists)]
    return found[0] if len(found) == 1 else None


def _are_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return all(one is other for one, other in zip(tensors, others, strict=True))


def _zero(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_zeros(1, dtype=torch.float32)
