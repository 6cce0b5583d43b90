"""The names under which a program calls an op: a rule on one of them does not act on the others.

``y * y`` calls ``Tensor.__mul__``, which is no caller of ``Tensor.mul``. So an entry of a list that is to keep an op
out of half precision has to name what was called.
"""

from __future__ import annotations

import dis
from typing import Any

from autoamp.ops import known_ops

# By Python's name of an operator torch's name of the op. Torch has `__rdiv__` beside `__rtruediv__`.
_OPS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "pow": "pow", "matmul": "matmul",
    "mod": "remainder", "floordiv": "floor_divide",
}  # fmt: skip
OPERATORS = {op: (f"__{word}__", f"__r{word}__") for word, op in _OPS.items()} | {"rsub": ("__rsub__",)}
"""By torch's name of an op the methods by which Python's operators call it."""

_ALIASES = {"sub": ("subtract",), "mul": ("multiply",), "div": ("divide", "true_divide")}

CASTS = frozenset(("half", "bfloat16", "to", "float", "type", "type_as"))
"""The bare names of casts. A rule on these would take away what a program asks for."""


def bare_name(function: Any) -> str:
    """Return the name of a function as lists have it: ``mul`` for ``Tensor.__rmul__`` and ``Tensor.mul_``."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    if name.startswith("__") and name.endswith("__"):
        word = name[2:-2]
        # The reflected and the in-place form have an r or an i before it.
        return _OPS.get(word) or _OPS.get(word[1:]) or word
    return name[:-1] if name.endswith("_") else name


def spellings(op: str) -> tuple[str, ...]:
    """Return all names under which lists have an op, its bare name first; none for casts and unknown ops.

    Args:
        op: A bare name, such as ``mul``; that of an in-place form is that of the op.
    """
    return _listed((op, *_ALIASES.get(op, ()), *OPERATORS.get(op, ())))


def spelled_at(op: str, function: Any, frame: Any) -> tuple[str, ...]:
    """Return the names under which a call in a program may have called an op, as lists have them.

    Args:
        op: The bare name.
        function: What torch says was called, of which a method is the same for ``y * y`` and for ``y.mul(y)``.
        frame: The program's frame or its `Caller`, at the call; None if unknown.
    """
    operators = OPERATORS.get(op, ())
    owner = getattr(function, "__objclass__", None)
    is_method = owner is not None or str(getattr(function, "__qualname__", "")).startswith("Tensor")
    if not operators or not is_method:
        names: tuple[str, ...] = (op,)
    elif frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BINARY_OP":
        names = operators
    else:
        # A method by its name, or an operator by a function such as `operator.mul`.
        names = (op, *operators)
    return _listed(names)


def _listed(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in known_ops() and name not in CASTS)
