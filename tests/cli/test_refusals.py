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
from tests.tools.report.runs import train

FINDING = {"format": 8, "overflow": {}, "text": "", "versions": {"python": platform.python_version()}}
TAPE = {"events": [], "named": (), "scale": 1.0, "half_dtype": torch.float16}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command line that must be refused, and return the line that it wrote."""
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    assert line.startswith("autoamp: ")
    return line


SEARCH = ["--metric", "loss", "--dtype", "fp16"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--opt-level", "02"], "--opt-level '02' is unknown; choose 'O0', 'O1', 'O2' or 'O3', which begin with "
                                       "the letter O, not the digit 0"),
        *((["run", "--loss-scale", text], f"--loss-scale {text!r}: expected 'dynamic' or a number above 0")
          for text in ("x", "-1", "inf")),
        (["run", "--opt-level", "O2", "--no-apex"], "initialize(), and --no-apex is given; use --opt-level O1"),
        (["run", "--report", "none/x.json"], "--report 'none/x.json' cannot be written"),
        (["run", "--report", "out.pdf"], "--report 'out.pdf' must end in .html for a page, or in .json"),
        (["profile", "--json", "none/x.json"], "--json 'none/x.json' cannot be written"),
        (["run", "--device-type", "meta"], "--device-type 'meta'; give --dtype float16 or --dtype bfloat16, or choose"),
        *(([command, *SEARCH, "--tolerance", text], "--tolerance 0 or more")
          for command in ("tune", "bisect") for text in ("nan", "-1")),
        (["tune", *SEARCH, "--max-error", "nan"], "--max-error must be 0 or more"),
        (["tune", *SEARCH, "--seeds", "0"], "--seeds must be 1 or more"),
        (["tune", *SEARCH, "-o", "script.py"], "--output 'script.py' exists; move it away"),
        (["tune", *SEARCH, "-o", "none/list.toml"], "--output 'none/list.toml' cannot be written: give a file"),
        *((["tune", *SEARCH, f"--budget={text}"], f"--budget {text!r} is not a time")
          for text in ("", "0s", "soon", "-3s", "5d")),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_as_it_was_typed(
    argv: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.touch()
    assert message in refused(capsys, *argv, "script.py")


@pytest.mark.parametrize(
    "command", [["run"], ["profile"], ["tune", *SEARCH], ["bisect", *SEARCH], ["lists"], ["doctor"]]
)
def test_a_wrong_list_or_device_is_named_as_it_was_typed(
    command: list[str], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.touch()
    program = [] if command[0] in ("lists", "doctor") else ["script.py"]
    line = refused(capsys, *command, "--device-type", "toaster", *program)
    assert "--device-type 'toaster' is unknown to torch; choose 'cuda', " in line
    if command != ["lists"] and not torch.cuda.is_available():
        line = refused(capsys, *command, "--device-type", "cuda", *program)
        assert "--device-type 'cuda': there is no CUDA device here" in line
        assert "; choose --device-type 'cpu', or leave it out" in line
    option = "--set" if command == ["lists"] else "--lists"
    for name, message in (("x.toml", f"'{script.parent}/x.toml' cannot be read"), ("x", "list set 'x' is unknown")):
        if command != ["doctor"]:
            assert f"autoamp: {option}: {message}" in refused(capsys, *command, option, name, *program)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tune", *SEARCH, "missing.py"], "can't open file 'missing.py'"),
        (["run", "python", "my script.py", "5"],
         "can't open file 'python': No such file or directory; leave it out: autoamp run [options] 'my script.py' 5"),
        (["run", "torchrun", "script.py"], "use torchrun [its options] -m autoamp run [options] script.py"),
        (["script.py", "--lr", "1"], "'script.py' is no command; write: autoamp run script.py --lr 1"),
        (["python3.12", "-m", "program"], "'python3.12' is no command; write: autoamp run -m program"),
        (["-m", "program"], "'-m' is no command; write: autoamp run -m program"),
        (["replay", "a\0b"], "no capsule"),
        (["report", "none.json"], "'none.json' cannot be read as a report"),
        (["report", "none.json", "-o", "page.json"], "--output 'page.json' must end in .html"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(argv: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        (json.dumps({"format": 6}), b"", "has format 6 of capsules"),
        (json.dumps({"format": 8}), saved(TAPE), "is a damaged capsule"),
        (json.dumps({**FINDING, "versions": 3}), saved(TAPE), "is a damaged capsule"),
        (json.dumps(FINDING), b"", "cannot load"),
        (json.dumps(FINDING), b"text", "cannot load"),
        (json.dumps(FINDING), saved([1, 2]), "cannot load"),
        (json.dumps(FINDING), saved({**TAPE, "events": 3}), "cannot load"),
        (json.dumps(FINDING), saved({**TAPE, "named": [{"kind": "input"}, object]}), "cannot load"),
        (json.dumps(FINDING), saved({**TAPE, "half_dtype": torch.int8}), "cannot load"),
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


@pytest.mark.parametrize(
    ("before", "program", "behind", "told"),
    [
        ([], "", ["--dtype", "fp16", "--report=r.html", "--lr", "1"],
         "--dtype and --report stand behind script.py and went to it; options of autoamp come before the program"),
        ([], "", ["--no-apex"], "--no-apex stands behind script.py and went to it; options of autoamp come before the"),
        ([], "parser.add_argument('--dtype')", ["--dtype", "fp16"], None),
        ([], "loss_scale: str = 'dynamic'", ["--loss-scale=8"], None),
        (["--quiet"], "", ["--dtype", "fp16"], None),
        (["--opt-level", "O2"], "", [], "amp.initialize(), and script.py does not call that itself; leave the option"),
        (["--opt-level", "O2"], "# amp.initialize(model)", [], None),
        ([], "", ["run", "--lr", "--program", "x"], None),
    ],
)  # fmt: skip
def test_options_that_the_script_does_not_know_are_told_at_its_start(
    before: list[str], program: str, behind: list[str], told: str | None, script: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    script.write_text(program)
    monkeypatch.setattr("autoamp.cli.run.prepared_run", lambda chosen: 0)
    assert main(["run", *before, "script.py", *behind]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == (told is not None)
    assert (told or "") in err
