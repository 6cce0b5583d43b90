"""Looks at the output of each op: which op made inf or nan of finite values, and what became of it.

Forward, a function mode sees each call of torch's functions, with the module and the line of the program. An inf or nan
is followed from the op that made it (its *origin*) through the ops that pass it on, until an op gives a finite result,
as a softmax does of a mask. Backward, hooks see each node of the graph. A node belongs to the call that made it.

The same class looks at a step that runs again (see `autoamp.diagnostics.findings`) and at ops outside of module calls
while they run for the first time (see `autoamp.diagnostics.op_watch`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.casting import Casts
from autoamp.diagnostics.call_sites import program_line, shown_file, user_frame
from autoamp.diagnostics.op_names import CASTS, bare_name, fp32_entry, spelled_at, spellings
from autoamp.diagnostics.verdicts import HalfPrecisionOp, Overflow, OverflowVerdict
from autoamp.patching import original_of
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors, map_tensors
from autoamp.torch_private import (
    DispatchMode,
    function_of_node,
    insert_function_mode,
    is_transformed,
    remove_function_mode,
)

__all__ = ["Backward", "Inspector", "Origin", "Site", "fp32_sum", "nonfinite_value"]

_AUTOAMP = __name__.partition(".")[0]
# With these a program writes -inf on purpose, as into the masked scores of an attention.
_WRITERS = frozenset(
    ("masked_fill", "index_fill", "fill", "full", "full_like", "new_full", "where", "tensor", "new_tensor",
     "scalar_tensor", "setitem")
)  # fmt: skip
# These overwrite all of their first argument.
_OVERWRITES = frozenset(
    ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_")
)
# In training these write their running statistics, which the result does not depend on.
_NORMS = frozenset(("batch_norm", "instance_norm"))
# Torch's own, also if this file is imported while lists are in force.
_SUM: Any = original_of(Tensor.sum)
# Each of these functions calls several ops, which no function mode sees.
_COMPOSITES = frozenset(("multi_head_attention_forward",))
# Where torch has no dispatch mode, a context that sees no operators.
_DISPATCH_MODE: Any = DispatchMode or contextlib.nullcontext


@dataclass(eq=False)
class Site:
    """A call of an op.

    Attributes:
        op: The bare name of the op.
        module: The path of the module that called it.
        location: ``"file:line"`` of the program.
        dtype: The dtype of the first result.
        in_cast: Whether it is a cast that autoamp made for the op.
        source: The origin of inf or nan in its arguments or results.
        names: The names under which lists have the called function.
        in_place: Whether it writes to its first argument.
    """

    op: str
    module: str | None
    location: str | None
    dtype: torch.dtype | None = None
    in_cast: bool = False
    source: Origin | None = None
    names: tuple[str, ...] = ()
    in_place: bool = False

    @property
    def half_name(self) -> str:
        """The name of its half dtype, float16 if the result is none."""
        return dtype_name(self.dtype if self.dtype in HALF_DTYPES else torch.float16)

    @property
    def place(self) -> tuple[Any, ...]:
        """The op, the module and the line."""
        return self.op, self.module, self.location

    def finding(
        self, verdict: OverflowVerdict, phase: str, value: str | None, otherwise: str | None = None
    ) -> Overflow:
        """Return the finding for what the op made.

        Args:
            verdict: The verdict.
            phase: ``"forward"`` or ``"backward"``.
            value: What it made, ``"inf"`` or ``"nan"``.
            otherwise: The remedy if no entry of a list file avoids it.
        """
        names = self.names if isinstance(verdict, HalfPrecisionOp) else ()
        return Overflow(
            verdict, op=self.op, module=self.module, location=self.location, phase=phase,
            suggestion=fp32_entry(names, self.in_place) or otherwise, value=value, fp32_names=names,
        )  # fmt: skip


@dataclass(eq=False)
class Origin:
    """Where inf or nan came from.

    Attributes:
        site: The call that made it of finite values; None if no call did.
        value: ``"inf"``, or ``"nan"`` if there is any.
        magnitudes: The largest absolute value of each floating tensor that the call got.
        tensor: The tensor in which it was first seen.
        intended: Whether programs write such an inf on purpose.
        finite_at_one: For gradients, whether the call alone gives finite ones at a loss scale of 1; None if not tried.
        finite_in_fp32: Whether the call alone is finite in fp32; None if that is not known.
    """

    site: Site | None
    value: str
    magnitudes: tuple[float, ...] = ()
    tensor: Tensor | None = None
    intended: bool = False
    finite_at_one: bool | None = None
    finite_in_fp32: bool | None = None


def nonfinite_value(*tensors: Tensor | None) -> str | None:
    """Return ``"nan"`` if any tensor holds nan, else ``"inf"`` if any holds inf, else None."""
    found = None
    for tensor in tensors:
        if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_sparse:
            continue
        value = tensor.detach()
        # A finite sum has finite terms. A sum of finite terms may overflow.
        if math.isfinite(fp32_sum(value).item()):
            continue
        if bool(torch.isnan(value).any()):
            return "nan"
        if bool(torch.isinf(value).any()):
            found = "inf"
    return found


def fp32_sum(tensor: Tensor) -> Tensor:
    """Return the fp32 sum of a tensor, without casts."""
    result: Tensor = _SUM(tensor, dtype=torch.float32)
    return result


def _largest(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the largest absolute value of each tensor."""
    return tuple(float(tensor.detach().abs().max()) for tensor in tensors if tensor.numel())


class Inspector(TorchFunctionMode):
    """Looks at all that a ``with`` statement computes.

    Args:
        root: The model; None if only ops outside of modules are looked at.
        wide: Whether to compute in fp32 all that the program computes in half precision.
        casts: How threads cast. Give it if the ops do not run again: each op that makes inf or nan then runs once
            more in fp32, alone.

    Attributes:
        root: As given.
        sites: The call that made each node of the graph.
        origins: All origins, in the order in which they were seen.
        inputs: The tensors that the model is called with, by the names of its arguments.
        narrowed: Casts to half that the program makes and ``wide`` left out: the node of the argument, and the line.
    """

    def __init__(self, root: Module | None = None, *, wide: bool = False, casts: Casts | None = None) -> None:
        super().__init__()
        self.root = root
        self.sites: dict[Any, Site] = {}
        self.origins: list[Origin] = []
        self.inputs: list[tuple[str, Tensor]] = []
        self.narrowed: list[tuple[Any, str | None]] = []
        self._wide = wide
        self._casts = casts
        self._paths = {} if root is None else {module: name for name, module in root.named_modules()}
        self._stack: list[Module] = []
        self._hooks: list[Any] = []
        self._origin_of: dict[Tensor, Origin] = {}
        # Results of casts that autoamp made, until the op takes them.
        self._cast_sites: dict[Tensor, Site] = {}
        # Nodes of ops that the mode did not see.
        self._unseen: set[Any] = set()

    # -- modules --

    def __enter__(self) -> Any:
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def begin_between(self, outputs: Any) -> None:
        """Look outside of module calls, in this thread, until `end_between`.

        Args:
            outputs: The outputs of the module call that has just ended, whose own ops were not looked at.
        """
        self._unseen.update(tensor.grad_fn for tensor in iter_tensors(outputs))
        insert_function_mode(self)

    def end_between(self) -> None:
        """End what `begin_between` began."""
        remove_function_mode(self)

    def begin_function(self) -> None:
        """Look at the backward pass of a function of the program, for which torch's engine turns modes off."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def end_function(self) -> None:
        """End what `begin_function` began."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: Module, inputs: Any) -> None:
        self.take_functions(inputs)
        self._stack.append(module)

    def _leave_module(self, module: Module, inputs: Any, outputs: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self.take_functions(outputs)
            self._stack.pop()

    def path_of_module(self) -> str | None:
        """Return the path of the module that runs, or its class if it is not part of the model; None outside."""
        if not self._stack:
            return None
        return self._paths.get(self._stack[-1]) or type(self._stack[-1]).__name__

    # -- calls --

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._casts is not None and (torch.compiler.is_compiling() or not _are_plain((args, kwargs))):
            return func(*args, **kwargs)
        # Torch looks the function up by its name, where a replacement may stand that the program did not call: `y * y`
        # is Tensor.mul here. A replacement that it called has done its part before.
        func = original_of(func)
        caller = sys._getframe(1)
        name = bare_name(func)
        inputs = _read_by(func, name, args, kwargs)
        flawed = [tensor for tensor in inputs if nonfinite_value(tensor)]
        self.take_functions(inputs)
        if self._wide:
            args, kwargs = _widened(func, args, kwargs)
            if name in CASTS and inputs and inputs[0] is args[0] and _narrows(func, args, kwargs):
                self.narrowed.append((args[0].grad_fn, program_line(caller)))
                return args[0]
        sizes = _largest([tensor for tensor in inputs if all(tensor is not one for one in flawed)])
        inner = _Innermost() if name in _COMPOSITES else contextlib.nullcontext()
        with inner:
            result = func(*args, **kwargs)
        outputs = _floating(result) or ([args[0]] if name == "setitem" and isinstance(args[0], Tensor) else [])
        # torch.empty and the like return memory as it is.
        if not outputs or "empty" in name:
            return result
        site = Site(
            name, self.path_of_module(), program_line(caller), outputs[0].dtype,
            names=spelled_at(name, func, user_frame(caller)), in_place=_writes_in_place(func),
        )  # fmt: skip
        if (innermost := getattr(inner, "name", None)) is not None:
            site.op, site.names = innermost, spellings(innermost)
        if name in CASTS and str(caller.f_globals.get("__name__", "")).partition(".")[0] == _AUTOAMP:
            site.in_cast = True
            self._cast_sites.update(dict.fromkeys(outputs, site))
        else:
            # A cast that autoamp made is part of the op that it was made for.
            for tensor in inputs:
                if (cast := self._cast_sites.pop(tensor, None)) is not None:
                    cast.op, cast.names, cast.in_place = name, site.names, site.in_place
        self._own(outputs, site)
        made = self._follow(site, name, flawed, sizes, outputs)
        for origin in made if self._casts is not None else ():
            origin.finite_in_fp32 = self._is_finite_in_fp32(func, args, kwargs, site)
        return result

    def _follow(
        self, site: Site, name: str, flawed: Sequence[Tensor], sizes: tuple[float, ...], outputs: Sequence[Tensor]
    ) -> list[Origin]:
        """Follow inf and nan through a call. Returns the origins that are the call itself."""
        given = sorted((self.origin_of(tensor) for tensor in flawed), key=lambda origin: origin.intended)
        nan_came = nonfinite_value(*flawed) == "nan"
        site.source = given[0] if given else None
        made = []
        for output in outputs:
            value = nonfinite_value(output)
            if value is None:
                self._origin_of.pop(output, None)
                continue
            if given and (not given[0].intended or value != "nan" or nan_came):
                origin = given[0]
            elif data := [one for one in given if any(one.tensor is tensor for _, tensor in self.inputs)]:
                # The op made nan of an inf in the data.
                origin = replace(data[0], intended=False)
                self.origins.append(origin)
            else:
                intended = name in _WRITERS and value != "nan"
                origin = Origin(site, value, sizes, output.detach(), intended)
                self.origins.append(origin)
                made.append(origin)
            self._origin_of[output] = origin
            site.source = site.source or origin
        return made

    def _is_finite_in_fp32(self, func: Any, args: Any, kwargs: Any, site: Site) -> bool | None:
        """Run an op that made inf or nan of finite values again, in fp32; None if that does not tell."""
        if site.op in CASTS:
            return True
        if "out" in kwargs or site.in_place or str(getattr(func, "__name__", "")).startswith("__i"):
            return None
        assert self._casts is not None
        devices = [one.device for one in iter_tensors((args, kwargs)) if one.is_cuda][:1]
        try:
            with torch.no_grad(), self._casts.switched(False, forced_off=True), torch.random.fork_rng(devices):
                wide = func(*map_tensors(args, _to_fp32), **map_tensors(kwargs, _to_fp32))
        except Exception:
            return None
        if nonfinite_value(*_floating(wide)) is None:
            return True
        # A value that is 0 in half precision may be other than 0 in fp32.
        return None if self.has_half_ops(site) else False

    def has_half_ops(self, but: Site) -> bool:
        """Tell whether a call other than this one gave a half tensor that has a gradient."""
        return any(site.dtype in HALF_DTYPES for site in self.sites.values() if site is not but)

    def origin_of(self, tensor: Tensor) -> Origin:
        """Return where the inf or nan of a tensor came from. No op made it if none was seen to."""
        origin = self._origin_of.get(tensor)
        if origin is None:
            value = nonfinite_value(tensor) or "inf"
            # A mask that the program made beforehand holds -inf alone, on purpose.
            intended = value == "inf" and not bool(torch.isposinf(tensor.detach()).any())
            origin = self._origin_of[tensor] = Origin(None, value, (), tensor, intended)
            self.origins.append(origin)
        return origin

    def origin_in_memory(self, tensor: Tensor) -> Origin | None:
        """Return where the inf or nan of a tensor came from that has the memory of one that was seen."""
        for seen, origin in self._origin_of.items():
            if seen.data_ptr() == tensor.data_ptr() and seen.shape == tensor.shape:
                return origin
        return None

    # -- nodes of the graph --

    def take_functions(self, values: Any) -> None:
        """Take note of functions of the program that made tensors: no mode sees these calls."""
        self._own(list(iter_tensors(values)), None)

    def _own(self, tensors: Sequence[Tensor], site: Site | None) -> None:
        """Give the new nodes of tensors to a call; without one, to the functions of the program that made them."""
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
        while waiting:
            node = waiting.pop()
            is_leaf = node is None or getattr(node, "variable", None) is not None
            if is_leaf or node in self.sites or node in self._unseen:
                continue
            if site is not None:
                self.sites[node] = site
            elif (function := function_of_node(node)) is not None:
                self.sites[node] = self._site_of(function)
            else:
                self._unseen.add(node)
            waiting.extend(following for following, _ in node.next_functions)

    def _site_of(self, function: Any) -> Site:
        """Return the site of a function of the program: the line of its backward pass."""
        code = getattr(inspect.unwrap(function.backward), "__code__", None)
        line = None if code is None else f"{shown_file(code.co_filename)}:{code.co_firstlineno}"
        return Site(function.__name__, self.path_of_module(), line)


def _read_by(func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating tensors that a call reads."""
    if getattr(func, "__name__", None) in _OVERWRITES:
        args = args[1:]
    elif name in _NORMS and (kwargs.get("training") or kwargs.get("use_input_stats")):
        args, kwargs = args[:1], {key: kwargs.get(key) for key in ("weight", "bias")}
    return _floating((args, {key: value for key, value in kwargs.items() if key != "out"}))


def _writes_in_place(function: Any) -> bool:
    name = str(getattr(function, "__name__", ""))
    return name.endswith("_") and not name.endswith("__")


def _widened(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments with fp32 in the place of half tensors, but for one that is written to."""
    wide = map_tensors((args, kwargs), _to_fp32)
    return ((args[0], *wide[0][1:]), wide[1]) if args and _writes_in_place(func) else wide


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _narrows(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a cast goes to a half dtype."""
    wanted = [getattr(one, "dtype", one) for one in (*args[1:], *kwargs.values())]
    return bare_name(func) in ("half", "bfloat16") or any(one in HALF_DTYPES for one in wanted)


def _floating(value: Any) -> list[Tensor]:
    return [
        tensor
        for tensor in iter_tensors(value)
        if tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_transformed(tensor)
    ]


def _are_plain(value: Any) -> bool:
    """Tell whether all tensors are torch's own: not those of a compiler, of a transform or of a library."""
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in iter_tensors(value))


class _Innermost(_DISPATCH_MODE):  # type: ignore[misc]
    """Finds the op within a composite function that first makes inf or nan of finite values."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        finite = self.name is None and nonfinite_value(*_floating((args, kwargs))) is None
        result = func(*args, **(kwargs or {}))
        if finite and nonfinite_value(*_floating(result)):
            self.name = str(func.overloadpacket.__name__).strip("_")
        return result


@dataclass(eq=False)
class NodeResult:
    """The gradients that a node of the graph got and gave.

    Attributes:
        got: ``"inf"``, ``"nan"`` or None.
        gave: ``"inf"``, ``"nan"`` or None.
        magnitudes: The largest absolute value of each gradient that it got.
        origin: The node's call, if it made inf or nan of finite gradients.
    """

    got: str | None
    gave: str | None
    magnitudes: tuple[float, ...]
    origin: Origin | None = None


class Backward:
    """Looks at a backward pass over nodes whose calls are known, within a ``with`` statement.

    Args:
        inspector: Looked at the forward pass.
        scale: The loss scale of a pass that does not run again: a node that makes inf or nan then runs once more, at a
            scale of 1 and by gradients that are small enough for half precision. None if the pass runs again.

    Attributes:
        results: The gradients of each node, in the order in which the nodes ran.
    """

    def __init__(self, inspector: Inspector, scale: float | None = None) -> None:
        self.results: dict[Any, NodeResult] = {}
        self._inspector = inspector
        self._scale = scale
        self._known = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Backward:
        for node in self._inspector.sites:
            self._handles.append(node.register_hook(functools.partial(self._ran, node)))
            if function_of_node(node) is not None:
                self._handles.append(node.register_prehook(self._begin_function))
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begin_function(self, got: Any) -> None:
        self._known = len(self._inspector.origins)
        self._inspector.begin_function()

    def _ran(self, node: Any, gave: Any, got: Any) -> None:
        is_function = function_of_node(node) is not None
        if is_function:
            self._inspector.end_function()
        given, made = _floating(got), _floating(gave)
        result = self.results[node] = NodeResult(nonfinite_value(*given), nonfinite_value(*made), _largest(given))
        if result.got is not None or result.gave is None:
            return
        site = self._inspector.sites[node]
        origin = result.origin = Origin(site, result.gave, result.magnitudes)
        if self._scale is not None:
            origin.finite_at_one = _gives_finite(node, got, 1.0 / self._scale)
            # A derivative that half precision holds makes small gradients of small ones.
            if _gives_finite(node, got, 2.0**-30) and any(one.dtype in HALF_DTYPES for one in (*given, *made)):
                origin.finite_in_fp32 = True
            elif not self._inspector.has_half_ops(site):
                origin.finite_in_fp32 = False
        inside = [one for one in self._inspector.origins[self._known :] if not one.intended] if is_function else []
        if inside and inside[0].site is not None:
            origin.site = replace(site, location=inside[0].site.location)
            origin.magnitudes = inside[0].magnitudes

    def origin(self, leaves: Sequence[Tensor]) -> Origin | None:
        """Return the first node that made inf or nan of finite gradients which came to one of these leaves."""
        made = ((node, result.origin) for node, result in self.results.items() if result.origin is not None)
        return next((origin for node, origin in made if self._reaches(node, set(leaves))), None)

    def _reaches(self, node: Any, leaves: set[Tensor]) -> bool:
        waiting, known = [node], {node}
        while waiting:
            following = {one for one, _ in waiting.pop().next_functions if one is not None} - known
            known |= following
            for one in following:
                if getattr(one, "variable", None) in leaves:
                    return True
                result = self.results.get(one)
                if result is None or (result.got is not None and result.gave is not None):
                    waiting.append(one)
        return False


def _gives_finite(node: Any, got: Sequence[Any], factor: float) -> bool | None:
    """Tell whether a node, whose saved values are still there, gives finite gradients for smaller ones."""
    # The node of a function that is written in Python cannot be called itself.
    run = getattr(node, "apply", node)
    with torch.no_grad(), contextlib.suppress(Exception):
        gave = run(*(one if one is None else one * factor for one in got))
        return nonfinite_value(*iter_tensors(gave)) is None
    return None
