"""Counting: how often each function of the cast lists was called, in which dtype it ran, and what was cast for it.

The counts observe the calls, so that they cost nothing where nobody asks. They tell by a function's policy what its
replacement does with the arguments, and so know nothing of how it does it.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import Casts, dtype_with_sparse
from autoamp.diagnostics.observer import Call, Observer
from autoamp.rules import CastPolicy
from autoamp.tensors import CASTABLE_LAYOUTS, dtype_name, iter_tensors

__all__ = ["Counts", "floating_tensors", "sum_of", "target_of"]


class Counts(Observer):
    """The calls since ``handle.count()``; also a context manager, which stops at its end.

    Not counted are functions under no rule, what torch.compile compiles, and calls where casts are off: in
    ``optimizer.step()``, within a composite function that runs in fp32, in `disable_casts`. In a torch.autocast region
    of the program calls are counted by the dtype of their result; what torch casts there is not. The numbers stay
    after `stop`.

    Args:
        casts: The state that replacements read; None for numbers that are only added.
        on_stop: Called once by `stop`, with the counts.
    """

    def __init__(self, casts: Casts | None = None, on_stop: Callable[[Counts], object] | None = None) -> None:
        self._casts_of_handle = casts
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._ops: Counter[tuple[str, torch.dtype]] = Counter()
        self._casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    @property
    def active(self) -> bool:
        """Whether calls are counted now."""
        return self._on_stop is not None

    @property
    def ops(self) -> dict[str, dict[str, int]]:
        """Calls by function and dtype, of several the widest: ``{"torch.matmul": {"float16": 3}}``."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for (name, dtype), calls in sorted(self._ops.items(), key=lambda item: (item[0][0], str(item[0][1]))):
                found.setdefault(name, {})[dtype_name(dtype)] = calls
        return found

    @property
    def casts(self) -> dict[tuple[str, str], int]:
        """Arguments that a function got in another dtype: ``{("float32", "float16"): 5}``.

        A parameter whose cast serves again counts at each use.
        """
        with self._lock:
            return {(dtype_name(before), dtype_name(after)): count for (before, after), count in self._casts.items()}

    def by_dtype(self) -> dict[str, int]:
        """Return the calls by the dtype they ran in, of all functions together."""
        found: Counter[str] = Counter()
        for calls in self.ops.values():
            found.update(calls)
        return dict(sorted(found.items()))

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``{"ops": ..., "by_dtype": ..., "casts": {"float32->float16": 5}}``."""
        casts = {f"{before}->{after}": count for (before, after), count in sorted(self.casts.items())}
        return {"ops": self.ops, "by_dtype": self.by_dtype(), "casts": casts}

    def stop(self) -> None:
        """Count no more."""
        on_stop, self._on_stop = self._on_stop, None
        if on_stop is not None:
            on_stop(self)

    def before(self, call: Call) -> bool:
        """Count a call; tell whether it is to be counted by its result."""
        casts = self._casts_of_handle
        if casts is None or not self.active:
            return False
        if casts.autocast_rules():
            return call.outer is None
        if call.casting:
            self._count(call, casts)
        return False

    def after(self, call: Call, state: Any, result: Any) -> None:
        """Count a call in an autocast region."""
        if state:
            found = next((tensor.dtype for tensor in iter_tensors(result) if tensor.is_floating_point()), None)
            if found is not None:
                self.add(call.op.name, found, ())

    def reset(self) -> None:
        """Forget the numbers: for a fork, whose parent has them. Only the thread that forked is there."""
        self._lock = threading.Lock()
        self._ops.clear()
        self._casts.clear()

    begin_anew = reset  # The name of version 0.1.

    def _count(self, call: Call, casts: Casts) -> None:
        tensors = floating_tensors(call)
        target = target_of(tensors, call.op.policy, casts)
        after = [t.dtype if target is None or not casts.eligible(t) else target for t in tensors]
        if after:
            made = [(t.dtype, dtype) for t, dtype in zip(tensors, after, strict=True) if dtype is not t.dtype]
            self.add(call.op.name, functools.reduce(torch.promote_types, after), made)

    def ended(self) -> None:
        """Count no more, as the handle has ended."""
        self._on_stop = None

    def add(self, name: str, dtype: torch.dtype, casts: Iterable[tuple[torch.dtype, torch.dtype]]) -> None:
        """Take note of one call: the function, the dtype it runs in, and the casts as (from, to)."""
        with self._lock:
            self._ops[name, dtype] += 1
            self._casts.update(casts)

    def __enter__(self) -> Counts:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()


def sum_of(several: Iterable[Counts]) -> Counts:
    """Return counts that hold the numbers of several, and are not active."""
    total = Counts()
    for counts in several:
        with counts._lock:
            total._ops.update(counts._ops)
            total._casts.update(counts._casts)
    return total


def floating_tensors(call: Call) -> list[Tensor]:
    """Return the floating and complex tensors among a call's arguments, ``out`` apart."""
    given = (call.args, {key: value for key, value in call.kwargs.items() if key != "out"})
    return [tensor for tensor in iter_tensors(given) if tensor.is_floating_point() or tensor.is_complex()]


def target_of(tensors: list[Tensor], policy: CastPolicy, casts: Casts) -> torch.dtype | None:
    """Return what a policy casts these arguments to, None where it leaves them."""
    if policy is not CastPolicy.PROMOTE and any(tensor.layout not in CASTABLE_LAYOUTS for tensor in tensors):
        return dtype_with_sparse(tensors, casts.dtype if policy is CastPolicy.FP16 else torch.float32)
    if policy is CastPolicy.FP16:
        return casts.dtype
    if policy is CastPolicy.PROMOTE and len({t.dtype for t in tensors if casts.eligible(t)}) < 2:
        return None
    return torch.float32
