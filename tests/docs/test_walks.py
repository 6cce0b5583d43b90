"""The walks through the code in CONTRIBUTING.md are those that the interpreter takes."""

from __future__ import annotations

import pytest

from tests.docs import walks
from tests.docs.pages import text_of


@pytest.mark.docs
def test_the_walks_are_as_the_interpreter_lists_them() -> None:
    # `python -m tests.docs.walks` writes them anew.
    assert text_of(walks.PAGE) == walks.renewed()
