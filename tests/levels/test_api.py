"""Opt levels: what initialize() takes, gives back, changes and leaves alone; scale_loss and state of the module."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

import autoamp
from autoamp.errors import AutoampError, UsageError
from autoamp.levels.opt_levels import LEVELS
from autoamp.scaling.loss_scale import DynamicLossScaler, StaticLossScaler

LISTS = {"extends": [], "fp16": ["linear", "conv2d"], "fp32": ["cross_entropy", "softmax"]}
ALL_LEVELS = sorted(LEVELS)


@pytest.fixture(autouse=True)
def enabled_afterwards() -> Iterator[None]:
    yield
    initialize(nn.Linear(1, 1), opt_level="O0")


def initialize(models: Any, optimizers: Any = None, **kwargs: Any) -> Any:
    defaults = {"dtype": torch.float16, "device_type": "cpu", "lists": LISTS, "verbosity": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autoamp.initialize(models, optimizers, **{**defaults, **kwargs})


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    inputs, labels = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).float(), labels)
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one
    )


# -- the table of levels --


def test_levels_are_those_of_the_table() -> None:
    rows = {
        name: (o.cast_model_type, o.patch_torch_functions, o.keep_batchnorm_fp32, o.master_weights, o.loss_scale)
        for name, o in LEVELS.items()
    }
    assert rows == {
        "O0": (torch.float32, False, False, False, 1.0),
        "O1": (None, True, False, False, None),
        "O2": ("half", False, True, True, None),
        "O3": ("half", False, False, False, 1.0),
    }


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_every_level_trains(level: str, half: torch.dtype) -> None:
    model, optimizer = initialize(network(), dtype=half, opt_level=level), None
    optimizer = sgd(model)
    model, optimizer = initialize(model, optimizer, dtype=half, opt_level=level)
    losses = train(model, optimizer, 8)
    assert losses[-1] < losses[0] / 2
    weights = {"O0": torch.float32, "O1": torch.float32, "O2": half, "O3": half}[level]
    assert model[4].weight.dtype is weights
    assert model[1].weight.dtype is (half if level == "O3" else torch.float32)
    assert {p.dtype for p in autoamp.master_params(optimizer)} == ({half} if level == "O3" else {torch.float32})
    # At O1 outputs are as the lists make them.
    assert model(batch()[0]).dtype is (half if level == "O1" else torch.float32)


# -- what is returned --


def test_returns_mirror_the_arguments() -> None:
    one, two = network(), network()
    first, second = sgd(one), sgd(two)
    assert initialize(one) is one
    assert initialize(models=one) is one
    assert initialize(one, None) is one
    models = [one, two]
    assert initialize(models) is models
    assert initialize([one])[0] is one
    got = initialize(one, first)
    assert type(got) is tuple
    assert got[0] is one
    assert got[1] is first
    optimizers = [first, second]
    got_models, got_optimizers = initialize(models, optimizers, opt_level="O2")
    assert got_models is models
    assert got_optimizers is optimizers
    got_models, got_optimizer = initialize((one, two), first)
    assert type(got_models) is tuple
    assert got_optimizer is first
    got_model, got_optimizers = initialize(one, [first])
    assert got_model is one
    assert got_optimizers == [first]


# -- overrides --


@pytest.mark.parametrize("keep", [True, False])
def test_keep_batchnorm_fp32_overrides(keep: bool) -> None:
    model = initialize(network(), opt_level="O3" if keep else "O2", keep_batchnorm_fp32=keep)
    expected = torch.float32 if keep else torch.float16
    assert model[1].weight.dtype is expected
    assert model[1].running_var.dtype is expected
    assert model[0].weight.dtype is torch.float16


def test_master_weights_overrides() -> None:
    model = network()
    model, optimizer = initialize(model, sgd(model), opt_level="O3", master_weights=True)
    assert {p.dtype for p in autoamp.master_params(optimizer)} == {torch.float32}
    model, optimizer = initialize(model, optimizer, opt_level="O2", master_weights=False, keep_batchnorm_fp32=False)
    assert {p.dtype for p in autoamp.master_params(optimizer)} == {torch.float16}


def test_cast_model_type_overrides() -> None:
    assert initialize(network(), opt_level="O2", cast_model_type=torch.bfloat16)[0].weight.dtype is torch.bfloat16
    model = initialize(network(), opt_level="O0", cast_model_type=torch.float16, keep_batchnorm_fp32=True)
    assert model[0].weight.dtype is torch.float16
    model = initialize(model.half(), opt_level="O3", cast_model_type=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_cast_model_type_false_leaves_the_model(level: str, half: torch.dtype) -> None:
    """As Apex's tests have it, with half and fp32 parameters in one model; at O2 the half ones get masters."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(half))
    before = values(model)
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autoamp.initialize(
            model, optimizer, opt_level=level, cast_model_type=False, dtype=half, device_type="cpu", lists=LISTS,
            verbosity=0,
        )  # fmt: skip
    assert same(values(model), before)
    seen = []
    hook = model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with autoamp.disable_casts(), contextlib.suppress(RuntimeError):
        model(torch.ones(1, 3).double())
    assert seen == [torch.float64]
    hook.remove()
    stepped = {param.dtype for param in autoamp.master_params(optimizer)}
    assert stepped == ({torch.float32} if level == "O2" else {torch.float32, half})
    assert any("is in torch" in str(warning.message) for warning in caught) is (level != "O2")


def test_patch_torch_functions_overrides() -> None:
    inputs = torch.ones(2, 3)
    initialize(nn.Linear(3, 3), opt_level="O0", patch_torch_functions=True)
    assert nn.Linear(3, 3)(inputs).dtype is torch.float16
    initialize(nn.Linear(3, 3), opt_level="O1", patch_torch_functions=False)
    assert nn.Linear(3, 3)(inputs).dtype is torch.float32
    with pytest.raises(UsageError, match=r"patch_torch_functions=True .* choose one of the two"):
        initialize(nn.Linear(3, 3), opt_level="O2", patch_torch_functions=True)


@pytest.mark.parametrize(
    ("level", "given", "scale"),
    [("O0", None, 1.0), ("O3", None, 1.0), ("O1", None, 2.0**16), ("O2", 128, 128.0), ("O3", 64.0, 64.0)],
)
def test_loss_scale_overrides(level: str, given: Any, scale: float) -> None:
    model = network()
    initialize(model, sgd(model), opt_level=level, loss_scale=given)
    with autoamp.scale_loss(torch.ones((), dtype=torch.float16, requires_grad=True), []) as scaled:
        assert scaled.item() == scale
        assert scaled.dtype is torch.float32
    scaler = autoamp.current_handle().optimizers.scalers[0]  # type: ignore[union-attr]
    assert type(scaler) is (DynamicLossScaler if given is None and level in ("O1", "O2") else StaticLossScaler)


def test_bf16_is_not_scaled_by_default() -> None:
    initialize(network(), opt_level="O2", dtype=torch.bfloat16)
    assert autoamp.current_handle().loss_scale == 1.0  # type: ignore[union-attr]


def test_bounds_of_the_loss_scale() -> None:
    initialize(network(), opt_level="O2", min_loss_scale=2.0**17, num_losses=2)
    assert [s.loss_scale for s in scalers()] == [2.0**17] * 2
    initialize(network(), opt_level="O2", max_loss_scale=4.0)
    scaler = scalers()[0]
    assert scaler.loss_scale == 4.0
    scaler.growth_interval = 1
    scaler.update(False)
    assert scaler.loss_scale == 4.0
    initialize(network(), opt_level="O2", loss_scale="dynamic", dtype=torch.bfloat16, min_loss_scale=2.0**15)
    for _ in range(5):
        scalers()[0].update(True)
    assert scalers()[0].loss_scale == 2.0**15


def scalers() -> list[Any]:
    return autoamp.current_handle().optimizers.scalers  # type: ignore[union-attr]


def test_each_loss_has_a_scaler() -> None:
    model = network()
    model, optimizer = initialize(model, sgd(model), opt_level="O2", num_losses=3)
    with autoamp.scale_loss(model(batch()[0]).sum() * torch.inf, optimizer, loss_id=1) as scaled:
        scaled.backward()
    optimizer.step()
    state = autoamp.state_dict()
    assert [state[f"loss_scaler{i}"]["loss_scale"] for i in range(3)] == [2.0**16, 2.0**15, 2.0**16]
    with pytest.raises(UsageError, match="loss_id=3 has no scaler; choose 0 or 1 or 2"):
        autoamp.scale_loss(torch.ones(()), optimizer, loss_id=3)


def test_a_given_scaler_serves_one_loss() -> None:
    given = DynamicLossScaler(init_scale=8.0)
    initialize(network(), opt_level="O1", loss_scale=given, num_losses=2)
    first, second = scalers()
    assert first is given
    second.update(True)
    assert (first.loss_scale, second.loss_scale) == (8.0, 4.0)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_cast_model_outputs(level: str) -> None:
    model = initialize(network(), opt_level=level, cast_model_outputs=torch.bfloat16)
    assert model(batch()[0]).dtype is torch.bfloat16
    assert model[4](torch.ones(1, 144, dtype=torch.float16)).dtype is torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delay_unscale_leaves_gradients_scaled(level: str) -> None:
    model = nn.Linear(3, 2)
    model, optimizer = initialize(model, sgd(model), opt_level=level, loss_scale=8.0)
    inputs = torch.ones(2, 3)

    def gradient() -> Tensor:
        return next(iter(autoamp.master_params(optimizer))).grad.clone()

    with autoamp.scale_loss(model(inputs).sum(), optimizer) as scaled:
        scaled.backward()
    once = gradient()
    optimizer.zero_grad()
    with autoamp.scale_loss(model(inputs).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    torch.testing.assert_close(gradient(), once * 8)
    with autoamp.scale_loss(model(inputs).sum(), optimizer) as scaled:
        scaled.backward()
    torch.testing.assert_close(gradient(), once * 2)


# -- enabled=False --


def test_disabled_is_a_no_op() -> None:
    model = network()
    optimizer = sgd(model)
    step, zero_grad = optimizer.step, optimizer.zero_grad
    call, before = nn.Module.__call__, values(model)
    assert initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert initialize(model, enabled=None) is model
    assert nn.Module.__call__ is call
    assert (optimizer.step, optimizer.zero_grad) == (step, zero_grad)
    assert same(values(model), before)
    loss = model(batch()[0]).sum()
    with autoamp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert autoamp.state_dict() == {}
    autoamp.load_state_dict({})
    assert list(autoamp.master_params(optimizer)) == list(model.parameters())


def test_disabled_ends_what_was_set_up_before() -> None:
    model = network()
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    initialize(model, optimizer, enabled=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(optimizer.param_groups[0]["params"]) == list(model.parameters())
    assert autoamp.current_handle() is None


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_level_in_the_place_of_enabled_is_told_where_it_belongs(level: str) -> None:
    with pytest.raises(UsageError, match=f"enabled='{level}' is no bool; pass opt_level='{level}' by its name"):
        initialize(network(), enabled=level)


# -- order of calls --


@pytest.mark.parametrize("call", ["scale_loss", "state_dict", "load_state_dict"])
def test_before_initialize_an_error_says_what_to_call(call: str) -> None:
    arguments = {"scale_loss": (torch.ones(()), []), "state_dict": (), "load_state_dict": ({},)}[call]
    with pytest.raises(RuntimeError, match=rf"{call}\(\) needs a handle; call autoamp.initialize\(model, optimizer\)"):
        getattr(autoamp, call)(*arguments)


def test_the_functions_serve_init_too() -> None:
    handle = autoamp.init(loss_scale=4.0, dtype=torch.float16, device_type="cpu", lists=LISTS)
    with autoamp.scale_loss(torch.ones((), requires_grad=True), []) as scaled:
        assert scaled.item() == 4.0
    assert autoamp.state_dict() == handle.state_dict()


# -- repeated calls --


def test_one_model_through_all_levels_keeps_its_weights() -> None:
    """After each level the weights are bit for bit what the optimizer stepped, and nothing is patched twice."""
    model = network()
    optimizer = sgd(model)
    identity = list(model.parameters())
    call = nn.Module.__call__
    for level in ("O2", "O1", "O2", "O0", "O2", "O3", "O0"):
        before = values(model)
        initialize(model, optimizer, opt_level=level)
        assert list(model.parameters()) == identity
        if level != "O3":
            assert same(values(model), before)
        train(model, optimizer, 2)
        trained = values(model)
        autoamp.current_handle().deactivate()  # type: ignore[union-attr]
        assert nn.Module.__call__ is call
        assert same(values(model), trained)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert list(optimizer.param_groups[0]["params"]) == identity
        assert "step" not in vars(optimizer)
        assert "zero_grad" not in vars(optimizer)
        momenta = [entry["momentum_buffer"].dtype for entry in optimizer.state.values()]
        assert set(momenta) == {torch.float32}
        assert len(momenta) == len(identity)


def test_repeated_calls_cast_once() -> None:
    calls = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x.dtype)
            return x

    model = Watch()
    for _ in range(4):
        initialize(model, opt_level="O2")
    assert model(torch.ones(2)).dtype is torch.float32
    assert calls == [torch.float16]
    patched = nn.Module.__call__
    depth = 0
    while hasattr(patched, "__autoamp_original__"):
        patched, depth = patched.__autoamp_original__.original, depth + 1
    assert depth <= 2


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_second_experiment_equals_a_first(level: str) -> None:
    def run() -> dict[str, Tensor]:
        model = network()
        model, optimizer = initialize(model, sgd(model), opt_level=level)
        losses = train(model, optimizer)
        return {**values(model), "losses": torch.tensor(losses)}

    first = run()
    other = network()
    initialize(other, sgd(other), opt_level="O2" if level != "O2" else "O1")
    assert same(run(), first)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_nothing_is_kept_alive(level: str, collected: Any) -> None:
    def run() -> list[Any]:
        model = network()
        model, optimizer = initialize(model, sgd(model), opt_level=level)
        train(model, optimizer, 1)
        masters = list(autoamp.master_params(optimizer))
        return [weakref.ref(x) for x in (model, optimizer, model[0].weight, *masters)]

    references = run()
    collected()
    assert [reference() for reference in references] == [None] * len(references)


def test_weights_outlive_an_optimizer_that_is_dropped(collected: Any) -> None:
    model = network()

    def run() -> None:
        optimizer = sgd(model)
        initialize(model, optimizer, opt_level="O2")
        train(model, optimizer)

    run()
    collected()
    trained = values(model)
    assert not torch.equal(trained["0.weight"], trained["0.weight"].half().float())
    initialize(model, opt_level="O0")
    assert same(values(model), trained)


# -- inference and scope --


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_inference_without_an_optimizer(level: str, half: torch.dtype) -> None:
    model = network().eval()
    expected = model(batch()[0])
    initialize(model, opt_level=level, dtype=half)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch()[0]).float(), expected, atol=0.05, rtol=0.05)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()[0]).float(), expected, atol=0.05, rtol=0.05)


def test_scope_models_leaves_every_other_module_alone() -> None:
    other, inputs = network(), batch()[0]
    reference = copy.deepcopy(other)
    expected = reference(inputs)
    expected.sum().backward()
    seen: list[torch.dtype] = []
    model = network()
    model[2].register_forward_hook(lambda *_: seen.append(_[2].dtype))
    model, optimizer = initialize(model, sgd(model), scope="models")
    got = other(inputs)
    got.sum().backward()
    assert torch.equal(got, expected)
    assert got.dtype is torch.float32
    for mine, its in zip(other.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    losses = train(model, optimizer, 6)
    assert losses[-1] < losses[0]
    assert set(seen) == {torch.float16}
    assert model(inputs).dtype is torch.float32
    with autoamp.disable_casts():
        model(inputs)
    assert seen[-1] is torch.float32


def test_scope_models_with_patches_at_o0() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda *_: seen.append(_[2].dtype))
    initialize(model, opt_level="O0", patch_torch_functions=True, scope="models")
    assert model(torch.ones(1, 3)).dtype is torch.float32
    assert nn.Linear(3, 3)(torch.ones(1, 3)).dtype is torch.float32
    assert seen == [torch.float16]


def test_scope_models_is_the_same_as_global_for_the_model() -> None:
    def run(scope: str) -> dict[str, Tensor]:
        model = network()
        model, optimizer = initialize(model, sgd(model), scope=scope)
        train(model, optimizer)
        return values(model)

    assert same(run("models"), run("global"))


# -- errors --

WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "level": (None, {"opt_level": "O4"}, r"opt_level='O4' is unknown; choose 'O0', 'O1', 'O2' or 'O3'"),
    "level with a zero": (None, {"opt_level": "02"}, r"opt_level='02' is unknown"),
    "unhashable level": (None, {"opt_level": ["O1"]}, r"opt_level=\['O1'\] is unknown"),
    "model": ("model", {}, "models takes a torch.nn.Module or a list of them, not str"),
    "scope": (None, {"scope": "model"}, "scope='model' is unknown; choose 'global' or 'models'"),
    "cast_model_type": (None, {"cast_model_type": torch.int8}, "cast_model_type=torch.int8"),
    "dtype": (None, {"dtype": torch.float64}, "dtype=torch.float64 is no half precision"),
    "losses": (None, {"num_losses": 0}, "num_losses=0 is no number of losses; choose 1 or more"),
    "scale": (None, {"loss_scale": -1.0}, r"loss_scale=-1.0 is no usable scale"),
    "scale as a string": (None, {"loss_scale": "128.0"}, "loss_scale='128.0' is a string; choose 'dynamic' or a num"),
    "flag as a string": (None, {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32='True' is no bool"),
    "bounds": (None, {"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_loss_scale=8.0 is above max_loss_scale"),
    "flag": (None, {"master_weights": "maybe"}, "master_weights='maybe' is no bool; choose True, False or None"),
    "outputs": (None, {"cast_model_outputs": "fp32"}, "cast_model_outputs='fp32' is no floating dtype"),
    "optimizer": (None, {"optimizers": 3}, "optimizers takes an optimizer or a list of them, not int"),
    "optimizers": (None, {"optimizers": [None]}, "optimizers takes an optimizer or a list of them, not NoneType"),
    "own scaler": (
        None,
        {"optimizers": autoamp.FP16_Optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]))},
        r"this FP16_Optimizer scales its loss itself: call optimizer.backward\(loss\)",
    ),
    "list": (None, {"lists": {"fp16": ["torch.nosuch"]}}, "'torch.nosuch' names nothing"),
    "enabled": (None, {"enabled": "maybe"}, "enabled='maybe' is no bool"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_changes_nothing(case: str) -> None:
    model = network()
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    train(model, optimizer, 1)
    handle, before = autoamp.current_handle(), values(model)
    masters = list(autoamp.master_params(optimizer))
    other, kwargs, message = WRONG[case]
    with pytest.raises(AutoampError, match=message):
        initialize(model if other is None else other, **{"optimizers": optimizer, "opt_level": "O1", **kwargs})
    assert autoamp.current_handle() is handle
    assert handle.is_active()  # type: ignore[union-attr]
    assert model[0].weight.dtype is torch.float16
    assert list(autoamp.master_params(optimizer)) == masters
    assert same(values(model), before)
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", [DataParallel, DistributedDataParallel])
def test_wrapped_models_are_refused(kind: type) -> None:
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    with pytest.raises(RuntimeError, match=f"wrapped in {kind.__name__} already; call initialize"):
        initialize([nn.Linear(1, 1), wrapped])


def test_warnings_point_at_the_line_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="says nothing at opt_level='O1'") as caught:
        autoamp.initialize(network(), keep_batchnorm_fp32=True, device_type="cpu", lists=LISTS, verbosity=0)
    with pytest.warns(UserWarning, match="its fp32 values are lost") as more:
        autoamp.initialize(network().half(), device_type="cpu", lists=LISTS, verbosity=0)
    assert {warning.filename for warning in [*caught, *more]} == {__file__}


def test_an_optimizer_that_takes_no_guard_undoes_all() -> None:
    class Rigid:
        __slots__ = ("__weakref__", "param_groups")

        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params)}]

        def step(self) -> None: ...

    model = network()
    optimizer = sgd(model)
    before = values(model)
    with pytest.raises(UsageError, match="Rigid"):
        initialize(model, [optimizer, Rigid(nn.Linear(1, 1).parameters())], opt_level="O2")
    assert autoamp.current_handle() is None
    assert same(values(model), before)
    assert list(optimizer.param_groups[0]["params"]) == list(model.parameters())


def test_an_open_region_stands_in_the_way() -> None:
    model = network()
    with (
        autoamp.region(dtype=torch.bfloat16, device_type="cpu", lists=LISTS),
        pytest.raises(UsageError, match="region"),
    ):
        initialize(model, opt_level="O2")
    assert model[0].weight.dtype is torch.float32


# -- the log --


def test_verbosity(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autoamp"):
        initialize(network(), opt_level="O2", verbosity=False)
        assert not caplog.records
        initialize(network(), opt_level="O2", verbosity=1)
    assert "'O2'" in caplog.text
    assert "torch.float16" in caplog.text


def test_an_optimizer_built_after_initialize_steps_masters_too() -> None:
    model = network()
    initialize(model, opt_level="O2")
    optimizer = sgd(model)
    with autoamp.scale_loss(model(batch()[0]).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert {parameter.dtype for parameter in autoamp.master_params(optimizer)} == {torch.float32}


def test_precision_by_module_says_nothing_where_models_are_cast() -> None:
    lists = {"modules": {"0": "fp32"}}
    with pytest.warns(UserWarning, match=r"\[modules\] says nothing at opt_level='O2'"):
        autoamp.initialize(network(), opt_level="O2", lists=lists, device_type="cpu", verbosity=0)
