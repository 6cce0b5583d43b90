"""`[modules]` at O2 and O3: the modules that it names stay fp32 in a model that is cast to half."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.apex.levels import shared
from tests.apex.levels.shared import values

LEVELS = ["O2", "O3"]


class Seen(nn.Module):
    """Notes the dtype of its input, of its weight and of its output."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = nn.ModuleList(inner)
        self.dtypes: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.dtypes = x.dtype, self.layer.weight.dtype, y.dtype
        for module in self.inner:
            y = module(y)
        return y


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Seen(), Seen(Seen(Seen())), Seen(), nn.BatchNorm1d(4))


def initialize(model: nn.Module, modules: dict[str, str], level: str, half: torch.dtype, *args: Any) -> Any:
    return shared.initialize(model, *args, opt_level=level, dtype=half, lists={"modules": modules})


def fp32_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose call, weights and results are fp32; of no module they are mixed."""
    assert model(torch.randn(6, 4)).dtype is torch.float32
    found = {name: set(module.dtypes) for name, module in model.named_modules() if isinstance(module, Seen)}
    assert all(len(dtypes) == 1 for dtypes in found.values())
    return [name for name, dtypes in found.items() if dtypes == {torch.float32}]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"2": "fp32"}, ["2"]),
        ({"1": "fp32"}, ["1", "1.inner.0", "1.inner.0.inner.0"]),
        ({"1.inner.*": "fp32"}, ["1.inner.0", "1.inner.0.inner.0"]),
        ({"1": "fp32", "1.inner.0": "fp16"}, ["1"]),
        ({"1": "fp32", "1.inner.0": "fp16", "1.inner.0.inner.0": "fp32"}, ["1", "1.inner.0.inner.0"]),
        ({"1": "fp32", "1.inner.0": "none"}, ["1", "1.inner.0", "1.inner.0.inner.0"]),
        ({f"{__name__}.Seen": "fp32", "1.inner.0": "fp16"}, ["0", "1", "1.inner.0.inner.0", "2"]),
        ({"torch.nn.Sequential": "fp32"}, ["0", "1", "1.inner.0", "1.inner.0.inner.0", "2"]),
        ({"torch.nn.Sequential": "fp32", "0": "fp16"}, ["1", "1.inner.0", "1.inner.0.inner.0", "2"]),
        ({"*": "fp16"}, []),
    ],
)
def test_modules_that_a_list_names_stay_fp32(
    modules: dict[str, str], expected: list[str], level: str, half: torch.dtype
) -> None:
    model = network()
    before = values(model)
    initialize(model, modules, level, half)
    assert fp32_modules(model) == expected
    assert fp32_modules(copy.deepcopy(model)) == expected
    # Another call begins anew, and the end restores all.
    initialize(model, {"0": "fp32"}, level, half)
    assert fp32_modules(model) == ["0"]
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    # Without masters half values stay rounded.
    assert all(torch.equal(one.to(half), before[name].to(half)) for name, one in model.named_parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_training_steps_fp32_and_half_modules(level: str, half: torch.dtype) -> None:
    model = network()
    model, optimizer = initialize(model, {"1": "fp32"}, level, half, torch.optim.SGD(model.parameters(), 0.1))
    stepped = list(autoamp.master_params(optimizer))
    assert model[1].layer.weight in set(stepped)
    assert {one.dtype for one in stepped} == ({torch.float32} if level == "O2" else {torch.float32, half})
    before = values(model)
    with autoamp.scale_loss(model(torch.randn(6, 4)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    moved = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert moved >= {name for name, _ in model[:3].named_parameters() if name.endswith("weight")}
    assert all(value.dtype is torch.float32 for value in model.state_dict().values() if value.is_floating_point())


def test_what_an_fp32_module_shares_stays_fp32(half: torch.dtype) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.layer(self.embedding(ids)))  # type: ignore[no-any-return]

    ids = torch.arange(8)
    model = initialize(Tied(), {"head": "fp32", "embedding": "fp32"}, "O2", half)
    assert model.head.weight is model.embedding.weight
    assert (model.head.weight.dtype, model.layer.weight.dtype) == (torch.float32, half)
    assert model(ids).dtype is torch.float32


def test_a_compiled_model_has_the_same_dtypes(half: torch.dtype) -> None:
    model = initialize(network(), {"1": "fp32"}, "O2", half)
    x = torch.randn(6, 4)
    model[3] = nn.Identity()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
