"""Reports as files: JSON, and a page of HTML that holds all it needs, by Jinja2."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoamp.diagnostics.report.document import KIND, SCHEMA, plain
from autoamp.diagnostics.report.remedies import as_toml
from autoamp.errors import UsageError

__all__ = ["check_report_tools", "is_page", "load_report", "report_page", "write_report"]

_FOLDER = Path(__file__).parent / "templates"


def is_page(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file of this ``path`` is to be a page of HTML: one that ends in .html or .htm."""
    return Path(path).suffix.lower() in (".html", ".htm")


def check_report_tools() -> None:
    """Check that what a page is made with is there, without importing it.

    Raises:
        UsageError: It is not.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise UsageError(
            "a report of HTML needs jinja2; pip install 'autoamp[report]', or give a file that ends in .json"
        )


def report_page(documents: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """Return a page of HTML for one run, or for two side by side. It asks for nothing from elsewhere.

    Args:
        documents: What `report_of` returned, of one or two runs.
        names: What the runs are called.

    Raises:
        UsageError: `check_report_tools` does.
    """
    check_report_tools()
    jinja2: Any = importlib.import_module("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    named = [names[number] if number < len(names) else _name(one) for number, one in enumerate(documents)]
    runs: list[dict[str, Any]] = [
        {"name": name, "document": dict(one), "toml": as_toml(one["remedies"])}
        for name, one in zip(named, documents, strict=True)
    ]
    page: str = environment.get_template("page.html").render(
        runs=runs,
        data=_embedded([{**run["document"], "name": run["name"]} for run in runs]),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
    )
    return page


def _name(document: Mapping[str, Any]) -> str:
    return " ".join(map(str, document.get("program", ()))) or "run"


def _embedded(value: Any) -> str:
    """Return JSON that may stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def write_report(
    path: str | os.PathLike[str], documents: Sequence[Mapping[str, Any]], names: Sequence[str] = ()
) -> None:
    """Write a page where the file's name ends in .html or .htm, else the JSON of the one run.

    Args:
        path: The file; its folder must exist.
        documents: Reports of runs, one or two, as `report_of` and `load_report` return them.
        names: What the page calls them, where there are two.

    Raises:
        UsageError: `check_report_tools` does, or the file cannot be written.
    """
    text = report_page(documents, names) if is_page(path) else json.dumps(plain(documents[0]), indent=1) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written: {error}; give a file in a directory that exists") from None


def load_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the report in a file of JSON.

    Args:
        path: What ``autoamp run --report FILE.json`` or `Handle.report` wrote.

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
