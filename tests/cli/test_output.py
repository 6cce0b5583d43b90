"""Lines of text, in color on a terminal."""

from __future__ import annotations

import io

import pytest

from autoamp.cli.output import say, show


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return found


def test_a_terminal_gets_colours_and_no_color_takes_them_away(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in ("stdout", "stderr"):
        # Here, since pytest sets its own once fixtures are done.
        monkeypatch.setattr(f"sys.{stream}", terminal)
    say("one [b]line[/b]")
    say("wrong", wrong=True)
    show("Heading")
    said, wrong, heading = terminal.getvalue().splitlines()
    assert said == "\x1b[1;36mautoamp:\x1b[0m one [b]line[/b]"
    assert wrong == "\x1b[1;31mautoamp:\x1b[0m wrong"
    assert heading == "\x1b[1mHeading\x1b[0m"
    terminal.truncate(0), terminal.seek(0)
    monkeypatch.setenv("NO_COLOR", "1")
    say("autoamp: plain")
    show("Heading")
    assert terminal.getvalue() == "autoamp: plain\nHeading\n"


def test_a_file_gets_no_colours_unless_forced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    say("plain")
    assert capsys.readouterr().err == "autoamp: plain\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    say("forced")
    assert "\x1b[" in capsys.readouterr().err


def test_nothing_is_said_without_a_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    say("unheard")
