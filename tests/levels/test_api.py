"""`initialize()`: what it returns and leaves alone; `scale_loss`, `state_dict` and `load_state_dict`."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import autoamp
from tests.levels.shared import batch, initialize, network, same, sgd, values

# -- what is returned --


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
