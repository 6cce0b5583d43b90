"""`DistributedState` in one process: what it saves, and that a resumed training is the one without a stop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import autoamp
from autoamp.core import DistributedState
from autoamp.core.distributed_state import load_optimizers, optimizers_state
from autoamp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad

# Without a process group torch says that it assumes that one process is all there is.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=1e-2),
}


class Training:
    """A small training in fp16 on a CPU, whose first loss scale overflows a few times."""

    def __init__(self, level: str, optimizer: str = "SGD", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        autoamp.initialize(
            self.model, self.optimizer, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0,
            loss_scale=autoamp.DynamicLossScaler(2.0**22, growth_interval=3),
        )  # fmt: skip
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            with autoamp.scale_loss(self.model(x).float().square().mean(), self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        return {"training": DistributedState(self.model, self.optimizer)}

    def all_bits(self) -> list[tuple[str, bytes]]:
        found: dict[str, Any] = {**self.model.state_dict()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found.update({f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)})
        bits = [(key, value.contiguous().flatten().view(torch.uint8).numpy().tobytes()) for key, value in found.items()]
        return [*sorted(bits), ("amp", repr(autoamp.state_dict()).encode())]


@pytest.mark.parametrize(
    ("level", "name"), [("O1", "SGD"), ("O1", "FusedAdam"), *(("O2", name) for name in OPTIMIZERS)]
)
def test_a_resumed_training_is_the_one_without_a_stop(level: str, name: str, tmp_path: Path) -> None:
    whole = Training(level, name)
    whole.train(8)
    dcp.save(whole.state(), checkpoint_id=tmp_path / "8")
    whole.train(15)
    expected = whole.all_bits()
    resumed = Training(level, name, seed=1)
    dcp.load(resumed.state(), checkpoint_id=tmp_path / "8")
    resumed.step = 8
    resumed.train(15)
    assert resumed.all_bits() == expected
    assert b"'skipped_steps': 0" not in dict(expected)["amp"]


@pytest.mark.parametrize("step", [0, 8])
def test_saving_changes_nothing(step: int, tmp_path: Path) -> None:
    expected = Training("O2")
    expected.train(12)
    bits = expected.all_bits()
    saved = Training("O2")
    saved.train(step)
    dcp.save(saved.state(), checkpoint_id=tmp_path / "at")
    assert bool(saved.optimizer.state) == bool(step)
    saved.train(12)
    assert saved.all_bits() == bits
    # What was saved before any step has no momentum, which is not the same as momentum of 0.
    resumed = Training("O2", seed=1)
    dcp.load(resumed.state(), checkpoint_id=tmp_path / "at")
    resumed.step = step
    resumed.train(12)
    assert resumed.all_bits() == bits


def test_keys_are_those_of_torch() -> None:
    training = Training("O1", "Adam")
    training.train(8)
    ours = DistributedState(training.model, training.optimizer).state_dict()
    theirs = get_optimizer_state_dict(
        training.model, training.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert ours["optimizer"].keys() - {"stepped"} == theirs.keys()
    torch.testing.assert_close({key: ours["optimizer"][key] for key in theirs}, theirs, rtol=0, atol=0)
    assert ours["model"].keys() == training.model.state_dict().keys()
    assert ours["amp"] == autoamp.state_dict()


def test_o2_saves_masters() -> None:
    training = Training("O2")
    training.train(8)
    state = DistributedState(training.model, training.optimizer).state_dict()
    assert all(value.dtype is torch.float32 for value in state["model"].values() if value.is_floating_point())
    assert state["model"]["0.weight"].data_ptr() == training.optimizer.param_groups[0]["params"][0].data_ptr()
    assert state["optimizer"]["state.0.weight.momentum_buffer"].dtype is torch.float32


def test_a_checkpoint_without_scales_is_warned_of(tmp_path: Path) -> None:
    plain = Training("O1")
    plain.train(8)
    dcp.save({"training": DistributedState(plain.model, plain.optimizer, amp=False)}, checkpoint_id=tmp_path / "at")
    resumed = Training("O1", seed=1)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: training\.amp\."):
        dcp.load(resumed.state(), checkpoint_id=tmp_path / "at")
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    warning = r"has no state of the loss scalers: the loss scale continues at 4\.1943e\+06"
    with pytest.warns(UserWarning, match=warning):
        dcp.load(resumed.state(), checkpoint_id=tmp_path / "at", planner=partial)
    with pytest.warns(UserWarning, match=warning):
        dcp.load(
            {"training": DistributedState(resumed.model, resumed.optimizer, amp=False)}, checkpoint_id=tmp_path / "at"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Once is enough.
        resumed.train(3)


@pytest.mark.filterwarnings("error::UserWarning")
def test_where_no_scale_moves_nothing_is_warned_of(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    dcp.save({"t": DistributedState(model)}, checkpoint_id=tmp_path / "at", no_dist=True)
    for scale in (1.0, 128.0):
        autoamp.init(dtype=torch.bfloat16, device_type="cpu", loss_scale=scale)
        state = {"t": DistributedState(model, amp=False)}
        dcp.load(state, checkpoint_id=tmp_path / "at", no_dist=True)
    autoamp.init(enabled=False)
    dcp.load({"t": DistributedState(model)}, checkpoint_id=tmp_path / "at", no_dist=True)


def test_models_and_optimizers_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(autoamp.UsageError, match=r"model=str is not a torch\.nn\.Module"):
        DistributedState("model")  # type: ignore[arg-type]
    with pytest.raises(autoamp.UsageError, match="Expected an optimizer, got an int"):
        DistributedState(model, [3])
    foreign = torch.optim.SGD([*model.parameters(), torch.ones(3)], 0.1)
    with pytest.raises(
        autoamp.UsageError, match=r"parameter 2 of group 0 of SGD, of shape \(3,\), is not a parameter of the"
    ):
        DistributedState(model, foreign).state_dict()


# -- the state of optimizers --


def test_parameters_without_state(tmp_path: Path) -> None:
    """One parameter is frozen, and one has had no gradient so far."""

    def make(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]).requires_grad_(True)
        model[2].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make(0)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"t": DistributedState(model, optimizer)}, checkpoint_id=tmp_path / "at")
    other, resumed = make(1)
    dcp.load({"t": DistributedState(other, resumed)}, checkpoint_id=tmp_path / "at")
    before, after = optimizer.state_dict(), resumed.state_dict()
    assert before["state"].keys() == after["state"].keys() == {0, 1}
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert before["param_groups"] == after["param_groups"]


def test_names_are_those_without_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = DistributedState(model, torch.optim.SGD(model.parameters(), 0.1)).state_dict()
    wrapped: Any = torch.compile(model, backend="eager")
    state = DistributedState(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1)).state_dict()
    assert state["model"].keys() == plain["model"].keys()
    assert state["optimizer"].keys() == plain["optimizer"].keys()


def test_the_state_of_another_class_is_refused() -> None:
    model = nn.Linear(2, 2)
    # A first step takes a closure, so nothing is known of its state.
    optimizer = torch.optim.LBFGS(model.parameters())
    state = optimizers_state(model, [optimizer])
    assert not [key for key in state if key.startswith("state.")]
    before = optimizer.state_dict()
    with pytest.raises(autoamp.CheckpointError, match=r"the state of LBFGS for parameter 'weight' is missing"):
        load_optimizers(model, [optimizer], {**state, "stepped": "weight"})
    assert optimizer.state_dict() == before


def test_several_optimizers_and_groups() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def make(lr: float) -> list[Any]:
        groups = [{"params": model["a"].weight, "lr": lr}, {"params": model["a"].bias, "lr": 2 * lr}]
        return [torch.optim.Adam(groups), torch.optim.SGD(model["b"].parameters(), lr=3 * lr, momentum=0.9)]

    saved = make(0.5)
    for optimizer in saved:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = optimizers_state(model, saved)
    assert state["stepped"].split("\n") == ["a.weight", "a.bias", "b.weight", "b.bias"]
    loaded = make(0.1)
    load_optimizers(model, loaded, state)
    for one, other in zip(saved, loaded, strict=True):
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)


# -- torch's own functions for the state of an optimizer --


def calls_of_torch(training: Training) -> dict[str, Callable[[], Any]]:
    model, optimizer = training.model, training.optimizer
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "get_optimizer_state_dict": lambda: get_optimizer_state_dict(model, optimizer),
        "get_optimizer_state_dict, flat": lambda: get_optimizer_state_dict(model, optimizer, options=flat),
        "set_optimizer_state_dict": lambda: set_optimizer_state_dict(
            model, optimizer, {"state": {}, "param_groups": []}
        ),
        "get_state_dict": lambda: get_state_dict(model, optimizer),
    }


@pytest.mark.parametrize(
    "name",
    ["get_optimizer_state_dict", "get_optimizer_state_dict, flat", "set_optimizer_state_dict", "get_state_dict"],
)
@pytest.mark.parametrize("steps", [0, 8])
def test_torch_does_not_find_masters_and_the_error_says_what_does(name: str, steps: int) -> None:
    training = Training("O2", "Adam")
    training.train(steps)
    bits = training.all_bits()
    with pytest.raises(autoamp.UsageError, match=r"Adam steps fp32 masters.*autoamp\.DistributedState"):
        calls_of_torch(training)[name]()
    assert training.all_bits() == bits
    training.train(steps + 2)


@pytest.mark.parametrize("name", ["Adam", "SGD", "AdamW fused", "FusedAdam"])
def test_the_state_that_torch_makes_to_load_is_no_step(name: str) -> None:
    saved = Training("O1", name)
    saved.train(8)
    state = get_optimizer_state_dict(saved.model, saved.optimizer)
    autoamp.current_handle().deactivate()
    fresh = Training("O1", name, seed=1)
    handle = autoamp.current_handle()
    with handle.record(sample=False):
        before = repr(autoamp.state_dict())
        set_optimizer_state_dict(fresh.model, fresh.optimizer, state)
        assert repr(autoamp.state_dict()) == before
    assert handle.report()["timeline"]["steps"] == 0
    found, expected = fresh.optimizer.state_dict()["state"], saved.optimizer.state_dict()["state"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    fresh.train(2)


@pytest.mark.filterwarnings("error:.*underflow:UserWarning")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_state_of_an_optimizer_that_never_stepped_counts_no_step(level: str) -> None:
    model = nn.Linear(8, 1)
    autoamp.initialize(model, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = DistributedState(model, optimizer).state_dict()["optimizer"]
    assert any(key.endswith("exp_avg") for key in state)
    handle: Any = autoamp.current_handle()
    assert handle.stats["steps"] == 0
    assert not optimizer.state
