"""docs/howto/ema.md: an average of the weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started


def test_follow_updates_the_average_after_steps_that_were_not_skipped() -> None:
    training = Training(started())
    average = torch.optim.swa_utils.AveragedModel(training.model)
    training.handle.follow(lambda: average.update_parameters(training.model))
    for factor in (1.0, OVERFLOW, 1.0):
        training.step(factor)
    assert average.n_averaged == 2


def test_the_average_computes_in_half_precision_as_the_model_does() -> None:
    training = Training(started())
    average = torch.optim.swa_utils.AveragedModel(training.model)
    assert next(average.parameters()).dtype == torch.float32
    assert average(torch.ones(1, 4)).dtype == training.model(torch.ones(1, 4)).dtype == torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_average_that_half_precision_rounds_is_told_when_it_is_made(level: str) -> None:
    model = torch.nn.Linear(8, 2)
    autoamp.initialize(model, opt_level=level, device_type="cpu", dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"average of Linear in half precision.*docs/howto/ema.md"):
        torch.optim.swa_utils.AveragedModel(model)
    autoamp.initialize(model, opt_level="O1", device_type="cpu", dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.swa_utils.AveragedModel(model)


def test_at_O2_the_state_dict_has_changes_that_half_precision_rounds_away() -> None:
    model: Any = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    model, optimizer = autoamp.initialize(model, optimizer, opt_level="O2", device_type="cpu", loss_scale=128.0)
    with autoamp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert float(model.weight[0, 0].detach()) == 1.0
    assert 0.99998 < float(model.state_dict()["weight"][0, 0]) < 1.0


# -- a deep copy that the program averages itself --


def half_model(level: str = "O2", half: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return autoamp.initialize(model, optimizer, opt_level=level, device_type="cpu", dtype=half)  # type: ignore[arg-type]


def told(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_deep_copy_of_a_half_model_is_told_once_with_what_keeps_an_average(level: str) -> None:
    model, _ = half_model(level)
    with pytest.warns(
        UserWarning, match=r"copy of Sequential is in bfloat16.*\.float\(\).*docs/howto/ema.md"
    ) as caught:
        twin = copy.deepcopy(model)
    assert [warning.filename for warning in caught] == [__file__]
    for one in (model, twin, torch.nn.ModuleList([model])):
        assert not told(lambda one=one: copy.deepcopy(one))  # type: ignore[misc]


def test_copies_that_no_average_is_kept_in_are_not_told() -> None:
    model = torch.nn.Linear(8, 2)
    autoamp.initialize(model, opt_level="O2", device_type="cpu", dtype=torch.bfloat16)
    assert not told(lambda: copy.deepcopy(model)), "nothing trains it"
    model, _ = half_model()
    assert not told(lambda: copy.deepcopy(model.state_dict()))
    assert len(told(lambda: torch.optim.swa_utils.AveragedModel(model))) == 1
    model, _ = half_model("O1")
    assert not told(lambda: copy.deepcopy(model))
    model, _ = half_model()
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    assert not told(lambda: copy.deepcopy(model))


AVERAGES: dict[str, Callable[[Any, Any], object]] = {
    "parameters": lambda mean, new: [
        one.mul_(0.999).add_(other, alpha=0.001) for one, other in zip(mean.parameters(), new.parameters(), strict=True)
    ],
    "data": lambda mean, new: [
        one.data.lerp_(other.data.float(), 0.001)
        for one, other in zip(mean.parameters(), new.parameters(), strict=True)
    ],
    "state": lambda mean, new: [
        one.mul_(0.999).add_(other, alpha=0.001)
        for one, other in zip(mean.state_dict().values(), new.state_dict().values(), strict=True)
    ],
}


@pytest.mark.filterwarnings("ignore:the copy of")
@pytest.mark.parametrize("way", AVERAGES)
@pytest.mark.parametrize("made", ["before", "after"])
def test_the_average_in_an_fp32_copy_is_right(made: str, way: str) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    autoamp.initialize(model, optimizer, opt_level="O2", device_type="cpu", dtype=torch.bfloat16)
    if made == "after":
        average = copy.deepcopy(model).float()
    begin = {name: value.double() for name, value in model.state_dict().items()}
    exact = dict(begin)
    x = torch.randn(64, 8)
    for _ in range(50):
        optimizer.zero_grad()
        with autoamp.scale_loss((model(x) - x.sum(1, keepdim=True)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        with torch.no_grad():
            AVERAGES[way](average, model)
        exact = {name: value.lerp(model.state_dict()[name].double(), 0.001) for name, value in exact.items()}
    moved = max(float((exact[name] - begin[name]).abs().max()) for name in exact)
    for name, value in average.state_dict().items():
        assert value.dtype is torch.float32
        rounding = 2e-3 * begin[name].abs().max() if made == "after" else 0.0
        assert float((value - exact[name]).abs().max()) < rounding + 0.05 * moved
    assert average(x).isfinite().all()
