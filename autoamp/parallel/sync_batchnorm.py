"""Batch norm over all processes: `torch.nn.SyncBatchNorm`, which also runs on one process and on CPUs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor
from torch.nn import Module

from autoamp.torch_private import MODULES_OF_BATCH_NORM

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]

# The base of torch's batch norms, by a public way.
_BatchNorm: Any = torch.nn.SyncBatchNorm.__base__


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch norm whose statistics are those of the batches of all processes together.

    Without a process group, or with one process, it is plain batch norm. On a CPU the statistics are computed by
    differentiable collectives, since torch's own is for GPUs alone.

    Args:
        num_features: The number of channels.
        eps: Added to the variance.
        momentum: The weight of the new batch in the running statistics; None for their plain mean.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether there are running statistics.
        process_group: Which processes; None for all.
        channel_last: Whether the channels are the last dimension of the input, not the second.
        fuse_relu: Whether a ReLU follows.
    """

    # It is no `torch.nn.SyncBatchNorm`, since torch's DistributedDataParallel refuses those on a CPU.

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _check_input_dim(self, input: Tensor) -> None:
        # Torch calls it before anything else, and leaves it to each kind of batch norm.
        if input.dim() < 2 or input.shape[1] == 0:
            raise ValueError(f"SyncBatchNorm takes (N, C, *) with at least one channel, not {tuple(input.shape)}")

    # What `torch.nn.SyncBatchNorm.forward` calls on GPUs.
    _check_non_zero_input_channels = _check_input_dim

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalised input, shape ``(N, C, *)``, or ``(N, *, C)`` where ``channel_last``.

        Args:
            input: A floating tensor.
            z: Added to the result, before the ReLU where there is one.
        """
        given = input.movedim(-1, 1) if self.channel_last else input
        output = self._normalised(given)
        output = output.movedim(1, -1) if self.channel_last else output
        output = output if z is None else output + z
        return output.relu() if self.fuse_relu else output

    def _normalised(self, input: Tensor) -> Tensor:
        if not self.training or not _many(self.process_group):
            # What `torch.nn.BatchNorm*d` runs, with its count of batches and its momentum.
            plain: Tensor = _BatchNorm.forward(self, input)
            return plain
        if input.is_cuda:
            return torch.nn.SyncBatchNorm.forward(cast(torch.nn.SyncBatchNorm, self), input)
        return self._by_collectives(input)

    def _by_collectives(self, input: Tensor) -> Tensor:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input if input.dtype is torch.float64 else input.float()
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        own_count = wide.new_tensor([float(input.numel() // input.shape[1])])
        sums: Tensor = dist_nn.all_reduce(torch.cat([own_count, wide.sum(dims)]), group=group)
        count, mean = sums[0], sums[1:] / sums[0]
        if count <= 1:
            raise ValueError(
                f"{int(count)} values per channel over all processes; training needs 2; use a larger batch"
            )
        centred = wide - mean.view(shape)
        # A second collective, since the mean of squares less the square of the mean loses digits.
        variance: Tensor = dist_nn.all_reduce(centred.square().sum(dims), group=group) / count
        if self.track_running_stats:
            self._update_running(mean.detach(), variance.detach() * (count / (count - 1)).detach())
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def convert_syncbn_model(module: Module, process_group: Any = None, channel_last: bool = False) -> Module:
    """Return the module with every batch norm replaced by a `SyncBatchNorm` of the same weights and statistics.

    The module is changed in place where it is no batch norm itself.
    """
    done: dict[Module, Module] = {}

    def convert(old: Module) -> Module:
        if old not in done:
            is_plain = isinstance(old, MODULES_OF_BATCH_NORM) and not isinstance(old, SyncBatchNorm)
            done[old] = _converted(old, process_group, channel_last) if is_plain else old
            # Not named_children(), which gives a module that is held under two names once.
            for name, child in old._modules.items():
                if child is not None:
                    setattr(done[old], name, convert(child))
        return done[old]

    return convert(module)


def _converted(norm: Any, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, process_group, channel_last
    )
    # The very tensors: an optimizer that was built before goes on with them.
    for name, param in norm.named_parameters(recurse=False):
        setattr(new, name, param)
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(new, name, buffer)
    new.train(norm.training)
    return new


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the processes into groups of ``group_size`` and return this process's; None for 0, all of them.

    Without a process group there is one process, and None is its group.

    Raises:
        ValueError: The world size is no multiple of ``group_size``.
    """
    if group_size == 0:
        return None
    grouped = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if grouped else 1
    if group_size < 0 or group_size > world or world % group_size:
        raise ValueError(f"group_size={group_size} must divide the world size {world}; choose a divisor, or 0 for all")
    own = None
    for first in range(0, world if grouped else 0, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks)
        own = group if dist.get_rank() in ranks else own
    return own


def _many(process_group: Any) -> bool:
    """Tell whether there is more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
