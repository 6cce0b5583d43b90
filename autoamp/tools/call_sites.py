"""Where a call is made: the path of the module, and the file and line of the first frame outside torch and autoamp.

Of the operators of a recorded step also which function of torch calls them, and under which names. A rule on one name
does not act on the others: ``y * y`` calls ``Tensor.__mul__``, which is no caller of ``Tensor.mul``. So an entry of a
list that is to keep an op out of half precision has to name what was called.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.core import class_name, known_ops, listen, original_of
from autoamp.tensors import HALF_DTYPES
from autoamp.tools.tape import Place
from autoamp.torch_private import Unnoticed, current_graph_task

_AUTOAMP = __name__.partition(".")[0]

# Frames of these directories are on the way to torch's ops, and not where somebody calls one.
_LIBRARIES = tuple(os.path.join(path, "") for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
# Files of core that scale losses and step optimizers.
SCALING_FILES = (
    "attach auto_scale backward_pass block closures gradients guard loss_scale masters nonfinite optimizers ranks steps"
)
_CORE = Path(__file__).parents[1] / "core"
_SCALING = frozenset(os.path.join(_CORE, f"{name}.py") for name in SCALING_FILES.split())

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

_CASTERS = frozenset((Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as))

WRITERS = frozenset(
    ("masked_fill", "where", "full", "full_like", "new_full", "fill", "index_fill", "index_put", "index_put_impl",
     "scalar_tensor")
)  # fmt: skip
"""With these a program writes -inf on purpose, as into the masked scores of an attention."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a call is made.

    Attributes:
        module: The path of the module whose call it is made within, as the outermost module's ``named_modules()`` has
            it: ``""`` for the outermost itself, None outside of modules.
        module_class: The name of that module's class, None outside of modules.
        root: The name of the outermost module's class, None outside of modules.
        file: The file of the first frame outside torch and autoamp; None where there is none, as in a thread of
            autograd.
        line: The 1-based line in it.
    """

    module: str | None
    module_class: str | None
    root: str | None
    file: str | None
    line: int | None

    @property
    def location(self) -> str | None:
        """The file and line as ``"file:line"``, relative to the working directory where it is below that."""
        return None if self.file is None else shown_line(self.file, self.line)

    @property
    def where(self) -> str:
        """The module as people read it: its path, the class of the outermost in parentheses, or ``"-"``."""
        return self.module or (f"({self.root})" if self.module == "" else "-")


def shown_line(file: str, line: int | None) -> str:
    """Return ``"file:line"``, relative to the working directory where the file is below that."""
    # ValueError: the file is on another drive.
    with contextlib.suppress(ValueError):
        relative = os.path.relpath(file)
        file = file if relative.startswith(os.pardir) else relative
    return f"{file}:{line}"


@functools.cache
def _kind(file: str) -> str:
    """Whether a file is the program's, scales losses and steps for autoamp, or is on the way there."""
    if file in _SCALING:
        return "scaling"
    is_library = file.startswith((*_LIBRARIES, "<frozen")) or file in (contextlib.__file__, functools.__file__)
    return "library" if is_library else "program"


def user_frame(frame: Any) -> Any:
    """Return the first frame that is neither torch's nor autoamp's, from this one outwards; None where all are."""
    while frame is not None and _kind(frame.f_code.co_filename) != "program":
        frame = frame.f_back
    return frame


def in_scaling(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is not on the way scales losses or steps optimizers for autoamp."""
    while frame is not None and _kind(frame.f_code.co_filename) == "library":
        frame = frame.f_back
    return frame is not None and _kind(frame.f_code.co_filename) == "scaling"


class ModulePaths:
    """The paths of modules within the outermost module.

    A module that was seen within another keeps its path there when it is called by itself later, as
    `torch.utils.checkpoint` does in backward.
    """

    def __init__(self) -> None:
        # By outermost module, in the order in which they were seen first: the paths of the modules within it.
        self._paths: WeakKeyDictionary[Module, WeakKeyDictionary[Module, str]] = WeakKeyDictionary()

    def find(self, modules: tuple[Module, ...]) -> tuple[str, str, str] | tuple[None, None, None]:
        """Return the path, the class and the outermost module's class for modules that call each other.

        Args:
            modules: The modules that are being called, outermost first.
        """
        if not modules:
            return None, None, None
        root, module = modules[0], modules[-1]
        home = [root, *(home for home, paths in self._paths.items() if root in paths)][-1]
        paths = self._paths.setdefault(home, WeakKeyDictionary())
        if module not in paths:
            paths.update((inner, name) for name, inner in home.named_modules())
        path = paths.get(module)
        if path is None:
            # It is called, and registered in none of those around it.
            around = next((paths[outer] for outer in reversed(modules) if outer in paths), "")
            path = f"{around}.<{type(module).__name__}>".removeprefix(".")
        return path, type(module).__name__, type(home).__name__


class CallPlaces(Unnoticed, TorchFunctionMode):
    """Knows which of torch's functions a thread is in, and which modules it is in between `start` and `stop`.

    Args:
        no_list_acts: Whether lists and precisions of modules have no effect here, as in a ``disable_casts``.

    Attributes:
        kept_half: Called with a half tensor that a call of the program would cast to half, were it not.
    """

    def __init__(self, no_list_acts: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._no_list_acts = no_list_acts
        self.kept_half: Callable[[Tensor], object] = lambda tensor: None
        # The function, the frame that calls it, and the backward pass within which it is called.
        self._call: tuple[Any, FrameType | None, int] = (None, None, -1)
        self._modules: tuple[Module, ...] = ()
        self._paths = ModulePaths()
        self._known: dict[Any, tuple[Any, Place]] = {}
        self._listening = contextlib.ExitStack()

    def start(self) -> None:
        """Follow the calls of modules."""
        self._listening.close()
        self._listening = listen(module_called=self._enter, module_returned=self._leave)

    def stop(self) -> None:
        """Follow them no more."""
        self._listening.close()
        self._modules, self._known = (), {}
        self.kept_half = lambda tensor: None

    def _enter(self, module: Module, inputs: Any) -> None:
        self._modules = (*self._modules, module)

    def _leave(self, module: Module, inputs: Any, outputs: Any) -> None:
        if self._modules and self._modules[-1] is module:
            self._modules = self._modules[:-1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch looks the function up by its name, where a replacement may stand that the program did not call: `y * y`
        # is Tensor.mul here. A replacement that it called has done its part before.
        func, before = original_of(func), self._call
        self._call = func, sys._getframe(1), current_graph_task()
        try:
            result = func(*args, **(kwargs or {}))
            if func in _CASTERS and args and result is args[0] and _asks_for_half(func, args, kwargs or {}):
                self.kept_half(result)
            return result
        finally:
            self._call = before

    def here(self) -> Place:
        """Return the place of the operator that is called now."""
        func, frame, task = self._call
        if frame is None or task != current_graph_task():
            # The backward pass of a function of the program runs within `Tensor.backward`.
            func, frame = None, sys._getframe(1)
        user = user_frame(frame)
        modules = self._modules
        is_off = self._no_list_acts()
        key = id(func), id(frame.f_code), modules[-1:], user and (user.f_code, user.f_lasti), is_off
        found = self._known.get(key)
        if found is None:
            # With the objects whose ids are in the key.
            found = self._known[key] = (func, frame.f_code), self._place(func, frame, user, is_off)
        return found[1]

    def _place(self, func: Any, frame: FrameType, user: FrameType | None, is_off: bool) -> Place:
        spelled = str(getattr(func, "__name__", ""))
        if spelled == "copy_" and str(frame.f_globals.get("__name__", "")).partition(".")[0] == _AUTOAMP:
            # An fp32 result is written to what the in-place form of this function was called on.
            func = frame.f_locals.get("functional") or func
        name = None if func is None else bare_name(func)
        path, _, root = self._paths.find(self._modules)
        is_cast = name in CASTS and str(frame.f_globals.get("__name__", "")).partition(".")[0] == _AUTOAMP
        in_place = spelled.endswith("_") and not spelled.endswith("__")
        # Entries act by these.
        names = () if name is None or is_off else spelled_at(name, func, user)
        classes = () if is_off else tuple(class_name(type(module)) for module in self._modules)
        line = None if user is None else shown_line(user.f_code.co_filename, user.f_lineno)
        instruction = -1 if user is None else user.f_lasti
        return Place(name, path or root, line, names, is_cast, in_place, classes, instruction)


def _asks_for_half(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a cast, which returned its tensor as it is, asks for a half dtype."""
    asked = [getattr(one, "dtype", one) for one in (*args[1:], *kwargs.values())]
    return func in (Tensor.half, Tensor.bfloat16) or any(one in HALF_DTYPES for one in asked if one is not None)


# -- names --


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
        frame: The program's frame at the call; None if unknown.
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
