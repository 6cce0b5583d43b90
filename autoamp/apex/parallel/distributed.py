"""Data parallelism over processes: gradients are averaged at the end of a backward pass, or when asked to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.core import equalized
from autoamp.errors import UsageError
from autoamp.tensors import flatten, unflatten
from autoamp.torch_private import current_graph_task

# Kinds of gradients: none, one in the parameter's dtype, one in fp32 beside a half parameter. The ranks agree on the
# largest number that one of them has.
_NONE, _OWN, _WIDE = range(3)


@torch.no_grad()
def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors of any dtypes and devices, once for each, and copy the result into them.

    A process group must exist.

    Args:
        tensors: Of any shapes. They are written in place.
        call: The collective, which writes to the tensor that it is given. With `torch.distributed.all_reduce` itself
            the sum is divided by the world size.
        extra_args: What else the collective is called with, a sequence; None for nothing.
    """
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(str(tensor.type()), []).append(tensor)
    for bucket in buckets.values():
        flat = flatten(bucket)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        for tensor, value in zip(bucket, unflatten(flat, bucket), strict=True):
            tensor.copy_(value)


class Reducer:
    """Averages gradients, or tensors, over all processes when `reduce` is called. With one process they do not change.

    Args:
        module_or_grads_list: A module, whose parameters and their fp32 masters are set to those of rank 0 now, and
            whose gradients are averaged; or tensors, which are averaged.

    Attributes:
        module: The module, None where tensors were given.
        grads: The tensors; an empty list where a module was given.

    Raises:
        UsageError: There is no process group, and the environment variable ``WORLD_SIZE`` is above 1.
    """

    def __init__(self, module_or_grads_list: Module | Iterable[Tensor]) -> None:
        self._grouped = _needs_reduction("Reducer")
        given = module_or_grads_list
        self.module = given if isinstance(given, Module) else None
        self.grads = [] if isinstance(given, Module) else list(given)
        if self._grouped and self.module is not None:
            _broadcast(self.module.parameters(), self)

    def reduce(self) -> None:
        """Average over all processes, in place.

        All processes must have gradients of the same parameters: otherwise the collective raises or hangs.

        Raises:
            UsageError: A group of several processes was made after this reducer.
        """
        if not self._grouped:
            _check_no_later_group("Reducer")
            return
        params = () if self.module is None else self.module.parameters()
        present = [param.grad for param in params if param.grad is not None]
        flat_dist_call([*self.grads, *present], dist.all_reduce)


class DistributedDataParallel(Module):
    """Runs a module, and averages its gradients over all processes at the end of each backward pass.

    At construction parameters, their fp32 masters and buffers are set to those of rank 0. Gradients are reduced in one
    buffer for each dtype and device; sparse ones become dense. With one process they stay as they are.

    A parameter may have no gradient in some iterations, on some ranks or on all. But on every rank each backward pass
    must reach one parameter at least: a rank whose loss depends on none makes the others wait until the process group's
    timeout. Add ``0.0 * output.sum()`` to such a loss.

    Args:
        module: The module, on its device.
        message_size: Has no effect, as the other arguments that say how Apex overlaps reduction and backward pass.
        delay_allreduce: As ``message_size``.
        shared_param: Must be None. Apex no longer takes it either.
        allreduce_trigger_params: As ``message_size``.
        retain_allreduce_buffers: As ``message_size``.
        allreduce_always_fp32: Whether gradients are reduced in fp32, whatever their dtype.
        num_allreduce_streams: As ``message_size``.
        allreduce_communicators: As ``message_size``.
        gradient_average: Must be True: gradients are averaged.
        gradient_predivide_factor: By what gradients are divided before the reduction; after it they are divided by
            world size / factor.
        gradient_average_split_factor: The name of ``gradient_predivide_factor`` in older Apex; None for not given.
        prof: As ``message_size``.

    Raises:
        UsageError: There is no process group, and the environment variable ``WORLD_SIZE`` is above 1.
        ValueError: ``shared_param`` is given, or ``gradient_average=False``.
    """

    def __init__(
        self,
        module: Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        if shared_param is not None:
            raise ValueError("shared_param is not supported; leave it out: shared parameters work without it")
        if not gradient_average:
            raise ValueError("gradient_average=False is not supported; for sums multiply the loss by the world size")
        self._grouped = _needs_reduction("DistributedDataParallel")
        self.module = module
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_predivide_factor = gradient_average_split_factor or gradient_predivide_factor
        self._enabled = True
        self.__setstate__({})
        if self._grouped:
            _broadcast(module.parameters(), self)
            flat_dist_call([buffer.data for buffer in module.buffers()], dist.broadcast, (0,))
        self._hook_parameters()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module and return what it returns.

        Args:
            *inputs: What the module takes.
            **kwargs: The same, by name.

        Raises:
            UsageError: A group of several processes was made after this wrapper.
        """
        if not self._grouped:
            _check_no_later_group("DistributedDataParallel")
        self._hook_parameters()
        return self.module(*inputs, **kwargs)

    def disable_allreduce(self) -> None:
        """Leave gradients as they are in the backward passes that follow, to accumulate them."""
        self._enabled = False

    def enable_allreduce(self) -> None:
        """Reduce gradients at the end of the next backward pass again, with what was accumulated."""
        self._enabled = True

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters have no hooks, so it must not have the notes of which are watched.
        own = ("_queued_for", "_hooked")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # The number of the backward pass that the reduction is queued for. A pass that raised leaves its number here;
        # the next pass has another one.
        self._queued_for: int | None = None
        self._hooked: Any = WeakIdKeyDictionary()

    def _hook_parameters(self) -> None:
        """Watch the parameters that are not watched yet: at each call, as some may have been frozen or missing."""
        for param in self.module.parameters() if self._grouped else ():
            if param.requires_grad and param not in self._hooked:
                self._hooked[param] = True
                param.register_post_accumulate_grad_hook(self._queue_reduction)

    def _queue_reduction(self, _: Tensor) -> None:
        """Queue the reduction for the end of the backward pass, once for each pass."""
        running = current_graph_task()
        if self._enabled and self._queued_for != running:
            self._queued_for = running
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce the gradients of all parameters for which some rank has one.

        A half parameter with an fp32 master may have a half gradient on one rank, and on another an fp32 one, where it
        was added to an earlier gradient: all ranks reduce it in fp32 then. Sparse gradients become dense.
        """
        self._queued_for = None
        params = [param for param in self.module.parameters() if param.requires_grad]
        kinds = [_NONE if p.grad is None else _OWN if p.grad.dtype is p.dtype else _WIDE for p in params]
        anywhere = torch.tensor(kinds, dtype=torch.int32).to(params[0].device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        grads = []
        for param, kind in zip(params, anywhere.tolist(), strict=True):
            if kind != _NONE:
                dtype = torch.float32 if kind == _WIDE else param.dtype
                # Where only another rank has a gradient this rank adds 0 to the sum.
                grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
                param.grad = grad.to(dtype)
                grads.append(param.grad)
        flat_dist_call(grads, self._average)

    def _average(self, flat: Tensor) -> None:
        """Average the gradients of one dtype and device over the ranks, in place."""
        summed = flat.float() if self.allreduce_always_fp32 else flat
        if self.gradient_predivide_factor != 1.0:
            summed /= self.gradient_predivide_factor
        dist.all_reduce(summed)
        summed *= self.gradient_predivide_factor / dist.get_world_size()
        flat.copy_(summed)


def _broadcast(params: Iterable[Tensor], wrapper: object) -> None:
    """Set parameters, and the fp32 masters of those that have some, to the values of rank 0."""
    params = list(params)
    with equalized(params, wrapper) as masters:
        flat_dist_call([param.data for param in params] + masters, dist.broadcast, (0,))


def has_group() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def _needs_reduction(name: str) -> bool:
    """Whether there is a process group. UsageError: there is none, and ``WORLD_SIZE`` is above 1."""
    if has_group():
        return True
    world = os.environ.get("WORLD_SIZE", "1").strip()
    if world not in ("", "0", "1"):
        raise UsageError(
            f"{name} needs a process group, since WORLD_SIZE={world} says that there are several processes; call "
            "torch.distributed.init_process_group() first"
        )
    return False


def _check_no_later_group(name: str) -> None:
    """Raise UsageError where a group of several processes was made after what was built without a group."""
    if has_group() and dist.get_world_size() > 1:
        raise UsageError(
            f"{name} was made before the process group of {dist.get_world_size()} processes and reduces nothing; call "
            "torch.distributed.init_process_group() first"
        )
