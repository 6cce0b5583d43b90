"""Rooms and floors: who may import whom, and the rules that a room of the package keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoamp"
MAX_FUNCTION_LINES = 60

# A room imports only from floors strictly below its own. The fractions order the rooms within a floor of the design.
FLOORS: dict[float, tuple[str, ...]] = {
    0: ("device_scales", "errors", "events", "late_flags", "table", "tensors", "toml_lines", "torch_private"),
    0.5: ("likeness",),
    1: ("attaching", "cast_cache", "checks", "gradients", "module_tags", "patching", "replicas", "rules", "scaling"),
    2.0: ("casting", "masters", "ranks", "targets", "verdicts"),
    2.05: ("direct_calls", "pinned_layers", "scoping", "written"),
    2.07: ("cudnn_rnn", "native", "pinned_lstm"),
    2.1: ("autocast_regions", "counting", "drift", "model_casting", "policies", "rnn", "stepping"),
    2.15: ("modules", "unaware_closures"),
    2.2: ("backward_passes", "functions", "guarding", "installing"),
    2.25: ("pass_hooks",),
    2.3: ("auto_scaling",),
    3.0: ("handle", "no_op"),
    3.1: ("runtime",),
    4.0: ("fp16_optimizer", "levels", "normalization", "optimizers", "parallel"),
    4.1: ("fp16_utils",),
    5: ("diagnostics",),
    6: ("compat",),
    6.5: ("launching", "sources"),
    6.6: ("running",),
    6.7: ("probing",),
    7.0: ("cli",),
    7.1: ("__init__", "__main__", "child_main"),
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}

# What is imported by one room alone, so that there is one place to look when it changes.
SOLE_IMPORTERS = {"wrapt": "patching", "autoamp_kernels": "gradients"}

# These hold exports and a call of main(); what they export has its tests where it is made.
ROOMS_WITHOUT_TESTS = {"__init__", "__main__", "child_main"}


def room_of(path: Path) -> str:
    """Return the room that a file of the package belongs to: its own name, or that of its subpackage."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({room_of(path) for path in FILES})


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of everything that is imported, at the top of the module or within.

    ``from a.b import c`` yields ``a.b.c``: whether ``c`` is a module is for the caller to tell.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imported_room(name: str) -> str | None:
    """Return the room that a dotted name is imported from, or None where it is none of the package's code."""
    first, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    if first != "autoamp" or room == "lists":
        return None
    return room if room in FLOOR_OF or (PACKAGE / f"{room}.py").exists() or (PACKAGE / room).is_dir() else "__init__"


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines the statements of a function take, without its docstring and the functions within it."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
    nested = {line for node in inner for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(set(range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)) - nested)


def violations(room: str, source: str, package: str = "autoamp") -> list[str]:
    """Return what a source text of a room does against the rules, a line for each."""
    if room not in FLOOR_OF:
        return [f"{room} is on no floor; add it to FLOORS in {Path(__file__).name}"]
    found = []
    tree = ast.parse(source)
    for line, name in imported_modules(tree, package):
        other = imported_room(name)
        if other is not None and other != room and not FLOOR_OF.get(other, float("inf")) < FLOOR_OF[room]:
            found.append(f"{room}:{line} imports {other}, which is not on a floor below")
        keeper = SOLE_IMPORTERS.get(name.partition(".")[0], room)
        if keeper != room:
            found.append(f"{room}:{line} imports {name}, which {keeper} alone may")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"{room}:{node.lineno} prints; use a logger")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and lines_of(node) > MAX_FUNCTION_LINES:
            found.append(
                f"{room}:{node.lineno} {node.name} has {lines_of(node)} lines; {MAX_FUNCTION_LINES} are allowed"
            )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_keeps_the_rules(path: Path) -> None:
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    assert violations(room_of(path), path.read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ROOMS_WITHOUT_TESTS])
def test_room_has_its_tests(room: str) -> None:
    tests = ROOT / "tests"
    assert (tests / f"test_{room}.py").is_file() or list((tests / room).glob("test_*.py"))


def test_the_rooms_were_found() -> None:
    assert {"errors", "rules", "patching", "casting", "handle", "__init__"} <= set(ROOMS)


def test_each_room_is_on_one_floor() -> None:
    assert len(FLOOR_OF) == sum(len(rooms) for rooms in FLOORS.values())


# -- the checker itself --


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("errors", "from autoamp.tensors import iter_tensors"),  # same floor
        ("casting", "from autoamp.policies import build"),  # a later part of the same floor
        ("rules", "import autoamp.handle"),
        ("rules", "import autoamp"),
        ("rules", "from autoamp import init"),
        ("rules", "from autoamp import handle as anything"),
        ("rules", "from . import handle"),
        ("rules", "from .handle import Handle"),
        ("rules", "def late():\n    from autoamp.handle import Handle\n    return Handle"),
        ("rules", "if TYPE_CHECKING:\n    from autoamp.handle import Handle"),
        ("handle", "from autoamp.diagnostics.report import Report"),
        ("casting", "import wrapt"),
        ("casting", "from wrapt import FunctionWrapper"),
        ("handle", "import autoamp_kernels.foreach"),
        ("errors", "print('hello')"),
        ("errors", "def talk():\n    print()"),
        ("errors", "def long():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)),
        ("no_such_room", ""),
    ],
)
def test_checker_catches(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


@pytest.mark.parametrize("source", ["from ..handle import Handle", "from .. import handle"])
def test_checker_resolves_relative_imports_of_a_subpackage(source: str) -> None:
    assert violations("optimizers", source, "autoamp.optimizers") == []
    assert violations("optimizers", source.replace("handle", "diagnostics"), "autoamp.optimizers") != []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("patching", "import wrapt"),
        ("gradients", "import autoamp_kernels"),
        ("rules", "import importlib.resources\nfrom autoamp.errors import ListFileError"),
        ("rules", "import autoamp.lists"),
        ("rnn", "from autoamp.casting import Casts"),
        ("handle", "from autoamp import errors, scaling"),
        ("__init__", "from autoamp.handle import Handle"),
        ("compat", "from autoamp.compat.apex import amp"),
        ("errors", "import logging\nlogging.getLogger('autoamp').info('print(1)')"),
        ("errors", "def long():\n    '''What it does.'''\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    ],
)
def test_checker_lets_pass(room: str, source: str) -> None:
    assert violations(room, source) == []
