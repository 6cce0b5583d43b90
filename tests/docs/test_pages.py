"""What the pages of the documentation say of the code is there: names, messages, lists, blocks that are run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import autoamp
from autoamp.core import load_table
from tests.architecture.test_floors import exported
from tests.docs.pages import BLOCKS, LANGUAGES, PAGES, ROOT, documented, found_at, prose_of, text_of

# Packages that users import from. All others are told in the reference not to be public.
PUBLIC = ("autoamp", "compat", "compat.fastai1", "fp16_utils", "normalization", "optimizers", "parallel", "tools")
# What `autoamp` has too, and what `exports`, the command and the site take.
ELSEWHERE = {
    "autoamp": {"FP16_Optimizer", "load_ipython_extension"},
    "tools": {
        "BaseHandle", "Handle", "NoOpHandle", "current_handle", "init", "region",
        "Diagnostics", "compose", "diagnostics_of",
    },
}  # fmt: skip


def qualified(package: str) -> str:
    return package if package == "autoamp" else f"autoamp.{package}"


NAMES = set(documented())


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_its_place_in_the_reference(package: str) -> None:
    module = importlib.import_module(qualified(package))
    public = getattr(module, "__all__", None) or exported(module.__name__) or ()
    missing = {name for name in public if f"{qualified(package)}.{name}" not in NAMES}
    assert missing == ELSEWHERE.get(package, set())


def exported_kernels() -> set[str]:
    """The names of the package of kernels, which may not be built here."""
    text = (ROOT / "kernels" / "autoamp_kernels" / "__init__.py").read_text(encoding="utf-8")
    (names,) = re.findall(r"^__all__ = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    return {f"autoamp_kernels.{name}" for name in ast.literal_eval(names)}


def test_every_kernel_has_its_place_in_the_reference() -> None:
    assert {name for name in NAMES if name.startswith("autoamp_kernels.")} == exported_kernels()


def test_the_reference_has_no_name_that_is_not_there() -> None:
    for name in NAMES - exported_kernels():
        assert found_at(name).__doc__, name


# Made by the package, and by nobody else: their docstrings say what one does with them.
MADE_FOR_USERS = {
    "autoamp.BaseHandle", "autoamp.Handle", "autoamp.NoOpHandle", "autoamp.Region", "autoamp.core.CastCache",
    "autoamp.tools.Call", "autoamp.tools.Observation", "autoamp.core.CastPolicy",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NAMES - MADE_FOR_USERS - exported_kernels()))
def test_every_argument_is_told_of(name: str) -> None:
    found = found_at(name)
    if not callable(found) or (
        isinstance(found, type) and "__init__" not in vars(found) and issubclass(found, Exception)
    ):
        return
    taken = [one for one in inspect.signature(found).parameters if one not in ("args", "kwargs")]
    assert [one for one in taken if not re.search(rf"\b{one}\b", found.__doc__ or "")] == []


def test_each_package_is_public_or_told_not_to_be() -> None:
    folders = {path.parent.name for path in (ROOT / "autoamp").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "autoamp").glob("[a-z]*.py")}
    index = text_of("docs/reference/index.md")
    told = set(re.findall(r"`(\w+)`", index[index.index("Not public are") :]))
    assert told == (folders | files) - set(PUBLIC) - {"errors"}


@pytest.mark.parametrize("kind", ["Handle", "NoOpHandle", "BaseHandle"])
def test_every_public_method_of_a_handle_has_a_docstring(kind: str) -> None:
    # mkdocstrings shows all of them under the class.
    for name, value in vars(getattr(autoamp, kind)).items():
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            assert value.__doc__, f"{kind}.{name}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_run_or_say_why_not(page: str) -> None:
    for block in BLOCKS:
        if block.page == page:
            assert block.language in LANGUAGES, f"{block}: name a language, one of {', '.join(LANGUAGES)}"
            assert "not run here" not in block.code, f"{block}: it goes into a comment above the block"
    assert "\n<!-- not run here" not in prose_of(page), f"{page}: the comment goes right above a block"
    # Code that is indented, and not fenced, would escape.
    for paragraph in re.split(r"\n\s*\n", prose_of(page)):
        assert not re.match(r"\n*( {4,}|\t)\S", paragraph), f"{page}: use a fence: {paragraph}"


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "toml" and block.left_out is None], ids=str
)
def test_lists_are_valid(block: object, tmp_path: Path) -> None:
    load_table(tomllib.loads(block.code), start=tmp_path, environ={})


def test_what_the_site_makes_of_lists_and_parsers() -> None:
    spec: Any = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "_site" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    # Raises where an entry has no reason.
    assert "| `layer_norm` | torch: means and squares over many elements | `bf16`: none (on cpu), kept" in tables.ops()
    softmax = "| none | fp32 | `log_softmax`, `logsumexp`, `softmax` | torch: a sum of exponentials |"
    assert f"| `default`, CPU; `bf16`, CPU {softmax}" in tables.autocast()
    said = tables.command_line()
    for command in ("run", "profile", "tune", "bisect", "replay", "doctor", "lists", "report"):
        assert f"## autoamp {command}\n" in said
    assert "`--dtype {fp16,float16,bf16,bfloat16}`" in said


def messages() -> list[str]:
    """Every text in the package's code, with ``...`` in place of what is put in."""
    found = []
    for path in (ROOT / "autoamp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (str(one.value) if isinstance(one, ast.Constant) else "..." for one in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[a-z.0-9]*[sdgr]", "...", node.value))
    return found


@pytest.mark.parametrize("place", ["README.md", "docs/migration.md", "docs/design.md"])
def test_the_rule_of_module_scope_is_in_the_same_words(place: str) -> None:
    rule = (
        "Listed ops inside a module's call are cast, and the outputs of the outermost module are converted to fp32. "
        "Outside of modules an op is cast only if one of its arguments is in half precision already."
    )
    assert " ".join(text_of(place).split()).count(rule) == 1


def test_the_readme_is_short_and_begins_with_who_needs_it() -> None:
    text = text_of("README.md")
    assert len(text.split()) <= 1200
    first = text[: text.index("\n## ")]
    for said in ("autoamp run train.py", "**You need it**", "**You do not need it**", "GPU"):
        assert said in first


def test_quoted_messages_are_those_of_the_code() -> None:
    page = text_of("docs/troubleshooting.md")
    by_message = page[page.index("## By message\n") : page.index("## By symptom\n")]
    headings = re.findall(r"^### (.+)$", by_message, re.MULTILINE)
    assert len(headings) > 30
    known = messages()
    for message in headings:
        assert len(message) >= 8, message
        assert any(message in text for text in known), f"no message of the code has: {message}"
    assert not any("this handle is not activ!" in text for text in known)


def test_the_newest_section_of_the_changelog_has_the_version_of_the_package() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] in ("Unreleased", autoamp.__version__)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/decisions/")])
def test_a_decision_is_short_and_says_what_was_rejected(page: str) -> None:
    assert len(text_of(page).split()) <= 200
    assert "ejected" in text_of(page)


def test_each_how_to_page_has_its_tests_and_each_file_of_these_its_page() -> None:
    table = text_of("CONTRIBUTING.md")
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/howto/")} - {"howto/index.md"}
    assert {page for page in pages if f"| `{page}`" not in table} == set()
    files = {path.name for path in (ROOT / "tests" / "behaviour").glob("test_*.py")}
    assert files == set(re.findall(r"\| `(test_\w+\.py)`", table))


def test_the_picture_of_the_floors_has_every_file_of_the_core() -> None:
    (picture,) = re.findall(r"^\| core/ .*?^\+-", text_of("CONTRIBUTING.md"), re.MULTILINE | re.DOTALL)
    named = {name for line in re.findall(r"^\|   .{13}(.*)\|$", picture, re.MULTILINE) for name in line.split()}
    files = {path.stem for path in (ROOT / "autoamp" / "core").glob("*.py")} - {"__init__"}
    assert files - named == set()
    # A line of names stands above each line of prose.
    gone = [
        line for line in re.findall(r"^\|   \w[\w ]{12}(.*)\|$", picture, re.MULTILINE) if set(line.split()) - files
    ]
    assert gone == []
