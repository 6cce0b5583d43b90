"""docs/howto/bisect.md: find the ops that must be fp32."""

from __future__ import annotations

import os
import signal
import tomllib
from pathlib import Path

import pytest

from autoamp.cli import main

ON_CPU = ["--metric", "loss", "--dtype", "fp16", "--device-type", "cpu"]

# Its second layer is wrong by 20 in fp16.
SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
model[1].register_forward_hook(lambda m, args, out: out + 20 if out.dtype == torch.float16 else out)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(16, 4)
loss = (model(x).float() - x).abs().mean()
loss.backward()
optimizer.step()
print("loss:", loss.item())
"""


def test_bisect_prints_the_entry_that_restores_the_metric(
    script: Path, forked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT)
    assert main(["bisect", *ON_CPU, "--survey-steps", "1", "script.py"]) == 0
    found = capsys.readouterr()
    assert tomllib.loads(found.out)["modules"] == {"1": "fp32"}
    assert "linear at script.py" in found.out
    for line in ("fp32: loss ", "the lists as they are: loss ", "this list: loss ", " runs"):
        assert line in found.out
        assert line in found.err


# Wrong by 20 if the product of two results of the layer is in half precision: the layer in fp32 restores the loss, and
# so does the product.
EITHER = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        for _ in range({layers}):
            h = self.layer(x)
        for _ in range({products}):
            product = torch.mm(h, h)
        return product + 20 if h.dtype == product.dtype == torch.float16 else product
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss = model(torch.ones(4, 4)).float().abs().mean()
loss.backward()
optimizer.step()
print("loss:", loss.item())
"""


@pytest.mark.parametrize(
    ("layers", "products", "found"),
    [(3, 1, {"fp32": ["mm"]}), (1, 3, {"modules": {"torch.nn.Linear": "fp32"}})],
)
def test_of_entries_that_each_restore_it_prints_the_one_that_takes_the_fewest_calls_from_half(
    layers: int,
    products: int,
    found: dict[str, object],
    script: Path,
    forked: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script.write_text(EITHER.format(layers=layers, products=products))
    assert main(["bisect", *ON_CPU, "--survey-steps", "1", "script.py"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed == {"schema": 1, **found}


# The survey ends with the step, so it does not see the product after that, whose dtype decides.
AFTER = """
import torch
class Late(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1, 1))
    def forward(self, x):
        return torch.bmm(x, self.weight).dtype == torch.float16
linear = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.01)
linear(torch.ones(1, 2)).float().sum().backward()
optimizer.step()
in_half = Late()(torch.ones(1, 1, 1))
"""


@pytest.mark.parametrize(
    ("last", "code", "message"),
    [
        ("print('loss:', 1.01 if in_half else 1.0)", 0, "no rule has to change"),
        ("print('loss:', 'nan' if in_half else 1.0)", 1, "differs even with every surveyed"),
        ("print('loss: 1.0')\nassert not in_half, 'no data'", 1,
         "the lists as they are: failed: exit code 1: AssertionError: no data"),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_find_it_prints_no_list(
    last: str, code: int, message: str, script: Path, forked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(AFTER + last)
    assert main(["bisect", *ON_CPU, "--survey-steps", "1", "script.py"]) == code
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""


def test_a_program_that_fails_is_told(script: Path, forked: None, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("raise ValueError('no data')")
    assert main(["bisect", *ON_CPU, "script.py"]) == 2
    assert "cannot be surveyed: exit code 1: ValueError: no data" in capsys.readouterr().err


def test_a_program_without_a_metric_is_told(script: Path, forked: None, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import torch\ntorch.ones(1)\n")
    with pytest.raises(SystemExit) as ended:
        main(["bisect", *ON_CPU, "script.py"])
    assert ended.value.code == 1
    assert "in fp32; name a value that it prints" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the program ends the command that started it")
def test_a_signal_during_the_survey_ends_it(script: Path, forked: None, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()\n")
    with pytest.raises(SystemExit) as ended:
        main(["bisect", *ON_CPU, "script.py"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert "interrupted during the survey" in capsys.readouterr().err
