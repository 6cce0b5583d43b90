"""The range profile: figures beside numpy, runs again without side effects, results that are those of fp32."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoamp
from autoamp.cli import main
from autoamp.tools import OpRange, RangeProfile
from tests.launches import launched


def op(ranges: RangeProfile, name: str) -> OpRange:
    (found,) = [row for row in ranges.ops if row.op == f"aten::{name}"]
    return found


def test_an_op_beside_numpy(handle: Any) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 32), torch.randn(32, 8) * 3e3
    with handle.profile_ranges() as ranges:
        result = torch.mm(a, b)
    assert result.dtype is torch.float32
    row = op(ranges, "mm")
    assert (row.within, row.calls, row.compared, row.values.elements) == ("torch.mm", 1, 1, 128)
    expected = np.unique(np.frexp(result.numpy())[1] - 1, return_counts=True)
    assert row.to_dict()["exponents"] == {str(int(e)): int(n) for e, n in zip(*expected, strict=True)}
    exact = result.numpy().astype(np.float64)
    with handle.disable_casts():
        half = torch.mm(a.bfloat16(), b.bfloat16()).float().numpy().astype(np.float64)
    expected_error = np.linalg.norm(half - exact) / np.linalg.norm(exact)
    assert row.errors["bfloat16"] == pytest.approx(expected_error, rel=1e-6)


def test_an_overflow_is_seen_in_fp16_alone(handle: Any) -> None:
    with handle.profile_ranges() as ranges:
        torch.mul(torch.full((4,), 300.0), 300.0)
    row = op(ranges, "mul")
    assert row.values.in_format("float16") == {"underflow": 0, "subnormal": 0, "overflow": 4}
    assert (row.errors["float16"], row.errors["bfloat16"] < 0.01) == (math.inf, True)
    assert json.loads(ranges.to_json())["ops"][0]["errors"]["float16"] == "inf"
    assert "4 overflow" in ranges.verdict()


def test_gradients_are_unscaled_and_named_and_choose_the_scale(handle: Any) -> None:
    model = nn.Linear(1, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with handle.profile_ranges() as ranges:
        loss = (model(torch.ones(1, 1)) * torch.tensor([2.0**-30, 2.0**-3])).sum()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert ranges.gradients["weight"].to_dict()["exponents"] == {"-30": 1, "-3": 1}
    # 2**-30 is above 2**-25 from a scale of 2**5 on, and 2**-3 below 2**16 up to 2**18.
    assert ranges.loss_scales() == tuple(2.0**k for k in range(5, 19))
    assert ranges.loss_scale == 1024.0
    assert ranges.to_dict()["gradients"][0]["float16"] == {"underflow": 0, "subnormal": 1, "overflow": 0}
    # What the optimizer and the scaling compute is none of the model's.
    assert {row.op for row in ranges.ops} == {"aten::mm", "aten::mul", "aten::sum"}


def test_what_writes_or_draws_is_not_run_again(handle: Any) -> None:
    x = torch.ones(8)
    with handle.profile_ranges() as ranges:
        x.add_(1)
        torch.bernoulli(x / 4)
    assert x.tolist() == [2.0] * 8
    for row in (op(ranges, "add_"), op(ranges, "bernoulli")):
        assert (row.calls, row.compared, row.errors) == (1, 0, {})


def test_every_step_is_counted_and_the_first_calls_at_a_place_are_compared(handle: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with handle.profile_ranges() as ranges:
        for step in range(4):
            model(torch.full((1, 2), 3e5 if step == 3 else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    row = op(ranges, "addmm")
    assert (ranges.steps, row.calls, row.compared, row.values.elements) == (4, 4, 2, 8)
    assert row.values.in_format("float16")["overflow"] == 2
    assert max(row.errors.values()) < 0.1
    assert ranges.gradients["bias"].elements == 8


def test_without_a_step_gradients_are_read_at_the_end(handle: Any) -> None:
    model = nn.Linear(2, 2)
    with handle.profile_ranges() as ranges:
        model(torch.ones(1, 2)).sum().backward()
    assert {name: found.elements for name, found in ranges.gradients.items()} == {"weight": 4, "bias": 2}


def test_what_it_computes_itself_is_not_observed(handle: Any) -> None:
    observed: list[str] = []

    class Names(autoamp.tools.Observer):
        def before(self, call: Any) -> None:
            observed.append(call.op.name)

    with handle.count() as counts, handle.observe(Names()), handle.profile_ranges() as ranges:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert observed == ["torch.mm"]
    assert [row.op for row in ranges.ops] == ["aten::mm"]
    assert counts.ops == {}


def test_an_exception_in_the_program_ends_it(handle: Any) -> None:
    ranges = handle.profile_ranges()
    with pytest.raises(IndexError), ranges:
        torch.exp(torch.ones(2))[2]
    torch.exp(torch.ones(2))
    assert len(ranges.ops) == 1
    assert "exp" in str(ranges)


def test_the_table_has_the_worst_places_first_and_says_what_its_figures_are(handle: Any) -> None:
    lines = "".join(f"y = y + torch.full((2,), {number}.0)\n" for number in range(30))
    program = compile(f"y = torch.ones(2)\n{lines}y = y * 1e5\n", "steps.py", "exec")
    with handle.profile_ranges() as ranges:
        exec(program, {"torch": torch})
    text = str(ranges)
    rows = [line for line in text.splitlines() if "steps.py:" in line]
    assert len(ranges.ops) > len(rows) == 20
    assert "steps.py:32" in rows[0]
    assert f"20 of {len(ranges.ops)}" in text
    assert "fp16 inf" in text.partition("largest: the power of two of the largest result")[2]
    assert len(ranges.to_dict()["ops"]) == len(ranges.ops)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the program runs in a fork")
def test_the_command(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "ranges.json"
    script.write_text("import sys, torch\nx = torch.ones(2, 2)\ntorch.mm(x, x)\nsys.exit(len(sys.argv) + 1)\n")
    listed = tmp_path / "own.toml"
    listed.write_text('schema = 1\nfp16 = ["mm", "exp"]\n')
    command = ["profile", "--device-type", "cpu", "--lists", str(listed), "--json", str(out), str(script), "--x"]
    ran = launched(tmp_path, {"profile": command})["profile"]
    assert ran.code == 3, ran.err
    found = json.loads(out.read_text())
    assert [row["op"] for row in found["ops"]] == ["aten::mm"]
    assert found["ops"][0]["location"].endswith("script.py:3")
    assert "float16: of 4 results 0 overflow" in ran.out


def test_the_command_refuses_what_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--json", str(tmp_path), "script.py"]) == 2
    assert "cannot be written" in capsys.readouterr().err
