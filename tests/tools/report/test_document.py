"""The values of a report: verdict, skips in groups, coverage, what fails a run."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.core import load_table
from autoamp.errors import UsageError
from autoamp.tools import failures
from autoamp.tools.report.document import plain, remedies
from autoamp.tools.report.page import as_toml
from tests.tools.report.runs import EVIL, train, train_linear


def test_a_planted_fault() -> None:
    handle, _ = train(14, faults=(4, 9))
    found = handle.report()
    json.dumps(found, allow_nan=False)
    assert found["verdict"]["level"] == "bad"
    sentence = found["verdict"]["sentence"]
    assert sentence.startswith("2 of 14 steps skipped, all by an op in half precision; forward overflow in mul at ")
    (group,) = found["skips"]["groups"]
    assert (group["count"], group["first"], group["last"]) == (2, 4, 9)
    assert [(one["policy"], one["op"]) for one in found["remedies"]] == [("fp32", "__mul__"), ("fp32", "__rmul__")]
    assert len(failures(found, "overflow")) == 1
    assert found["lists"] == ["lists/default.toml"]


def test_a_clean_run() -> None:
    handle, _ = train(3)
    found = handle.report()
    sentence, _, compared = found["verdict"]["sentence"].partition("; of ")
    assert sentence == "0 of 3 steps skipped; no forward overflow; the loss scale is fixed"
    assert re.fullmatch(
        r"2 steps compared with fp32 the gradients are off by 0\.\d% \(of \S+ by 0\.\d%\) and the loss by 0\.\d%",
        compared,
    )
    assert found["verdict"]["level"] == "good"
    assert failures(found, "skip") == failures(found, "overflow") == []
    assert found["timeline"] == {"steps": 3, "scales": [[0, 64.0]]}


@pytest.mark.parametrize(
    ("settings", "scales", "sentence"),
    [
        *(
            (settings, True, "0 of 2 steps skipped; at a loss scale of 1 gradients are not checked, so that overflows "
             "were looked for in 2 steps alone; the loss scale is fixed")
            for settings in ({"dtype": torch.bfloat16}, {"dtype": torch.float16, "loss_scale": 1.0})
        ),
        ({"dtype": torch.float16}, False, "0 of 2 steps skipped; no loss was scaled, so that gradients were not "
         "checked and overflows looked for in 2 steps alone"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*gradients underflow")
def test_a_run_whose_gradients_nobody_checks_is_not_said_to_have_no_overflow(
    settings: dict[str, Any], scales: bool, sentence: str
) -> None:
    handle: Any = autoamp.init(device_type="cpu", trace_overflow=True, **settings)
    handle.record()
    train_linear(handle, scales=scales)
    verdict = handle.report()["verdict"]
    assert (verdict["sentence"].partition("; of ")[0], verdict["level"]) == (sentence, "unclear")


def test_a_scale_search_fails_no_run_but_for_skip() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale="dynamic", trace_overflow=True)
    handle.record()
    train_linear(handle, 64.0, steps=6)
    found = handle.report()
    assert found["skips"]["total"] == handle.skipped_steps > 1
    assert "all by the search for the loss scale; no forward overflow" in found["verdict"]["sentence"]
    assert [scale for _, scale in found["timeline"]["scales"]] == [
        65536.0 / 2**k for k in range(handle.skipped_steps + 1)
    ]
    assert failures(found, "overflow") == []
    assert len(failures(found, "skip")) == 1
    assert found["remedies"] == []


def test_skips_that_were_not_explained_are_a_group() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1024.0)
    handle.record()
    train_linear(handle, math.inf)
    explained = len(handle.overflows)
    found = handle.report()
    counts = {group["kind"]: group["count"] for group in found["skips"]["groups"]}
    assert (found["skips"]["total"], sum(counts.values())) == (2, 2)
    assert counts.get("unexplained", 0) == 2 - explained
    assert found["verdict"]["sentence"].startswith("2 of 2 steps skipped")
    assert "all not located" not in found["verdict"]["sentence"]


def test_a_report_needs_a_recording() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"call handle.record\(\) before training"):
        handle.report()


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_coverage_tells_of_compiled_code_and_of_steps_that_were_not_compared() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=True)
    handle.record()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="eager")
    with handle.scale_loss(compiled(torch.ones(2, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    uncompared, graphs = handle.report()["coverage"]
    assert uncompared.startswith("some steps were not compared with fp32 (")
    assert graphs.startswith("torch.compile has made ")
    torch._dynamo.reset()


def test_fail_on_is_overflow_or_skip() -> None:
    with pytest.raises(UsageError, match="choose 'overflow' or 'skip'"):
        failures({}, "warning")


def test_inf_and_nan_are_texts() -> None:
    assert plain({"a": (math.inf, 1.5), 2: math.nan}) == {"a": ["inf", 1.5], "2": "nan"}


# -- entries for lists, and their TOML --


def overflows(*names: str) -> list[dict[str, Any]]:
    group = {
        "count": 2,
        "sentence": "mul\nmade inf",
        "overflow": {"op": "mul", "fp32_names": list(names), "fp32_module": None, "location": "net.py:7"},
    }
    search = {"count": 2, "sentence": "normal", "overflow": {"op": "linear", "fp32_names": [], "fp32_module": None}}
    return [search, group, {"count": 1, "sentence": "not explained", "overflow": None}]


def test_each_name_that_was_called_has_an_entry_in_a_list_file(tmp_path: Path) -> None:
    path = tmp_path / "autoamp.toml"
    entries = remedies(overflows("__mul__", "__rmul__"), load_table("default"))
    assert [(one["policy"], one["op"]) for one in entries] == [("fp32", "__mul__"), ("fp32", "__rmul__")]
    assert entries[0]["evidence"] == "2 skips; first: mul made inf"
    assert entries[0]["now"].startswith("under the policy none in lists/default.toml:")
    path.write_text("\n".join(as_toml(entries)), encoding="utf-8")
    rule = load_table([str(path)]).policy_of("__rmul__")
    assert rule is not None
    assert rule.policy.value == "fp32"
    # The evidence of several names of one op is told once.
    assert [line.partition("# ")[2] for line in as_toml(entries)] == ["", "", entries[0]["evidence"], "as above", ""]
    assert as_toml([]) == []


def test_names_cannot_leave_their_line() -> None:
    entry = {"policy": "fp32", "op": f'a"\n{EVIL}', "evidence": f"one\r\ntwo {EVIL}\x00\x7f"}
    assert tomllib.loads("\n".join(as_toml([entry]))) == {"schema": 1, "fp32": [entry["op"]]}


def test_a_class_of_modules_has_an_entry_in_a_list_file(tmp_path: Path) -> None:
    path = tmp_path / "autoamp.toml"
    overflow = {"op": "mul", "fp32_names": [], "fp32_module": "torch.nn.GELU", "location": "net.py:7"}
    group = {"count": 1, "sentence": "mul made inf", "overflow": overflow}
    path.write_text("\n".join(as_toml(remedies([*overflows("mul"), group], load_table("default")))), encoding="utf-8")
    table = load_table([str(path)])
    assert [(rule.pattern, rule.precision.value) for rule in table.modules] == [("torch.nn.GELU", "fp32")]
