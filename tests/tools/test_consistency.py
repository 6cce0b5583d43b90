"""`handle.consistency`: planted differences between paths are named, and the model is left as it was."""

from __future__ import annotations

import re
import threading
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoamp
from autoamp.torch_private import current_graph_task, dispatch_modes

PATHS = [
    "no_grad", "inference_mode", "eval", "checkpoint(use_reentrant=False)", "checkpoint(use_reentrant=True)",
    "handle.inference", "a thread, as of DataParallel", "torch.compile",
]  # fmt: skip


class Planted(nn.Module):
    """A model whose middle layer does something else in `apart`."""

    def __init__(self, apart: Any, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.apart, self.change = apart, change

    def forward(self, x):
        x = F.dropout(F.relu(self.first(x)), 0.1)
        x = self.change(self.middle, x) if self.apart() else self.middle(x)
        return self.last(x)


def in_fp32(layer, x):
    with autoamp.disable_casts():
        return layer(x.float())


def rounded(layer, x):
    return layer(x * 1.01)


@pytest.fixture
def bf16() -> Any:
    return autoamp.init(device_type="cpu", dtype=torch.bfloat16)


MAIN = threading.get_ident()
LINEAR = ("torch.nn.functional.linear", "middle")
BITS, CHECKPOINT = ("bfloat16", "bfloat16"), "checkpoint(use_reentrant=True)"


@pytest.mark.parametrize(
    ("apart", "change", "paths", "difference"),
    [
        # A reentrant checkpoint calls the model without gradients first.
        (
            lambda: not torch.is_grad_enabled(), rounded,
            {"no_grad", "inference_mode", CHECKPOINT, "handle.inference"}, (*LINEAR, *BITS),
        ),
        # Weights are packed where no mode is on.
        (
            lambda: not torch.is_grad_enabled() and not dispatch_modes(), rounded,
            {"handle.inference"}, ("output", None, *BITS),
        ),
        (lambda: current_graph_task() != -1, in_fp32, {CHECKPOINT}, (*LINEAR, "bfloat16", "float32")),
        (lambda: threading.get_ident() != MAIN, in_fp32, {PATHS[6]}, (*LINEAR, "bfloat16", "float32")),
    ],
    ids=["no_grad", "packed", "recomputed", "thread"],
)  # fmt: skip
def test_a_difference_is_named_on_the_paths_that_have_it(
    bf16: Any, apart: Any, change: Any, paths: set[str], difference: tuple[Any, ...]
) -> None:
    result = bf16.consistency(Planted(apart, change), torch.randn(8, 16), backend=None)
    found = {path.name: path.dtype or path.bits for path in result.paths if path.dtype or path.bits}
    assert result.is_consistent is False
    assert found.keys() == paths
    for one in found.values():
        assert one is not None
        assert (one.op, one.module, one.expected, one.found) == difference
        assert ("other bits" in str(one)) == (change is rounded)
        assert ("packs weights for oneDNN" in str(one)) == (one.op == "output")
    # torch itself compares what the other kind of checkpoint computes again.
    failed = {path.name for path in result.paths if path.failed is not None}
    assert failed == ({"checkpoint(use_reentrant=False)"} if paths == {CHECKPOINT} else set())


def test_the_kernels_of_a_call_that_computes_in_another_dtype_are_told(bf16: Any) -> None:
    owner: Any = types.ModuleType("owner")
    owner.scale = lambda x: x * 1.1 * 1.1 if torch.is_grad_enabled() else (x.float() * 1.21).bfloat16()
    autoamp.register_half_function(owner, "scale")
    found = bf16.consistency(Applies(lambda x: owner.scale(x)), torch.randn(64), backend=None).paths[0]
    assert "other bits; torch runs aten::mul in float32 here, and aten::mul in bfloat16, aten" in str(found)


def test_precision_of_the_module_is_told(bf16: Any) -> None:
    model = Planted(lambda: not torch.is_grad_enabled(), rounded)
    with bf16.override(model.middle, "fp32"):
        one = bf16.consistency(model, torch.randn(8, 16), backend=None).paths[0].bits
    assert one is not None
    assert (one.module, one.found) == ("middle", "float32")
    assert str(one.reason).endswith("; its module has the precision fp32")


def test_output_that_is_a_buffer_which_is_restored(bf16: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count += 1 if torch.is_grad_enabled() else 2
            return self.count

    model = Counts()
    found = bf16.consistency(model, torch.ones(1), backend=None)
    assert found.paths[0].bits is not None
    assert model.count.item() == 0


class Applies(nn.Module):
    """Its forward pass is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def attention_in_fp32_in_training(x):
    if not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(x, x, x)
    with autoamp.disable_casts():
        return F.scaled_dot_product_attention(x.float(), x.float(), x.float()).bfloat16()


def widens_in_compiled_code(x):
    y = torch.matmul(x, x)
    return (y.float() if torch.compiler.is_compiling() else y) * 2


def widens_without_gradients(x):
    y = torch.matmul(x, x)
    return y if torch.is_grad_enabled() else y.double().sinh()


def refuses_inference_mode(x):
    if torch.is_inference_mode_enabled():
        raise ValueError("not here\nsecond line")
    return x * 2


def compiles_in_training(x):
    # The tape of the training pass has no operators of compiled code.
    return torch.compile(torch.matmul, backend="eager")(x, x) if torch.is_grad_enabled() else torch.matmul(x, x)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            attention_in_fp32_in_training,
            r"no_grad: torch.nn.functional.scaled_dot_product_attention in 0 at \S+: bfloat16, float32 in training; ",
        ),
        (
            widens_in_compiled_code,
            r"torch.compile: output: float32, bfloat16 in training$",
        ),
        (
            widens_without_gradients,
            r"no_grad: output: float64, bfloat16 in training; training does not have torch.Tensor.sinh in 0 at \S+$",
        ),
        (refuses_inference_mode, r"inference_mode: not compared: ValueError: not here$"),
        (compiles_in_training, r"no_grad: not compared: torch.compile has made code$"),
    ],
)
def test_the_line_of_a_path_says_what_differs_or_why_it_was_not_compared(bf16: Any, function: Any, line: str) -> None:
    backend = "eager" if function is widens_in_compiled_code else None
    found = bf16.consistency(nn.Sequential(Applies(function)), torch.randn(1, 2, 8, 8), backend=backend)
    assert re.search(line, str(found), re.MULTILINE), str(found)
    assert found.is_consistent is (None if "not compared" in line else False)


def test_casts_that_the_calling_thread_turned_off(bf16: Any) -> None:
    with bf16.disable_casts():
        found = {path.name: path for path in bf16.consistency(nn.Linear(4, 4), torch.randn(2, 4), backend=None).paths}
    one = found["a thread, as of DataParallel"].dtype
    assert one is not None
    assert str(one.reason).startswith("casts are on here and off in training")


@pytest.mark.parametrize("where", ["buffer", "attribute"])
def test_model_that_counts_its_calls(bf16: Any, where: str) -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            if where == "buffer":
                self.register_buffer("calls", torch.zeros(()))
            else:
                self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x * self.calls)

    model = nn.Sequential(Counts(), Counts())
    assert bf16.consistency(model, torch.randn(2, 4), backend="eager").is_consistent
    assert model[0].calls == 0


class Writes(nn.Module):
    """Writes to parameters, buffers and inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x, state):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            self.teacher.bias.data.add_(1)
            state.add_(1)
        return self.norm(self.linear(x)) + self.teacher(x)


def test_graph_that_was_made_before_stays_valid(bf16: Any) -> None:
    model = Writes()
    loss = model(torch.randn(4, 8), torch.zeros(2)).sum()
    bf16.consistency(model, torch.randn(4, 8), torch.zeros(2), backend=None)
    loss.backward()
    assert model.linear.weight.grad is not None


def test_wrong_calls(bf16: Any) -> None:
    with pytest.raises(autoamp.UsageError, match=r"consistency\(\) takes a torch.nn.Module, not a function"):
        bf16.consistency(lambda x: x, torch.ones(2))
    bf16.deactivate()
    with pytest.raises(autoamp.UsageError, match="not active"):
        bf16.consistency(nn.Linear(2, 2), torch.ones(2, 2))


def test_disabled_handle() -> None:
    handle = autoamp.init(enabled=False)
    found = handle.consistency(nn.Linear(2, 2), torch.ones(2, 2), backend=None)
    assert found.is_consistent
    assert [path.failed for path in found.paths] == [None] * (len(PATHS) - 1)


def test_a_compiled_model_is_compared_by_the_model_within() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = torch.nn.Linear(4, 4)
    found = handle.consistency(torch.compile(model, backend="eager"), torch.ones(2, 4), backend="eager")
    assert found.is_consistent
    assert not any(path.failed for path in found.paths)
    model.compile(backend="eager")
    with pytest.raises(autoamp.UsageError, match=r"model.compile\(\); pass one that is not"):
        handle.consistency(model, torch.ones(2, 4))


def test_consistent_model(bf16: Any) -> None:
    model = nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Unflatten(1, (4, 4)),
        nn.LSTM(4, 4, batch_first=True),
    )  # fmt: skip
    found = bf16.consistency(model, torch.randn(8, 16), backend="eager")
    assert str(found).splitlines() == [f"{name}: the same" for name in PATHS]
    assert found.is_consistent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_the_same_on_each_path(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dropout: float
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"})
    handle = autoamp.init(device_type="cpu", dtype=dtype)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
    for tokens in (8, 160):
        assert handle.consistency(layer, torch.randn(1, tokens, 8), backend="eager").is_consistent
