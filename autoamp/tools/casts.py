"""The calls of listed functions and their casts: counted by the policies, or traced by op and line.

Counts derive the casts from the policy of a function. A trace counts casts where they are made: a `TorchDispatchMode`
below torch's autocast sees the copies, and also ops on no list. Both are observers, and cost nothing unless asked for.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from autoamp.core import FALLBACKS, CastPolicy, CastRule, CastState, dtype_with_sparse
from autoamp.tensors import CASTABLE_LAYOUTS, dtype_name, iter_tensors
from autoamp.tools.call_sites import CallSite
from autoamp.tools.observer import Call, Observation, Observer, OperatorObserver, Watch
from autoamp.tools.tables import as_table
from autoamp.torch_private import current_graph_task, dispatch_modes

# The last is what inference mode shows of a cast.
_CASTS = frozenset({"aten::_to_copy", "aten::to"})
COPIES = _CASTS | {"aten::copy_"}
"""The operators that casts are made of."""


class Counts(Observer, Watch):
    """The calls since ``handle.count()``; also a context manager, which stops at its end.

    Not counted are functions under no rule, code that torch.compile compiles, calls in a torch.autocast region of the
    program, and calls with casts off: in ``optimizer.step()``, in a composite function that runs in fp32, in
    `disable_casts`. The numbers stay after `stop`.

    Args:
        observation: Reports the calls to it; None for a sum of counts.
    """

    def __init__(self, observation: Observation | None = None) -> None:
        super().__init__(None if observation is None else lambda: observation.remove(self))
        self._casts_of_handle = None if observation is None else observation.casts
        self._lock = threading.Lock()
        self._ops: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._casts: Counter[tuple[str, str]] = Counter()

    @property
    def ops(self) -> dict[str, dict[str, int]]:
        """Calls by function and dtype, of several the widest: ``{"torch.matmul": {"float16": 3}}``."""
        with self._lock:
            return {name: dict(sorted(calls.items())) for name, calls in sorted(self._ops.items())}

    @property
    def casts(self) -> dict[tuple[str, str], int]:
        """Arguments that a function got in another dtype: ``{("float32", "float16"): 5}``.

        A parameter whose cast serves again counts at each use.
        """
        with self._lock:
            return dict(self._casts)

    def by_dtype(self) -> dict[str, int]:
        """Return the calls of all functions together by the dtype that they ran in."""
        return dict(sorted(sum(map(Counter, self.ops.values()), Counter()).items()))

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``{"ops": ..., "by_dtype": ..., "casts": {"float32->float16": 5}}``."""
        casts = {f"{before}->{after}": count for (before, after), count in sorted(self.casts.items())}
        return {"ops": self.ops, "by_dtype": self.by_dtype(), "casts": casts}

    def ended(self) -> None:
        """End the counting: the handle was deactivated."""
        self._stop = None

    def reset(self) -> None:
        """Set all numbers to 0, in a fork whose parent has them. Only the thread that forked is there."""
        self._lock = threading.Lock()
        self._ops.clear()
        self._casts.clear()

    def before(self, call: Call) -> None:
        """Count a call by the dtypes of its floating arguments after the casts."""
        casts, tensors = self._casts_of_handle, floating_tensors(call) if call.casting else []
        if casts is None or not self.active or not tensors or casts.autocast_rules():
            return
        target = target_of(tensors, call.op.rule.policy, casts)
        dtypes = [(t.dtype, t.dtype if target is None or not casts.eligible(t) else target) for t in tensors]
        widest = functools.reduce(torch.promote_types, [after for _, after in dtypes])
        changed = [(dtype_name(before), dtype_name(after)) for before, after in dtypes if before is not after]
        with self._lock:
            self._ops[call.op.name][dtype_name(widest)] += 1
            self._casts.update(changed)


def sum_of(several: Iterable[Counts]) -> Counts:
    """Return the sum of several counts, which is not active."""
    total = Counts()
    for counts in several:
        for name, calls in counts.ops.items():
            total._ops[name].update(calls)
        total._casts.update(counts.casts)
    return total


def floating_tensors(call: Call) -> list[Tensor]:
    """Return the floating and complex tensors among a call's arguments, ``out`` apart."""
    given = (call.args, {key: value for key, value in call.kwargs.items() if key != "out"})
    return [tensor for tensor in iter_tensors(given) if tensor.is_floating_point() or tensor.is_complex()]


def target_of(tensors: list[Tensor], policy: CastPolicy, casts: CastState) -> torch.dtype | None:
    """Return what a policy casts these arguments to, None where it leaves them."""
    if policy is not CastPolicy.PROMOTE and any(tensor.layout not in CASTABLE_LAYOUTS for tensor in tensors):
        return dtype_with_sparse(tensors, casts.dtype if policy is CastPolicy.FP16 else torch.float32)
    if policy is CastPolicy.FP16:
        return casts.dtype
    if policy in FALLBACKS:
        # Whether torch refuses the call is not known before it.
        return None
    if policy is CastPolicy.PROMOTE and len({t.dtype for t in tensors if casts.eligible(t)}) < 2:
        return None
    return torch.float32


@dataclass(slots=True)
class Row:
    """The calls of one op at one line.

    Attributes:
        op: The function's dotted name, or torch's name of an operator on no list.
        policy: The policy's name, ``"unlisted"`` for an op on no list.
        rule: The rule's target, None for an op on no list.
        origin: The list file and line, None for an op on no list.
        site: The module, file and line of the calls.
        calls: The number of calls with casts on, in forward and in recomputations of checkpoints.
        casts: The number of copies of its arguments or results in another floating dtype.
        spared: The number of arguments that needed no copy: the cast was cached, or torch's op reads one dtype and
            computes in the other.
        bytes_cast: The size of the copies in bytes.
        dtypes_in, dtypes_out: The number of floating arguments and results of each dtype.
    """

    op: str
    policy: str
    rule: str | None
    origin: str | None
    site: CallSite
    calls: int = 0
    casts: int = 0
    spared: int = 0
    bytes_cast: int = 0
    dtypes_in: Counter[str] = field(default_factory=Counter)
    dtypes_out: Counter[str] = field(default_factory=Counter)

    def add_call(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Count a call and the dtypes of its tensors.

        Args:
            inputs: The floating-point and complex tensors among its arguments.
            outputs: Those among its results.
        """
        self.calls += 1
        self.dtypes_in.update(dtype_name(tensor.dtype) for tensor in inputs)
        self.dtypes_out.update(dtype_name(tensor.dtype) for tensor in outputs)

    def add_cast(self, size: int) -> None:
        """Count a copy of so many bytes."""
        self.casts += 1
        self.bytes_cast += size

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by the attributes' names; those of the site are on the same level."""
        of_site = {name: getattr(self.site, name) for name in ("module", "module_class", "root", "location")}
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "site"}
        return {**of_site, **values, "dtypes_in": dict(self.dtypes_in), "dtypes_out": dict(self.dtypes_out)}


class CastTrace(OperatorObserver):
    """The trace of a ``with handle.trace()`` statement. Its numbers stay after it; ``print`` gives a table.

    The thread of the ``with`` statement is traced. Not traced are code that torch.compile compiles, and the backward
    passes of casts.

    Args:
        observation: The observers of the handle.
    """

    def __init__(self, observation: Observation) -> None:
        super().__init__(observation)
        self._casts = observation.casts
        self._rows: dict[tuple[str, CallSite], Row] = {}
        # Of each running call the row, and which of the arguments that the policy casts were cast, by their ids.
        # Torch's kernels may copy others for themselves.
        self._running: dict[Call, tuple[Row, dict[int, bool]]] = {}

    @property
    def rows(self) -> tuple[Row, ...]:
        """Each listed op at each line, in the order of the first calls."""
        return tuple(row for row in self._rows.values() if row.rule is not None)

    @property
    def unlisted(self) -> tuple[Row, ...]:
        """The ops on no list that got floating tensors of several dtypes, which torch itself promotes."""
        return tuple(row for row in self._rows.values() if row.rule is None)

    # -- listed ops --

    def before(self, call: Call) -> None:
        """Begin to count the casts of a call."""
        tensors = floating_tensors(call) if call.casting else []
        # Without the mode this is another thread, or the trace has just ended.
        if not tensors or not dispatch_modes():
            return
        target = target_of(tensors, call.op.rule.policy, self._casts)
        to_cast = [t for t in tensors if target is not None and self._casts.eligible(t) and t.dtype is not target]
        row = self._row(call.op.name, call.site, call.op.rule)
        self._running[call] = row, dict.fromkeys(map(id, to_cast), False)

    def after(self, call: Call, state: None, result: Any) -> None:
        """Count a call."""
        if call in self._running:
            row, was_cast = self._running.pop(call)
            outputs = [t for t in iter_tensors(result) if t.is_floating_point() or t.is_complex()]
            row.add_call(floating_tensors(call), outputs)
            row.spared += list(was_cast.values()).count(False)

    def failed(self, call: Call, state: None, error: BaseException) -> None:
        """Forget a call that raised an exception."""
        self._running.pop(call, None)

    def _row(self, op: str, site: CallSite, rule: CastRule | None) -> Row:
        """Return the row of an op at a line, a new one the first time."""
        if (op, site) not in self._rows:
            policy = "unlisted" if rule is None else rule.policy.value
            target, origin = (None, None) if rule is None else (rule.target, str(rule.origin))
            self._rows[op, site] = Row(op, policy, target, origin, site)
        return self._rows[op, site]

    # -- operators --

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator."""
        call = self._observation.here.call
        while call is not None and call not in self._running:
            call = call.outer
        name = func.name().partition(".")[0]
        if call is not None:
            row, was_cast = self._running[call]
            # An in-place form casts its argument, and copies its result back to it.
            if name in COPIES and id(args[0]) in was_cast:
                source = args[0] if name in _CASTS else args[1]
                if source.dtype is not result.dtype and result.is_floating_point():
                    was_cast[id(args[0])] |= name in _CASTS
                    row.add_cast(result.nbytes)
        # In a backward pass only the calls that a checkpoint recomputes are traced.
        elif name not in COPIES and current_graph_task() == -1:
            self._saw_unlisted(name, args, kwargs, result)

    def _saw_unlisted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [t for t in iter_tensors((args, kwargs)) if t.is_floating_point()]
        # torch's promotion ignores tensors without dimensions.
        promoted = [tensor for tensor in tensors if tensor.dim()]
        if len({tensor.dtype for tensor in promoted}) < 2:
            return
        outputs = [t for t in iter_tensors(result) if t.is_floating_point()]
        row = self._row(name, self._observation.site_here(), None)
        row.add_call(tensors, outputs)
        widest = max((output.element_size() for output in outputs), default=0)
        for tensor in promoted:
            if tensor.element_size() < widest:
                row.add_cast(tensor.numel() * widest)

    # -- for people and files --

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: ``schema``, ``kind``, ``dtype``, ``device_type``, ``torch``, ``rows`` and ``unlisted``.

        A row has the attributes of `Row`, and those of its site as ``module``, ``module_class``, ``root`` and
        ``location``.
        """
        return {
            "schema": 2,
            "kind": "autoamp.trace",
            "dtype": dtype_name(self._casts.dtype),
            "device_type": self._casts.device_type,
            "torch": torch.__version__,
            "rows": [row.to_dict() for row in self.rows],
            "unlisted": [row.to_dict() for row in self.unlisted],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        headings = ("op", "policy", "rule at", "module", "called at", "dtypes", "calls", "casts", "spared", "KiB cast")
        lines = [
            (
                row.op.removeprefix("torch."), row.policy, row.origin or "-", row.site.where, row.site.location or "-",
                f"{_listed(row.dtypes_in)} -> {_listed(row.dtypes_out)}",
                str(row.calls), str(row.casts), str(row.spared), f"{row.bytes_cast / 1024:,.1f}",
            )
            for row in (*self.rows, *self.unlisted)
        ]  # fmt: skip
        return as_table("Casts", headings, lines, 4)


def _listed(dtypes: dict[str, int]) -> str:
    return " ".join(sorted(dtypes)) or "-"
