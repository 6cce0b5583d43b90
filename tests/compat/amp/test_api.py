"""`apex.amp` as published programs call it: the unified API, the old handle, and the internals that they poke."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoamp
from autoamp.compat import install_as_apex

HALF = torch.float16


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(4, 8)


def trained(amp: Any, model: nn.Module, optimizer: Any, data: torch.Tensor) -> float:
    loss = model(data).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_unified_api_trains(apex: Any, level: str) -> None:
    model, optimizer, data = parts()
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, loss_scale=None, verbosity=0)
    losses = [trained(apex.amp, model, optimizer, data) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert next(model.parameters()).dtype is (HALF if level in ("O2", "O3") else torch.float32)


def test_signature_has_named_defaults(apex: Any) -> None:
    parameters = inspect.signature(apex.amp.initialize).parameters
    named = {name for name, parameter in parameters.items() if parameter.default is not inspect.Parameter.empty}
    assert {"opt_level", "keep_batchnorm_fp32", "loss_scale", "num_losses", "max_loss_scale"} <= named
    assert list(parameters)[:4] == ["models", "optimizers", "enabled", "opt_level"]


def test_level_in_the_place_of_enabled(apex: Any) -> None:
    model, optimizer, _ = parts()
    apex.amp.initialize(model, optimizer, "O1")
    assert autoamp.current_handle() is not None
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF


def test_strings_of_command_lines(apex: Any) -> None:
    model, optimizer, _ = parts()
    apex.amp.initialize(model, optimizer, opt_level="O2", loss_scale="128.0", keep_batchnorm_fp32="True")
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


@pytest.mark.parametrize(("named", "scale"), [({}, 32.0), ({"loss_scale": None}, 32.0), ({"loss_scale": 8.0}, 8.0)])
def test_the_loss_scale_of_the_alias_is_for_those_who_name_none(named: dict[str, Any], scale: float, apex: Any) -> None:
    install_as_apex(device_type="cpu", loss_scale=32.0)
    model, optimizer, _ = parts()
    apex.amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **named)
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == scale


def test_shapes_come_back(apex: Any) -> None:
    model, optimizer, _ = parts()
    ema = copy.deepcopy(model)
    (first, second), same = apex.amp.initialize([model, ema], optimizer, verbosity=False)
    assert (first, second, same) == (model, ema, optimizer)
    assert apex.amp.initialize(model, verbosity=0) is model


def test_scale_loss_before_initialize_is_a_runtime_error(apex: Any) -> None:
    _, optimizer, _ = parts()
    with pytest.raises(RuntimeError, match="initialize"), apex.amp.scale_loss(torch.ones(()), optimizer):
        pass


def test_alias_takes_the_apex_lists_and_the_dtype_asked_for(apex: Any) -> None:
    install_as_apex(dtype=torch.bfloat16, device_type="cpu")
    apex.amp.init()
    half = F.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert half.dtype is torch.bfloat16
    # `Tensor.cpu` is in the set `apex` alone.
    assert half.cpu().dtype is torch.float32


def test_old_handle(apex: Any) -> None:
    model, optimizer, data = parts()
    handle = apex.amp.init()
    assert apex.amp.amp._DECORATOR_HANDLE.is_active()
    assert handle.has_cache
    before = float(model(data).square().mean())
    for _ in range(10):
        optimizer.zero_grad()
        with handle.scale_loss(model(data).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert float(model(data).square().mean()) < before
    with handle._disable_casts():
        assert model(data).dtype is torch.float32
    handle._clear_cache()
    handle.remove_cache(next(model.parameters()))
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss"):
        handle.scale_loss(torch.ones(()), optimizer)
    with wrapped.scale_loss(model(data).square().mean()) as scaled_loss:
        scaled_loss.backward()
    wrapped.step()
    handle._deactivate()
    assert not handle.is_active()
    assert apex.amp.amp._DECORATOR_HANDLE is None


def test_decorator_handle_is_that_of_autoamp_too(apex: Any) -> None:
    handle = autoamp.init(dtype=HALF, device_type="cpu")
    assert apex.amp.amp._DECORATOR_HANDLE.cache is handle.cache


def test_disabled_handle(apex: Any) -> None:
    model, optimizer, data = parts()
    handle = apex.amp.init(False)
    with handle.scale_loss(model(data).mean(), optimizer) as loss:
        loss.backward()
    assert not handle.is_active()


def test_poked_scaler_takes_effect(apex: Any) -> None:
    model, optimizer, data = parts()
    apex.amp.initialize(model, optimizer, opt_level="O1", num_losses=2)
    state = apex.amp._amp_state
    state.loss_scalers[1]._loss_scale = 2**20
    assert len(state.loss_scalers) == 2
    with apex.amp.scale_loss(model(data).float().mean(), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
        loss = model(data).float().mean()
        assert float(scaled_loss.detach()) == pytest.approx(float(loss.detach()) * 2**20)
    assert state.loss_scalers[0].loss_scale() == 2**16
    assert state.loss_scalers[0].dynamic
    assert (state.loss_scalers[0]._unskipped, state.loss_scalers[0]._scale_seq_len) == (0, 2000)
    assert state.loss_scalers[0].max_loss_scale == 2**24
    assert state.opt_properties.opt_level == "O1"
    from apex.amp._amp_state import _amp_state

    assert _amp_state is state


def test_stash_names_the_masters(apex: Any) -> None:
    model, optimizer, data = parts()
    apex.amp.initialize(model, optimizer, opt_level="O2")
    trained(apex.amp, model, optimizer, data)
    stash = optimizer._amp_stash
    assert [param is half for param, half in zip(model.parameters(), stash.all_fp16_params, strict=True)] == [True] * 4
    assert {master.dtype for master in stash.all_fp32_from_fp16_params} == {torch.float32}
    assert stash.all_fp32_from_fp32_params == []
    assert stash.lazy_init_called
    optimizer._amp_lazy_init()
    assert [id(p) for p in apex.amp.master_params(optimizer)] == [id(p) for p in stash.all_fp32_from_fp16_params]


def test_master_params_of_a_plain_optimizer(apex: Any) -> None:
    model, optimizer, _ = parts()
    assert list(map(id, apex.amp.master_params(optimizer))) == list(map(id, model.parameters()))


@pytest.mark.parametrize("overflow", [False, True])
def test_scaler_by_hand(apex: Any, overflow: bool) -> None:
    scaler = apex.amp.scaler.LossScaler("dynamic", init_scale=8.0, scale_window=1)
    grads = [torch.tensor([8.0, float("inf") if overflow else 16.0], dtype=HALF)]
    masters = [torch.zeros(2)]
    scaler.clear_overflow_state()
    scaler.unscale(grads, masters)
    assert masters[0][0] == 1.0
    assert scaler.update_scale() is overflow
    assert scaler.loss_scale() == (4.0 if overflow else 16.0)


def test_lists_hold_names(apex: Any) -> None:
    from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

    assert {"conv2d", "matmul"} <= set(torch_overrides.FP16_FUNCS)
    assert {"softmax", "layer_norm", "gelu"} <= set(functional_overrides.FP32_FUNCS)
    assert "binary_cross_entropy" in functional_overrides.BANNED_FUNCS
    assert tensor_overrides.MODULE is torch.Tensor


def test_utils(apex: Any) -> None:
    from apex.amp import compat, utils

    nested = [torch.ones(1), (torch.ones(1),)]
    assert utils.is_fp_tensor(nested)
    assert not utils.is_fp_tensor([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    assert utils.maybe_half(torch.ones(1)).dtype is torch.float32  # on a CPU Apex leaves tensors alone
    kwargs = {"weight": torch.ones(1)}
    (cast,) = utils.casted_args(torch.Tensor.half, [torch.ones(1)], kwargs)
    assert cast.dtype is kwargs["weight"].dtype is HALF
    assert utils.type_string(torch.ones(1).half()) == "HalfTensor"
    assert compat.scalar_python_val(torch.tensor(2.5)) == 2.5


def test_fp16_utils_by_star(apex: Any) -> None:
    names: dict[str, Any] = {}
    exec("from apex.fp16_utils import *", names)
    model, _, data = parts()
    network = names["network_to_half"](model)
    optimizer = names["FP16_Optimizer"](torch.optim.SGD(network.parameters(), 0.1), dynamic_loss_scale=True)
    before = network(data).float().square().mean()
    optimizer.backward(before)
    optimizer.step()
    assert network(data).float().square().mean() < before


def test_the_state_has_the_scalers_of_the_latest_call(apex: Any) -> None:
    kept, state = [], apex.amp._amp_state
    for call, (losses, given) in enumerate([(3, {}), (2, {"loss_scale": 8.0}), (1, {}), (2, {"loss_scale": 16.0})]):
        model, optimizer, data = parts()
        kept.append(apex.amp.initialize(model, optimizer, opt_level="O1", num_losses=losses, verbosity=0, **given))
        assert len(state.loss_scalers) == losses
        assert [scaler.dynamic for scaler in state.loss_scalers] == [not given] * losses
        assert state.opt_properties.loss_scale == given.get("loss_scale", "dynamic")
        scale = 2.0**call
        state.loss_scalers[0]._loss_scale = scale
        loss = model(data).float().mean()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            assert float(scaled_loss.detach()) == pytest.approx(float(loss.detach()) * scale)
    model, optimizer = kept[1]
    loss = model(data).float().mean()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        assert float(scaled_loss.detach()) == pytest.approx(float(loss.detach()) * 2.0)
