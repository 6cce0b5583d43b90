"""Steps that are about to write inf or nan, under the program's own `GradScaler` and without a loss scale."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import autoamp


class Own:
    """A training with the program's own `GradScaler`."""

    def __init__(self, dtype: torch.dtype = torch.float16, *, fused: bool = False, **settings: Any) -> None:
        self.handle: Any = autoamp.init(device_type="cpu", dtype=dtype, **settings)
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, factor: float = 1.0, added: float = 0.0) -> dict[str, Any]:
        """Step by a loss, and return the numbers of the handle."""
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * factor).sum() + added).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        stats: dict[str, Any] = self.handle.stats
        return stats


def test_an_own_scaler_keeps_its_numbers() -> None:
    own = Own()
    for step in range(7):
        stats = own.step(math.inf if step >= 2 else 1.0)
    assert (stats["skipped"], stats["steps"], stats["loss_scale"]) == (5, 7, 65536.0 / 2**5)
    assert [one.iteration for one in own.handle.overflows] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("kind", "skipped", "nonfinite"), [("nan loss", 0, 1), ("inf gradient", 1, 0), ("inf gradient, fused", 1, 0)]
)
def test_the_second_of_three_steps_under_an_own_scaler(kind: str, skipped: int, nonfinite: int) -> None:
    own = Own(fused=kind.endswith("fused"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.step()
        own.step(added=math.nan) if kind == "nan loss" else own.step(math.inf)
        stats = own.step()
    assert (stats["steps"], stats["skipped"], stats["nonfinite"]) == (3, skipped, nonfinite)
    assert stats["loss_scale"] == 65536.0 / 2**skipped
    told = any("step 1 of SGD has inf or nan in the loss" in str(one.message) for one in caught)
    assert told is bool(nonfinite)


def test_a_loss_of_inf_under_an_own_scaler_is_skipped_or_raises() -> None:
    """The gradients are finite, so the scaler itself takes the step."""
    own = Own(torch.bfloat16, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="step 0 of SGD has inf or nan in the loss, and is skipped"):
        stats = own.step(added=math.inf)
    assert (stats["nonfinite"], stats["skipped"], own.handle.last_step_skipped) == (1, 1, True)
    assert bool((own.weight == 1.0).all())
    stats = own.step()
    assert (stats["nonfinite"], stats["skipped"]) == (1, 1)
    assert bool((own.weight < 1.0).all())
    own = Own(torch.bfloat16, on_nonfinite="raise")
    with pytest.raises(autoamp.NonFiniteGradientsError, match="has inf or nan in the loss"):
        own.step(added=math.inf)
    assert bool((own.weight == 1.0).all())


def test_a_loss_keeps_no_large_outputs_that_it_is_an_element_of() -> None:
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    outputs = torch.nn.Linear(4, 1000)(torch.ones(2, 4))
    storage = outputs.untyped_storage()._weak_ref()
    outputs[0, 0].backward()
    del outputs
    expired = torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    assert expired


def test_a_bad_choice_is_told() -> None:
    with pytest.raises(autoamp.UsageError, match="'ignore' is unknown; choose 'warn', 'raise', 'skip'"):
        autoamp.init(device_type="cpu", on_nonfinite="ignore")


def test_gradients_without_a_kernel_for_sums_step_as_in_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex32))
    weight.grad = torch.ones(3, dtype=torch.complex32)
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    torch.optim.SGD([weight], lr=0.5).step()
    handle.deactivate()
    assert torch.equal(torch.view_as_real(weight.detach())[:, 0], torch.full((3,), 0.5, dtype=torch.float16))
