"""The transducer's loss against a sum over all alignments, and its joint network against loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp.compat.layers.transducer import TransducerJoint, TransducerLoss
from autoamp.errors import UsageError

BLANK = 1
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def loss_by_enumeration(scores: Tensor, label: list[int], times: int) -> Tensor:
    """Minus the logarithm of the sum over all orders of blanks and labels; the last step is a blank."""
    paths = []
    steps = times - 1 + len(label)
    for blanks in itertools.combinations(range(steps), times - 1):
        t = u = 0
        score = scores.new_zeros(())
        for step in range(steps):
            if step in blanks:
                score, t = score + scores[t, u, BLANK], t + 1
            else:
                score, u = score + scores[t, u, label[u]], u + 1
        paths.append(score + scores[t, u, BLANK])
    return -torch.logsumexp(torch.stack(paths), dim=0)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(4, 5, 4, 6) * 2).to(dtype).requires_grad_()
    label = torch.randint(2, 6, (4, 3), dtype=torch.int32)
    return logits, label, torch.tensor([5, 3, 1, 4], dtype=torch.int32), torch.tensor([3, 2, 3, 0], dtype=torch.int32)


def packed(values: Tensor, f_len: Tensor, g_len: Tensor) -> tuple[Tensor, Tensor]:
    rows = [values[b, :f, :g].flatten(0, 1) for b, (f, g) in enumerate(zip(f_len, g_len, strict=True))]
    return torch.cat(rows), torch.cumsum(f_len * g_len, dim=0)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_loss(dtype: torch.dtype, pack: bool) -> None:
    logits, label, f_len, y_len = batch(dtype)
    exact = logits.detach().double().requires_grad_()
    expected = torch.stack([
        loss_by_enumeration(exact[b].log_softmax(-1), label[b, : y_len[b]].tolist(), int(f_len[b])) for b in range(4)
    ])  # fmt: skip
    if pack:
        rows, offsets = packed(logits, f_len, y_len + 1)
        found = TransducerLoss(packed_input=True)(
            rows, label, f_len, y_len, BLANK, batch_offset=offsets, max_f_len=int(f_len.max())
        )
    else:
        found = TransducerLoss()(logits, label, f_len, y_len, BLANK)
    assert found.dtype is dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.tensor([1.0, 0.5, 2.0, -1.0], dtype=torch.float64)
    (found.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    assert not logits.grad[1, 3:].any(), "nothing beyond the lengths"


def test_classes_that_are_ruled_out() -> None:
    logits, label, f_len, y_len = batch(torch.float32)
    unused = next(c for c in range(2, 6) if c not in label[0])
    with torch.no_grad():
        logits[0, ..., unused] = -math.inf
    loss = TransducerLoss()(logits, label, f_len, y_len, BLANK)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()


def test_loss_of_long_samples_in_half_is_that_in_fp64(half: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 60, 21, 30).to(half)
    label = torch.randint(2, 30, (2, 20))
    f_len, y_len = torch.tensor([60, 41]), torch.tensor([20, 11])
    debug: list[Tensor] = []
    found = TransducerLoss()(logits.float(), label, f_len, y_len, BLANK, debug_list=debug)
    torch.testing.assert_close(
        found.double(), TransducerLoss()(logits.double(), label, f_len, y_len, BLANK), rtol=1e-5, atol=0
    )
    alpha, beta = debug
    assert alpha.shape == beta.shape == (2, 60, 21)
    # From both ends the same sum comes out, at every step of the way.
    torch.testing.assert_close(torch.logsumexp((alpha + beta)[0, :, 0][:1], dim=0), -found[0], rtol=1e-5, atol=0)
    assert TransducerLoss()(logits, label, f_len, y_len, BLANK).dtype is half


def test_loss_arguments() -> None:
    logits, label, f_len, y_len = batch(torch.float32)
    with pytest.raises(UsageError, match="batch_offset and max_f_len"):
        TransducerLoss(packed_input=True)(logits, label, f_len, y_len, BLANK)
    with pytest.raises(UsageError, match=r"labels \+ 1"):
        TransducerLoss()(logits[:, :, :3], label, f_len, y_len, BLANK)


LENGTHS = torch.tensor([4, 2, 3]), torch.tensor([1, 5, 3])


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_joint(dtype: torch.dtype, dropout: bool, relu: bool, pack: bool) -> None:
    torch.manual_seed(0)
    f, g = (torch.randn(3, size, 6).to(dtype).requires_grad_() for size in (4, 5))
    f_len, g_len = LENGTHS
    offsets = torch.cumsum(f_len * g_len, dim=0)
    joint = TransducerJoint(pack, relu, dropout, dropout_prob=0.5, probe_mask=True)
    found = joint(f, g, f_len, g_len, offsets, offsets[-1]) if pack else joint(f, g, f_len, g_len)
    assert found.dtype is dtype
    masks = joint.mask_probe[0] if relu or dropout else None
    rows = []
    exact = [tensor.detach().float().requires_grad_() for tensor in (f, g)]
    for b, t, u in itertools.product(range(3), range(4), range(5)):
        inside = t < f_len[b] and u < g_len[b]
        if not inside:
            if not pack:
                assert (found[b, t, u] == -1.0).all()
            continue
        row = exact[0][b, t] + exact[1][b, u]
        if masks is not None:
            mask = masks[len(rows)] if pack else masks[b, t, u]
            assert not relu or not (mask.bool() & (row <= 0)).any()
            row = row * mask * (2.0 if dropout else 1.0)
        rows.append(row)
    if dropout:
        assert 0.1 < float(masks.float().mean()) < 0.7
    expected = torch.stack(rows)
    rows_found = found if pack else packed(found, f_len, g_len)[0]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(rows_found.float(), expected, rtol=tolerance, atol=tolerance)
    factors = torch.randn(expected.shape)
    (rows_found.float() * factors).sum().backward()
    (expected * factors).sum().backward()
    for one, other in zip((f, g), exact, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=tolerance, atol=5 * tolerance)


def test_joint_without_dropout_where_it_does_not_train() -> None:
    f, g = torch.randn(1, 2, 3), torch.randn(1, 2, 3)
    joint = TransducerJoint(dropout=True, dropout_prob=0.9).eval()
    torch.testing.assert_close(joint(f, g, torch.tensor([2]), torch.tensor([2])), f[:, :, None] + g[:, None])
    assert joint.mask_probe is None


def test_joint_arguments() -> None:
    f, g = torch.randn(3, 4, 6), torch.randn(3, 5, 6)
    with pytest.raises(UsageError, match="needs batch_offset"):
        TransducerJoint(pack_output=True)(f, g, *LENGTHS)
    with pytest.raises(UsageError, match="packed_batch=3"):
        TransducerJoint(pack_output=True)(f, g, *LENGTHS, torch.tensor([4, 14, 23]), 3)


def test_loss_under_casts_is_the_same(half: torch.dtype) -> None:
    given = (*batch(torch.float32), BLANK)
    plain = TransducerLoss()(*given)
    autoamp.init(dtype=half, device_type="cpu")
    torch.testing.assert_close(TransducerLoss()(*given), plain)
