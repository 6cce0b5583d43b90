"""The site: it is built without a warning, and what is generated for it is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoamp.core import CastPolicy, shipped_sets, shipped_table
from tests.docs.pages import ROOT

# One worker builds the site once.
pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: a link or an anchor that is not there is one."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Else the theme tells of its successor.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_table_of_ops_has_every_rule_and_its_reason(site: Path) -> None:
    page = (site / "reference" / "ops.html").read_text(encoding="utf-8")
    shown = set(re.findall(r"<code>([\w.]+)</code>", page))
    rules = [rule for name in shipped_sets() for rule in shipped_table(name).rules]
    assert {rule.target for rule in rules} <= shown
    rows = re.findall(r"<tr>\s*<td><code>[\w.]+</code></td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", page, re.DOTALL)
    assert len(rows) >= sum(rule.policy is not CastPolicy.NONE for rule in shipped_table("default").rules)
    # Of `default`, or of the set that has the rule.
    assert all(why.strip() or elsewhere.strip() for why, elsewhere in rows)


def test_functions_are_shown_with_their_arguments_and_docstrings(site: Path) -> None:
    # The package gives these their types apart from their code.
    page = (site / "reference" / "autoamp.html").read_text(encoding="utf-8")
    for name, said in {"init": "A second call", "region": "Entering and", "current_handle": "not patched"}.items():
        section = page[page.index(f'id="autoamp.{name}"') :].partition("<h2")[0]
        assert said in section, name


def test_the_command_line_has_every_option(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for command in ("run", "profile", "tune", "bisect", "replay", "doctor", "lists", "report"):
        asked = [sys.executable, "-m", "autoamp", command, "--help"]
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        section = page[page.index(f'id="autoamp-{command}"') :]
        for option in set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", said)) - {"--help"}:
            assert option in section, (command, option)


def test_links_to_pages_and_anchors_are_there(site: Path) -> None:
    # The build looks at links between pages of Markdown; these are all links of what it made.
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html") if path.name != "404.html"}
    ids = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for target in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            page = (path.parent / name).resolve() if name else path
            assert page.exists(), f"{path.relative_to(site)}: {target}"
            if anchor and page in ids:
                assert anchor in ids[page], f"{path.relative_to(site)}: {target}"
