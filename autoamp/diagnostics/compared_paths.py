"""What a comparison of the paths of a model found."""

from __future__ import annotations

from dataclasses import dataclass


def where(module: str | None, location: str | None) -> str:
    """Return a place as the end of a phrase, such as ``" in head at net.py:7"``."""
    return "".join(f" {word} {what}" for word, what in (("in", module), ("at", location)) if what)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call on a path that differs from the training pass.

    Attributes:
        op: The function, as ``"torch.nn.functional.linear"``, an operator as ``"aten::add"``, or ``"output"``.
        module: The path of the module that calls it; None outside of modules.
        location: ``"file:line"`` of the program; None if unknown.
        expected: The dtype in the training pass, as ``"float32"``.
        found: The dtype on this path. The same if only bits differ.
        reason: Why, where it is known.
    """

    op: str
    module: str | None
    location: str | None
    expected: str
    found: str
    reason: str | None

    def __str__(self) -> str:
        what = f"{self.found}, {self.expected} in training" if self.found != self.expected else "other bits"
        return f"{self.op}{where(self.module, self.location)}: {what}" + (f"; {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class ComparedPath:
    """A path beside the training pass.

    Attributes:
        name: Such as ``"no_grad"``.
        dtype: The first call of another dtype; None if there is none.
        bits: The first call with other bits, of a path on which these are compared.
        failed: Why the path was not compared, or not in whole; None if it was.
    """

    name: str
    dtype: Difference | None = None
    bits: Difference | None = None
    failed: str | None = None

    def __str__(self) -> str:
        found = [str(one) for one in (self.dtype, self.bits) if one is not None]
        found += [f"not compared: {self.failed}"] if self.failed is not None else []
        return f"{self.name}: {'; '.join(found) or 'the same'}"


@dataclass(frozen=True, slots=True)
class Consistency:
    """What `autoamp.Handle.consistency` found; ``str()`` is for people.

    Attributes:
        paths: The paths, in the order in which they ran.
    """

    paths: tuple[ComparedPath, ...]

    @property
    def is_consistent(self) -> bool | None:
        """Whether all paths compute what training does. None: none differs, but one was not wholly compared."""
        if any(path.dtype is not None or path.bits is not None for path in self.paths):
            return False
        return None if any(path.failed is not None for path in self.paths) else True

    def __str__(self) -> str:
        return "\n".join(map(str, self.paths))
