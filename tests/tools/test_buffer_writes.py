"""Buffers that a half model writes as it trains: counters stay exact, and what adds up in half precision is told."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import Listener, runtime_of

LEVELS = ["O2", "O3"]


class Part(nn.Module):
    """Writes its buffer in the given way and returns its input."""

    def __init__(self, buffer: Tensor, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("seen", buffer)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self, x)
        return x


class Quantizer(nn.Module):
    """The codebook of a VQ-VAE, which follows its inputs by moving averages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("sizes", torch.full((4,), 1000.0))
        self.register_buffer("sums", self.codes * 1000)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, None] - self.codes).square().sum(-1).argmin(1)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(chosen, 4).to(x.dtype)
                self.sizes.mul_(0.999).add_(one_hot.sum(0))
                self.sums.mul_(0.999).add_(one_hot.T @ x)
                self.codes.copy_(self.sums / self.sizes[:, None])
        return x + (self.codes[chosen] - x).detach()


def count(part: Any, x: Tensor) -> None:
    part.seen += 1


def replace(part: Any, x: Tensor) -> None:
    part.seen = part.seen + 1


def follow(part: Any, x: Tensor) -> None:
    part.seen.mul_(0.99).add_(x.mean(0), alpha=0.01)


def initialize(model: nn.Module, level: str = "O2", half: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = autoamp.initialize(model, opt_level=level, dtype=half, device_type="cpu", verbosity=0, **options)
    handle: Any = autoamp.current_handle()
    handle.record()
    return model


def around(part: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), part, nn.Linear(8, 8))


def warnings_of(model: nn.Module, calls: int) -> list[str]:
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(torch.randn(16, 8))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", [count, replace])
def test_a_counter_without_dimensions_counts(write: Any, level: str, half: torch.dtype) -> None:
    start = 2 / torch.finfo(half).eps - 3
    model = initialize(around(Part(torch.tensor(start), write)), level, half)
    assert warnings_of(model, 10) == []
    assert model[1].seen == start + 10
    assert model.state_dict()["1.seen"] == start + 10
    # Also in a run that goes on.
    other = initialize(around(Part(torch.tensor(0.0), write)), level, half)
    other.load_state_dict(model.state_dict())
    other(torch.randn(16, 8))
    assert other[1].seen == start + 11


def test_a_buffer_without_dimensions_leaves_the_rest_in_half(half: torch.dtype) -> None:
    seen: list[torch.dtype] = []
    model = initialize(around(Part(torch.tensor(3.0), lambda part, x: seen.append((x / part.seen).dtype))), half=half)
    model(torch.randn(16, 8))
    assert seen == [half]


WRITES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "count": (lambda: Part(torch.full((1,), 2045.0), count), "1.seen"),
    "replace": (lambda: Part(torch.full((1,), 2045.0), replace), "1.seen"),
    "average": (lambda: Part(torch.zeros(8), follow), "1.seen"),
    "quantizer": (Quantizer, "1.codes, 1.sizes, 1.sums"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WRITES)
def test_what_adds_up_in_half_is_told_with_what_makes_it_exact(name: str, level: str, half: torch.dtype) -> None:
    make, names = WRITES[name]
    model = initialize(around(make()), level, half)
    handle: Any = autoamp.current_handle()
    (told,) = warnings_of(model, 16)
    (row,) = handle.report()["half_losses"]
    assert (row["kind"], f"{row['sentence']}. {row['remedy']}") == ("buffer counts", told)
    most = {torch.bfloat16: 256, torch.float16: 2048}[half]
    assert (
        f"Sequential writes buffers in {str(half)[6:]}, where {most} + 1 is {most}: a sum or count in {names} " in told
    )
    lists = re.search(r"lists=(\{.*\})\)$", told)
    assert lists is not None
    model = initialize(around(make()), level, half, lists=eval(lists[1]))
    reference = around(make())
    # The same inputs as those of the fp32 model, which are half before the part.
    reference[0].to(half).register_forward_pre_hook(lambda _, inputs: inputs[0].to(half))
    reference[0].register_forward_hook(lambda *call: call[2].float())
    assert warnings_of(model, 10) == []
    warnings_of(reference, 10)
    for buffer, exact in zip(model[1].buffers(), reference[1].buffers(), strict=True):
        assert torch.equal(buffer, exact)


@pytest.mark.parametrize(
    "buffer", [torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.float64), torch.zeros(())]
)
def test_a_counter_of_the_model_itself_is_told_what_to_be(buffer: Tensor, half: torch.dtype) -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("seen").add_(1)
            return super().forward(x)

    def counting(seen: Tensor) -> nn.Module:
        model = Counting(8, 8)
        model.register_buffer("seen", seen)
        return initialize(model, half=half)

    (told,) = warnings_of(counting(torch.zeros(1)), 8)
    assert told.endswith(
        ". Register it as an integer or torch.float64 tensor, or one without dimensions, which are not cast"
    )
    model = counting(buffer.clone())
    assert warnings_of(model, 3000) == []
    assert model.seen == 3000


def test_a_write_of_a_later_call_is_told_once() -> None:
    calls: list[int] = []

    def late(part: Any, x: Tensor) -> None:
        calls.append(0)
        if len(calls) > 5:
            part.seen.add_(1)

    model = initialize(around(Part(torch.zeros(2), late)))
    assert warnings_of(model, 7) == []
    assert len(warnings_of(model, 30)) == 1
    assert warnings_of(model, 100) == []


QUIET: dict[str, Callable[[], nn.Module]] = {
    "constant": lambda: around(Part(torch.ones(8), lambda part, x: part.seen + x)),
    "batch norm": lambda: around(nn.BatchNorm1d(8)),
    "spectral norm": lambda: around(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    "integers": lambda: around(Part(torch.zeros(2, dtype=torch.long), count)),
    "mask of dropout": lambda: around(Part(torch.ones(16, 8), lambda part, x: part.seen.bernoulli_(0.9).div_(0.9))),
    "new mask": lambda: around(Part(torch.ones(8), lambda part, x: setattr(part, "seen", (x[0] > 0).to(x.dtype)))),
    "mask of another size": lambda: around(
        Part(torch.ones(8), lambda part, x: setattr(part, "seen", torch.ones(1 + len(part.seen) % 9).to(x.dtype)))
    ),
    "constant mask": lambda: around(
        Part(torch.ones(4, 4), lambda part, x: part.seen.fill_(-1e4).masked_fill_(torch.ones(4, 4).tril() > 0, 0.0))
    ),
    "infinite mask": lambda: around(Part(torch.ones(4, 4), lambda part, x: part.seen.fill_(-torch.inf).triu_(1))),
    "noise": lambda: around(Part(torch.ones(32), lambda part, x: part.seen.normal_())),
    "empty": lambda: around(Part(torch.ones(0, 3), lambda part, x: part.seen.add_(1))),
    "evaluation": lambda: around(Part(torch.zeros(16, 8), lambda part, x: part.seen.copy_(x))).eval(),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", QUIET)
def test_other_buffers_are_not_told(name: str, level: str, half: torch.dtype) -> None:
    assert warnings_of(initialize(QUIET[name](), level, half), 64) == []


def test_nothing_is_looked_at_unless_it_is_recorded(half: torch.dtype) -> None:
    model = autoamp.initialize(around(WRITES["quantizer"][0]()), opt_level="O2", dtype=half, verbosity=0)
    assert warnings_of(model, 16) == []
    handle: Any = autoamp.current_handle()
    with handle.record():
        assert len(warnings_of(model, 16)) == 1
    model = autoamp.initialize(around(WRITES["count"][0]()), opt_level="O2", dtype=half, verbosity=0)
    assert warnings_of(model, 16) == []


def test_recordings_in_turn_find_what_one_finds(half: torch.dtype) -> None:
    models = [autoamp.initialize(around(WRITES["count"][0]()), opt_level="O2", dtype=half, verbosity=0) for _ in "ab"]
    handle: Any = autoamp.current_handle()
    told = []
    for _ in range(16):
        with handle.record():
            told += [one for model in models for one in warnings_of(model, 1)]
    assert len(told) == 2
    assert [row["kind"] for row in handle.report()["half_losses"]] == ["buffer counts"] * 2


class Raises(nn.Module):
    """A model that counts and then raises, in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("seen", torch.full((4,), 20.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        if self.calls == 2:
            raise KeyError("the model's own")
        return self.layer(x)


def test_an_error_of_the_model_is_its_own_where_warnings_are_errors(half: torch.dtype) -> None:
    model = initialize(Raises(), half=half)
    warnings.simplefilter("error")
    model(torch.randn(2, 4))
    with pytest.raises(KeyError, match="the model's own"):
        model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    with pytest.raises(UserWarning, match="writes buffers"):
        model(torch.randn(2, 4))


class Sees(Listener):
    """Notes the ends of calls."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def call_begun(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.ended.append


def test_a_warning_that_is_an_error_hides_no_end_of_a_call_from_others(half: torch.dtype) -> None:
    model = initialize(around(WRITES["count"][0]()), half=half)
    sees = Sees()
    runtime_of(autoamp.current_handle()).optimizers.listeners.add(sees)
    model(torch.randn(16, 8))
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="writes buffers"):
        model(torch.randn(16, 8))
    assert len(sees.ended) == 2


def test_models_within_models_are_told_once(half: torch.dtype) -> None:
    inner = around(WRITES["count"][0]())
    members = nn.ModuleList([inner, nn.Sequential(inner)])
    lists = {"modules": {"1": "fp32", "1.0": "fp16"}}
    for model, called in ((members, inner), (nn.Sequential(around(inner)), None)):
        made = initialize(model, half=half, **({"lists": lists} if called else {}))
        assert len(warnings_of(called or made, 16)) == 1


def test_writes_between_calls_are_not_told() -> None:
    model = initialize(around(Part(torch.ones(2), lambda part, x: None)))
    state = copy.deepcopy(model.state_dict())
    for _ in range(4):
        assert warnings_of(model, 1) == []
        model[1].seen.copy_(torch.rand(2))
        model.load_state_dict(state)


def test_compiled_models_keep_their_graph() -> None:
    model = initialize(around(Part(torch.full((1,), 3.0), count)))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert warnings_of(compiled, 3) == []
    assert model[1].seen == 6
