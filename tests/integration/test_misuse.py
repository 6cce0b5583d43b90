"""What people do wrong in their first hour, and what they are told: the value, the rule and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.cli import main
from autoamp.errors import AutoampError, ListFileError, LossScaleError, TargetError, UsageError
from tests.launches import written

CPU: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def started() -> tuple[autoamp.Handle, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A handle, and what trains a model: its optimizer, and what computes its loss."""
    net = model()
    return autoamp.init(**CPU), sgd(net), lambda: net(torch.randn(8, 4)).float().square().mean()


def unscaled_backward() -> None:
    handle, optimizer, loss_of = started()
    loss = loss_of()
    with handle.scale_loss(loss, optimizer):
        loss.backward()


def listed_modules(pattern: str) -> Callable[[], Any]:
    return lambda: autoamp.init(lists={"modules": {pattern: "fp32"}}, **CPU)


# What is called, the error, and what its message says: the value, the rule, the remedy.
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, str, str]]] = {
    "init(model)": (
        lambda: autoamp.init(model()),  # type: ignore[arg-type]
        UsageError, ("enabled=a Sequential", "neither True nor False", "autoamp.initialize(model, optimizer)"),
    ),
    "init(enabled='False')": (
        lambda: autoamp.init(enabled="False"),  # type: ignore[arg-type]
        UsageError, ("enabled='False'", "neither True nor False", "autoamp.init(dtype=torch.float16)"),
    ),
    "region(enabled='False')": (
        lambda: autoamp.region(enabled="False"),  # type: ignore[arg-type]
        UsageError, ("enabled='False'", "neither True nor False", "autoamp.region(dtype=torch.float16)"),
    ),
    "init(loss_scale='128')": (
        lambda: autoamp.init(loss_scale="128", **CPU),
        LossScaleError, ("loss_scale='128'", "is a string", "choose 'dynamic' or a number"),
    ),
    "initialize(loss_scale='128')": (
        lambda: autoamp.initialize(model(), loss_scale="128", **CPU),  # type: ignore[call-overload]
        LossScaleError, ("loss_scale='128'", "is a string", "choose 'dynamic' or a number"),
    ),
    "init(loss_scale=-1)": (
        lambda: autoamp.init(loss_scale=-1.0, **CPU),
        LossScaleError, ("loss_scale=-1.0", "must be from 2**-126", "128.0 is usual"),
    ),
    "register_half_function(torch, 'sofmax')": (
        lambda: autoamp.register_half_function(torch, "sofmax"),
        TargetError, ("sofmax", "no function named", "did you mean 'softmax'"),
    ),
    "loss.backward() in the block": (
        unscaled_backward,
        UsageError, ("scale_loss block of SGD", "its gradients are not scaled",
                     "Call scaled_loss.backward()"),
    ),
    "init on CUDA": (
        lambda: autoamp.init(device_type="cuda"),
        UsageError, ("device_type='cuda'", "there is no CUDA device here", "choose device_type='cpu'"),
    ),
    "initialize on CUDA": (
        lambda: autoamp.initialize(model(), device_type="cuda"),
        UsageError, ("device_type='cuda'", "there is no CUDA device here", "choose device_type='cpu'"),
    ),
    "a typo of a class": (
        listed_modules("torch.nn.BatchNrom2d"),
        ListFileError, ("'torch.nn.BatchNrom2d' under modules", "torch.nn has no 'BatchNrom2d'",
                        "did you mean 'torch.nn.BatchNorm2d'"),
    ),
    "a typo of a class's module": (
        listed_modules("torch.nn.moduels.BatchNorm2d"),
        ListFileError, ("'torch.nn.moduels.BatchNorm2d'", "torch.nn has no 'moduels'",
                        "did you mean 'torch.nn.modules.BatchNorm2d'"),
    ),
    "a class without its module": (
        listed_modules("Linear"),
        ListFileError, ("'Linear' under modules", "is a class without its module", "did you mean 'torch.nn.Linear'"),
    ),
    "what is no class": (
        listed_modules("torch.nn.functional"),
        ListFileError, ("'torch.nn.functional'", "is no class of modules", "such as 'torch.nn.BatchNorm2d'"),
    ),
    "a typo of an op": (
        lambda: autoamp.init(lists={"fp32": ["sofmax"]}, **CPU),
        ListFileError, ("'sofmax' under fp32", "unknown op", "did you mean 'softmax'"),
    ),
    "a step before a handle": (
        lambda: autoamp.scale_loss(torch.ones(()), []),
        UsageError, ("scale_loss()", "needs a handle", "call autoamp.initialize(model, optimizer) or autoamp.init()"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no GPU be there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("misuse", ERRORS)
def test_an_error_gives_the_value_the_rule_and_the_remedy(misuse: str) -> None:
    call, kind, (value, rule, remedy) = ERRORS[misuse]
    with pytest.raises(AutoampError) as raised:
        call()
    assert type(raised.value) is kind
    for part in (value, rule, remedy):
        assert part in str(raised.value)


def half_at(level: Any) -> None:
    net = model().half()
    autoamp.initialize(net, sgd(net), opt_level=level, verbosity=0, **CPU)


def steps_without_scale() -> None:
    _, optimizer, loss_of = started()
    for _ in range(12):
        optimizer.zero_grad()
        (loss_of() * 1e-9).backward()
        optimizer.step()


# What is done, and what the one warning says.
WARNINGS: dict[str, tuple[Callable[[], Any], tuple[str, str, str]]] = {
    "fp16 without scale_loss": (
        steps_without_scale,
        ("of SGD's gradients underflow in fp16", "the loss is not scaled", "with handle.scale_loss(loss, optimizer)"),
    ),
    "a half model at O1": (
        lambda: half_at("O1"),
        ("parameter '0.weight' of Sequential is in torch.float16 already", "opt_level='O1' steps it",
         "Give initialize() the model in fp32"),
    ),
    "a half model at O2": (
        lambda: half_at("O2"),
        ("parameter '0.weight' of Sequential is in torch.float16 already",
         "opt_level='O2' makes its fp32 master of the rounded values", "Give initialize() the model in fp32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("misuse", WARNINGS)
def test_a_warning_gives_the_value_the_rule_and_the_remedy_once(misuse: str) -> None:
    call, (value, rule, remedy) = WARNINGS[misuse]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    told = [str(one.message) for one in caught if value in str(one.message)]
    assert len(told) == 1, [str(one.message) for one in caught]
    assert rule in told[0]
    assert remedy in told[0]


def gradients_held() -> None:
    _, optimizer, loss_of = started()
    (loss_of() * 32).backward()
    optimizer.step()


def scaled_by_torch() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _, optimizer, loss_of = started()
    scaler.scale(loss_of() * 1e-9).backward()
    scaler.step(optimizer)


def scaled_by_us() -> None:
    handle, optimizer, loss_of = started()
    with handle.auto_scale():
        (loss_of() * 1e-9).backward()
        optimizer.step()


def scaled_in_parts() -> None:
    handle, optimizer, loss_of = started()
    for _ in range(2):
        with handle.scale_loss(loss_of(), optimizer) as scaled:
            (scaled * 0.5).backward()
        optimizer.step()


@pytest.mark.parametrize("use", [gradients_held, scaled_by_torch, scaled_by_us, scaled_in_parts])
def test_what_is_right_is_not_told(use: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    assert [str(one.message) for one in caught if "underflow" in str(one.message)] == []


# Files, command line, exit code, and what is said on standard error. Wrong options are in tests/cli/test_refusals.py.
FILES = {
    "typo.toml": 'schema = 1\n\n[modules]\n"torch.nn.BatchNrom2d" = "fp32"\n',
    "bare.toml": 'schema = 1\n[modules]\n"Linear" = "fp32"\n',
    "train.py": "print('ran')\n",
}
COMMANDS: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "O0 on CUDA": (["run", "--opt-level", "O0", "--device-type", "cuda", "train.py"], 2, ("'cuda'", "no CUDA device")),
    "typo in modules": (["lists", "--set", "typo.toml"], 2, ("typo.toml:4: ", "'torch.nn.BatchNorm2d'")),
    "run with a typo": (["run", "--lists", "typo.toml", "--device-type", "cpu", "train.py"], 2, ("typo.toml:4: ",)),
    "class alone": (["lists", "--set", "bare.toml"], 2, ("bare.toml:3: ", "'torch.nn.Linear'")),
    "no op": (["lists", "Optional"], 2, ("'Optional' is a name of torch, but not an op", "'softmax'")),
    "Python's own": (["lists", "__dir__"], 2, ("'__dir__' is a name of torch, but not an op",)),
    "typo of an op": (["lists", "sofmax"], 2, ("'sofmax' is no op of torch", "'softmax'")),
    "no script": (["run", "trian.py"], 2, ("can't open file 'trian.py'", "give the path of a script")),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_its_exit_code_and_one_message(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written(tmp_path, FILES))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    argv, code, parts = COMMANDS[command]
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("autoamp: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
