"""What the doctor finds: the device, packages, lists, and names that were taken before `init`."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import probes


def test_lists_are_those_of_this_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "autoamp.toml").write_text('schema = 1\nfp32 = ["no_such_package.loss"]\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOAMP_LISTS", "apex")
    lists = probes.lists_of("cuda")
    assert lists["environment"] == "apex"
    assert lists["used"][str(tmp_path / "autoamp.toml")] == 1
    assert "lists/apex.toml" in lists["used"]
    assert lists["waiting"] == ["no_such_package.loss"]


def test_packages_tell_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.packages()["apex"] is None
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probes.packages()
    assert found["apex"].startswith(f"{tmp_path / 'apex' / '__init__.py'}; autoamp adds")


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
    assert [name for name in names["rebound"] if name.startswith("takes_names.")] == ["takes_names.matmul"]
    assert {name for name in names["unreached"] if name.startswith("takes_names.")} == {
        "takes_names.f(op=)", "takes_names.f(other=)", "takes_names.Net.act", "takes_names.Net.g(op=)",
        "takes_names.OPS['m']", "takes_names.CHAIN[1]", "takes_names.PART.func",
    }  # fmt: skip
    assert module.matmul is torch.matmul
