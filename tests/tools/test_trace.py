"""The cast trace: a model counted by hand, and the forms of its output."""

from __future__ import annotations

import inspect
import json
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.tools import CastTrace, Row
from autoamp.torch_private import dispatch_modes


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
def handle(short_lists: Any) -> Any:
    return short_lists


def by_op(trace: CastTrace) -> dict[tuple[str, str | None], Row]:
    return {(row.op.rpartition(".")[2], row.site.module): row for row in trace.rows}


def numbers(row: Row) -> tuple[int, int, int, int]:
    return row.calls, row.casts, row.spared, row.bytes_cast


def test_a_model_counted_by_hand(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    with handle.trace() as trace:
        model(x).float().sum().backward()
    rows = by_op(trace)
    assert list(rows) == [("linear", "fc"), ("softmax", ""), ("linear", "out")]
    # Input 8, weight 16, bias 4. The casts of weight and bias are cached from the second use on: the third is spared.
    assert numbers(rows["linear", "fc"]) == (3, 7, 2, 2 * (3 * 8 + 2 * 20))
    assert numbers(rows["softmax", ""]) == (1, 1, 0, 4 * 8)
    assert numbers(rows["linear", "out"]) == (1, 3, 0, 2 * 28)
    fc = rows["linear", "fc"]
    assert (fc.dtypes_in, fc.dtypes_out) == ({"float32": 9}, {"float16": 3})
    assert (fc.policy, fc.rule, fc.origin) == ("fp16", "linear", "lists=")
    lines, first = inspect.getsourcelines(Model.forward)
    line = first + next(number for number, text in enumerate(lines) if "softmax" in text)
    assert str(rows["softmax", ""].site.location).endswith(f"test_trace.py:{line}")


def test_the_same_numbers_in_inference_mode_and_none_of_another_thread(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    with handle.trace() as trace:
        model(x)
    expected = [numbers(row) for row in trace.rows]
    with handle.trace() as trace:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    assert trace.rows == ()
    with torch.inference_mode(), handle.trace() as trace:
        model(x)
    found = [numbers(row) for row in trace.rows]
    # There torch's softmax comes undivided: told to compute in fp32, it widens within.
    assert found[1] == (1, 0, 1, 0)
    assert [found[0], found[2]] == [expected[0], expected[2]]


def test_in_place_forms_cast_there_and_back(handle: Any) -> None:
    x = torch.ones(3, dtype=torch.float16)
    with handle.trace() as trace:
        torch.exp_(x)
        torch.cat([x, torch.ones(2)])
    assert [numbers(row) for row in trace.rows] == [(1, 2, 0, 3 * 4 + 3 * 2), (1, 1, 0, 12)]


def test_casts_of_pinned_weights_are_spared(handle: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    with torch.no_grad(), handle.inference(model):
        model(x)
        with handle.trace() as trace:
            model(x)
    assert numbers(by_op(trace)["linear", "fc"])[:3] == (3, 3, 6)


def test_an_op_on_no_list_has_a_row_where_it_gets_several_dtypes(handle: Any) -> None:
    x = torch.randn(2, 2)
    with handle.trace() as trace:
        torch.mul(F.linear(x, x), torch.ones(2, 2))
        torch.mul(x, x)
        torch.empty(2).copy_(torch.ones(2).half())
    (row,) = trace.unlisted
    # torch widens the result of the linear layer.
    assert (row.op, row.policy, numbers(row)) == ("aten::mul", "unlisted", (1, 1, 0, 4 * 4))
    assert row.dtypes_in == {"float16": 1, "float32": 1}


def test_dict_json_and_print(handle: Any) -> None:
    with handle.trace() as trace:
        Model()(torch.randn(2, 4))
    found = json.loads(trace.to_json())
    assert found == trace.to_dict()
    row = found["rows"][0]
    assert (found["kind"], row["module"], row["module_class"]) == ("autoamp.trace", "fc", "Linear")
    assert str(row["location"]).startswith("tests/tools/test_trace.py:")
    # As csv.DictWriter writes it.
    assert str(row["dtypes_in"]) == "{'float32': 9}"
    assert [row["casts"] for row in found["rows"]] == [7, 1, 3]
    assert "nn.functional.linear" in str(trace)


def test_a_call_that_raises_is_not_counted(handle: Any) -> None:
    with handle.trace() as trace:
        with pytest.raises(RuntimeError):
            F.linear(torch.ones(1, 2), torch.ones(3, 3))
        F.linear(torch.ones(1, 2), torch.ones(2, 2))
    assert sorted(row.calls for row in trace.rows) == [0, 1]
    assert dispatch_modes() == 0


def test_paths_follow_a_model_that_changes(handle: Any) -> None:
    class Calling(nn.Sequential):
        """Calls a module that is not registered in it."""

        def forward(self, x: Tensor) -> Any:
            return late(super().forward(x))

    def paths(model: nn.Module) -> list[str | None]:
        with handle.trace() as trace:
            model(torch.ones(1, 1))
        return [row.site.module for row in trace.rows]

    root, late = Calling(nn.Linear(1, 1)), nn.Linear(1, 1)
    assert paths(root) == ["0", "<Linear>"]
    whole = nn.Sequential(root)
    assert paths(whole) == ["0.0", "0.<Linear>"]
    del whole[0]
    assert paths(nn.Sequential(nn.Identity(), root)) == ["1.0", "1.<Linear>"]


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


def test_a_table_shows_names_as_they_are_and_whole(handle: Any) -> None:
    with handle.trace() as trace:
        Odd()(torch.ones(1, 2))
    assert "[bold]odd[/bold]" in str(trace)
    assert str(trace).count("q") == 300
    with handle.trace() as empty:
        pass
    assert str(empty) == "Casts: nothing\n"
