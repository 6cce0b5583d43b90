"""An op that takes inf or nan is not named as the op that made it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.diagnostics import HalfPrecisionOp, Overflow
from tests.diagnostics.faults import SteepInHalf, line_of, mean_square, started, take_step

STEPS = 3
WEIGHT = torch.full((4, 4), 3e4, dtype=torch.float16)


def overflows_of(loss: Callable[[Tensor], Tensor], *models: nn.Module) -> list[Overflow]:
    """Return what was found in a few steps, all of which overflow."""
    torch.manual_seed(0)
    handle = started()
    optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()], lr=0.01)
    for _ in range(STEPS):
        take_step(handle, loss, optimizer, lambda value: value)
    found = list(handle.overflows)
    handle.deactivate()
    assert len(found) == STEPS
    return found


def explained(loss: Callable[[Tensor], Tensor]) -> Overflow:
    """Return what is found on demand."""
    handle = started(traced=False)
    found: Overflow | None = handle.explain_overflow(lambda: loss(torch.randn(5, 4)))
    handle.deactivate()
    assert found is not None
    return found


def prior(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.half().abs().clamp(10.0) @ WEIGHT


USES_OF_PRIOR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda out, inf: mean_square(out + inf),
    "in place": lambda out, inf: mean_square(out.clone().add_(inf)),
    "mul": lambda out, inf: mean_square(inf * out),
    "matmul": lambda out, inf: mean_square(out.float() @ inf.float().T),
    "target": lambda out, inf: F.mse_loss(out.float(), inf.float()),
    "weight": lambda out, inf: F.binary_cross_entropy_with_logits(
        out.float(), torch.ones(5, 4), pos_weight=inf.float()
    ),
}


@pytest.mark.parametrize("use", USES_OF_PRIOR)
def test_a_half_tensor_without_a_gradient_that_the_loss_takes(use: str) -> None:
    """The graph of the loss does not have the matmul; the first op that takes the inf is not named instead."""
    model = nn.Linear(4, 4)

    def loss(x: Tensor) -> Tensor:
        return USES_OF_PRIOR[use](model(x), prior(x))

    for matmul in (*overflows_of(loss, model), explained(loss)):
        assert isinstance(matmul.verdict, HalfPrecisionOp), str(matmul)
        assert (matmul.op, matmul.location) == ("matmul", line_of(prior, "@ WEIGHT"))


def test_a_function_whose_backward_pass_overflows_outside_of_modules() -> None:
    """It is known, and what it would give in fp32 is not."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for loss in (
        lambda x: second(torch.relu(SteepInHalf.apply(first(x)))),
        lambda x: SteepInHalf.apply(first(x)) * 2.0,
    ):
        for found in overflows_of(lambda x, loss=loss: mean_square(loss(x)), first, second):
            assert (found.op, found.location) == ("SteepInHalf", line_of(SteepInHalf, "* 60000.0")), str(found)
            assert found.kind in ("not_located", "half_precision_op")
