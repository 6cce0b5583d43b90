"""The cast trace: the casts of each op at each line, and those that were spared.

An observer reports the calls of listed functions. A `TorchDispatchMode` below torch's autocast sees the copies that
casts make, so casts are counted where they are made. The mode also sees ops on no list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.counts import floating_tensors, target_of
from autoamp.diagnostics.observer import Call, Observation, OperatorObserver
from autoamp.diagnostics.tables import as_table
from autoamp.rules import CastRule
from autoamp.tensors import dtype_name, iter_tensors
from autoamp.torch_private import current_graph_task, dispatch_modes

_CASTS = frozenset({"aten::_to_copy", "aten::to"})
_COPIES = _CASTS | {"aten::copy_"}


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


@dataclass(slots=True)
class _RunningCall:
    """A call of a listed function while it runs.

    Attributes:
        row: Where it is counted.
        to_cast: The ids of the arguments that the policy casts. torch's kernels may copy others for themselves.
        casts: The number of these arguments that were cast.
    """

    row: Row
    to_cast: frozenset[int]
    casts: int = 0


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
        self._running: dict[Call, _RunningCall] = {}

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
        self._running[call] = _RunningCall(row, frozenset(map(id, to_cast)))

    def after(self, call: Call, state: None, result: Any) -> None:
        """Count a call."""
        running = self._running.pop(call, None)
        if running is not None:
            outputs = [t for t in iter_tensors(result) if t.is_floating_point() or t.is_complex()]
            running.row.add_call(floating_tensors(call), outputs)
            running.row.spared += max(0, len(running.to_cast) - running.casts)

    def failed(self, call: Call, state: None, error: BaseException) -> None:
        """Forget a call that raised an exception."""
        self._running.pop(call, None)

    def _row(self, op: str, site: CallSite, rule: CastRule | None) -> Row:
        """Return the row of an op at a line, a new one the first time."""
        row = self._rows.get((op, site))
        if row is None:
            policy = "unlisted" if rule is None else rule.policy.value
            target, origin = (None, None) if rule is None else (rule.target, str(rule.origin))
            row = self._rows[op, site] = Row(op, policy, target, origin, site)
        return row

    # -- operators --

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator."""
        call = self._observation.here.call
        while call is not None and call not in self._running:
            call = call.outer
        name = func.name().partition(".")[0]
        if call is not None:
            running = self._running[call]
            # An in-place form casts its argument, and copies its result back to it.
            if name in _COPIES and id(args[0]) in running.to_cast:
                source = args[0] if name in _CASTS else args[1]
                if source.dtype is not result.dtype and result.is_floating_point():
                    running.casts += name in _CASTS
                    running.row.add_cast(result.nbytes)
        # In a backward pass only the calls that a checkpoint recomputes are traced.
        elif name not in _COPIES and current_graph_task() == -1:
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
