"""The cast trace: what each op at each place was cast, what the cache spared, and what that suggests.

Calls of listed functions come from an observer. The copies that casts make are seen by a `TorchDispatchMode`, below
torch's autocast, so that they are counted where they are made and not inferred. It sees ops on no list as well, and is
blind to what torch.compile compiles, which it does not disturb.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import RECURRENT_LAYERS, Casts
from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.counts import floating_tensors, target_of
from autoamp.diagnostics.hints import Flow, hints_of
from autoamp.diagnostics.observer import Call, Observation, Observer, Watch, operator_mode
from autoamp.diagnostics.rows import COLUMNS, Hint, Row
from autoamp.diagnostics.tables import as_csv, as_table
from autoamp.tensors import dtype_name, iter_tensors
from autoamp.torch_private import DispatchMode, current_graph_task, dispatch_modes

__all__ = ["CastTrace"]

_CASTS = frozenset({"aten::_to_copy", "aten::to"})
# Ops that come undivided where gradients are not recorded; torch's formulas are for what they are made of.
_PRODUCTS = frozenset({"aten::linear", "aten::matmul"})
_CONVOLUTIONS = frozenset({"aten::conv1d", "aten::conv2d", "aten::conv3d"})


class _State:
    """A call while it runs.

    Attributes:
        row: Where it is noted.
        expected: The arguments that the policy puts in another dtype.
        ids: Their ids. Copies that torch's kernels make of other arguments are none of ours.
        target: That dtype; None where the policy leaves all.
        casts: Elements and bytes of each copy that was made.
        of_arguments: How many of these are of arguments.
        flops: Of the products that it computed.
        outside: The state of the call that this one is made within.
        undo: What `after` has to undo: a mode to leave or to enter again, a record of the profiler to end.
        seen: Whether a mode looks on.
    """

    __slots__ = ("casts", "expected", "flops", "ids", "of_arguments", "outside", "row", "seen", "target", "undo")

    def __init__(self, row: Row, expected: list[Tensor], target: torch.dtype | None) -> None:
        self.row = row
        self.ids = {id(tensor) for tensor in expected}
        self.expected = expected
        self.target = target
        self.casts: list[tuple[int, int]] = []
        self.of_arguments = 0
        self.flops = 0
        self.outside: _State | None = None
        self.undo: list[Callable[[], object]] = []
        self.seen = True


class _Thread(threading.local):
    mode: Any = None
    depth = 0
    state: _State | None = None


class CastTrace(Observer):
    """The trace of a ``with handle.trace()`` statement. Its numbers stay after it; ``print`` gives a table.

    Not traced are what torch.compile compiles, and the backward passes of casts. Ops on no list are seen in the thread
    of the ``with`` statement alone.

    Args:
        casts: The state that replacements read.
        observation: Tells where calls are made.
        start: Begins to tell this observer of calls.
        profile: Whether torch.profiler takes the times of each row.
    """

    def __init__(
        self, casts: Casts, observation: Observation, start: Callable[[Observer], Watch], *, profile: bool = False
    ) -> None:
        self._casts = casts
        self._observation = observation
        self._start = start
        self._rows: dict[tuple[str, CallSite], Row] = {}
        self._unlisted: dict[tuple[str, CallSite], Row] = {}
        self._flow = Flow()
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._watch: Watch | None = None
        self._profiler: Any = torch.profiler.profile() if profile else None

    def __enter__(self) -> CastTrace:
        self._watch = self._start(self)
        if self._profiler is not None:
            self._profiler.__enter__()
        self._enter_mode(operator_mode(self.saw))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._leave_mode()
        if self._profiler is not None:
            self._profiler.__exit__(*exc_info)
            self._take_times()
        if self._watch is not None:
            self._watch.stop()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Each listed op at each place, in the order of their first calls."""
        return tuple(self._rows.values())

    @property
    def unlisted(self) -> tuple[Row, ...]:
        """The ops on no list that got floating tensors of several dtypes. What is cast there torch casts by itself."""
        return tuple(self._unlisted.values())

    @property
    def hints(self) -> tuple[Hint, ...]:
        """What the numbers suggest, by the bytes that are in question, most first."""
        return hints_of(self.rows, self.unlisted, self._flow)

    # -- listed ops --

    def before(self, call: Call) -> _State | None:
        """Begin to watch what is cast for a call."""
        tensors = floating_tensors(call) if call.casting else []
        if not tensors:
            return None
        target = target_of(tensors, call.op.policy, self._casts)
        expected = [t for t in tensors if target is not None and self._casts.eligible(t) and t.dtype is not target]
        state = _State(self._row_of(call), expected, target)
        thread = self._thread
        state.outside, thread.state = thread.state, state
        if self._profiler is not None:
            record = torch.profiler.record_function(_key(state.row))
            record.__enter__()
            state.undo.append(lambda: record.__exit__(None, None, None))
        if self._goes_unseen(call):
            state.seen = False
            if thread.mode is not None and dispatch_modes() == thread.depth:
                mode = thread.mode
                self._leave_mode()
                state.undo.append(lambda: self._enter_mode(mode))
        elif thread.mode is None:
            # Another thread than that of the ``with`` statement.
            self._enter_mode(operator_mode(self.saw))
            state.undo.append(self._leave_mode)
        return state

    def after(self, call: Call, state: _State | None, result: Any) -> None:
        """Take note of a call."""
        if state is None:
            return
        self._end(state)
        outputs = [t for t in iter_tensors(result) if t.is_floating_point() or t.is_complex()]
        row = state.row
        with self._lock:
            row.calls += 1
            if state.seen and DispatchMode is not None:
                row.spared += max(0, len(state.expected) - state.of_arguments)
            else:
                row.exact = False
                self._infer(state)
            row.casts += len(state.casts)
            row.elements_cast += sum(elements for elements, _ in state.casts)
            row.bytes_cast += sum(size for _, size in state.casts)
            inputs = floating_tensors(call)
            row.work += state.flops // 2 or max(_elements(inputs), _elements(outputs))
            for tensor in inputs:
                _count(row.dtypes_in, tensor.dtype)
            for output in outputs:
                _count(row.dtypes_out, output.dtype)
            self._flow.ran(row, inputs, outputs)

    def failed(self, call: Call, state: _State | None, error: BaseException) -> None:
        """Forget a call that raised an exception."""
        if state is not None:
            self._end(state)

    def _end(self, state: _State) -> None:
        self._thread.state = state.outside
        for undo in reversed(state.undo):
            undo()

    def _row_of(self, call: Call) -> Row:
        key = call.op.name, call.site
        with self._lock:
            found = self._rows.get(key)
            if found is None:
                rule = call.op.rule
                found = Row(call.op.name, rule.policy.value, rule.target, str(rule.origin), call.site)
                self._rows[key] = found
        return found

    def _goes_unseen(self, call: Call) -> bool:
        """Tell whether a call goes a shorter way where no mode looks on, which it is to go now as well."""
        recurrent = self._casts.device_type == "cuda" and any(call.op.original is op for op in RECURRENT_LAYERS)
        return bool(self._casts.cache.pins) or recurrent

    def _infer(self, state: _State) -> None:
        """Take what the policy asks for as made, but for pinned parameters."""
        assert state.target is not None or not state.expected
        for tensor in state.expected:
            if id(tensor) in self._casts.cache.pins:
                state.row.spared += 1
            elif state.target is not None:
                state.casts.append((tensor.numel(), tensor.numel() * state.target.itemsize))

    # -- operators --

    def _enter_mode(self, mode: Any) -> None:
        if mode is not None:
            mode.__enter__()
            self._thread.mode, self._thread.depth = mode, dispatch_modes()

    def _leave_mode(self) -> None:
        mode, self._thread.mode = self._thread.mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take note of an operator, which a mode has seen."""
        state = self._thread.state
        if self._observation.telling or (state is None and current_graph_task() != -1):
            # Within backward only what checkpoints compute again is looked at.
            return
        name = func.name().partition(".")[0]
        if name in _CASTS:
            self._saw_cast(state, args[0], result)
        elif state is None:
            self._saw_unlisted(name, args, kwargs, result)
        elif name == "aten::copy_":
            into, source = args[0], args[1]
            if id(into) in state.ids and into.dtype is not source.dtype and into.is_floating_point():
                # What an in-place form computed goes back into its self.
                state.casts.append((into.numel(), into.numel() * into.element_size()))
        else:
            state.flops += _flops(func, name, args, kwargs, result)

    def _saw_cast(self, state: _State | None, source: Any, result: Any) -> None:
        if not (isinstance(source, Tensor) and source.is_floating_point() and result.is_floating_point()):
            return
        if source.dtype is result.dtype:
            return
        if state is not None:
            if id(source) not in state.ids:
                return
            state.of_arguments += 1
            state.casts.append((result.numel(), result.numel() * result.element_size()))
        with self._lock:
            self._flow.cast(source, result, None if state is None else state.row)

    def _saw_unlisted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [t for t in iter_tensors((args, kwargs)) if t.is_floating_point()]
        outputs = [t for t in iter_tensors(result) if t.is_floating_point()]
        # Tensors without dimensions have no part in promotion.
        dtypes = {tensor.dtype for tensor in tensors if tensor.dim()}
        with self._lock:
            self._flow.passed(tensors, outputs)
        if len(dtypes) < 2 or name == "aten::copy_":
            return
        site = self._observation.site_here()
        with self._lock:
            row = self._unlisted.setdefault((name, site), Row(name, "unlisted", None, None, site))
            row.calls += 1
            widest = max((output.element_size() for output in outputs), default=0)
            converted = [t for t in tensors if t.dim() and t.element_size() < widest]
            row.casts += len(converted)
            row.elements_cast += sum(t.numel() for t in converted)
            row.bytes_cast += sum(t.numel() * widest for t in converted)
            row.work += _elements(outputs)
            for tensor in tensors:
                _count(row.dtypes_in, tensor.dtype)
            for output in outputs:
                _count(row.dtypes_out, output.dtype)

    def _take_times(self) -> None:
        rows = {_key(row): row for row in self.rows}
        for event in self._profiler.key_averages():
            row = rows.get(event.key)
            if row is not None:
                row.cpu_us, row.device_us = float(event.cpu_time_total), float(event.device_time_total)

    # -- for people and files --

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: ``schema``, ``kind``, ``dtype``, ``device_type``, ``torch``, ``rows``, ``unlisted``
        (both by `COLUMNS`) and ``hints`` (by the attributes of `Hint`)."""
        return {
            "schema": 1,
            "kind": "autoamp.trace",
            "dtype": dtype_name(self._casts.dtype),
            "device_type": self._casts.device_type,
            "torch": torch.__version__,
            "rows": [row.to_dict() for row in self.rows],
            "unlisted": [row.to_dict() for row in self.unlisted],
            "hints": [hint.to_dict() for hint in self.hints],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """Return all rows as CSV, those of ops on no list last, with a line of headings."""
        return as_csv([row.to_dict() for row in (*self.rows, *self.unlisted)], COLUMNS)

    def __str__(self) -> str:
        headings = ("op", "policy", "rule at", "module", "called at", "dtypes", "calls", "casts", "spared", "KiB cast")
        timed = self._profiler is not None
        lines = [
            (
                row.op.removeprefix("torch."), row.policy, row.origin or "-", row.site.where, row.site.location or "-",
                f"{_listed(row.dtypes_in)} -> {_listed(row.dtypes_out)}",
                str(row.calls), str(row.casts), str(row.spared), f"{row.bytes_cast / 1024:,.1f}",
                *((("-" if row.cpu_us is None else f"{row.cpu_us:,.0f}"),) if timed else ()),
            )
            for row in (*self.rows, *self.unlisted)
        ]  # fmt: skip
        table = as_table("Casts", (*headings, *(("us",) if timed else ())), lines, 4 + timed)
        return table + "".join(f"{line}\n" for line in map(str, self.hints))


def _key(row: Row) -> str:
    return f"autoamp.trace {id(row)} {row.op}"


def _count(found: dict[str, int], dtype: torch.dtype) -> None:
    found[dtype_name(dtype)] = found.get(dtype_name(dtype), 0) + 1


def _elements(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _listed(dtypes: dict[str, int]) -> str:
    return " ".join(sorted(dtypes)) or "-"


def _flops(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of an operator, by torch's formulas; 0 where it has none."""
    # Its import takes time, and a torch without such modes could not do it.
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if name in _PRODUCTS:
        return int(2 * result.numel() * args[0].shape[-1])
    if name in _CONVOLUTIONS:
        return int(2 * result.numel() * args[1][0].numel())
    return 0
