"""Half parameters and their fp32 masters: which belong together, and which of the two is copied to the other."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from autoamp.core.gradients import is_sharded, local_of
from autoamp.core.ranks import several_processes
from autoamp.errors import UsageError
from autoamp.tensors import HALF_DTYPES, version_of, without_grad

# What changes where torch reports a write: the versions of a tensor and of its local part, and the address of its data.
_State = tuple[int | None, int | None, int]

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_version = operator.attrgetter("_version")


class Link:
    """A master, and what its half parameter was when the two last agreed.

    Attributes:
        master: The fp32 tensor.
        shared: A weak reference to the gradient that both have had; None for none.
        half_state: The state of the half parameter when the two last agreed.
        master_state: The state of the master then.
        equal_by: The wrapper that made the masters of all processes equal, referred to weakly; None before that.
        stepped: Whether the master is authoritative, which it is from the first step on.
    """

    __slots__ = ("_shared_version", "equal_by", "half_state", "master", "master_state", "shared", "stepped")

    def __init__(self, half: Tensor, master: Tensor) -> None:
        self.master = master
        self.share(None)
        self.equal_by: weakref.ref[Any] | None = None
        self.stepped = False
        self.half_state: _State
        self.master_state: _State
        mark_equal([(half, self)])

    def share(self, grad: Tensor | None) -> None:
        """Note that both have this gradient now. The link holds a weak reference to it."""
        self.shared = None if grad is None else TensorWeakRef(grad)
        # Written out for plain tensors: this runs for each parameter of each step.
        if type(grad) is Tensor and not grad.is_inference():
            self._shared_version: int | None = grad._version
        else:
            self._shared_version = None if grad is None else version_of(grad)

    def wrote_to(self, grad: Tensor) -> bool:
        """Whether torch reports a write to the gradient that both have had."""
        return version_of(grad) != self._shared_version

    def shares(self, grad: Tensor | None) -> bool:
        """Whether a gradient of either of the two is the one that `share` was called with last."""
        if grad is None or self.shared is None:
            return grad is None and self.shared is None
        return self.shared() is grad

    def read(self, half: Tensor, *, whole: bool) -> None:
        """Set the master to the half parameter.

        Elements in which both are the same, inf and nan included, keep the bits that half precision has no room for;
        but not with ``whole``, by which the masters of all processes become equal where the half parameters are.
        """
        value = half.detach().to(device=self.master.device, dtype=self.master.dtype)
        rounded = self.master.detach().to(half.dtype).to(self.master.dtype)
        differs = (value != rounded) & ~(value.isnan() & rounded.isnan())
        self.master.copy_(value if whole else torch.where(differs, value, self.master))
        mark_equal([(half, self)])


# The master of each half parameter, as long as the parameter lives. Optimizers that share a parameter share its master,
# which outlives them.
_links: Any = WeakIdKeyDictionary()


def master_of(parameter: Tensor) -> Tensor | None:
    """Return the fp32 master of a half parameter, None where it has none. Weights written from outside are in it."""
    link = link_of(parameter)
    if link is None:
        return None
    refresh_masters([(parameter, link)])
    return link.master


def link_of(parameter: Tensor) -> Link | None:
    """Return the link of a half parameter as it is, None where it has none."""
    return _links.get(parameter) if parameter.dtype in HALF_DTYPES else None


def load_master(parameter: Tensor, value: Tensor) -> None:
    """Give a half parameter's master, if it has one, an fp32 value of which the parameter has the rounded one already.

    The value may be the master itself, as where `torch.distributed.checkpoint` reads in place.
    """
    link = link_of(parameter)
    if link is not None:
        link.master.copy_(value)
        mark_equal([(parameter, link)])


def release_master(parameter: Tensor) -> Tensor | None:
    """Return what `master_of` does, and forget it."""
    master = master_of(parameter)
    _links.pop(parameter, None)
    return master


@contextlib.contextmanager
def equalized(parameters: Iterable[Tensor], wrapper: object) -> Iterator[list[Tensor]]:
    """Yield the masters of parameters, to be broadcast from the process whose parameters all get.

    Args:
        parameters: Those of a model; what has no master is passed over.
        wrapper: What keeps them equal over processes from now on. It is referred to weakly.
    """
    pairs = [(half, link) for half in parameters if (link := _links.get(half)) is not None]
    refresh_masters(pairs, local=True)
    yield [link.master.detach() for _, link in pairs]
    for _, link in pairs:
        link.equal_by = weakref.ref(wrapper)
    # Half parameters are not written to here: a graph may have saved them.
    mark_equal(pairs)


def linked(half: Tensor, original: Tensor | None) -> Link:
    """Return the link of a half parameter, a new one if it has none: to a master with the value of ``original``."""
    link = link_of(half)
    if link is None:
        value = half.detach().float() if original is None else original.detach()
        _links[half] = link = Link(half, value.requires_grad_(half.requires_grad))
    else:
        refresh_masters([(half, link)])
    return link


def check_shapes(half: Tensor, master: Tensor) -> None:
    """Raise UsageError where a half parameter and its master differ in shape."""
    if half.shape != master.shape:
        raise UsageError(
            f"a half parameter of shape {tuple(half.shape)} has a master of shape {tuple(master.shape)}: it was "
            "reshaped or sharded since; make the optimizer after that (after FullyShardedDataParallel, say)"
        )


@without_grad
def refresh_masters(pairs: Iterable[tuple[Tensor, Link]], *, first_step: bool = False, local: bool = False) -> None:
    """Copy half parameters that the program wrote to into their masters. If it wrote to both, the master stays.

    Args:
        pairs: Half parameters, with their links.
        first_step: Whether a step begins, so that the master weights are authoritative after it, if they were not yet.
        local: Whether the masters of other processes may differ.
    """
    pairs = list(pairs)
    states = zip(pairs, _states([half for half, _ in pairs]), strict=True)
    written = [(*pair, state != pair[1].half_state) for pair, state in states]
    behind = [(half, link, is_written) for half, link, is_written in written if is_written or not link.stepped]
    several = bool(behind) and not local and several_processes()
    for half, link, is_written in behind:
        check_shapes(half, link.master)
        if _states([link.master]) == [link.master_state]:
            # A rank's shard is its own: what replicas of it there are were loaded alike.
            whole = several and link.equal_by is None and not is_sharded(half)
            link.read(half, whole=whole and (first_step or is_written))
        link.stepped = link.stepped or first_step


def has_written_masters() -> bool:
    """Whether the program wrote to a master of the process since it last agreed with its half parameter."""
    links: list[Link] = list(_links.data.values())
    return bool(links) and _states([link.master for link in links]) != [link.master_state for link in links]


def refresh_params() -> None:
    """Copy masters that the program wrote to into their half parameters. Nothing is launched where it wrote to none.

    For all masters of the process, before each outermost call of a module.
    """
    if has_written_masters():
        with torch.no_grad():
            copy_to_params(written_masters(list(_links.items())))


def written_masters(pairs: Collection[tuple[Tensor, Link]]) -> list[tuple[Tensor, Link]]:
    """Return those pairs whose master the program wrote to since the two last agreed."""
    states = _states([link.master for _, link in pairs])
    return [pair for pair, state in zip(pairs, states, strict=True) if state != pair[1].master_state]


def copy_to_params(pairs: Collection[tuple[Tensor, Link]]) -> None:
    """Round masters into their half parameters, in one multi-tensor copy."""
    if not pairs:
        return
    try:
        halves, masters = [half for half, _ in pairs], [link.master for _, link in pairs]
        if not _PLAIN.issuperset(map(type, (*halves, *masters))):
            halves, masters = list(map(local_of, halves)), list(map(local_of, masters))
        torch._foreach_copy_(halves, masters)
    except RuntimeError:
        for half, link in pairs:
            check_shapes(half, link.master)
        raise
    mark_equal(pairs)


def mark_equal(pairs: Collection[tuple[Tensor, Link]]) -> None:
    """Note that half parameters are equal to their rounded masters."""
    halves, masters = _states([half for half, _ in pairs]), _states([link.master for _, link in pairs])
    for (_, link), half, master in zip(pairs, halves, masters, strict=True):
        link.half_state, link.master_state = half, master


def _states(tensors: Sequence[Tensor]) -> list[_State]:
    """Return the state of each tensor, by sweeps that hundreds of them do not slow."""
    if _PLAIN.issuperset(map(type, tensors)):
        # Inference tensors have no versions.
        with contextlib.suppress(RuntimeError):
            versions = list(map(_version, tensors))
            return list(zip(versions, versions, map(Tensor.data_ptr, tensors), strict=True))
    parts = map(local_of, tensors)
    return [(version_of(whole), version_of(part), part.data_ptr()) for whole, part in zip(tensors, parts, strict=True)]
