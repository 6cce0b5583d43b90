"""Wrong options, variables and files: exit code 2 and one line that tells what to do, never a traceback."""

from __future__ import annotations

import copy
import io
import json
import platform
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp.cli import main
from tests.diagnostics.report.runs import train

FINDING = {
    "format": 6, "overflow": {}, "text": "", "versions": {"python": platform.python_version()}, "scale": 1.0,
    "half_dtype": "float16", "named": [],
}  # fmt: skip
TAPE = {"format": "autoamp.tape", "version": 3, "events": []}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command line that must be refused, and return the line that it wrote."""
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    assert line.startswith("autoamp: ")
    return line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "-m", ".module"], "no module named '.module'"),
        (["tune", "--metric", "loss", "--tolerance", "nan", "script.py"], "--tolerance 0 or more"),
        (["bisect", "--metric", "loss", "--tolerance", "nan", "script.py"], "--tolerance 0 or more"),
        (["tune", "--metric", "loss", "--max-error", "nan", "script.py"], "--max-error must be 0 or more"),
        (["replay", "a\0b"], "no capsule"),
    ],
)
def test_wrong_options_are_refused(
    argv: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.touch()
    assert message in refused(capsys, *argv)


@pytest.mark.parametrize("value", ["nope", "bf16;fp16", "float16"])
def test_wrong_half_units_are_refused(
    value: str, script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.touch()
    monkeypatch.setenv("AUTOAMP_HALF_UNITS", value)
    line = refused(capsys, "run", "--device-type", "cpu", "script.py")
    assert f"AUTOAMP_HALF_UNITS={value!r}: expected 'bf16', 'fp16', 'bf16,fp16', or ''" in line


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("finding", "step", "message"),
    [
        ("{", b"", "no capsule"),
        ("[]", b"", "no capsule"),
        (b"\xff\xfe", b"", "no capsule"),
        (json.dumps({"format": 5}), b"", "has format 5 of capsules"),
        (json.dumps({"format": 6}), saved(TAPE), "is a damaged capsule"),
        (json.dumps({**FINDING, "versions": 3}), saved(TAPE), "is a damaged capsule"),
        (json.dumps(FINDING), b"", "cannot load"),
        (json.dumps(FINDING), b"text", "cannot load"),
        (json.dumps(FINDING), saved([1, 2]), "cannot load"),
        (json.dumps(FINDING), saved({**TAPE, "events": 3}), "cannot load"),
        (json.dumps({**FINDING, "named": [{"kind": "input"}]}), saved(TAPE), "is a damaged capsule"),
        (json.dumps({**FINDING, "half_dtype": "nn"}), saved(TAPE), "is a damaged capsule"),
    ],
)
def test_wrong_capsules_are_refused(
    finding: str | bytes, step: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.capsule"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("finding.json", finding)
        archive.writestr("tape.pt", step)
    assert main(["replay", str(path)]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def damaged(document: Any, wrong: Any) -> Iterator[Any]:
    """Yield copies of a report with another value in the place of one."""

    def places(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
        for key, item in items:
            yield (*place, key)
            yield from places(item, (*place, key))

    for *above, last in places(document, ()):
        found = copy.deepcopy(document)
        inner = found
        for key in above:
            inner = inner[key]
        inner[last] = wrong
        yield found


@pytest.mark.parametrize(
    "wrong", ["text", *(pytest.param(one, marks=pytest.mark.variants) for one in (None, 3, [3], {"key": 3}))], ids=repr
)
def test_wrong_reports_are_refused(wrong: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    handle, _ = train(3, faults=(1,))
    document, path, page = handle.report(), tmp_path / "run.json", tmp_path / "page.html"
    handle.deactivate()
    codes = []
    for one in damaged(document, wrong):
        path.write_text(json.dumps(one), encoding="utf-8")
        codes.append(main(["report", str(path), "-o", str(page), "--fail-on", "skip"]))
        line = capsys.readouterr().err.splitlines()[-1]
        assert "run.json" in line
    # A value that neither the page nor the exit code looks at may be any.
    assert set(codes) == {2, 3}
