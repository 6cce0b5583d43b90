"""Batch norm over all processes, as `torch.nn.SyncBatchNorm`, but also with one process and on CPUs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from autoamp.apex.parallel.distributed import has_group
from autoamp.torch_private import MODULES_OF_BATCH_NORM

# The base class of torch's batch norms, which has no public name.
_BatchNorm: Any = torch.nn.SyncBatchNorm.__base__


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch norm whose statistics are those of the batches of all processes together.

    Without a process group, or with one process, it is plain batch norm. On a CPU the statistics are gathered here,
    since torch's function is for GPUs alone.

    It is no subclass of `torch.nn.SyncBatchNorm`: torch's DistributedDataParallel refuses those on a CPU.

    Args:
        num_features: C, the number of channels.
        eps: Added to the variance.
        momentum: The weight of the new batch in the running statistics; None for the mean over all batches.
        affine: Whether there are a weight and a bias, of shape ``(C,)``.
        track_running_stats: Whether there are running statistics, of shape ``(C,)``.
        process_group: The processes whose batches count; None for all.
        channel_last: Whether the channels are the last dimension of the input. If not, they are the second.
        fuse_relu: Whether a ReLU follows.
    """

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
        # torch's forward calls this first; each class of batch norm has its own.
        if input.dim() < 2 or input.shape[1] == 0:
            raise ValueError(f"SyncBatchNorm takes (N, C, *) with at least one channel, not {tuple(input.shape)}")

    # `torch.nn.SyncBatchNorm.forward`, which runs on GPUs, calls it by this name.
    _check_non_zero_input_channels = _check_input_dim

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalised input, in its shape and dtype.

        Args:
            input: A floating tensor of shape ``(N, C, *)``, or with ``channel_last`` ``(N, *, C)``.
            z: Added to the result, before the ReLU where there is one. Of the input's shape.

        Raises:
            ValueError: The input has less than two dimensions or no channels; or in training there is only one value
                for each channel.
        """
        given = input.movedim(-1, 1) if self.channel_last else input
        output: Tensor = self._normalised(given)
        output = output.movedim(1, -1) if self.channel_last else output
        output = output if z is None else output + z
        return output.relu() if self.fuse_relu else output

    def _normalised(self, input: Tensor) -> Any:
        if not self.training or not (has_group() and dist.get_world_size(self.process_group) > 1):
            # The forward of `torch.nn.BatchNorm1d` to `BatchNorm3d`, which counts batches too.
            return _BatchNorm.forward(self, input)
        if input.is_cuda:
            return torch.nn.SyncBatchNorm.forward(cast("torch.nn.SyncBatchNorm", self), input)
        return self._normalised_here(input)

    def _normalised_here(self, input: Tensor) -> Any:
        """Return the input normalised by what all processes have, computed in fp32, or in fp64 for an fp64 input."""
        dims, shape = [dim for dim in range(input.dim()) if dim != 1], [1, -1, *[1] * (input.dim() - 2)]
        wide = input if input.dtype is torch.float64 else input.float()
        # The sums, and how many values each is of, in one collective.
        sums = torch.cat([wide.sum(dims), wide.new_tensor([input.numel() / input.shape[1]])]).double()
        total, count = _summed(sums, self.process_group).split([self.num_features, 1])
        if count.item() <= 1:
            raise ValueError(
                f"Expected 2 or more values per channel over all processes, got {int(count)}. Use a larger batch"
            )
        mean = (total / count).to(wide.dtype)
        centered = wide - mean.view(shape)
        # The mean of squares minus the square of the mean would need no second collective, but loses digits.
        squares = _summed(centered.square().sum(dims).double(), self.process_group)
        variance = (squares / count).to(wide.dtype)
        output = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((squares / (count - 1)).to(self.running_var.dtype), momentum)
        return output.to(input.dtype)


class _Summed(torch.autograd.Function):
    """The sum of a tensor over the processes of a group. Its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        """Return the sum, the same on all processes."""
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the tensor, which has derivatives too."""
        return _summed(grads[0], ctx.group), None


def _summed(own: Tensor, group: Any) -> Tensor:
    total: Tensor = _Summed.apply(own, group)  # type: ignore[no-untyped-call]
    return total


def convert_syncbn_model(module: Module, process_group: Any = None, channel_last: bool = False) -> Module:
    """Return the module with every batch norm replaced by a `SyncBatchNorm` that has the same parameters and buffers.

    A module that is no batch norm itself is changed in place and returned. For one that is, the new layer is returned.

    Args:
        module: Any module.
        process_group: As for `SyncBatchNorm`.
        channel_last: As for `SyncBatchNorm`.
    """
    done: dict[Module, Module] = {}

    def convert(old: Module) -> Module:
        if old not in done:
            is_plain = isinstance(old, MODULES_OF_BATCH_NORM) and not isinstance(old, SyncBatchNorm)
            done[old] = _synced(old, process_group, channel_last) if is_plain else old
            # Not named_children(), which yields a module with two names only once.
            for name, child in old._modules.items():
                if child is not None:
                    setattr(done[old], name, convert(child))
        return done[old]

    return convert(module)


def _synced(norm: Any, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, process_group, channel_last
    )
    # The same tensors, not copies: an optimizer that was built before steps them.
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    new.train(norm.training)
    return new


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the processes into groups of ``group_size`` and return the group of this process.

    All processes must call it. With 0, or without a process group, the result is None, which means all processes.

    Raises:
        ValueError: ``group_size`` does not divide the world size, which is 1 without a process group.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size() if has_group() else 1
    if group_size < 0 or group_size > world or world % group_size:
        raise ValueError(f"group_size={group_size} must divide the world size {world}; choose a divisor, or 0 for all")
    return dist.new_subgroups(group_size)[0] if has_group() else None
