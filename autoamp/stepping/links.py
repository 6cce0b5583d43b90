"""Half parameters and their fp32 masters: which belong together, and which of the two is copied to the other."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from autoamp.errors import UsageError
from autoamp.scaling import is_sharded, local_of
from autoamp.stepping.replicas import several_processes
from autoamp.tensors import HALF_DTYPES, version_of, without_grad

__all__ = [
    "Link",
    "check_shapes",
    "equalized",
    "link_of",
    "linked",
    "load_master",
    "master_of",
    "refresh_masters",
    "release_master",
]


class Link:
    """A master, and what its half parameter was when the two last agreed.

    Attributes:
        master: The fp32 tensor.
        equal_by: The wrapper that made the masters of all processes equal, referred to weakly; None before that.
        stepped: Whether the master is authoritative: after the first step, or a write into it.
        has_shared: Whether the two had one gradient when they were looked at last.
    """

    __slots__ = ("_shared", "_state", "equal_by", "has_shared", "master", "stepped")

    def __init__(self, half: Tensor, master: Tensor) -> None:
        self.master = master
        self.share(None)
        self.equal_by: weakref.ref[Any] | None = None
        self.stepped = False
        self.mark_equal(half)

    def mark_equal(self, half: Tensor) -> None:
        """Note that the half parameter is equal to the rounded master."""
        self._state = _state(half), _state(self.master)

    def share(self, grad: Tensor | None) -> None:
        """Note that both have this gradient now. The link holds a weak reference to it."""
        self.has_shared = grad is not None
        self._shared = None if grad is None else TensorWeakRef(grad)

    def shares(self, grad: Tensor | None) -> bool:
        """Tell whether a gradient of either of the two is the one that `share` was called with last."""
        if grad is None or self._shared is None:
            return grad is None and not self.has_shared
        return self._shared() is grad

    def is_written(self, half: Tensor) -> bool:
        """Tell whether torch reports a write into the half parameter."""
        return _state(half) != self._state[0]

    def copy_from_param(self, half: Tensor, *, whole: bool) -> None:
        """Copy the half parameter, which was written to, into the master. If both were written to, the master stays."""
        if _state(self.master) == self._state[1]:
            self.read(half, whole=whole)
        else:
            self.mark_equal(half)
            self.stepped = True

    def read(self, half: Tensor, *, whole: bool) -> None:
        """Set the master to the half parameter.

        Elements in which both are the same, inf and nan included, keep the bits that half precision has no room for;
        but not with ``whole``, by which the masters of all processes become equal where the half parameters are.
        """
        value = half.detach().to(device=self.master.device, dtype=self.master.dtype)
        rounded = self.master.detach().to(half.dtype).to(self.master.dtype)
        differs = (value != rounded) & ~(value.isnan() & rounded.isnan())
        self.master.copy_(value if whole else torch.where(differs, value, self.master))
        self.mark_equal(half)


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
        link.mark_equal(parameter)


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
    for half, link in pairs:
        link.equal_by = weakref.ref(wrapper)
        # Half parameters are not written to here: a graph may have saved them.
        link.mark_equal(half)


def linked(half: Tensor, original: Tensor | None) -> Link:
    """Return the link of a half parameter, a new one if it has none: to a master with the value of ``original``."""
    if master_of(half) is None:
        value = half.detach().float() if original is None else original.detach()
        _links[half] = Link(half, value.requires_grad_(half.requires_grad))
    link: Link = _links[half]
    return link


def check_shapes(half: Tensor, master: Tensor) -> None:
    """Raise UsageError where a half parameter and its master differ in shape."""
    if half.shape != master.shape:
        raise UsageError(
            f"a half parameter of shape {tuple(half.shape)} has a master of shape {tuple(master.shape)}: it was "
            "reshaped or sharded since; make the optimizer after that (after FullyShardedDataParallel, say)"
        )


@without_grad
def refresh_masters(pairs: Collection[tuple[Tensor, Link]], *, first_step: bool = False, local: bool = False) -> None:
    """Copy half parameters that the program wrote to into their masters.

    Args:
        pairs: Half parameters, with their links.
        first_step: Whether this is the first step, after which the master weights are authoritative.
        local: Whether the masters of other processes may differ.
    """
    behind = [(half, link) for half, link in pairs if not link.stepped or link.is_written(half)]
    several = bool(behind) and not local and several_processes()
    for half, link in behind:
        check_shapes(half, link.master)
        # A rank's shard is its own: what replicas of it there are were loaded alike.
        whole = several and link.equal_by is None and not is_sharded(half)
        link.copy_from_param(half, whole=whole and (first_step or link.is_written(half)))
        link.stepped = link.stepped or first_step


def _state(tensor: Tensor) -> tuple[int | None, int]:
    """Return what changes where torch reports a write: the version, and the address of the data."""
    return version_of(tensor), local_of(tensor).data_ptr()
