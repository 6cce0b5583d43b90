"""The three floors: who may import whom, and the rules that each file of the package keeps."""

from __future__ import annotations

import ast
import graphlib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoamp.tools.call_sites import SCALING_FILES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autoamp"
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450
# Tokens that are no code.
IDLE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
# The core is to be held in the head.
MAX_CORE_FILES = 32
MAX_METHODS, MAX_ATTRIBUTES = 25, 15
# Larger ones. What users call is one class, and private names of torch are data.
LARGE = {"BaseHandle in core/handle.py"}

# Files beside the floors that all use; they use each other alone.
COMMON = ("errors", "half_units", "kernels", "moved", "tensors", "torch_private")
# Whom a floor may import, beside these files: what runs in every program knows nobody above it, and the legacy family
# and what looks on know each other not at all.
LAW: dict[str, tuple[str, ...]] = {
    "core": (),
    "apex": ("core",),
    "tools": ("core",),
    "cli": ("core", "apex", "tools"),
    "exports": ("core", "apex", "tools", "cli"),
    "__init__": ("core", "apex", "tools", "cli", "exports"),
    "__main__": ("core", "apex", "tools", "cli", "exports"),
}

# What is imported by one package alone, so that there is one place to look when it changes.
SOLE_IMPORTERS = {"wrapt": "core", "autoamp_kernels": "kernels"}

# Private names of torch's that some files here have as well.
OF_TORCH = (torch, torch.nn.modules.batchnorm, torch.Tensor, torch.nn.LSTM(1, 1), torch.autocast("cpu"))

# By these names objects are the package's own, whose types are known.
TYPED_PACKAGES = ("core", "tools")
TYPED_NAMES = re.compile("_?(handle|runtime|run|guard|watch|owner|registry)")

FILES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in FILES}


def package_of(path: Path) -> str:
    """Return the package on a floor that a file belongs to, or the name of a file that stands on one itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Yield the line, the module and the name of all that is imported, at the top of a file or within.

    The name is None for ``import module``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, "." * node.level + (node.module or ""), alias.name) for alias in node.names)


def exported(module: str) -> set[str] | None:
    """Return what the ``__init__`` of a package exports, by ``__all__`` or as ``import name as name``.

    None where the module is a file of a package.
    """
    file = ROOT.joinpath(*module.split("."), "__init__.py")
    if not file.is_file():
        return None
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.asname == alias.name)
    return names


def violations_of_imports(package: str, source: str) -> list[str]:
    """Return the imports of a source text that its package may not have, a line for each."""
    found = []
    for line, module, name in imports(ast.parse(source)):
        where = f"{package}:{line}"
        if module.startswith("."):
            found.append(f"{where} imports {module}; name the package in full")
            continue
        keeper = SOLE_IMPORTERS.get(module.partition(".")[0], package)
        if keeper != package:
            found.append(f"{where} imports {module}, which {keeper} alone may")
        parts = module.split(".")
        if parts[0] != "autoamp" or parts[1:2] == ["lists"]:
            continue
        other = parts[1] if len(parts) > 1 else name if name in {*LAW, *COMMON} else "__init__"
        if other == package or other in COMMON:
            continue
        if other not in LAW.get(package, ()):
            found.append(f"{where} imports {other}, which {package} may not know")
        elif other == "core" and len(parts) > 2:
            found.append(f"{where} imports {module}, a file of the core; import from autoamp.core")
        elif module == "autoamp.core" and name not in {None, *(exported(module) or ())}:
            found.append(f"{where} imports {name}, which {module} does not export")
    return found


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines the statements of a function take, without its docstring and the functions within it."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
    nested = {line for node in inner for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(set(range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)) - nested)


def violations_of_style(source: str) -> list[str]:
    """Return the functions of a source text that are too long, and its prints."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"line {node.lineno} prints; use a logger")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and lines_of(node) > MAX_FUNCTION_LINES:
            found.append(f"{node.name} has {lines_of(node)} lines; {MAX_FUNCTION_LINES} are allowed")
    return found


def code_lines(source: str) -> int:
    """Return how many lines of a source text have code: not the blank ones, comments and docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IDLE and token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def violations_of_size(name: str, source: str) -> list[str]:
    """Return the file itself if it is too long, and the classes with too many methods or attributes."""
    found = [name] if code_lines(source) > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(sub, ast.FunctionDef) for sub in node.body)
            stored = {sub.attr for sub in ast.walk(node) if isinstance(sub, ast.Attribute)
                      and isinstance(sub.ctx, ast.Store) and ast.unparse(sub.value) == "self"}  # fmt: skip
            if methods > MAX_METHODS or len(stored) > MAX_ATTRIBUTES:
                found.append(f"{node.name} in {name}")
    return found


def private_names(source: str) -> tuple[set[str], dict[str, int]]:
    """Return the private names that a source text gives to what it defines, and those that it reads of objects."""
    given, read = set(), {}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name, value=owner, ctx=context) if is_private(name):
                if isinstance(context, ast.Store) or (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    given.add(name)
                else:
                    read.setdefault(name, node.lineno)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                given.add(name)
            case ast.Constant(value=str(name)):
                # In `__slots__`.
                given.add(name)
    return {name for name in given if is_private(name)}, read


def untyped_owners(source: str) -> list[str]:
    """Return the parameters and attributes of a source text that have one of `TYPED_NAMES`, and are `Any`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.arg(arg=name, annotation=ast.Name(id="Any"))
                | ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="Any"))
                | ast.AnnAssign(target=ast.Attribute(attr=name), annotation=ast.Name(id="Any"))
            ) if TYPED_NAMES.fullmatch(name):
                found.append(f"line {node.lineno}: {name}")
    return found


def is_private(name: str) -> bool:
    """Whether a name is for the file alone that defines it."""
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_keeps_the_rules(path: Path) -> None:
    assert package_of(path) in {*LAW, *COMMON}, f"{package_of(path)} is on no floor"
    assert violations_of_imports(package_of(path), TEXTS[path]) == []
    assert violations_of_style(TEXTS[path]) == []


def module_of(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def without_types(tree: ast.Module) -> ast.Module:
    """Return a tree without what is imported for type checkers alone."""
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


@pytest.mark.parametrize("package", ["core", "apex", "tools", "cli"])
def test_no_circles_inside(package: str) -> None:
    modules = {module_of(path): path for path in FILES if package_of(path) == package}
    needs: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for _, module, imported in imports(without_types(ast.parse(TEXTS[path]))):
            whole = f"{module}.{imported}"
            needs[name] |= {whole if whole in modules else module} & modules.keys() - {name}
    # Raises CycleError, with the circle.
    assert len(list(graphlib.TopologicalSorter(needs).static_order())) >= len(needs)


def test_files_and_classes_are_small() -> None:
    found = [large for path in FILES for large in violations_of_size(str(path.relative_to(PACKAGE)), TEXTS[path])]
    assert set(found) == LARGE
    assert sum(package_of(path) == "core" for path in FILES) <= MAX_CORE_FILES


def test_nobody_reads_a_private_name_of_another_file() -> None:
    torchs = {name for value in OF_TORCH for name in dir(value)}
    # Apex has private names too, which programs read.
    ours = [path for path in FILES if not path.is_relative_to(PACKAGE / "apex" / "amp")]
    names = {path: private_names(TEXTS[path]) for path in ours}
    found = []
    for path, (own, read) in names.items():
        others = set().union(*(given for other, (given, _) in names.items() if other != path)) - own - torchs
        found += [f"{path.relative_to(PACKAGE)}:{line} {name}" for name, line in read.items() if name in others]
    assert found == []


@pytest.mark.parametrize("package", TYPED_PACKAGES)
def test_owners_are_typed(package: str) -> None:
    paths = [path for path in FILES if package_of(path) == package]
    assert [f"{path.relative_to(PACKAGE)} {one}" for path in paths for one in untyped_owners(TEXTS[path])] == []


# -- the checks themselves --


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("core", "import autoamp.tools"),
        ("core", "from autoamp import tools"),
        ("core", "from autoamp.apex import alias"),
        ("core", "def f():\n    from autoamp.cli import main"),
        ("core", "import autoamp"),
        ("core", "from autoamp import init"),
        ("apex", "from autoamp.tools import Counts"),
        ("tools", "from autoamp.apex.levels import LEVELS"),
        ("tools", "from autoamp.core.loader import load_table"),
        ("tools", "from autoamp.core import no_such_name"),
        ("tools", "from ..core import load_table"),
        ("tensors", "from autoamp.core import CastState"),
        ("tools", "import wrapt"),
        ("core", "from autoamp_kernels import adamw"),
    ],
)
def test_an_import_that_may_not_be_is_found(package: str, source: str) -> None:
    assert len(violations_of_imports(package, source)) == 1


def test_long_functions_and_prints_are_found() -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES + 1)
    assert violations_of_style(f"def f():\n{body}") == [f"f has {MAX_FUNCTION_LINES + 1} lines; 60 are allowed"]
    assert violations_of_style("print(1)") == ["line 1 prints; use a logger"]
    assert violations_of_style(f'def f():\n    """{body}"""\n    return 1') == []


def test_large_files_and_classes_are_found() -> None:
    methods = "".join(f"    def f{number}(self): self.a{number % 16} = 1\n" for number in range(16))
    assert violations_of_size("x.py", f"class A:\n{methods}") == ["A in x.py"]
    assert violations_of_size("x.py", "x = 1\n" * (MAX_FILE_LINES + 1)) == ["x.py"]
    assert violations_of_size("x.py", "# no code\n\n" * (MAX_FILE_LINES + 1)) == []
    assert violations_of_size("x.py", "class A:\n    def f(self): self.a = 1") == []


@pytest.mark.parametrize("source", ["def f(handle: Any): ...", "class A:\n    run: Any", "self._guard: Any = None"])
def test_an_owner_of_any_type_is_found(source: str) -> None:
    assert len(untyped_owners(source)) == 1
    assert untyped_owners(source.replace("Any", "Handle")) == []


def test_private_names_are_found() -> None:
    given, read = private_names("class A:\n    _x = 1\n    def f(self, other):\n        return other._y, self._z")
    assert (given, read) == ({"_x", "_z"}, {"_y": 4})


def test_names_of_files_in_the_code_are_names_of_files() -> None:
    """What tells frames apart by their file goes quiet when a file is renamed."""
    missing = [name for name in SCALING_FILES.split() if not (PACKAGE / "core" / f"{name}.py").is_file()]
    assert missing == []
