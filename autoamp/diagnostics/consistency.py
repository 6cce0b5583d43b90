"""Whether a model computes the same on each path: training, inference, checkpoints, compiled code.

Each eager path is recorded on a tape. Operators are put together to calls of patched functions, and calls of one
function and module are compared in their order with those of the training pass: first by dtype, then by bits.
Compiled code shows no operators, so its outputs are compared, and the dtypes in the graph that it was made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint

from autoamp.diagnostics.call_sites import shown_line
from autoamp.diagnostics.compared_paths import ComparedPath, Consistency, Difference, where
from autoamp.diagnostics.observer import Call, Observation, Observer, Watch
from autoamp.diagnostics.overflow import OverflowTrace
from autoamp.modules import ModulePrecisions
from autoamp.rules import located
from autoamp.tape import Op, Place, Tape, record
from autoamp.tensors import dtype_name, iter_tensors, map_tensors
from autoamp.torch_private import current_graph_task, undisturbed

_ON = {True: "on", False: "off"}
# The last is what inference mode shows of a cast.
_CASTS = ("aten::_to_copy", "aten::copy_", "aten::to")
_CASTS_AGAIN = "the graph that torch.compile made has the dtypes of training, but its code computes in others"
_INFERENCE = "handle.inference"
_THREAD = "a thread, as of DataParallel"
_PACKED = "handle.inference packs weights for oneDNN, whose kernels sum in another order"


@dataclass(eq=False)
class _Step:
    """A call of a patched function, or an operator outside of these.

    Attributes:
        name: The function, or the operator.
        phase: That of `Op`.
        module, location: Where it is called.
        dtype: That of the first floating result.
        computed: That of the first floating result of the last operator that is no cast.
        digest: Of the bits of the first floating result.
        kernels: The operators that are no casts.
        casting: Whether casts were on.
        why: The rule of the function, and the precision of the module around it, as texts.
    """

    name: str
    phase: str
    module: str | None
    location: str | None
    dtype: torch.dtype | None = None
    computed: torch.dtype | None = None
    digest: bytes = b""
    kernels: list[str] = field(default_factory=list)
    casting: bool = False
    why: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str | None, ...]:
        """What it is known by on another path, where a function may be called at another line.

        Of an operator there may be many more: a dropout in training multiplies.
        """
        return self.name, self.module, self.location if self.name.startswith("aten::") else None

    def take(self, results: Any) -> None:
        """Take the dtype and the bits of results."""
        for tensor in _floating(results)[:1]:
            self.dtype, self.digest = tensor.dtype, _digest(tensor)


@dataclass(eq=False)
class _Pass:
    """A path that ran: its calls, the dtype and bits of each floating output, and why calls are missing."""

    steps: list[_Step] = field(default_factory=list)
    outputs: list[tuple[torch.dtype, bytes]] = field(default_factory=list)
    incomplete: str | None = None


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
        """Return the place that is calling now."""
        site, call = self._observation.site_here(), self._observation.call
        return Place(None if call is None else call.op.name, site.module, site.location)

    def before(self, call: Call) -> _Step:
        """Note a call of a patched function."""
        rule, site = call.op.rule, call.site
        why = [f"{rule.policy.value} by {rule.target!r} in {located(rule.origin)}"]
        given = [found for module in call.modules if (found := self._precisions.get(module)) is not None]
        why += [f"its module has the precision {given[-1].value}"] if given else []
        # In a backward pass a checkpoint computes again.
        phase = "forward" if current_graph_task() == -1 else "recomputation"
        step = _Step(call.op.name, phase, site.module, site.location, casting=call.casting, why=tuple(why))
        self._running.append(step)
        return step

    def after(self, call: Call, state: _Step, result: Any) -> None:
        """Note what a call returned."""
        self._running.remove(state)
        state.take(result)
        self.steps.append(state)

    def failed(self, call: Call, state: _Step, error: BaseException) -> None:
        """Forget a call. A checkpoint ends its second pass by an error."""
        self._running.remove(state)

    def look(self, op: Op, results: Any) -> None:
        """Note an operator."""
        outputs = _floating(results)
        if op.phase == "backward" or not outputs or op.is_empty or op.is_recorded or op.name in _CASTS:
            return
        if self._running:
            step = self._running[-1]
        else:
            step = _Step(op.name, op.phase, op.place.module, op.place.location)
            step.take(results)
            self.steps.append(step)
        step.computed = outputs[0].dtype
        step.kernels.append(op.name)


def _compare(training: _Pass, other: _Pass, name: str, *, bits: bool = True) -> ComparedPath:
    """Compare a path with the training pass."""
    expected: dict[tuple[Any, ...], list[_Step]] = defaultdict(list)
    for step in training.steps:
        expected[step.key].append(step)
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    dtype_found = bits_found = reason = None
    for step in other.steps:
        # What a checkpoint computes again is compared like its first call.
        number = counts[step.phase, step.key]
        counts[step.phase, step.key] += 1
        if number >= len(expected[step.key]):
            if step.module is not None and reason is None:
                reason = f"training does not have {step.name}{where(step.module, step.location)}"
            continue
        before = expected[step.key][number]
        if dtype_found is None and (step.dtype is not before.dtype or _computed_apart(before, step)):
            dtype_found = _difference(before, step)
        if bits and bits_found is None and step.digest != before.digest:
            bits_found = _difference(before, step)
    failed = other.incomplete
    if len(training.outputs) != len(other.outputs):
        failed = f"it has {len(other.outputs)} floating outputs, and training {len(training.outputs)}"
    for (dtype, digest), (found, found_digest) in zip(training.outputs, other.outputs, strict=False):
        output = Difference("output", None, None, dtype_name(dtype), dtype_name(found), reason)
        dtype_found = dtype_found or (output if found is not dtype else None)
        bits_found = bits_found or (output if bits and found_digest != digest else None)
    # Other bits come of another dtype.
    return ComparedPath(name, dtype_found, None if dtype_found is not None else bits_found, failed)


def _computed_apart(before: _Step, step: _Step) -> bool:
    """Whether both calls are known to compute in different dtypes."""
    return None not in (before.computed, step.computed) and before.computed is not step.computed


def _difference(before: _Step, step: _Step) -> Difference:
    expected, found, reasons = before.dtype, step.dtype, []
    if before.casting is not step.casting:
        reasons.append(f"casts are {_ON[step.casting]} here and {_ON[before.casting]} in training")
    if expected is found and _computed_apart(before, step):
        expected, found = before.computed, step.computed
        reasons.append("computed in these dtypes, with a result of one dtype")
    if expected is found and before.kernels != step.kernels:
        reasons.append(f"torch runs {', '.join(step.kernels)} here, and {', '.join(before.kernels)} in training")
    reason = "; ".join([*reasons, *before.why]) or None
    return Difference(step.name, step.module, step.location, dtype_name(expected), dtype_name(found), reason)


class ConsistencyCheck:
    """Runs a model on each path; see `autoamp.Handle.consistency`.

    Args:
        model: The model.
        args: What it is called with.
        kwargs: What it is called with by name.
        observation: Knows where calls are made.
        precisions: Which modules run in a precision of their own.
        overflows: Runs models so that nothing is recorded or left behind.
        inference: ``handle.inference``.
    """

    def __init__(
        self,
        model: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        observation: Observation,
        precisions: ModulePrecisions,
        overflows: OverflowTrace,
        inference: Callable[[Module], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._model = model
        self._given = args, kwargs
        self._observation = observation
        self._overflows = overflows
        self._inference = inference
        self._listener = _Listener(observation, precisions)

    def run(self, observe: Callable[[Observer], Watch], backend: Any) -> Consistency:
        """Compare all paths.

        Args:
            observe: Starts an observer.
            backend: That of torch.compile; None to leave compiled code out.
        """
        with observe(self._listener), self._overflows.apart() as state, self._observation.only(self._listener):
            state.keep(self._model)
            self._restore = [state.restore]
            with self._restored():
                training, tape = self._taped(self._call)
            # What a path without a tape writes is what this one wrote.
            self._restore.append(tape.undo)
            paths = [self._compared(training, *path) for path in self._eager_paths()]
            paths[-1] = self._with_packed_weights(training, paths[-1])
            with ThreadPoolExecutor(1) as thread:
                paths.append(thread.submit(self._compared, training, _THREAD, self._call, True).result())
        if backend is not None:
            paths.append(self._compiled(training, backend))
        return Consistency(tuple(paths))

    def _eager_paths(self) -> Iterator[tuple[str, Callable[[], Any], bool]]:
        """Return the paths with the names, and whether bits are compared."""
        yield "no_grad", torch.no_grad()(self._call), True
        yield "inference_mode", torch.inference_mode()(self._call), True
        # Without dropout, and with the running statistics of a batch norm.
        yield "eval", torch.no_grad()(self._evaluated), False
        yield "checkpoint(use_reentrant=False)", lambda: self._checkpointed(reentrant=False), True
        yield "checkpoint(use_reentrant=True)", lambda: self._checkpointed(reentrant=True), True
        yield _INFERENCE, self._inferred, True

    def _call(self) -> Any:
        args, kwargs = self._given
        return self._model(*args, **kwargs)

    def _evaluated(self) -> Any:
        self._model.eval()
        return self._call()

    def _inferred(self) -> Any:
        with torch.no_grad(), self._inference(self._model):
            return self._call()

    def _checkpointed(self, *, reentrant: bool) -> Any:
        """Call the model within a checkpoint, and run the backward pass, in which it is called again.

        The parameters of the call are others on the same memory: no gradient of the model's is touched, and no hook
        that waits for one runs.
        """
        args, kwargs = map_tensors(self._given, lambda one: one.detach().requires_grad_(one.requires_grad))
        params: dict[str, Tensor] = {
            name: Parameter(one.detach(), one.requires_grad) for name, one in self._model.named_parameters()
        }
        # The backward pass of a reentrant checkpoint needs an argument with gradients.
        root = torch.zeros((), requires_grad=True)

        def call(root: Tensor, *args: Any) -> Any:
            # A result that is a buffer of the model must not get the checkpoint's node.
            return map_tensors(torch.func.functional_call(self._model, params, args, kwargs), Tensor.clone)

        outputs = checkpoint(call, root, *args, use_reentrant=reentrant)
        sums = [output.sum(dtype=torch.float32) for output in _floating(outputs) if output.requires_grad]
        # By the root alone the outputs of a reentrant checkpoint require gradients, and its backward pass raises.
        if sums and any(one.requires_grad for one in iter_tensors((args, kwargs, params))):
            # So that a model which counts its calls does not differ for that in the second one.
            with undisturbed():
                self._put_back()
            torch.stack(sums).sum().backward()
        return outputs

    def _taped(self, run: Callable[[], Any]) -> tuple[_Pass, Tape]:
        """Run a path on a tape, and undo what it wrote."""
        self._listener.steps = []
        with record(self._listener.where, look=self._listener.look, limit=math.inf) as tape:
            try:
                outputs = _summary(run())
            finally:
                tape.undo()
        return _Pass(self._listener.steps, outputs, tape.incomplete), tape

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        for restore in self._restore:
            restore()

    def _compared(self, training: _Pass, name: str, run: Callable[[], Any], bits: bool) -> ComparedPath:
        try:
            with self._restored():
                found = _compare(training, self._taped(run)[0], name, bits=bits)
            return replace(found, failed=found.failed or training.incomplete)
        except Exception as error:
            return ComparedPath(name, failed=_told(error))

    def _with_packed_weights(self, training: _Pass, taped: ComparedPath) -> ComparedPath:
        """Compare the outputs of `autoamp.Handle.inference`, which packs no weights while a tape is recorded."""
        if taped != ComparedPath(taped.name):
            return taped
        with self._restored():
            outputs = _Pass(outputs=_summary(self._inferred()))
        found = _compare(training, outputs, taped.name)
        return found if found.bits is None else replace(found, bits=replace(found.bits, reason=_PACKED))

    def _compiled(self, training: _Pass, backend: Any) -> ComparedPath:
        """Compare the dtypes of compiled code: those of its outputs, and where these differ those of its graph."""
        graphs: list[torch.fx.GraphModule] = []

        def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        args, kwargs = self._given
        try:
            with self._restored(), self._overflows.apart(hooked=False):
                found = _Pass(outputs=_summary(torch.compile(self._model, backend=backend)(*args, **kwargs)))
            result = _compare(training, found, "torch.compile", bits=False)
            if result.dtype is None:
                return result
            with self._restored(), self._overflows.apart(hooked=False):
                torch.compile(self._model, backend=look)(*args, **kwargs)
        except Exception as error:
            return ComparedPath("torch.compile", failed=_told(error))
        return replace(result, dtype=_in_graphs(training, graphs) or replace(result.dtype, reason=_CASTS_AGAIN))


def _summary(outputs: Any) -> list[tuple[torch.dtype, bytes]]:
    return [(output.dtype, _digest(output)) for output in _floating(outputs)]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _in_graphs(training: _Pass, graphs: list[torch.fx.GraphModule]) -> Difference | None:
    """Return the first call in a graph of torch.compile whose dtype the training pass does not have at its line."""
    dtypes = defaultdict(set)
    for step in training.steps:
        dtypes[step.location].add(step.dtype)
    for node in (node for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")):
        value, frames = node.meta.get("example_value"), re.findall(r'File "(.+)", line (\d+)', node.stack_trace or "")
        if not frames or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        location = shown_line(frames[-1][0], int(frames[-1][1]))
        there = dtypes.get(location, {value.dtype})
        if value.dtype not in there:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            expected = dtype_name(next(iter(there)))
            return Difference(name, None, location, expected, dtype_name(value.dtype), "torch.compile traced it so")
    return None
