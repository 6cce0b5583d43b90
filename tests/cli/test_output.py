"""Lines of text, in color on a terminal."""

from __future__ import annotations

import io

import pytest

from autoamp.cli.output import say, show


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "variables", "colored"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (False, {}, False), (False, {"FORCE_COLOR": "1"}, True)],
)
def test_a_terminal_gets_colors_unless_variables_say_otherwise(
    terminal: bool, variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    # Here, since pytest sets its own once fixtures are done.
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    say("one [b]line[/b]")
    say("wrong", wrong=True)
    show("Heading")
    first, second, third, end = ("\x1b[1;36m", "\x1b[1;31m", "\x1b[1m", "\x1b[0m") if colored else [""] * 4
    said = f"{first}autoamp:{end} one [b]line[/b]\n{second}autoamp:{end} wrong\n{third}Heading{end}\n"
    assert stream.getvalue() == said


def test_nothing_is_said_without_a_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    say("unheard")
