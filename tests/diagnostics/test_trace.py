"""The cast trace: a model counted by hand, hints that are planted, and results that are those without."""

from __future__ import annotations

import csv
import inspect
import io
import json
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp import torch_private
from autoamp.diagnostics import CastTrace, Row

LISTS = {"extends": [], "fp16": ["linear"], "fp32": ["softmax", "exp"], "promote": ["cat"], "none": []}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            hidden = self.fc(x)
        probabilities = F.softmax(hidden, -1)
        return self.out(probabilities * 2)


@pytest.fixture
def handle() -> Any:
    return autoamp.init(device_type="cpu", dtype=torch.float16, lists=LISTS, loss_scale=1024.0)


def by_op(trace: CastTrace) -> dict[tuple[str, str | None], Row]:
    return {(row.op.rpartition(".")[2], row.site.module): row for row in trace.rows}


def numbers(row: Row) -> tuple[int, int, int, int, int, int]:
    return row.calls, row.casts, row.spared, row.elements_cast, row.bytes_cast, row.work


def test_a_model_counted_by_hand(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    with handle.trace() as trace:
        model(x).float().sum().backward()
    rows = by_op(trace)
    assert list(rows) == [("linear", "fc"), ("softmax", ""), ("linear", "out")]
    # Input 8, weight 16, bias 4. The casts of weight and bias are kept from the second use on: the third is spared.
    assert numbers(rows["linear", "fc"]) == (3, 7, 2, 3 * 8 + 2 * 20, 2 * (3 * 8 + 2 * 20), 3 * 2 * 4 * 4)
    assert numbers(rows["softmax", ""]) == (1, 1, 0, 8, 4 * 8, 8)
    assert numbers(rows["linear", "out"]) == (1, 3, 0, 28, 2 * 28, 32)
    fc = rows["linear", "fc"]
    assert (fc.dtypes_in, fc.dtypes_out, fc.exact) == ({"float32": 9}, {"float16": 3}, True)
    assert (fc.policy, fc.rule, fc.origin) == ("fp16", "linear", "lists=")
    lines, first = inspect.getsourcelines(Model.forward)
    line = first + next(number for number, text in enumerate(lines) if "softmax" in text)
    assert str(rows["softmax", ""].site.location).endswith(f"test_trace.py:{line}")


def test_the_same_numbers_in_inference_mode_and_another_thread(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    with handle.trace() as trace:
        model(x)
    expected = [numbers(row) for row in trace.rows]
    with torch.no_grad(), handle.trace() as trace:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    assert [numbers(row) for row in trace.rows] == expected
    with torch.inference_mode(), handle.trace() as trace:
        model(x)
    found = [numbers(row) for row in trace.rows]
    # There torch's softmax comes undivided: told to compute in fp32, it widens within.
    assert found[1] == (1, 0, 1, 0, 0, 8)
    assert [found[0], found[2]] == [expected[0], expected[2]]


def test_in_place_forms_cast_there_and_back(handle: Any) -> None:
    x = torch.ones(3, dtype=torch.float16)
    with handle.trace() as trace:
        torch.exp_(x)
        torch.cat([x, torch.ones(2)])
    (exp, cat) = trace.rows
    assert numbers(exp) == (1, 2, 0, 6, 3 * 4 + 3 * 2, 3)
    assert numbers(cat) == (1, 1, 0, 3, 12, 5)


def test_pinned_weights_are_spared_and_said_to_be_inferred(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    with torch.no_grad(), handle.inference(model):
        expected = model(x)
        with handle.trace() as trace:
            assert torch.equal(model(x), expected)
    fc = by_op(trace)["linear", "fc"]
    assert (fc.casts, fc.spared, fc.exact) == (3, 6, False)


def test_without_modes_casts_are_what_the_policy_asks_for(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoamp.diagnostics.trace.DispatchMode", None)
    monkeypatch.setattr("autoamp.diagnostics.observer.DispatchMode", None)
    with handle.trace() as trace:
        Model()(torch.randn(2, 4))
    fc = by_op(trace)["linear", "fc"]
    assert (fc.calls, fc.casts, fc.spared, fc.exact) == (3, 9, 0, False)
    assert torch_private.DispatchMode is not None


def test_hints_have_figures_and_remedies(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    wide = nn.Linear(64, 64, bias=False)
    with handle.trace() as trace:
        model(x)
        wide(torch.randn(1, 64))
        hidden = F.linear(x, x)
        torch.mul(hidden, torch.ones(2, 2))
    hints = {(hint.kind, hint.where.partition(" ")[0]): hint for hint in trace.hints}
    assert set(hints) == {
        ("casts more than it computes", "linear"),
        ("activation cast several times", "linear"),
        ("fp32 island", "softmax"),
        ("mixed dtypes on no list", "aten::mul"),
    }
    more = hints["casts more than it computes", "linear"]
    assert "4,160 elements cast for 4,096 multiply-adds" in more.figure
    assert "none = ['linear']" in more.remedy
    island = hints["fp32 island", "softmax"]
    # 8 elements to fp32, and to half again.
    assert island.bytes == 8 * 4 + 8 * 2
    assert "linear in out" in island.figure
    mixed = hints["mixed dtypes on no list", "aten::mul"]
    assert mixed.bytes == 4 * 4
    assert mixed.remedy.startswith("list 'mul', 'multiply', '__mul__', '__rmul__' as fp16 or promote")
    assert [hint.bytes for hint in trace.hints] == sorted((hint.bytes for hint in trace.hints), reverse=True)


def test_a_quiet_model_has_no_hints(handle: Any) -> None:
    model = nn.Linear(8, 8)
    with handle.trace() as trace:
        model(torch.randn(64, 8))
    assert trace.hints == ()


def test_dict_json_csv_and_print(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    with handle.trace(profile=True) as trace:
        Model()(torch.randn(2, 4))
    found = json.loads(trace.to_json())
    assert found == json.loads(json.dumps(trace.to_dict()))
    assert found["kind"] == "autoamp.trace"
    assert found["rows"][0]["module"] == "fc"
    assert found["rows"][0]["cpu_us"] > 0
    rows = list(csv.DictReader(io.StringIO(trace.to_csv())))
    assert [row["casts"] for row in rows] == ["7", "1", "3"]
    assert rows[0]["dtypes_in"] == "float32=9"
    text = str(trace)
    assert "nn.functional.linear" in text
    assert "fp32 island" in text


def test_training_is_bitwise_the_same(handle: Any) -> None:
    def trained(traced: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(Model(), nn.Dropout(0.3), nn.LayerNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters())
        trace = handle.trace()
        if traced:
            trace.__enter__()
        for _ in range(3):
            loss = model(torch.randn(3, 4)).float().square().sum()
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        if traced:
            trace.__exit__(None, None, None)
            assert len(trace.rows) > 3
        return [parameter.detach() for parameter in model.parameters()]

    plain, traced = trained(False), trained(True)
    assert all(map(torch.equal, plain, traced))


def test_compiled_code_is_left_alone(handle: Any) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with handle.trace() as trace:
        assert torch.compile(model, backend=backend)(x).dtype is torch.float16
    assert len(graphs) == 1
    assert trace.rows == ()
    torch._dynamo.reset()


def test_a_call_that_raises_is_not_counted(handle: Any) -> None:
    with handle.trace() as trace:
        with pytest.raises(RuntimeError):
            F.linear(torch.ones(1, 2), torch.ones(3, 3))
        F.linear(torch.ones(1, 2), torch.ones(2, 2))
    assert sorted(row.calls for row in trace.rows) == [0, 1]
    assert torch_private.dispatch_modes() == 0
