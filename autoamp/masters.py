"""Master weights: an fp32 copy of every half parameter that an optimizer steps.

The optimizer's groups hold the masters, the model holds the half parameters. A backward pass leaves gradients in half
precision; one multi-tensor pass copies them up, and from then on a half parameter and its master share one fp32
gradient (torch's `Tensor.grad_dtype` allows it): clipping or clearing the one is clipping or clearing the other, and
further backward passes add up in fp32. After a step one multi-tensor pass copies the masters down.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.attaching import AttachedMethod
from autoamp.tensors import HALF_DTYPES

__all__ = ["MasterWeights", "fit_state", "master_of", "release_master"]

log = logging.getLogger(__name__)

# Marks a gradient that a half parameter shares with its master. Where the master's is another one by now, or none, the
# master was cleared or written to, and the half parameter's is of an earlier step.
_SHARED = "_autoamp_shared"

# The one master of each half parameter, for as long as the parameter lives: optimizers that share a parameter share it,
# and it outlives an optimizer that was dropped.
_masters: Any = WeakIdKeyDictionary()


def master_of(parameter: Tensor) -> Tensor | None:
    """Return the fp32 master of a half parameter, None where it has none. Weights written from outside are in it."""
    master: Tensor | None = _masters.get(parameter)
    if master is None or parameter.dtype not in HALF_DTYPES:
        return None
    _follow([(parameter, master)])
    return master


def release_master(parameter: Tensor) -> Tensor | None:
    """Return what `master_of` does, and forget it."""
    master = master_of(parameter)
    _masters.pop(parameter, None)
    return master


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
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._hooks: dict[int, Any] = {}
        self.writes_seen = 0
        self.adopt()
        self._zero_grad = None
        if callable(getattr(optimizer, "zero_grad", None)):
            # Held weakly: it holds this object.
            self._zero_grad = weakref.ref(AttachedMethod(optimizer, "zero_grad", self._clear))

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each half parameter with its master, in the order in which they were adopted."""
        return list(self._pairs.values())

    @torch.no_grad()
    def adopt(self) -> None:
        """Give every half parameter in the optimizer's groups a master."""
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            params = group["params"]
            for index, parameter in enumerate(params):
                if parameter.dtype in HALF_DTYPES:
                    params[index] = master = self._master(parameter)
                    _move_state(optimizer, parameter, master)

    def _master(self, parameter: Tensor) -> Tensor:
        master = master_of(parameter)
        if master is None:
            original = self._originals.get(id(parameter))
            value = parameter.detach().float() if original is None else original.detach()
            master = _masters[parameter] = value.requires_grad_(parameter.requires_grad)
        # None: of any dtype. What backward makes is half, as DistributedDataParallel's buckets want it.
        parameter.grad_dtype = None
        self._pairs[id(parameter)] = (parameter, master)
        return master

    @torch.no_grad()
    def share_gradients(self) -> None:
        """Let each half parameter and its master have one fp32 gradient.

        ``zero_grad()`` on the model or ``p.grad = None`` has cleared the half parameter, or the master: the other one
        follows. Called when a block begins, when it ends, and before a step.
        """
        self.adopt()
        fresh = []
        for half, master in self.pairs:
            if half.requires_grad is not master.requires_grad:
                master.requires_grad_(half.requires_grad)
            if half.requires_grad and id(half) not in self._hooks:
                # In a backward pass outside of any block this is the last moment to tell old gradients from new ones.
                self._hooks[id(half)] = half.register_hook(_dropping(half, master))
            _drop_old(half, master)
            if half.grad is None and master.grad is not None and not hasattr(master.grad, _SHARED):
                # Somebody gave the master a gradient of his own.
                _share(half, master, master.grad)
            elif half.grad is not None and half.grad.dtype in HALF_DTYPES:
                fresh.append((half, master))
            elif half.grad is not master.grad:
                _share(half, master, half.grad)
        for (half, master), grad in zip(fresh, _widened([half.grad for half, _ in fresh]), strict=True):
            _share(half, master, grad)

    @torch.no_grad()
    def narrow_gradients(self) -> None:
        """Where processes train together, let a backward pass find half gradients to add to; called within a block.

        `DistributedDataParallel` reduces what has added up, and takes the parameter's dtype alone.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for half, _ in self.pairs:
                if half.grad is not None:
                    half.grad = half.grad.to(half.dtype)

    def _clear(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stand in for ``optimizer.zero_grad``, which knows the masters alone: half parameters let go as well."""
        original(*args, **kwargs)
        self.adopt()
        for half, master in self.pairs:
            if half.grad is not None:
                half.grad = master.grad

    def follow(self) -> None:
        """Let masters take over what somebody wrote into the half parameters since they were copied down."""
        written = _follow(self.pairs)
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
    def copy_down(self) -> None:
        """Write the masters into the half parameters, in one multi-tensor pass."""
        if self._pairs:
            halves, masters = zip(*self.pairs, strict=True)
            torch._foreach_copy_(halves, masters)

    @torch.no_grad()
    def dissolve(self) -> None:
        """Undo everything: the parameters get the masters' fp32 values, and their places in the optimizer back."""
        self.follow()
        self.share_gradients()
        for half, master in self.pairs:
            grad, half.grad = half.grad, None
            half.data = master.data
            half.grad = grad
            _replace_in_groups(self._optimizer(), master, half)
            release_master(half)
        for hook in self._hooks.values():
            hook.remove()
        zero_grad = None if self._zero_grad is None else self._zero_grad()
        if zero_grad is not None:
            zero_grad.detach()
        self._pairs, self._hooks = {}, {}


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
        # In place: some optimizers (LBFGS) keep the list itself.
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


def _dropping(half: Tensor, master: Tensor) -> Any:
    reference = weakref.ref(half)

    def drop(_: Tensor) -> None:
        parameter = reference()
        if parameter is not None:
            _drop_old(parameter, master)

    return drop


def _drop_old(half: Tensor, master: Tensor) -> None:
    """Where the master's gradient was cleared or replaced, let go of the one that was shared."""
    grad = half.grad
    if grad is not None and grad is not master.grad and hasattr(grad, _SHARED):
        half.grad = master.grad


def _share(half: Tensor, master: Tensor, grad: Tensor | None) -> None:
    if grad is not None:
        setattr(grad, _SHARED, True)
    half.grad = master.grad = grad


def _widened(grads: Sequence[Any]) -> list[Tensor]:
    """Return half gradients in fp32, the dense ones by one multi-tensor copy."""
    wide = [
        torch.empty_like(grad, dtype=torch.float32) if grad.layout is torch.strided else grad.float() for grad in grads
    ]
    dense = [(new, grad) for new, grad in zip(wide, grads, strict=True) if grad.layout is torch.strided]
    if dense:
        torch._foreach_copy_([new for new, _ in dense], [grad for _, grad in dense])
    return wide


@torch.no_grad()
def _follow(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Where a half parameter is not its rounded master, set the master to it. Returns how many parameters differ."""
    pairs = [pair for pair in pairs if pair[0].numel()]
    if not pairs:
        return 0
    halves, masters = zip(*pairs, strict=True)
    rounded = [torch.empty_like(half) for half in halves]
    torch._foreach_copy_(rounded, masters)
    written = 0
    for index in _differing(halves, rounded):
        half, master, expected = halves[index], masters[index], rounded[index]
        # Where both are the same, inf and nan included, the master keeps the bits that half precision has no room for.
        same = (half == expected) | (half.isnan() & expected.isnan())
        if not bool(same.all()):
            master.copy_(torch.where(same, master, half.float()))
            written += 1
    return written


def _differing(halves: Sequence[Tensor], rounded: Sequence[Tensor]) -> Iterator[int]:
    """The places where two lists differ, by one synchronisation a device and dtype. What is not finite differs."""
    differences = torch._foreach_sub(list(halves), list(rounded))
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, half in enumerate(halves):
        kinds.setdefault((half.device, half.dtype), []).append(index)
    for places in kinds.values():
        norms = torch._foreach_norm([differences[place] for place in places], float("inf"))
        for place, norm in zip(places, torch.stack(list(norms)).tolist(), strict=True):
            if norm != 0.0:
                yield place
