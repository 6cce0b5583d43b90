"""Random draws that follow a half tensor, and quantization-aware training: in fp32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

HALF, FP32 = torch.bfloat16, torch.float32

# What draws by a half tensor, and the dtype of the result.
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "rand_like": (lambda x: torch.rand_like(x), FP32),
    "randn_like": (lambda x: torch.randn_like(x), FP32),
    "randint_like": (lambda x: torch.randint_like(x, 1000), FP32),
    "by name": (lambda x: torch.rand_like(input=x), FP32),
    "normal": (lambda x: torch.normal(x, x.abs() + 1), FP32),
    "normal of a mean": (lambda x: torch.normal(x, 1.0), FP32),
    "poisson": (lambda x: torch.poisson(x.abs() + 1000), FP32),
    "binomial": (lambda x: torch.binomial(x * 0 + 1000, x * 0 + 0.5), FP32),
    # What the caller asks for.
    "a half dtype": (lambda x: torch.rand_like(x, dtype=HALF), HALF),
    "another dtype": (lambda x: torch.randn_like(x, dtype=torch.float64), torch.float64),
    "in place": (lambda x: torch.empty_like(x).uniform_(), HALF),
    "zeros and ones": (lambda x: torch.bernoulli(x * 0 + 0.5), HALF),
}


@pytest.fixture
def x() -> Tensor:
    autoamp.init(device_type="cpu", dtype=HALF)
    return torch.ones(100, 100, dtype=HALF)


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_by_a_half_tensor_are_fp32_unless_the_caller_gives_a_dtype(x: Tensor, draw: str) -> None:
    call, dtype = DRAWS[draw]
    drawn = call(x)
    assert (drawn.dtype, drawn.shape) == (dtype, x.shape)
    assert call(nn.Parameter(x)).dtype is dtype
    compiled = torch.compile(call, backend="eager", fullgraph=True)(x)
    assert (compiled.dtype, compiled.shape) == (dtype, x.shape)


def test_samples_by_noise_are_those_of_the_distribution(x: Tensor) -> None:
    torch.manual_seed(0)
    logits = torch.zeros(4000, 512, dtype=HALF)
    noise = -torch.log(-torch.log(torch.rand_like(logits) + 1e-20) + 1e-20)
    first = float(((logits + noise).argmax(-1) < 8).float().mean())
    # Of bf16 noise it is 3.5 %.
    assert abs(first - 8 / 512) < 0.006


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", [0, 1])
def test_quantization_aware_training_observes_as_in_fp32(half: torch.dtype, version: int) -> None:
    from torch.ao.quantization import DeQuantStub, QuantStub, get_default_qat_qconfig, prepare_qat

    def trained(casts: bool) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        with warnings.catch_warnings(action="ignore"):
            net: Any = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
            net.append(DeQuantStub())
            net.qconfig = get_default_qat_qconfig("fbgemm", version=version)
            net = prepare_qat(net)
        optimizer, x, y = torch.optim.SGD(net.parameters(), 0.05), torch.randn(16, 3, 6, 6), torch.arange(16) % 4
        handle = autoamp.init(device_type="cpu", dtype=half, enabled=casts, scope="modules", loss_scale=1.0)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        handle.deactivate()
        return losses, {name: value.float() for name, value in net.state_dict().items() if "scale" in name}

    (plain, exact), (losses, scales) = trained(False), trained(True)
    assert losses[-1] < 0.9 * losses[0]
    assert abs(losses[-1] - plain[-1]) < 0.05 * plain[0]
    torch.testing.assert_close(scales, exact, rtol=0.1, atol=1e-3)


def test_what_an_observer_writes_to_half_buffers_stays(x: Tensor) -> None:
    low, high = torch.tensor(torch.inf, dtype=HALF), torch.tensor(-torch.inf, dtype=HALF)
    scale, zero, on = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    out = torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.1, 0, 255, 0)
    assert out.dtype is FP32
    assert (float(low), float(high)) == (1.0, 1.0)
    assert float(scale) != 1.0


# -- samples --

D: Any = torch.distributions
# What makes each distribution of these, by its name, from a function that makes a parameter.
DISTRIBUTIONS: dict[str, Callable[[Callable[[float], Tensor]], Any]] = {
    "uniform": lambda at: D.Uniform(at(0.0), at(1.0)),
    "gumbel": lambda at: D.Gumbel(at(0.0), at(1.0)),
    "laplace": lambda at: D.Laplace(loc=at(0.0), scale=at(1.0)),
    "geometric": lambda at: D.Geometric(at(0.5)),
    "geometric of logits": lambda at: D.Geometric(logits=at(-3.0)),
    "kumaraswamy": lambda at: D.Kumaraswamy(at(2.0), at(3.0)),
    "relaxed bernoulli": lambda at: D.RelaxedBernoulli(at(0.5), at(0.25)),
    "continuous bernoulli": lambda at: D.ContinuousBernoulli(at(0.25)),
    "bernoulli": lambda at: D.Bernoulli(logits=at(-4.0)),
    "normal": lambda at: D.Normal(at(0.0), at(1.0)),
    "exponential": lambda at: D.Exponential(at(1.0)),
    "gamma": lambda at: D.Gamma(at(2.0), at(1.0)),
    "poisson": lambda at: D.Poisson(at(3.0)),
    "binomial": lambda at: D.Binomial(10, at(0.25)),
}


class Draws(nn.Linear):
    """Draws by a function of a half tensor, at an opt level."""

    drawn: Tensor

    def __init__(self, function: Callable[[Tensor], Tensor], level: str, half: torch.dtype) -> None:
        super().__init__(2, 2)
        self.function = function
        autoamp.initialize(self, opt_level=level, device_type="cpu", dtype=half, verbosity=0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        self.drawn = self.function(x)
        return super().forward(torch.zeros(1, 2, dtype=x.dtype))


def drawn(function: Callable[[Tensor], Tensor], level: str, half: torch.dtype, x: Tensor) -> Tensor:
    """Return what a function draws within a model at a level, given a tensor that was rounded to half."""
    torch.manual_seed(0)
    model = Draws(function, level, half)
    model(x.to(half))
    return model.drawn


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_samples_of_a_distribution_with_half_parameters_have_its_quantiles(
    name: str, level: str, half: torch.dtype
) -> None:
    if (name, level) == ("gamma", "O1"):
        pytest.skip("torch draws none by halves")
    make, count = DISTRIBUTIONS[name], 200_000
    torch.manual_seed(1)
    exact = make(lambda value: torch.tensor(value, dtype=torch.float64)).sample((count,))
    got = drawn(lambda _: make(lambda value: torch.tensor(value, dtype=half)).sample((count,)), level, half, exact[:1])
    ordered = exact.sort().values
    for part in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        limit = ordered[int(part * count)]
        wanted, found = (float((one.double() <= limit).double().mean()) for one in (exact, got))
        # Five standard deviations of the difference, and what rounding a result to half moves.
        spread = wanted * (1 - wanted)
        assert abs(found - wanted) <= 5 * (2 * spread / count) ** 0.5 + 0.002 * spread, part


# What chooses classes by logits of a shape of (samples, classes).
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "categorical": lambda logits: D.Categorical(logits=logits).sample(),
    "one hot": lambda logits: D.OneHotCategorical(logits=logits).sample().argmax(-1),
    "relaxed one hot": lambda logits: D.RelaxedOneHotCategorical(torch.ones(()), logits=logits).sample().argmax(-1),
    "multinomial": lambda logits: torch.multinomial(logits.softmax(-1), 1)[:, 0],
    "gumbel_softmax": lambda logits: nn.functional.gumbel_softmax(logits, hard=True).argmax(-1),
    "gumbel": lambda logits: (logits + D.Gumbel(torch.zeros_like(logits), 1.0).sample()).argmax(-1),
    "rand_like": lambda logits: (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1),
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", CHOICES)
def test_classes_are_chosen_by_half_logits_as_often_as_by_fp32_ones(name: str, level: str, half: torch.dtype) -> None:
    for row in (torch.zeros(256), torch.linspace(-4, 4, 256)):
        chosen = drawn(CHOICES[name], level, half, row.expand(5000, -1))
        probabilities = row.to(half).double().softmax(-1).view(16, -1).sum(1)
        found = torch.bincount(chosen, minlength=256).view(16, -1).sum(1) / 5000
        assert ((found - probabilities).abs() < 5 * (probabilities / 5000).sqrt() + 1 / 5000).all()
