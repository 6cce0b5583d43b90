"""Counts of the calls of listed functions, by the dtype that they run in, and of the casts of their arguments.

The counts are an observer, so they cost nothing unless asked for. They derive the casts from the policy of a function.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import CastState, dtype_with_sparse
from autoamp.diagnostics.observer import Call, Observation, Observer, Watch
from autoamp.rules import CastPolicy
from autoamp.tensors import CASTABLE_LAYOUTS, dtype_name, iter_tensors


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
    if policy is CastPolicy.PROMOTE and len({t.dtype for t in tensors if casts.eligible(t)}) < 2:
        return None
    return torch.float32
