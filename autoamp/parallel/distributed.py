"""Data parallelism over processes: gradients are averaged by the end of backward, in flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Variable
from torch.nn import Module

from autoamp.errors import UsageError

__all__ = ["DistributedDataParallel", "Reducer", "apply_flat_dist_call", "flat_dist_call", "split_by_type"]


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return the tensors by ``tensor.type()``, in their order."""
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(str(tensor.type()), []).append(tensor)
    return found


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors of one type as on a single one. An ``all_reduce`` averages."""
    flat = _flatten_dense_tensors(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, value in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
        tensor.copy_(value)


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors of any types, once for each type."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


class Reducer:
    """Averages gradients, or tensors, when it is asked to.

    Args:
        module_or_grads_list: A module, whose parameters are taken from rank 0 now; or tensors.

    Raises:
        UsageError: There is no process group.
    """

    def __init__(self, module_or_grads_list: Module | Iterable[Tensor]) -> None:
        _check_process_group("Reducer")
        self.module: Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, Module):
            self.module = module_or_grads_list
            flat_dist_call([param.data for param in self.module.parameters()], dist.broadcast, (0,))
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Average over all processes."""
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            present = [param.grad for param in self.module.parameters() if param.grad is not None]
            flat_dist_call(present, dist.all_reduce)


class DistributedDataParallel(Module):
    """Runs a module, and averages its gradients over all processes by the end of each backward pass.

    Parameters and buffers are taken from rank 0 at construction. A parameter may have no gradient in some iterations,
    on some ranks or on all. Gradients are reduced at the end of backward, in one buffer for each type.

    Args:
        module: The module, on its device. `autoamp.initialize` comes first.
        message_size: Taken for the sake of callers, as are the arguments that choose how reduction overlaps backward.
        delay_allreduce: As ``message_size``.
        shared_param: No longer an argument in Apex either.
        allreduce_trigger_params: As ``message_size``.
        retain_allreduce_buffers: As ``message_size``.
        allreduce_always_fp32: Whether half gradients are reduced in fp32.
        num_allreduce_streams: As ``message_size``.
        allreduce_communicators: As ``message_size``.
        gradient_average: Whether gradients are averaged, or summed.
        gradient_predivide_factor: Gradients are divided by it before, and by the rest of the world size after.
        gradient_average_split_factor: The name of ``gradient_predivide_factor`` in older Apex.
        prof: As ``message_size``.

    Raises:
        UsageError: There is no process group.
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
        _check_process_group("DistributedDataParallel")
        self.module = module
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_average_split_factor or gradient_predivide_factor
        self._enabled = True
        # The backward pass that the reduction is queued for; one that raised leaves its own behind and blocks no other.
        self._queued_for: int | None = None
        self._hooked: set[int] = set()
        flat_dist_call([tensor.data for tensor in (*module.parameters(), *module.buffers())], dist.broadcast, (0,))
        self._hook_parameters()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._hook_parameters()
        return self.module(*inputs, **kwargs)

    def disable_allreduce(self) -> None:
        """Leave gradients as they are from now on, to accumulate them."""
        self._enabled = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again, those that were accumulated included."""
        self._enabled = True

    def _hook_parameters(self) -> None:
        """Watch parameters that are not watched yet: those that were frozen so far as well."""
        for param in self.module.parameters():
            if param.requires_grad and id(param) not in self._hooked:
                self._hooked.add(id(param))
                param.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _: Tensor) -> None:
        running = torch._C._current_graph_task_id()
        if self._enabled and self._queued_for != running:
            self._queued_for = running
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued_for = None
        params = [param for param in self.module.parameters() if param.requires_grad]
        present = torch.tensor([param.grad is not None for param in params], dtype=torch.int32)
        anywhere = present.to(params[0].device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        wanted = [param for param, there in zip(params, anywhere.tolist(), strict=True) if there]
        for param in wanted:
            if param.grad is None:
                # Another rank has one; here its part of the sum is 0.
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype)
        for bucket in split_by_type([param.grad for param in wanted if param.grad is not None]).values():
            self._reduce_bucket(bucket)

    def _reduce_bucket(self, bucket: list[Tensor]) -> None:
        flat = _flatten_dense_tensors(bucket)
        flat = flat.float() if self.allreduce_always_fp32 else flat
        if self.gradient_predivide_factor != 1.0:
            flat /= self.gradient_predivide_factor
        dist.all_reduce(flat)
        if self.gradient_average:
            flat *= self.gradient_predivide_factor / dist.get_world_size()
        for grad, value in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(value)


def _check_process_group(name: str) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(f"{name} needs a process group; call torch.distributed.init_process_group() first")
