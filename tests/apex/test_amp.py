"""`apex.amp` as published programs call it: the unified API, the handle of 2018, and the internals they change."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import pickle
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import required

import autoamp
from autoamp.apex import install_as_apex
from autoamp.errors import UsageError

HALF = torch.float16
LEVELS = ["O0", "O1", "O2", "O3"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data() -> torch.Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


def half_product() -> torch.Tensor:
    """Run an op of the fp16 list on fp32 tensors: its dtype tells whether torch is patched."""
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def find(dotted: str) -> Any:
    """Return what a dotted name stands for: by import as far as there are modules, by attribute then."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def step(amp: Any, model: nn.Module, optimizer: Any) -> float:
    loss = model(data()).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


# -- signatures --


def _signatures() -> dict[str, Any]:
    """Return, by dotted name, a function with the signature of the page."""
    b, e = (0.9, 0.999), 1e-8
    return {
        "apex.amp.initialize": lambda models, optimizers=None, enabled=True, opt_level="O1", cast_model_type=None,
        patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None,
        cast_model_outputs=None, num_losses=1, verbosity=1, min_loss_scale=None, max_loss_scale=2.0**24: 0,
        "apex.amp.scale_loss": lambda loss, optimizers, loss_id=0, model=None, delay_unscale=False,
        delay_overflow_check=False: 0,
        "apex.amp.init": lambda enabled=True, loss_scale="dynamic", enable_caching=True, verbose=False,
        allow_banned=False: 0,
        "apex.amp.handle.AmpHandle.wrap_optimizer": lambda self, optimizer, num_loss=1: 0,
        "apex.amp.scaler.LossScaler": lambda loss_scale, init_scale=2.0**16, scale_factor=2.0, scale_window=2000,
        min_loss_scale=None, max_loss_scale=2.0**24: 0,
        "apex.fp16_utils.FP16_Optimizer": lambda init_optimizer, static_loss_scale=1.0, dynamic_loss_scale=False,
        dynamic_loss_args=None, verbose=True: 0,
        "apex.fp16_utils.FP16_Optimizer.backward": lambda self, loss, update_master_grads=True, retain_graph=False: 0,
        "apex.fp16_utils.FP16_Optimizer.step": lambda self, closure=None: 0,
        "apex.fp16_utils.FP16_Optimizer.clip_master_grads": lambda self, max_norm, norm_type=2: 0,
        "apex.fp16_utils.prep_param_lists": lambda model, flat_master=False: 0,
        "apex.fp16_utils.DynamicLossScaler": lambda init_scale=2**32, scale_factor=2.0, scale_window=1000: 0,
        "apex.optimizers.FusedSGD": lambda params, lr=required, momentum=0, dampening=0, weight_decay=0, nesterov=False,
        wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False: 0,
        "apex.optimizers.FusedLAMB": lambda params, lr=1e-3, bias_correction=True, betas=b, eps=1e-6, weight_decay=0.01,
        amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0,
        use_nvlamb=False: 0,
        "apex.parallel.DistributedDataParallel": lambda module, message_size=10000000, delay_allreduce=False,
        shared_param=None, allreduce_trigger_params=None, retain_allreduce_buffers=False,
        allreduce_always_fp32=False, num_allreduce_streams=1, allreduce_communicators=None, gradient_average=True,
        gradient_predivide_factor=1.0: 0,
        "apex.parallel.SyncBatchNorm": lambda num_features, eps=1e-5, momentum=0.1, affine=True,
        track_running_stats=True, process_group=None, channel_last=False, fuse_relu=False: 0,
        "apex.parallel.convert_syncbn_model": lambda module, process_group=None, channel_last=False: 0,
        "apex.parallel.LARC": lambda optimizer, trust_coefficient=0.02, clip=True, eps=e: 0,
        "apex.normalization.FusedLayerNorm": lambda normalized_shape, eps=1e-5, elementwise_affine=True,
        memory_efficient=False: 0,
    }  # fmt: skip


@pytest.mark.parametrize("name", _signatures())
def test_signature(apex: Any, name: str) -> None:
    parts = name.split(".")
    owner = find(".".join(parts[:-1])) if parts[-2][0].isupper() else None
    ours = inspect.signature(getattr(owner, parts[-1]) if owner is not None else find(name))
    expected = inspect.signature(_signatures()[name])
    got = list(ours.parameters.values())[: len(expected.parameters)]
    assert [p.name for p in got] == list(expected.parameters)
    assert [p.default for p in got] == [p.default for p in expected.parameters.values()]


# -- apex.amp.initialize --


def test_initialize_returns_what_it_was_given_in_its_shape(apex: Any) -> None:
    first, second = net(), net()
    one, two = sgd(first), sgd(second)
    assert apex.amp.initialize(first, verbosity=0) is first
    assert apex.amp.initialize(models=first, optimizers=None, verbosity=0) is first
    models, optimizers = apex.amp.initialize([first, second], [one, two], verbosity=0)
    assert (type(models), models, type(optimizers), optimizers) == (list, [first, second], list, [one, two])
    (model, ema), optimizer = apex.amp.initialize([first, second], one, verbosity=0)
    assert (model, ema, optimizer) == (first, second, one)


@pytest.mark.parametrize(
    "given",
    [
        {"loss_scale": "1.0"}, {"loss_scale": "dynamic"}, {"loss_scale": 128}, {"loss_scale": "None"},
        {"keep_batchnorm_fp32": "True"}, {"keep_batchnorm_fp32": "False"}, {"keep_batchnorm_fp32": ""},
        {"keep_batchnorm_fp32": 1.0}, {"patch_torch_functions": 0},
        {"master_weights": "False"}, {"enabled": "True"}, {"verbosity": False}, {"verbosity": "0"},
        {"min_loss_scale": "1.0", "max_loss_scale": "65536"}, {"num_losses": "2"}, {"cast_model_type": False},
        {"cast_model_type": "torch.float16"}, {"patch_torch_functions": "False"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:BatchNorm1d")
def test_strings_and_numbers_of_command_lines(apex: Any, given: dict[str, Any]) -> None:
    model = net()
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level="O2", **given)
    kept = given.get("keep_batchnorm_fp32") != "False"
    assert model[1].weight.dtype is (torch.float32 if kept else HALF)
    scales = {"1.0": 1.0, 128: 128.0}
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == scales.get(given.get("loss_scale"), 2.0**16)
    assert len(apex.amp._amp_state.loss_scalers) == (2 if "num_losses" in given else 1)
    step(apex.amp, model, optimizer)


def test_a_scale_that_is_read_in_an_evaluation_says_nothing_of_later_overflows(apex: Any) -> None:
    apex.amp.initialize(net(), opt_level="O1")
    (scaler,) = apex.amp._amp_state.loss_scalers
    with torch.inference_mode():
        assert scaler.loss_scale() == 2.0**16
        assert not scaler._overflow_buf
    scaler._overflow_buf.fill_(1)
    scaler.clear_overflow_state()
    assert not scaler._overflow_buf


@pytest.mark.parametrize(
    "given", [{"enabled": "maybe"}, {"loss_scale": "much"}, {"keep_batchnorm_fp32": "yes"}, {"opt_level": "01"}]
)
def test_other_strings_are_errors(apex: Any, given: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=next(iter(given))):
        apex.amp.initialize(net(), **{"opt_level": "O2", **given})
    assert autoamp.current_handle() is None


def test_warnings_point_at_the_program(apex: Any) -> None:
    with pytest.warns(UserWarning, match="has no effect at opt_level='O1'") as caught:
        apex.amp.initialize(net(), opt_level="O1", keep_batchnorm_fp32="True")
    assert caught[0].filename == __file__


def test_level_in_the_place_of_enabled(apex: Any) -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apex.amp.initialize(model, sgd(model), "O1", verbosity=0)
    assert apex.amp._amp_state.opt_properties.opt_level == "O1"
    assert half_product().dtype is HALF
    # Apex took any string for True, and the level is then the default.
    with pytest.warns(UserWarning, match="pass opt_level='O2' by its name") as caught:
        apex.amp.initialize(model, sgd(model), "O2", verbosity=0)
    assert caught[0].filename == __file__
    assert apex.amp._amp_state.opt_properties.opt_level == "O1"


@pytest.mark.filterwarnings("ignore:BatchNorm1d '1' keeps its running statistics")
def test_any_call_after_a_first_one_initialises_again(apex: Any) -> None:
    model = net()
    optimizer = sgd(model)
    for level in ["O1", "O2", "O0", "O3", "O2", "O1"]:
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, keep_batchnorm_fp32=None, verbosity=0)
        assert next(model.parameters()).dtype is (HALF if level in ("O2", "O3") else torch.float32)
        assert half_product().dtype is (HALF if level == "O1" else torch.float32)
        step(apex.amp, model, optimizer)
    fresh = net()
    fresh, optimizer = apex.amp.initialize(fresh, sgd(fresh), opt_level="O2", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    step(apex.amp, fresh, optimizer)


# -- opt levels --


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cast_model_type", [torch.float32, None, HALF, HALF]), ("patch_torch_functions", [False, True, False, False]),
        ("keep_batchnorm_fp32", [None, None, True, False]), ("master_weights", [False, None, True, False]),
        ("loss_scale", [1.0, "dynamic", "dynamic", 1.0]),
    ],
)  # fmt: skip
def test_properties_of_the_levels(apex: Any, name: str, row: list[Any]) -> None:
    from apex.amp import frontend

    made = [frontend.opt_levels[level](frontend.Properties()) for level in LEVELS]
    assert [properties.options[name] for properties in made] == row
    assert [getattr(properties, name) for properties in made] == row


def test_properties_of_a_call_are_read_back(apex: Any) -> None:
    state = apex.amp._amp_state
    assert not state.opt_properties.enabled
    model = net()
    apex.amp.initialize(model, sgd(model), opt_level="O3", keep_batchnorm_fp32="True", loss_scale="128.0", verbosity=2)
    properties = state.opt_properties
    assert properties.enabled
    assert properties.opt_level == "O3"
    assert properties.keep_batchnorm_fp32 is True
    assert properties.loss_scale == 128.0
    assert properties.cast_model_type is HALF
    assert state.verbosity == 2
    with pytest.warns(UserWarning, match="has no effect"):
        apex.amp.initialize(model, sgd(model), opt_level="O0", keep_batchnorm_fp32=True, verbosity=0)
    assert state.opt_properties.keep_batchnorm_fp32 is True
    apex.amp.initialize(model, enabled=False)
    assert not state.opt_properties.enabled
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = properties.nope


def test_level_of_the_alias_where_none_is_named(apex: Any) -> None:
    install_as_apex(opt_level="O2", device_type="cpu")
    assert apex.amp.initialize(net(), verbosity=0)[0].weight.dtype is HALF
    # A library that passes on a signature's defaults names none either.
    default = inspect.signature(apex.amp.initialize).parameters["opt_level"].default
    assert apex.amp.initialize(net(), opt_level=default, verbosity=0)[0].weight.dtype is HALF
    assert apex.amp.initialize(net(), opt_level="O1", verbosity=0)[0].weight.dtype is torch.float32


@pytest.mark.parametrize(("named", "scale"), [({}, 32.0), ({"loss_scale": None}, 32.0), ({"loss_scale": 8.0}, 8.0)])
def test_loss_scale_of_the_alias_where_none_is_named(apex: Any, named: dict[str, Any], scale: float) -> None:
    install_as_apex(device_type="cpu", loss_scale=32.0)
    apex.amp.initialize(net(), opt_level="O1", verbosity=0, **named)
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == scale


def test_lists_and_dtype_of_the_alias(apex: Any) -> None:
    install_as_apex(dtype=torch.bfloat16, device_type="cpu")
    apex.amp.init()
    assert half_product().dtype is torch.bfloat16
    # `Tensor.cpu` is in the set `apex` alone.
    assert half_product().cpu().dtype is torch.float32


def test_a_wrapped_model_is_refused(apex: Any) -> None:
    wrapped = apex.parallel.DistributedDataParallel(net())
    with pytest.raises(RuntimeError, match=r"is wrapped in [\w.]+ already; call initialize"):
        apex.amp.initialize([net(), wrapped], opt_level="O2")


# -- scale_loss, master_params, state --


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("form", ["one", "list", "tuple"])
def test_scale_loss(apex: Any, level: str, form: str) -> None:
    model = net()
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0, verbosity=0)
    loss = model(data()).square().mean()
    optimizers = {"one": optimizer, "list": [optimizer], "tuple": (optimizer,)}[form]
    with apex.amp.scale_loss(loss, optimizers, loss_id=0, model=model) as scaled_loss:
        assert scaled_loss.dtype is torch.float32
        assert scaled_loss.item() == pytest.approx(loss.item() * 64.0)
        scaled_loss.backward()
        with pytest.warns(UserWarning, match="clip_grad_norm_ was called inside the scale_loss block"):
            inside = torch.nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), 1e9)
    outside = torch.nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), 1e9)
    assert inside.item() == pytest.approx(outside.item() * 64.0, rel=1e-3)


def test_scale_loss_for_gradients_of_inputs_alone(apex: Any) -> None:
    model = apex.amp.initialize(nn.Linear(8, 1), opt_level="O1", loss_scale=16.0, verbosity=0)
    x = data().requires_grad_()
    with apex.amp.scale_loss(model(x).sum(), []) as scaled_loss:
        (grad,) = torch.autograd.grad(scaled_loss, x, create_graph=True)
    assert grad.requires_grad
    torch.testing.assert_close(grad[0], 16.0 * model.weight[0], rtol=1e-2, atol=1e-2)


def test_several_backward_passes_and_delay_unscale(apex: Any) -> None:
    model = nn.Linear(3, 1)
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level="O1", loss_scale=8.0, verbosity=0)
    ones = torch.ones(1, 3)

    def backward(**options: Any) -> torch.Tensor:
        with apex.amp.scale_loss(model(ones).sum(), optimizer, **options) as scaled_loss:
            scaled_loss.backward()
        return model.weight.grad.clone()  # type: ignore[union-attr]

    assert torch.equal(backward(delay_unscale=True), 8.0 * ones)
    assert torch.equal(backward(delay_unscale=True), 16.0 * ones)
    assert torch.equal(backward(), 3.0 * ones)
    assert torch.equal(backward(delay_overflow_check=True), 4.0 * ones)


@pytest.mark.parametrize(
    ("call", "given"), [("scale_loss", (torch.ones(()), [])), ("state_dict", ()), ("load_state_dict", ({},))]
)
def test_before_initialize_a_runtime_error_says_what_to_call(apex: Any, call: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match="initialize"):
        getattr(apex.amp, call)(*given)


def test_master_params_is_a_generator_of_what_is_stepped(apex: Any) -> None:
    model = net()
    optimizer = sgd(model)
    assert [id(p) for p in apex.amp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert isinstance(apex.amp.master_params(optimizer), Iterator)
    assert {p.dtype for p in apex.amp.master_params(optimizer)} == {torch.float32}
    assert [id(p) for p in apex.amp.master_params(optimizer)] == [id(p) for p in optimizer.param_groups[0]["params"]]


def test_state_dict_has_apex_keys_alone(apex: Any) -> None:
    model = net()
    model, optimizer = apex.amp.initialize(model, sgd(model), num_losses=2, verbosity=0)
    step(apex.amp, model, optimizer)
    state = apex.amp.state_dict()
    assert list(state) == ["loss_scaler0", "loss_scaler1"]
    assert all(set(entry) == {"loss_scale", "unskipped"} for entry in state.values())
    assert state["loss_scaler0"]["loss_scale"] in (2.0**15, 2.0**16)
    state["loss_scaler1"]["loss_scale"] = 32.0
    holder: Any = types.SimpleNamespace(amp=apex.amp)  # the module, passed about
    holder.amp.load_state_dict(holder.amp.state_dict())
    holder.amp.load_state_dict(state)
    assert holder.amp.state_dict()["loss_scaler1"] == {"loss_scale": 32.0, "unskipped": 0}
    assert apex.amp.state_dict({"epoch": 3})["epoch"] == 3


def test_state_of_another_number_of_losses(apex: Any) -> None:
    apex.amp.initialize(net(), num_losses=3, loss_scale="dynamic", verbosity=0)
    three = apex.amp.state_dict()
    three["loss_scaler0"]["loss_scale"] = 4.0
    apex.amp.initialize(net(), num_losses=2, loss_scale="dynamic", verbosity=0)
    with pytest.warns(UserWarning, match="3 loss scalers and this run 2"):
        apex.amp.load_state_dict(three)
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
    with pytest.raises(ValueError, match="optimizer"):
        apex.amp.load_state_dict({**apex.amp.state_dict(), "optimizer": {}})
    with pytest.raises(ValueError, match="loss_scaler0"):
        apex.amp.load_state_dict({"optimizer": {}})


# -- the old API --


def test_init_and_its_handle(apex: Any) -> None:
    handle = apex.amp.init()
    assert isinstance(handle, apex.amp.handle.AmpHandle)
    assert handle.is_active()
    assert handle.has_cache
    assert handle.verbose is False
    model = net()
    optimizer = sgd(model)
    assert step(handle, model, optimizer) > step(handle, model, optimizer) or step(handle, model, optimizer) > 0
    weight = next(model.parameters())
    handle.remove_cache(weight)
    handle._clear_cache()
    assert len(handle.cache) == 0
    with handle._disable_casts():
        assert half_product().dtype is torch.float32
    assert half_product().dtype is HALF
    handle._deactivate()
    assert not handle.is_active()
    assert half_product().dtype is torch.float32


def test_init_takes_a_bool_by_position(apex: Any) -> None:
    handle = apex.amp.init(False)
    assert isinstance(handle, apex.amp.handle.NoOpHandle)
    assert not handle.is_active()
    assert not handle.has_cache
    assert not handle.verbose
    model = net()
    optimizer = handle.wrap_optimizer(sgd(model), num_loss=2)
    loss = model(data()).mean()
    with optimizer.scale_loss(loss) as same:
        assert same is loss
    with handle.scale_loss(loss, optimizer) as same:
        assert same is loss
    with handle._disable_casts():
        handle._clear_cache()
    handle._deactivate()
    assert apex.amp.init(True).is_active()


@pytest.mark.parametrize("by_name", [False, True])
def test_wrapped_optimizer(apex: Any, by_name: bool) -> None:
    handle = apex.amp.init(loss_scale="dynamic")
    model = net()
    plain = sgd(model)
    optimizer = apex.amp.opt.OptimWrapper(plain, handle, 2) if by_name else handle.wrap_optimizer(plain, num_loss=2)
    if by_name:
        assert isinstance(optimizer, apex.amp.opt.OptimWrapper)
    with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss"), handle.scale_loss(torch.ones(()), optimizer):
        pass
    for factor in (1.0, float("inf")):
        with optimizer.scale_loss(model(data()).float().mean() * factor) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    scalers = apex.amp._amp_state.loss_scalers
    assert [scaler.loss_scale() for scaler in scalers] == [2.0**16, 2.0**15]
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["params"][0] is plain.param_groups[0]["params"][0]


def test_decorator_handle(apex: Any) -> None:
    from apex.amp import amp

    assert amp._DECORATOR_HANDLE is None
    handle = amp.init()
    assert amp._DECORATOR_HANDLE.cache is handle.cache
    from apex.amp.amp import _DECORATOR_HANDLE

    assert _DECORATOR_HANDLE.is_active()
    amp._DECORATOR_HANDLE = None
    assert not handle.is_active()
    native = autoamp.init(dtype=HALF, device_type="cpu")
    assert amp._DECORATOR_HANDLE.cache is native.cache
    native.deactivate()
    assert amp._DECORATOR_HANDLE is None


# -- internals --


def test_state_is_object_and_module(apex: Any) -> None:
    import apex.amp._amp_state as by_name
    from apex.amp._amp_state import AmpState, _amp_state

    assert apex.amp._amp_state is _amp_state
    # `import a.b as c` takes the attribute, as it did with Apex; the module has an entry of its own.
    assert by_name is _amp_state
    assert sys.modules["apex.amp._amp_state"]._amp_state is _amp_state
    fresh = AmpState()
    assert (fresh.verbosity, fresh.allow_incoming_model_not_fp32) == (1, False)
    assert (fresh.min_loss_scale, fresh.max_loss_scale, fresh.loss_scalers) == (None, 2.0**24, ())
    apex.amp.initialize(net(), opt_level="O2", min_loss_scale=2.0, max_loss_scale=2.0**20, verbosity=0)
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (2.0, 2.0**20)
    assert _amp_state.handle.is_active()


def test_incoming_half_model_is_allowed_when_asked(apex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="its fp32 values are lost"):
        apex.amp.initialize(nn.Linear(2, 2).half(), verbosity=0)
    monkeypatch.setattr(apex.amp._amp_state, "allow_incoming_model_not_fp32", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apex.amp.initialize(nn.Linear(2, 2).half(), verbosity=0)


@pytest.mark.parametrize("scale", [2**20, 2.0**30])
def test_poked_scale_takes_effect(apex: Any, scale: float) -> None:
    model = nn.Linear(8, 1)
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    scaler = apex.amp._amp_state.loss_scalers[0]
    assert (scaler._unskipped, scaler._scale_seq_len, scaler._max_loss_scale) == (0, 2000, 2.0**24)
    scaler._loss_scale = scale
    assert scaler.loss_scale() == scaler._loss_scale == scale
    with apex.amp.scale_loss(model(data()).sum() * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert scaler._has_overflow
    optimizer.step()
    assert scaler._has_overflow
    assert (scaler.loss_scale(), scaler._unskipped, scaler.dynamic) == (scale / 2, 0, True)
    scaler._unskipped, scaler._scale_seq_len = 7, 8
    assert apex.amp.state_dict()["loss_scaler0"]["unskipped"] == 7
    optimizer.zero_grad()
    with apex.amp.scale_loss(model(data()).sum() * 1e-6, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert scaler.loss_scale() == scale
    assert apex.amp._amp_state.loss_scalers[0] is scaler


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_scaler_has_a_verdict_of_its_own_until_its_next_block(apex: Any, level: str) -> None:
    models: Any = [nn.Linear(8, 1), nn.Linear(8, 1)]
    models, optimizers = apex.amp.initialize(models, [sgd(one) for one in models], opt_level=level, num_losses=2,
                                             loss_scale=128.0, verbosity=0)  # fmt: skip

    def verdicts(bad: int) -> list[tuple[bool, ...]]:
        seen = []
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = model(data()).float().sum() * (torch.inf if number == bad else 1e-3)
            with apex.amp.scale_loss(loss, optimizer, loss_id=number) as scaled_loss:
                scaled_loss.backward()
            seen.append(tuple(scaler._has_overflow for scaler in apex.amp._amp_state.loss_scalers))
            optimizer.step()
            assert seen[-1] == tuple(scaler._has_overflow for scaler in apex.amp._amp_state.loss_scalers)
        return seen

    assert verdicts(0) == [(True, False), (True, False)]
    assert verdicts(1) == [(False, False), (False, True)]
    assert verdicts(2) == [(False, True), (False, False)]


@pytest.mark.parametrize("cause", ["own gradients", "another process", "none"])
def test_scaler_that_is_asked_between_block_and_step(apex: Any, cause: str) -> None:
    """BERT scripts check a flat buffer of all processes, and step or not by what ``update_scale`` says."""
    model = nn.Linear(8, 1)
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    state = apex.amp._amp_state
    for _ in range(3):
        scale = state.loss_scalers[0].loss_scale()
        factor = torch.inf if cause == "own gradients" else 1e-3
        with apex.amp.scale_loss(model(data()).sum() * factor, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        buffer = torch.full((1,), int(cause == "another process"), dtype=torch.int)
        old, state.loss_scalers[0]._overflow_buf = state.loss_scalers[0]._overflow_buf, buffer
        had_overflow = state.loss_scalers[0].update_scale()
        state.loss_scalers[0]._overflow_buf = old
        assert had_overflow is (cause != "none")
        assert state.loss_scalers[0].loss_scale() == (scale if cause == "none" else scale / 2)
        if not had_overflow:
            optimizer.step()
        for param in optimizer._amp_stash.all_fp32_from_fp16_params:
            param.grad = None
        model.zero_grad()
    # The scaler heard of each step once.
    assert state.loss_scalers[0]._unskipped == (3 if cause == "none" else 0)


@pytest.mark.parametrize("overflow", [False, True])
def test_scaler_by_hand(apex: Any, overflow: bool) -> None:
    scaler = apex.amp.scaler.LossScaler("dynamic", init_scale=8.0, scale_window=2, max_loss_scale=16.0)
    grads, masters = [torch.tensor([16.0, torch.inf if overflow else 16.0], dtype=HALF)], [torch.zeros(2)]
    scaler.clear_overflow_state()
    scaler.unscale(grads, masters)
    scaler.unscale_with_stashed(grads, masters, masters)
    assert masters[0][0] == 4.0
    assert [scaler.update_scale() for _ in range(2)] == [overflow] * 2
    assert scaler.loss_scale() == (2.0 if overflow else 16.0)
    scaler._has_overflow = True
    scaler.clear_overflow_state()
    assert not scaler._has_overflow
    static = apex.amp.scaler.LossScaler(128)
    assert (static.loss_scale(), static.dynamic) == (128.0, False)


def test_the_state_has_the_scalers_of_the_latest_call(apex: Any) -> None:
    kept, state = [], apex.amp._amp_state
    for call, (losses, given) in enumerate([(3, {}), (2, {"loss_scale": 8.0}), (1, {}), (2, {"loss_scale": 16.0})]):
        model = net()
        optimizer = sgd(model)
        kept.append(apex.amp.initialize(model, optimizer, opt_level="O1", num_losses=losses, verbosity=0, **given))
        assert len(state.loss_scalers) == losses
        assert [scaler.dynamic for scaler in state.loss_scalers] == [not given] * losses
        assert state.opt_properties.loss_scale == given.get("loss_scale", "dynamic")
        scale = 2.0**call
        state.loss_scalers[0]._loss_scale = scale
        loss = model(data()).float().mean()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            assert float(scaled_loss.detach()) == pytest.approx(float(loss.detach()) * scale)
    model, optimizer = kept[1]
    loss = model(data()).float().mean()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        assert float(scaled_loss.detach()) == pytest.approx(float(loss.detach()) * 2.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_passes_that_the_program_scales_itself(apex: Any, level: str) -> None:
    """`_prepare_amp_backward` and `_post_amp_backward` come to what `scale_loss` does, overflows included."""

    @contextlib.contextmanager
    def by_hand(loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        scaler = apex.amp._amp_state.loss_scalers[0]
        if not optimizer._amp_stash.params_have_scaled_gradients:
            optimizer._prepare_amp_backward()
        yield loss.float() * scaler.loss_scale()
        scaler.clear_overflow_state()
        optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False

    def trained(scaled: Any) -> tuple[list[torch.Tensor], float, int]:
        torch.manual_seed(0)
        model = net()
        model, optimizer = apex.amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
        width = next(model.parameters()).shape[1]
        for step in range(5):
            optimizer.zero_grad()
            for micro in range(2):
                given = torch.randn(3, width) * (1e30 if (step, micro) == (2, 0) else 1.0)
                with scaled(model(given).float().mean(), optimizer) as loss:
                    loss.backward()
            optimizer.step()
        skipped = autoamp.current_handle().skipped_steps
        return list(model.parameters()), apex.amp._amp_state.loss_scalers[0].loss_scale(), skipped

    native, mine = trained(apex.amp.scale_loss), trained(by_hand)
    torch.testing.assert_close(mine, native, rtol=0, atol=0)
    assert mine[2] >= 1
    model = net()
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    with apex.amp.scale_loss(model(data()).float().sum(), optimizer) as loss:
        with pytest.raises(UsageError, match="inside a scale_loss block"):
            optimizer._prepare_amp_backward()
        loss.backward()
    autoamp.current_handle().deactivate()
    with pytest.raises(UsageError, match=r"before amp\.initialize"):
        optimizer._prepare_amp_backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_of_scale_loss_that_delays_and_skips_by_itself_skips_one_step(apex: Any, level: str) -> None:
    """As Apex's own does: nothing is prepared where an earlier pass has left gradients scaled."""

    @contextlib.contextmanager
    def copied(loss: torch.Tensor, optimizer: Any, delay_unscale: bool) -> Iterator[torch.Tensor]:
        scaler, stash = apex.amp._amp_state.loss_scalers[0], optimizer._amp_stash
        if not delay_unscale and not stash.params_have_scaled_gradients:
            optimizer._prepare_amp_backward()
        yield loss.float() * scaler.loss_scale()
        stash.params_have_scaled_gradients = delay_unscale
        if delay_unscale:
            return
        scaler.clear_overflow_state()
        stash.params_have_scaled_gradients = True
        optimizer._post_amp_backward(scaler)
        stash.params_have_scaled_gradients = False
        if scaler.update_scale():
            before = optimizer.step

            def skip(closure: Any = None) -> None:
                for master in stash.all_fp32_from_fp16_params:
                    master.grad = None
                optimizer.step = before

            optimizer.step = skip

    def trained(scaled: Any) -> tuple[list[bool], float]:
        torch.manual_seed(0)
        model = net()
        model, optimizer = apex.amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
        stepped = []
        for step in range(6):
            for micro in range(2):
                loss = model(data()).float().mean() * (torch.inf if (step, micro) == (2, 1) else 0.125)
                with scaled(loss, optimizer, delay_unscale=not micro) as scaled_loss:
                    scaled_loss.backward()
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            stepped.append(not all(map(torch.equal, before, model.parameters())))
        return stepped, apex.amp._amp_state.loss_scalers[0].loss_scale()

    assert trained(copied) == trained(apex.amp.scale_loss) == ([True, True, False, True, True, True], 2.0**15)


def test_an_overflow_that_the_program_notes_itself(apex: Any) -> None:
    model = net()
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    scaler = apex.amp._amp_state.loss_scalers[0]
    scaler._has_overflow = True
    assert scaler._has_overflow
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0**15
    with apex.amp.scale_loss(model(data()).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert not scaler._has_overflow
    assert not scaler.update_scale()
    scaler._has_overflow = True
    scaler.clear_overflow_state()
    assert not scaler._has_overflow


def test_helpers_of_the_state(apex: Any, caplog: pytest.LogCaptureFixture) -> None:
    from apex.amp._amp_state import maybe_print, warn_or_err

    state = apex.amp._amp_state
    state.verbosity, state.hard_override = 1, False
    caplog.set_level(logging.INFO)
    maybe_print("said")
    maybe_print("said once", rank0=True)
    state.verbosity = 0
    maybe_print("not said")
    assert [record.getMessage() for record in caplog.records] == ["said", "said once"]
    with pytest.raises(RuntimeError, match="wrong"):
        warn_or_err("wrong")
    state.hard_override = True
    warn_or_err("wrong")


def test_applier_reaches_what_is_in_containers(apex: Any) -> None:
    from apex.amp._initialize import applier

    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    given = {"a": [torch.ones(1), "text", 3], "b": (packed, None)}
    cast = applier(given, lambda value: value.to(torch.float16))
    assert (cast["a"][0].dtype, cast["a"][1:], cast["b"][1]) == (torch.float16, ["text", 3], None)
    assert cast["b"][0].data.dtype is torch.float16
    assert given["a"][0].dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_stash(apex: Any, level: str) -> None:
    model = net()
    model, optimizer = apex.amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    stash.lazy_init_called = True
    optimizer._amp_lazy_init()
    optimizer._lazy_init_maybe_master_weights()
    params = list(model.parameters())
    halves = [p for p in params if p.dtype is HALF]
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for p in halves]
    assert len(halves) == (4 if level == "O2" else 0)
    masters = stash.all_fp32_from_fp16_params
    assert [p.shape for p in masters] == [p.shape for p in halves]
    assert {p.dtype for p in masters} <= {torch.float32}
    own = [p for p in params if p.dtype is torch.float32]
    assert [id(p) for p in stash.all_fp32_from_fp32_params] == [id(p) for p in own]
    assert [[id(p) for p in group] for group in stash.fp16_groups] == [[id(p) for p in halves]]
    assert [[id(p) for p in group] for group in stash.fp32_from_fp16_groups] == [[id(p) for p in masters]]
    assert [len(group) for group in stash.fp32_from_fp32_groups] == [len(own)]
    with torch.no_grad():
        for master in masters:
            master.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert all(bool((half == 0.5).all()) for half in halves)
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["param_groups"][0]["lr"] == 0.1
    assert getattr(copy.deepcopy(optimizer), "_amp_stash", None) is None


def test_lists_hold_names(apex: Any) -> None:
    from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

    assert {"conv2d", "matmul"} <= set(torch_overrides.FP16_FUNCS)
    assert {"softmax", "layer_norm", "gelu"} <= set(functional_overrides.FP32_FUNCS)
    assert "binary_cross_entropy" in functional_overrides.BANNED_FUNCS
    assert tensor_overrides.MODULE is torch.Tensor


def test_functions_that_programs_import(apex: Any) -> None:
    from apex.amp import compat, rnn_compat, utils

    assert utils.is_fp_tensor([torch.ones(1), (torch.ones(1),)])
    assert not utils.is_fp_tensor([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    assert utils.maybe_half(torch.ones(1)).dtype is torch.float32  # on a CPU Apex leaves tensors alone
    assert compat.filter_attrs(torch, ["mm", "nope"]) == ["mm"]
    assert not rnn_compat.has_old_rnns()


@pytest.mark.parametrize("way", ["init", "initialize"])
def test_lists_that_a_program_changes_take_effect(apex: Any, way: str) -> None:
    from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

    functional_overrides.FP16_FUNCS.append("softmax")
    functional_overrides.FP32_FUNCS.remove("softmax")
    functional_overrides.FP32_FUNCS.append("relu")
    functional_overrides.FP16_FUNCS.append("no_such_function")
    functional_overrides.BANNED_FUNCS.remove("binary_cross_entropy")
    torch_overrides.FP32_FUNCS.remove("exp")
    tensor_overrides.FP32_FUNCS.append("mul")
    apex.amp.init() if way == "init" else apex.amp.initialize(net(), opt_level="O1", verbosity=0)
    half, full = torch.ones(2).half(), torch.ones(2)
    assert F.softmax(full, 0).dtype is HALF
    assert F.relu(half).dtype is torch.float32
    assert torch.exp(half).dtype is HALF
    assert half.exp().dtype is torch.float32
    assert half.mul(2).dtype is torch.float32
    assert half_product().dtype is HALF
    assert F.binary_cross_entropy(half * 0.5, half * 0.5).isfinite()


def test_native_functions_take_the_same_arguments_in_the_same_order(apex: Any) -> None:
    for name in ["initialize", "scale_loss", "init"]:
        native, ours = (
            [p.name for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            for f in (getattr(autoamp, name), getattr(apex.amp, name))
        )
        assert native == ours
