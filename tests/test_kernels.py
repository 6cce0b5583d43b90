"""The door to compiled kernels: what it says, with the package and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoamp
from autoamp import kernels


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    kernels.opened.cache_clear()
    yield
    kernels.opened.cache_clear()


def package(*doors: tuple[str, bool, str]) -> Any:
    made = [SimpleNamespace(name=name, open=is_open, reason=reason) for name, is_open, reason in doors]
    return SimpleNamespace(doors=lambda: tuple(made), ArgumentError=ZeroDivisionError)


def test_without_the_package_all_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_package", lambda: None)
    assert kernels.opened("cpu") is None
    assert [one.device_type for one in kernels.backends()] == ["cpu", "cuda"]
    assert "pip install ./kernels" in str(kernels.backend("cpu"))
    assert [which for which, _ in kernels.by_kind([torch.ones(2)])] == [None]


def test_an_open_door_wins_over_a_closed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = package(("cpu", True, "avx2"), ("cuda", False, "no nvcc"), ("cuda", True, "nvrtc"))
    monkeypatch.setattr(kernels, "_package", lambda: made)
    assert kernels.opened("cpu") is kernels.opened("cuda") is made
    assert str(kernels.backend("cuda")) == "cuda: kernels (nvrtc)"
    assert kernels.opened("mps") is None
    assert str(kernels.backend("mps")) == "mps: no kernels (there are kernels for CPUs and CUDA alone)"


def test_what_a_kernel_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_package", package)
    assert kernels.attempt(lambda *_, **__: None, 1, two=2)
    assert not kernels.attempt(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="700"):
        kernels.attempt(_failing)


def _failing() -> None:
    raise RuntimeError("CUDA error 700")


def test_lists_are_sorted_by_what_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = package(("cpu", True, "avx2"))
    monkeypatch.setattr(kernels, "_package", lambda: made)
    params = [torch.zeros(i + 1) for i in range(3)] + [torch.zeros(4, dtype=torch.float64)]
    grads = [torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), params[3]]
    found = list(kernels.by_kind(params, grads))
    assert [which for which, _ in found] == [made, made, None]
    assert [[tensor.numel() for tensor in lists[1]] for _, lists in found] == [[1, 3], [2], [4]]


def test_a_handle_tells_its_backend() -> None:
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16) as handle:
        assert handle.backend == kernels.backend("cpu")
    assert not autoamp.init(enabled=False).backend.kernels


def test_the_environment_closes_all() -> None:
    pytest.importorskip("autoamp_kernels")
    program = "from autoamp import kernels; print(kernels.opened('cpu'), kernels.backend('cpu'))"
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "AUTOAMP_KERNELS": "0"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert result.stdout.startswith("None cpu: no kernels (")
    assert "AUTOAMP_KERNELS=0" in result.stdout
