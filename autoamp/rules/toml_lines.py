"""TOML with line numbers: `tomllib` reads the values, and `TomlLines` finds the line of each key and string."""

from __future__ import annotations

import re
import tomllib

_TOKEN = re.compile(
    r"""(?P<text>\"{3}(?:[^\\]|\\.)*?\"{3,5}|'{3}.*?'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')
      |(?P<mark>[\[\]{}=,.\n])|(?P<word>[^\s\[\]{}=,."'\#]+)|(?P<comment>\#[^\n]*)""",
    re.VERBOSE | re.DOTALL,
)


class TomlError(ValueError):
    """Bytes that are not valid TOML.

    Attributes:
        line: The 1-based line of the fault; None where it is not known.
    """

    def __init__(self, message: str, line: int | None) -> None:
        self.line = line
        super().__init__(message)


def parse_toml(raw: bytes) -> tuple[dict[str, object], TomlLines]:
    """Return the content of a TOML file, and the lines of its keys and strings.

    Raises:
        TomlError: The bytes are not UTF-8, not TOML, or nested too deep to read.
    """
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise TomlError(f"not UTF-8: {error.reason}", raw.count(b"\n", 0, error.start) + 1) from error
    try:
        return tomllib.loads(text), TomlLines(text)
    except (ValueError, RecursionError) as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1 if "end of document" in str(error) else None
        raise TomlError(f'not valid TOML: {error}; names are in quotes, as in fp32 = ["softmax"]', line) from error


def _key_text(token: str) -> str:
    """Return a key without its quotes."""
    return str(tomllib.loads(f"key = {token}")["key"]) if token[0] in "\"'" else token


class TomlLines:
    """The lines of a TOML text that `tomllib` has accepted. All lines are 1-based.

    Attributes:
        keys: The line of each key or table, by its path.
        items: The lines of the strings of each array, by its path.
        comments: The comment at the end of each line that has one, or on a line of its own, without its ``#``.
    """

    def __init__(self, text: str) -> None:
        self.keys: dict[tuple[str, ...], int] = {}
        self.items: dict[tuple[str, ...], list[int]] = {}
        self.comments: dict[int, str] = {}
        self._table: tuple[str, ...] = ()
        self._open: list[tuple[str, tuple[str, ...]]] = []
        self._path: tuple[str, ...] = ()
        self._key: list[str] = []
        self._in_key = True
        line, end = 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", end, match.start())
            end = match.start()
            if match.lastgroup == "comment":
                self.comments[line] = match.group().lstrip("#").strip()
            elif match.lastgroup is not None:
                (self._read_key if self._in_key else self._read_value)(match.group(), match.lastgroup, line)

    def get(self, path: tuple[str, ...], item: int | None = None) -> int | None:
        """Return the line of a key, or of the string number `item` in its array; None where there is no such key."""
        items = self.items.get(path, [])
        return items[item] if item is not None and item < len(items) else self.keys.get(path)

    def _read_key(self, token: str, kind: str, line: int) -> None:
        if kind != "mark":
            self._key.append(_key_text(token))
        elif token == "=":
            self._path = self._note(self._open[-1][1] if self._open else self._table, line)
            self._in_key = False
        elif token == "]" and self._key:
            self._table = self._note((), line)
        elif token == "}":
            self._open.pop()
            self._in_key = False

    def _note(self, path: tuple[str, ...], line: int) -> tuple[str, ...]:
        for part in self._key:
            path = (*path, part)
            self.keys.setdefault(path, line)
        self._key = []
        return path

    def _read_value(self, token: str, kind: str, line: int) -> None:
        inside = self._open[-1][0] if self._open else ""
        if kind == "text":
            if inside == "[":
                self.items.setdefault(self._open[-1][1], []).append(line)
        elif token in ("[", "{"):
            self._open.append((token, self._open[-1][1] if inside == "[" else self._path))
            self._in_key = token == "{"
        elif token in ("]", "}"):
            self._open.pop()
        elif (token == "," and inside == "{") or (token == "\n" and not inside):
            self._in_key = True
