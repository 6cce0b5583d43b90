"""What the doctor finds: verdicts of measurements, packages, lists, names in the way."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import probes
from autoamp.cli.probes import Measured, Spread


def measured(matmul: float, elementwise: float) -> Measured:
    """A measurement with these ratios."""
    one = Spread(1.0, 1.0, 1.0)
    spreads = (Spread(ratio, ratio, ratio) for ratio in (matmul, elementwise))
    return Measured("fp16", one, one, *spreads, size=1, elements=1)


@pytest.mark.parametrize(
    ("matmul", "elementwise", "said"),
    [
        (8.0, 1.9, "fp16 pays here: matmul 8.0 times"),
        (1.0, 1.9, "memory-bound models only"),
        (1.0, 1.0, "saves memory, not time"),
        (0.3, 1.9, "does not pay here: matmul 0.3 times"),
        (0.0148, 1.9, "does not pay here: matmul 0.015 times"),
    ],
)
def test_verdict_says_whether_half_precision_pays(matmul: float, elementwise: float, said: str) -> None:
    assert said in measured(matmul, elementwise).verdict


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)


def test_measurement_pairs_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half is twice as fast in every round, though rounds differ.
    rounds = {"fp32": [2.0, 4.0, 6.0], "fp16": [1.0, 2.0, 3.0], "bf16": [1.0, 2.0, 3.0]}
    monkeypatch.setattr(probes, "_rounds", lambda *_: rounds)
    monkeypatch.setattr(probes, "_matmuls", lambda kind: (10, {}))
    monkeypatch.setattr(probes, "_copies", lambda kind, elements: {})
    fp32, fp16, _ = probes.measure("cpu")
    assert fp16.matmul == Spread(2.0, 2.0, 2.0)
    assert fp32.flops.median == pytest.approx(2 * 10**3 / 4)
    # As many elements, of half the bytes, in half the time.
    assert fp16.bytes.median == pytest.approx(fp32.bytes.median)


def test_measurement_runs_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    matmul = probes._matmul
    monkeypatch.setattr(probes, "_matmul", lambda kind, size, dtype: sizes.append(size) or matmul(kind, 16, dtype))
    monkeypatch.setattr(probes, "_time", lambda call, kind: call() is None or 1.0)
    found = probes.measure("cpu", seconds=0.0)
    assert [one.dtype for one in found] == ["fp32", "fp16", "bf16"]
    assert all(one.flops.median > 0 and one.bytes.median > 0 for one in found)
    assert set(sizes) == {256}


def test_measurement_is_of_true_dtypes_under_an_active_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_rounds", lambda calls, *_: {name: [1.0, 1.0] for name in calls})
    seen = []
    monkeypatch.setattr(probes, "_time", lambda call, kind: seen.append(call().dtype) or 1.0)
    autoamp.init(device_type="cpu", dtype=torch.float16)
    probes.measure("cpu")
    assert set(seen) == {torch.float32, torch.float16, torch.bfloat16}


def test_device_is_described() -> None:
    device = probes.device_of("cpu")
    assert (device.kind, device.default) == ("cpu", "bfloat16")
    assert "threads" in device.name
    assert device.units


def test_lists_are_those_of_this_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "autoamp.toml").write_text('schema = 1\nfp32 = ["no_such_package.loss"]\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOAMP_LISTS", "apex")
    lists = probes.lists_of("cuda")
    assert lists.environment == "apex"
    assert lists.used[str(tmp_path / "autoamp.toml")] == 1
    assert "lists/apex.toml" in lists.used
    assert lists.waiting == ("no_such_package.loss",)


def test_packages_tell_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.packages()["apex"] is None
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "autoamp_kernels.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probes.packages()
    assert found["apex"] == str(tmp_path / "apex" / "__init__.py")
    assert found["kernels"] == str(tmp_path / "autoamp_kernels.py")


def test_a_distribution_without_its_module_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "apex-0.9.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probes.packages()["apex"] == "apex 0.9, installed but not importable"


def test_the_alias_is_no_real_apex() -> None:
    autoamp.compat.install_as_apex()
    try:
        assert probes.packages()["apex"] is None
    finally:
        autoamp.compat.uninstall()


def test_names_are_those_that_init_rebinds_and_those_that_it_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("takes_names")
    exec(
        "from torch import matmul\n"
        "import torch.nn.functional as F\n"
        "def f(op=matmul, *, other=F.log_softmax):\n    pass\n"
        "import collections\nPair = collections.namedtuple('Pair', 'a b', defaults=(1, 2))\n"
        "class Net:\n"
        "    act = staticmethod(F.log_softmax)\n"
        "    def g(self, op=matmul):\n        pass\n",
        vars(module),
    )
    module.OPS = {"m": torch.matmul, "other": len}
    module.CHAIN = [len, torch.log_softmax]
    module.PART = functools.partial(torch.log_softmax, dim=1)
    monkeypatch.setitem(sys.modules, "takes_names", module)
    names = probes.bound_names()
    # The test modules of this process take names too.
    assert [name for name in names.rebound if name.startswith("takes_names.")] == ["takes_names.matmul"]
    assert {name for name in names.unreached if name.startswith("takes_names.")} == {
        "takes_names.f(op=)", "takes_names.f(other=)", "takes_names.Net.act", "takes_names.Net.g(op=)",
        "takes_names.OPS['m']", "takes_names.CHAIN[1]", "takes_names.PART.func",
    }  # fmt: skip
    assert module.matmul is torch.matmul
