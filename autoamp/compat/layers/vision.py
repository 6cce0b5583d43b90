"""Parts of `apex.contrib` for image models: group norm, batch norm over several processes, focal loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.parallel import SyncBatchNorm, create_syncbn_process_group

__all__ = [
    "BatchNorm2d_NHWC",
    "FocalLoss",
    "GroupNorm",
    "focal_loss",
    "torch_group_norm",
]

_ACTIVATIONS = ("", "silu", "swish")


def torch_group_norm(x: Tensor, g: int, w: Tensor | None, b: Tensor | None, eps: float, act: str = "") -> Tensor:
    """Return the group norm (Wu, He 2018, arXiv:1803.08494), computed in fp32, or in fp64 for fp64 input.

    Args:
        x: Shape ``(batch, channels, *)``.
        g: The number of groups.
        w: Shape ``(channels,)``, of any dtype, or None.
        b: Likewise.
        eps: Added to the variance.
        act: ``"silu"`` or ``"swish"``, which are the same, for a SiLU to follow; ``""`` for none.

    Returns:
        The shape and the dtype of ``x``.

    Raises:
        UsageError: ``act`` is unknown.
    """
    act = act.lower()
    if act not in _ACTIVATIONS:
        raise UsageError(f"act={act!r} is unknown; choose '', 'silu' or 'swish'")
    width = torch.float64 if x.dtype is torch.float64 else torch.float32
    weight, bias = (tensor if tensor is None else tensor.to(width) for tensor in (w, b))
    found = F.group_norm(x.to(width), g, weight, bias, eps)
    return (F.silu(found) if act else found).to(x.dtype)


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` that takes half input beside fp32 weights, and may have a SiLU follow.

    Args:
        num_groups: The number of groups.
        num_channels: The number of channels, a multiple of ``num_groups``.
        eps: Added to the variance.
        affine: Whether there are a weight and a bias.
        device: Of weight and bias.
        dtype: Of weight and bias.
        act: ``"silu"`` or ``"swish"``, which are the same, for a SiLU to follow; ``""`` for none.

    Raises:
        UsageError: ``act`` is unknown.
        ValueError: ``num_channels`` is no multiple of ``num_groups``.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, act: str = "",
    ) -> None:  # fmt: skip
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.act = act.lower()
        if self.act not in _ACTIVATIONS:
            raise UsageError(f"act={act!r} is unknown; choose '', 'silu' or 'swish'")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(batch, channels, *)``, in its own dtype."""
        return torch_group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.act)


class BatchNorm2d_NHWC(SyncBatchNorm):  # noqa: N801
    """Batch norm of tensors of shape ``(batch, height, width, channels)``, over one process or a group of several.

    Args:
        num_features: The number of channels.
        fuse_relu: Whether a ReLU follows.
        bn_group: How many processes share their statistics; 1 for each by itself.
        max_cta_per_sm: No effect.
        cta_launch_margin: No effect.
        multi_stream: No effect.

    Raises:
        ValueError: The number of processes is no multiple of ``bn_group``.
    """

    def __init__(
        self, num_features: int, fuse_relu: bool = False, bn_group: int = 1, max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12, multi_stream: bool = False,
    ) -> None:  # fmt: skip
        group = create_syncbn_process_group(bn_group) if bn_group > 1 else None
        super().__init__(num_features, process_group=group, channel_last=True, fuse_relu=fuse_relu)
        self.bn_group = bn_group

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalised input, in its shape.

        Args:
            input: Shape ``(batch, height, width, channels)``.
            z: Of the same shape, added before the ReLU.

        Raises:
            UsageError: ``z`` is given, and the layer has no ReLU.
        """
        if z is not None and not self.fuse_relu:
            raise UsageError("BatchNorm2d_NHWC: z is added before a ReLU; make the layer with fuse_relu=True")
        return super().forward(input, z)

    def _normalised(self, input: Tensor) -> Tensor:
        if self.bn_group == 1:
            # To the base class, no process group means all processes.
            return torch.nn.BatchNorm2d.forward(self, input)
        return super()._normalised(input)


class FocalLoss:
    """Focal loss (Lin et al. 2017, arXiv:1708.02002), called by ``apply``."""

    @staticmethod
    def apply(
        cls_output: Tensor, cls_targets_at_level: Tensor, num_positives_sum: Tensor, num_real_classes: int,
        alpha: float, gamma: float, label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return the sum of the losses of all anchors and classes, divided by the number of positive anchors.

        The loss of one is ``weight * (1 - p) ** gamma * entropy``: the weight is ``alpha`` for the target's class and
        ``1 - alpha`` for others, ``p`` the probability that is given to the right answer, the last factor the binary
        cross entropy. All is computed in fp32, or in fp64 for fp64 logits.

        Args:
            cls_output: Logits, shape ``(*, classes)``.
            cls_targets_at_level: Shape ``(*,)``, class numbers; -1 for an anchor of no class, -2 for one to ignore.
            num_positives_sum: The number of positive anchors, a tensor of one element.
            num_real_classes: Classes from this number on are padding.
            alpha: The weight of the target's class.
            gamma: The exponent; the larger it is, the less do well-answered anchors count.
            label_smoothing: The targets are half of it and 1 less that half, in place of 0 and 1.

        Returns:
            A tensor without dimensions, fp32 or fp64.

        Raises:
            UsageError: The shapes do not fit.
        """
        if cls_targets_at_level.shape != cls_output.shape[:-1] or cls_output.shape[-1] < num_real_classes:
            raise UsageError(
                f"logits of shape {tuple(cls_output.shape)}, targets of {tuple(cls_targets_at_level.shape)} and "
                f"{num_real_classes} classes; they must be (*, classes), (*) and at most as many classes"
            )
        logits = cls_output[..., :num_real_classes]
        logits = logits if logits.dtype is torch.float64 else logits.float()
        targets = cls_targets_at_level[..., None]
        positive = targets == torch.arange(num_real_classes, device=targets.device)
        is_target = positive.to(logits.dtype)
        smoothed = is_target * (1.0 - label_smoothing) + label_smoothing / 2
        entropy = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none")
        # The probability 1 - p of the wrong answer; subtracting p from 1 would lose digits.
        other = torch.sigmoid(torch.where(positive, -logits, logits))
        weights = is_target * alpha + (1.0 - is_target) * (1.0 - alpha)
        losses = weights * other**gamma * entropy
        return torch.where(targets == -2, 0.0, losses).sum() / num_positives_sum.reshape(())


def focal_loss(
    cls_output: Tensor, cls_targets_at_level: Tensor, num_positive_sum: Tensor, num_real_classes: int, alpha: float,
    gamma: float, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the focal loss; see `FocalLoss.apply`."""
    return FocalLoss.apply(
        cls_output, cls_targets_at_level, num_positive_sum, num_real_classes, alpha, gamma, label_smoothing
    )
