"""Models drawn at random, each with one op that overflows in fp16: the entry that is printed as tried heals the step.

The second run is at the same level, with the entry, and with nothing else changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.tools import Overflow, ScaleSearch

D = 8
# Each model trains two times, and an overflow runs a dozen tapes.
FEW = settings(max_examples=settings.default.max_examples // 3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
Formula = Callable[[Tensor], Tensor]


def full(h: Tensor, value: float, *size: int) -> Tensor:
    return torch.full(size, value, dtype=h.dtype)


def log_of_one_less(h: Tensor) -> Tensor:
    return torch.log(1 - torch.sigmoid(h * 100).clamp(1e-7, 1 - 1e-7))


def normalized(h: Tensor) -> Tensor:
    return h / ((h * h).mean(-1, keepdim=True) + 1e-9)


def steep(h: Tensor) -> Tensor:
    x = h * 1000.0
    return (x.square() - x.square().amax(-1, keepdim=True)).exp() * h


# They get values of about 2, in fp16 but for what the lists keep in fp32, and a row of zeros. In fp32 what they return
# is small, but for what it is divided by.
ANYWHERE: dict[str, Formula] = {
    "__mul__": lambda h: (x := h * 1000.0) * x / 1e6,
    "mul": lambda h: (x := h * 1000.0).mul(x) / 1e6,
    "multiply": lambda h: torch.multiply(x := h * 1000.0, x) / 1e6,
    "__imul__": lambda h: (h * 1.0).mul_(1e6) / 1e6,
    "__add__": lambda h: (h.sigmoid() * 100 + 6e4 + 9e3) * 1e-5,
    "__rsub__": lambda h: (9e3 - (h.sigmoid() * -100 - 6e4)) * 1e-5,
    "addcmul": lambda h: torch.addcmul(x := h * 1000.0, x, x) / 1e6,
    "addcdiv": lambda h: 1e-8 * torch.addcdiv(h, h, torch.full_like(h, 1e-8)),
    "einsum": lambda h: torch.einsum("bi,bi->b", x := h * 1000.0, x)[:, None] / 1e6,
    "__matmul__": lambda h: ((x := h * 1000.0) @ x.T * 1e-6) @ h,
    "mm": lambda h: torch.mm(x := h * 1000.0, x.t()).mean(-1, keepdim=True) / 1e6,
    "bmm": lambda h: (torch.bmm(x := h[None] * 1000.0, x.mT) * 1e-6).softmax(-1)[0] @ h,
    "linear": lambda h: F.linear(h * 1000.0, full(h, 300.0, D, D)) / 1e6,
    "conv1d": lambda h: F.conv1d(h[:, None] * 1000.0, full(h, 300.0, 1, 1, 3), padding=1)[:, 0] / 1e6,
    "norm": lambda h: torch.linalg.norm(h * 3e4) / 1e6,
    "mean of squares": lambda h: h * ((x := h * 1000.0) * x).mean() / 1e6,
    "var": lambda h: (h * 1000.0).var(-1, keepdim=True) / 1e6,
    "std": lambda h: ((r := h.relu()) - r.mean(-1, True)) / (r.std(-1, keepdim=True, unbiased=False) + 1e-8),
    "division by a sum": lambda h: h / (h.abs().sum(-1, keepdim=True) + 1e-8),
    "division by 1e-6": lambda h: torch.div(h, 1e-6) * 1e-6,
    "reciprocal": lambda h: h * torch.reciprocal(h.abs().sum(-1, keepdim=True) + 1e-8),
    "rsqrt": lambda h: h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-9),
    "sqrt": lambda h: torch.sqrt(h * h + 1e-9),
    "__pow__": lambda h: (h.abs() + 1e-9) ** 0.5,
    "log": lambda h: -0.01 * (torch.sigmoid(h * 100.0) + 1e-8).log(),
    "log of 1 - p": lambda h: -0.01 * log_of_one_less(h),
    "atanh": lambda h: 0.1 * torch.atanh(torch.tanh(h * 8).clamp(-1 + 1e-6, 1 - 1e-6)),
    "softmax by hand": lambda h: (x := (y := h.abs() * 1e4 + 1.0) * y) / x.sum(-1, keepdim=True),
    "mask": lambda h: (h + (1 - (torch.arange(len(h)) > 0).to(h.dtype))[:, None] * -1e9).softmax(-1),
    "hypot": lambda h: torch.hypot(h, torch.full_like(h, 1e-9)),
    "pairwise_distance": lambda h: F.pairwise_distance(x := h * 3e4, -x.detach())[:, None] * 1e-5,
    "normalize": lambda h: F.normalize(h, dim=-1),
    # Only backward.
    "chain": lambda h: h * 1e-6 * 1e3 * 1e3,
    "backward of div": lambda h: torch.div(h * 1e-4, 1e-4),
    "backward of linear": lambda h: F.linear(h * 1e-3, 5000.0 * torch.eye(D, dtype=h.dtype)),
    "backward of reciprocal": lambda h: (1.0 / (h.sigmoid() * 1e-4 + 1e-4)) * 1e-4,
    "backward of cumsum": lambda h: (h * 1e-3).cumsum(-1) * 3000.0,
    "backward of conv1d": lambda h: F.conv1d((h * 1e-3)[:, None], full(h, 3000.0, 1, 1, 3), padding=1)[:, 0],
    "steep": steep,
}
# The lists of O1 keep these in fp32.
IN_HALF_MODELS: dict[str, Formula] = {
    "square": lambda h: torch.square(h * 1000.0).sum(-1, keepdim=True) / 1e6,
    "pow": lambda h: (h * 1000.0).pow(2).mean(-1, keepdim=True) / 1e6,
    "exp": lambda h: torch.exp(h + 12.0) * 1e-6,
    "expm1": lambda h: torch.expm1(h + 12.0) * 1e-6,
    "__rpow__": lambda h: 2.0 ** (h + 17.0) * 1e-6,
    "softplus by hand": lambda h: torch.log(1.0 + torch.exp(h + 12.0)) / 12.0,
    "logsumexp by hand": lambda h: 0.01 * torch.log((h + 12.0).exp().sum(-1, keepdim=True)),
    "sum": lambda h: (h.abs() * 1000.0 + 9000.0).sum(-1, keepdim=True) / 1e5,
    "cumprod": lambda h: (x := h.sigmoid() + 9.0).cumprod(-1) / x.detach().cumprod(-1),
    "cumsum": lambda h: (h.sigmoid() * 1000 + 9000.0).cumsum(-1) * 1e-5,
    "prod": lambda h: (h.sigmoid() + 9.0).prod(-1, keepdim=True) * 1e-8,
    "acos": lambda h: torch.acos(F.cosine_similarity(h, h.detach(), -1).clamp(-1 + 1e-6, 1 - 1e-6))[:, None],
    "matrix_exp": lambda h: h @ ((g := torch.matrix_exp(12.0 * torch.eye(D, dtype=h.dtype) + h * 0.1)) / g.amax()),
    "mse_loss": lambda h: F.mse_loss(x := h * 1000.0, torch.zeros_like(x)) / 1e6,
}


def where_no_list_acts(h: Tensor) -> Tensor:
    with autoamp.disable_casts():
        return (x := h.half() * 1000.0) * x / 1e6


def scripted(h: Tensor) -> Tensor:
    return h * 1000.0 * h * 1000.0


# No entry acts on these.
OUT_OF_REACH: dict[str, Formula] = {
    "disable_casts": where_no_list_acts,
    "TorchScript": lambda h: SCRIPTED(h.half()) / 1e6,
}
SCRIPTED = torch.jit.script(scripted)
FORMULAS = ANYWHERE | IN_HALF_MODELS | OUT_OF_REACH


class Held(nn.Module):
    """Calls a formula beside its input."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, h: Tensor) -> Tensor:
        return h + self.formula(h)


class Nested(Held):
    """Calls it in a module within this one, with a layer before."""

    def __init__(self, formula: Formula) -> None:
        super().__init__(formula)
        self.layer, self.inner = turn(), Held(formula)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(self.layer(h) * rows(h)) + 0.5 * h
        return out


class Twice(Held):
    """Calls it two times on one line."""

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(2):
            h = torch.tanh(h + self.formula(h))
        return h


class Checkpointed(Held):
    """Calls it in the backward pass once more."""

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, h, use_reentrant=False)
        return out


class Weight(Held):
    """Computes a weight by it."""

    def forward(self, w: Tensor) -> Tensor:
        return super().forward(w * 2.0 * rows(w)) / 2.0


def rows(h: Tensor) -> Tensor:
    """All but the first, which is that of padding."""
    return (torch.arange(len(h)) > 0)[:, None]


def turn() -> nn.Linear:
    """A layer that keeps the size of rows."""
    layer = nn.Linear(D, D)
    nn.init.orthogonal_(layer.weight)
    return layer


def parametrized(formula: Formula) -> nn.Module:
    return register_parametrization(turn(), "weight", Weight(formula))


HOMES: dict[str, Callable[[Formula], Any]] = {
    "function": lambda formula: lambda h: h + formula(h),
    "module": Held,
    "Sequential": lambda formula: nn.Sequential(nn.ReLU(), Held(formula), turn()),
    "nested": Nested,
    "twice": Twice,
    "checkpoint": Checkpointed,
    "parametrization": parametrized,
}
PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": turn,
    "norm": lambda: nn.LayerNorm(D),
    "batch norm": lambda: nn.BatchNorm1d(D),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.2),
}
LISTS, HALF_MODELS = ["O1", "auto_scale"], ["O2", "O3"]


@dataclass(frozen=True)
class Program:
    """A model, and how it gets mixed precision. The loss is multiplied by ``size``."""

    formula: str
    level: str
    home: str = "module"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    size: float = 1.0


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.before = nn.Sequential(turn(), *(PARTS[part]() for part in program.before), nn.LayerNorm(D), turn())
        self.home = HOMES[program.home](FORMULAS[program.formula])
        self.after = nn.Sequential(*(PARTS[part]() for part in program.after), nn.Linear(D, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.home(2.0 * self.before(x) * rows(x)))
        return out


def step(program: Program, lists: dict[str, Any] | None = None) -> Overflow | None:
    """Step once, and return what is found but for a scale that is too high."""
    torch.manual_seed(0)
    model, x = Model(program), torch.randn(D, D)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    options: dict[str, Any] = {
        "dtype": torch.float16, "device_type": "cpu", "loss_scale": 4.0, "trace_overflow": True, "lists": lists,
    }  # fmt: skip
    if program.level == "auto_scale":
        handle = autoamp.init(scope="modules", **options)
        handle.auto_scale()
    else:
        autoamp.initialize(model, optimizer, opt_level=program.level, verbosity=0, **options)
        handle = autoamp.current_handle()
    try:
        loss = model(x).float().square().mean() * program.size
        if program.level == "auto_scale":
            loss.backward()
        else:
            with autoamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        return next((one for one in handle.overflows if not isinstance(one.verdict, ScaleSearch)), None)
    finally:
        handle.deactivate()


def outcome(program: Program) -> str:
    """Try the entry that is printed. Return ``"finite"``, ``"no entry"`` or ``"healed"``."""
    found = step(program)
    if found is None:
        return "finite"
    if "(tried)" not in str(found):
        assert (found.fp32_names, found.fp32_module) == ((), None)
        return "no entry"
    named = {"modules": {found.fp32_module: "fp32"}} if found.fp32_module else {"fp32": list(found.fp32_names)}
    left = step(program, named)
    assert left is None, f"{found}\nwith it: {left}"
    return "healed"


ROWS = st.tuples(st.sampled_from(list(ANYWHERE)), st.sampled_from(LISTS + HALF_MODELS)) | st.tuples(
    st.sampled_from(list(IN_HALF_MODELS)), st.sampled_from(HALF_MODELS)
)
SOME = st.lists(st.sampled_from(list(PARTS)), max_size=2).map(tuple)
SIZES = st.sampled_from([1.0, 100.0])
PROGRAMS = st.builds(
    lambda row, *rest: Program(*row, *rest), ROWS, st.sampled_from(list(HOMES)), SOME, SOME, SIZES
)  # fmt: skip


def test_the_printed_entry_heals_programs_that_are_drawn() -> None:
    ended: Counter[str] = Counter()

    @FEW
    @given(program=PROGRAMS)
    def check(program: Program) -> None:
        ended[outcome(program)] += 1

    check()
    assert ended["healed"] > ended.total() / 2, ended


FOUND = [
    # The second call computes in fp32 by the entry, the first one does not.
    Program("atanh", "O3", "twice"),
    # The gradient of a half weight is half, whatever computes it.
    Program("__matmul__", "O3", "Sequential", size=300.0),
    # Each of two calls takes a half tensor, whose gradients are added in half.
    Program("steep", "O2", size=300.0),
    # Inside half models a norm computes in half what it gets in fp32 by the entry.
    Program("norm", "O2", before=("linear",), after=("norm", "norm"), size=100.0),
]


@pytest.mark.parametrize("program", FOUND, ids=str)
def test_the_printed_entry_heals_programs_that_were_drawn_once(program: Program) -> None:
    assert outcome(program) != "finite"


@pytest.mark.parametrize("level", LISTS + HALF_MODELS)
def test_no_entry_is_printed_where_no_list_acts(level: str) -> None:
    assert outcome(Program("disable_casts", level)) == "no entry"


@pytest.mark.parametrize("level", HALF_MODELS)
def test_no_entry_is_printed_that_the_program_casts_back_to_half(level: str) -> None:
    assert outcome(Program("TorchScript", level)) == "no entry"
