"""State of the process: which modules have some; who patches torch, registers its global hooks, and looks on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from autoamp.core import Listener
from tests.architecture.test_floors import FILES, PACKAGE, TEXTS

# What a process has once, with the reason why no object that comes and goes can own it.
STATE = {
    "apex/amp/_amp_state.py _amp_state": "programs read and write it, one object of the module in Apex",
    "apex/fastai1/shims.py _shims": "the patches of fastai's modules, which a process imports once",
    "apex/fastai1/training.py _training": "the patches of fastai's training loop, which a process imports once",
    "apex/fastai1/training.py _imports": "waits for that import",
    "core/patches.py _waiting": "wrapt's import hooks cannot be taken back, so a module gets one for all handles",
    "core/patches.py writing": "patches are written to objects that all threads share",
    "core/api.py handles": "a process has one torch, so one handle patches it",
    "core/api.py activated": "packages above hear of handles that are not made yet",
    "core/handle.py suspended": "as activated",
    "core/ranks.py _made": "a process group is a collective to make, and lives as long as the process",
    "core/block.py open_blocks": "optimizers of all handles, and those of none, ask whether a block is open",
    "core/attach.py _links": "a half parameter outlives the handle that gave it a master",
    "core/masters.py all_masters": "a backward pass may reach half parameters of any handle, and those of none",
    "torch_private.py ASKED": "filled while the module is imported, and read by the tests",
    "torch_private.py MISSING": "as ASKED",
    "torch_private.py mkldnn": "stands for a module of torch; it has no state",
}
_IMMUTABLE = {"MultiTensorApply", "ParamSpec", "Rule", "TypeVar", "_Unnamed"}

# Who patches, and what.
PATCHES = {
    "core/patched_torch.py": "by the lists",
    "core/patch_sites.py": "beside the lists: one table of sites",
    "core/patches.py": "the one function of torch that is heard without a handle too",
    "apex/fastai1": "modules of fastai v1, and nothing of torch",
}


def states(source: str) -> Iterator[str]:
    """Yield the names of a module that may change: empty containers, and instances of classes."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
            called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
            is_empty = isinstance(value, ast.List | ast.Dict) and ast.unparse(value) in ("[]", "{}")
            if is_empty or (re.match("_?[A-Z]+[a-z]", called) and called not in _IMMUTABLE):
                yield ast.unparse(target)


def writes_to_torch(source: str) -> Iterator[str]:
    """Yield the statements that assign to an attribute of torch, or to one of what is imported from torch."""
    tree, names = ast.parse(source), {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("torch.")}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target).partition(".")[0] in names:
                yield f"line {target.lineno}: {ast.unparse(target)}"
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
        if is_call and ast.unparse(node.args[0]).partition(".")[0] in names:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_each_state_of_a_module_has_its_reason() -> None:
    # The lists of the tree `apex` are what programs change, as in Apex.
    ours = [path for path in FILES if not path.is_relative_to(PACKAGE / "apex" / "amp" / "lists")]
    assert {f"{path.relative_to(PACKAGE)} {name}" for path in ours for name in states(TEXTS[path])} == set(STATE)


def test_no_function_writes_to_a_global_name() -> None:
    assert [path.name for path in FILES if re.search(r"^\s+global ", TEXTS[path], re.MULTILINE)] == []


def test_only_patching_writes_to_torch() -> None:
    found = {str(path.relative_to(PACKAGE)): list(writes_to_torch(TEXTS[path])) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_only_two_files_register_global_hooks() -> None:
    registers = re.compile(r"\bregister_(optimizer_step|module)_\w+")
    found = {str(path.relative_to(PACKAGE)) for path in FILES if registers.search(TEXTS[path])}
    assert found == {"core/patches.py", "core/patch_sites.py"}


def test_each_set_of_patches_has_its_reason() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in FILES if re.search(r"\bPatchSet\(", TEXTS[path])}
    assert {next((one for one in PATCHES if path.startswith(one)), path) for path in found} == set(PATCHES)


def listener_methods() -> dict[str, set[str]]:
    """Return the methods of each class that names `Listener` as a base."""
    classes = [node for path in FILES for node in ast.walk(ast.parse(TEXTS[path])) if isinstance(node, ast.ClassDef)]
    return {
        node.name: {sub.name for sub in node.body if isinstance(sub, ast.FunctionDef)}
        for node in classes
        if any(ast.unparse(base) == "Listener" for base in node.bases)
    }


def test_each_event_of_listeners_is_heard_by_a_tool_and_no_part_of_the_core_is_one() -> None:
    events = {name for name in vars(Listener) if not name.startswith("_")}
    assert len(events) <= 12
    assert events - set().union(*listener_methods().values()) == set()
    core = [path for path in FILES if path.is_relative_to(PACKAGE / "core")]
    assert [path.name for path in core if "(Listener)" in TEXTS[path]] == []


# -- the checks themselves --


@pytest.mark.parametrize("source", ["x = []", "x: dict[str, int] = {}", "x = _State()", "x = threading.RLock()"])
def test_state_is_found(source: str) -> None:
    assert list(states(source)) == ["x"]


@pytest.mark.parametrize("source", ["x = ()", "x = {'a': 1}", "x = frozenset()", "x = TypeVar('x')", "x = f()"])
def test_a_constant_is_no_state(source: str) -> None:
    assert list(states(source)) == []


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.mm = 1", "from torch import nn\nnn.Module.f = 1", "import torch.nn as n\nsetattr(n, 'a', 1)"],
)
def test_a_write_to_torch_is_found(source: str) -> None:
    assert len(list(writes_to_torch(source))) == 1
