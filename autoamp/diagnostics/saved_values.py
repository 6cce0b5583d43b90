"""What the nodes of a graph tell of their ops' values: each saves some for its backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.diagnostics.inspector import Flaw, flaw_of, worst_of
from autoamp.tensors import HALF_DTYPES, iter_tensors

__all__ = ["Made", "first_not_finite", "gradient_is_finite_in_fp32", "made_by"]


# Nodes of ops that make no inf or nan of finite values, and of those that make none but in half precision.
_CARRIERS = frozenset(
    ("Abs", "Neg", "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze",
     "Select", "Slice", "Index", "Cat", "Stack", "Relu", "Tanh", "Sigmoid", "Clamp", "Max", "Min", "Amax", "Amin",
     "Maximum", "Minimum", "MaskedFill", "Where", "LogSoftmax", "Softmax", "NllLoss", "Mean", "Clone", "Alias")
)  # fmt: skip
_WIDE_CARRIERS = frozenset(("Sum", "ToCopy"))


_WRITERS = frozenset(("MaskedFill", "Where", "Fill", "MaskedScatter", "CopySlices"))


def first_not_finite(nodes: Sequence[Any], wide: bool) -> int | None:
    """Return the place of the node whose op made inf or nan of finite values; None where saved values do not tell.

    What a node saves for its backward pass are inputs of its op, and results. An op that saves nothing of use, before
    the first inf or nan that is seen, may have made it as well: then none is named.

    Args:
        nodes: Of a loss that is not finite, each before what it follows from.
        wide: Whether the loss is fp32 or fp64. Where torch does not tell the dtype of a result, sums and casts are
            taken not to overflow then.
    """
    places = {node: place for place, node in enumerate(nodes)}
    before = [[places[one] for one, _ in node.next_functions if one in places] for node in nodes]
    # Whether a result is not finite; what comes from the outputs of modules was looked at by others.
    flawed: dict[int, bool] = {}
    for place, node in enumerate(nodes):
        for argument, is_flawed in _saved_flaws(node).items():
            if argument is None:
                flawed[place] = flawed.get(place, False) or is_flawed
            elif argument < len(node.next_functions) and node.next_functions[argument][0] in places:
                flawed[places[node.next_functions[argument][0]]] = is_flawed
    for place, node in enumerate(nodes):
        if place not in flawed and not _takes_unknown(node) and (result := _again(node)) is not None:
            flawed[place] = flaw_of(result) is not None
    flawed[0] = True
    suspects: list[int] = []
    for place in _forward_order(before):
        if place not in flawed:
            carries = _carries(nodes[place], wide)
            if carries and not any(flawed.get(one) or one in suspects for one in before[place]):
                flawed[place] = False
            elif not carries:
                suspects.append(place)
            continue
        if flawed[place]:
            carries = _carries(nodes[place], wide)
            suspects += [] if carries and suspects else [place]
            # -inf may be written on purpose, and end in a finite result further on.
            alone = len(suspects) == 1 and _stem(nodes[suspects[0]]) not in _WRITERS
            return suspects[0] if alone and not _takes_unknown(nodes[suspects[0]]) else None
        suspects = [one for one in suspects if one not in _reached(before, place)]
    return None


def _carries(node: Any, wide: bool) -> bool:
    stem, dtype = _stem(node), _dtype_of(node)
    return stem in _CARRIERS or (stem in _WIDE_CARRIERS and (wide if dtype is None else dtype not in HALF_DTYPES))


def _dtype_of(node: Any) -> torch.dtype | None:
    """Return the dtype of a node's result, as of what flows back into it; None if torch does not tell."""
    described: Sequence[Any] = getattr(node, "_input_metadata", ())
    return getattr(described[0], "dtype", None) if described else None


def _reached(before: Sequence[Sequence[int]], place: int) -> set[int]:
    """Return the places of all nodes that one follows from."""
    found: set[int] = set()
    waiting = list(before[place])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += before[one]
    return found


def _forward_order(before: Sequence[Sequence[int]]) -> list[int]:
    """Return the places of nodes in an order in which their ops may have run, the loss last."""
    done: dict[int, None] = {}
    waiting = [(0, False)] if before else []
    while waiting:
        place, expanded = waiting.pop()
        if expanded:
            done[place] = None
        elif place not in done:
            waiting.append((place, True))
            waiting += [(one, False) for one in before[place]]
    return list(done)


# What a node saves is named as in torch's derivatives.yaml: of its op's arguments these are the first and the second.
_ARGUMENTS = {"_saved_self": 0, "_saved_input": 0, "_saved_other": 1, "_saved_target": 1}


def _takes_unknown(node: Any) -> bool:
    """Tell whether an op may have got inf or nan from outside of the graph, as of a tensor without gradients."""
    weights = [_saved(node, name) for name in ("weight", "pos_weight")]
    if worst_of([one for one in weights if isinstance(one, Tensor)]) is not None:
        return True
    saved = _saved_flaws(node)
    return any(saved.get(place, True) for place, (before, _) in enumerate(node.next_functions) if before is None)


def _saved_flaws(node: Any) -> dict[int | None, bool]:
    """Return whether what a node saved is not finite: by the place of an argument, and under None its result."""
    found: dict[int | None, bool] = {}
    for name in dir(node):
        if name in _ARGUMENTS or name.startswith(("_saved_result", "_saved_output")):
            with contextlib.suppress(RuntimeError):
                value = getattr(node, name)
                if isinstance(value, Tensor) and value.is_floating_point():
                    place = _ARGUMENTS.get(name)
                    found[place] = found.get(place, False) or flaw_of(value) is not None
    return found


# -- what an op of finite arguments made that is not finite --

# Of finite half values these make finite results in fp32, whose largest value is that of fp16 to the eighth power.
_FINITE_IN_FP32 = frozenset(
    ("Add", "Sub", "Rsub", "Mul", "Sum", "Mean", "Cumsum", "Mm", "Bmm", "Mv", "Dot", "Addmm", "Baddbmm", "Addbmm",
     "Addmv", "ToCopy")
)  # fmt: skip
# Of these it is looked at, by what was saved of their arguments. What is divided is finite; the divisor tells.
_LOOKED_AT: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "Mul": (torch.mul, ("self", "other")), "Pow": (torch.pow, ("self", "exponent")),
    "Div": (torch.reciprocal, ("other",)), "Log": (torch.log, ("self",)), "Log2": (torch.log2, ("self",)),
    "Log10": (torch.log10, ("self",)), "Log1P": (torch.log1p, ("self",)), "Sinh": (torch.sinh, ("self",)),
    "Cosh": (torch.cosh, ("self",)),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """What an op made of finite arguments.

    Attributes:
        dtype: Of its result; None where torch does not tell.
        finite_in_fp32: Whether fp32 would have held it; None where saved values do not tell.
        magnitudes: The largest absolute values of the arguments that were saved.
        flaw: Of the result, where that could be made again.
    """

    dtype: torch.dtype | None = None
    finite_in_fp32: bool | None = None
    magnitudes: tuple[float, ...] = ()
    flaw: Flaw | None = None

    @property
    def is_half(self) -> bool:
        """Whether the result is in a half dtype."""
        return self.dtype in HALF_DTYPES


@torch.no_grad()
def made_by(node: Any, nodes: Sequence[Any] = ()) -> Made:
    """Return what saved values tell of the op of a node whose arguments are finite and whose result is not.

    Args:
        node: The node.
        nodes: Of the loss, this one among them.
    """
    dtype = _dtype_of(node)
    tensors = [
        value for name in _SAVED if isinstance(value := _saved(node, name), Tensor) and value.is_floating_point()
    ]
    sizes = tuple(float(one.abs().max()) for one in tensors if one.numel())
    if dtype is None:
        dtype = next((one.dtype for one in tensors if one.dtype in HALF_DTYPES), None)
    if dtype not in HALF_DTYPES:
        return Made(dtype, None if dtype is None or comes_from_half(node, nodes) else False, sizes)
    half, wide = _again(node), _again(node, Tensor.float)
    finite = _stem(node) in _FINITE_IN_FP32 or (None if wide is None else flaw_of(wide) is None)
    return Made(dtype, finite, sizes, None if half is None else flaw_of(half))


_SAVED = ("self", "other", "mat1", "mat2", "batch1", "batch2", "exponent", "input", "tensor1", "tensor2")


def comes_from_half(node: Any, nodes: Sequence[Any]) -> bool:
    """Tell whether a node follows from a half one among others: what is 0 there may be none in fp32."""
    own, known, waiting = set(nodes), set(), [node]
    while waiting:
        one = waiting.pop()
        if one in own and one not in known:
            known.add(one)
            if one is not node and _dtype_of(one) in HALF_DTYPES:
                return True
            waiting += [following for following, _ in one.next_functions]
    return False


# At 0 of what these saved their derivative is infinite in any precision.
_SINGULAR = {"Sqrt": "result", "Log": "self", "Log2": "self", "Log10": "self", "Div": "other"}


@torch.no_grad()
def gradient_is_finite_in_fp32(node: Any, nodes: Sequence[Any], got: Sequence[Any]) -> bool | None:
    """Tell whether a node that made inf or nan of finite gradients would not have in fp32; None if that is not known.

    Args:
        node: The node. What it saved is still there.
        nodes: Of the loss, this one among them.
        got: The gradients that came to it.
    """
    stem = _stem(node)
    if stem == "ToCopy":
        # It came in the dtype of the cast, and would have gone on in fp32.
        return True
    if not any(one is not None and one.dtype in HALF_DTYPES for one in got):
        return None if comes_from_half(node, nodes) else False
    with contextlib.suppress(Exception):
        # A derivative that half precision holds makes small gradients of small ones.
        gave = node(*(one if one is None else one * 2.0**-30 for one in got))
        if worst_of(list(iter_tensors(gave))) is None:
            return True
    singular = _saved(node, _SINGULAR[stem]) if stem in _SINGULAR else None
    return False if isinstance(singular, Tensor) and not singular.all() else None


@torch.no_grad()
def _again(node: Any, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor | None:
    """Return the result of a node's op, made again of converted tensors; None where it cannot be."""
    function, names = _LOOKED_AT.get(_stem(node), (None, ()))
    arguments = [_saved(node, name) for name in names]
    if function is None or any(argument is None for argument in arguments):
        return None
    with contextlib.suppress(RuntimeError, TypeError):
        return function(*(convert(one) if isinstance(one, Tensor) else one for one in arguments))
    return None


def _saved(node: Any, name: str) -> Any:
    with contextlib.suppress(RuntimeError, AttributeError):
        return getattr(node, f"_saved_{name}")
    return None


def _stem(node: Any) -> str:
    """Return the name of a node's op as torch's derivatives have it: ``Mul`` for ``MulBackward0``."""
    name: str = node.name()
    return name.partition("Backward")[0]
