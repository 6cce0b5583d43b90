"""docs/howto/evaluation.md: evaluate or save predictions during training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoamp
from tests.behaviour.training import started

X = torch.rand(8, 4)


def test_evaluation_is_cast_like_training() -> None:
    started()
    with torch.no_grad():
        assert nn.Linear(4, 2).eval()(X).dtype == torch.float16


def test_inference_computes_what_training_computes() -> None:
    handle, model = started(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        plain = model(X)
        with handle.inference(model) as same:
            assert same is model
            assert torch.equal(model(X), plain)
            assert torch.equal(model(X), plain)


def test_with_casts_disabled_evaluation_is_in_fp32_for_this_block() -> None:
    handle, model = started(), nn.Linear(4, 2)
    with torch.no_grad():
        with handle.disable_casts():
            assert model(X).dtype == torch.float32
        assert model(X).dtype == torch.float16


def test_under_scope_modules_predictions_go_to_numpy_unchanged() -> None:
    started(scope="modules")
    with torch.no_grad():
        assert nn.Linear(4, 2)(X).numpy().dtype == "float32"


@pytest.mark.parametrize("outputs", [None, torch.float16])
def test_at_O2_outputs_are_fp32_unless_another_dtype_is_asked_for(outputs: torch.dtype | None) -> None:
    model = autoamp.initialize(
        nn.Linear(4, 2), opt_level="O2", device_type="cpu", dtype=torch.float16, cast_model_outputs=outputs
    )
    assert model(X).dtype == (outputs or torch.float32)
