"""fastai v1: a Learner over tensors; nothing but `init` and `enable` tells it of mixed precision.

``first`` or ``late`` says whether these two come before fastai is imported. ``first`` goes on in the same process with
a `loss_batch` that was edited as users of Apex did.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from typing import Any

import torch

import autoamp
from autoamp.compat import fastai1
from autoamp.core import runtime_of


def begin() -> autoamp.Handle:
    """Put mixed precision in place, as a user would at the top of a script."""
    fastai1.enable()
    handle = autoamp.init(dtype=torch.float16, device_type="cpu")
    assert isinstance(handle, autoamp.Handle)
    return handle


early = begin() if sys.argv[1] == "first" else None

from fastai import basic_train  # noqa: E402
from fastai.basics import (  # noqa: E402
    AccumulateScheduler,
    Callback,
    DataBunch,
    Learner,
    TensorDataset,
    accuracy,
    defaults,
    partial,
)
from fastai.callbacks.fp16 import MixedPrecision  # noqa: E402
from fastai.utils.mod_display import progress_disabled_ctx  # noqa: E402
from watched import HUGE, WatchedLoss  # noqa: E402

defaults.device = torch.device("cpu")


class Watch(Callback):
    """Sees what callbacks of fastai see: the loss, and the norm of the gradients once GradientClipping had its turn."""

    _order = 100

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_backward_end(self, last_loss: torch.Tensor, **kwargs: object) -> None:
        """Take notes."""
        gradients = [param.grad.flatten() for param in self.net.parameters() if param.grad is not None]
        self.losses.append(float(last_loss.detach()))
        self.norms.append(float(torch.cat(gradients).norm()))


def data() -> DataBunch:
    """Return 1024 samples of 16 features to learn three classes from, and 256 to be tested with."""
    torch.manual_seed(0)
    inputs = torch.randn(1280, 16)
    classes = (inputs @ torch.randn(16, 3)).argmax(1)
    parts = [TensorDataset(inputs[part], classes[part]) for part in (slice(1024), slice(1024, None))]
    return DataBunch.create(*parts, bs=64, num_workers=0, path=tempfile.mkdtemp(), device=defaults.device)


def network() -> torch.nn.Module:
    """Return a net for these samples."""
    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3)
    return torch.nn.Sequential(*layers)


def train(**to_fp16: Any) -> dict[str, Any]:
    """Train, search for a learning rate, save and load; return what was seen. Options are of ``to_fp16``."""
    bunch, net = data(), network()
    loss, watch = WatchedLoss(net), Watch(net)
    learner = Learner(bunch, net, loss_func=loss, metrics=accuracy, callbacks=[watch], wd=0.1, silent=True)
    if to_fp16:
        learner = learner.to_fp16(**to_fp16)
    with progress_disabled_ctx(learner.clip_grad(1.0)) as learn:
        learn.fit_one_cycle(4, 2e-2)
        recorded = [float(value) for value in learn.recorder.losses]
        learn.save("trained")
        learn.lr_find(num_it=20)
        learn.load("trained")
        learn.purge(clear_opt=False)
        return {
            **loss.report(),
            "accuracy": float(learn.validate()[1]),
            "largest_loss": max(value for value in watch.losses if value < HUGE / 1e6),
            "largest_norm": max(value for value in watch.norms if value == value),
            "recorded": recorded[0],
        }


def accumulate() -> float:
    """Train with steps of several batches each; return the accuracy."""
    callback = partial(AccumulateScheduler, n_step=4, drop_last=True)
    learner = Learner(data(), network(), metrics=accuracy, loss_func=torch.nn.CrossEntropyLoss(), silent=True)
    learner.callback_fns.append(callback)
    with progress_disabled_ctx(learner) as learn:
        learn.fit(4, 3e-2)
        return float(learn.validate()[1])


def error_of_own_callback() -> str:
    """Train with fastai's own mixed precision as well; return what is said."""
    learner = Learner(data(), network(), loss_func=torch.nn.CrossEntropyLoss(), silent=True)
    learner.callbacks.append(MixedPrecision(learner))
    try:
        with progress_disabled_ctx(learner) as learn:
            learn.fit(1)
    except autoamp.UsageError as error:
        return str(error)
    return ""


def edit_by_hand(handle: autoamp.Handle) -> None:
    """Edit the one line of fastai's source that users of Apex edited."""
    source = inspect.getsource(basic_train.loss_batch)
    old = "        if not skip_bwd:                     loss.backward()\n"
    assert source.count(old) == 1, source
    new = (
        "        if not skip_bwd:\n"
        "            with amp_handle.scale_loss(loss, opt.opt) as scaled_loss: scaled_loss.backward()\n"
    )
    vars(basic_train)["amp_handle"] = handle
    exec(compile(source.replace(old, new), "edited by hand", "exec"), vars(basic_train))


def patched() -> list[str]:
    """Return what of fastai is ours now."""
    owners = basic_train, basic_train.OptimWrapper
    return [
        name
        for owner in owners
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and "autoamp" in value.__code__.co_filename
    ]


def end(handle: autoamp.Handle) -> dict[str, Any]:
    """Deactivate a handle; return what it counted, and what was patched before and is after."""
    before = patched()
    counts = {
        "steps": runtime_of(handle).optimizers.steps.guarded,
        "skipped": handle.skipped_steps,
        "loss_scale": handle.loss_scale,
    }
    handle.deactivate()
    return {**counts, "patched": before, "left": patched()}


handle = early or begin()
found: dict[str, Any] = {"mixed": {**train(), **end(handle)}, "fp32": train()}
if early is not None:
    handle = begin()
    found["accumulated"] = accumulate()
    found["own_callback"] = error_of_own_callback()
    found["to_fp16"] = {**train(dynamic=True), **end(handle)}
    handle = begin()
    found["static"] = {**train(loss_scale=2.0**14, dynamic=False, clip=1.0), **end(handle)}
    handle = begin()
    edit_by_hand(handle)
    found["by_hand"] = {**train(), **end(handle)}
fastai1.disable()
found["left"] = [*patched(), *(["torch"] if basic_train.torch is not torch else [])]
print("\n" + json.dumps(found))
