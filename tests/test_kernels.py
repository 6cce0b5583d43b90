"""The door to compiled kernels: what it says, with the package and without it."""

from __future__ import annotations

import pytest
import torch

import autoamp
from autoamp import kernels
from tests.launches import Ended, forks, launched, written

# Each program finds another package, which autoamp looks for once in a process.
SHARED = """
import sys
from types import SimpleNamespace
import torch
from torch.utils.flop_counter import FlopCounterMode
from autoamp import kernels

def found(**offered):
    made = [SimpleNamespace(device_type=kind, kernels=names, reason=", ".join(names) or "no GPU")
            for kind, names in offered.items()]
    sys.modules["autoamp_kernels"] = SimpleNamespace(
        backends=lambda: tuple(made), ArgumentError=ZeroDivisionError, lamb_=len, sgd_=max
    )

def check_none(why):
    assert kernels.find("lamb_", "cpu") is None
    assert [one.device_type for one in kernels.backends()] == ["cpu", "cuda"]
    assert f"{why}; `pip install ./kernels`" in str(kernels.backend("cpu"))
    assert [which for which, _ in kernels.by_kind("lamb_", [torch.ones(2)])] == [None]
"""
PROGRAMS = {
    "without the package there are none": """
sys.modules["autoamp_kernels"] = None
check_none("not installed")
""",
    "with an old package there are none": """
sys.modules["autoamp_kernels"] = SimpleNamespace()
check_none("too old")
""",
    "a kernel is found where the package offers it": """
found(cpu=("lamb_",), cuda=())
assert kernels.find("lamb_", "cpu") is len
assert kernels.find("sgd_", "cpu") is kernels.find("lamb_", "cuda") is kernels.find("lamb_", "mps") is None
assert str(kernels.backend("cpu")) == "cpu: kernels (lamb_)"
assert str(kernels.backend("cuda")) == "cuda: no kernels (no GPU)"
assert str(kernels.backend("mps")) == "mps: no kernels (there are kernels for CPUs and CUDA only)"
with FlopCounterMode(display=False):
    assert kernels.find("lamb_", "cpu") is None
""",
    "what a kernel refuses is told": """
found()
def fails():
    raise RuntimeError("CUDA error 700")
assert kernels.attempt(lambda *_, **__: None, 1, two=2)
assert not kernels.attempt(lambda: 1 // 0)
try:
    kernels.attempt(fails)
except RuntimeError as error:
    assert "700" in str(error)
else:
    raise AssertionError("an error of a kernel went unnoticed")
""",
    "lists are sorted by what a kernel takes": """
found(cpu=("lamb_",))
params = [torch.zeros(i + 1) for i in range(3)] + [torch.zeros(4, dtype=torch.float64)]
grads = [torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), params[3]]
groups = list(kernels.by_kind("lamb_", params, grads))
assert [which for which, _ in groups] == [len, len, None]
assert [[tensor.numel() for tensor in lists[1]] for _, lists in groups] == [[1, 3], [2], [4]]
""",
}
CLOSED = """
from autoamp import kernels
assert kernels.find("lamb_", "cpu") is None
assert "cpu: no kernels (" in str(kernels.backend("cpu"))
assert "AUTOAMP_KERNELS=0" in str(kernels.backend("cpu"))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each program ended."""
    texts = {f"{place}.py": SHARED + text for place, text in enumerate(PROGRAMS.values())}
    folder = written(tmp_path_factory.mktemp("programs"), {**texts, "closed.py": CLOSED})
    runs = {name: ["python", str(folder / f"{place}.py")] for place, name in enumerate(PROGRAMS)}
    return launched(folder, {**runs, "closed": ["AUTOAMP_KERNELS=0", "python", str(folder / "closed.py")]})


@forks
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_each_package(name: str, ended: dict[str, Ended]) -> None:
    assert ended[name].code == 0, ended[name].err


@forks
@pytest.mark.client("autoamp_kernels")
def test_the_environment_closes_all(ended: dict[str, Ended]) -> None:
    assert ended["closed"].code == 0, ended["closed"].err


def test_a_handle_tells_its_backend() -> None:
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16) as handle:
        assert handle.backend == kernels.backend("cpu")
    assert not autoamp.init(enabled=False).backend.kernels
