"""Hooks of MkDocs: pages that are generated, and links that leave docs/.

Every page is plain Markdown that reads well on a code host, where links go from file to file of the repository. Here
they are turned into links between pages. What is generated stands where a page has a mark such as
``<!-- generated: ops -->``.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
# The tables use what the tests know of torch's autocast.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tables

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.autoamp")

# Files of the repository that are pages too, by the names of these.
_BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "kernels/README.md": "project/kernels.md",
}
_LANGUAGES = {".py": "python", ".toml": "toml", "": "text"}
_SHOWN = ("examples/*.py", "lists/*.toml", "LICENSE")

_GENERATED: dict[str, Callable[[], str]] = {
    "autocast": tables.autocast, "cli": tables.command_line, "ops": tables.ops
}  # fmt: skip


def _pages() -> dict[str, str]:
    """Return the pages that are made of files beside docs/: by their paths in the repository, their names here."""
    shown = [path.relative_to(ROOT).as_posix() for pattern in _SHOWN for path in sorted(ROOT.glob(pattern))]
    sources = {path: f"project/{posixpath.splitext(path)[0]}.md" for path in shown if "__init__" not in path}
    return {**_BESIDE, **sources}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file of the repository that pages link to."""
    for path, name in _pages().items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path not in _BESIDE:
            text = f"# {path}\n\n```{_LANGUAGES[posixpath.splitext(path)[1]]}\n{text}```\n"
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put in what is generated, and turn links between files into links between pages."""
    name = page.file.src_uri
    beside = _pages()
    source = {site: path for path, site in beside.items()}.get(name, f"docs/{name}")
    # What is said to readers of the file alone.
    markdown = re.sub(r"^On a code host .*?\n\n", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for mark in re.findall(r"<!-- generated: (\w+) -->", markdown):
        markdown = markdown.replace(f"<!-- generated: {mark} -->", _GENERATED[mark]())

    def page_of(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = beside.get(path, path.removeprefix("docs/"))
        if site == path:
            log.warning("%s: a link to %s, of which there is no page", source, path)
        return f"]({posixpath.relpath(site, posixpath.dirname(name) or '.')}{'#' if anchor else ''}{anchor})"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(one if one.startswith("```") else re.sub(r"\]\(([^)\s]+)\)", page_of, one) for one in blocks)
