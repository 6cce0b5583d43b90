"""Bytes that a training step moves for its optimizer, masters and gradients, counted from the operators that it calls.

An operator reads its arguments once and writes its results once: that is the formula. What a cache spares is not taken
off, so that the numbers are those of the path that was taken, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoamp.tensors import iter_tensors

# What a function writes over, it does not read.
_WRITES_ONLY = {"aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_"}
# Takes gradients that it writes to only if it is given a scale.
_FUSED = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")


class Traffic(TorchDispatchMode):
    """Counts bytes while it is entered.

    Args:
        weights: The parameters of the model.

    Attributes:
        everything: Whether all operators count. If not, only those that cast weights count, and those that
            `add_gradients` finds.
        moved: The bytes so far.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {weight.data_ptr() for weight in weights}
        self.everything = False
        self.moved = 0
        self._made: dict[int, int] = {}
        # Held, so that no address is taken twice. Not the tensors: autograd copies a gradient that somebody else has.
        self._held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = _traffic(func._schema, args, kwargs or {}, result)
        casts = func._schema.name in ("aten::_to_copy", "aten::copy_")
        given = list(iter_tensors(args))
        if self.everything or (casts and given and given[-1].data_ptr() in self._weights):
            self.moved += read + written
        else:
            self._held.extend(tensor.untyped_storage() for tensor in (*given, *iter_tensors(result)))
            # A cast of a gradient reads what another operator wrote before.
            before = _bytes(given[-1:]) if casts else -read
            for tensor in iter_tensors(result):
                if not _is_view(func._schema):
                    self._made[tensor.data_ptr()] = read + written + before
        return result

    def add_gradients(self, weights: Iterable[Tensor]) -> None:
        """Count what it took to write the gradients that are there now, and count all that comes from here on."""
        for weight in weights:
            if weight.grad is not None:
                self.moved += self._made.get(weight.grad.data_ptr(), _bytes([weight.grad]))
        self._made.clear()
        self._held.clear()
        self.everything = True


def bytes_of_a_step(
    weights: list[Tensor], backward: Callable[[Callable[[], None]], None], rest: Callable[[], None]
) -> int:
    """Return the bytes that a step moves for optimizer, masters and gradients.

    Args:
        weights: The parameters of the model.
        backward: Runs the model forward and backward, and calls what it is given as soon as the gradients are there.
        rest: Steps and clears the gradients.
    """
    with Traffic(weights) as traffic:
        backward(lambda: traffic.add_gradients(weights))
        rest()
    return traffic.moved


def _traffic(schema: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return the bytes that one call of an operator reads and writes."""
    if _is_view(schema) or "::empty" in schema.name or schema.name == "aten::new_empty_strided":
        return 0, 0
    read = written = 0
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        size = _bytes(iter_tensors(value))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and argument.name == "grads" and schema.name.startswith(_FUSED):
            writes = kwargs.get("grad_scale") is not None
        written += size if writes else 0
        read += 0 if writes and (schema.name in _WRITES_ONLY) else size
    fresh = [one for one, how in zip(_listed(result), schema.returns, strict=False) if how.alias_info is None]
    return read, written + _bytes(iter_tensors(fresh))


def _is_view(schema: Any) -> bool:
    returned = [how for how in schema.returns if how.alias_info is not None]
    return bool(returned) and not any(how.alias_info.is_write for how in returned)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))
