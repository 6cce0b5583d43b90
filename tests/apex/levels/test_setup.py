"""Models set up for a level, once and again, alone and beside those of earlier calls; what `initialize()` returns."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.errors import UsageError
from tests.apex.levels.shared import ALL_LEVELS, LISTS, batch, initialize, network, same, sgd, train, values


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
        assert not {"step", "zero_grad"} & vars(optimizer).keys()
        momenta = [entry["momentum_buffer"].dtype for entry in optimizer.state.values()]
        assert momenta == [torch.float32] * len(identity)


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


def test_weights_outlive_an_optimizer_that_is_dropped(collected: Any) -> None:
    model = network()

    def run() -> None:
        optimizer = sgd(model)
        initialize(model, optimizer, opt_level="O2")
        train(model, optimizer)

    run()
    collected()
    trained = values(model)
    # The fp32 masters are the weights.
    assert not torch.equal(trained["0.weight"], trained["0.weight"].half().float())
    initialize(model, opt_level="O0")
    assert same(values(model), trained)


def test_a_copied_model_trains_on_with_a_new_optimizer_and_the_states_of_the_originals() -> None:
    model = network()
    model, optimizer = initialize(model, sgd(model), opt_level="O2", dtype=torch.bfloat16)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    other = sgd(twin)
    initialize(twin, other, opt_level="O2", dtype=torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    # torch lets an optimizer share the tensors of the state that it loads.
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(twin, other) == train(model, optimizer)
    assert same(values(twin), values(model))


def test_a_model_keeps_its_overrides_when_another_one_is_set_up_that_shares_a_part() -> None:
    shared = nn.Linear(3, 3)
    one, other = (nn.Sequential(shared, nn.Linear(3, 3)) for _ in range(2))
    in_use = initialize(network(), opt_level="O1")
    initialize(one, opt_level="O1")
    autoamp.current_handle().override(one[1], "fp32")  # type: ignore[union-attr]
    initialize(other, opt_level="O1")
    assert one(torch.ones(1, 3)).dtype is torch.float32
    assert in_use(batch()[0]).dtype is torch.float16


def test_scope_models_leaves_every_other_module_alone() -> None:
    other, inputs = network(), batch()[0]
    expected = copy.deepcopy(other)(inputs)
    seen: list[torch.dtype] = []
    model = network()
    model[2].register_forward_hook(lambda *_: seen.append(_[2].dtype))
    model, optimizer = initialize(model, sgd(model), scope="models")
    got = other(inputs)
    got.sum().backward()
    assert torch.equal(got, expected)
    assert got.dtype is torch.float32
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


# -- what `initialize()` returns and leaves alone --


def test_returns_mirror_the_arguments() -> None:
    one, two = network(), network()
    first, second = sgd(one), sgd(two)
    assert initialize(models=one) is one
    assert initialize(one, None) is one
    for models in (one, [one], [one, two], (one, two)):
        assert initialize(models) is models
        for optimizers in (first, [first], [first, second]):
            got = initialize(models, optimizers, opt_level="O2")
            assert type(got) is tuple
            assert got[0] is models
            assert got[1] is optimizers


# -- enabled=False --


def test_disabled_is_a_no_op() -> None:
    model = network()
    optimizer = sgd(model)
    own, call, before = dict(vars(optimizer)), nn.Module.__call__, values(model)
    assert initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert initialize(model, enabled=None) is model
    assert nn.Module.__call__ is call
    assert vars(optimizer) == own
    assert same(values(model), before)
    loss = model(batch()[0]).sum()
    with autoamp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert autoamp.state_dict() == {}
    autoamp.load_state_dict({})
    assert list(autoamp.master_params(optimizer)) == list(model.parameters())


# -- order of calls --


@pytest.mark.parametrize("call", ["scale_loss", "state_dict", "load_state_dict"])
def test_before_initialize_an_error_says_what_to_call(call: str) -> None:
    arguments = {"scale_loss": (torch.ones(()), []), "state_dict": (), "load_state_dict": ({},)}[call]
    with pytest.raises(RuntimeError, match=rf"{call}\(\) needs a handle; call autoamp.initialize\(model, optimizer\)"):
        getattr(autoamp, call)(*arguments)


# -- the log --


def test_verbosity(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autoamp"):
        initialize(network(), opt_level="O2", verbosity=False)
        assert not caplog.records
        initialize(network(), opt_level="O2", verbosity=1)
    assert "'O2'" in caplog.text
    assert "torch.float16" in caplog.text
