"""The survey of a program: its uses, exact counts of bytes and overflows, and nothing of it changed."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.tools.tuning import Proposal, Survey, SurveyEnded, Surveyor, proposals_of

ROWS, WIDTH = 64, 32

# How each op is timed.
VARIANTS = {"fp32", "half", "half_cast"}


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 400.0) * (x * 400.0)


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def handle(request: pytest.FixtureRequest) -> Any:
    # The set for bf16 leaves norms alone.
    return autoamp.init(device_type="cpu", dtype=request.param, loss_scale=1.0, lists={"fp32": ["layer_norm"]})


def surveyed(handle: Any, model: nn.Module, x: Tensor, steps: int = 2) -> Survey:
    """Survey a training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    surveyor = Surveyor(handle, steps=steps, seconds=60.0)

    def program() -> None:
        for _ in range(10):
            model(x).sum().backward()
            optimizer.step()

    with surveyor, pytest.raises(SurveyEnded):
        program()
    return surveyor.survey(60.0)


def test_each_op_is_seen_and_measured_in_each_variant(handle: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    found = surveyed(handle, model, torch.randn(ROWS, WIDTH))
    assert (found.steps, found.untimed) == (2, 0)
    assert found.dtype == str(handle.settings.dtype).removeprefix("torch.")
    uses = {use.target: use for use in found.uses if use.seconds}
    linear, norm = uses["linear"], uses["layer_norm"]
    assert (linear.policy, linear.calls, linear.module_class) == ("fp16", 2, "torch.nn.Linear")
    assert norm.policy == "fp32"
    assert set(linear.seconds) == set(norm.seconds) == VARIANTS
    assert linear.error is not None
    assert 0 < linear.error < 0.05
    assert linear.overflow == 0


def test_an_overflow_of_an_op_on_no_list_is_found_in_fp16_alone(handle: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Square())
    nn.init.constant_(model[0].weight, 1.0)
    found = surveyed(handle, model, torch.ones(3, 2), steps=1)
    unsafe = [one for one in proposals_of(found) if one.kind == "unsafe"]
    if handle.settings.dtype is torch.bfloat16:
        assert unsafe == []
    else:
        assert [(one.name, one.value) for one in unsafe] == [
            (name, "fp32") for name in ("__mul__", "__rmul__", "mul", "multiply")
        ]
        assert "test_survey.py" in unsafe[0].reason


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


class Around(nn.Module):
    """Squares, and has a module within."""

    def __init__(self) -> None:
        super().__init__()
        self.within = Twice()

    def forward(self, x: Tensor) -> Tensor:
        y = self.within(x)
        return y * 400.0 * y


def unsafe_of(survey: Survey) -> list[Proposal]:
    return [one for one in proposals_of(survey) if one.kind == "unsafe"]


def test_an_op_on_no_list_that_overflows_in_one_class_alone() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.0)
    model = nn.Sequential(nn.Linear(2, 2), Twice(), Square())
    nn.init.constant_(model[0].weight, 1.0)
    (found,) = unsafe_of(surveyed(handle, model, torch.ones(3, 2), steps=1))
    assert (found.name, found.value, found.of_module) == (f"{__name__}.Square", "fp32", True)
    # What is called within a class would be in fp32 as well.
    model = nn.Sequential(nn.Linear(2, 2), Around())
    nn.init.constant_(model[0].weight, 10.0)
    by_op = unsafe_of(surveyed(handle, model, torch.ones(3, 2), steps=1))
    assert [one.name for one in by_op] == ["__mul__", "__rmul__", "mul", "multiply"]
    handle.deactivate()
    entries = {"modules": {found.name: found.value}}
    model = nn.Sequential(nn.Linear(2, 2), Twice(), Square())
    nn.init.constant_(model[0].weight, 1.0)
    for lists, finite in ((entries, True), (None, False)):
        handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.0, lists=lists)
        assert bool(model(torch.ones(3, 2)).isfinite().all()) is finite
        handle.deactivate()


def test_an_overflow_of_a_listed_operator_names_the_operator() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.T) * 1e-5

    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.0)
    model = nn.Sequential(nn.Linear(2, 2), Scores())
    nn.init.constant_(model[0].weight, 200.0)
    found = surveyed(handle, model, torch.ones(3, 2), steps=1)
    unsafe = unsafe_of(found)
    # Its results are 320,000; what comes of these by 1e-5 is not too large.
    assert [(one.name, one.value) for one in unsafe] == [("__matmul__", "fp32")]
    handle.deactivate()
    entries = {"fp32": [one.name for one in unsafe]}
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.0, lists=entries)
    assert model(torch.ones(3, 2)).isfinite().all()


def test_an_overflow_is_told_of_each_op_of_its_line() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x.T) + torch.matmul(4.0 * x, 4.0 * x.T)

    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.0)
    model = nn.Sequential(nn.Linear(2, 2), Scores())
    nn.init.constant_(model[0].weight, 5.0)  # type: ignore[arg-type]
    found = surveyed(handle, model, torch.full((2, 2), 10.0), steps=1)
    assert {"mm", "matmul"} <= {one.name for one in unsafe_of(found)}


def test_it_ends_by_the_clock_and_leaves_what_it_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    monkeypatch.setattr(time, "monotonic", functools.partial(next, itertools.count()))
    surveyor = Surveyor(handle, steps=100, seconds=3.0)

    def program() -> None:
        while True:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    with surveyor, pytest.raises(SurveyEnded):
        program()
    found = surveyor.survey(0.5)
    assert (found.untimed, found.uses[0].seconds) == (1, {})
    assert 0 < found.uses[0].calls <= 3


def test_in_place_ops_leave_the_programs_tensors_alone() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, lists={"fp32": ["sigmoid"]})
    x = torch.zeros(4)
    surveyor = Surveyor(handle, steps=1, seconds=60.0)
    with surveyor:
        x.sigmoid_()
    found = surveyor.survey(60.0)
    assert x.tolist() == [0.5] * 4
    assert [set(use.seconds) for use in found.uses if use.target == "sigmoid" and use.policy == "fp32"] == [VARIANTS]
