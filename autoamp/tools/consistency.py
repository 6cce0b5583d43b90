"""Whether a model computes the same on each path: training, inference, checkpoints, compiled code.

Each eager path is recorded on a tape. Operators are put together to calls of patched functions, and calls of one
function and module are compared in their order with those of the training pass: first by dtype, then by bits.
Compiled code shows no operators, so the dtypes of its outputs are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint

from autoamp.core import ModulePrecisions, located
from autoamp.tensors import dtype_name, iter_tensors, map_tensors
from autoamp.tools.casts import COPIES
from autoamp.tools.observer import Call, Observation, Observer
from autoamp.tools.overflow import OverflowTrace
from autoamp.tools.tape import Op, Place, Tape, record
from autoamp.torch_private import current_graph_task, undisturbed

_PACKED = "handle.inference packs weights for oneDNN, whose kernels sum in another order"


def _where(module: str | None, location: str | None) -> str:
    """Return a place as the end of a phrase, such as ``" in head at net.py:7"``."""
    return "".join(f" {word} {what}" for word, what in (("in", module), ("at", location)) if what)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call on a path that differs from the training pass.

    Attributes:
        op: The function, as ``"torch.nn.functional.linear"``, an operator as ``"aten::add"``, or ``"output"``.
        module: The path of the module that calls it; None outside of modules.
        location: ``"file:line"`` of the program; None if unknown.
        expected: The dtype in the training pass, as ``"float32"``.
        found: The dtype on this path. The same if only bits differ.
        reason: Why, where it is known.
    """

    op: str
    module: str | None
    location: str | None
    expected: str
    found: str
    reason: str | None

    def __str__(self) -> str:
        what = f"{self.found}, {self.expected} in training" if self.found != self.expected else "other bits"
        return f"{self.op}{_where(self.module, self.location)}: {what}" + (f"; {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class ComparedPath:
    """A path beside the training pass.

    Attributes:
        name: Such as ``"no_grad"``.
        dtype: The first call of another dtype; None if there is none.
        bits: The first call with other bits, of a path on which these are compared.
        failed: Why the path was not compared, or not in whole; None if it was.
    """

    name: str
    dtype: Difference | None = None
    bits: Difference | None = None
    failed: str | None = None

    def __str__(self) -> str:
        found = [str(one) for one in (self.dtype, self.bits) if one is not None]
        found += [f"not compared: {self.failed}"] if self.failed is not None else []
        return f"{self.name}: {'; '.join(found) or 'the same'}"


@dataclass(frozen=True, slots=True)
class Consistency:
    """What `autoamp.Handle.consistency` found; ``str()`` is for people.

    Attributes:
        paths: The paths, in the order in which they ran.
    """

    paths: tuple[ComparedPath, ...]

    @property
    def is_consistent(self) -> bool | None:
        """Whether all paths compute what training does. None: none differs, but one was not wholly compared."""
        if any(path.dtype is not None or path.bits is not None for path in self.paths):
            return False
        return None if any(path.failed is not None for path in self.paths) else True

    def __str__(self) -> str:
        return "\n".join(map(str, self.paths))


@dataclass(eq=False)
class _Step:
    """A call of a patched function, an operator outside of these, or an output of the model.

    Attributes:
        name: The function, or the operator.
        module, location: Where it is called.
        phase: That of `Op`.
        dtype: That of the first floating result.
        digest: Of the bits of the first floating result.
        kernels: The operators that are no casts, each with the dtype of its first floating result.
        casting: Whether casts were on.
        why: The rule of the function, and the precision of the module around it, as texts.
    """

    name: str
    module: str | None = None
    location: str | None = None
    phase: str = "forward"
    dtype: torch.dtype | None = None
    digest: bytes = b""
    kernels: list[str] = field(default_factory=list)
    casting: bool = False
    why: Sequence[str] = ()

    @property
    def key(self) -> tuple[str | None, ...]:
        """What it is known by on another path, where a function may be called at another line.

        Of an operator there may be many more: a dropout in training multiplies.
        """
        return self.name, self.module, self.location if self.name.startswith("aten::") else None


@dataclass(eq=False)
class _Pass:
    """A path that ran: its outputs, and its calls if it ran on a tape."""

    outputs: list[_Step]
    steps: list[_Step] = field(default_factory=list)
    tape: Tape | None = None


def _digest(tensor: Tensor) -> bytes:
    with undisturbed():
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).digest()


def _floating(value: Any) -> list[Tensor]:
    return [tensor for tensor in iter_tensors(value) if tensor.is_floating_point() and tensor.layout is torch.strided]


class _Listener(Observer):
    """Knows what runs while a tape is recorded."""

    def __init__(self, observation: Observation, precisions: ModulePrecisions) -> None:
        self._observation = observation
        self._precisions = precisions
        self._running: list[_Step] = []
        self.steps: list[_Step] = []

    def where(self) -> Place:
        """Return the place that is calling now. Which function it calls is in the steps, not in places."""
        site = self._observation.site_here()
        return Place("", module=site.module, location=site.location)

    def before(self, call: Call) -> _Step:
        """Note a call of a patched function."""
        rule, site = call.op.rule, call.site
        why = [f"{rule.policy.value} by {rule.target!r} in {located(rule.origin)}"]
        given = [found for module in call.modules if (found := self._precisions.get(module)) is not None]
        why += [f"its module has the precision {given[-1].value}"] if given else []
        # In a backward pass a checkpoint computes again.
        phase = "forward" if current_graph_task() == -1 else "recomputation"
        step = _Step(call.op.name, site.module, site.location, phase, casting=call.casting, why=why)
        self._running.append(step)
        return step

    def after(self, call: Call, state: _Step, result: Any) -> None:
        """Note what a call returned."""
        self._running.remove(state)
        for tensor in _floating(result)[:1]:
            state.dtype, state.digest = tensor.dtype, _digest(tensor)
        self.steps.append(state)

    def failed(self, call: Call, state: _Step, error: BaseException) -> None:
        """Forget a call. A checkpoint ends its second pass by an error."""
        self._running.remove(state)

    def look(self, op: Op, results: Any) -> None:
        """Note an operator."""
        outputs = _floating(results)
        if op.phase == "backward" or not outputs or op.is_empty or op.is_recorded or op.name in COPIES:
            return
        dtype = outputs[0].dtype
        if self._running:
            step = self._running[-1]
        else:
            step = _Step(op.name, op.place.module, op.place.location, op.phase, dtype, _digest(outputs[0]))
            self.steps.append(step)
        step.kernels.append(f"{op.name} in {dtype_name(dtype)}")


def _compare(training: _Pass, other: _Pass, name: str, *, bits: bool = True) -> ComparedPath:
    """Compare a path with the training pass."""
    expected, pairs, reasons = defaultdict(list), [], []
    for step in training.steps:
        expected[step.key].append(step)
    # By phase: what a checkpoint computes again is compared like its first call.
    left: dict[Any, Iterator[_Step]] = {}
    for step in other.steps:
        before = next(left.setdefault((step.phase, step.key), iter(expected[step.key])), None)
        if before is not None:
            pairs.append((before, step))
        elif step.module is not None:
            reasons.append(f"training does not have {step.name}{_where(step.module, step.location)}")
    outputs = zip(training.outputs, other.outputs, strict=False)
    pairs += [(replace(before, why=reasons[:1]), output) for before, output in outputs]
    dtypes = (_difference(*pair) for pair in pairs if pair[0].dtype is not pair[1].dtype)
    others = (_difference(*pair) for pair in pairs if pair[0].digest != pair[1].digest)
    dtype = next(dtypes, None)
    failed = None
    if training.tape is not None and other.tape is not None:
        failed = other.tape.incomplete or training.tape.incomplete
    if len(training.outputs) != len(other.outputs):
        failed = f"it has {len(other.outputs)} floating outputs, and training {len(training.outputs)}"
    # Other bits come of another dtype.
    return ComparedPath(name, dtype, next(others, None) if bits and dtype is None else None, failed)


def _difference(before: _Step, step: _Step) -> Difference:
    reasons = []
    if before.casting is not step.casting:
        here, there = ("on", "off") if step.casting else ("off", "on")
        reasons.append(f"casts are {here} here and {there} in training")
    if before.dtype is step.dtype and before.kernels != step.kernels:
        reasons.append(f"torch runs {', '.join(step.kernels)} here, and {', '.join(before.kernels)} in training")
    reason = "; ".join([*reasons, *before.why]) or None
    expected, found = dtype_name(before.dtype), dtype_name(step.dtype)
    return Difference(step.name, step.module, step.location, expected, found, reason)


@dataclass(eq=False)
class ConsistencyCheck:
    """Runs a model on each path; see `autoamp.Handle.consistency`.

    Attributes:
        model: The model.
        args: What it is called with.
        kwargs: What it is called with by name.
        precisions: Which modules run in a precision of their own.
        overflows: Runs models so that nothing is recorded or left behind.
        inference: ``handle.inference``.
    """

    model: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    precisions: ModulePrecisions
    overflows: OverflowTrace
    inference: Callable[[Module], contextlib.AbstractContextManager[Any]]

    def __post_init__(self) -> None:
        self._listener = _Listener(self.overflows.observation, self.precisions)
        self._restore: list[Callable[[], object]] = []

    def run(self, backend: Any) -> Consistency:
        """Compare all paths.

        Args:
            backend: That of torch.compile; None to leave compiled code out.
        """
        observation = self.overflows.observation
        with observation.observe(self._listener), self.overflows.apart() as state:
            state.keep(self.model)
            self._restore = [state.restore]
            training = self._ran(self._call)
            assert training.tape is not None
            # What a path without a tape writes is what this one wrote.
            self._restore.append(training.tape.undo)
            paths = [
                self._compared(training, "no_grad", torch.no_grad()(self._call)),
                self._compared(training, "inference_mode", torch.inference_mode()(self._call)),
                # Without dropout, and with the running statistics of a batch norm.
                self._compared(training, "eval", torch.no_grad()(lambda: self._call(Module.eval)), bits=False),
                *(
                    self._compared(training, f"checkpoint(use_reentrant={kind})", partial(self._checkpointed, kind))
                    for kind in (False, True)
                ),
                self._with_packed_weights(training, self._compared(training, "handle.inference", self._inferred)),
            ]
            with ThreadPoolExecutor(1) as thread:
                name = "a thread, as of DataParallel"
                paths.append(thread.submit(self._compared, training, name, self._call).result())
        if backend is not None:
            compiled = partial(self._call, partial(torch.compile, backend=backend))
            with self.overflows.apart(hooked=False):
                paths.append(self._compared(training, "torch.compile", compiled, bits=False, taped=False))
        return Consistency(tuple(paths))

    def _call(self, prepared: Callable[[Module], Any] = lambda model: model) -> Any:
        return prepared(self.model)(*self.args, **self.kwargs)

    def _inferred(self) -> Any:
        with torch.no_grad(), self.inference(self.model):
            return self._call()

    def _checkpointed(self, reentrant: bool) -> Any:
        """Call the model within a checkpoint, and run the backward pass, in which it is called again.

        The parameters of the call are others on the same memory: no gradient of the model's is touched, and no hook
        that waits for one runs.
        """
        args, kwargs = map_tensors((self.args, self.kwargs), lambda one: one.detach().requires_grad_(one.requires_grad))
        params: dict[str, Tensor] = {
            name: Parameter(one.detach(), one.requires_grad) for name, one in self.model.named_parameters()
        }
        # The backward pass of a reentrant checkpoint needs an argument with gradients.
        root = torch.zeros((), requires_grad=True)

        def call(root: Tensor, *args: Any) -> Any:
            # A result that is a buffer of the model must not get the checkpoint's node.
            return map_tensors(torch.func.functional_call(self.model, params, args, kwargs), Tensor.clone)

        outputs = checkpoint(call, root, *args, use_reentrant=reentrant)
        sums = [output.sum(dtype=torch.float32) for output in _floating(outputs) if output.requires_grad]
        # By the root alone the outputs of a reentrant checkpoint require gradients, and its backward pass raises.
        if sums and any(one.requires_grad for one in iter_tensors((args, kwargs, params))):
            # So that a model which counts its calls does not differ for that in the second one.
            with undisturbed():
                self._put_back()
            torch.stack(sums).sum().backward()
        return outputs

    def _ran(self, run: Callable[[], Any], *, taped: bool = True) -> _Pass:
        """Run a path, on a tape or without one, and undo what it wrote."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._put_back)
            self._listener.steps, tape = [], None
            if taped:
                stack.enter_context(self.overflows.observation.only(self._listener))
                tape = stack.enter_context(record(self._listener.where, look=self._listener.look, limit=math.inf))
                stack.callback(tape.undo)
            outputs = [_Step("output", dtype=output.dtype, digest=_digest(output)) for output in _floating(run())]
            return _Pass(outputs, self._listener.steps, tape)

    def _put_back(self) -> None:
        for restore in self._restore:
            restore()

    def _compared(
        self, training: _Pass, name: str, run: Callable[[], Any], *, bits: bool = True, taped: bool = True
    ) -> ComparedPath:
        """Compare a path with the training pass, without a tape by its outputs alone."""
        try:
            return _compare(training, self._ran(run, taped=taped), name, bits=bits)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            return ComparedPath(name, failed=f"{type(error).__name__}: {first}")

    def _with_packed_weights(self, training: _Pass, taped: ComparedPath) -> ComparedPath:
        """Compare the outputs of `autoamp.Handle.inference`, which packs no weights while a tape is recorded."""
        if taped != ComparedPath(taped.name):
            return taped
        found = self._compared(training, taped.name, self._inferred, taped=False)
        return found if found.bits is None else replace(found, bits=replace(found.bits, reason=_PACKED))
