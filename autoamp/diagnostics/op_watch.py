"""Looking on at the ops between module calls and at those of the loss, which cannot be run again, while they run.

That is slow, so only some steps are watched: the first of a traced run, and those after an overflow that was not
located. Within module calls nobody looks here: these are recorded, and run again.
"""

from __future__ import annotations

import threading
from typing import SupportsFloat

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.diagnostics.findings import of_site
from autoamp.diagnostics.inspector import Backward, Flaw, Inspector, Origin, Site, flaw_of
from autoamp.diagnostics.verdicts import HalfPrecisionOp, NotFiniteInFp32, NotLocated, Overflow, ScaleSearch
from autoamp.tensors import HALF_DTYPES, dtype_name
from autoamp.torch_private import compiled_graphs, next_sequence_number

__all__ = ["OpWatch", "WatchedOps"]


class WatchedOps:
    """The ops of one step that were watched.

    Args:
        casts: How threads cast.
    """

    def __init__(self, casts: Casts) -> None:
        self.inspector = Inspector(casts=casts)
        self._losses: list[Origin] = []
        self._passes: list[Backward] = []

    def begin_pass(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Look at a loss, and at its backward pass, which is about to run."""
        self.end_pass()
        self.inspector.take_function(loss)
        if (flaw := flaw_of(loss)) is not None:
            self._losses.append(self.inspector.origin_of(loss, flaw))
        self._passes.append(Backward(self.inspector, scale=float(scale)).__enter__())

    def end_pass(self) -> None:
        """Look no more at the last backward pass."""
        for backward in self._passes[-1:]:
            backward.__exit__()

    def finding_of(self, tensor: Tensor) -> Overflow | None:
        """Return the finding for a tensor that an op made of finite values; None where no watched op did."""
        origin = self.inspector.origin_in_memory(tensor)
        return None if origin is None else _forward_finding(origin)

    def forward_finding(self) -> Overflow | None:
        """Return the finding for a loss that is not finite; None where no watched op made it so."""
        return next((found for origin in self._losses if (found := _forward_finding(origin)) is not None), None)

    def backward_finding(self) -> Overflow | None:
        """Return the finding for the first gradients that are not finite; None where no watched op made them so."""
        for backward in self._passes:
            for node, result in backward.results.items():
                if result.got is None and result.gave is not None:
                    site, sizes = backward.sites[node], result.magnitudes
                    if result.finite_at_one:
                        return of_site(site, ScaleSearch(), "backward", result.gave)
                    return _finding(site, "backward", result.gave, sizes, result.finite_in_fp32)
        return None


class OpWatch:
    """Watches the ops outside of module calls.

    Args:
        casts: How threads cast.

    Attributes:
        armed: Whether the steps that begin now are watched.
    """

    def __init__(self, casts: Casts) -> None:
        self.armed = False
        self._casts, self._graphs = casts, compiled_graphs()
        self._step: WatchedOps | None = None
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Watch from now on: a module call has ended. Nothing is watched once torch.compile made code."""
        if not self.armed or compiled_graphs() != self._graphs or next_sequence_number is None:
            return
        if threading.get_ident() == self._thread:
            self._step = self._step or WatchedOps(self._casts)
            self._step.inspector.begin_between()

    def pause(self) -> None:
        """Watch no more: a module call or a backward pass begins."""
        if self._step is not None:
            self._step.inspector.end_between()

    def note_loss(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Look at a loss, and at the backward pass that is about to run."""
        self.pause()
        if self._step is not None:
            self._step.begin_pass(loss, scale)

    def take(self) -> WatchedOps | None:
        """Return what was watched of the step, and begin anew."""
        self.pause()
        taken, self._step, self._thread = self._step, None, threading.get_ident()
        if taken is not None:
            taken.end_pass()
        return taken


def _forward_finding(origin: Origin) -> Overflow | None:
    if origin.site is None:
        return None
    return _finding(origin.site, "forward", origin.flaw, origin.magnitudes, origin.finite_in_fp32)


def _finding(site: Site, phase: str, flaw: Flaw, sizes: tuple[float, ...], finite_in_fp32: bool | None) -> Overflow:
    """Return the finding for an op that made inf or nan at any loss scale."""
    if finite_in_fp32 is None:
        return of_site(site, NotLocated("it is not known whether fp32 would be finite"), phase, flaw)
    if not finite_in_fp32:
        return of_site(
            site, NotFiniteInFp32(magnitudes=sizes), phase, flaw,
            "look at the loss: compute it in a form that stays finite",
        )  # fmt: skip
    half = dtype_name(site.dtype if site.dtype in HALF_DTYPES else torch.float16)
    return of_site(
        site, HalfPrecisionOp(sizes, half, site.in_cast or site.op == "to"), phase, flaw,
        "make the loss smaller, or let what makes the half tensor run in fp32: its gradient is too large",
    )  # fmt: skip
