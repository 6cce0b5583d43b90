"""Data parallelism over processes: gradients are averaged by the end of backward, in flat buffers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.errors import UsageError
from autoamp.stepping import equalised
from autoamp.torch_private import current_graph_task, flatten, unflatten

__all__ = ["DistributedDataParallel", "Reducer", "apply_flat_dist_call", "flat_dist_call", "split_by_type"]

# What gradient a parameter has, in ascending order: what some rank has is what all ranks reduce.
_NONE, _OWN, _WIDE, _SPARSE = range(4)


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return the tensors by ``tensor.type()``, in their order."""
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(str(tensor.type()), []).append(tensor)
    return found


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors of one type as on a single one. An ``all_reduce`` averages."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, value in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(value)


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors of any types, once for each type. It needs a process group."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


class Reducer:
    """Averages gradients, or tensors, when it is asked to. On one process, with or without a group, they stay.

    Args:
        module_or_grads_list: A module, whose parameters are taken from rank 0 now; or tensors.

    Raises:
        UsageError: There is no process group, and the environment says that there are several processes.
    """

    def __init__(self, module_or_grads_list: Module | Iterable[Tensor]) -> None:
        self._grouped = _has_group("Reducer")
        self.module: Module | None = None
        self.grads: list[Tensor] = []
        if not isinstance(module_or_grads_list, Module):
            self.grads = list(module_or_grads_list)
            return
        self.module = module_or_grads_list
        if self._grouped:
            _broadcast(self.module.parameters(), self)

    def reduce(self) -> None:
        """Average over all processes. Each must have the same gradients: one that a rank lacks is an error or a hang.

        Raises:
            UsageError: A process group came after this reducer.
        """
        if not self._grouped:
            _check_still_alone("Reducer")
        elif self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            present = [param.grad for param in self.module.parameters() if param.grad is not None]
            flat_dist_call(present, dist.all_reduce)


class DistributedDataParallel(Module):
    """Runs a module, and averages its gradients over all processes by the end of each backward pass.

    Parameters, their fp32 masters and buffers are taken from rank 0 at construction. Gradients are reduced at the end
    of backward, in one buffer for each type. On one process, with or without a group, they stay as they are.

    A parameter may have no gradient in some iterations, on some ranks or on all. But on every rank each backward pass
    must reach one parameter at least: a rank whose loss depends on none leaves the others waiting, until the process
    group's timeout. Add ``0.0 * output.sum()`` to such a loss.

    Args:
        module: The module, on its device.
        message_size: Taken for the sake of callers, as are the arguments that choose how reduction overlaps backward.
        delay_allreduce: As ``message_size``.
        shared_param: No longer an argument in Apex either.
        allreduce_trigger_params: As ``message_size``.
        retain_allreduce_buffers: As ``message_size``.
        allreduce_always_fp32: Whether half gradients are reduced in fp32.
        num_allreduce_streams: As ``message_size``.
        allreduce_communicators: As ``message_size``.
        gradient_average: Whether gradients are averaged, or summed. With sums, several backward passes add up rightly;
            only do not mix passes with and without `disable_allreduce` before one step.
        gradient_predivide_factor: Gradients are divided by it before, and averages by the rest of the world size after;
            sums stay divided by it, where there is a process group.
        gradient_average_split_factor: The name of ``gradient_predivide_factor`` in older Apex.
        prof: As ``message_size``.

    Raises:
        UsageError: There is no process group, and the environment says that there are several processes. Or, in
            backward, on all ranks: a gradient is sparse.
        ValueError: ``shared_param`` is given.
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
            raise ValueError("shared_param is not supported: shared parameters need no mention; leave it out")
        self._grouped = _has_group("DistributedDataParallel")
        self.module = module
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_average_split_factor or gradient_predivide_factor
        self._enabled = True
        self._watch_anew()
        if self._grouped:
            _broadcast(module.parameters(), self)
            flat_dist_call([buffer.data for buffer in module.buffers()], dist.broadcast, (0,))
        self._hook_parameters()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            UsageError: A process group came after this wrapper.
        """
        if not self._grouped:
            _check_still_alone("DistributedDataParallel")
        elif current_graph_task() == -1:
            # No backward pass is running: what is noted is of one that raised.
            self._earlier.clear()
        self._hook_parameters()
        return self.module(*inputs, **kwargs)

    def disable_allreduce(self) -> None:
        """Leave gradients as they are from now on, to accumulate them."""
        self._enabled = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again, those that were accumulated included."""
        self._enabled = True

    def __getstate__(self) -> dict[str, Any]:
        # Hooks are not copied with the parameters.
        own = ("_queued_for", "_hooked", "_reduced", "_earlier")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch_anew()

    def _watch_anew(self) -> None:
        # The backward pass that the reduction is queued for; one that raised leaves its own behind and blocks no other.
        self._queued_for: int | None = None
        self._hooked: Any = WeakIdKeyDictionary()
        # For sums: the parameters whose gradients were summed over the ranks, and what of them was there already when
        # more arrived. That part must not be summed again.
        self._reduced: Any = WeakIdKeyDictionary()
        self._earlier: Any = WeakIdKeyDictionary()

    def _hook_parameters(self) -> None:
        """Watch parameters that are not watched yet: those that were frozen or not there so far as well."""
        for param in self.module.parameters() if self._grouped else ():
            if param.requires_grad and param not in self._hooked:
                self._hooked[param] = True
                param.register_post_accumulate_grad_hook(self._arrived)
                if not self.gradient_average:
                    param.register_hook(_noting(self, param))

    def _note_earlier(self, param: Tensor) -> None:
        """Before a gradient is added to what is there: note what was summed over the ranks already."""
        if param not in self._reduced or param in self._earlier:
            return
        if self._enabled and param.grad is not None:
            self._earlier[param] = param.grad.clone()
        else:
            del self._reduced[param]

    def _arrived(self, _: Tensor) -> None:
        running = current_graph_task()
        if self._enabled and self._queued_for != running:
            self._queued_for = running
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued_for = None
        present = self._present_anywhere([param for param in self.module.parameters() if param.requires_grad])
        wanted = [param for param, _ in present]
        for param, dtype in present:
            if param.grad is None:
                # Another rank has one; here its part of the sum is 0.
                param.grad = torch.zeros_like(param, dtype=dtype)
            elif param.grad.dtype is not dtype:
                param.grad = param.grad.to(dtype)
        earlier = [] if self.gradient_average else self._taken_out(wanted)
        for bucket in split_by_type([param.grad for param in wanted if param.grad is not None]).values():
            self._reduce_bucket(bucket)
        for grad, part in earlier:
            grad.add_(part)

    def _present_anywhere(self, params: list[Tensor]) -> list[tuple[Tensor, torch.dtype]]:
        """Return the parameters that have a gradient on some rank, and in which dtype, the same ones on each.

        Beside fp32 masters the gradient of a half parameter is in fp32 on a rank where it was added to an earlier one.
        """
        anywhere = torch.tensor([_kind(param) for param in params], dtype=torch.int32).to(params[0].device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        found = anywhere.tolist()
        # All ranks learn of it, so none is left waiting.
        if _SPARSE in found:
            index = found.index(_SPARSE)
            raise UsageError(
                f"DistributedDataParallel: the gradient of parameter {index}, of shape {tuple(params[index].shape)}, "
                "is sparse on some rank; dense ones alone are reduced: use torch.nn.Embedding(..., sparse=False)"
            )
        return [
            (param, torch.float32 if kind == _WIDE else param.dtype)
            for param, kind in zip(params, found, strict=True)
            if kind != _NONE
        ]

    def _taken_out(self, params: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Take from the gradients what was summed before; return these gradients with what was taken out."""
        parts = []
        for param in params:
            grad = param.grad
            if grad is not None and param in self._reduced:
                # Where nothing was noted nothing has arrived since: all of it was summed before.
                part = self._earlier.get(param, grad).clone()
                grad.sub_(part)
                parts.append((grad, part))
            self._reduced[param] = True
        self._earlier.clear()
        return parts

    def _reduce_bucket(self, bucket: list[Tensor]) -> None:
        flat = flatten(bucket)
        flat = flat.float() if self.allreduce_always_fp32 else flat
        if self.gradient_predivide_factor != 1.0:
            flat /= self.gradient_predivide_factor
        dist.all_reduce(flat)
        if self.gradient_average:
            flat *= self.gradient_predivide_factor / dist.get_world_size()
        for grad, value in zip(bucket, unflatten(flat, bucket), strict=True):
            grad.copy_(value)


def _kind(param: Tensor) -> int:
    grad = param.grad
    if grad is None:
        return _NONE
    if grad.layout is not torch.strided:
        return _SPARSE
    return _OWN if grad.dtype is param.dtype else _WIDE


def _broadcast(params: Iterable[Tensor], wrapper: object) -> None:
    """Take parameters from rank 0, with the fp32 masters of those that have some."""
    params = list(params)
    with equalised(params, wrapper) as masters:
        flat_dist_call([param.data for param in params] + masters, dist.broadcast, (0,))


def _noting(ddp: DistributedDataParallel, param: Tensor) -> Callable[[Tensor], None]:
    # Weakly: the parameter holds the hook.
    reference = weakref.ref(param)

    def note(_: Tensor) -> None:
        found = reference()
        if found is not None:
            ddp._note_earlier(found)

    return note


def _has_group(name: str) -> bool:
    """Tell whether there is a process group. Without one there must be one process alone."""
    if dist.is_available() and dist.is_initialized():
        return True
    world = os.environ.get("WORLD_SIZE", "1").strip()
    if world not in ("", "0", "1"):
        raise UsageError(
            f"{name} needs a process group, since WORLD_SIZE={world} says that there are several processes; call "
            "torch.distributed.init_process_group() first"
        )
    return False


def _check_still_alone(name: str) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f"{name} was made before the process group of {dist.get_world_size()} processes and reduces nothing; call "
            "torch.distributed.init_process_group() first"
        )
