"""Which lists are found, in which order they are laid over each other, and bare names that torch lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoamp
from autoamp.core import CastPolicy, CastRule, CastTable, ModulePrecision, ModuleRule, RuleSource, located
from autoamp.errors import ListFileError
from tests.core.rules._shared import check_refused, load, policies, write

# -- where sets are found --


def printed(code: str, folder: Path, path: str, *arguments: str, **variables: str) -> str:
    """Return what Python prints for a program without installed packages, whose modules come from ``path``."""
    environ = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-S", "-c", code, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.parametrize("lists_at", ["lists", "autoamp/lists"])
def test_sets_are_found_in_a_checkout_and_when_installed(tmp_path: Path, lists_at: str) -> None:
    package = Path(autoamp.__file__).parent
    shutil.copytree(package / "core", tmp_path / "autoamp" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "errors.py", tmp_path / "autoamp")
    (tmp_path / "autoamp" / "__init__.py").touch()
    (tmp_path / "autoamp" / "core" / "__init__.py").write_text("")
    write(tmp_path / lists_at / "__init__.py", "", schema=False)
    write(tmp_path / lists_at / "default.toml", 'fp32 = ["softmax"]')
    write(tmp_path / lists_at / "mine.toml", "")
    code = (
        "from autoamp.core.loader import load_table, shipped_sets\ntable = load_table(environ={})\n"
        "print(shipped_sets(), table.rules[0].origin, len(table.rules))"
    )
    assert printed(code, tmp_path, str(tmp_path)) == "('default', 'mine') lists/default.toml:2 1\n"


def test_a_rule_of_a_shipped_set_is_located_where_its_line_is(place: Path) -> None:
    softmax = load({}).policy_of("softmax")
    assert softmax is not None
    path, _, line = located(softmax.origin).rpartition(":")
    assert '"softmax",' in Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    mine = load(str(write(place / "mine.toml", 'fp16 = ["softmax"]'))).policy_of("softmax")
    assert mine is not None
    assert located(mine.origin) == f"{place}/mine.toml:2"


def without_torch(folder: Path) -> str:
    """Return a folder from which ``autoamp.core`` is imported without each ``__init__``, which imports torch."""
    stub, package = folder / "stub" / "autoamp", Path(autoamp.__file__).parent
    for name in ("", "core"):
        (stub / name).mkdir(parents=True)
        path = [str(stub / name), str(package / name)]
        (stub / name / "__init__.py").write_text(f"__path__ = {path!r}", encoding="utf-8")
    return str(stub.parent)


def test_reading_a_list_imports_nothing_that_it_names(tmp_path: Path) -> None:
    write(tmp_path / "nosuch_pkg_a.py", "raise SystemExit(9)", schema=False)
    path = write(
        tmp_path / "x.toml", 'fp32 = ["nosuch_pkg_a.f", "xml.dom.minidom.parse"]\n[modules]\n"wave.Wave" = "fp32"'
    )
    code = (
        "import sys\nfrom autoamp.core import loader\nloader.load_table(environ={})\nbefore = set(sys.modules)\n"
        f"table = loader.load_table({str(path)!r}, environ={{}})\n"
        "print(sorted(set(sys.modules) - before - {'autoamp.lists'}), len(table.modules), 'torch' in before)"
    )
    assert printed(code, tmp_path, os.pathsep.join([without_torch(tmp_path), str(tmp_path)])) == "[] 1 False\n"


# -- sources and their order --


MINE = {"mine.toml": "none = ['gelu']"}


@pytest.mark.parametrize(
    ("files", "given", "sources"),
    [
        ({}, {}, "default"),
        ({}, {"base": "apex"}, "default apex"),
        ({}, {"lists": "apex", "base": "bf16"}, "default apex"),
        ({}, {"lists": ()}, "default"),
        (MINE, {"lists": "./mine.toml"}, "default mine.toml"),
        (MINE, {"lists": "mine.toml", "base": "apex"}, "default apex mine.toml"),
        # A name chooses the base, wherever it stands.
        (MINE, {"lists": ["mine.toml", "apex"]}, "default apex mine.toml"),
        (MINE, {"lists": "mine.toml", "environ": {"AUTOAMP_LISTS": "apex"}, "base": "x"}, "default apex mine.toml"),
        (
            {"autoamp.toml": "", **MINE},
            {"lists": {}, "environ": {"AUTOAMP_LISTS": os.pathsep.join(["apex", "mine.toml", ""])}},
            "default apex autoamp.toml mine.toml lists=",
        ),
        # What a list extends lies below all own rules, once.
        (
            {
                "common/common.toml": "extends = 'apex'",
                "mine.toml": "extends = ['common/common.toml', 'default']",
                "other.toml": "extends = 'apex'",
            },
            {"lists": ["mine.toml", "other.toml"]},
            "default apex common/common.toml mine.toml other.toml",
        ),
        ({}, {"lists": {"extends": []}}, "lists="),
        ({}, {"lists": CastTable()}, ""),
    ],
)
def test_sources_and_their_order(place: Path, files: dict[str, str], given: dict[str, Any], sources: str) -> None:
    for name, text in files.items():
        write(place / name, text)
    shipped = {"default": "lists/default.toml", "apex": "lists/apex.toml", "lists=": "lists="}
    table = load(**given)
    assert table.sources == tuple(shipped.get(name, str(place / name)) for name in sources.split())
    assert all(rule.origin.path in table.sources for rule in table.rules)


def test_later_sources_win(place: Path) -> None:
    write(place / "autoamp.toml", "none = ['relu', 'gelu', 'silu', 'linear', 'softmax']")
    env = write(place / "env.toml", "extends = './below.toml'\nfp32 = ['gelu', 'silu']")
    write(place / "below.toml", "fp16 = ['gelu', 'softmax', 'prelu']\nfp32 = ['linear', 'mypkg.f']")
    table = load({"fp16": ["silu"]}, environ={"AUTOAMP_LISTS": str(env)}, base="apex")
    found = policies(table)
    wanted = {
        "relu": "none", "gelu": "fp32", "silu": "fp16", "linear": "none", "softmax": "none", "prelu": "fp16",
        "mypkg.f": "fp32",
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert [rule.target for rule in table.rules].count("linear") == 1
    assert str(table.rules[-1].origin) == "lists="
    assert load(table) == table


def test_a_dotted_name_beats_a_bare_one_of_its_file_but_not_of_a_later_one(place: Path) -> None:
    first = write(place / "a.toml", "fp32 = ['torch.relu']\nnone = ['relu']")
    second = write(place / "b.toml", "fp16 = ['relu']")
    assert [rule.target for rule in load([first]).rules[-2:]] == ["relu", "torch.relu"]
    assert [rule.target for rule in load([first, second]).rules[-2:]] == ["torch.relu", "relu"]


def test_work_does_not_double_with_every_level_of_extends(place: Path) -> None:
    write(place / "z0.toml", "extends = 'default'")
    for depth in range(1, 25):
        below = f"'z{depth - 1}.toml'"
        write(place / f"z{depth}.toml", f"extends = [{below}, {below}]")
    # Otherwise it would read 16 million files.
    assert len(load("./z24.toml").sources) == 26


@pytest.mark.parametrize("kind", [str, Path, lambda path: [path], lambda path: ((path,),)])
def test_kinds_of_lists(place: Path, kind: Callable[[Path], object]) -> None:
    write(place / "mine.toml", "fp16 = ['gelu']")
    assert policies(load(kind(Path("mine.toml"))))["gelu"] == "fp16"


def test_a_mapping_is_a_list_and_is_not_changed(place: Path) -> None:
    given_lists = {"schema": 1, "extends": "apex", "fp16": ("gelu",), "banned": {"relu": "no"}}
    copy = {**given_lists, "banned": {"relu": "no"}}
    table = load(given_lists)
    assert table.policy_of("gelu") == CastRule("gelu", CastPolicy.FP16, RuleSource("lists=", None, False))
    assert table.policy_of("relu") == CastRule("relu", CastPolicy.BANNED, RuleSource("lists=", None, False), "no")
    assert table.sources == ("lists/default.toml", "lists/apex.toml", "lists=")
    assert given_lists == copy


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (3, ["3 (int)", "a mapping"]),
        (b"apex", ["(bytes)"]),
        (["default", 2.5], ["2.5 (float)"]),
        ({"apex"}, ["(set)"]),
        ("apx", ["'apx' is unknown", "'apex'", "'default'"]),
        ("default.tom", ["'default.tom' is unknown"]),
        ("gone.toml", ["gone.toml", "cannot be read"]),
        (".", ["'.' is unknown"]),
        ("./", ["cannot be read"]),
        ("nul\0/x.toml", ["cannot be read"]),
        (Path("gone"), ["gone", "cannot be read"]),
        ({"fp32": [None]}, ["None (NoneType)"]),
        ({1: []}, ["unknown key 1"]),
        ({"schema": 3}, ["schema=3"]),
        ({"modules": {3: "fp32"}}, ["modules 3", "(int)"]),
    ],
)
def test_a_wrong_argument(place: Path, lists: object, words: list[str]) -> None:
    check_refused(lists, "lists=", None, words)


def test_a_wrong_name_in_the_environment(place: Path) -> None:
    with pytest.raises(ListFileError, match=r"^AUTOAMP_LISTS: list set 'apxe' is unknown; did you mean 'apex'\?"):
        load(environ={"AUTOAMP_LISTS": "apxe"})
    with pytest.raises(ListFileError, match=r"^base=: list set 'fp8'"):
        load(base="fp8")
    with pytest.raises(ListFileError, match=r"^base=: './x.toml' is no name of a shipped set; give a file to lists="):
        load(base="./x.toml")


def test_a_broken_pyproject_of_somebody_else_is_not_ours(place: Path) -> None:
    path = write(place / "pyproject.toml", "[tool\n", schema=False)
    assert load() == load("default")
    write(path, "[tool.autoamp\n", schema=False)
    check_refused(None, path, 1, ["not valid TOML"])


def test_pyproject_has_lines_names_and_paths(place: Path) -> None:
    extra = write(place / "conf" / "extra.toml", "fp16 = ['gelu', 'silu']")
    path = write(place / "pyproject.toml", """
[tool.other]
fp32 = ["gelu"]
[tool.autoamp]
lists = ["apex", "conf/extra.toml"]
fp32 = [
  "silu",
]
[tool.autoamp.modules]
head = "fp32"
""", schema=False)  # fmt: skip
    deep = place / "x"
    deep.mkdir()
    table = load(start=deep)
    assert table.sources == ("lists/default.toml", "lists/apex.toml", str(extra), str(path))
    assert table.policy_of("silu") == CastRule("silu", CastPolicy.FP32, RuleSource(str(path), 7, False))
    assert table.modules == (ModuleRule("head", ModulePrecision.FP32, RuleSource(str(path), 10, False)),)
    for text, line, words in (
        ("[tool]\nautoamp = 3", 2, "must be a table; got 3"),
        ("[tool.autoamp]\nlists = [\n'apex',\n'conf/gone.toml']", 4, "cannot be read"),
        ("[tool.autoamp]\n\nfp32 = ['a b']", 3, "'a b'"),
    ):
        write(path, text, schema=False)
        check_refused(None, path, line, [words])


def test_two_lists_in_one_folder_are_an_error_that_names_both(place: Path) -> None:
    write(place / "autoamp.toml", "")
    write(place / "pyproject.toml", "[tool.autoamp]", schema=False)
    check_refused(None, place / "autoamp.toml", None, [str(place / "pyproject.toml"), 'extends = ["pyproject.toml"]'])


def test_a_list_that_extends_the_table_of_a_pyproject(place: Path) -> None:
    extra = write(place / "conf" / "extra.toml", "fp16 = ['silu']")
    text = "[tool.autoamp]\nlists = ['conf/extra.toml']\nfp32 = ['gelu', 'relu']"
    pyproject = write(place / "pyproject.toml", text, schema=False)
    lists = [write(place / "autoamp.toml", "extends = ['default', 'pyproject.toml']\nfp16 = ['gelu']")]
    (place / "x").mkdir()
    lists += [write(place / "x" / "tuned.toml", "extends = ['default', '../pyproject.toml']\nfp16 = ['gelu']")]
    for given, path in zip((None, lists[1]), lists, strict=True):
        table = load(given, start=place if given is None else Path("/"))
        assert table.sources == ("lists/default.toml", str(extra), str(pyproject), str(path))
        assert [policies(table)[op] for op in ("gelu", "relu", "silu")] == ["fp16", "fp32", "fp16"]
    write(pyproject, "[tool.ruff]", schema=False)
    check_refused(None, lists[0], 2, ["'pyproject.toml' has no table [tool.autoamp]"])


def test_a_folder_is_no_list_file(place: Path) -> None:
    folder = place / "special.toml"
    folder.mkdir()
    with pytest.raises(ListFileError, match=r"cannot be read \(.*Is a directory.*\); give the path of a list file"):
        load(folder)


def test_a_cycle_of_extends_shows_the_chain(place: Path) -> None:
    a, b, c = place / "a.toml", place / "b.toml", place / "sub" / "c.toml"
    write(a, "extends = ['b.toml']")
    write(b, "extends = ['default', 'sub/c.toml']")
    write(c, "\nextends = '../sub/../b.toml'")
    check_refused(a, c, 3, ["circular", f"{b} -> {c} -> {b}"])
    write(a, "extends = 'a.toml'")
    check_refused(a, a, 2, [f"{a} -> {a}"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_or_a_device_is_no_list_file(place: Path) -> None:
    pipe = place / "pipe.toml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ListFileError, match=r"is no regular file; give the path of a list file"):
            load(path)


@pytest.mark.parametrize("number", [1, 100])
def test_a_circle_and_a_long_chain_of_pyprojects_is_refused(place: Path, number: int) -> None:
    for one in range(number):
        folder = place / f"p{one}"
        folder.mkdir()
        text = f'[tool.autoamp]\nlists = ["../p{(one + 1) % number}/pyproject.toml"]\n'
        (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    problem = "circular" if number == 1 else "ends a chain of 50 lists by"
    with pytest.raises(ListFileError, match=f"{problem}.*(remove one of these entries|name some in one `lists`)"):
        load(place / "p0" / "pyproject.toml")


def test_a_long_chain_of_extends_is_refused(place: Path) -> None:
    for number in range(100):
        write(place / f"a{number}.toml", f"extends = 'a{number + 1}.toml'")
    write(place / "a100.toml", "extends = 'default'")
    with pytest.raises(ListFileError, match=r"'a50.toml' ends a chain of 50 lists by `extends`; name some in"):
        load(place / "a0.toml")
    assert load(place / "a60.toml").sources[0] == "lists/default.toml"
