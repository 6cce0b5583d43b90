"""docs/howto/notebook.md: the magic `%autoamp` in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.client("nbclient", "ipykernel")

MODEL = """\
import torch
model = torch.nn.Linear(4, 4)
seen = []
hook = model.register_forward_hook(lambda module, args, out: seen.append(torch.mm(out, out).dtype))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
    return seen[-1]
"""
HANDLE = "id(__import__('autoamp').current_handle())"


def run_cells(folder: Path, *cells: str, allow_errors: bool = False) -> list[list[Any]]:
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources=resources, allow_errors=allow_errors
    ).execute()
    return [cell.outputs for cell in notebook.cells]


def text(outputs: list[Any]) -> str:
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs)


def test_cells_turn_casts_on_and_off_and_show_the_report_inline(tmp_path: Path) -> None:
    on = "%autoamp on --device-type cpu --dtype fp16"
    cells = ["%load_ext autoamp", MODEL, "train()", on, "train()", HANDLE, on, HANDLE, "%autoamp status",
             "%autoamp report", "%autoamp on --device-type cpu --dtype bf16", "train()", "%autoamp off", "train()",
             "torch.mm.__module__ + type(torch.mm).__name__", "%autoamp status"]  # fmt: skip
    found = run_cells(tmp_path, *cells)
    shown = [text(outputs).strip() for outputs in found]
    assert shown[2] == "torch.float32"
    assert shown[4] == "torch.float16"
    assert shown[5] == shown[7]
    assert shown[8].startswith("<autoamp.Handle active: torch.float16 on cpu, ")
    assert shown[8].endswith(", loss_scale=65536, skipped_steps=0>")
    page = "".join(out.get("data", {}).get("text/html", "") for out in found[9])
    assert page.startswith("<div><iframe srcdoc=")
    assert "torch.nn.functional.linear" in page
    assert shown[11] == "torch.bfloat16"
    assert shown[13] == "torch.float32"
    assert "builtin" in shown[14]
    assert shown[12] == shown[15] == "autoamp is off"


def test_a_wrong_line_is_an_error_of_its_cell(tmp_path: Path) -> None:
    messages = {
        "%autoamp of": "%autoamp: argument action: invalid choice: 'of'",
        "%autoamp": "%autoamp: the following arguments are required: action; usage: %autoamp [--dtype {fp16,float16,",
        "%autoamp on --dtype half": "%autoamp: argument --dtype: invalid choice: 'half'",
        "%autoamp on --lists 'x": "%autoamp: no closing quotation; usage: ",
        "%autoamp on --lists x.toml": f"%autoamp: --lists: '{tmp_path}/x.toml' cannot be read",
        "%autoamp on --device-type gpu": "%autoamp: --device-type 'gpu' is unknown to torch",
        "%autoamp report": "%autoamp: autoamp is off, and nothing was recorded",
    }
    _, *found = run_cells(tmp_path, "%load_ext autoamp", *messages, allow_errors=True)
    for message, outputs in zip(messages.values(), found, strict=True):
        # One line, without a traceback.
        assert [one["output_type"] for one in outputs] == ["stream"]
        assert text(outputs).startswith(f"UsageError: {message}")
        assert text(outputs).count("\n") == 1
