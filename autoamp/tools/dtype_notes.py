"""Notes on torch's errors about dtypes: which tensor has which dtype, where it got it, and what mends the error.

Torch says "mat1 and mat2 must have the same dtype, but got Float and Half", and not which module or list made it so.
The notes are made of the frames of the exception and of its callers: calls that succeed do nothing for them.

Where a tensor of the failed call was made is found alike: it is looked for among the variables of each frame, and the
source of the frame tells which statement has set the variable. Where several may have, the variable is named and no
line.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import HALF_MODEL, CastPolicy, ModulePrecision, Runtime, class_name, located
from autoamp.tensors import HALF_DTYPES, iter_tensors

_ABOUT_DTYPES = re.compile(
    r"(?i)same (data ?|d|scalar )?type|dtypes match|equal to src.dtype|should be the same|expected (scalar |d)type|"
    r"object of scalar type|not implemented for '\w*(Half|BFloat16)'|unsupported (d|scalar)type|low precision dtypes|"
    r"float or double|half, float|mixed dtype|query dtype|half precision|without overflow|unscale FP16|primitive desc|"
    r"of float type"
)
_INTEGERS = re.compile(r"(?i)\b(u?int\d*|long|bool(?! or float)|byte|char|short)(tensor)?\b")


def add_dtype_note(runtime: Runtime, error: BaseException) -> None:
    """Add a note to torch's error about half tensors, once. Other exceptions stay as they are.

    Args:
        runtime: Whose lists, models and overrides decide the dtypes.
        error: An exception that leaves a patched op or a module's call; called where it is caught.
    """
    text = str(error)
    if "autoamp: " in str(getattr(error, "__notes__", "")) or not _ABOUT_DTYPES.search(text) or _INTEGERS.search(text):
        return
    # A fault of this file must not hide the exception.
    with contextlib.suppress(Exception):
        failure = _Failure(error, runtime)
        if failure.half or re.search("(?i)half|float16|FP16", text):
            error.add_note(f"autoamp: {failure.note(text)}")


class _Failure:
    """What the frames of an exception tell.

    Attributes:
        modules: The modules that call each other, outermost first.
        tensors: The floating tensors on the line that failed, by what they are called there.
        outwards: The frames, from that of this line outwards.
        half: Those in half precision.
        rule: The rule on the patched op that failed.
        root: The half model among the modules.
        fp32: The innermost module that runs in fp32, or without casts, by the list or an override.
        outer: The model whose submodules have the paths of lists.
        paths: These paths.
        half_state: The names of its half parameters and buffers, by id.
        wide_state: The names of its other ones, by id.
        has_half_state: Whether one of these is on the line that failed.
    """

    def __init__(self, error: BaseException, runtime: Runtime) -> None:
        within: Any = inspect.getinnerframes(error.__traceback__, 0)  # type: ignore[arg-type]
        frames: Any = [*reversed(inspect.getouterframes(within[0].frame.f_back, 0)), *within]
        self.runtime, site = runtime, next(one for one in reversed(frames) if not _is_ours(one))
        files = "".join((type(error).__module__, site.filename, *(one.filename for one in within)))
        self.is_compiled = re.match("torch._dynamo|.*<eval_with_key>.*_dynamo", files) is not None
        calls = (one.frame for one in frames if one.function == "call" and _is_ours(one, "core.scope"))
        self.modules = [frame.f_locals["self"] for frame in calls]
        self.tensors = _tensors_at(site)
        # A context manager of ours may stand between two entries of one frame.
        first = next(place for place, one in enumerate(frames) if one.frame is site.frame)
        self.outwards = [site, *frames[:first][::-1]][:_MOST_FRAMES]
        self.half = {name: one for name, one in self.tensors.items() if one.dtype in HALF_DTYPES}
        op = frames[-1].frame.f_locals.get("original") if _is_ours(frames[-1], "core") else None
        in_half = runtime.casts.thread.mode.on == HALF_MODEL
        self.rule = runtime.patched.rule_on(op, in_half_models=in_half)
        self.root: Module | None = None
        self.fp32: Module | None = None
        for module in self.modules:
            inputs = getattr(runtime.models.boundaries.get(module), "inputs", None)
            precision = None if self.root is not None else runtime.precisions.get(module)
            if inputs in HALF_DTYPES:
                self.root, self.fp32 = self.root or module, None
            elif inputs is torch.float32 or precision is not None:
                self.fp32 = None if precision is ModulePrecision.FP16 else module
        self.outer = self.root or min(self.modules, key=lambda one: one not in runtime.setups, default=Module())
        self.paths = {module: name for name, module in self.outer.named_modules()}
        state = (*self.outer.named_parameters(), *self.outer.named_buffers())
        self.half_state = {id(one): name for name, one in state if one.dtype in HALF_DTYPES}
        self.wide_state = {id(one): name for name, one in state if one.dtype not in HALF_DTYPES}
        self.has_half_state = any(id(one) in self.half_state for one in self.half.values())

    def note(self, text: str) -> str:
        """Return what is to be told of an error with this message."""
        facts = [f"{name} is {one.dtype}{self._origin(one)}; " for name, one in self.tensors.items()]
        rule = f"{self.rule.target} is {self.rule.policy.value} by {located(self.rule.origin)}; " if self.rule else ""
        return "".join((*facts, rule, self._remedy(text)))

    def _origin(self, tensor: Tensor) -> str:
        """Return where a tensor got its dtype, in parentheses."""
        if tensor.dtype not in HALF_DTYPES:
            return self._wide_origin(tensor) if self.half else ""
        if id(tensor) in self.half_state:
            cast = (one for model in self.runtime.models.halves for one in (*model.parameters(), *model.buffers()))
            by = "cast by initialize()" if any(one is tensor for one in cast) else "made half by the program"
            return f" ({self.half_state[id(tensor)]}, {by})"
        function = tensor.grad_fn
        while function is not None and not function.name().startswith("ToCopy"):
            op = re.sub(r"Backward\d*$", "", function.name()).lower()
            rule = self.runtime.settings.rules_in_force.policy_of(op)
            if rule is not None and rule.policy is CastPolicy.FP16:
                return f" (computed by {op}, which is fp16 by {located(rule.origin)})"
            function = next((one for one, _ in function.next_functions if one is not None), None)
        return ""

    def _wide_origin(self, tensor: Tensor) -> str:
        """Return where a tensor that met half ones was made, in parentheses."""
        if id(tensor) in self.wide_state:
            return f" (the model's {self.wide_state[id(tensor)]})"
        with contextlib.suppress(Exception):
            place = made_at(tensor, self.outwards)
            return f" ({place})" if place else ""
        return ""

    def _remedy(self, text: str) -> str:
        path = next(filter(None, map(self.paths.get, reversed(self.modules))), "")
        casts = self.runtime.casts
        if self.is_compiled:
            return "call the model once without torch.compile, and this note names the module and what mends it"
        if "unscale FP16" in text:
            return "scale the loss by autoamp.scale_loss(loss, optimizer), which takes half gradients"
        has_double = any(one.dtype is torch.float64 for one in self.tensors.values())
        if has_double or re.search("(?i)(got:?|found|!=|16 and|half and) double|double !=", text):
            return f"torch.float64 is not cast; {self._conversion()}"
        if self.rule is not None and self.rule.policy is CastPolicy.FP16 and "not implemented for" in text:
            return f'add fp32 = ["{self.rule.target}"] to the list'
        if self.fp32 is not None:
            by = self.runtime.precisions.source_of(self.fp32, self.paths.get(self.fp32, ""))
            return f"the precision of {type(self.fp32).__name__} is set by {by}; {self._conversion()}"
        if self.root is None and casts.on_by_default and casts.thread.mode.forced_off:
            return f"casts are off around this call; {self._conversion()}"
        if self.root is None and (self.has_half_state or not path):
            return self._conversion()
        if not path:
            return 'use opt_level="O1", or move these lines to a module of its own, which [modules] keeps in fp32'
        if self.outer in self.runtime.setups:
            entry = self._class_of_several(path) or path
            return f'keep {entry} in fp32 by initialize(..., lists={{"modules": {{"{entry}": "fp32"}}}})'
        model = type(self.outer).__name__
        return (
            f"run it in fp32, where model is the {model} that was called, "
            f'by autoamp.current_handle().override(model.get_submodule("{path}"), "fp32")'
        )

    def _class_of_several(self, path: str) -> str:
        """Return the class of the module at a path if the model has more of it, each of which may fail; else ""."""
        kind = type(self.outer.get_submodule(path))
        several = sum(type(one) is kind for one in self.paths) > 1
        # A layer of torch is in other places too. What a function defines has no name for a list.
        has_name = "<locals>" not in kind.__qualname__ and not kind.__module__.startswith("torch.")
        return class_name(kind) if several and has_name else ""

    def _conversion(self) -> str:
        """Return what gives the tensors one dtype."""
        dtype, is_mixed = torch.float32, len(self.half) < len(self.tensors)
        if self.fp32 is None and is_mixed and (self.root is not None or self.has_half_state):
            dtype = next((one.dtype for one in self.half.values()), self.runtime.casts.dtype)
        names = [name for name, one in self.tensors.items() if one.dtype is not dtype]
        return f"call .to({dtype}) on {' and '.join(names) or 'the tensors of another dtype'}"


def _is_ours(info: Any, file: str = "") -> bool:
    return f"{info.frame.f_globals.get('__name__')}.".startswith(f"autoamp.{file}")


def _tensors_at(info: Any) -> dict[str, Tensor]:
    """Return the floating tensors that the failing code names, or that the frame has if that names none."""
    variables, lines = info.frame.f_locals, linecache.getlines(info.filename, info.frame.f_globals)
    text = "".join(lines[info.positions.lineno - 1 : info.positions.end_lineno])[info.positions.col_offset :]
    found: dict[str, Tensor] = {}
    for name in list(variables) if "raise " in text or not text else re.findall(r"[A-Za-z_][\w.]*", text):
        head, *rest = name.split(".")
        value = variables.get(head)
        while rest and not isinstance(value, Tensor):
            # No code of the program is called: a property may do anything.
            own = getattr(value, "__dict__", {})
            own = own | own.get("_parameters", {}) | own.get("_buffers", {}) | own.get("_modules", {})
            head, value = f"{head}.{rest[0]}", own.get(rest.pop(0))
        tensors = enumerate(list(iter_tensors(value, 1))[:2])
        found |= {head if one is value else f"{head}[{place}]": one for place, one in tensors}
    return {name: one for name, one in found.items() if one.is_floating_point()}


# -- where a tensor was made --

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# A tensor that is passed through more functions is not looked for.
_MOST_FRAMES = 32
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_PACKAGES = ("autoamp", "torch")


def made_at(tensor: Tensor, frames: Iterable[Any]) -> str:
    """Return where a tensor was made, as "made at FILE:LINE by ..." or what is known of it; "" for nothing.

    Args:
        tensor: It.
        frames: What `inspect.getinnerframes` tells of the frames, from that of the failed call outwards.
    """
    is_passed, of_closure = False, ""
    for info in frames:
        if str(info.frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES:
            is_passed = True
            continue
        names = [name for name, value in info.frame.f_locals.items() if value is tensor]
        free = [name for name in names if name in info.frame.f_code.co_freevars]
        found = {name: _setter(info, name) for name in names if name not in free}
        if not names and not _is_in_arguments(tensor, info):
            # A closure may come from a function that has returned.
            return of_closure or (f"passed at {info.filename}:{info.lineno}" if is_passed else "")
        code = info.frame.f_code
        of_closure = f"the variable {free[0]} of {getattr(code, 'co_qualname', code.co_name)}" if free else ""
        # What came as an argument was made before, whatever else the function calls it.
        is_passed = not found or any(isinstance(one, ast.arg) for one in found.values())
        if not free and not is_passed:
            statements = [one for one in found.values() if isinstance(one, ast.stmt)]
            if len(statements) == len(found):
                return _told(min(statements, key=lambda one: one.lineno), info)
            return f"the variable {names[0]} of {getattr(code, 'co_qualname', code.co_name)}"
    return of_closure


def _is_in_arguments(tensor: Tensor, info: Any) -> bool:
    """Whether a function has a tensor in its ``*args`` or ``**kwargs``."""
    _, args, kwargs, variables = inspect.getargvalues(info.frame)
    given = (*variables.get(args or "", ()), *variables.get(kwargs or "", {}).values())
    return any(one is tensor for one in given)


def _told(statement: ast.stmt, info: Any) -> str:
    value = getattr(statement, "value", None)
    is_made = any(isinstance(node, (ast.Call, ast.BinOp, ast.UnaryOp)) for node in ast.walk(value)) if value else False
    text = ast.unparse(statement).partition("\n")[0]
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{'made' if is_made else 'set'} at {info.filename}:{statement.lineno} by `{text}`"


def _setter(info: Any, name: str) -> ast.AST | None:
    """Return the statement that has set a variable, or the argument that it is; None where it is not certain."""
    scope = _scope_of(info)
    line: int = info.lineno
    while scope is not None:
        if any(isinstance(node, ast.Nonlocal) and name in node.names for node in ast.walk(scope)):
            return None
        arguments = scope.args if hasattr(scope, "args") else ast.arguments([], [], None, [], [], None, [])
        before = {one for one in ast.walk(arguments) if isinstance(one, ast.arg) and one.arg == name}
        found = _before_line(scope.body if isinstance(scope.body, list) else [], name, line, before)
        (setter,) = found if len(found) == 1 else (None,)
        value = getattr(setter, "value", None)
        if not isinstance(setter, ast.Assign) or not isinstance(value, ast.Name) or len(setter.targets) > 1:
            return setter
        # Another name of the same tensor.
        name, line = value.id, setter.lineno
    return None


def _scope_of(info: Any) -> Any:
    """Return the syntax tree of the function, or the file, that a frame runs; None where its source is not at hand."""
    tree, functions = _parsed("".join(linecache.getlines(info.filename, info.frame.f_globals)))
    if info.function == "<module>":
        return tree
    around = (node for node in functions if node.lineno <= info.lineno <= (node.end_lineno or 0))
    named = [node for node in around if getattr(node, "name", "<lambda>") == info.function]
    return named[-1] if named else None


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> tuple[ast.Module, list[Any]]:
    """Return the syntax tree of a file, and its functions. Programs may catch the same error many times."""
    tree = ast.parse(source)
    return tree, [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]


def _before_line(body: Sequence[ast.stmt], name: str, line: int, before: set[Any]) -> set[Any]:
    """Return what may have set a variable that the statement on a line reads, of what may have before the body."""
    for place, statement in enumerate(body):
        if statement.lineno <= line <= (statement.end_lineno or 0):
            if place + 1 < len(body) and body[place + 1].lineno <= line:
                # Several statements on one line: which of them failed is not known.
                return {*before, statement, body[place + 1]}
            inner = set(_setters(statement, name))
            if isinstance(statement, _LOOPS):
                before = before | inner
            elif any(_names(item.optional_vars, name) for item in getattr(statement, "items", ())):
                before = {statement}
            for part in _blocks(statement):
                if part and part[0].lineno <= line <= (part[-1].end_lineno or 0):
                    if isinstance(statement, ast.Try) and part is not statement.body:
                        before = before | inner
                    return _before_line(part, name, line, before)
            return before
        before = _after(statement, name, before)
    return before


def _after(statement: ast.stmt, name: str, before: set[Any]) -> set[Any]:
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        if any(_names(item.optional_vars, name) for item in statement.items):
            before = {statement}
        for one in statement.body:
            before = _after(one, name, before)
        return before
    inner = set(_setters(statement, name))
    return inner if isinstance(statement, ast.Assign) and inner else before | inner


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        yield getattr(statement, field, [])
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _setters(statement: ast.stmt, name: str) -> Iterator[ast.stmt]:
    """Yield the statements in a statement that set a variable of its function."""
    waiting: list[tuple[ast.AST, ast.stmt]] = [(statement, statement)]
    while waiting:
        one, nearest = waiting.pop()
        if _names(one, name):
            yield nearest
        children = (child for child in ast.iter_child_nodes(one) if not isinstance(child, _SCOPES))
        waiting.extend((child, child if isinstance(child, ast.stmt) else nearest) for child in children)


def _names(node: ast.AST | None, name: str) -> bool:
    """Whether a node gives a value to a variable."""
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name == name
