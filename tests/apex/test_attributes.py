"""Attributes that published programs read and set, and arguments that they pass, at every level: each takes effect."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

from autoamp import DynamicLossScaler
from autoamp.apex import install_as_apex
from autoamp.errors import LossScaleError, UsageError

LEVELS = ["O0", "O1", "O2", "O3"]


def early(apex: Any, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)).half()
    groups = [{"params": list(part.parameters())} for part in model]
    return model, apex.optimizers.FP16_Optimizer(apex.optimizers.FusedAdam(groups, lr=1e-2), **options)


def step(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.backward(model(torch.ones(3, 8).half()).float().square().mean() * factor)
    optimizer.step()
    optimizer.zero_grad()


# -- the FP16_Optimizer of early 2019 --


@pytest.mark.parametrize(
    ("name", "first", "value"),
    [
        ("dynamic_loss_scale", True, True), ("cur_scale", 2.0**16, 1024.0), ("loss_scale", 2.0**16, 1024.0),
        ("cur_iter", 0, 5), ("last_overflow_iter", -1, -3), ("scale_factor", 2.0, 4.0), ("scale_window", 2000, 7),
        ("overflow", False, True), ("verbose", True, False), ("first_closure_call_this_step", True, False),
    ],
)  # fmt: skip
def test_attribute_of_early_optimizer_is_read_and_set(apex: Any, name: str, first: Any, value: Any) -> None:
    _, optimizer = early(apex, dynamic_loss_scale=True)
    assert getattr(optimizer, name) == first
    setattr(optimizer, name, value)
    assert getattr(optimizer, name) == value


def test_settings_of_the_scale_take_effect(apex: Any) -> None:
    model, optimizer = early(apex, dynamic_loss_scale=True)
    optimizer.cur_scale, optimizer.scale_window, optimizer.scale_factor = 2.0, 1, 4.0
    step(model, optimizer)
    assert optimizer.loss_scale == 8.0
    step(model, optimizer, float("inf"))
    assert (optimizer.loss_scale, optimizer.cur_iter, optimizer.last_overflow_iter) == (2.0, 2, 1)
    scaler = optimizer.loss_scaler
    assert (scaler.scale_factor, scaler.scale_window) == (4.0, 1)
    scaler.scale_window = 3
    assert optimizer.scale_window == 3
    # The next growth is counted from this step.
    optimizer.last_overflow_iter = -1
    step(model, optimizer)
    assert (optimizer.loss_scale, optimizer.cur_iter) == (8.0, 3)


@pytest.mark.parametrize(("name", "value"), [("scale_factor", 1.0), ("scale_window", 0), ("cur_scale", 0.0)])
def test_setting_that_no_scale_takes_is_refused(apex: Any, name: str, value: Any) -> None:
    _, optimizer = early(apex, dynamic_loss_scale=True)
    before = getattr(optimizer, name)
    with pytest.raises(LossScaleError):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before


def test_static_scale_has_no_rule_to_set(apex: Any) -> None:
    model, optimizer = early(apex, static_loss_scale=128.0)
    step(model, optimizer)
    assert (optimizer.cur_iter, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (1, 128.0, False)
    for name in ("scale_factor", "scale_window", "last_overflow_iter"):
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=name):
            setattr(optimizer, name, 2)
    optimizer.dynamic_loss_scale = False
    with pytest.raises(UsageError, match="build the FP16_Optimizer with dynamic_loss_scale=True"):
        optimizer.dynamic_loss_scale = True


@pytest.mark.parametrize("dynamic", [True, False])
def test_checkpoint_that_a_subclass_makes_of_attributes_resumes_bit_for_bit(apex: Any, dynamic: bool) -> None:
    """As programs with a state_dict and a load_state_dict of their own do, such as unilm-v1."""
    names = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
    names += ["last_overflow_iter", "scale_factor", "scale_window"] if dynamic else []
    options: dict[str, Any] = {"dynamic_loss_scale": True} if dynamic else {"static_loss_scale": 64.0}
    model, optimizer = early(apex, **options)
    if dynamic:
        optimizer.scale_window, optimizer.cur_scale = 4, 256.0
    for factor in (1.0, float("inf"), 1.0, 1.0):
        step(model, optimizer, factor)
    saved = {name: getattr(optimizer, name) for name in names}
    saved["inner"] = optimizer.optimizer.state_dict()
    saved["flat"] = [flat.clone() for flat in optimizer.fp32_groups_flat]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    other, resumed = early(apex, **options)
    other.load_state_dict(weights)
    for name in names:
        setattr(resumed, name, saved[name])
    resumed.optimizer.load_state_dict(saved["inner"])
    for current, flat in zip(resumed.fp32_groups_flat, saved["flat"], strict=True):
        current.data.copy_(flat.data)
    for _ in range(3):
        step(model, optimizer)
        step(other, resumed)
    assert [getattr(resumed, name) for name in names] == [getattr(optimizer, name) for name in names]
    assert resumed.loss_scale == (512.0 * 0.5 if dynamic else 64.0)
    for ours, theirs in zip(optimizer.fp32_groups_flat, resumed.fp32_groups_flat, strict=True):
        assert torch.equal(ours, theirs)


def test_flat_masters_are_the_masters(apex: Any) -> None:
    model, optimizer = early(apex, static_loss_scale=64.0)
    masters = [master for group in optimizer.fp32_groups for master in group]
    values = [master.detach().clone() for master in masters]
    first = optimizer.fp32_groups_flat
    assert [flat.shape for flat in first] == [(36,), (5,)]
    assert all(map(torch.equal, masters, values))
    step(model, optimizer)
    again = optimizer.fp32_groups_flat
    assert all(map(torch.equal, first, again))
    assert not torch.equal(masters[0], values[0])
    again[0].data.zero_()
    assert masters[0].count_nonzero() == 0
    with pytest.raises(AttributeError, match="fp32_from_fp16_groups"):
        _ = optimizer.fp16_groups_flat


def test_lists_of_parameters_of_fp16_utils(apex: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 2).half(), nn.LayerNorm(2))
    optimizer = apex.fp16_utils.FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.1))
    halves, norms = list(model[0].parameters()), list(model[1].parameters())
    assert list(map(id, optimizer.all_fp16_params)) == list(map(id, halves))
    assert list(map(id, optimizer.all_fp32_from_fp32_params)) == list(map(id, norms))
    masters = optimizer.all_fp32_from_fp16_params
    assert [(master.dtype, master.shape) for master in masters] == [(torch.float32, p.shape) for p in halves]


# -- apex.amp --


def started(apex: Any, level: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    result: tuple[nn.Module, Any] = apex.amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0, **options
    )
    return result


def scaled_step(apex: Any, model: nn.Module, optimizer: Any) -> None:
    with apex.amp.scale_loss(model(torch.ones(3, 8)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attribute_of_scaler_is_read_back(apex: Any, level: str, dtype: torch.dtype) -> None:
    """A static scale, which bf16 has too, keeps what is written to its rule, as in Apex."""
    install_as_apex(device_type="cpu", dtype=dtype)
    started(apex, level)
    (scaler,) = apex.amp._amp_state.loss_scalers
    assert scaler._scale_seq_len == 2000
    written = {"_scale_seq_len": 8, "_max_loss_scale": 2.0**20, "_min_loss_scale": 2.0, "_loss_scale": 512.0}
    for name, value in {**written, "_unskipped": 3}.items():
        setattr(scaler, name, value)
        assert getattr(scaler, name) == getattr(apex.amp._amp_state.loss_scalers[0], name) == value
    if scaler.dynamic:
        with pytest.raises(LossScaleError):
            scaler._scale_seq_len = 0


@pytest.mark.parametrize("level", LEVELS)
def test_scalers_unscale_by_hand(apex: Any, level: str) -> None:
    started(apex, level, loss_scale=4.0)
    (scaler,) = apex.amp._amp_state.loss_scalers
    halves, masters = [torch.full((3,), 8.0).half()], [torch.zeros(3)]
    scaler.unscale(halves, masters, 4.0)
    assert masters[0].tolist() == [2.0] * 3
    scaler.unscale_with_stashed(halves, [torch.ones(3)], masters)
    assert masters[0].tolist() == [3.0] * 3
    assert not scaler._has_overflow
    scaler.unscale([torch.full((3,), torch.inf)], masters, 4.0)
    assert scaler._overflow_buf.item() == 1


@pytest.mark.parametrize("name", ["loss_scalers", "opt_properties", "handle"])
def test_state_that_initialize_makes_is_not_set(apex: Any, name: str) -> None:
    with pytest.raises(UsageError, match=r"call amp\.initialize"):
        setattr(apex.amp._amp_state, name, None)
    started(apex, "O1")
    with pytest.raises(TypeError):
        apex.amp._amp_state.loss_scalers[0] = apex.amp.scaler.LossScaler("dynamic")


@pytest.mark.parametrize("level", LEVELS)
def test_levels_are_classes(apex: Any, level: str) -> None:
    from apex.amp import frontend

    kind, made = getattr(frontend, level), frontend.opt_levels[level]
    assert type(made) is kind
    assert made.brief.startswith(f"{level}:")
    assert made.more
    properties = kind()(frontend.Properties())
    assert (properties.enabled, properties.opt_level) == (True, level)


@pytest.mark.parametrize("level", LEVELS)
def test_arguments_of_copies_change_nothing(apex: Any, level: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "combine_grad": True, "check_combined_tensors": True, "combine_ddp": False, "ddp_replica_count": 8,
        "user_cast_preferred": True,
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "autoamp.apex"):
        model, optimizer = started(apex, level, **given)
    assert len(caplog.messages) == 1
    assert all(name in caplog.messages[0] for name in given)
    scaled_step(apex, model, optimizer)
    other, its_optimizer = started(apex, level)
    scaled_step(apex, other, its_optimizer)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("given", "error", "remedy"),
    [
        ({"combine_ddp": True}, UsageError, "DistributedDataParallel"),
        ({"scale_window": 100}, UsageError, "loss_scale=autoamp.DynamicLossScaler"),
        ({"dynamic_init_scale": 2.0**10}, UsageError, "loss_scale=autoamp.DynamicLossScaler"),
        ({"nope": 1}, TypeError, "nope"),
    ],
)  # fmt: skip
def test_arguments_of_copies_that_would_change_something_are_refused(
    apex: Any, given: dict[str, Any], error: type[Exception], remedy: str
) -> None:
    with pytest.raises(error, match=remedy):
        started(apex, "O1", **given)
    assert not apex.amp._amp_state.opt_properties.enabled


def test_the_rule_of_a_scaler_that_is_given_is_used(apex: Any) -> None:
    started(apex, "O2", loss_scale=DynamicLossScaler(2.0**10, growth_interval=100))
    (scaler,) = apex.amp._amp_state.loss_scalers
    assert (scaler.loss_scale(), scaler._scale_seq_len) == (2.0**10, 100)


# -- names of Apex's copies --


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("SGD", ["lr", "momentum", "dampening", "weight_decay", "nesterov"]),
        ("Adam", ["lr", "betas", "eps", "weight_decay", "amsgrad"]),
        ("AdamW", ["lr", "betas", "eps", "weight_decay", "amsgrad"]),
        ("Adadelta", ["lr", "rho", "eps", "weight_decay"]),
        ("RMSprop", ["lr", "alpha", "eps", "weight_decay", "momentum", "centered"]),
    ],
)
def test_npu_optimizers_are_those_of_torch(apex: Any, name: str, signature: list[str]) -> None:
    ours = getattr(apex.optimizers, f"NpuFused{name}")
    assert ours is getattr(torch.optim, name)
    assert list(inspect.signature(ours).parameters)[1 : 1 + len(signature)] == signature


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("NpuFusedLamb", "FusedLAMB"), ("Lamb", "FusedLAMB"), ("NpuFusedBertAdam", "max_grad_norm"),
        ("NpuFusedAdamP", "timm"), ("NpuFusedRMSpropTF", "timm"),
    ],
)  # fmt: skip
def test_other_npu_optimizers_have_a_remedy_of_their_own(apex: Any, name: str, remedy: str) -> None:
    with pytest.raises(AttributeError, match=remedy):
        getattr(apex.optimizers, name)


def test_flatten_of_distributed(apex: Any) -> None:
    tensors = [torch.arange(4.0).view(2, 2), torch.ones(3)]
    flat = apex.parallel.distributed.flatten(tensors)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0]
    assert all(map(torch.equal, apex.parallel.distributed.unflatten(flat, tensors), tensors))
