"""The common surface of handles: both kinds have all of it, with the same parameters."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import autoamp
from autoamp.runtime.protocol import BaseHandle

MEMBERS = sorted(name for name in vars(BaseHandle) if not name.startswith("_") and name != "max_consecutive_skips")


@pytest.mark.parametrize("name", MEMBERS)
def test_both_handles_have_what_is_promised(name: str) -> None:
    promised = vars(BaseHandle)[name]
    for handle in (autoamp.Handle, autoamp.NoOpHandle):
        if inspect.isfunction(promised):
            found = inspect.signature(getattr(handle, name)).parameters
            assert list(found) == list(inspect.signature(promised).parameters)
            assert [one.default for one in found.values()] == [
                one.default for one in inspect.signature(promised).parameters.values()
            ]
        else:
            assert hasattr(handle, name) or name == "skipped_rules"


@pytest.mark.parametrize("enabled", [True, False])
def test_handles_answer_to_it(enabled: bool) -> None:
    handle = autoamp.init(enabled, dtype=torch.float16, device_type="cpu")
    assert handle.is_active() is enabled
    assert isinstance(handle.skipped_rules, tuple)
    handle.max_consecutive_skips = 7
    assert handle.max_consecutive_skips == 7
    assert isinstance(handle, autoamp.Handle) is enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_copies_are_the_handle_itself_and_pickles_are_refused(enabled: bool) -> None:
    handle = autoamp.init(enabled, dtype=torch.float16, device_type="cpu")
    training = {"model": torch.nn.Linear(2, 2), "handle": handle}
    assert copy.deepcopy(training)["handle"] is handle
    assert copy.copy(handle) is handle
    assert handle.is_active() is enabled
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(autoamp.UsageError, match=r"a handle cannot be pickled.*state_dict\(\)"):
            pickle.dumps(training, protocol)


def test_repr_tells_dtype_device_lists_scale_skips_and_whether_it_is_active() -> None:
    handle = autoamp.init(dtype=torch.float16, device_type="cpu", lists="apex", loss_scale=128.0)
    assert repr(handle) == (
        "<autoamp.Handle active: torch.float16 on cpu, lists=['lists/apex.toml', 'lists/default.toml'], "
        "loss_scale=128, skipped_steps=0>"
    )
    handle.deactivate()
    assert repr(handle).startswith("<autoamp.Handle not active: ")
    assert "not active" in repr(autoamp.init(False))


def test_repr_tells_the_level_each_scale_and_the_skips() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoamp.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, device_type="cpu", num_losses=2)
    with autoamp.scale_loss(model(torch.ones(1, 2)).sum() * 1e6, optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    found = repr(autoamp.current_handle())
    assert "active: opt_level='O2', torch.float16 on cpu" in found
    assert "loss_scale=65536, 32768, skipped_steps=1>" in found
