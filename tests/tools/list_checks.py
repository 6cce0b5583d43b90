"""Lists beside the installed torch: the names that it has, and how its own autocast treats each op.

The lists of torch.autocast are in its C++ code, differ by device type, and change between releases. torch is asked: an
op is called on fake tensors, which exist for each device type on any machine. What the op does after autocast has cast
is not run.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from autoamp.core import CastPolicy, CastRule, CastTable, admits_version, known_ops, locate, shipped_sets, shipped_table
from autoamp.errors import ListFileError
from autoamp.tensors import iter_tensors
from autoamp.torch_private import DispatchMode, schema_of

# The qualified names of the operators that a dispatch key, such as "AutocastCPU", has kernels for.
autocast_registrations = torch._C._dispatch_get_registrations_for_dispatch_key

# Python 3.14 adds these to a class with annotations.
_OF_CLASSES = frozenset({"__annotate__", "__annotate_func__", "__annotations_cache__"})
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS", "xpu": "AutocastXPU"}
_WIDTHS = {
    CastPolicy.FP16: 0, CastPolicy.NONE: 1, CastPolicy.PROMOTE: 2, CastPolicy.FP32: 3, CastPolicy.BANNED: 3
}  # fmt: skip
# Operators below Python, and the functions that programs call instead. An operator that has none is left out.
_FUNCTIONS = {
    "cross_entropy_loss": "cross_entropy", "nll_loss2d": "nll_loss", "_thnn_fused_gru_cell": "gru_cell",
    "_thnn_fused_lstm_cell": "lstm_cell", "multilabel_margin_loss_forward": "multilabel_margin_loss",
}  # fmt: skip
_FUNCTIONS_BY_WORD = {"_pad": "pad", "upsample_": "interpolate"}
_MODULES = {"fft_": "torch.fft.", "linalg_": "torch.linalg."}
# A function of these has the name of the operator that it calls.
_NAMESPACES = ("torch", "torch.Tensor", "torch.functional", "torch.nn.functional", "torch.special")
_HALF, _SINGLE = torch.bfloat16, torch.float32
# What a schema's argument without a default gets: an operator casts before it looks at any of these.
_VALUES: dict[str, Any] = {
    "int": 1, "float": 2.0, "number": 2.0, "bool": False, "str": "sum", "List[Optional[Tensor]]": [None]
}  # fmt: skip


def _public_names() -> frozenset[str]:
    """Return the names of torch's public functions and methods, operators included, without those of `object`."""
    return frozenset(
        name
        for name in known_ops() - _OF_CLASSES
        if not name.startswith("_")
        or (
            name.startswith("__")
            and inspect.getattr_static(torch.Tensor, name) is not inspect.getattr_static(object, name, None)
        )
    )


def check_lists() -> tuple[str, ...]:
    """Compare the shipped list sets with the public names of the installed torch.

    Project lists are not compared: an unknown name in one of those is an error when it is loaded.

    Returns:
        A line for each difference, with the name, the difference and a remedy. There are three kinds: public names of
        torch that are not in the default set, rules on names that this torch lacks although their version limit admits
        it, and rules whose version limit excludes this torch although it has the name.
    """
    version = torch.__version__
    listed = {rule.target.rpartition(".")[2] for rule in shipped_table("default").rules}
    lines = []
    for name in sorted(_public_names()):
        out_of_place = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
        if listed.isdisjoint((name, out_of_place)):
            lines.append(f"{name}: new in torch {version}; give it a policy, or a reason under [none]")
    for rule in dict.fromkeys(rule for name in shipped_sets() for rule in shipped_table(name).rules):
        admitted = admits_version(rule.versions, version)
        if admitted and not _is_there(rule):
            lines.append(
                f"{rule.target}: not in torch {version} ({rule.origin}); limit it under [versions], or remove it"
            )
        elif not admitted and _is_there(rule):
            lines.append(f"{rule.target}: in torch {version}, though limited to {rule.versions} ({rule.origin})")
    return tuple(lines)


def _is_there(rule: CastRule) -> bool:
    if rule.bare:
        return rule.target in known_ops()
    try:
        return locate(rule) is not None
    except ListFileError:
        return False


@dataclass(frozen=True)
class AutocastDifference:
    """An op that the lists cast otherwise than `torch.autocast`.

    Attributes:
        op: Its name in the lists.
        in_torch: What `torch.autocast` does; `CastPolicy.NONE` for an op that it does not list.
        rule: The rule of the lists; None for an op on no list.
    """

    op: str
    in_torch: CastPolicy
    rule: CastRule | None

    @property
    def here(self) -> CastPolicy:
        """What the lists say."""
        return CastPolicy.NONE if self.rule is None else self.rule.policy

    @property
    def is_narrower(self) -> bool:
        """Whether the op may compute in half precision where it does not under `torch.autocast`."""
        return _WIDTHS[self.here] < _WIDTHS[self.in_torch]


def autocast_differences(table: CastTable, device_type: str) -> tuple[AutocastDifference, ...] | None:
    """Return the ops of torch that a table casts otherwise than `torch.autocast` of the installed torch, sorted.

    Args:
        table: The rules in force on this device type.
        device_type: ``"cpu"``, ``"cuda"``, ``"mps"`` or ``"xpu"``. For any other the result is None: torch has no lists
            that can be compared.
    """
    rules = {rule.target: rule for rule in table.rules if rule.bare or rule.target.startswith("torch.")}
    dotted = autocast_policies(device_type)
    bare = {op.rpartition(".")[2]: policy for op, policy in dotted.items()}
    in_torch = bare | {f"{space}.{op}": bare[op] for op in bare for space in _NAMESPACES} | dotted
    # A dotted rule of the same name goes before a bare one.
    ops = {op for op in rules if f"torch.{op}" not in rules}
    ops |= {op if op in rules else op.rpartition(".")[2] for op in dotted if "._" not in op}
    found = (AutocastDifference(op, in_torch.get(op, CastPolicy.NONE), rules.get(op)) for op in sorted(ops))
    return tuple(one for one in found if one.in_torch is not one.here) if in_torch else None


def autocast_policies(device_type: str) -> dict[str, CastPolicy]:
    """Return what `torch.autocast` does with each op that it lists for a device type, by the dotted name in Python.

    Where overloads of an op differ the widest counts. Empty for a device type without autocast.
    """
    found: dict[str, CastPolicy] = {}
    if device_type not in _KEYS:
        return found
    was = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, _HALF)
    try:
        for operator in autocast_registrations(_KEYS[device_type]):
            name, _, overload = operator.removeprefix("aten::").partition(".")
            function = _function(name)
            if function is not None:
                op = getattr(getattr(torch.ops.aten, name), overload or "default")
                policy = _policy(op, device_type)
                found[function] = max(found.get(function, policy), policy, key=_WIDTHS.__getitem__)
    finally:
        torch.set_autocast_enabled(device_type, was[0])
        torch.set_autocast_dtype(device_type, was[1])
        torch.clear_autocast_cache()
    # A kernel that casts in some other way, such as that of `_cudnn_rnn`, tells nothing.
    return {function: policy for function, policy in found.items() if policy is not CastPolicy.NONE}


def _function(operator: str) -> str | None:
    """Return the dotted name of the function that calls an operator, None where no public one has its name."""
    for prefix, module in _MODULES.items():
        if operator.startswith(prefix):
            return module + operator.removeprefix(prefix)
    by_word = next((name for word, name in _FUNCTIONS_BY_WORD.items() if word in operator), operator)
    name = _FUNCTIONS.get(operator, by_word)
    return f"torch.{name}" if name in known_ops() else None


def _policy(op: Any, device_type: str) -> CastPolicy:
    """Return what autocast, which is enabled, does with the arguments of an operator."""
    try:
        first, _ = _casts(op, device_type, _HALF, _SINGLE)
        if first is _HALF:
            return CastPolicy.FP16
        of_half, seen = _casts(op, device_type, _HALF)
    except RuntimeError:
        return CastPolicy.BANNED
    if first is _SINGLE and of_half is None:
        return CastPolicy.PROMOTE
    # Some ops get a dtype instead of casts.
    return CastPolicy.FP32 if first is _SINGLE or _SINGLE in seen else CastPolicy.NONE


class _StopError(Exception):
    """What the operator does next does not matter."""


def _casts(op: Any, device_type: str, *dtypes: torch.dtype) -> tuple[torch.dtype | None, set[torch.dtype]]:
    """Call an operator on tensors that have the given dtypes in turn.

    Returns:
        The dtype of the first cast, None without one; and the dtypes of what the operator calls then.

    Raises:
        RuntimeError: Autocast refuses the operator.
    """
    first: list[torch.dtype] = []
    seen: set[torch.dtype] = set()

    class Watch(DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func.namespace == "prim":
                return func(*args, **kwargs)
            if schema_of(func).name == "aten::_to_copy":
                first.append(kwargs["dtype"])
            names = [argument.name for argument in schema_of(func).arguments]
            to_single = "half_to_float" in names and args[names.index("half_to_float")]
            seen.update(one.dtype for one in iter_tensors((args, kwargs)))
            seen.update(one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype))
            seen.update([_SINGLE] if to_single else [])
            raise _StopError

    with FakeTensorMode():
        arguments = _arguments(op, device_type, itertools.cycle(dtypes))
        try:
            with Watch():
                op(**arguments)
        except _StopError:
            pass
        except RuntimeError as error:
            # Any other error is about these arguments, and comes after autocast's casts.
            if "unsafe to autocast" in str(error):
                raise
    return first[0] if first else None, seen


def _arguments(op: Any, device_type: str, dtypes: Iterator[torch.dtype]) -> dict[str, Any]:
    """Return arguments of the types that an operator takes, by name. Their values and sizes do not matter."""
    found: dict[str, Any] = {}
    for argument in schema_of(op).arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "List[Tensor]"):
            count = 1 if kind == "Tensor" else 2
            tensors = [torch.empty(2, 2, 2, 2, device=device_type, dtype=next(dtypes)) for _ in range(count)]
            found[argument.name] = tensors if count > 1 else tensors[0]
        elif (argument.name, kind) == ("dim", "Optional[int]"):
            found[argument.name] = 1  # without it `torch.cross` warns
        elif not argument.has_default_value():
            ints = [1] * (argument.N or 2) if kind.startswith("List[int") else None
            found[argument.name] = _VALUES.get(kind, ints)
    return found
