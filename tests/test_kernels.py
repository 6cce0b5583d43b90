"""The door to compiled kernels: what it says, with the package and without it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import autoamp
from autoamp import kernels


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    kernels._offered.cache_clear()
    yield
    kernels._offered.cache_clear()


def package(**offered: tuple[str, ...]) -> Any:
    made = [SimpleNamespace(device_type=kind, kernels=names, reason=", ".join(names) or "no GPU")
            for kind, names in offered.items()]  # fmt: skip
    return SimpleNamespace(backends=lambda: tuple(made), ArgumentError=ZeroDivisionError, lamb_=len, sgd_=max)


@pytest.mark.parametrize(("found", "why"), [(None, "not installed"), (SimpleNamespace(), "too old")])
def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch, found: Any, why: str) -> None:
    monkeypatch.setattr(kernels, "_package", lambda: found)
    assert kernels.find("lamb_", "cpu") is None
    assert [one.device_type for one in kernels.backends()] == ["cpu", "cuda"]
    assert f"{why}; `pip install ./kernels`" in str(kernels.backend("cpu"))
    assert [which for which, _ in kernels.by_kind("lamb_", [torch.ones(2)])] == [None]


def test_a_kernel_is_found_where_the_package_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_package", lambda: package(cpu=("lamb_",), cuda=()))
    assert kernels.find("lamb_", "cpu") is len
    assert kernels.find("sgd_", "cpu") is kernels.find("lamb_", "cuda") is kernels.find("lamb_", "mps") is None
    assert str(kernels.backend("cpu")) == "cpu: kernels (lamb_)"
    assert str(kernels.backend("cuda")) == "cuda: no kernels (no GPU)"
    assert str(kernels.backend("mps")) == "mps: no kernels (there are kernels for CPUs and CUDA only)"
    with FlopCounterMode(display=False):
        assert kernels.find("lamb_", "cpu") is None


def test_what_a_kernel_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_package", lambda: package())
    assert kernels.attempt(lambda *_, **__: None, 1, two=2)
    assert not kernels.attempt(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="700"):
        kernels.attempt(_failing)


def _failing() -> None:
    raise RuntimeError("CUDA error 700")


def test_lists_are_sorted_by_what_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_package", lambda: package(cpu=("lamb_",)))
    params = [torch.zeros(i + 1) for i in range(3)] + [torch.zeros(4, dtype=torch.float64)]
    grads = [torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), params[3]]
    found = list(kernels.by_kind("lamb_", params, grads))
    assert [which for which, _ in found] == [len, len, None]
    assert [[tensor.numel() for tensor in lists[1]] for _, lists in found] == [[1, 3], [2], [4]]


def test_a_handle_tells_its_backend() -> None:
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16) as handle:
        assert handle.backend == kernels.backend("cpu")
    assert not autoamp.init(enabled=False).backend.kernels


def test_the_environment_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("autoamp_kernels.library")
    library._loaded.cache_clear()
    with monkeypatch.context() as closed:
        closed.setenv("AUTOAMP_KERNELS", "0")
        assert kernels.find("lamb_", "cpu") is None
        assert "cpu: no kernels (" in str(kernels.backend("cpu"))
        assert "AUTOAMP_KERNELS=0" in str(kernels.backend("cpu"))
    library._loaded.cache_clear()
