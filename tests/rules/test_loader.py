"""Which lists are found, in which order they are laid over each other, and bare names that torch lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autoamp
from autoamp.errors import ListFileError
from autoamp.rules import loader
from autoamp.rules.loader import check_bare_names, load_table, located
from autoamp.rules.table import CastPolicy, CastRule, CastTable, ModulePrecision, ModuleRule, Origin
from tests.rules._shared import load, policies, write

# -- where sets are found --


@pytest.mark.parametrize("lists_at", ["lists", "autoamp/lists"])
def test_sets_are_found_in_a_checkout_and_when_installed(tmp_path: Path, lists_at: str) -> None:
    package = Path(autoamp.__file__).parent
    shutil.copytree(package / "rules", tmp_path / "autoamp" / "rules", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "errors.py", tmp_path / "autoamp")
    (tmp_path / "autoamp" / "__init__.py").touch()
    write(tmp_path / lists_at / "__init__.py", "", schema=False)
    write(tmp_path / lists_at / "default.toml", 'fp32 = ["softmax"]')
    write(tmp_path / lists_at / "mine.toml", "")
    code = (
        "from autoamp.rules import load_table, shipped_sets\ntable = load_table(environ={})\n"
        "print(shipped_sets(), table.rules[0].origin, len(table.rules))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[0] == "('default', 'mine') lists/default.toml:2 1"


def test_a_rule_of_a_shipped_set_is_located_where_its_line_is(tmp_path: Path) -> None:
    softmax = load({}).policy_of("softmax")
    assert softmax is not None
    path, _, line = located(softmax.origin).rpartition(":")
    assert '"softmax",' in Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    mine = load(str(write(tmp_path / "mine.toml", 'fp16 = ["softmax"]'))).policy_of("softmax")
    assert mine is not None
    assert located(mine.origin) == f"{tmp_path}/mine.toml:2"


@pytest.mark.parametrize(("name", "line"), [("autoamp.toml", ""), ("pyproject.toml", "[tool.autoamp]\n")])
def test_a_rule_of_the_project_is_the_users(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / name).write_text(f'{line}schema = 1\nfp16 = ["softmax"]', encoding="utf-8")
    rule = load_table(start=tmp_path, environ={}).policy_of("softmax")
    assert rule is not None
    assert not rule.origin.shipped


def without_torch(folder: Path) -> str:
    """Return a folder from which ``autoamp`` is imported without its ``__init__``, which imports torch."""
    stub = folder / "stub" / "autoamp"
    stub.mkdir(parents=True)
    stub.joinpath("__init__.py").write_text(f"__path__ = [{str(Path(autoamp.__file__).parent)!r}]", encoding="utf-8")
    return str(stub.parent)


def test_reading_a_list_imports_nothing_that_it_names(tmp_path: Path) -> None:
    write(tmp_path / "nosuch_pkg_a.py", "raise SystemExit(9)", schema=False)
    path = write(
        tmp_path / "x.toml", 'fp32 = ["nosuch_pkg_a.f", "xml.dom.minidom.parse"]\n[modules]\n"wave.Wave" = "fp32"'
    )
    code = (
        "import sys\nfrom autoamp import rules\nrules.load_table(environ={})\nbefore = set(sys.modules)\n"
        f"table = rules.load_table({str(path)!r}, environ={{}})\n"
        "print(sorted(set(sys.modules) - before - {'autoamp.lists'}), len(table.modules), 'torch' in before)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([without_torch(tmp_path), str(tmp_path)])}
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[] 1 False\n"


# -- sources and their order --


def test_with_no_source_the_base_is_the_table(place: Path) -> None:
    assert load() == load("default")
    assert load(base="bf16") == load("bf16")
    assert load().sources == ("lists/default.toml",)


def test_a_file_edits_the_base(place: Path) -> None:
    path = write(place / "mine.toml", "fp32 = ['linear']\nnone = ['softmax', 'mypkg.f']")
    table = load(path, base="apex")
    assert table.sources == ("lists/default.toml", "lists/apex.toml", str(path))
    assert policies(table)["linear"] == "fp32"
    assert policies(table)["softmax"] == policies(table)["mypkg.f"] == "none"
    assert policies(table)["gelu"] == "fp32"
    assert len([rule for rule in table.rules if rule.target == "linear"]) == 1
    assert table.rules[-3:] == tuple(rule for rule in table.rules if rule.origin.path == str(path))


def test_a_dotted_name_beats_a_bare_one_of_its_file_but_not_of_a_later_one(place: Path) -> None:
    first = write(place / "a.toml", "fp32 = ['torch.relu']\nnone = ['relu']")
    second = write(place / "b.toml", "fp16 = ['relu']")
    assert [rule.target for rule in load([first]).rules[-2:]] == ["relu", "torch.relu"]
    assert [rule.target for rule in load([first, second]).rules[-2:]] == ["torch.relu", "relu"]


def test_extends_are_bases_below_every_own_rule_each_once(place: Path) -> None:
    common = write(place / "common" / "common.toml", "extends = 'apex'\nfp16 = ['gelu', 'relu']")
    mine = write(place / "mine.toml", "extends = ['common/common.toml', 'default']\nnone = ['relu']")
    other = write(place / "other.toml", "fp32 = ['linear']\nextends = 'bf16'")
    table = load([mine, other])
    assert table.sources == (
        "lists/default.toml", "lists/apex.toml", str(common), "lists/bf16.toml", str(mine), str(other),
    )  # fmt: skip
    found = policies(table)
    assert (found["gelu"], found["relu"], found["linear"], found["sum"]) == ("fp16", "none", "fp32", "none")


def test_work_does_not_double_with_every_level_of_extends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place / "z0.toml", "extends = 'default'")
    for depth in range(1, 10):
        below = f"'z{depth - 1}.toml'"
        write(place / f"z{depth}.toml", f"extends = [{below}, {below}]")
    reads: list[bytes] = []
    parse = loader.parse_toml
    monkeypatch.setattr(loader, "parse_toml", lambda raw: reads.append(raw) or parse(raw))
    assert len(load("./z9.toml").sources) == 11
    assert len(reads) < 25


def test_names_choose_the_base_wherever_they_stand(place: Path) -> None:
    mine = write(place / "mine.toml", "none = ['gelu']")
    assert load([mine, "apex"]).sources == ("lists/default.toml", "lists/apex.toml", str(mine))
    assert load(mine, environ={"AUTOAMP_LISTS": "bf16"}, base="apex").sources[:2] == (
        "lists/default.toml",
        "lists/bf16.toml",
    )


def test_no_base_where_none_is_wanted(place: Path) -> None:
    assert load({"extends": []}).rules == ()
    assert load(CastTable()) == CastTable()
    table = load({"extends": [], "fp32": ["softmax"], "modules": {"head": "fp32"}})
    assert load(table) == table


def test_sources_come_in_order_the_later_over_the_earlier(place: Path) -> None:
    write(place / "autoamp.toml", "none = ['relu', 'gelu', 'silu']")
    env = write(place / "env.toml", "fp32 = ['gelu', 'silu']")
    table = load({"fp16": ["silu"]}, environ={"AUTOAMP_LISTS": os.pathsep.join(["apex", str(env), ""])})
    assert table.sources == (
        "lists/default.toml", "lists/apex.toml", str(place / "autoamp.toml"), str(env), "lists=",
    )  # fmt: skip
    found = policies(table)
    assert (found["relu"], found["gelu"], found["silu"]) == ("none", "fp32", "fp16")
    assert str(table.rules[-1].origin) == "lists="


def test_os_environ_is_the_default_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOAMP_LISTS", "apex")
    assert load_table() == load("apex")
    monkeypatch.delenv("AUTOAMP_LISTS")
    assert load_table() == load("default")


@pytest.mark.parametrize("kind", [str, Path, lambda path: [path], lambda path: ((path,),)])
def test_kinds_of_lists(place: Path, kind: Callable[[Path], object]) -> None:
    write(place / "mine.toml", "fp16 = ['gelu']")
    assert policies(load(kind(Path("mine.toml"))))["gelu"] == "fp16"


def test_a_mapping_is_a_list_and_is_not_changed(place: Path) -> None:
    given_lists = {"schema": 1, "extends": "apex", "fp16": ("gelu",), "banned": {"relu": "no"}}
    copy = {**given_lists, "banned": {"relu": "no"}}
    table = load(given_lists)
    assert table.policy_of("gelu") == CastRule("gelu", CastPolicy.FP16, Origin("lists=", None, False))
    assert table.policy_of("relu") == CastRule("relu", CastPolicy.BANNED, Origin("lists=", None, False), "no")
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
        ({"fp32": "softmax"}, ["fp32 must be an array of strings"]),
        ({"fp32": [None]}, ["None (NoneType)"]),
        ({1: []}, ["unknown key 1"]),
        ({"schema": 3}, ["schema=3"]),
        ({"modules": {3: "fp32"}}, ["modules 3", "(int)"]),
        ({"fp16": ["gelu"], "fp32": ["gelu"]}, ["'gelu'", "fp16", "fp32"]),
    ],
)
def test_a_wrong_argument(place: Path, lists: object, words: list[str]) -> None:
    with pytest.raises(ListFileError) as caught:
        load(lists)
    assert (caught.value.path, caught.value.line) == ("lists=", None)
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_name_in_the_environment(place: Path) -> None:
    with pytest.raises(ListFileError, match=r"^AUTOAMP_LISTS: list set 'apxe' is unknown; did you mean 'apex'\?"):
        load(environ={"AUTOAMP_LISTS": "apxe"})
    with pytest.raises(ListFileError, match=r"^base=: list set 'fp8'"):
        load(base="fp8")


def test_the_nearest_folder_that_has_a_list_is_used(place: Path) -> None:
    write(place / "autoamp.toml", "fp16 = ['relu']")
    inner = place / "a" / "b" / "c"
    inner.mkdir(parents=True)
    assert policies(load(start=inner))["relu"] == "fp16"
    write(place / "a" / "pyproject.toml", "[project]\nname = 'autoamp-user'\n[tool.ruff]\n", schema=False)
    assert policies(load(start=inner))["relu"] == "fp16"
    write(place / "a" / "b" / "pyproject.toml", "[tool.autoamp]\nfp32 = ['gelu']", schema=False)
    found = policies(load(start=inner))
    assert (found["relu"], found["gelu"]) == ("none", "fp32")
    assert policies(load(start=Path("a/b/c"))) == found
    assert policies(load(start=place))["gelu"] == "none"


def test_a_broken_pyproject_of_somebody_else_is_not_ours(place: Path) -> None:
    path = write(place / "pyproject.toml", "[tool\n", schema=False)
    assert load() == load("default")
    write(path, "[tool.autoamp\n", schema=False)
    with pytest.raises(ListFileError, match="not valid TOML") as caught:
        load()
    assert (caught.value.path, caught.value.line) == (str(path), 1)


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
    assert table.policy_of("silu") == CastRule("silu", CastPolicy.FP32, Origin(str(path), 7, False))
    assert table.modules == (ModuleRule("head", ModulePrecision.FP32, Origin(str(path), 10, False)),)
    write(path, "[tool]\nautoamp = 3", schema=False)
    with pytest.raises(ListFileError, match="must be a table; got 3") as caught:
        load()
    assert caught.value.line == 2
    write(path, "[tool.autoamp]\nlists = [\n'apex',\n'conf/gone.toml']", schema=False)
    with pytest.raises(ListFileError, match="cannot be read") as caught:
        load()
    assert (caught.value.path, caught.value.line) == (str(path), 4)
    write(path, "[tool.autoamp]\n\nfp32 = ['a b']", schema=False)
    with pytest.raises(ListFileError, match="'a b'") as caught:
        load()
    assert caught.value.line == 3


def test_two_lists_in_one_folder_are_an_error_that_names_both(place: Path) -> None:
    write(place / "autoamp.toml", "")
    write(place / "pyproject.toml", "[tool.autoamp]", schema=False)
    with pytest.raises(ListFileError) as caught:
        load()
    assert str(place / "autoamp.toml") in str(caught.value)
    assert str(place / "pyproject.toml") in str(caught.value)


SPECIAL = """
import resource, sys
from autoamp import rules
# So that a device without an end is an error, and takes not all memory of the machine.
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
try:
    rules.load_table(**({"lists": sys.argv[1]} if len(sys.argv) > 1 else {}))
except ValueError as error:
    print(error.path, error.message, sep="|")
"""


@pytest.mark.parametrize("named_by", ["lists=", "AUTOAMP_LISTS", "extends", "pyproject.toml"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_list_file_is_a_regular_file(place: Path, tmp_path: Path, kind: str, named_by: str) -> None:
    path = place / ("pyproject.toml" if named_by == "pyproject.toml" else "special.toml")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    asking = write(place / "mine.toml", "extends = 'special.toml'") if named_by == "extends" else path
    environ = {**os.environ, "PYTHONPATH": without_torch(tmp_path)}
    if named_by == "AUTOAMP_LISTS":
        environ["AUTOAMP_LISTS"] = str(path)
    given = [str(asking)] if named_by in ("lists=", "extends") else []
    run = subprocess.run(
        [sys.executable, "-S", "-c", SPECIAL, *given],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    if named_by == "pyproject.toml":
        # A project's file that is not ours, and has nothing to say.
        assert run.stdout == ""
        return
    where, message = run.stdout.split("|")
    assert where == (str(asking) if named_by == "extends" else named_by)
    assert f"'{path}' cannot be read (not a regular file); give the path of a list file" in message


@pytest.mark.parametrize("name", ["mine.toml", "autoamp.toml", "pyproject.toml"])
def test_a_list_file_has_a_megabyte_at_most(place: Path, name: str) -> None:
    table = "[tool.autoamp]" if name == "pyproject.toml" else "schema = 1"
    text = f"{table}\nfp32 = ['linear']\n#"
    path = write(place / name, text + "x" * (10**6 - len(text)), schema=False)
    given = path if name == "mine.toml" else None
    assert policies(load(given))["linear"] == "fp32"
    write(path, text + "x" * (10**6 - len(text) + 1), schema=False)
    with pytest.raises(ListFileError, match=r"larger than 1000000 bytes") as caught:
        load(given)
    assert str(path) in str(caught.value)


def test_a_chain_of_extends_has_an_end(place: Path) -> None:
    def chain(length: int) -> Path:
        for number in range(length):
            write(place / f"{number}.toml", f"extends = '{number + 1}.toml'")
        write(place / f"{length}.toml", "extends = []\nfp32 = ['linear']")
        return place / "0.toml"

    assert policies(load(chain(32))) == {"linear": "fp32"}
    for length in (33, 1500):
        with pytest.raises(ListFileError, match=r"32 `extends`.*merge") as caught:
            load(chain(length))
        assert caught.value.path == str(place / "32.toml")
        assert caught.value.line == 2
        assert "'33.toml'" in str(caught.value)


def test_a_cycle_of_extends_shows_the_chain(place: Path) -> None:
    a, b, c = place / "a.toml", place / "b.toml", place / "sub" / "c.toml"
    write(a, "extends = ['b.toml']")
    write(b, "extends = ['default', 'sub/c.toml']")
    write(c, "\nextends = '../sub/../b.toml'")
    with pytest.raises(ListFileError, match="circular") as caught:
        load(a)
    assert f"{b} -> {c} -> {b}" in str(caught.value)
    assert (caught.value.path, caught.value.line) == (str(c), 3)
    write(a, "extends = 'a.toml'")
    with pytest.raises(ListFileError, match=f"{re.escape(str(a))} -> {re.escape(str(a))}"):
        load(a)


# -- bare names --


def test_an_unknown_op_of_a_user_is_an_error_with_the_nearest_names(place: Path) -> None:
    path = write(place / "mine.toml", "extends = []\nfp32 = [\n'sofmax']")
    with pytest.raises(ListFileError, match="'sofmax' under fp32; did you mean 'softmax'") as caught:
        check_bare_names(load(path), {"softmax", "linear"})
    assert (caught.value.path, caught.value.line) == (str(path), 4)
    for key in ("none", "promote"):
        with pytest.raises(ListFileError, match=f"'lineer' under {key}; did you mean 'linear'"):
            check_bare_names(load({"extends": [], key: ["lineer"]}), ["softmax", "linear"])
    with pytest.raises(ListFileError, match="'zzz' under banned; nothing near"):
        check_bare_names(load({"extends": [], "banned": {"zzz": "no"}}), ["softmax"])


def test_dotted_and_known_names_pass() -> None:
    assert check_bare_names(load({"extends": [], "fp32": ["softmax", "my.sofmax"]}), ["softmax"]) == ()


def test_shipped_names_that_torch_lacks_are_returned() -> None:
    table = load("apex")
    known = {rule.target for rule in table.rules if rule.bare} - {"gelu", "vecdot"}
    assert [rule.target for rule in check_bare_names(table, known)] == ["vecdot", "gelu"]
