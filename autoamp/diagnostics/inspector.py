"""Looks at the output of each op: which op made inf or nan of finite values, and what became of it.

Forward, a function mode sees each call of torch's functions, with the module and the line of the program. An inf or nan
is followed from the op that made it (its *origin*) through the ops that pass it on, until an op gives a finite result,
as a softmax does of a mask. Backward, hooks see each node of the graph. A node belongs to the call that made it.

`Inspector` looks at a module call that runs again (see `autoamp.diagnostics.findings`). `OpWatch` looks at ops outside
of module calls, as those of a loss, while they run, since they cannot run again. That is slow, so it looks at a few
steps: the first one of a traced run, and those after an overflow that was not located.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.casting import Casts
from autoamp.diagnostics.call_sites import program_line, shown_line, user_frame
from autoamp.diagnostics.exponents import readable_tensors
from autoamp.diagnostics.op_names import CASTS, bare_name, fp32_entry, spelled_at
from autoamp.diagnostics.verdicts import (
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.patching import original_of
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors, map_tensors
from autoamp.torch_private import function_of_node, insert_function_mode, is_transformed, remove_function_mode

__all__ = ["Backward", "Inspector", "OpWatch", "Origin", "fp32_sum", "have_same_memory", "nonfinite_value"]

log = logging.getLogger(__name__)

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
    def place(self) -> tuple[Any, ...]:
        """The op, the module and the line."""
        return self.op, self.module, self.location


@dataclass(eq=False)
class InspectedCall:
    """A call that is about to run, as an inspector sees it.

    Attributes:
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        caller: The frame that calls it.
        name: Its bare name.
        inputs: The floating tensors that it reads.
        flawed: Those of them that hold inf or nan.
        sizes: The largest absolute value of each other one.
    """

    func: Any
    args: Any
    kwargs: Any
    caller: FrameType
    name: str
    inputs: list[Tensor]
    flawed: list[Tensor]
    sizes: tuple[float, ...]


@dataclass(eq=False)
class Origin:
    """Where inf or nan came from.

    Attributes:
        site: The call that made it of finite values; None if no call did.
        value: ``"inf"``, or ``"nan"`` if there is any.
        magnitudes: The largest absolute value of each floating tensor that the call got.
        tensor: The tensor in which it was first seen.
        intended: Whether programs write such an inf on purpose.
    """

    site: Site | None
    value: str
    magnitudes: tuple[float, ...] = ()
    tensor: Tensor | None = None
    intended: bool = False

    def in_half_precision(self, phase: str, half_dtype: torch.dtype) -> Overflow:
        """Return the finding for a call that is finite in fp32.

        Args:
            phase: ``"forward"`` or ``"backward"``.
            half_dtype: The dtype that overflows if the result of the call is in fp32.
        """
        assert self.site is not None
        dtype = self.site.dtype if self.site.dtype in HALF_DTYPES else half_dtype
        in_cast = self.site.in_cast or self.site.op in CASTS
        found = self.finding(HalfPrecisionOp(self.magnitudes, dtype_name(dtype), in_cast), phase)
        # The advice for an op that no list can name, such as a cast or a function of the program.
        advice = "compute it in fp32, or make its values smaller"
        if phase == "backward":
            advice = "its gradient is too large: make the loss smaller, or run the op that makes it in fp32"
        entry = fp32_entry(self.site.names, self.site.in_place)
        return replace(found, suggestion=entry or advice, fp32_names=self.site.names)

    def in_fp32(self, phase: str) -> Overflow:
        """Return the finding for a call that makes inf or nan in fp32 too."""
        advice = "compute it in a form that stays finite, or look at the data and the learning rate"
        return replace(self.finding(NotFiniteInFp32(magnitudes=self.magnitudes), phase), suggestion=advice)

    def in_unknown_precision(self, phase: str, why: object = None) -> Overflow:
        """Return the finding for a call if it is not known whether it would be finite in fp32."""
        unknown = "it is not known whether fp32 would be finite"
        return self.finding(NotLocated(unknown if why is None else f"{unknown}: {why}"), phase)

    def finding(self, verdict: OverflowVerdict, phase: str) -> Overflow:
        """Return the finding for the call, with a verdict."""
        assert self.site is not None
        op, module, location = self.site.place
        return Overflow(verdict, op=op, module=module, location=location, phase=phase, value=self.value)


def nonfinite_value(*tensors: Tensor | None) -> str | None:
    """Return ``"nan"`` if any tensor holds nan, else ``"inf"`` if any holds inf, else None."""
    values = [one.detach() for one in tensors if one is not None and one.is_floating_point() and not one.is_sparse]
    # A finite sum has finite terms. A sum of finite terms may overflow.
    values = [value for value in values if not math.isfinite(fp32_sum(value).item())]
    if any(bool(torch.isnan(value).any()) for value in values):
        return "nan"
    return "inf" if any(bool(torch.isinf(value).any()) for value in values) else None


def fp32_sum(tensor: Tensor) -> Tensor:
    """Return the fp32 sum of a tensor, without casts."""
    result: Tensor = _SUM(tensor, dtype=torch.float32)
    return result


def _largest(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the largest absolute value of each tensor."""
    return tuple(float(tensor.detach().abs().max()) for tensor in tensors if tensor.numel())


def have_same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same values, as a tensor has without its graph."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


class Inspector(TorchFunctionMode):
    """Looks at all that a ``with`` statement computes.

    Args:
        root: The model; None if only ops outside of modules are looked at.
        wide: Whether to compute in fp32 all that the program computes in half precision.

    Attributes:
        sites: The call that made each node of the graph.
        origins: All origins, in the order in which they were seen.
        inputs: The tensors that the model is called with, by the names of its arguments.
        narrowed: Casts to half that the program makes and ``wide`` left out: the node of the argument, and the line.
    """

    def __init__(self, root: Module | None = None, *, wide: bool = False) -> None:
        super().__init__()
        self.sites: dict[Any, Site] = {}
        self.origins: list[Origin] = []
        self.inputs: list[tuple[str, Tensor]] = []
        self.narrowed: list[tuple[Any, str | None]] = []
        self._wide = wide
        self._paths = {} if root is None else {module: name for name, module in root.named_modules()}
        self._stack: list[Module] = []
        self._hooks: list[Any] = []
        self._origin_of: dict[Tensor, Origin] = {}
        # Results of casts that autoamp made, until the op takes them.
        self._cast_sites: dict[Tensor, Site] = {}
        # Nodes of ops that the mode did not see.
        self._unseen: set[Any] = set()

    def looks_at(self, args: Any, kwargs: Any) -> bool:
        """Tell whether to look at a call with these arguments. A subclass overrides this."""
        return True

    def guarded(self) -> contextlib.AbstractContextManager[None, bool]:
        """Return the context in which to look on. A subclass overrides this, to let no error through."""
        return contextlib.suppress()  # noqa: B022

    def made_by_call(self, origin: Origin, call: InspectedCall) -> None:
        """A call made inf or nan of finite values. A subclass overrides this."""

    def made_by_node(self, origin: Origin, node: Any, got: Sequence[Any], gave: Sequence[Any]) -> None:
        """A node of the graph made inf or nan of finite gradients. A subclass overrides this."""

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

    def _enter_module(self, module: Module, inputs: Any) -> None:
        self.take_nodes(inputs)
        self._stack.append(module)

    def _leave_module(self, module: Module, inputs: Any, outputs: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self.take_nodes(outputs)
            self._stack.pop()

    def path_of_module(self) -> str | None:
        """Return the path of the module that runs, or its class if it is not part of the model; None outside."""
        if not self._stack:
            return None
        return self._paths.get(self._stack[-1]) or type(self._stack[-1]).__name__

    # -- calls --

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.looks_at(args, kwargs):
            return func(*args, **kwargs)
        # Torch looks the function up by its name, where a replacement may stand that the program did not call: `y * y`
        # is Tensor.mul here. A replacement that it called has done its part before.
        func, caller, call = original_of(func), sys._getframe(1), None
        with self.guarded():
            call = self._begin(func, args, kwargs, caller)
        if call is None:
            return func(*args, **kwargs)
        result = func(*call.args, **call.kwargs)
        with self.guarded():
            return self._end(call, result)
        return result

    def _begin(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> InspectedCall:
        """Look at a call that is about to run."""
        name = bare_name(func)
        inputs = _read_by(func, name, args, kwargs)
        flawed = [tensor for tensor in inputs if nonfinite_value(tensor)]
        self.take_nodes(inputs)
        if self._wide:
            args, kwargs = _widened(func, args, kwargs)
        sizes = _largest([tensor for tensor in inputs if all(tensor is not one for one in flawed)])
        return InspectedCall(func, args, kwargs, caller, name, inputs, flawed, sizes)

    def _end(self, call: InspectedCall, result: Any) -> Any:
        """Look at the result of a call, and return it, or what is in its place in fp32."""
        args, name, caller, inputs = call.args, call.name, call.caller, call.inputs
        outputs = _floating(result) or ([args[0]] if name == "setitem" and isinstance(args[0], Tensor) else [])
        narrows = name in CASTS and bool(outputs) and outputs[0].dtype in HALF_DTYPES
        if self._wide and narrows and inputs and inputs[0] is args[0]:
            self.narrowed.append((args[0].grad_fn, program_line(caller)))
            return args[0]
        # torch.empty and the like return memory as it is.
        if not outputs or "empty" in name:
            return result
        site = Site(
            name, self.path_of_module(), program_line(caller), outputs[0].dtype,
            names=spelled_at(name, call.func, user_frame(caller)), in_place=_writes_in_place(call.func),
        )  # fmt: skip
        if name in CASTS and str(caller.f_globals.get("__name__", "")).partition(".")[0] == _AUTOAMP:
            site.in_cast = True
            self._cast_sites.update(dict.fromkeys(outputs, site))
        else:
            # A cast that autoamp made is part of the op that it was made for.
            for tensor in inputs:
                if (cast := self._cast_sites.pop(tensor, None)) is not None:
                    cast.op, cast.names, cast.in_place = name, site.names, site.in_place
        self.take_nodes(outputs, site)
        self._follow(site, call, outputs)
        return result

    def _follow(self, site: Site, call: InspectedCall, outputs: Sequence[Tensor]) -> None:
        """Follow inf and nan through a call."""
        given = sorted((self.origin_of(tensor) for tensor in call.flawed), key=lambda origin: origin.intended)
        nan_came = nonfinite_value(*call.flawed) == "nan"
        site.source = given[0] if given else None
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
                intended = call.name in _WRITERS and value != "nan"
                origin = Origin(site, value, call.sizes, output.detach(), intended)
                self.origins.append(origin)
                self.made_by_call(origin, call)
            self._origin_of[output] = origin
            site.source = site.source or origin

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

    # -- nodes of the graph --

    def take_nodes(self, values: Any, site: Site | None = None) -> None:
        """Give the new nodes of tensors to a call.

        Without one, give them to the functions of the program that made them: no mode sees these calls.
        """
        waiting: list[Any] = [tensor.grad_fn for tensor in iter_tensors(values)]
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
        line = None if code is None else shown_line(code.co_filename, code.co_firstlineno)
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
    """Return a half tensor in fp32, another one as it is."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _floating(value: Any) -> list[Tensor]:
    """Return the floating tensors in nested arguments whose elements can be read."""
    return [one for one in readable_tensors(value) if not is_transformed(one)]


def _are_plain(value: Any) -> bool:
    """Tell whether all tensors are torch's own: not those of a compiler, of a transform or of a library."""
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in iter_tensors(value))


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

    Attributes:
        results: The gradients of each node, in the order in which the nodes ran.
    """

    def __init__(self, inspector: Inspector) -> None:
        self.results: dict[Any, NodeResult] = {}
        self._inspector = inspector
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
        # Torch's engine turns modes off for the backward pass of a function of the program.
        self._known = len(self._inspector.origins)
        TorchFunctionMode.__enter__(self._inspector)

    def _ran(self, node: Any, gave: Any, got: Any) -> None:
        is_function = function_of_node(node) is not None
        if is_function:
            TorchFunctionMode.__exit__(self._inspector, None, None, None)
        with self._inspector.guarded():
            self._look_at(node, gave, got, is_function)

    def _look_at(self, node: Any, gave: Any, got: Any, is_function: bool) -> None:
        given = _floating(got)
        result = NodeResult(nonfinite_value(*given), nonfinite_value(*_floating(gave)), _largest(given))
        self.results[node] = result
        if result.got is not None or result.gave is None:
            return
        site = self._inspector.sites[node]
        origin = result.origin = Origin(site, result.gave, result.magnitudes)
        inside = [one for one in self._inspector.origins[self._known :] if not one.intended] if is_function else []
        if inside and inside[0].site is not None:
            origin.site = replace(site, location=inside[0].site.location)
            origin.magnitudes = inside[0].magnitudes
        self._inspector.made_by_node(origin, node, got, gave)

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


class OpWatch(Inspector):
    """Looks at the ops of one step outside of module calls, in one thread.

    An op or a node of the graph that makes inf or nan runs once more by itself: in fp32, or by smaller gradients.

    Args:
        casts: How threads cast.
    """

    def __init__(self, casts: Casts) -> None:
        super().__init__()
        self._casts = casts
        self._losses: list[Origin] = []
        self._nodes: list[Origin] = []
        self._backward: Backward | None = None
        self._scale = 1.0
        self._is_over = False
        # Why each origin is not finite. An origin has no entry if it is not known whether fp32 would be finite.
        self._verdicts: dict[Origin, type[OverflowVerdict]] = {}

    def looks_at(self, args: Any, kwargs: Any) -> bool:
        """Tell whether to look at a call: not if a compiler, a transform or a library deals with its tensors."""
        if torch.compiler.is_compiling() or self._is_over or not _are_plain((args, kwargs)):
            return False
        # Where torch.export makes fake tensors of a model's own, those that are made now are fake.
        return _are_plain(torch.empty(0))

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:  # type: ignore[override]
        """Log an error in what looks on, and end the watch: the program goes on."""
        try:
            yield
        except Exception:
            self._is_over = True
            log.debug("ops outside of module calls are no longer watched in this step", exc_info=True)

    def resume(self, outputs: object) -> None:
        """Watch from now on: a module call has ended, with these outputs. Its own ops were not looked at."""
        self._unseen.update(tensor.grad_fn for tensor in iter_tensors(outputs))
        insert_function_mode(self)

    def pause(self) -> None:
        """Watch no more: a module call or a backward pass begins."""
        remove_function_mode(self)

    def begin_backward(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Look at a loss, and at its backward pass, which is about to run."""
        self._end_backward()
        with self.guarded():
            self.take_nodes(loss)
            if nonfinite_value(loss):
                self._losses.append(self.origin_of(loss))
            self._scale = float(scale)
            self._backward = Backward(self)
            self._backward.__enter__()

    def end(self) -> None:
        """Watch no more: the step has ended. A mode that looks on in another thread looks at nothing from now on."""
        self._is_over = True
        self._end_backward()

    def _end_backward(self) -> None:
        self.pause()
        if self._backward is not None:
            self._backward.__exit__()

    # -- an op or a node runs once more --

    def made_by_call(self, origin: Origin, call: InspectedCall) -> None:
        """Run an op that made inf or nan once more, in fp32."""
        assert origin.site is not None
        if origin.site.op in CASTS:
            self._verdicts[origin] = HalfPrecisionOp
            return
        if "out" in call.kwargs or origin.site.in_place:
            return
        devices = [one.device for one in iter_tensors((call.args, call.kwargs)) if one.is_cuda][:1]
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
            self._casts.switched(False, forced_off=True),
            torch.random.fork_rng(devices),
        ):
            # The op may write to its arguments, as batch_norm does to its statistics.
            args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: _to_fp32(tensor.clone()))
            outputs = _floating(call.func(*args, **kwargs))
            if outputs:
                self._note_fp32(origin, nonfinite_value(*outputs) is None)

    def made_by_node(self, origin: Origin, node: Any, got: Sequence[Any], gave: Sequence[Any]) -> None:
        """Run a node that made inf or nan once more, at a scale of 1 and by gradients that any half dtype holds."""
        self._nodes.append(origin)
        if _gives_finite(node, got, 1.0 / self._scale):
            self._verdicts[origin] = ScaleSearch
            return
        has_half = any(one.dtype in HALF_DTYPES for one in _floating((got, gave)))
        # A derivative that half precision holds makes small gradients of small ones.
        self._note_fp32(origin, has_half and _gives_finite(node, got, 2.0**-30))

    def _note_fp32(self, origin: Origin, finite: bool) -> None:
        # A value that is 0 in half precision may be other than 0 in fp32.
        if finite or not any(site.dtype in HALF_DTYPES for site in self.sites.values() if site is not origin.site):
            self._verdicts[origin] = HalfPrecisionOp if finite else NotFiniteInFp32

    # -- what is found --

    def finding_of(self, tensor: Tensor) -> Overflow | None:
        """Return the finding for a tensor that an op made of finite values; None if no watched op did."""
        origins = (origin for seen, origin in self._origin_of.items() if have_same_memory(seen, tensor))
        origin = next(origins, None)
        return None if origin is None else self._finding(origin, "forward")

    def finding(self) -> Overflow | None:
        """Return the finding for a loss or gradients that hold inf or nan; None if no watched op made it."""
        forward = [self._finding(origin, "forward") for origin in self._losses]
        backward = [self._finding(origin, "backward") for origin in self._nodes]
        return next(filter(None, forward + backward), None)

    def _finding(self, made: Origin, phase: str) -> Overflow | None:
        """Return the finding for an op that made inf or nan; None if no op did."""
        if made.site is None:
            return None
        verdict = self._verdicts.get(made)
        if verdict is ScaleSearch:
            return made.finding(ScaleSearch(), phase)
        if verdict is HalfPrecisionOp:
            return made.in_half_precision(phase, self._casts.dtype)
        return made.in_unknown_precision(phase) if verdict is None else made.in_fp32(phase)


def _gives_finite(node: Any, got: Sequence[Any], factor: float) -> bool:
    """Tell whether a node, whose saved values are still there, gives finite gradients for smaller ones."""
    # The node of a function that is written in Python cannot be called itself.
    run = getattr(node, "apply", node)
    with torch.no_grad(), contextlib.suppress(Exception):
        gave = run(*(one if one is None else one * factor for one in got))
        return nonfinite_value(*iter_tensors(gave)) is None
    return False
