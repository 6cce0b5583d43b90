"""Master weights: an fp32 copy of every half parameter, which the optimizer steps in its place.

The optimizer's groups hold the masters, the model holds the half parameters. A backward pass leaves gradients in half
precision. At the end of a block and before a step multi-tensor copies, the largest gradients first, cast them to fp32;
a half parameter and its master have the same fp32 gradient from then on (torch's `Tensor.grad_dtype` allows it). So
clipping, clearing or replacing the gradient of one does the same to the other, and further backward passes accumulate
in fp32. After a step one multi-tensor copy rounds the masters into the half parameters.

After the first step the master weight is authoritative. A write into a half parameter reaches its master if torch
shows it: the parameter's version or the address of its data changes. Torch does not show a write through ``.data``, so
the next step reverts it. In the same way a write into a master reaches its half parameter before the next outermost
call of a module, through ``.data`` at the end of the next step. Before the first step programs load and broadcast
weights through ``.data``, so until then masters take all that differs in the half parameters. Nothing here waits for
the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autoamp.core.attach import (
    AttachedMethod,
    MasterLink,
    check_shapes,
    copy_to_params,
    equalized,
    linked,
    mark_equal,
    model_to_masters,
    release_master,
    written_masters,
)
from autoamp.core.gradients import is_sharded, local_of, several_processes, widened
from autoamp.core.ranks import Sync, broadcast, kept_equal, next_sync, watch_wrappers
from autoamp.tensors import HALF_DTYPES, without_grad
from autoamp.torch_private import current_graph_task, disable_in_dynamo

# So many elements of gradients may be cast to fp32 at once: each part costs a launch.
_SMALL = 2**17
# Torch's own, which a list may replace.
_FLOAT: Any = Tensor.float


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: Its groups' half parameters are replaced by masters, now and whenever a group is added. State that
            belongs to a half parameter moves to its master. ``optimizer.zero_grad()`` clears both their gradients.
        originals: fp32 values by ``id(parameter)``, of parameters that were in fp32 before: their masters start from
            these, not from the rounded ones.
    """

    def __init__(self, optimizer: Any, originals: Mapping[int, Tensor] | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._originals = originals or {}
        self._pairs: dict[int, tuple[Tensor, MasterLink]] = {}
        # At half parameters, by id; None where passes are seen elsewhere.
        self._hooks: dict[int, Any] | None = None
        self._stashed = _StashedGrads()
        self._replicated: list[_Replicated] = []
        self._asked: tuple[int, int] | None = None
        # Weakly, since what stands at the optimizer's methods refers to this object.
        self._attached: list[weakref.ref[AttachedMethod]] = []
        self.add_missing_masters()
        all_masters.add(self)
        self._wrappers, self._stop_watching = watch_wrappers(self)
        for method, instead in (("zero_grad", self._zero_grad), ("add_param_group", self._add_group)):
            if callable(getattr(optimizer, method, None)):
                self._attached.append(weakref.ref(AttachedMethod(optimizer, method, instead)))

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each half parameter with its master, in the order in which they were found."""
        return [(half, link.master) for half, link in self._pairs.values()]

    def add_missing_masters(self, originals: Mapping[int, Tensor] | None = None) -> None:
        """Give every half parameter in the optimizer's groups a master; ``originals`` as for the object."""
        self._originals = originals or self._originals
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            params = group["params"]
            for index, parameter in enumerate(params):
                if parameter.dtype in HALF_DTYPES:
                    with torch.no_grad():
                        link = linked(parameter, self._originals.get(id(parameter)))
                        # None: of any dtype. What backward makes is half, as DistributedDataParallel's buckets want it.
                        parameter.grad_dtype = None
                        self._pairs[id(parameter)] = (parameter, link)
                        self._hook(parameter, link)
                        params[index] = link.master
                        _move_state(optimizer, parameter, link.master)

    def get(self, parameter: Any) -> Any:
        """Return what the optimizer steps for a parameter of the model: its master, or the parameter itself."""
        pair = self._pairs.get(id(parameter))
        return parameter if pair is None else pair[1].master

    def collect(self, *, new_pass: bool = False) -> None:
        """Make gradients ready for use: called when a block begins, when it ends, and before a step.

        The first time after a DistributedDataParallel was made it is a collective.

        Args:
            new_pass: As for `share_gradients`.
        """
        self.share_gradients(new_pass=new_pass)
        if self._asked != (len(self._wrappers), len(self._pairs)):
            self._equalise()

    @without_grad
    def share_gradients(self, *, new_pass: bool = False) -> None:
        """Let each half parameter and its master have one fp32 gradient, whatever the program did to either.

        Where one of the two was cleared, written or replaced since they last had the same gradient, the other one
        follows. Where both were, the half parameter decides, unless it has no gradient and the master does.

        Args:
            new_pass: Whether a backward pass is about to begin. It starts from no gradient, or zeros, where the program
                cleared that of the half parameter, also if it had replaced that of the master before.
        """
        self.add_missing_masters()
        fresh: list[tuple[Tensor, MasterLink]] = []
        for half, link in self._pairs.values():
            master, grad = link.master, half.grad
            if half.requires_grad is not master.requires_grad:
                master.requires_grad_(half.requires_grad)
                self._hook(half, link)
            wide = master.grad
            if grad is wide and (link.shared is None if grad is None else link.shared and link.shared() is grad):
                # `MasterLink.shares` written out: this is asked of each parameter several times in each step.
                continue
            if link.shares(grad) or (grad is None and not new_pass and not link.shares(wide)):
                _share(half, link, _unless_zeroed(link, grad, wide) if new_pass else wide)
            elif grad is not None and grad.dtype in HALF_DTYPES:
                fresh.append((half, link))
            else:
                _share(half, link, grad)
        if fresh:
            _widen(fresh)
        for half, link, earlier in self._stashed.take():
            grad = link.master.grad
            _share(half, link, earlier if grad is None else earlier.add_(grad))

    @without_grad
    def begin_pass(self) -> None:
        """Get gradients ready for a backward pass that begins now; see `before_pass`."""
        # Another thread may add a group.
        for half, link in list(self._pairs.values()):
            _before_accumulation(half, link, self._stashed)

    def hear_passes(self) -> None:
        """Get gradients ready at each half parameter as a pass reaches it, whoever begins the pass.

        That is for an optimizer that may train without a handle. A handle sees `torch.autograd.backward`, once a pass.
        """
        hooks = self._hooks = {}
        # Half parameters outlive an optimizer that is dropped.
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks.values()]).atexit = False
        for half, link in self._pairs.values():
            self._hook(half, link)

    def _hook(self, half: Tensor, link: MasterLink) -> None:
        if self._hooks is not None and half.requires_grad and id(half) not in self._hooks:
            reference, stashed = weakref.ref(half), self._stashed

            def hook(_: Tensor) -> None:
                parameter = reference()
                if parameter is not None:
                    _before_accumulation(parameter, link, stashed)

            self._hooks[id(half)] = half.register_hook(hook)

    @without_grad
    def prepare_reducer(self) -> None:
        """Get gradients ready for the reducer of torch's DistributedDataParallel.

        Called as a block begins. Gradients accumulate in fp32. The reducer averages all that it finds in ``.grad``,
        and accepts the parameter's dtype only. So fp32 sums that were averaged already are stashed until the pass is
        over, and those that ``no_sync`` left, which are yet to be averaged, are cast to half.
        """
        for part in self._replicated:
            present = [half for half, _ in part.pairs if half.grad is not None]
            sync = next_sync(part.wrapper())
            if sync is Sync.YES and not part.unreduced:
                self._stashed.wanted.update(map(id, present))
            elif sync is not Sync.NO:
                _narrow(present)
            part.unreduced = sync is not Sync.YES
        # The flat parameters of FullyShardedDataParallel have gradients of their own dtype too.
        if several_processes():
            _narrow([half for half, _ in self._pairs.values() if hasattr(half, "_fsdp_flattened")])

    @torch.no_grad()
    def _equalise(self) -> None:
        """Broadcast the masters with which a DistributedDataParallel was made since this was asked last."""
        self._asked = (len(self._wrappers), len(self._pairs))
        self._replicated = []
        left = dict(self._pairs)
        # Of several around one parameter the newest counts: one from before may not be collected yet.
        for wrapper in [one for reference in reversed(self._wrappers) if (one := reference()) is not None]:
            pairs = [left.pop(id(param)) for param in kept_equal(wrapper) if id(param) in left]
            stale = [half for half, link in pairs if link.equal_by is None or link.equal_by() is not wrapper]
            if stale:
                with equalized(stale, wrapper) as masters:
                    broadcast(wrapper, masters)
            self._replicated.append(_Replicated(weakref.ref(wrapper), pairs))

    def clear(self) -> None:
        """Drop the gradients of all that the optimizer steps, and of the half parameters."""
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for half, link in self._pairs.values():
            half.grad = None
            link.share(None)

    def _zero_grad(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stand in for ``optimizer.zero_grad``, which knows the masters alone: clear half parameters as well."""
        self.share_gradients()
        original(*args, **kwargs)
        self.share_gradients()

    def _add_group(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stand in for ``optimizer.add_param_group``: what is loaded next finds the masters there."""
        original(*args, **kwargs)
        self.add_missing_masters()

    def refresh(self, *, first_step: bool = False, local: bool = False) -> None:
        """Copy what was written into the half parameters to the masters; arguments as for `model_to_masters`."""
        model_to_masters(self._pairs.values(), first_step=first_step, local=local)

    @torch.no_grad()
    def read_model(self) -> None:
        """Set each master to its half parameter, however that was written to. Equal elements keep their low bits.

        Not in a group of several processes: there all of a master is read, so that all processes have the same.
        """
        for half, link in self._pairs.values():
            link.read(half, whole=several_processes() and not is_sharded(half))

    @without_grad
    def round_into_model(self) -> None:
        """Write the masters into the half parameters, in one multi-tensor copy. Both have one gradient then."""
        copy_to_params(self._pairs.values())
        # An optimizer may have replaced gradients in its step.
        if any(half.grad is not link.master.grad for half, link in self._pairs.values()):
            self.share_gradients()

    @torch.no_grad()
    def masters_to_model(self) -> bool:
        """Copy masters that the program wrote to into their half parameters. Returns whether that changed any of these.

        Waits for the device if a master was written to.
        """
        written = written_masters(self._pairs.values())
        # A graph may have saved the half parameters: those that are equal already are not written.
        behind = [
            (half, link)
            for half, link in written
            if half.shape != link.master.shape or not torch.equal(local_of(half), local_of(link.master).to(half.dtype))
        ]
        copy_to_params(behind)
        mark_equal(written)
        return bool(behind)

    @torch.no_grad()
    def undo(self, only: Iterable[Tensor] | None = None) -> None:
        """Undo everything: the parameters get the masters' fp32 values, and their places in the optimizer back.

        Args:
            only: The parameters that are meant. Where others are left the rest stays in place.
        """
        chosen = self._pairs.keys() if only is None else self._pairs.keys() & set(map(id, only))
        self.share_gradients()
        optimizer: Any = self._optimizer()
        pairs = [self._pairs[key] for key in self._pairs if key in chosen]
        model_to_masters([(half, link) for half, link in pairs if half.shape == link.master.shape], local=True)
        for half, link in pairs:
            grad, half.grad = half.grad, None
            half.data = link.master.data if half.shape == link.master.shape else half.data.float()
            half.grad = grad
            for group in optimizer.param_groups:
                # In place: some optimizers (LBFGS) refer to the list itself.
                group["params"][:] = [half if parameter is link.master else parameter for parameter in group["params"]]
            _move_state(optimizer, link.master, half)
            release_master(half)
            self._pairs.pop(id(half))
            if self._hooks is not None and id(half) in self._hooks:
                self._hooks.pop(id(half)).remove()
        if not self._pairs or only is None:
            for reference in self._attached:
                attached = reference()
                if attached is not None:
                    attached.detach()
            self._attached.clear()
            self._replicated.clear()
            self._stop_watching()


all_masters: Any = weakref.WeakSet()
"""The `MasterWeights` of every optimizer of the process, also of an `FP16_Optimizer` or of a suspended handle."""


@disable_in_dynamo
def before_pass() -> None:
    """Get the gradients of all half parameters of the process ready for a backward pass that begins now.

    This is the last moment at which a gradient of an earlier step is told from a new one. Within a pass it does
    nothing. It is called where `torch.autograd.backward` is, while a handle is active.
    """
    if current_graph_task() == -1:
        # Copied by one call, as another thread may make an optimizer meanwhile.
        for reference in list(all_masters.data):
            masters = reference()
            if masters is not None:
                masters.begin_pass()


def fit_state(optimizer: Any) -> None:
    """Bring an optimizer's state to the dtypes of its parameters, where these were cast after the state was made."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype in (torch.float32, *HALF_DTYPES):
                _move_state(optimizer, parameter, parameter)


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
        wrapper: The DistributedDataParallel, referred to weakly.
        pairs: The half parameters, with their links.
        unreduced: Whether gradients that are there may be those of this process alone, which ``no_sync`` left.
    """

    wrapper: weakref.ref[DistributedDataParallel]
    pairs: list[tuple[Tensor, MasterLink]]
    unreduced: bool = False


class _StashedGrads:
    """Gradients that are kept out of ``.grad`` while torch's reducer is at work.

    Attributes:
        wanted: The half parameters whose shared gradient is stashed when the next pass begins, by id. Not before: a
            ``zero_grad()`` in between must still be seen.
    """

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self._put: list[tuple[Tensor, MasterLink, Tensor]] = []

    def put(self, half: Tensor, link: MasterLink) -> None:
        """Stash the gradient that a half parameter shares with its master, if there is one."""
        grad = half.grad
        if grad is not None and link.shares(grad):
            self._put.append((half, link, grad))
            half.grad = link.master.grad = None
            link.share(None)

    def take(self) -> list[tuple[Tensor, MasterLink, Tensor]]:
        """Return each half parameter with its link and the gradient that was stashed, and forget them."""
        put, self._put = self._put, []
        self.wanted.clear()
        return put


def _share(half: Tensor, link: MasterLink, grad: Tensor | None) -> None:
    link.share(grad)
    try:
        # The master first: a pass that another thread begins in between takes it for no cleared one.
        link.master.grad = grad
        half.grad = grad
    except RuntimeError:
        check_shapes(half, link.master)
        raise


def _before_accumulation(half: Tensor, link: MasterLink, stashed: _StashedGrads) -> None:
    """Get the gradient of a half parameter ready for one that is about to be added to it."""
    grad = half.grad
    if link.master.grad is not grad and link.shares(grad):
        # The master's gradient was cleared or replaced: this one is of an earlier step.
        _share(half, link, _unless_zeroed(link, grad, link.master.grad))
    if id(half) in stashed.wanted:
        stashed.put(half, link)


def _unless_zeroed(link: MasterLink, grad: Tensor | None, replacement: Tensor | None) -> Tensor | None:
    """Return the gradient that the program put in place of ``grad`` at a master.

    If the program has zeroed ``grad`` in place since, at the half parameter, that clears both: zeros are returned. The
    device finds out, and nothing waits.
    """
    if grad is None or replacement is None or not link.wrote_to(grad):
        return replacement
    if grad.layout is replacement.layout is torch.strided:
        replacement = replacement.detach().clone()
        local_of(replacement).masked_fill_(~local_of(grad.detach()).any(), 0)
    return replacement


def _widen(pairs: list[tuple[Tensor, MasterLink]]) -> None:
    """Cast the gradients of half parameters to fp32, which they share with their masters then."""
    if all(half.is_cpu for half, _ in pairs):
        # One by one: a multi-tensor copy saves no launches here, and each half gradient is freed at once.
        for half, link in pairs:
            _share(half, link, _FLOAT(half.grad))
        return
    for some in _parts(pairs):
        for (half, link), grad in zip(some, widened(half.grad for half, _ in some), strict=True):
            _share(half, link, grad)


def _parts(pairs: list[tuple[Tensor, MasterLink]]) -> Iterator[list[tuple[Tensor, MasterLink]]]:
    """Split pairs, so that the half gradients of one part are freed before those of the next are cast to fp32.

    In one part all gradients would be there in both dtypes, which is when memory is shortest. Each part is half of what
    is left, the largest first: until the last part there are fewer bytes than all gradients have in fp32.
    """
    left, begin, taken = sum(half.numel() for half, _ in pairs), 0, 0
    if left <= _SMALL:
        yield pairs
        return
    pairs = sorted(pairs, key=lambda pair: pair[0].numel(), reverse=True)
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
