"""Looking on at every op of a replayed step: which made inf or nan of finite values, and what became of them.

Forward, each call of torch's functions is seen, with the module and the line of the program that made it. An inf or nan
is followed from the op that made it (its *origin*) through those that hand it on, until it ends in a finite result, as
that of a mask does in a softmax. Backward, each node of the graph is seen, and belongs to the call that made it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import math
import operator
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.casting import Casts
from autoamp.diagnostics.call_sites import program_line, shown_file, user_frame
from autoamp.diagnostics.op_names import CASTS, bare_name, spelled_at, spellings
from autoamp.patching import original_of
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors
from autoamp.torch_private import (
    MODULES_OF_NORMS,
    DispatchMode,
    current_graph_task,
    function_of_node,
    insert_function_mode,
    is_transformed,
    next_sequence_number,
    remove_function_mode,
    sequence_number,
)

__all__ = [
    "Backward",
    "Flaw",
    "Inspector",
    "Origin",
    "Site",
    "flaw_of",
    "named_inputs",
    "sum_of",
    "worst_of",
]

_OURS = __name__.partition(".")[0]
# What a program writes -inf with on purpose, as into the masked scores of an attention.
_WRITERS = frozenset(
    ("masked_fill", "fill", "full", "full_like", "new_full", "where", "tensor", "new_tensor", "scalar_tensor", "triu",
     "tril", "masked_scatter", "setitem")
)  # fmt: skip
# These make -inf of 0, as of a mask of zeros and ones. If a later op makes nan of it, it was not on purpose.
_LOGARITHMS = frozenset(("log", "log2", "log10"))
# These take -inf as a mask, and make nan of a row that is masked whole.
_TAKE_MASKS = frozenset(
    ("softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention", "multi_head_attention_forward")
)
# These give memory as it is, or write over all that their first argument held.
_UNSET = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_OVERWRITES = frozenset(
    ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_")
)
# Where torch has none, a context that sees no operators.
_DISPATCH_MODE: Any = DispatchMode or contextlib.nullcontext
# Functions of which each does the work of several ops.
_COMPOSITES = frozenset(("multi_head_attention_forward",))


@dataclass(frozen=True)
class Flaw:
    """What is not finite in a tensor."""

    inf: bool
    nan: bool

    @property
    def value(self) -> str:
        """Nan, where there are both."""
        return "nan" if self.nan else "inf"


@dataclass(eq=False)
class Site:
    """A call of an op.

    Attributes:
        op: Its bare name.
        module: The path of the module that made it.
        location: The line of the program, as people read it.
        dtype: Of its result.
        in_cast: Whether it is a cast that was made for the op.
        source: Where an inf or nan that went in or came out is from.
        names: Those under which lists have what was called.
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


@dataclass(eq=False)
class Origin:
    """Where an inf or nan came from.

    Attributes:
        site: The call that made it, of finite values; None where it was given.
        flaw: What it is.
        magnitudes: The largest absolute value of each floating tensor that the call got.
        tensor: What held it when it was first seen.
        intended: Whether the call is one by which programs write inf on purpose.
        finite_in_fp32: Whether the call gives finite values in fp32; None if that was not tried or is not known.
    """

    site: Site | None
    flaw: Flaw
    magnitudes: tuple[float, ...] = ()
    tensor: Tensor | None = None
    intended: bool = False
    finite_in_fp32: bool | None = None


def flaw_of(tensor: Tensor) -> Flaw | None:
    """Return what is not finite in a tensor; None where all is. One fp32 sum tells, as a rule."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_sparse:
        return None
    value = tensor.detach()
    # A finite sum has finite terms. One that is not may have overflowed itself.
    if math.isfinite(sum_of(value).item()):
        return None
    inf, nan = bool(torch.isinf(value).any()), bool(torch.isnan(value).any())
    return Flaw(inf, nan) if inf or nan else None


@functools.cache
def _plain_sum() -> Any:
    return original_of(Tensor.sum)


def sum_of(tensor: Tensor) -> Tensor:
    """Return the fp32 sum of a tensor, without casts."""
    result: Tensor = _plain_sum()(tensor, dtype=torch.float32)
    return result


def largest(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the largest absolute value of each tensor."""
    with torch.no_grad():
        return tuple(
            float(max(abs(float(t.detach().min())), abs(float(t.detach().max())))) for t in tensors if t.numel()
        )


def _writes_in_place(function: Any) -> bool:
    name = str(getattr(function, "__name__", ""))
    return name.endswith("_") and not name.endswith("__")


@dataclass(eq=False)
class _Seen:
    """A tensor that is not finite, with where that came from."""

    tensor: Tensor
    origin: Origin


class Inspector(TorchFunctionMode):
    """Looks on at all that a ``with`` statement computes.

    Args:
        root: The model; None where that is the first module to be called.
        wide: Whether all that would be computed in half precision is computed in fp32.
        casts: How threads cast, where what it looks at is not run again: then ops that make inf or nan are, alone, in
            fp32.

    Attributes:
        sites: The call that made each node of the graph.
        origins: All that was seen, in order.
        inputs: The tensors that outermost modules were called with, by the names of their arguments.
        entered: Called with each module that is called.
        narrowed: Casts of the program to half that were left out, since all is wide: the node of what they got, and
            their lines.
    """

    def __init__(self, root: Module | None = None, *, wide: bool = False, casts: Casts | None = None) -> None:
        super().__init__()
        self._wide = wide
        self._casts = casts
        self.sites: dict[Any, Site] = {}
        self.origins: list[Origin] = []
        self.root = root
        self._paths: dict[Module, str] | None = None
        self._stack: list[Module] = []
        self._flawed: dict[int, _Seen] = {}
        self._cast_sites: dict[int, tuple[Tensor, Site]] = {}
        self._hooks: list[Any] = []
        self.inputs: list[tuple[str, Tensor]] = []
        self.narrowed: list[tuple[Any, str | None]] = []
        self.entered: Callable[[Module], None] = lambda module: None
        # By id: running statistics that a norm writes, and does not go by.
        self._written: dict[int, Tensor] = {}
        # The number of the next node, and the module that is called, whenever one begins or ends.
        self._turns: list[tuple[int, Module | None]] = []

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

    def begin_between(self) -> None:
        """Look on outside of module calls, in this thread, until `end_between`."""
        self._turns = [(_next_number(), None)]
        insert_function_mode(self)

    def end_between(self) -> None:
        """End what `begin_between` began."""
        remove_function_mode(self)

    def begin_function(self) -> None:
        """Look on at the backward pass of a function of the program: torch's engine turns modes off."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def end_function(self) -> None:
        """End what `begin_function` began."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: Module, inputs: Any) -> None:
        if self.root is None:
            self.root = module
        # A checkpoint calls modules in the backward pass again.
        if not self._stack and current_graph_task() == -1:
            self.inputs += named_inputs(module, inputs, {})
        if isinstance(module, MODULES_OF_NORMS) and module.training:
            self._written.update((id(buffer), buffer) for buffer in module.buffers(recurse=False))
        self._stack.append(module)
        self._turns.append((_next_number(), module))
        self.entered(module)

    def _leave_module(self, module: Module, inputs: Any, outputs: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
            self._turns.append((_next_number(), self._stack[-1] if self._stack else None))

    def path_of(self, module: Module | None) -> str | None:
        """Return the path of a module within the model; the name of its class where it is none of the model's."""
        if module is None:
            return None
        if self._paths is None:
            self._paths = {} if self.root is None else {each: name for name, each in self.root.named_modules()}
        return self._paths.get(module) or type(module).__name__

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
        read = args[1:] if getattr(func, "__name__", None) in _OVERWRITES else args
        read = _floating((read, {key: value for key, value in kwargs.items() if key != "out"}))
        inputs = [tensor for tensor in read if id(tensor) not in self._written]
        flaws = [(tensor, flaw_of(tensor)) for tensor in inputs]
        since = _next_number()
        if self._wide:
            args, kwargs = _widened(str(getattr(func, "__name__", "")), args, kwargs)
            if name in CASTS and inputs and inputs[0] is args[0] and _narrows(func, args, kwargs):
                self.narrowed.append((args[0].grad_fn, program_line(caller)))
                return args[0]
        finite = [tensor for tensor, flaw in flaws if flaw is None]
        sizes = largest(finite) if finite and len(finite) < 16 else ()
        inner: _Innermost | None = None
        if name in _COMPOSITES:
            with _Innermost() as inner:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        outputs = _floating(result) or ([args[0]] if name == "setitem" and isinstance(args[0], Tensor) else [])
        if outputs and name not in _UNSET:
            seen = len(self.origins)
            self._take(func, caller, flaws, sizes, outputs, inner, since)
            if self._casts is not None and len(self.origins) > seen and self.origins[-1].site is not None:
                self.origins[-1].finite_in_fp32 = self._is_finite_in_fp32(self._casts, func, args, kwargs, outputs)
        return result

    def _is_finite_in_fp32(
        self, casts: Casts, func: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor]
    ) -> bool | None:
        """Run an op that made inf or nan of finite values again, in fp32; None if that does not tell."""
        if bare_name(func) in CASTS:
            return True
        before = [site for site in self.sites.values() if site.dtype in HALF_DTYPES]
        if "out" in kwargs or _writes_in_place(func) or str(getattr(func, "__name__", "")).startswith("__i"):
            return None
        devices = [outputs[0].device] if outputs[0].is_cuda else []
        try:
            with torch.no_grad(), casts.switched(False, forced_off=True), torch.random.fork_rng(devices):
                wide = func(*map_tensors(args, _to_fp32), **map_tensors(kwargs, _to_fp32))
        except Exception:
            return None
        if worst_of(_floating(wide)) is None:
            return True
        # What is 0 in half precision may be none in fp32.
        own = outputs[0].grad_fn
        return None if any(self.sites.get(own) is not site for site in before) else False

    def _take(
        self, func: Any, caller: types.FrameType, flaws: Sequence[tuple[Tensor, Flaw | None]],
        sizes: tuple[float, ...], outputs: Sequence[Tensor], inner: _Innermost | None, since: int,
    ) -> None:  # fmt: skip
        """Take note of a call: the nodes that it made, and what became of inf and nan."""
        name = bare_name(func)
        internal = name in CASTS and str(caller.f_globals.get("__name__", "")).partition(".")[0] == _OURS
        if name in ("data", "grad", "requires_grad_", "detach"):
            internal = False
        site = Site(name, self.path_of(self._stack[-1] if self._stack else None), program_line(caller))
        site.dtype = next((t.dtype for t in outputs), None)
        site.names, site.in_place = spelled_at(name, func, user_frame(caller)), _writes_in_place(func)
        if inner is not None and inner.name is not None:
            site.op, site.names = inner.name, spellings(inner.name)
        if internal:
            site.in_cast = True
            for output in outputs:
                self._cast_sites[id(output)] = (output, site)
        else:
            # A cast that a replacement made is part of the op that it was made for.
            for tensor, _ in flaws:
                known = self._cast_sites.get(id(tensor))
                if known is not None and known[0] is tensor and known[1].in_cast and known[1].op in CASTS:
                    known[1].op, known[1].names, known[1].in_place = name, site.names, site.in_place
        for output in outputs:
            self._own(output.grad_fn, site, since)
        for tensor, before in flaws:
            if before is not None and (site.source is None or site.source.intended):
                site.source = self.origin_of(tensor, before)
        for output in outputs:
            flaw = flaw_of(output)
            if flaw is None:
                self._flawed.pop(id(output), None)
                continue
            origin = self._origin(site, name, flaw, flaws, sizes, output)
            self._flawed[id(output)] = _Seen(output, origin)
            site.source = site.source or origin

    def _origin(
        self, site: Site, name: str, flaw: Flaw, flaws: Sequence[tuple[Tensor, Flaw | None]],
        sizes: tuple[float, ...], output: Tensor,
    ) -> Origin:  # fmt: skip
        given: list[Origin] = []
        nan_came = False
        for tensor, before in flaws:
            if before is not None:
                nan_came = nan_came or before.nan
                given.append(self.origin_of(tensor, before))
        real = [origin for origin in given if not origin.intended]
        if real:
            return real[0]
        if given and not (flaw.nan and not nan_came):
            return given[0]
        # Nan of an inf that seemed to be there on purpose. That one is to blame unless a program wrote it, or a row is
        # masked whole.
        seemed = [
            one
            for one in given
            if (
                name not in _TAKE_MASKS and self._is_input(one.tensor)
                if one.site is None
                else one.site.op in _LOGARITHMS
            )
        ]
        if seemed:
            origin = replace(seemed[0], intended=False)
        else:
            may_be_meant = name in _WRITERS or name in _LOGARITHMS
            origin = Origin(site, flaw, sizes, output.detach(), intended=may_be_meant and not flaw.nan)
        self.origins.append(origin)
        return origin

    def _is_input(self, tensor: Tensor | None) -> bool:
        return any(tensor is one for _, one in self.inputs)

    def origin_of(self, tensor: Tensor, flaw: Flaw | None = None) -> Origin:
        """Return where the inf or nan of a tensor came from: one that no op made was given."""
        seen = self._flawed.get(id(tensor))
        if seen is not None and seen.tensor is tensor:
            return seen.origin
        flaw = flaw or flaw_of(tensor) or Flaw(False, False)
        # A mask that the program made beforehand holds -inf alone, on purpose.
        origin = Origin(None, flaw, (), tensor, intended=not flaw.nan and not _has_plus_inf(tensor))
        self._flawed[id(tensor)] = _Seen(tensor, origin)
        self.origins.append(origin)
        return origin

    def origin_in_memory(self, tensor: Tensor) -> Origin | None:
        """Return where the inf or nan of a tensor came from that has the memory of one that was seen."""
        for seen in self._flawed.values():
            if seen.tensor.data_ptr() == tensor.data_ptr() and seen.tensor.shape == tensor.shape:
                return seen.origin
        return None

    def take_function(self, tensor: Tensor) -> None:
        """Take note of functions of the program that made a tensor: no mode sees them, and no op after them did."""
        self._own(tensor.grad_fn, Site("", None, None), _next_number())

    def _own(self, node: Any, site: Site, since: int) -> None:
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.sites or getattr(node, "variable", None) is not None:
                continue
            # A node that is older than the call is of something that no mode sees, such as a function of the program.
            number = sequence_number(node)
            # It is of a module call, which is not looked at.
            if self._casts is not None and number < self._turns[0][0]:
                continue
            self.sites[node] = self._unseen(node, number) if 0 <= number < since else site
            waiting.extend(following for following, _ in node.next_functions)

    def _unseen(self, node: Any, number: int) -> Site:
        """Return the site of a node whose call was not seen; for a function of the program its backward pass."""
        turn = bisect.bisect_right(self._turns, number, key=operator.itemgetter(0))
        module = self.path_of(self._turns[turn - 1][1]) if turn else None
        function = function_of_node(node)
        if function is None:
            return Site(str(node.name()), module, None)
        code = getattr(inspect.unwrap(function.backward), "__code__", None)
        return Site(
            function.__name__, module, None if code is None else f"{shown_file(code.co_filename)}:{code.co_firstlineno}"
        )


def _next_number() -> int:
    """Return the number that the next node of the graph gets; 0 where torch does not tell."""
    return 0 if next_sequence_number is None else int(next_sequence_number())


def _widened(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments with fp32 in the place of half tensors, but for one that is to be written to."""
    if name.startswith("__") or not args or not isinstance(args[0], Tensor) or not name.endswith("_"):
        return map_tensors((args, kwargs), _to_fp32)  # type: ignore[no-any-return]
    rest, named = map_tensors((args[1:], kwargs), _to_fp32)
    return (args[0], *rest), named


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _narrows(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a cast goes to a half dtype."""
    if bare_name(func) in ("half", "bfloat16"):
        return True
    asked = [*args[1:], *kwargs.values()]
    return any(
        one in HALF_DTYPES or (isinstance(one, Tensor) and one.dtype in HALF_DTYPES)
        for one in asked
        if isinstance(one, (torch.dtype, Tensor))
    )


def _has_plus_inf(tensor: Tensor) -> bool:
    with torch.no_grad():
        return bool(torch.isposinf(tensor.detach()).any())


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
        finite = self.name is None and all(flaw_of(tensor) is None for tensor in _floating((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        if finite and any(flaw_of(tensor) is not None for tensor in _floating(result)):
            self.name = str(func.overloadpacket.__name__).strip("_")
        return result


def named_inputs(root: Module, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that a module is called with, by the names of the arguments of its ``forward``."""
    try:
        given = inspect.signature(root.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # What is no function, as that of a script, may not tell.
        given = {f"args[{place}]": value for place, value in enumerate(args)} | kwargs
    return [
        (name if isinstance(value, Tensor) else f"{name}[{number}]", tensor)
        for name, value in given.items()
        for number, tensor in enumerate(iter_tensors(value))
    ]


@dataclass(eq=False)
class _NodeResult:
    """What a node of the graph got and gave, as far as it is not finite."""

    got: Flaw | None
    gave: Flaw | None
    magnitudes: tuple[float, ...]
    finite_at_one: bool | None = None
    finite_in_fp32: bool | None = None

    @property
    def flaw(self) -> Flaw:
        """What it made."""
        return self.gave or Flaw(False, False)


@dataclass(eq=False)
class Backward:
    """Looks on at a backward pass over nodes whose calls are known.

    Attributes:
        inspector: What looked on at the forward pass.
        sites: The call that made each node.
        results: What each node got and gave, in the order in which they ran.
        scale: The loss scale of a pass that is not run again: then nodes that make inf or nan are, alone, at a scale
            of 1 and by gradients that are small enough for half precision. None where the pass is run again.
    """

    inspector: Inspector
    scale: float | None = None
    sites: dict[Any, Site] = field(default_factory=dict)
    results: dict[Any, _NodeResult] = field(default_factory=dict)
    _known: int = 0
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Backward:
        self.sites = dict(self.inspector.sites)
        functions = [node for node in self.sites if function_of_node(node) is not None]
        self._handles = [node.register_hook(self._hook(node)) for node in self.sites]
        self._handles += [node.register_prehook(self._begin) for node in functions]
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, got: Any) -> None:
        self._known = len(self.inspector.origins)
        self.inspector.begin_function()

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        is_function = function_of_node(node) is not None

        def ran(gave: Any, got: Any) -> None:
            if is_function:
                self.inspector.end_function()
            given, made = _floating(got), _floating(gave)
            result = self.results[node] = _NodeResult(worst_of(given), worst_of(made), largest(given))
            if self.scale is not None and result.got is None and result.gave is not None:
                result.finite_at_one = _gives_finite(node, got, 1.0 / self.scale)
                # A derivative that half precision holds makes small gradients of small ones.
                small = _gives_finite(node, got, 2.0**-30)
                result.finite_in_fp32 = small if small and _has_half((*given, *made)) else self._unless_half(node)
            if is_function and result.got is None and result.gave is not None:
                made_here = [one for one in self.inspector.origins[self._known :] if not one.intended]
                if made_here and made_here[0].site is not None:
                    self.sites[node] = replace(self.sites[node], location=made_here[0].site.location)
                    result.magnitudes = made_here[0].magnitudes

        return ran

    def _unless_half(self, node: Any) -> bool | None:
        """Return False for what half precision cannot have caused, None where a value of another op may be half."""
        others = (site for other, site in self.sites.items() if other is not node)
        return None if any(site.dtype in HALF_DTYPES for site in others) else False

    def producer(self, reached: Callable[[Any], bool]) -> tuple[Site, _NodeResult] | None:
        """Return the first node that made inf or nan of finite gradients, if these came to a parameter that has them.

        Args:
            reached: Tells of a tensor whether its gradient is not finite.
        """
        for node, result in self.results.items():
            if result.got is None and result.gave is not None and self._arrives(node, reached):
                return self.sites[node], result
        return None

    def _arrives(self, node: Any, reached: Callable[[Any], bool]) -> bool:
        waiting, known = [node], set()
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following is None or following in known:
                    continue
                known.add(following)
                variable = getattr(following, "variable", None)
                if variable is not None and reached(variable):
                    return True
                result = self.results.get(following)
                if result is not None and result.got is not None and result.gave is not None:
                    waiting.append(following)
        return False


def _has_half(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.dtype in HALF_DTYPES for tensor in tensors)


def _gives_finite(node: Any, got: Sequence[Any], factor: float) -> bool | None:
    """Tell whether a node, whose saved values are still there, gives finite gradients for smaller ones."""
    # The node of a function that is written in Python cannot be called itself.
    run = getattr(node, "apply", node)
    with torch.no_grad(), contextlib.suppress(Exception):
        return worst_of(list(iter_tensors(run(*(one if one is None else one * factor for one in got))))) is None
    return None


def worst_of(tensors: Sequence[Tensor | None]) -> Flaw | None:
    """Return what is not finite in any of several tensors; None where all is."""
    flaws = [flaw for tensor in tensors if tensor is not None and (flaw := flaw_of(tensor)) is not None]
    return Flaw(any(f.inf for f in flaws), any(f.nan for f in flaws)) if flaws else None
