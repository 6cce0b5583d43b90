"""Batch norm over all processes, as `torch.nn.SyncBatchNorm`, but also with one process and on CPUs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from autoamp.apex.parallel.distributed import has_group
from autoamp.errors import UsageError
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
        output, mean, variance = _Synced.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        return output


class _Synced(torch.autograd.Function):
    """Batch norm over all processes of a group: one collective forward, one backward.

    Its gradients are those of Ioffe and Szegedy 2015 (arXiv:1502.03167, section 3), with means over all processes.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, norm: SyncBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised input, and the mean and unbiased variance of all processes.

        Both are computed in fp32, or in fp64 for an fp64 input.
        """
        mean, variance, count = _of_all(input, norm.process_group)
        if count <= 1:
            raise ValueError(
                f"Expected 2 or more values per channel over all processes, got {int(count)}. Use a larger batch"
            )
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        # With statistics that are given, in one pass; not by its name in `torch`, which may be patched.
        plain = torch.ops.aten.native_batch_norm.default
        output, *_ = plain(input, scale, shift, mean, variance, False, 0.0, norm.eps)
        ctx.save_for_backward(input, weight, bias, mean, torch.rsqrt(variance + norm.eps))
        ctx.norm, ctx.count = norm, count
        unbiased = variance * (count / (count - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return output, mean, unbiased

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the input, over all processes, and of the weight and the bias, of this one.

        Raises:
            UsageError: A graph of the backward pass is wanted.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "SyncBatchNorm over several processes has no second derivatives, nor has torch's; leave out "
                "create_graph=True, or use torch.nn.BatchNorm2d"
            )
        input, weight, bias, mean, rstd = ctx.saved_tensors
        dims, shape = _around_channels(input)
        centred = input - mean.view(shape)
        own = torch.stack([grads[0].sum(dims, dtype=mean.dtype), (grads[0] * centred).sum(dims)])
        means = own.clone()
        dist.all_reduce(means, group=ctx.norm.process_group)
        means /= ctx.count
        centred.mul_((means[1] * rstd * rstd).view(shape)).add_(means[0].view(shape))
        factor = rstd if weight is None else rstd * weight
        of_input = (grads[0] - centred).mul_(factor.view(shape)).to(input.dtype)
        of_weight = None if weight is None else (own[1] * rstd).to(weight.dtype)
        return of_input, of_weight, None if bias is None else own[0].to(bias.dtype), None


def _around_channels(input: Tensor) -> tuple[list[int], list[int]]:
    """Return all dimensions but the channels', and the shape that spreads channels over the input."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    return dims, [-1 if dim == 1 else 1 for dim in range(input.dim())]


def _of_all(input: Tensor, group: Any) -> tuple[Tensor, Tensor, float]:
    """Return the mean and the biased variance of each channel, over all processes, and the count of values.

    Those of several batches are put together by Chan, Golub and LeVeque 1979 (STAN-CS-79-773).
    """
    dims, shape = _around_channels(input)
    own_count = input.numel() // input.shape[1]
    wide = input if input.dtype is torch.float64 else input.float()
    mean = wide.sum(dims) / own_count if own_count else wide.new_zeros(input.shape[1])
    # The mean of squares minus the square of the mean would need no second pass, but loses digits.
    own = mean, (wide - mean.view(shape)).square().sum(dims) / max(1, own_count)
    packed = torch.cat([*own, own[0].new_tensor([float(own_count)])])
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, packed, group=group)
    # Of an empty batch there is nothing to read; in fp64, since there are but few numbers.
    parts = torch.stack(gathered)
    parts = parts[parts[:, -1] > 0].double()
    means, variances, counts = parts.split([len(mean), len(mean), 1], 1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean.to(packed.dtype), variance.to(packed.dtype), float(count)


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
