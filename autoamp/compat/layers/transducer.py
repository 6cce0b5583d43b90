"""`apex.contrib.transducer`: the joint network and the loss of Graves 2012, arXiv:1211.3711."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoamp.errors import UsageError

__all__ = ["TransducerJoint", "TransducerLoss"]


class TransducerJoint(torch.nn.Module):
    """Adds every output of the encoder to every output of the prediction network; ReLU and dropout may follow.

    Args:
        pack_output: Whether the output has the rows within the lengths alone, sample after sample.
        relu: Whether a ReLU follows.
        dropout: Whether dropout follows, while training.
        opt: No effect.
        fwd_tile_size: No effect.
        dropout_prob: The share that dropout sets to 0.
        probe_mask: Whether each call appends its mask of ReLU and dropout, uint8, to the list ``mask_probe``.
    """

    def __init__(
        self, pack_output: bool = False, relu: bool = False, dropout: bool = False, opt: int = 1,
        fwd_tile_size: int = 4, dropout_prob: float = 0.0, probe_mask: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pack_output, self.relu, self.dropout, self.dropout_prob = pack_output, relu, dropout, dropout_prob
        self.mask_probe: list[Tensor] | None = [] if probe_mask and (relu or dropout) else None

    def forward(
        self, f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None = None,
        packed_batch: Tensor | int = 0,
    ) -> Tensor:  # fmt: skip
        """Return ``f[b, t] + g[b, u]`` for all samples ``b``, times ``t`` and labels ``u``.

        Args:
            f: The output of the encoder, shape ``(batch, times, features)``.
            g: The output of the prediction network, shape ``(batch, labels, features)``, of the same dtype.
            f_len: Shape ``(batch,)``: how many times each sample has.
            g_len: Shape ``(batch,)``: how many labels, and one for the blank at the start.
            batch_offset: ``torch.cumsum(f_len * g_len, dim=0)``; needed for packed output.
            packed_batch: The last value of that; needed likewise.

        Returns:
            Shape ``(batch, times, labels, features)``, -1 beyond the lengths; packed ``(packed_batch, features)``.

        Raises:
            UsageError: ``pack_output``, and ``batch_offset`` or ``packed_batch`` is missing, or the latter is wrong.
        """
        _, times, _ = f.shape
        labels = g.shape[1]
        inside = _inside(f_len, g_len, times, labels)
        sums = f[:, :, None] + g[:, None]
        if self.pack_output:
            if batch_offset is None or not int(packed_batch):
                raise UsageError("pack_output=True needs batch_offset and packed_batch; see TransducerJoint.forward")
            sums = sums[inside]
            if sums.shape[0] != int(packed_batch):
                raise UsageError(
                    f"packed_batch={int(packed_batch)}, and the lengths make {sums.shape[0]} rows; pass "
                    "(f_len * g_len).sum()"
                )
        drops = self.dropout and self.training
        if self.relu or drops:
            keep = sums > 0 if self.relu else torch.ones_like(sums, dtype=torch.bool)
            if drops:
                keep = keep & (torch.rand(sums.shape, device=sums.device) >= self.dropout_prob)
            if self.mask_probe is not None:
                self.mask_probe.append(keep.to(torch.uint8))
            scale = 1.0 / (1.0 - self.dropout_prob) if drops and self.dropout_prob != 1.0 else 1.0
            sums = torch.where(keep, sums * scale, 0.0)
        return sums if self.pack_output else torch.where(inside[..., None], sums, -1.0)


class TransducerLoss(torch.nn.Module):
    """The negative log probability of the labels, over all alignments: Graves 2012, arXiv:1211.3711.

    It is computed in fp32, or in fp64 for fp64 logits.

    Args:
        fuse_softmax_backward: No effect.
        opt: No effect.
        packed_input: Whether the input is packed, as `TransducerJoint` packs its output.
    """

    def __init__(self, fuse_softmax_backward: bool = True, opt: int = 1, packed_input: bool = False) -> None:
        super().__init__()
        self.packed_input = packed_input

    def forward(
        self, x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank_idx: int,
        batch_offset: Tensor | None = None, max_f_len: int | None = None, debug_list: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the loss of each sample, shape ``(batch,)``, in the dtype of ``x``.

        Args:
            x: Logits, shape ``(batch, times, labels + 1, classes)``; packed ``(rows, classes)``.
            label: Shape ``(batch, labels)``, class numbers.
            f_len: Shape ``(batch,)``: how many times each sample has.
            y_len: Shape ``(batch,)``: how many labels.
            blank_idx: The number of the blank.
            batch_offset: ``torch.cumsum(f_len * (y_len + 1), dim=0)``; needed for packed input.
            max_f_len: The largest of ``f_len``; needed likewise.
            debug_list: To an empty list the forward and the backward variables are appended: logarithms, shape
                ``(batch, times, labels + 1)``.

        Raises:
            UsageError: ``packed_input``, and ``batch_offset`` or ``max_f_len`` is missing; or shapes do not fit.
        """
        scores = torch.log_softmax(x if x.dtype is torch.float64 else x.float(), dim=-1)
        # No label follows the last one. Any class may stand there: its score has no effect.
        following = torch.nn.functional.pad(label.long(), (0, 1), value=blank_idx)
        if self.packed_input:
            if batch_offset is None or max_f_len is None:
                raise UsageError("packed_input=True needs batch_offset and max_f_len; see TransducerLoss.forward")
            rows = _packed_rows(batch_offset, y_len, int(max_f_len), following.shape[1])
            # Places beyond the lengths have no row. Any row may stand there: its scores have no effect.
            rows = rows.clamp(max=x.shape[0] - 1)
            blanks, nexts = scores[rows, blank_idx], scores[rows, following[:, None].expand_as(rows)]
        else:
            if x.dim() != 4 or x.shape[0] != label.shape[0] or x.shape[2] != following.shape[1]:
                raise UsageError(
                    f"logits of shape {tuple(x.shape)} and labels of {tuple(label.shape)}; they must be "
                    "(batch, times, labels + 1, classes) and (batch, labels)"
                )
            places = following[:, None, :, None].expand(*x.shape[:3], 1)
            blanks, nexts = scores[..., blank_idx], scores.gather(3, places)[..., 0]
        loss: Tensor
        loss, alpha, beta = _Alignments.apply(blanks, nexts, f_len, y_len)  # type: ignore[no-untyped-call]
        if debug_list is not None and not debug_list:
            debug_list += [alpha, beta]
        return loss.to(x.dtype)


class _Alignments(torch.autograd.Function):
    """The negative log probability of all alignments, by log probabilities of a blank and of the next label.

    Both have the shape ``(batch, times, labels + 1)``. Also returned are the forward and backward variables.
    """

    @staticmethod
    def forward(ctx: Any, blanks: Tensor, nexts: Tensor, f_len: Tensor, y_len: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha = _forward_variables(blanks, nexts)
        beta = _backward_variables(blanks, nexts, f_len, y_len)
        ctx.save_for_backward(blanks, nexts, alpha, beta, f_len, y_len)
        ctx.mark_non_differentiable(alpha, beta)
        return -beta[:, 0, 0], alpha, beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None]:
        blanks, nexts, alpha, beta, f_len, y_len = ctx.saved_tensors
        last = _is_last(blanks, f_len, y_len)
        # Each gradient is minus the share of all alignments that takes this step: Graves 2012, equation 20.
        reached = alpha - beta[:, :1, :1]
        after_blank = torch.where(last, 0.0, _shifted(beta, 1))
        after_next = _shifted(beta, 2)
        scale = -grad[:, None, None]
        return scale * (reached + blanks + after_blank).exp(), scale * (reached + nexts + after_next).exp(), None, None


def _forward_variables(blanks: Tensor, nexts: Tensor) -> Tensor:
    """Return the log probability of all ways from the start to each place, found diagonal by diagonal.

    On a diagonal, time plus label is the same, so its places depend on those of the one before alone.
    """
    batch, times, labels = blanks.shape
    by_blank, by_next = _skewed(blanks, -torch.inf), _skewed(nexts, -torch.inf)
    now = blanks.new_full((batch, labels), -torch.inf)
    now[:, 0] = 0.0
    found = [now]
    for step in range(1, times + labels - 1):
        down, right = now + by_blank[:, step - 1], (now + by_next[:, step - 1])[:, :-1]
        now = torch.logaddexp(down, torch.nn.functional.pad(right, (1, 0), value=-torch.inf))
        found.append(now)
    return _straight(torch.stack(found, dim=1), times)


def _backward_variables(blanks: Tensor, nexts: Tensor, f_len: Tensor, y_len: Tensor) -> Tensor:
    """Return the log probability of all ways from each place to the end; -inf beyond the lengths."""
    batch, times, labels = blanks.shape
    by_blank, by_next = _skewed(blanks, -torch.inf), _skewed(nexts, -torch.inf)
    last = _skewed(_is_last(blanks, f_len, y_len), False)
    inside = _skewed(_inside(f_len, y_len + 1, times, labels), False)
    now = blanks.new_full((batch, labels), -torch.inf)
    found = []
    for step in range(times + labels - 2, -1, -1):
        right = torch.nn.functional.pad(now[:, 1:], (0, 1), value=-torch.inf)
        both = torch.logaddexp(now + by_blank[:, step], right + by_next[:, step])
        now = torch.where(last[:, step], by_blank[:, step], both)
        now = torch.where(inside[:, step], now, -torch.inf)
        found.append(now)
    return _straight(torch.stack(found[::-1], dim=1), times)


def _skewed(values: Tensor, outside: float | bool) -> Tensor:
    """Return ``result[b, t + u, u] = values[b, t, u]``: the diagonals as rows."""
    batch, times, labels = values.shape
    result = values.new_full((batch, times + labels - 1, labels), outside)
    for label in range(labels):
        result[:, label : label + times, label] = values[:, :, label]
    return result


def _straight(values: Tensor, times: int) -> Tensor:
    """Undo `_skewed` for values of so many times."""
    return torch.stack([values[:, label : label + times, label] for label in range(values.shape[2])], dim=2)


def _shifted(values: Tensor, dim: int) -> Tensor:
    """Return the value of the next place along a dimension; -inf after the last."""
    pad = (0, 0, 0, 1) if dim == 1 else (0, 1)
    return torch.nn.functional.pad(values.narrow(dim, 1, values.shape[dim] - 1), pad, value=-torch.inf)


def _inside(f_len: Tensor, g_len: Tensor, times: int, labels: int) -> Tensor:
    """Tell which places are within the lengths: bool, shape ``(batch, times, labels)``."""
    in_time = torch.arange(times, device=f_len.device) < f_len[:, None]
    return in_time[:, :, None] & (torch.arange(labels, device=g_len.device) < g_len[:, None])[:, None]


def _is_last(values: Tensor, f_len: Tensor, y_len: Tensor) -> Tensor:
    """Tell which place is the last of its sample: bool, of the shape of ``values``."""
    _, times, labels = values.shape
    in_time = torch.arange(times, device=values.device) == f_len[:, None].to(values.device) - 1
    at_label = torch.arange(labels, device=values.device) == y_len[:, None].to(values.device)
    return in_time[:, :, None] & at_label[:, None]


def _packed_rows(batch_offset: Tensor, y_len: Tensor, times: int, labels: int) -> Tensor:
    """Return the row of packed input for each sample, time and label, shape ``(batch, times, labels)``."""
    starts = torch.nn.functional.pad(batch_offset[:-1], (1, 0)).long()
    time = torch.arange(times, device=y_len.device)[:, None] * (y_len.long() + 1)[:, None, None]
    return starts[:, None, None] + time + torch.arange(labels, device=y_len.device)
