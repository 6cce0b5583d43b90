"""Tables, and the rows that are shown in them."""

from __future__ import annotations

import torch
from torch import nn

import autoamp
from autoamp.diagnostics import CallSite, Row


class Odd(nn.Module):
    """Its modules have names of markup, and of 300 letters."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("[bold]odd[/bold]", nn.Linear(2, 2))
        self.add_module("q" * 300, nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def test_a_table_shows_names_as_they_are_and_whole() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    with handle.trace() as trace:
        Odd()(torch.ones(1, 2))
    assert "[bold]odd[/bold]" in str(trace)
    assert str(trace).count("q") == 300
    with handle.trace() as empty:
        pass
    assert str(empty) == "Casts: nothing\n"


def test_a_row_as_plain_values() -> None:
    found = Row("torch.exp", "fp32", "exp", "lists=", CallSite("a.b", "Exp", "Model", "/nowhere/x.py", 3)).to_dict()
    assert "site" not in found
    assert (found["module"], found["module_class"], found["location"]) == ("a.b", "Exp", "/nowhere/x.py:3")
    assert (found["op"], found["calls"], found["dtypes_in"]) == ("torch.exp", 0, {})
