"""Programs with torch.compile: what they make within compiled code, compile before `init`, and step by."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

pytestmark = pytest.mark.filterwarnings("ignore:TF32", "ignore:Dynamo does not know")

HALF, BF16 = torch.float16, torch.bfloat16
X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4


@pytest.fixture(autouse=True)
def anew() -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="eager", **options)


class Classifier(nn.Module):
    """Makes its loss as it is called, as models of transformers do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.head, self.settings = nn.Linear(8, 4), settings

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(**self.settings)(self.head(x) * 1e4, y)


@pytest.mark.parametrize("scope", ["global", "modules"])
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize(
    "settings",
    [{}, {"weight": torch.tensor([1.0, 2.0, 0.5, 1.0])}, {"label_smoothing": 0.1, "reduction": "sum"}],
    ids=["", "weight", "smoothing"],
)
def test_a_loss_that_compiled_code_makes_is_that_of_eager_mode(
    scope: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    model = Classifier(**settings)
    called = compiled(model, fullgraph=True)
    handle = autoamp.init(device_type="cpu", dtype=dtype, scope=scope)
    expected = model(X, Y)
    assert expected.dtype is torch.float32
    torch.testing.assert_close(called(X, Y), expected, atol=0.0, rtol=0.0)
    handle.deactivate()
    torch.testing.assert_close(called(X, Y), model(X, Y))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: nn.CrossEntropyLoss(None, None, -100, None, "sum")(x, y),
        lambda x, y: nn.CrossEntropyLoss(torch.ones(8), reduction="mean")(input=x, target=y),
        lambda x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(x, target=y),
        lambda x, y: nn.CrossEntropyLoss()(x, F.softmax(x.detach(), -1)),
    ],
)
def test_a_loss_that_compiled_code_makes_takes_its_arguments_however_they_are_given(backend: str, call: Any) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=BF16)
    called, x = torch.compile(call, backend=backend), X.bfloat16().requires_grad_()

    def check() -> None:
        out, expected = called(x, Y), call(x, Y)
        assert out.dtype is expected.dtype
        torch.testing.assert_close(out, expected, atol=0.0, rtol=0.02)

    check()
    called(x, Y).backward()
    assert x.grad is not None
    handle.deactivate()
    handle = autoamp.init(device_type="cpu", dtype=BF16, lists={"none": ["torch.nn.functional.cross_entropy"]})
    called(X, Y)
    handle.deactivate()
    autoamp.init(device_type="cpu", dtype=BF16)
    check()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def promised(how: str, model: nn.Module) -> None:
    """Set a model up that was compiled before."""
    settings: dict[str, Any] = {"device_type": "cpu", "dtype": BF16}
    if how == "override":
        autoamp.init(**settings).override(model, "fp32")
    elif how == "class":
        autoamp.init(**settings, lists={"modules": {f"{__name__}.Net": "fp32"}})
    elif how == "scope":
        autoamp.init(**settings, scope="modules")
    else:
        level, _, scope = how.partition(" ")
        autoamp.initialize(model, opt_level=level, verbosity=0, scope=scope or "global", **settings)


@pytest.mark.parametrize("how", ["override", "class", "scope", "O1", "O1 models", "O2", "O3"])
@pytest.mark.parametrize("before", ["nothing", "a call", "a handle"])
def test_a_model_that_was_compiled_before_is_called_as_it_is_itself(how: str, before: str) -> None:
    model = Net()
    if before == "a handle":
        earlier = autoamp.init(device_type="cpu", dtype=HALF)
        called = compiled(model)
        called(X)
        earlier.deactivate()
    else:
        called = compiled(model)
        if before == "a call":
            called(X)
    promised(how, model)
    outer = nn.Sequential(called)
    for one in (called, outer):
        out, expected = one(X), model(X)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, atol=0.0, rtol=0.0)
    handle: Any = autoamp.current_handle()
    handle.deactivate()
    torch.testing.assert_close(called(X), F.linear(X, model.layer.weight, model.layer.bias), atol=0.0, rtol=0.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": BF16},
    "fp16": {"dtype": HALF},
    "other policies": {"dtype": BF16, "lists": {"fp32": ["matmul", "__matmul__", "linear"]}},
    "more": {"dtype": BF16, "lists": {"fp16": ["softmax"]}},
    "less": {"dtype": BF16, "lists": {"none": ["matmul"]}},
    "modules": {"dtype": BF16, "scope": "modules"},
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SETTINGS, 2)))
def test_compiled_code_casts_as_eager_mode_in_regions_that_take_turns(one: str, other: str) -> None:
    weight, layer = torch.randn(8, 8), nn.Linear(8, 8)

    def function(x: Tensor) -> list[Tensor]:
        products = [F.linear(x, weight), torch.matmul(x, weight), x @ weight, x.matmul(weight), layer(x)]
        return [*products, x.softmax(-1), torch.softmax(x, -1), torch.cat([x.bfloat16(), x])]

    # Graphs of the backend "eager" call what is patched when they run.
    called = torch.compile(lambda x: function(x), backend="aot_eager")
    regions = [autoamp.region(device_type="cpu", **SETTINGS[name]) for name in (one, other)]

    def check() -> None:
        assert [out.dtype for out in called(X)] == [out.dtype for out in function(X)]

    for _ in range(2):
        for region in regions:
            with region:
                check()
    check()
    with regions[0]:
        check()


def test_several_compiled_models_have_graphs_of_their_own() -> None:
    def made(factor: float) -> nn.Module:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x) * factor

        return torch.compile(Scaled(), backend="aot_eager", fullgraph=True)  # type: ignore[return-value]

    before = [made(float(number)) for number in range(4)]
    autoamp.init(device_type="cpu", dtype=BF16, scope="modules")
    for model in (*before, *(made(float(number)) for number in range(4, 8))):
        model.train()
        model(X).sum().backward()
        model.eval()
        with torch.no_grad():
            assert model(X).shape == (16, 8)
            assert model(X[:7]).shape == (7, 8)


def test_what_a_program_puts_in_place_of_a_compiled_forward_stays() -> None:
    model, calls = Net(), []
    called = compiled(model)
    forward = called.forward

    @functools.wraps(forward)
    def counted(*args: Any) -> Any:
        calls.append(args)
        return forward(*args)

    called.forward = counted
    autoamp.init(device_type="cpu", dtype=BF16)
    assert called(X).dtype is BF16
    assert len(calls) == 1


def test_a_region_within_compiled_code() -> None:
    weight = torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        with autoamp.region(device_type="cpu", dtype=BF16):
            return x @ weight

    assert compiled(function)(X).dtype is BF16


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()

    return compiled(step)


@pytest.mark.parametrize("way", ["auto_scale", "scale_loss"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_compiled_step_that_overflows_is_skipped(way: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    handle = autoamp.init(device_type="cpu", dtype=HALF, loss_scale="dynamic")
    if way == "auto_scale":
        handle.auto_scale()
    step, moved = _step_of(optimizer), []
    for number in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y) * (1e38 if number == 2 else 1.0)
        if way == "auto_scale":
            loss.backward()
        else:
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        before = model[0].weight.detach().clone()
        step()
        moved.append(not torch.equal(before, model[0].weight))
    assert moved == [True, True, False, True]
    assert handle.skipped_steps == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_op_of_torch_ops_that_a_list_names_keeps_its_overloads(backend: str) -> None:
    with torch.library._scoped_library("autoamp_tests", "DEF") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", lambda a, b: a.clone() @ b, "CPU")
        library.impl("product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")
        op = torch.ops.autoamp_tests.product
        handle = autoamp.init(device_type="cpu", dtype=BF16, lists={"fp16": ["torch.ops.autoamp_tests.product"]})
        replaced = torch.ops.autoamp_tests.product
        assert replaced(X.T, X).dtype is BF16
        assert replaced.default is op.default
        assert replaced.overloads() == op.overloads()
        called = torch.compile(lambda x: torch.ops.autoamp_tests.product(x.T, x), backend=backend)
        assert called(X).dtype is BF16
        handle.deactivate()
        assert torch.ops.autoamp_tests.product is op
