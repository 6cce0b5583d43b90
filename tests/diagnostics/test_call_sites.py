"""Where calls are made: paths of modules as `named_modules` has them, files and lines of the caller."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.diagnostics import Call, CallSite, Observer
from autoamp.diagnostics.call_sites import ModulePaths

LISTS = {"extends": [], "fp16": ["linear"], "none": []}


class Sites(Observer):
    """Keeps the site of each call."""

    def __init__(self) -> None:
        self.sites: list[CallSite] = []

    def before(self, call: Call) -> None:
        self.sites.append(call.site)


class Block(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Any:
        if self.recompute:
            return checkpoint(self.layer, x, use_reentrant=False)
        return F.linear(x, self.layer.weight)


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Block.forward)
    return first + next(number for number, line in enumerate(lines) if text in line)


def observed(run: Any) -> list[CallSite]:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, lists=LISTS)
    sites = Sites()
    with handle.observe(sites):
        run()
    return sites.sites


def test_module_path_file_and_line() -> None:
    model = nn.Sequential(nn.Sequential(Block()), nn.Linear(2, 2))
    call_line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    sites = observed(lambda: model(torch.ones(1, 2)))
    assert [(site.module, site.module_class, site.root) for site in sites] == [
        ("0.0", "Block", "Sequential"),
        ("1", "Linear", "Sequential"),
    ]
    # Of torch's own modules the caller of the model; of a user's the line in forward.
    assert [site.line for site in sites] == [line_of("F.linear"), call_line]
    assert all(site.file == __file__ for site in sites)
    assert str(sites[0].location).endswith(f"test_call_sites.py:{line_of('F.linear')}")


def test_a_recomputed_module_keeps_its_path() -> None:
    model = nn.Sequential(Block(recompute=True))
    sites = observed(lambda: model(torch.ones(1, 2, requires_grad=True)).sum().backward())
    assert [(site.module, site.root) for site in sites] == [("0.layer", "Sequential")] * 2


def test_outside_of_modules() -> None:
    (site,) = observed(lambda: F.linear(torch.ones(1, 2), torch.ones(1, 2)))
    assert (site.module, site.module_class, site.where) == (None, None, "-")
    assert str(site.location).startswith("tests/") or "test_call_sites.py" in str(site.location)


def test_paths_follow_a_model_that_changes() -> None:
    paths, root, late = ModulePaths(), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    assert paths.find((root, late))[0] == "<Linear>"
    assert paths.find((root, root[0])) == ("0", "Linear", "Sequential")
    assert paths.find((root,)) == ("", "Sequential", "Sequential")
    whole = nn.ModuleDict({"body": root})
    assert paths.find((whole, root[0]))[0] == "body.0"
    # Called by itself it is where it was seen last; taken out, it is outermost again.
    assert paths.find((root, root[0]))[:1] == ("body.0",)
    del whole["body"]
    other = nn.ModuleList([root])
    assert paths.find((other, root[0]))[0] == "0.0"
