"""Whether a program's source sets mixed precision up itself."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from autoamp.cli.sources import Sources, setup_call_of


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("from apex import amp\namp.initialize(model)", "amp.initialize"),
        ("import apex\ndef f(x):\n    return apex.amp.initialize(x)", "amp.initialize"),
        ("if fp16:\n    from apex.amp import initialize\n    initialize(model)", "amp.initialize"),
        ("from apex.amp import initialize as begin\nbegin(model)", "amp.initialize"),
        ("import apex.amp as mixed\nmixed.init()", "amp.init"),
        ("from apex import amp as mixed\nmixed.initialize()", "amp.initialize"),
        ("from apex import amp\nhandle = amp.init(enabled=fp16)", "amp.init"),
        ("import autoamp\nautoamp.init()", "autoamp.init"),
        ("import autoamp as amp\namp.initialize(model)", "autoamp.initialize"),
        ("import autoamp as a\na.initialize(model)", "autoamp.initialize"),
        ("# apex\nself.amp.initialize(model)", "amp.initialize"),
        # None of these sets anything up.
        ("from apex.parallel import SyncBatchNorm\nnn.init.zeros_(x)\nmodel.initialize()", None),
        ("from apex import amp\nwith amp.scale_loss(loss, optimizer) as scaled:\n    pass", None),
        ("# from apex import amp\n# amp.initialize(model)", None),
        ("import torch\ntorch.cuda.amp.initialize()", None),
        ("apex apex", None),
        ("", None),
    ],
)
def test_setup_calls_are_found(source: str, call: str | None) -> None:
    assert setup_call_of(source, "cpu") == call


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nwith torch.autocast('cpu', torch.float16):\n    pass", True),
        ("with torch.autocast(device_type='cpu'):\n    pass", True),
        ("with torch.autocast(device, enabled=use_amp):\n    pass", True),
        ("from torch import autocast\n@autocast('cpu')\ndef f(x):\n    pass", True),
        ("from torch.amp import autocast as mixed\nwith mixed('cpu:0'):\n    pass", True),
        ("with torch.cpu.amp.autocast():\n    pass", True),
        ("with accelerator.autocast():\n    pass", True),
        ("from helpers import autocast\nwith autocast():\n    pass", True),
        # Of another device, or off.
        ("with torch.autocast('cuda', torch.float16):\n    pass", False),
        ("with torch.cuda.amp.autocast():\n    pass", False),
        ("from torch.cuda.amp import autocast, GradScaler\nwith autocast():\n    pass", False),
        ("from torch.cuda import amp\nwith amp.autocast():\n    pass", False),
        ("import torch.cuda.amp as amp\nwith amp.autocast():\n    pass", False),
        ("with torch.autocast('cpu', enabled=False):\n    pass", False),
        ("with torch.cpu.amp.autocast(False):\n    pass", False),
        ("# with torch.autocast('cpu'):", False),
        ("autocast = torch.autocast", False),
    ],
)
def test_regions_are_found_that_may_be_enabled_on_the_device(source: str, found: bool) -> None:
    assert setup_call_of(source, "cpu") == ("torch.autocast" if found else None)


CALLS = "import sys\ndef f(model):\n    from apex import amp\n    amp.initialize(model)\n"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules of the test run be none of the program's."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and "site-packages" not in file and "autoamp" not in name:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("folder", "call"), [("", "amp.initialize"), ("lib/site-packages", None)])
def test_modules_of_the_program_are_read_and_installed_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, call: str | None
) -> None:
    assert Sources("cpu").setup_call() is None
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "one_of_the_program.py").write_text(CALLS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(place))
    importlib.import_module("one_of_the_program")
    try:
        assert Sources("cpu").setup_call() == call
    finally:
        del sys.modules["one_of_the_program"]


@pytest.mark.usefixtures("alone")
def test_modules_in_archives_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("one_in_an_archive.py", CALLS)
    monkeypatch.syspath_prepend(str(tmp_path / "all.zip"))
    importlib.import_module("one_in_an_archive")
    try:
        assert Sources("cpu").setup_call() == "amp.initialize"
    finally:
        del sys.modules["one_in_an_archive"]


@pytest.mark.usefixtures("alone")
def test_modules_that_are_imported_later_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = Sources("cpu")
    assert sources.setup_call() is None
    (tmp_path / "one_that_comes_late.py").write_text("import torch\nREGION = torch.autocast('cpu')\n", encoding="utf-8")
    importlib.import_module("one_that_comes_late")
    try:
        assert sources.setup_call() == "torch.autocast"
        # Each is read once.
        assert sources.setup_call() is None
    finally:
        del sys.modules["one_that_comes_late"]
