"""Steps that half precision makes wrong without any inf: the line that rounds is named, with an entry that heals it."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.tools import report_page


class Net(nn.Module):
    """Two perceptrons, with a module between them."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
        self.middle = middle
        self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.body(x), x))
        return out


class Middle(nn.Module):
    """One of the programs; ``clean`` for its twin. The line that rounds has the comment ``rounds``."""

    def __init__(self, clean: bool) -> None:
        super().__init__()
        self.clean = clean
        self.register_buffer("freq", 10000.0 ** (-torch.arange(16) / 16))
        self.register_buffer("bands", torch.randn(16, 16) * 8)
        self.embed, self.project = nn.Embedding(4000, 32), nn.Linear(16, 32)

    def waves(self, h: Tensor, angles: Tensor) -> Tensor:
        return h * torch.cat([angles.sin(), angles.cos()], -1)


class Rotary(Middle):
    """Angles of positions, by a product of matrices."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        position = torch.arange(3000, 3000 + len(h)).float()
        if self.clean:
            return self.waves(h, position[:, None] * self.freq)
        return self.waves(h, position[:, None] @ self.freq[None])  # rounds


class Fourier(Middle):
    """Random features of the inputs."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        if self.clean:
            return self.waves(h, (x[:, :, None] * self.bands).sum(1) * 6.28)
        return self.waves(h, F.linear(x, self.bands) * 6.28)  # rounds


class Coordinates(Middle):
    """Distances of points far from the origin, which were rotated."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        points, turn = 1000 + x[:, :2] * 4, torch.tensor([[0.8, -0.6], [0.6, 0.8]])
        turned = (points - points.mean(0)) @ turn if self.clean else torch.mm(points, turn)  # rounds
        return h * torch.exp(-(turned[:, None] - turned).square().sum(-1)).sum(1, keepdim=True)


class CastCoordinates(Middle):
    """The same with coordinates that the program itself casts."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        points = 1000 + x[:, :2] * 4
        points = points if self.clean else points.to(h.dtype)  # rounds
        return h * torch.exp(-(points[:, None] - points).square().sum(-1)).sum(1, keepdim=True)


class Positions(Middle):
    """Positions counted in the dtype of the activations."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        position = torch.arange(3000, 3000 + len(h), dtype=torch.float32 if self.clean else h.dtype)  # rounds
        return h * self.embed(position.long())


class Decay(Middle):
    """exp(-exp(w)) of a w in half precision."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        w = self.project(x)
        w = w.float() + 80.0 if self.clean else w + 80.0  # rounds
        return h * torch.exp(-torch.exp(w) * 2.0**-114)


class Variance(Middle):
    """A variance as the difference of two large numbers."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = h.float() if self.clean else h
        shifted = h + 20.0  # rounds
        return (shifted - shifted.mean(-1, keepdim=True)) * 100.0


class Distances(Middle):
    """Squared distances by a product of matrices."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        points = F.normalize(x, dim=-1) * 0.05 + 1.0
        squares = points.square().sum(-1)
        products = (points[:, None] * points).sum(-1) if self.clean else torch.matmul(points, points.T)  # rounds
        distances = squares[:, None] + squares - 2.0 * products
        return h * torch.exp(-distances * 200.0).sum(1, keepdim=True)


class Focal(Middle):
    """1 - p of a p close to 1."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        logits = h + 8.0 if not self.clean else h.float() + 8.0
        p = torch.sigmoid(logits)  # rounds
        return (1.0 - p) * 3000.0


class Angles(Middle):
    """Arcs of cosines close to 1."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a, b = F.normalize(x, dim=-1), F.normalize(x + 0.05 * x.roll(1, 0), dim=-1)
        cosines = (a * b).sum(-1) if self.clean else torch.bmm(a[:, None], b[:, :, None]).flatten()  # rounds
        return h * torch.acos(cosines.float().clamp(-1 + 1e-6, 1 - 1e-6))[:, None] * 20.0


PROGRAMS = [
    Rotary, Fourier, Coordinates, CastCoordinates, Positions, Decay, Variance, Distances, Focal, Angles,
]  # fmt: skip
# No entry of a list changes the dtype that the program itself asks for.
WITHOUT_ENTRY = (CastCoordinates, Positions)


def report_of(program: Callable[[bool], nn.Module], *, clean: bool, dtype: torch.dtype, **settings: Any) -> Any:
    """Train two steps, and return the report."""
    torch.manual_seed(0)
    net = Net(program(clean))
    x, y = torch.randn(24, 16), torch.randn(24, 8)
    handle: Any = autoamp.init(device_type="cpu", dtype=dtype, loss_scale=1.0, trace_overflow=True, **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    handle.record(sample=False)
    for _ in range(2):
        optimizer.zero_grad()
        with handle.scale_loss(F.mse_loss(net(x).float(), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    found = handle.report()
    handle.deactivate()
    return found


def line_of(program: type[nn.Module]) -> str:
    lines, first = inspect.getsourcelines(program.forward)
    number = next(number for number, line in enumerate(lines, first) if "# rounds" in line)
    return f"tests/tools/test_silent_rounding.py:{number}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_line_that_rounds_is_named_with_an_entry_that_heals(program: type[Middle]) -> None:
    found = report_of(program, clean=False, dtype=torch.bfloat16)
    first = found["roundings"][0]
    assert first["ops"][-1]["location"] == line_of(program), first["sentence"]
    assert first["share"] > 2 / 3
    assert found["verdict"]["level"] == "bad"
    assert found["verdict"]["sentence"].startswith(first["sentence"])
    if program in WITHOUT_ENTRY:
        assert "no entry of a list was found" in first["remedy"]
        return
    assert "(tried)" in first["remedy"]
    entry = {"fp32": first["fp32_names"]}
    if first["fp32_module"]:
        entry = {"modules": {first["fp32_module"]: "fp32"}}
    healed = report_of(program, clean=False, dtype=torch.bfloat16, lists=entry)
    assert (healed["roundings"], healed["verdict"]["level"]) == ([], "unclear")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_clean_twin_is_silent(program: type[Middle], dtype: torch.dtype) -> None:
    found = report_of(program, clean=True, dtype=dtype)
    assert found["roundings"] == found["faults"] == []
    assert "2 steps compared with fp32 the gradients are off by" in found["verdict"]["sentence"]


DEEP: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(16, 16), nn.ReLU()))),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 64, batch_first=True), 4),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        *(part for i in (1, 16, 16, 16) for part in (nn.Conv2d(i, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", DEEP)
def test_the_rounding_of_many_layers_is_no_fault(model: str, dtype: torch.dtype) -> None:
    class Deep(Middle):
        def __init__(self, clean: bool) -> None:
            super().__init__(clean)
            self.deep = DEEP[model]()

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.deep(x)
            return torch.cat([out, h[:, :16]], -1)

    assert report_of(Deep, clean=True, dtype=dtype)["roundings"] == []


def test_a_model_of_one_layer_close_to_its_minimum_is_silent() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(16, 4), torch.randn(64, 16)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0, trace_overflow=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.03)
    handle.record(sample=False)
    for _ in range(257):
        optimizer.zero_grad()
        with handle.scale_loss(F.mse_loss(net(x).float(), x @ torch.ones(16, 4) * 0.3), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert handle.report()["roundings"] == []


class Spline(nn.Module):
    """A layer of spline bases: its einsum is the one op in half precision."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(-1, 1, 8))
        self.coef = nn.Parameter(torch.randn(inputs, outputs, 8) / 10)

    def forward(self, x: Tensor) -> Tensor:
        bases = torch.relu(1 - 3.5 * (x[..., None] - self.centers).abs())
        return torch.einsum("bij,ioj->bo", bases, self.coef)  # rounds


class Tower(nn.Module):
    """Many lines, of which none makes most of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def near_its_minimum(net: nn.Module, x: Tensor, target: Callable[[Tensor], Tensor], **settings: Any) -> Any:
    """Train a step of a model that fits its targets closely, and return the report."""
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0, trace_overflow=True, **settings)
    handle.record(sample=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with handle.scale_loss(F.mse_loss(net(x).float(), target(x)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    found = handle.report()
    handle.deactivate()
    return found


@pytest.mark.parametrize(
    ("make", "place", "entry"),
    [
        (lambda: Spline(4, 4), f"einsum at {line_of(Spline)}", {"fp32": ["einsum"]}),
        (Tower, f"module {__name__}.Tower", {"modules": {f"{__name__}.Tower": "fp32"}}),
    ],
    ids=["the one op", "a module"],
)
def test_above_ten_percent_what_makes_it_is_named_although_it_is_all_of_the_products(
    make: Callable[[], nn.Module], place: str, entry: Any
) -> None:
    torch.manual_seed(0)
    net, x = make(), torch.rand(64, 8 if make is Tower else 4) * 2 - 1
    with torch.no_grad():
        exact = net(x) + 1e-3 * torch.randn(64, 8 if make is Tower else 4)
    found = near_its_minimum(net, x, lambda _: exact)
    # Close to a minimum all gradients are of rounding, so that it is no fault.
    assert (found["roundings"], found["verdict"]["level"]) == ([], "unclear")
    assert f"of that comes from {place}: add " in found["verdict"]["sentence"]
    assert found["verdict"]["sentence"].endswith("to the list file (tried)")
    assert [one["op"] for one in found["remedies"]] == list(entry.get("fp32") or entry["modules"])
    healed = near_its_minimum(net, x, lambda _: exact, lists=entry)
    assert "of that comes from" not in healed["verdict"]["sentence"]


class Curves(nn.Module):
    """A layer of a Kolmogorov-Arnold network: sums of B-spline bases, by the recursion of Cox and de Boor."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.coef = nn.Parameter(torch.randn(inputs, outputs, 8) / 10)

    def forward(self, x: Tensor) -> Tensor:
        base, knots, x = F.silu(x).sum(1, keepdim=True), torch.linspace(-2.2, 2.2, 12), x[..., None]
        bases = ((x >= knots[:-1]) * (x < knots[1:])).float()
        for k in range(1, 4):
            rising = (x - knots[: -(k + 1)]) / (knots[k:-1] - knots[: -(k + 1)]) * bases[..., :-1]
            bases = rising + (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k]) * bases[..., 1:]
        return base + torch.einsum("bij,ioj->bo", bases, self.coef)  # rounds


def by_closures(
    make: type[torch.optim.Optimizer], steps: int = 5, records: bool = True, **settings: Any
) -> tuple[Any, int]:
    """Train by closures, with an evaluation after each step. Return the report, and how often closures were called."""
    torch.manual_seed(0)
    net, x, calls = nn.Sequential(Curves(2, 5), Curves(5, 1)), torch.rand(200, 2) * 2 - 1, 0
    y = torch.exp(torch.sin(torch.pi * x[:, :1]) + x[:, 1:] ** 2)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0, trace_overflow=True, **settings)
    if records:
        handle.record(sample=False)
    optimizer: Any = make(net.parameters(), lr=1.0 if make is torch.optim.LBFGS else 1e-3)  # type: ignore[call-arg]

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = F.mse_loss(net(x).float(), y)
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
        F.mse_loss(net(x).float(), y)
    found = handle.report() if records else None
    handle.deactivate()
    return found, calls


def uncovered(found: Any) -> list[str]:
    """What a report has not seen, but for code that other tests have compiled in this process."""
    return [told for told in found["coverage"] if not told.startswith("torch.compile")]


def test_a_step_of_lbfgs_is_compared_by_an_evaluation_of_its_closure() -> None:
    found, calls = by_closures(torch.optim.LBFGS)
    assert (found["samples"]["compared"], uncovered(found)) == (3, [])
    assert f"einsum in module 0 at {line_of(Curves)}" in found["verdict"]["sentence"]
    assert [entry["op"] for entry in found["remedies"]] == ["einsum"]
    assert calls == by_closures(torch.optim.LBFGS, records=False)[1] > 10
    healed, _ = by_closures(torch.optim.LBFGS, lists={"fp32": ["einsum"]})
    assert "the gradients are off by 0.0%" in healed["verdict"]["sentence"]


def test_a_step_of_sgd_with_a_closure_is_compared() -> None:
    found, calls = by_closures(torch.optim.SGD)
    assert (found["samples"]["compared"], uncovered(found), calls) == (3, [], 5)


def test_the_name_of_a_function_heals_where_no_line_and_no_module_of_the_program_does() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(12)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    net, x = nn.Sequential(*layers), torch.rand(64, 8) * 2 - 1
    with torch.no_grad():
        exact = net(x) + 1e-3 * torch.randn(64, 8)
    sentence = near_its_minimum(net, x, lambda _: exact)["verdict"]["sentence"]
    assert sentence.endswith('of that comes from linear: add fp32 = ["linear"] to the list file (tried)')
    healed = near_its_minimum(net, x, lambda _: exact, lists={"fp32": ["linear"]})
    assert "of that comes from" not in healed["verdict"]["sentence"]


class InRegion:
    """Calls splines within a region of the program's own; ``exact`` as the report advises."""

    def __init__(self, exact: bool) -> None:
        self.spline, self.exact = Spline(4, 4), exact
        self.parameters = self.spline.parameters

    def __call__(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if not self.exact:
                return self.spline(x)
            with torch.autocast("cpu", enabled=False):
                return self.spline(x.float())


def test_no_entry_is_advised_where_the_program_casts_by_itself() -> None:
    sentences = []
    for exact in (False, True):
        torch.manual_seed(0)
        net: Any = InRegion(exact)
        x = torch.rand(64, 4) * 2 - 1
        with torch.no_grad():
            y = net.spline(x) + 1e-3 * torch.randn(64, 4)
        found = near_its_minimum(net, x, lambda _, y=y: y, scope="modules")  # type: ignore[misc]
        assert found["remedies"] == []
        sentences.append(found["verdict"]["sentence"])
    advice = "call einsum within torch.autocast('cpu', enabled=False) and with fp32 tensors (tried)"
    assert sentences[0].endswith(f"{advice}; lists have no effect, as the program casts by itself (torch.autocast)")
    assert "of that comes from" not in sentences[1]


def of_derivatives(**settings: Any) -> Any:
    """Train a step on the second derivative of a network, as those for equations of physics do."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.rand(200, 2, requires_grad=True)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0, trace_overflow=True, **settings)
    handle.record(sample=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def residual() -> Tensor:
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return first[:, 1] - 0.1 * second[:, 0]

    with handle.disable_casts():
        exact = residual().detach() + 1e-4 * torch.randn(200)
    loss = (residual() - exact).square().mean()
    with handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    found = handle.report()
    handle.deactivate()
    return found


def test_a_derivative_with_a_graph_of_its_own_is_in_fp32_where_its_function_is() -> None:
    sentence = of_derivatives()["verdict"]["sentence"]
    assert sentence.endswith('add fp32 = ["linear"] to the list file (tried)'), sentence
    healed = of_derivatives(lists={"fp32": ["linear"]})["verdict"]["sentence"]
    assert "the gradients are off by 0.0%" in healed


def test_the_page_shows_it() -> None:
    found = report_of(Rotary, clean=False, dtype=torch.bfloat16)
    (rounding,) = found["roundings"]
    assert rounding["sentence"].startswith(f"matmul in module middle at {line_of(Rotary)} rounds to bfloat16")
    assert [entry["op"] for entry in found["remedies"]] == ["__matmul__", "__rmatmul__"]
    assert html.escape(rounding["sentence"]) in report_page(found)
