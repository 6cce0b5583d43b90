"""Mistakes with the habits of torch.amp and apex: each is answered by what to write, or works as there."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.errors import ListFileError, UsageError
from tests.core.runtime.shared import BF16, FULL, HALF, LISTS, Training, init, patched, region, runs_in, steps
from tests.launches import environment

WITH = "`with handle.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"


def entered(made: Any) -> None:
    with made:
        pass


def doubled(handle: Any, training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with handle.scale_loss(training.loss(), training.optimizer) as scaled_loss:
        scaler.scale(scaled_loss).backward()


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda h, t: h.scale_loss(t.loss(), t.optimizer).backward(), AttributeError, f"no 'backward'; write {WITH}"),
        (lambda h, t: autoamp.scale_loss(t.loss(), t.optimizer).backward(), AttributeError, WITH),
        (lambda h, t: h.wrap_optimizer(t.optimizer).scale_loss(t.loss()).backward(), AttributeError, WITH),
        (lambda h, t: autoamp.NoOpHandle().scale_loss(t.loss(), t.optimizer).backward(), AttributeError, WITH),
        (lambda h, t: entered(h.scale_loss(t.loss())), UsageError,
         "Expected an optimizer, got None, which has no param_groups and step(). Pass the optimizer that steps this"),
        (lambda h, t: entered(h.scale_loss(t.optimizer, t.loss())), UsageError,
         "takes a floating tensor, not a SGD; the loss comes first: scale_loss(loss, optimizer)"),
        (lambda h, t: entered(h.scale_loss(t.loss().item(), t.optimizer)), UsageError, "not loss.item()"),
        (lambda h, t: entered(h.scale_loss(t.loss(), t.model)), UsageError, "Expected an optimizer, got a Linear"),
        (doubled, UsageError, "inside a scale_loss block would scale the loss twice; call scaled_loss.backward()"),
        (lambda h, t: h.override(t.model, "float32"), UsageError,
         "'float32' is unknown; choose 'fp32', 'fp16', 'half' or 'none'"),
        (lambda h, t: h.explain("torch.nn.Linear"), UsageError,
         "'torch.nn.Linear' is a class of modules: give the op that it calls; did you mean 'linear'? Rules for"),
        (lambda h, t: h.explain("CrossEntropyLoss"), UsageError, "did you mean 'cross_entropy' or"),
        (lambda h, t: autoamp.init("cuda"), UsageError, "as in autoamp.init(device_type='cuda')"),  # type: ignore[arg-type]
        (lambda h, t: autoamp.region(doubled), UsageError, "a decorator has parentheses, @autoamp.region(); "),  # type: ignore[arg-type]
        (lambda h, t: autoamp.region()(nn.Linear), TypeError, "Linear is a class; decorate its method"),
        (lambda h, t: autoamp.init(dtype="half"), UsageError,  # type: ignore[arg-type]
         "dtype='half' is not a half-precision dtype; choose torch.float16 or torch.bfloat16, by name 'fp16' or"),
        (lambda h, t: autoamp.autocast, AttributeError, "use handle = autoamp.init(), or autoamp.region()"),
        (lambda h, t: autoamp.GradScaler, AttributeError, "use handle.scale_loss(loss, optimizer), or torch.amp.Grad"),
        (lambda h, t: exec("from autoamp import autocast"), ImportError, "use handle = autoamp.init()"),
        (lambda h, t: exec("from autoamp import amp"), ImportError, "import autoamp as amp"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered(
    mistake: Callable[[Any, Training], object], error: type[Exception], message: str, training: Training
) -> None:
    handle = init()
    with pytest.raises(error) as caught:
        mistake(handle, training)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("float", "fp32"), ("float32", "fp32"), ("float16", "half"), ("bf16", "half"), ("bfloat16", "half")],
)
def test_a_dtype_in_a_list_is_answered_by_the_word_of_lists(written: str, meant: str) -> None:
    for wrong in ({written: ["softmax"]}, {"modules": {"torch.nn.Linear": written}}):
        with pytest.raises(ListFileError, match=f"{written}'; did you mean '{meant}'"):
            init(lists=wrong)


def test_a_name_that_is_nearly_right_is_told() -> None:
    command = [sys.executable, "-c", "import autoamp; autoamp.initialise"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stderr.endswith("has no attribute 'initialise'. Did you mean: 'initialize'?\n")


# -- what works as it does in torch --


@pytest.mark.parametrize(("name", "dtype"), [("fp16", HALF), ("float16", HALF), ("bf16", BF16), ("bfloat16", BF16)])
def test_a_dtype_is_given_by_name(name: str, dtype: torch.dtype) -> None:
    handle = init(dtype=name)
    assert handle.settings.dtype is dtype
    assert init(dtype=dtype) is handle
    with region(dtype=name) as inner:
        assert inner.settings.dtype is dtype
    handle.deactivate()
    autoamp.initialize(nn.Linear(2, 2), dtype=name, device_type="cpu", verbosity=0)
    current = autoamp.current_handle()
    assert current is not None
    assert current.settings.dtype is dtype


def test_half_is_a_precision_of_modules(training: Training) -> None:
    handle = init()
    with handle.override(training.model, "fp32"):
        assert training.model(training.inputs).dtype is FULL
        with handle.override(training.model, "half"):
            assert training.model(training.inputs).dtype is HALF


def test_a_handle_is_a_context_manager_that_deactivates_it(training: Training) -> None:
    with init() as handle:
        steps(handle, training, 1.0)
        assert runs_in() is HALF
    assert not patched()
    assert "step" not in vars(training.optimizer)
    with pytest.raises(UsageError, match="this handle is not active"), handle:
        pass
    with pytest.raises(KeyError), init():
        raise KeyError
    assert not patched()
    with autoamp.init(enabled=False) as off:
        assert not off.is_active()


def test_a_region_decorates_a_function() -> None:
    @region()
    def run(more: int = 0) -> Any:
        """Run it."""
        return run(more - 1) if more else runs_in()

    assert run.__doc__ == "Run it."
    assert [run(), run(more=2), runs_in()] == [HALF, HALF, FULL]

    class Net(nn.Module):
        @region()
        def forward(self, x: Any) -> Any:
            return nn.functional.linear(x, x).dtype, autoamp.current_handle()

    (dtype, first), (_, second) = (Net()(torch.ones(2, 2)) for _ in range(2))
    assert dtype is HALF
    assert first is second
    assert not patched()


def test_no_counts_are_told_apart_from_no_casts() -> None:
    handle = init()
    assert handle.stats["casts"] is None
    counts = handle.count()
    runs_in()
    assert handle.stats["casts"] == {"float32->float16": 2}
    counts.stop()


# -- what had no effect --


def test_a_path_that_no_model_has_is_told_after_the_first_step(training: Training) -> None:
    training.model = nn.Sequential(training.model)  # type: ignore[assignment]
    patterns = ("no.such.path", "nothing*", "extra.model.Net", "0")
    handle = init(lists={**LISTS, "modules": dict.fromkeys(patterns, "fp32")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(handle, training, 1.0, 1.0)
    told = [str(one.message) for one in caught]
    # A class of a package that is not imported may come.
    assert len(told) == 2
    for pattern, one in zip(patterns, told, strict=False):
        assert one.startswith("a rule has no effect: lists=: ")
        assert f"{pattern!r} under modules is the path of no module that was called" in one


def test_the_public_names_are_shown() -> None:
    found = {name for name in dir(autoamp) if not name.startswith("__")}
    assert {"optimizers", "parallel", "normalization", "fp16_utils", "init", "errors"} < found
    assert not {"torch_private", "tape", "importlib", "Any", "sys", "annotations"} & found
    script = "import autoamp, sys; print(len(dir(autoamp))); import autoamp.tools.tape; print(len(dir(autoamp)))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=120
    )
    before, after = done.stdout.split()
    assert before == after
