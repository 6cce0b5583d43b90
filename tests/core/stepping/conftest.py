"""What tests of steps count: passes over gradients, and reads that wait for a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.waits import counted_reads


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many found_inf tensors each reading took. A reading is one synchronization on a device."""
    return counted_reads(monkeypatch)


class _Passes(TorchDispatchMode):
    """Notes the operators by which gradients are unscaled and scaled."""

    NAMES: ClassVar[dict[str, str]] = {
        "_amp_foreach_non_finite_check_and_unscale_": "unscale_",
        "_foreach_mul_": "scale_",
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.calls.append(self.NAMES[name])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def passes() -> Iterator[list[str]]:
    """The kind of every pass over gradients, as torch's operators are called."""
    with _Passes() as mode:
        yield mode.calls
