"""Where the program calls each operator of a step: the function of torch, the module, the line."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any

from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.diagnostics.call_sites import Caller, ModulePaths, program_line, user_frame
from autoamp.diagnostics.op_names import CASTS, bare_name, spelled_at
from autoamp.modules import class_name
from autoamp.patching import original_of
from autoamp.program import listen
from autoamp.tape import Place
from autoamp.torch_private import Unnoticed, current_graph_task

_AUTOAMP = __name__.partition(".")[0]


class CallPlaces(Unnoticed, TorchFunctionMode):
    """Knows which of torch's functions a thread is in, and which modules it is in between `start` and `stop`.

    Args:
        caller: What is said to call the outermost modules and functions; by default the frames tell.
    """

    def __init__(self, caller: Caller | None = None) -> None:
        super().__init__()
        self._caller = caller
        # Frames from here outwards did not call them.
        self._outer = user_frame(sys._getframe(1)) if caller is not None else None
        # The function, the frame that calls it, and the backward pass within which it is called.
        self._call: tuple[Any, FrameType | None, int] = (None, None, -1)
        self._modules: tuple[Module, ...] = ()
        self._paths = ModulePaths()
        self._known: dict[Any, tuple[Any, Place]] = {}
        self._listening: ExitStack | None = None

    def start(self) -> None:
        """Follow the calls of modules."""
        if self._listening is None:
            self._listening = listen(module_called=self._enter, module_returned=self._leave)

    def stop(self) -> None:
        """Follow them no more."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._modules, self._known = (), {}

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
            return func(*args, **(kwargs or {}))
        finally:
            self._call = before

    def here(self) -> Place:
        """Return the place of the operator that is called now."""
        func, frame, task = self._call
        if frame is None or task != current_graph_task():
            # The backward pass of a function of the program runs within `Tensor.backward`.
            func, frame = None, sys._getframe(1)
        user = user_frame(frame)
        if user is self._outer:
            user = self._caller
        modules = self._modules
        key = id(func), id(frame.f_code), modules[-1:], user and (user.f_code, user.f_lasti)
        found = self._known.get(key)
        if found is None:
            # With the objects whose ids are in the key.
            found = self._known[key] = (func, frame.f_code), self._place(func, frame, user)
        return found[1]

    def _place(self, func: Any, frame: FrameType, user: FrameType | Caller | None) -> Place:
        name = None if func is None else bare_name(func)
        path, _, root = self._paths.find(self._modules)
        is_cast = name in CASTS and str(frame.f_globals.get("__name__", "")).partition(".")[0] == _AUTOAMP
        spelled = str(getattr(func, "__name__", ""))
        in_place = spelled.endswith("_") and not spelled.endswith("__")
        names = () if name is None else spelled_at(name, func, user)
        classes = tuple(class_name(type(module)) for module in self._modules)
        return Place(name, path or root, program_line(user), names, is_cast, in_place, classes)
