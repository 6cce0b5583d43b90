"""fastai v1's training loop and the shims, on a stand-in for fastai; tests/clients trains with fastai itself."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.apex import fastai1
from autoamp.core import activated, original_of, runtime_of, suspended
from autoamp.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]

# As much of fastai as is patched, with its names and its order of calls.
SOURCES = {
    "__init__": "",
    "callback": """
import torch

class OptimWrapper:
    def __init__(self, opt, wd=0.0):
        self.opt, self.decay = opt, wd

    def __getattr__(self, name):
        return getattr(self.opt, name, None)

    def step(self):
        for group in self.opt.param_groups:
            for param in group["params"]:
                param.data.mul_(1 - self.decay)
        self.opt.step()

    def zero_grad(self):
        self.opt.zero_grad()

class CallbackHandler:
    def __init__(self, callbacks=(), change=lambda loss: loss):
        self.callbacks, self.change, self.seen = callbacks, change, []

    def on_backward_begin(self, loss):
        return self.change(loss), False

    def on_backward_end(self):
        self.seen.append("end")
        return False

    def on_step_end(self):
        return True
""",
    "basic_train": """
import torch
from fastai.callback import CallbackHandler, OptimWrapper

class Learner:
    def __init__(self, model):
        self.model, self.callbacks = model, []

def loss_batch(model, xb, yb, loss_func=None, opt=None, cb_handler=None):
    "A batch."
    handler = cb_handler or CallbackHandler()
    loss = loss_func(model(xb), yb)
    if opt is not None:
        loss, skip = handler.on_backward_begin(loss)
        if not skip:
            loss.backward()
        if not handler.on_backward_end():
            opt.step()
        if not handler.on_step_end():
            opt.zero_grad()
    return loss

def fit(epochs, learn, callbacks=None, metrics=None):
    "Fit the model."
    learn.batch()
""",
    "train": """
from fastai.basic_train import Learner

class GradientClipping:
    def __init__(self, learn, clip=0.0):
        self.learn, self.clip = learn, clip

def to_fp32(learn):
    learn.model = learn.model.float()
    return learn

def to_fp16(learn, loss_scale=None, max_noskip=1000, dynamic=True, clip=None, flat_master=False, max_scale=2**24):
    learn.to_fp32()
    learn.model = learn.model.half()
    return learn

Learner.to_fp16 = to_fp16
Learner.to_fp32 = to_fp32
""",
    "basics": "from fastai.train import to_fp16\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `fastai` that can be imported, and is not."""
    for name, source in SOURCES.items():
        file = tmp_path / "fastai" / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(source)
    forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    # The import of fastai adds to them.
    before = list(activated), list(suspended)
    fastai1.watch()
    yield tmp_path
    fastai1.disable()
    autoamp.init(enabled=False)
    activated[:], suspended[:] = before
    forget()
    fastai1.watch()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fastai", "torchvision")]:
        del sys.modules[name]


def load(name: str = "basic_train") -> Any:
    return importlib.import_module(f"fastai.{name}")


def active(**settings: Any) -> autoamp.Handle:
    handle = autoamp.init(**{"dtype": torch.float16, "device_type": "cpu", **settings})
    assert isinstance(handle, autoamp.Handle)
    return handle


class Training:
    """A linear model, and what its output's gradients were."""

    def __init__(self, wd: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.sgd = torch.optim.SGD(self.model.parameters(), 0.1)
        self.opt = load("callback").OptimWrapper(self.sgd, wd)
        self.gradients: list[float] = []

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        # Hooks of autograd nodes see scaled gradients, unlike those of tensors.
        output.grad_fn.register_prehook(lambda grads: self.gradients.append(float(grads[0].float().abs().max())))
        return (output.float() - target).pow(2).mean()

    def batch(self, factor: float = 1.0, opt: Any = ..., **given: Any) -> Tensor:
        inputs, target = torch.ones(3, 4), torch.zeros(3, 2)
        opt, losses = self.opt if opt is ... else opt, []

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return self.loss(output, target) * factor

        def batch() -> None:
            losses.append(load().loss_batch(self.model, inputs, target, loss, opt=opt, **given))

        load().fit(1, types.SimpleNamespace(opt=opt, batch=batch))
        (found,) = losses
        return found  # type: ignore[no-any-return]


def unscaled() -> float:
    """The largest gradient that a batch has without a scale."""
    plain = Training()
    plain.batch()
    return plain.gradients[0]


@pytest.mark.parametrize("first", [True, False])
def test_the_backward_pass_is_scaled_and_all_else_sees_true_values(package: Path, first: bool) -> None:
    handle = active() if first else None
    load()
    expected = 0.0
    if handle is None:
        expected = unscaled()
        handle = active()
    training = Training()
    loss = training.batch()
    assert float(loss.detach()) < 10
    assert training.gradients[0] / 2**16 < 10 < training.gradients[0]
    if expected:
        assert training.gradients[0] == pytest.approx(expected * 2**16, rel=0.01)
    assert training.model.weight.grad is not None
    assert float(training.model.weight.grad.abs().max()) < 10
    assert runtime_of(handle).optimizers.steps.guarded == 1


class OnAStem(Training):
    """The linear model, behind a layer that no optimizer steps; both are clipped before the step."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.stem, self.bias = nn.Linear(4, 4), torch.zeros(2, requires_grad=True)
        head, stem, bias = self.model, self.stem, self.bias
        self.whole = nn.Sequential(stem, head)
        self.model = lambda inputs: head(stem(inputs)) + bias  # type: ignore[assignment]

    def leaves(self) -> list[Tensor]:
        return [*self.whole.parameters(), self.bias]

    def gradients_of_all(self, factors: list[float], clip: float | None = None) -> list[Tensor]:
        """Train on batches, each of which adds to the gradients of what is not stepped, and return the gradients."""

        class Clipping(load("callback").CallbackHandler):  # type: ignore[misc]
            def on_backward_end(handler) -> bool:  # noqa: N805
                if clip is not None:
                    nn.utils.clip_grad_norm_(self.leaves(), clip)
                return False

        for factor in factors:
            self.sgd.zero_grad()
            self.batch(factor=factor, cb_handler=Clipping())
        return [leaf.grad.clone() for leaf in self.leaves() if leaf.grad is not None]


@pytest.mark.parametrize("clip", [None, 0.01])
def test_leaves_that_no_optimizer_steps_get_true_gradients(package: Path, clip: float | None) -> None:
    load()
    expected = OnAStem().gradients_of_all([1.0, 1.0], clip)
    active()
    found = OnAStem().gradients_of_all([1.0, 1.0], clip)
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-4)


def test_an_overflow_leaves_no_inf_in_leaves_that_no_optimizer_steps(package: Path) -> None:
    load()
    expected = OnAStem().gradients_of_all([1.0])
    handle = active()
    training = OnAStem()
    weight = training.whole[1].weight.detach().clone()
    training.gradients_of_all([1e30])
    assert torch.equal(training.whole[1].weight, weight)
    assert handle.skipped_steps == 1
    found = training.gradients_of_all([1.0])
    assert handle.skipped_steps == 1
    # The last is of fp32 alone, where that gradient is finite.
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-4)


def test_a_plain_optimizer_is_taken(package: Path) -> None:
    handle = active()
    training = Training()
    training.batch(opt=training.sgd)
    assert training.gradients[0] > 10
    assert runtime_of(handle).optimizers.steps.guarded == 1


def test_validation_and_other_optimizers_are_left_alone(package: Path) -> None:
    class FakeOptimizer:
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...

    active()
    training = Training()
    training.batch(opt=None)
    training.batch(opt=FakeOptimizer())
    assert len(training.gradients) == 1
    assert training.gradients[0] < 10


def test_a_skipped_step_decays_no_weights(package: Path) -> None:
    handle = active()
    training = Training(wd=0.5)
    before = training.model.weight.detach().clone()
    training.batch(factor=1e30)
    assert torch.equal(training.model.weight, before)
    assert handle.skipped_steps == 1
    assert handle.loss_scale == 2**15
    training.sgd.param_groups[0]["lr"] = 0.0
    training.sgd.zero_grad()
    training.batch()
    assert torch.equal(training.model.weight, before * 0.5)


def test_a_delayed_verdict_is_asked_for_before_weights_decay(package: Path) -> None:
    handle = active()
    load()
    training = Training(wd=0.5)
    before = training.model.weight.detach().clone()
    output = training.model(torch.ones(3, 4))
    loss = training.loss(output, torch.zeros(3, 2)) * 1e30
    with handle.scale_loss(loss, training.sgd, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    training.opt.step()
    assert torch.equal(training.model.weight, before)
    assert handle.skipped_steps == 1


@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_a_loss_batch_that_was_edited_by_hand_scales_once(package: Path, loss_scale: float | None) -> None:
    module = load()
    expected = unscaled()
    handle = active(loss_scale=loss_scale)
    source = (package / "fastai" / "basic_train.py").read_text()
    edited = source.replace(
        "            loss.backward()",
        "            with amp_handle.scale_loss(loss, opt.opt) as scaled_loss: scaled_loss.backward()",
    )
    vars(module)["amp_handle"] = handle
    exec(edited, vars(module))
    by_hand = module.fit
    training = Training()
    training.batch()
    assert training.gradients[0] == pytest.approx(expected * handle.loss_scale, rel=0.01)
    # What is found edited when a handle is activated is patched, and scales once too.
    autoamp.init(enabled=False)
    vars(module)["amp_handle"] = again = active(loss_scale=loss_scale)
    assert module.fit is not by_hand
    training = Training()
    training.batch()
    assert training.gradients[0] == pytest.approx(expected * again.loss_scale, rel=0.01)


def test_a_fit_that_another_module_has_taken_scales_too(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = types.ModuleType("program")
    vars(program)["fit"] = own = load().fit
    monkeypatch.setitem(sys.modules, "program", program)
    active()
    assert own is not vars(program)["fit"] is load().fit


def test_the_loss_that_a_callback_returns_is_scaled(package: Path) -> None:
    active(loss_scale=128.0)
    training = Training()
    handler = load("callback").CallbackHandler(change=lambda loss: loss * 3.0)
    training.batch(cb_handler=handler)
    other = Training()
    other.batch()
    assert training.gradients[0] == pytest.approx(3 * other.gradients[0], rel=0.01)
    assert handler.seen == ["end"]


def test_a_batch_within_a_batch_is_scaled_for_its_own_optimizer(package: Path) -> None:
    handle = active()
    inner, outer = Training(), Training()

    def change(loss: Tensor) -> Tensor:
        inner.batch()
        return loss

    outer.batch(cb_handler=load("callback").CallbackHandler(change=change))
    assert inner.gradients == outer.gradients
    assert inner.gradients[0] > 10
    assert runtime_of(handle).optimizers.steps.guarded == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_with_masters_is_refused_where_its_gradients_would_vanish(package: Path, dtype: torch.dtype) -> None:
    load()
    training = Training()
    autoamp.initialize(training.model, training.sgd, opt_level="O2", dtype=dtype, device_type="cpu")
    refused = pytest.raises(UsageError, match="train it at opt_level='O1'")
    with refused if dtype is torch.float16 else contextlib.nullcontext():
        training.batch()
    assert bool(training.gradients) is (dtype is torch.bfloat16)


def learner() -> Any:
    load("train")
    return load().Learner(nn.Linear(4, 2))


@pytest.mark.parametrize("late", [False, True])
def test_to_fp16_takes_the_scaler_that_it_asks_for(package: Path, late: bool, caplog: pytest.LogCaptureFixture) -> None:
    learn = learner() if late else None
    handle = active()
    learn = learn or learner()
    taken = load("basics").to_fp16
    assert learn.to_fp16(loss_scale=512.0, dynamic=False) is learn
    assert [one.getMessage() for one in caplog.records if "to_fp16" in one.getMessage()] == [
        "learn.to_fp16() leaves the model in fp32: autoamp casts to torch.float16, with a loss scale of 512"
    ]
    assert learn.model.weight.dtype == torch.float32
    training = Training()
    training.batch()
    assert (handle.loss_scale, handle.skipped_steps) == (512.0, 0)
    assert 1 < training.gradients[0] < 512
    taken(learn, dynamic=False)
    assert handle.loss_scale == 512.0
    learn.to_fp16(loss_scale=2.0**10, max_noskip=2, max_scale=2.0**11)
    for _ in range(6):
        training.batch()
    assert handle.loss_scale == 2.0**11
    learn.to_fp16()
    assert handle.loss_scale == 2.0**16
    training.batch(factor=float("inf"))
    assert (handle.loss_scale, handle.skipped_steps) == (2.0**15, 1)
    # What autoamp saves is the scale of this scaler.
    assert handle.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15


def test_to_fp16_clips_true_gradients_where_it_is_asked_to(package: Path) -> None:
    active()
    learn = learner()
    learn.to_fp16(clip=0.5)
    learn.to_fp16(clip=0.1)
    assert [(type(one), one.clip) for one in learn.callbacks] == [(load("train").GradientClipping, 0.1)]
    learn.to_fp16()
    assert learn.callbacks == []


def test_to_fp16_in_bf16_needs_no_scale(package: Path) -> None:
    handle = active(dtype=torch.bfloat16)
    learner().to_fp16(loss_scale=512.0)
    assert handle.loss_scale == 1.0


def test_to_fp16_is_fastais_own_without_a_handle(package: Path) -> None:
    learn = learner()
    original = load().Learner.to_fp16
    handle = active()
    assert load().Learner.to_fp16 is not original
    handle.deactivate()
    assert load().Learner.to_fp16 is original is load("train").to_fp16
    assert learn.to_fp16().model.weight.dtype == torch.float16


def test_the_patches_come_and_go_with_each_handle(package: Path) -> None:
    module = load()
    owners = module, module.OptimWrapper
    before = [dict(vars(owner)) for owner in owners]

    def pristine() -> bool:
        return [dict(vars(owner)) for owner in owners] == before

    handle = active()
    assert not pristine()
    assert module.fit.__doc__ == "Fit the model."
    with autoamp.region(dtype=torch.bfloat16, device_type="cpu"):
        assert not pristine()
    assert not pristine()
    handle.deactivate()
    assert pristine()
    with autoamp.region(dtype=torch.float16, device_type="cpu") as inside:
        training = Training()
        training.batch()
        assert training.gradients[0] > 10
        assert inside.skipped_steps == 0
    assert pristine()
    handle.deactivate()
    assert pristine()


def test_a_handle_that_comes_while_fastai_is_imported_patches_it_at_the_end(package: Path) -> None:
    file = package / "fastai" / "basic_train.py"
    start = "import autoamp, torch\nautoamp.init(dtype=torch.float16, device_type='cpu')\n"
    file.write_text(start + file.read_text())
    active().deactivate()
    assert original_of(load().fit) is not load().fit


# -- shims --


@pytest.mark.parametrize("first", [True, False])
def test_whole_pickles_are_loaded_by_fastai_alone(package: Path, tmp_path: Path, first: bool) -> None:
    file = tmp_path / "state.pth"
    torch.save({"lr": Fraction(3)}, file)
    if first:
        fastai1.enable()
    module = load()
    if not first:
        fastai1.enable()
    fastai1.enable()
    assert module.torch.load(file)["lr"].value == 3
    assert module.torch.nn is torch.nn
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        module.torch.load(file, weights_only=True)
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        torch.load(file)
    fastai1.disable()
    assert module.torch is torch
    fastai1.disable()


class Fraction:
    """Something that is no tensor."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_an_optimizer_without_that_choice_clears_as_it_does(package: Path) -> None:
    class Clearing:
        cleared = 0

        def zero_grad(self) -> None:
            self.cleared += 1

    fastai1.enable()
    clearing = Clearing()
    load("callback").OptimWrapper(clearing).zero_grad()
    assert clearing.cleared == 1


def test_torchvision_without_its_operators_is_imported(tmp_path: Path) -> None:
    """In a process of its own, since declarations to torch stay; `import autoamp` alone imports no such library."""
    directory = tmp_path / "torchvision"
    directory.mkdir()
    (directory / "__init__.py").write_text("import torch\ntorch.library.register_fake('torchvision::nms')(print)\n")
    # No library, as where it was built for a CUDA that is not there.
    (directory / "_C.so").touch()
    program = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from autoamp.compat import fastai1\n"
        "print([name for name in ('fastai', 'pandas', 'torchvision') if name in sys.modules])\n"
        "import autoamp.exports\n"
        "try:\n"
        "    import torchvision\n"
        "except RuntimeError as error:\n"
        "    print('operator' in str(error))\n"
        "fastai1.enable()\n"
        "import torchvision\n"
        "fastai1.disable()\n"
        "print([one for one in sys.meta_path if type(one).__module__.startswith('autoamp.apex')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["[]", "True", "[]"], done.stderr
