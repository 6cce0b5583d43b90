"""Master weights: an fp32 copy of every half parameter that an optimizer steps in its place.

The optimizer's groups have the masters, the model has the half parameters. A backward pass leaves gradients in half
precision; one multi-tensor pass copies them up, and from then on a half parameter and its master share one fp32
gradient (torch's `Tensor.grad_dtype` allows it): clipping or clearing the one is clipping or clearing the other, and
further backward passes add up in fp32. After a step one multi-tensor pass copies the masters down. Gradients that
nothing has to unscale or check wait for that until somebody looks, and if nobody does, the step copies them up and the
masters down part by part (`autoamp.stepping.half_gradients`).

Masters win. What is written into a half parameter afterwards reaches its master where torch tells of the write: by the
parameter's version, or by the address of its data. A write through ``.data`` is not told of, and the next step undoes
it; a write into a master by whatever way stays. Until the first step it is the other way round, since programs load
and broadcast weights through ``.data`` before they train: a hash of the half values tells whether they were written to.
Nothing of this waits for the device.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp import kernels
from autoamp.scaling import (
    ClippedFactor,
    DeviceFactor,
    Factor,
    GradientLayout,
    Workspace,
    check_,
    has_shards,
    is_sharded,
    limit_of,
    local_of,
    multiply_,
    total_norm,
    widened,
)
from autoamp.stepping.attach import AttachedMethod
from autoamp.stepping.direct_steps import step_directly
from autoamp.stepping.fused_steps import step_by_kernels
from autoamp.stepping.half_gradients import (
    LeftHalf,
    ScaledHalf,
    as_they_are,
    awaited,
    conceal,
    is_scaled,
    leave,
    parts_of_groups,
    raw_grad,
    reads_half,
    register,
    settle,
    steps_by_parts,
    true_values,
)
from autoamp.stepping.links import Link, agree, check_shapes, equalised, follow, linked, release_master
from autoamp.stepping.replicas import WRAPPERS, Replica, Sync, several_processes
from autoamp.tensors import HALF_DTYPES, without_grad

__all__ = ["MasterWeights", "fit_state"]

log = logging.getLogger(__name__)


_HALF, _NONE, _PLAIN, _LEFT = (frozenset(some) for some in (HALF_DTYPES, {type(None)}, {Tensor}, {LeftHalf}))
_dtype_of, _requires_grad = operator.attrgetter("dtype"), operator.attrgetter("requires_grad")
_first = operator.itemgetter(0)
# Torch's own, whatever a program puts in its place later.
_ZERO_GRAD = torch.optim.Optimizer.zero_grad

# So many elements of gradients may be widened at once: each part costs a launch.
_SMALL = 2**17

# Marks a gradient that a half parameter shares with its master. Where the master's is another one by now, or none, the
# master was cleared or written to, and the half parameter's is of an earlier step.
_SHARED = "_autoamp_shared"


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: Its groups' half parameters are replaced by masters, now and whenever a group is added. State that
            belongs to a half parameter goes over to its master. ``optimizer.zero_grad()`` clears both their gradients.
        originals: fp32 values by ``id(parameter)``, of parameters that were in fp32 before: their masters start from
            these, not from the rounded ones.
    """

    def __init__(self, optimizer: Any, originals: Mapping[int, Tensor] | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._originals = originals or {}
        self._pairs: dict[int, tuple[Tensor, Link]] = {}
        self._columns: _Columns | None = None
        # Whether `begin_pass` is called before each backward pass; and whether no gradient was there when looked last.
        self._told = self._empty = False
        # The parameters of the optimizer's groups when they were adopted last.
        self._adopted: list[list[Tensor]] = []
        # Whether `_is_usual` looked, before the backward pass, at what that does not change; and of which all wait.
        self._looked = False
        self._left: _Columns | None = None
        self._hooks: dict[int, Any] = {}
        # Half parameters outlive an optimizer that is dropped.
        weakref.finalize(self, _remove_all, self._hooks).atexit = False
        self._aside = _Aside()
        self._replicated: list[_Replicated] = []
        # Half parameters that the running step has set to their masters already, by id.
        self._done: set[int] = set()
        # What makes true gradients of those that wait; None where they are true.
        self._factor: Factor | None = None
        # Which norm the next pass that looks at gradients is to take as well; and that, its factor, and of which.
        self._wanted_norm: float | None = None
        self._known_norm: tuple[float | None, Factor, list[int], Tensor] | None = None
        self._workspace = Workspace()
        self._widen_later = weakref.WeakMethod(self.widen)
        self._asked = (-1, -1)
        self.writes_seen = 0
        # Weakly, since what stands at the optimizer's methods refers to this object.
        self._attached: list[weakref.ref[AttachedMethod]] = []
        self.adopt()
        self._watching = WRAPPERS.watch(self)
        for method, instead in (("zero_grad", self._clear), ("add_param_group", self._add_group)):
            if callable(getattr(optimizer, method, None)):
                self._attached.append(weakref.ref(AttachedMethod(optimizer, method, instead)))

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each half parameter with its master, in the order in which they were adopted."""
        return [(half, link.master) for half, link in self._pairs.values()]

    def adopt(self, originals: Mapping[int, Tensor] | None = None) -> None:
        """Give every half parameter in the optimizer's groups a master; ``originals`` as for the object."""
        self._originals = originals or self._originals
        optimizer: Any = self._optimizer()
        self._adopt(optimizer)
        self._adopted = [list(group["params"]) for group in optimizer.param_groups]

    def _is_adopted(self) -> bool:
        """Tell whether the optimizer's groups have the parameters that were adopted last."""
        optimizer: Any = self._optimizer()
        groups, adopted = optimizer.param_groups, self._adopted
        return len(groups) == len(adopted) and all(
            len(group["params"]) == len(params) and all(map(operator.is_, group["params"], params))
            for group, params in zip(groups, adopted, strict=True)
        )

    def _adopt(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            params = group["params"]
            if _HALF.isdisjoint(map(_dtype_of, params)):
                continue
            for index, parameter in enumerate(params):
                if parameter.dtype in HALF_DTYPES:
                    with torch.no_grad():
                        params[index] = master = self._master(parameter)
                        _move_state(optimizer, parameter, master)

    def of(self, parameter: Any) -> Any:
        """Return what the optimizer steps for a parameter of the model: its master, or the parameter itself."""
        pair = self._pairs.get(id(parameter))
        return parameter if pair is None else pair[1].master

    def holder_of(self, parameter: Tensor) -> Tensor:
        """Return the tensor that holds the gradient of what the optimizer steps: the half one where a master waits."""
        if type(parameter) is not LeftHalf:
            return parameter
        half: Tensor = self._listed().of_master.get(id(parameter), parameter)
        return half

    def _master(self, parameter: Tensor) -> Tensor:
        link = linked(parameter, self._originals.get(id(parameter)))
        # None: of any dtype. What backward makes is half, as DistributedDataParallel's buckets want it.
        parameter.grad_dtype = None
        register(parameter, link.master, self._widen_later)
        self._pairs[id(parameter)] = (parameter, link)
        self._columns = None
        return link.master

    def collect(self, *, last: bool = False) -> None:
        """Make ready for what needs gradients: called when a block begins, when it ends, and before a step.

        The first time after a DistributedDataParallel was made it is a collective.

        Args:
            last: Whether nothing but a step is to come, as far as is known, so that half gradients may wait for that.
        """
        self.share_gradients(last=last)
        if self._asked != (WRAPPERS.seen, len(self._pairs)):
            self._equalise()

    @without_grad
    def share_gradients(self, *, last: bool = False) -> None:
        """Let each half parameter and its master have one fp32 gradient, or with ``last`` see to it that it can wait.

        ``zero_grad()`` on the model or ``p.grad = None`` has cleared the half parameter, or the master: the other one
        follows.
        """
        if not (last and self._is_adopted()):
            self.adopt()
        if self._factor is not None:
            if last and self._all_conceal():
                return
            self.widen()
        if self._is_usual(last=last):
            return
        fresh, hooked = [], self._is_hooked()
        for half, link in self._pairs.values():
            master = link.master
            if type(master) is LeftHalf:
                settle(master)
            if half.requires_grad is not master.requires_grad:
                master.requires_grad_(half.requires_grad)
            if hooked:
                self._hook(half, master)
            _drop_old(half, master)
            if half.grad is None and master.grad is not None and not hasattr(master.grad, _SHARED):
                # Somebody gave the master a gradient of his own.
                _share(half, master, master.grad)
            elif half.grad is not None and half.grad.dtype in HALF_DTYPES:
                fresh.append((half, master))
            elif half.grad is not master.grad:
                _share(half, master, half.grad)
        if last and fresh and self._can_wait():
            left = [pair for pair in fresh if leave(*pair)]
            if len(left) == len(fresh):
                self._listed().layout.learn([half.grad for half, _ in left], True)  # type: ignore[misc]
            fresh = [pair for pair in fresh if type(pair[1]) is not LeftHalf]
        _widen(fresh)
        for half, master, earlier in self._aside.take():
            _share(half, master, earlier if master.grad is None else earlier.add_(master.grad))

    def rely_on_passes(self, told: bool) -> None:
        """Take note whether `begin_pass` is called before each backward pass from now on."""
        self._told = told
        if told:
            _remove_all(self._hooks)
            self._hooks.clear()
        else:
            self._hook_all()

    def begin_pass(self) -> None:
        """Look after gradients that are there while a backward pass adds to them.

        For most passes none are there. A hook of each half parameter would cost all of them some microseconds each.
        """
        if not (self._empty or self._is_hooked()) and any(
            grad is not None for grad in map(raw_grad, self._listed().halves)
        ):
            self._hook_all()

    def _is_hooked(self) -> bool:
        return bool(self._hooks) or not self._told

    def _hook_all(self) -> None:
        for half, link in self._pairs.values():
            self._hook(half, link.master)

    def _hook(self, half: Tensor, master: Tensor) -> None:
        if half.requires_grad and id(half) not in self._hooks:
            # In a backward pass outside of any block this is the last moment to tell old gradients from new ones.
            self._hooks[id(half)] = half.register_hook(_arriving(half, master, self._aside))

    def _listed(self) -> _Columns:
        """Return the pairs as parallel lists."""
        if self._columns is None:
            pairs = self._pairs.values()
            self._columns = _Columns([half for half, _ in pairs], [link.master for _, link in pairs])
        return self._columns

    def _is_usual(self, *, last: bool) -> bool:
        """Do what `share_gradients` does where the gradients are as in most steps; tells whether they are.

        None is there, or with ``last`` those of the half parameters alone, which are like those that waited before.
        """
        columns = self._listed()
        empty, self._empty = self._empty, False
        halves, masters = columns.halves, columns.masters
        grads = list(map(raw_grad, halves))
        present = [grad for grad in grads if grad is not None]
        left, self._left = self._left, None
        if (
            last
            and left is columns
            and len(present) == len(grads)
            and _LEFT.issuperset(map(type, masters))
            and columns.layout.recall(present)
        ):
            # They wait since the block, and are as they were then.
            self._left = columns
            return True
        looked, self._looked = last and self._looked, False
        if (
            self._replicated
            or not (looked or self._requires_alike(halves, masters))
            or not _NONE.issuperset(map(type, map(raw_grad, masters)))
        ):
            return False
        self._looked = not last
        if not present and _PLAIN.issuperset(map(type, masters)):
            self._empty = True
            return True
        if present and not (
            last
            and columns.layout.recall(present)
            and self._can_wait()
            and (empty or not any(map(hasattr, present, itertools.repeat(_SHARED))))
        ):
            return False
        for master, grad in zip(masters, grads, strict=True):
            if grad is not None:
                master.__class__ = LeftHalf
            elif type(master) is LeftHalf:
                settle(master)
        self._left = columns if last and len(present) == len(grads) else None
        return True

    def _requires_alike(self, halves: list[Tensor], masters: list[Any]) -> bool:
        """Tell whether masters want gradients where half parameters do, and those have the hooks that they need."""
        requires = list(map(_requires_grad, halves))
        hooks = sum(requires) if self._is_hooked() else 0
        return requires == list(map(_requires_grad, masters)) and hooks == len(self._hooks)

    def _all_conceal(self) -> bool:
        """Tell whether all gradients wait with their scale, and no other ones are there."""
        columns = self._listed()
        return all(
            (grad is None) if type(master) is Tensor else type(grad) is ScaledHalf and type(master) is LeftHalf
            for master, grad in zip(columns.masters, map(raw_grad, columns.halves), strict=True)
        ) and _NONE.issuperset(map(type, map(raw_grad, columns.masters)))

    @property
    def waits_scaled(self) -> bool:
        """Whether gradients that wait have their scale still."""
        return self._factor is not None

    @without_grad
    def check_waiting(self, factor: Factor, flag: Callable[[torch.device], Tensor]) -> list[Tensor] | None:
        """Look for inf and nan in gradients that wait and are scaled, and let them wait on, if all can.

        Args:
            factor: What makes true gradients of them.
            flag: Gives a tensor for what is found; see `autoamp.scaling.unscale_`.

        Returns:
            Flags as `autoamp.scaling.unscale_` returns them. None where none wait or one cannot, and nothing was done.
        """
        if not self._can_wait_scaled():
            return None
        waiting: list[Any] = [half.grad for half, _ in self._waiting]
        if not _are_simple(waiting):
            return None
        wanted, self._wanted_norm = self._wanted_norm, None
        found, norm = check_(waiting, flag, wanted, factor)
        conceal(waiting, self._widen_later, factor)
        self._factor = factor
        self._known_norm = None if norm is None else (wanted, factor, list(map(id, waiting)), norm)
        return found

    @torch.no_grad()
    def waiting_norm(self, norm_type: float) -> Tensor | None:
        """Return the norm of the gradients that wait, as `total_norm` does, and let them wait on.

        From the next block on the pass that looks for inf and nan gives it too, where a compiled kernel does that.

        Returns:
            None where no gradient waits, or they cannot be clipped as they are. Then they are to be widened.
        """
        waiting: list[Any] = [half.grad for half, _ in self._waiting]
        if (
            norm_type not in (2.0, math.inf)
            or not self._can_wait_scaled()
            or any(grad is None or is_scaled(grad) is (self._factor is None) for grad in waiting)
        ):
            return None
        with as_they_are(waiting if self._factor is not None else []):
            if not _are_simple(waiting):
                return None
            self._wanted_norm = norm_type
            known, ids = self._known_norm, list(map(id, waiting))
            if known is not None and known[0] == norm_type and known[1] is self._factor and known[2] == ids:
                return known[3]
            return total_norm(waiting, norm_type, factor=self._factor)

    @torch.no_grad()
    def clip_waiting(self, coefficient: Tensor) -> None:
        """Let gradients that wait, of which `waiting_norm` gave the norm, count as multiplied by a coefficient."""
        waiting = [half.grad for half, _ in self._waiting]
        if waiting:
            self._factor = ClippedFactor(self._factor, coefficient)
            conceal(waiting, self._widen_later, self._factor)

    def _takes_halves(self) -> bool:
        optimizer = self._optimizer()
        return steps_by_parts(optimizer) or reads_half(optimizer)

    def _can_wait_scaled(self) -> bool:
        # Of replicas gradients may be views of the reducer's buckets.
        return not self._replicated and self._takes_halves()

    def _can_wait(self) -> bool:
        # Ranks agree on gradients as they are: in fp32.
        return self._takes_halves() and not several_processes() and not torch.compiler.is_compiling()

    @property
    def _waiting(self) -> list[tuple[Tensor, Tensor]]:
        """The half parameters whose gradients wait, with their masters."""
        return [(half, link.master) for half, link in self._pairs.values() if type(link.master) is LeftHalf]

    @torch.no_grad()
    def widen(self) -> None:
        """Let each half parameter whose gradient waits, and its master, have that in fp32."""
        fresh = []
        factor, self._factor = self._factor, None
        if factor is not None:
            self._unscale_waiting(factor)
        for half, master in self._waiting:
            settle(master)
            if half.grad is not None and half.grad.dtype in HALF_DTYPES:
                fresh.append((half, master))
            else:
                # It was cleared, or somebody gave the half parameter one of his own.
                _share(half, master, half.grad)
        _widen(fresh)

    def _unscale_waiting(self, factor: Factor) -> None:
        """Let gradients that wait with their scale have their true values in fp32."""
        waiting: list[tuple[Tensor, Any]] = [(half, half.grad) for half, _ in self._waiting if is_scaled(half.grad)]
        for some in _parts(waiting):
            true_values([grad for _, grad in some], factor)

    def step(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what torch calls in the end as an optimizer's step, hooks left behind, by half gradients if they wait.

        Args:
            inner: Called with the optimizer and further arguments, once or for one part after the other.
            args: The positional arguments, the optimizer first.
            kwargs: The keyword arguments.
        """
        optimizer, own = args[0], self._optimizer()
        plain = len(args) == 1 and not any(value is not None for value in kwargs.values())
        if not plain or not _same(optimizer, own):
            return inner(*args, **kwargs)
        by_halves = reads_half(optimizer)
        if not by_halves and (
            not steps_by_parts(optimizer) or any(group.get("differentiable") for group in optimizer.param_groups)
        ):
            return inner(*args, **kwargs)
        if by_halves and self._factor is not None and _has_other_halves(optimizer):
            self.widen()
        if self._factor is None:
            return self._step_as_they_are(inner, optimizer, by_halves)
        with as_they_are([grad for half, _ in self._waiting if is_scaled(grad := half.grad)]):
            return self._step_as_they_are(inner, optimizer, by_halves)

    def _step_as_they_are(self, inner: Any, optimizer: Any, by_halves: bool) -> Any:
        """Do for `step` what is left once gradients that are scaled still may be read."""
        if by_halves:
            return self._step_by_halves(inner, optimizer, self._waiting)
        stepped, left = self._step_by_kernels(optimizer)
        if not left:
            return None
        if stepped or _LEFT.intersection(map(type, self._listed().masters)):
            return self._step_by_parts(inner, optimizer, stepped)
        return None if step_directly(optimizer) else inner(optimizer)

    def _step_by_kernels(self, optimizer: Any) -> tuple[set[int], bool]:
        """Step what compiled kernels take; returns the ids of these masters, and whether others have gradients."""
        if not any(map(kernels.opened, self._listed().device_types)):
            return set(), True
        of_master = self._listed().of_master
        stepped, left = step_by_kernels(optimizer, of_master, self._factor)
        done = set(map(id, stepped))
        pairs = self._pairs
        if not done.issuperset(of_master):
            pairs = {id(half): pairs[id(half)] for key, half in of_master.items() if key in done}
        agree(pairs.values())
        self._done.update(pairs)
        return done, left

    def _step_by_halves(self, inner: Any, optimizer: Any, waiting: list[tuple[Tensor, Tensor]]) -> Any:
        """Step an optimizer that takes the half gradients themselves, and may write the halves in the same pass."""
        for half, master in waiting:
            settle(master)
            master.grad = half.grad
        optimizer.half_copies = copies = {id(link.master): half for half, link in self._pairs.values()}
        optimizer.half_factor = self._factor
        try:
            return inner(optimizer)
        finally:
            del optimizer.half_copies, optimizer.half_factor
            for half, link in self._pairs.values():
                if id(link.master) not in copies:
                    link.agree(half)
                    self._done.add(id(half))
            for half, master in waiting:
                master.grad = None
                leave(half, master)

    @without_grad
    def _step_by_parts(self, inner: Any, optimizer: Any, stepped: set[int]) -> Any:
        """Widen some of the gradients, step their masters and copy these down, and then the next, for as many as wait.

        Those whose ids are in ``stepped`` are left out.

        Each part is done while it is in the processor's cache, and one part's gradients alone are there in fp32.
        """
        divisor = self._divisor(optimizer)
        if not stepped and self._listed().is_one_part():
            return self._step_part(inner, optimizer, list(self._pairs.values()), 0, divisor)
        groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
        of_master = {id(link.master): (half, link) for half, link in self._pairs.values()}
        result = None
        try:
            for place, part in enumerate(list(parts_of_groups(groups, stepped))):
                optimizer.param_groups = [group for group, _ in part]
                for group, params in part:
                    group["params"] = params
                pairs = [pair for _, params in part for param in params if (pair := of_master.get(id(param)))]
                result = self._step_part(inner, optimizer, pairs, place, divisor)
        finally:
            optimizer.param_groups = groups
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
        return result

    def _divisor(self, optimizer: Any) -> Tensor | None:
        """Return what a fused optimizer divides gradients by itself while it steps; None where they have no scale."""
        factor, devices = self._factor, self._listed().devices
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if factor is None or not fused or len(devices) > 1 or hasattr(optimizer, "grad_scale"):
            return None
        if isinstance(factor, ClippedFactor):
            # A quotient by its reciprocal would be rounded twice.
            return None
        (device,) = devices
        if isinstance(factor, DeviceFactor):
            return factor.on(device, torch.float32).reciprocal()
        # By a power of 2 quotients are products, bit for bit.
        exact = math.frexp(factor)[0] == 0.5
        return torch.full((), 1.0 / factor, dtype=torch.float32, device=device) if exact else None

    def _step_part(
        self, inner: Any, optimizer: Any, pairs: list[tuple[Tensor, Link]], place: int, divisor: Tensor | None
    ) -> Any:
        """Widen the gradients that wait among these, step the optimizer and copy the masters down."""
        waiting: list[tuple[Any, Any]] = [
            (half.grad, link.master) for half, link in pairs if type(link.master) is LeftHalf
        ]
        wide = self._workspace.widened([grad for grad, _ in waiting], place)
        for (_, master), grad in zip(waiting, wide, strict=True):
            master.__class__ = Tensor
            master.grad = grad
        given = (raw_grad(param) for group in optimizer.param_groups for param in group["params"])
        if divisor is not None and sum(grad is not None for grad in given) == len(waiting):
            optimizer.grad_scale = divisor
        elif self._factor is not None:
            # Others are among them, which have no scale.
            multiply_(wide, self._factor)
        del wide
        try:
            result = None if step_directly(optimizer) else inner(optimizer)
        finally:
            if divisor is not None:
                vars(optimizer).pop("grad_scale", None)
            for _, master in waiting:
                master.grad = None
                master.__class__ = LeftHalf
        _copy_down(pairs)
        self._done.update(map(id, map(_first, pairs)))
        return result

    @without_grad
    def before_backward(self) -> None:
        """Get gradients ready for the reducer of torch's DistributedDataParallel.

        Called within a block, before its backward pass. Gradients add up in fp32. The reducer averages all that it
        finds in ``.grad``, and takes the parameter's dtype alone. So fp32 sums that were averaged already are put aside
        until the pass is over, and those that ``no_sync`` left, which are yet to be averaged, go to half precision.
        """
        for part in self._replicated:
            present = [half for half, _ in part.pairs if half.grad is not None]
            sync = part.replica.sync()
            if sync is Sync.YES and not part.unreduced:
                self._aside.wanted.update(map(id, present))
            elif sync is not Sync.NO:
                _narrow(present)
            part.unreduced = sync is not Sync.YES
        # The flat parameters of FullyShardedDataParallel have gradients of their own dtype too.
        if several_processes():
            _narrow([half for half, _ in self._pairs.values() if hasattr(half, "_fsdp_flattened")])

    @torch.no_grad()
    def _equalise(self) -> None:
        """Broadcast the masters with which a DistributedDataParallel was made since this was asked last."""
        self._asked = (WRAPPERS.seen, len(self._pairs))
        self._replicated = []
        left = dict(self._pairs)
        # Of several around one parameter the newest counts: one from before may not be collected yet.
        for replica in reversed(list(WRAPPERS)):
            pairs = [left.pop(id(param)) for param in replica.parameters() if id(param) in left]
            stale = [(half, link) for half, link in pairs if not link.is_equal_by(replica.wrapper)]
            if stale:
                with equalised([half for half, _ in stale], replica.wrapper) as masters:
                    replica.broadcast(masters)
            self._replicated.append(_Replicated(replica, pairs))

    def clear(self) -> None:
        """Let go of the gradients of all that the optimizer steps, and of the half parameters."""
        self.adopt()
        self._factor = None
        for half, link in self._pairs.values():
            if type(link.master) is LeftHalf:
                settle(link.master)
            half.grad = link.master.grad = None
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _clear(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stand in for ``optimizer.zero_grad``, which knows the masters alone: half parameters let go as well."""
        optimizer: Any = self._optimizer()
        drops = type(optimizer).zero_grad is _ZERO_GRAD and (args[0] if args else kwargs.get("set_to_none", True))
        for half, master in self._waiting:
            settle(master)
            if not drops:
                master.grad = half.grad
        original(*args, **kwargs)
        if not self._is_adopted():
            self.adopt()
        columns = self._listed()
        for half, master in zip(columns.halves, columns.masters, strict=True):
            if half.grad is not None:
                half.grad = master.grad

    def _add_group(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stand in for ``optimizer.add_param_group``: what is loaded next finds the masters there."""
        original(*args, **kwargs)
        self.adopt()

    def begin_step(self, *, local: bool = False) -> None:
        """Let masters take over what was written into the half parameters; from here on they win.

        Args:
            local: Whether no other process has the same parameters.
        """
        written = follow(self._pairs.values(), first_step=True, local=local)
        if written:
            self.writes_seen += 1
            # A program that clips its weights does so at each step; powers of two keep the log short.
            if self.writes_seen & (self.writes_seen - 1) == 0:
                log.warning(
                    "%d half parameters were written to since the last step; their masters follow (seen %d times)",
                    written,
                    self.writes_seen,
                )

    @torch.no_grad()
    def follow(self) -> None:
        """Let masters take over what torch tells was written into the half parameters."""
        follow(self._pairs.values())

    @torch.no_grad()
    def read_model(self) -> None:
        """Set each master to its half parameter, however that was written to. Elements that agree keep their low bits.

        Not in a group of several processes: there all of a master is read, so that all processes have the same.
        """
        for half, link in self._pairs.values():
            link.read(half, whole=several_processes() and not is_sharded(half))

    @without_grad
    def copy_down(self) -> None:
        """Write the masters into the half parameters, in one multi-tensor pass, but for those that a step has done."""
        done, self._done = self._done, set()
        if len(done) < len(self._pairs):
            _copy_down([pair for key, pair in self._pairs.items() if key not in done])

    @torch.no_grad()
    def dissolve(self, only: Iterable[Tensor] | None = None) -> None:
        """Undo everything: the parameters get the masters' fp32 values, and their places in the optimizer back.

        Args:
            only: The parameters that are meant. Where others are left the rest stays in place.
        """
        chosen = self._pairs.keys() if only is None else self._pairs.keys() & set(map(id, only))
        self.share_gradients()
        pairs = [self._pairs[key] for key in self._pairs if key in chosen]
        follow([(half, link) for half, link in pairs if half.shape == link.master.shape], local=True)
        for half, link in pairs:
            grad, half.grad = half.grad, None
            half.data = link.master.data if half.shape == link.master.shape else half.data.float()
            half.grad = grad
            _replace_in_groups(self._optimizer(), link.master, half)
            release_master(half)
            self._pairs.pop(id(half))
            self._columns = None
            hook = self._hooks.pop(id(half), None)
            if hook is not None:
                hook.remove()
        if not self._pairs or only is None:
            for reference in self._attached:
                attached = reference()
                if attached is not None:
                    attached.detach()
            self._attached.clear()
            self._replicated.clear()
            self._watching()


def fit_state(optimizer: Any) -> None:
    """Bring an optimizer's state to the dtypes of its parameters, where these were cast after the state was made."""
    state = getattr(optimizer, "state", None)
    if isinstance(state, Mapping):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state and parameter.dtype in (torch.float32, *HALF_DTYPES):
                    _move_state(optimizer, parameter, parameter)


def _replace_in_groups(optimizer: Any, old: Tensor, new: Tensor) -> None:
    for group in optimizer.param_groups:
        # In place: some optimizers (LBFGS) refer to the list itself.
        group["params"][:] = [new if parameter is old else parameter for parameter in group["params"]]
    _move_state(optimizer, old, new)


def _move_state(optimizer: Any, old: Tensor, new: Tensor) -> None:
    """Move an optimizer's state to another parameter and its dtype, by the rule of ``Optimizer.load_state_dict``."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping) or old not in state:
        return

    def fitted(key: Any, value: Any) -> Any:
        castable = key != "step" and isinstance(value, Tensor) and value.dtype in (torch.float32, *HALF_DTYPES)
        return value.to(new.dtype) if castable else value

    state[new] = {key: fitted(key, value) for key, value in state.pop(old).items()}  # type: ignore[index,attr-defined]


@dataclass
class _Replicated:
    """Those of one optimizer's half parameters that one DistributedDataParallel keeps equal over processes.

    Attributes:
        replica: The DistributedDataParallel.
        pairs: The half parameters, with their links.
        unreduced: Whether gradients that are there may be those of this process alone, which ``no_sync`` left.
    """

    replica: Replica
    pairs: list[tuple[Tensor, Link]]
    unreduced: bool = False


class _Aside:
    """Gradients that are put aside while torch's reducer is at work.

    Attributes:
        wanted: The half parameters whose shared gradient is put aside when the next one arrives, by id. Not before: a
            ``zero_grad()`` between here and there is to be seen.
    """

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self._put: list[tuple[Tensor, Tensor, Tensor]] = []

    def put(self, half: Tensor, master: Tensor) -> None:
        """Put the shared gradient of a half parameter and its master aside, if there is one."""
        grad = half.grad
        if grad is not None and hasattr(grad, _SHARED):
            self._put.append((half, master, grad))
            half.grad = master.grad = None

    def take(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each half parameter with its master and the gradient that was put aside, and forget them."""
        put, self._put = self._put, []
        self.wanted.clear()
        return put


def _arriving(half: Tensor, master: Tensor, aside: _Aside) -> Any:
    """Return a hook for a half parameter, which runs before a gradient is added to what is there."""
    reference = weakref.ref(half)

    def arrive(_: Tensor) -> None:
        parameter = reference()
        if parameter is not None and parameter.grad is not None:
            if type(master) is LeftHalf:
                # Gradients add up in fp32.
                awaited(master)
            _drop_old(parameter, master)
            if id(parameter) in aside.wanted:
                aside.put(parameter, master)

    return arrive


class _Columns:
    """The half parameters of one optimizer and their masters, as parallel lists.

    Args:
        halves: The half parameters.
        masters: Their masters.

    Attributes:
        halves: As given.
        masters: As given.
        of_master: The half parameters, by ``id(master)``.
        devices: Their devices.
        device_types: The types of these.
        layout: What half gradients are like that can wait.
    """

    def __init__(self, halves: list[Tensor], masters: list[Any]) -> None:
        self.halves = halves
        self.masters = masters
        self.of_master = dict(zip(map(id, masters), halves, strict=True))
        self.devices = {master.device for master in masters}
        self.device_types = {device.type for device in self.devices}
        self._size = sum(map(Tensor.numel, masters))
        self.layout: GradientLayout[bool] = GradientLayout()

    def is_one_part(self) -> bool:
        """Tell whether all are so few elements that they may be widened at once."""
        return len(self.device_types) == 1 and self._size <= limit_of(self._size, on_cpu="cpu" in self.device_types)


def _remove_all(hooks: Mapping[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


def _drop_old(half: Tensor, master: Tensor) -> None:
    """Where the master's gradient was cleared or replaced, let go of the one that was shared."""
    grad = half.grad
    if grad is not None and grad is not master.grad and hasattr(grad, _SHARED):
        half.grad = master.grad


def _share(half: Tensor, master: Tensor, grad: Tensor | None) -> None:
    if grad is not None:
        setattr(grad, _SHARED, True)
    try:
        half.grad = master.grad = grad
    except RuntimeError:
        check_shapes(half, master)
        raise


def _has_other_halves(optimizer: Any) -> bool:
    """Tell whether half gradients are there besides those that wait."""
    return any(
        type(param) is not LeftHalf and (grad := raw_grad(param)) is not None and grad.dtype in _HALF
        for group in optimizer.param_groups
        for param in group["params"]
    )


def _are_simple(grads: Sequence[Tensor]) -> bool:
    """Tell whether there are gradients, no two the same, which may be read and written to one by one."""
    return bool(grads) and len(set(map(id, grads))) == len(grads) and all(map(_is_simple, grads))


def _is_simple(grad: Tensor) -> bool:
    return grad.numel() > 0 and grad.is_contiguous() and not grad.is_inference() and not grad.is_neg()


def _same(one: object, other: object) -> bool:
    return one is other


def _widen(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Widen the gradients of half parameters, which share them with their masters then."""
    for some in _parts(pairs):
        for (half, master), grad in zip(some, widened(half.grad for half, _ in some), strict=True):
            _share(half, master, grad)


def _copy_down(pairs: list[tuple[Tensor, Link]]) -> None:
    if pairs:
        try:
            halves, masters = [half for half, _ in pairs], [link.master for _, link in pairs]
            if has_shards(halves):
                halves, masters = list(map(local_of, halves)), list(map(local_of, masters))
            torch._foreach_copy_(halves, masters)
        except RuntimeError:
            for half, link in pairs:
                check_shapes(half, link.master)
            raise
    agree(pairs)


def _parts(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Split pairs, so that the half gradients of one part are gone before those of the next are widened.

    In one part all gradients would be there in both dtypes, which is when memory is shortest. Each part is half of what
    is left, the largest first: until the last part there are fewer bytes than all gradients have in fp32.
    """
    pairs = sorted(pairs, key=lambda pair: pair[0].numel(), reverse=True)
    left, begin, taken = sum(half.numel() for half, _ in pairs), 0, 0
    for end, (half, _) in enumerate(pairs):
        size = half.numel()
        if taken and left > _SMALL and taken + size > left // 2:
            yield pairs[begin:end]
            left, begin, taken = left - taken, end, 0
        taken += size
    yield pairs[begin:]


def _narrow(halves: Iterable[Tensor]) -> None:
    """Cast gradients to the dtypes of their half parameters."""
    for half in halves:
        if half.grad is not None:
            half.grad = half.grad.to(half.dtype)
