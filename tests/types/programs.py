"""What users of autoamp write, right and wrong. A wrong line has an ignore comment, which is an error if not needed."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import autoamp
from autoamp.normalization import FusedLayerNorm
from autoamp.optimizers import FusedAdam


def handles(model: nn.Linear, optimizer: SGD) -> None:
    """Whatever `init` returns can be used without asking which handle it is."""
    handle = autoamp.init(dtype=torch.float16, loss_scale="dynamic", scope="modules")
    assert_type(handle, autoamp.Handle)
    assert_type(handle.loss_scale, float)
    assert_type(handle.skipped_steps, int)
    with handle.scale_loss(model(torch.rand(4)).sum(), optimizer) as scaled_loss:
        assert_type(scaled_loss, Tensor)
        scaled_loss.backward()
    with handle.inference(model), handle.disable_casts(), handle.override(model, "fp32"):
        handle.max_consecutive_skips = 10
    if isinstance(handle, autoamp.Handle):
        narrowed: autoamp.Handle = handle
        narrowed.deactivate()
    with autoamp.region(dtype=torch.bfloat16) as inner:
        assert_type(inner, autoamp.BaseHandle)
    if (current := autoamp.current_handle()) is not None:
        assert_type(current, autoamp.Handle)
        handle = current
    off: autoamp.BaseHandle = autoamp.NoOpHandle()
    assert_type(off.deactivate(), tuple[str, ...])
    autoamp.init(loss_scale=autoamp.DynamicLossScaler(), dtype="fp16")
    with autoamp.init() as entered:
        assert_type(entered, autoamp.Handle)
    with handle.inference(model) as kept:
        assert_type(kept, nn.Linear)
    assert_type(autoamp.optimizers.FusedAdam(model.parameters()), FusedAdam)
    assert_type(autoamp.normalization.FusedLayerNorm(4), FusedLayerNorm)

    autoamp.init(loss_scale="dynamc")  # type: ignore[call-overload]
    autoamp.init(on_nonfinite="ignore")  # type: ignore[call-overload]
    autoamp.init(scope="module")  # type: ignore[call-overload]
    autoamp.init(dtype="half")  # type: ignore[call-overload]
    autoamp.region(dtype="half")  # type: ignore[arg-type]
    autoamp.region(scop="modules")  # type: ignore[call-arg]
    handle.override(model, "fp8")  # type: ignore[arg-type]
    handle.loss_scale = 2.0  # type: ignore[misc]


def switched(use_amp: bool) -> None:
    """The handle is known from ``enabled``, if that is: by place or by name, with all other arguments."""
    assert_type(autoamp.init(True), autoamp.Handle)
    assert_type(autoamp.init(enabled=True, scope="modules"), autoamp.Handle)
    assert_type(autoamp.init(False), autoamp.NoOpHandle)
    assert_type(autoamp.init(enabled=False, dtype="bf16"), autoamp.NoOpHandle)
    assert_type(autoamp.init(use_amp), autoamp.BaseHandle)
    assert_type(autoamp.init(enabled=use_amp, lists="default"), autoamp.BaseHandle)
    assert_type(autoamp.init(True, "dynamic", True, False, True, device_type="cpu", rebind=False), autoamp.Handle)
    assert_type(autoamp.init(trace_overflow=True, capsule="steps", on_nonfinite="skip"), autoamp.Handle)


def levels(generator: nn.Linear, critic: nn.Conv2d, first: SGD, second: Adam) -> None:
    """What goes into `initialize` comes out of it, with its type."""
    assert_type(autoamp.initialize(generator, opt_level="O3"), nn.Linear)
    assert_type(autoamp.initialize(generator, first, opt_level="O2"), tuple[nn.Linear, SGD])
    models = [generator, generator]
    assert_type(autoamp.initialize(models, [first, first]), tuple[list[nn.Linear], list[SGD]])
    pair = autoamp.initialize((generator, critic), (first, second), opt_level="O1", scope="models", num_losses=2)
    assert_type(pair, tuple[tuple[nn.Linear, nn.Conv2d], tuple[SGD, Adam]])

    autoamp.initialize(generator, first, opt_level="O4")  # type: ignore[call-overload]
    autoamp.initialize(generator, first, opt_level=2)  # type: ignore[call-overload]
    autoamp.initialize(generator, first, loss_scale="128")  # type: ignore[call-overload]
    autoamp.initialize(first, generator)  # type: ignore[call-overload]


@autoamp.region(dtype=torch.bfloat16)
def within(x: Tensor) -> Tensor:
    """A region decorates a function and keeps its type."""
    return x


assert_type(within(torch.rand(2)), Tensor)


@autoamp.half_function
def scaled(x: Tensor, factor: float = 1.0, *, inplace: bool = False) -> Tensor:
    """Return a product."""
    return x.mul_(factor) if inplace else x * factor


class Block(nn.Module):
    """A module with a decorated method."""

    @autoamp.float_function
    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x

    @staticmethod
    @autoamp.promote_function
    def join(a: Tensor, b: Tensor) -> Tensor:
        """Return both."""
        return torch.cat([a, b])


def decorated(x: Tensor) -> None:
    """A decorated function keeps its parameters."""
    assert_type(scaled(x, 2.0, inplace=True), Tensor)
    assert_type(Block().forward(x), Tensor)
    assert_type(Block.join(x, x), Tensor)

    scaled("x")  # type: ignore[arg-type]
    scaled(x, factr=2.0)  # type: ignore[call-arg]
    Block.join(x)  # type: ignore[call-arg]
    autoamp.half_function(3)  # type: ignore[type-var]
