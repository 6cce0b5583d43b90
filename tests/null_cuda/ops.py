"""Single ops under autoamp and under torch.autocast: what raises, dtypes of results, what is saved for backward.

Calls are OpInfo samples, those of torch's own autocast tests, and some written here for names that neither knows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

import autoamp
from autoamp.core import CastPolicy, shipped_table
from tests.null_cuda.training import HALVES
from tests.saved import SavedTensors
from tests.sweep.cases import FLOATS, MODES, OPS, Call

# Samples of one op; arguments of several dtypes for each of them.
LISTS = Path(__file__).resolve().parents[2] / "lists"
SAMPLES = 3
FP32 = torch.float32
# What torch compiles anew for each call of its helpers, and what follows values into sizes of its own.
LEFT_OUT = re.compile(r"jiterator_|linalg\.matrix_sqrth")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call came to.

    Attributes:
        error: What it raised, empty where it ran.
        dtypes: Of the tensors that it returned.
        saved: Bytes saved for backward by dtype, each storage once, arguments apart.
    """

    error: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    saved: dict[torch.dtype, int] = dataclasses.field(default_factory=dict)


Made = tuple[Callable[..., Any], Call]


def names() -> list[str]:
    """Return all ops that are compared."""
    ops = [name for name in OPS if not LEFT_OUT.match(name)]
    return [*ops, *(f"autocast.{name}" for name in _autocast_calls()), *(f"own.{name}" for name in _OWN)]


def calls(name: str) -> list[Made]:
    """Return the calls of an op, and the function, which is looked up when it is called: patches come and go."""
    if name.startswith("autocast."):
        return _autocast_calls()[name.removeprefix("autocast.")]
    if name.startswith("own."):
        function, make = _OWN[name.removeprefix("own.")]
        return [(function, _on_cuda(make()))]
    op = OPS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(itertools.islice(op.sample_inputs("cpu", FP32, requires_grad=op.supports_autograd), SAMPLES))
    return [(spelled(op), Call.of(_to_cuda((s.input, *s.args)), _to_cuda(s.kwargs))) for s in samples]


def spelled(op: Any) -> Callable[..., Any]:
    """Return what calls an op by its public name, or by its OpInfo's helper."""
    *path, last = op.name.split(".")
    parent = functools.reduce(lambda at, part: getattr(at, part, None), path, torch)
    if getattr(parent, last, None) is op.op:
        return lambda *args, **kwargs: getattr(parent, last)(*args, **kwargs)
    return op.op


def _to_cuda(values: Any) -> Any:
    """Return values with their tensors on the device; the wish for gradients goes along."""

    def move(leaf: Any) -> Any:
        return leaf.detach().cuda().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, values)


def _on_cuda(args: tuple[Any, ...]) -> Call:
    """Return a call on floating arguments that want gradients."""
    wanting = tree_map(
        lambda leaf: leaf.requires_grad_() if isinstance(leaf, Tensor) and leaf.dtype in FLOATS else leaf, args
    )
    return Call.of(tree_map(lambda leaf: leaf.float() if _half(leaf) else leaf, _to_cuda(wanting)), {})


def _half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in HALVES.values()


@functools.cache
def _autocast_calls() -> dict[str, list[Made]]:
    """Return the calls of torch's own tests of CUDA autocast."""
    lists = AutocastTestLists("cpu")
    found: dict[str, list[Made]] = {}
    for parents, entries in (
        ((torch,), lists.torch_expect_builtin_promote + lists.torch_fp16 + lists.torch_fp32),
        ((torch,), lists.torch_need_autocast_promote),
        ((torch.nn.functional, torch._C._nn), lists.nn_fp16 + lists.nn_fp32),
        ((torch.linalg,), [(name.removeprefix("linalg_"), *rest) for name, *rest in lists.linalg_fp16]),
        ((Tensor,), lists.methods_expect_builtin_promote + lists.methods_fp16 + lists.methods_fp32),
    ):
        for name, args, *_ in entries:
            parent = next(parent for parent in parents if hasattr(parent, name))
            if isinstance(args, tuple):  # einsum's are not
                found.setdefault(name, []).append((functools.partial(_called, parent, name), _on_cuda(args)))
    return found


def _called(parent: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(parent, name)(*args, **kwargs)


def _rnn(name: str, gates: int) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    """Return a recurrent layer as `nn.RNNBase` calls it."""

    def make() -> tuple[Any, ...]:
        weights = [torch.randn(gates * 8, 8), torch.randn(gates * 8, 8), torch.randn(gates * 8), torch.randn(gates * 8)]
        state = torch.zeros(1, 2, 8)
        states = (state, torch.zeros(1, 2, 8)) if name == "lstm" else state
        return torch.randn(3, 2, 8), states, weights, True, 1, 0.0, True, False, False

    return functools.partial(_called, torch._VF, name), make


def _square() -> tuple[Any, ...]:
    return torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)


# Ops of our lists that no OpInfo and no test of autocast's calls.
_OWN: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "__rmatmul__": (lambda a, b: a.__rmatmul__(b), lambda: _square()[:2]),
    "_addmm_activation": (functools.partial(_called, torch, "_addmm_activation"), _square),
    "_scaled_dot_product_flash_attention": (
        lambda q, k, v: torch._scaled_dot_product_flash_attention(q, k, v)[0],
        lambda: tuple(torch.randn(2, 4, 8, 16) for _ in range(3)),
    ),
    "frobenius_norm": (functools.partial(_called, torch, "frobenius_norm"), lambda: (torch.randn(8, 8), [0, 1])),
    "gru": _rnn("gru", 3),
    "lstm": _rnn("lstm", 4),
    "native_norm": (functools.partial(_called, torch, "native_norm"), lambda: (torch.randn(8, 8),)),
    "norm_except_dim": (functools.partial(_called, torch, "norm_except_dim"), lambda: (torch.randn(8, 8),)),
    "nuclear_norm": (functools.partial(_called, torch, "nuclear_norm"), lambda: (torch.randn(8, 8),)),
    "rnn_relu": _rnn("rnn_relu", 1),
    "rnn_tanh": _rnn("rnn_tanh", 1),
}


def listed() -> set[str]:
    """Return the bare names that our lists put under a policy on CUDA."""
    rules = [rule for name in ("default", "bf16") for rule in shipped_table(name, "cuda").rules]
    return {rule.target for rule in rules if rule.bare and rule.policy is not CastPolicy.NONE}


def called() -> set[str]:
    """Return the bare names that some call of `names` calls."""
    found = {name.removeprefix("autocast.").removeprefix("own.") for name in names() if name not in OPS}
    for op in OPS.values():
        spellings = [op.name, *(alias.name for alias in op.aliases)]
        found |= {spelling.split(".")[-1].removeprefix("linalg_") for spelling in spellings}
        for variant in (op.operator_variant, op.method_variant):
            found.add(getattr(variant, "__name__", ""))
            found.add(f"__{getattr(variant, '__name__', '').strip('_')}__")
    return found


def run(function: Callable[..., Any], call: Call) -> Outcome:
    """Call an op on the device."""
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    for index in call.wanting:
        leaves[index].requires_grad_()
    args, kwargs = tree_unflatten(leaves, call.spec)
    with warnings.catch_warnings(), SavedTensors(leaf for leaf in leaves if isinstance(leaf, Tensor)) as saved:
        warnings.simplefilter("ignore")
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # whatever torch raises is to be compared
            return Outcome(error=repr(error)[:200])
    dtypes = tuple(leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    return Outcome("", dtypes, saved.bytes_by_dtype())


def differences(name: str, half_name: str) -> dict[str, str]:
    """Return what differs, by name.

    ``raises``, where torch runs; ``narrower`` dtypes of results, or other ``dtypes``; ``saved``, where it is more. The
    last two are not told of an op that a list treats otherwise on purpose.
    """
    half = HALVES[half_name]
    given = [
        (mode, function, call.cast(functools.partial(dtype_of, half)))
        for function, call in calls(name)
        for mode, dtype_of in MODES.items()
        if mode in ("half", "fp32") or len(call.floating) > 1
    ]
    with torch.autocast("cuda", dtype=half):
        theirs = [run(function, call) for _, function, call in given]
    handle = autoamp.init(device_type="cuda", dtype=half)
    found = [run(function, call) for _, function, call in given]
    handle.deactivate()
    texts: dict[str, str] = {}
    for (mode, _, _), mine, other in zip(given, found, theirs, strict=True):
        for what, text in _unlike(mine, other):
            texts.setdefault(what, f"{mode} arguments: {text}")
    kept = ("raises", "narrower") if on_purpose(name, half_name) else ("raises", "narrower", "dtypes", "saved")
    return {what: text for what, text in texts.items() if what in kept}


def _unlike(mine: Outcome, theirs: Outcome) -> Iterator[tuple[str, str]]:
    if theirs.error:
        return
    if mine.error:
        yield "raises", mine.error
        return
    if mine.dtypes != theirs.dtypes:
        pairs = zip(mine.dtypes, theirs.dtypes, strict=True)
        narrower = any(one in HALVES.values() and other is FP32 for one, other in pairs)
        yield "narrower" if narrower else "dtypes", f"{mine.dtypes}, not {theirs.dtypes}"
    if sum(mine.saved.values()) > sum(theirs.saved.values()):
        yield "saved", f"{mine.saved}, not {theirs.saved}"


def on_purpose(name: str, half_name: str) -> str:
    """Return why a list has another policy for an op than torch.autocast; empty where none has."""
    full = name.split("/")[0].removeprefix("autocast.").removeprefix("own.")
    spellings = (f"torch.{full}", full.split(".")[-1].removeprefix("linalg_"))
    default, bf16 = (
        next(filter(None, map(shipped_table(lists, "cuda").policy_of, spellings)), None)
        for lists in ("default", "bf16")
    )
    if half_name == "bf16" and bf16 is not None and (default is None or bf16.policy is not default.policy):
        return bf16.reason
    return _comment(default.origin.line) if default is not None and default.origin.line is not None else ""


@functools.cache
def _comment(line: int) -> str:
    """Return what the default list says of the entry in a line, if it says that it differs."""
    text = (LISTS / "default.toml").read_text(encoding="utf-8").splitlines()[line - 1]
    return "".join(re.findall(r"#\s*(differs.*)$", text))
