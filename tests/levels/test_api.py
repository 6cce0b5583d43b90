"""`initialize()`: what it returns and leaves alone; `scale_loss`, `state_dict` and `load_state_dict`."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.levels.shared import ALL_LEVELS, batch, initialize, network, same, sgd, values

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


# -- order of calls --


@pytest.mark.parametrize("call", ["scale_loss", "state_dict", "load_state_dict"])
def test_before_initialize_an_error_says_what_to_call(call: str) -> None:
    arguments = {"scale_loss": (torch.ones(()), []), "state_dict": (), "load_state_dict": ({},)}[call]
    with pytest.raises(RuntimeError, match=rf"{call}\(\) needs a handle; call autoamp.initialize\(model, optimizer\)"):
        getattr(autoamp, call)(*arguments)


# -- inference --


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_inference_without_an_optimizer(level: str, half: torch.dtype) -> None:
    model = network().eval()
    expected = model(batch()[0])
    initialize(model, opt_level=level, dtype=half)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch()[0]).float(), expected, atol=0.05, rtol=0.05)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()[0]).float(), expected, atol=0.05, rtol=0.05)


# -- the log --


def test_verbosity(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autoamp"):
        initialize(network(), opt_level="O2", verbosity=False)
        assert not caplog.records
        initialize(network(), opt_level="O2", verbosity=1)
    assert "'O2'" in caplog.text
    assert "torch.float16" in caplog.text
