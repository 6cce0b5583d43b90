"""Reports as files: JSON, and a self-contained page of HTML."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoamp.errors import UsageError
from autoamp.tools.report.document import KIND, SCHEMA, plain

_FOLDER = Path(__file__).parent / "templates"


def is_page(path: str | os.PathLike[str]) -> bool:
    """Whether the name of a file at this ``path`` is that of a page of HTML: .html or .htm."""
    return Path(path).suffix.lower() in (".html", ".htm")


def check_report_tools() -> None:
    """Check that Jinja2, which makes pages, is installed, without importing it.

    Raises:
        UsageError: It is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise UsageError(
            "a report of HTML needs jinja2, which torch requires; pip install jinja2, or give a file that ends in .json"
        )


@functools.cache
def page_template() -> Any:
    """Return the template of a page, which Jinja2 compiles by ``exec``; see `check_report_tools`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template("page.html")


def report_page(document: Mapping[str, Any]) -> str:
    """Return a self-contained page of HTML for a run.

    Args:
        document: The result of `report_of`.

    Raises:
        UsageError: Jinja2 is not installed.
    """
    check_report_tools()
    page: str = page_template().render(
        name=" ".join(map(str, document.get("program", ()))) or "run",
        document=document,
        toml=as_toml(document["remedies"]),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
    )
    return page


def write_report(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a page where the file's name ends in .html or .htm, else JSON.

    Args:
        path: The file; its folder must exist.
        document: The report of a run, as `report_of` and `load_report` return it.

    Raises:
        UsageError: Jinja2 is not installed, or the file cannot be written.
    """
    text = report_page(document) if is_page(path) else json.dumps(plain(document), indent=1) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written: {error}; give a file in a directory that exists") from None


def load_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the report in a file of JSON.

    Args:
        path: A file that ``autoamp run --report FILE.json`` or `Handle.report` wrote.

    Raises:
        UsageError: It cannot be read, or is no report of a run.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read as a report ({error}); give a file of autoamp run --report FILE.json"
        ) from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UsageError(f"{str(path)!r} is no report of a run; give a file that autoamp run --report FILE.json wrote")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"{str(path)!r} has schema {found.get('schema')!r}; this autoamp reads {SCHEMA}: run it again")
    return found


def as_toml(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a list file with these entries, each with its evidence as a comment; none without entries."""
    # A JSON string is a basic string of TOML. A comment holds no control characters.
    lines: dict[str, list[str]] = {"fp32": [], "modules": []}
    before = None
    for one in entries:
        evidence = "".join(c if c.isprintable() else " " for c in one["evidence"])
        place = one["policy"], evidence
        evidence, before = "as above" if place == before else evidence, place
        is_module = one["policy"] == "modules"
        text = f'{json.dumps(one["op"])} = "fp32"' if is_module else f"    {json.dumps(one['op'])},"
        lines[one["policy"]].append(f"{text}  # {evidence}")
    found = ["fp32 = [", *lines["fp32"], "]"] if lines["fp32"] else []
    found += ["[modules]", *lines["modules"]] if lines["modules"] else []
    return ["schema = 1", *found] if found else []
