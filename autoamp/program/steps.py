"""The ``step`` of every class of torch's optimizers, replaced while a handle is active.

Torch wraps the ``step`` of each class of optimizers to run hooks. The wrapper is replaced in the class. A wrapper that
was bound before that, as by an LR scheduler, is met as well: the function that it calls is replaced in its closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from autoamp.patching import PatchSet, imitate, original_of


class StepPatches:
    """The replaced steps.

    Args:
        around: The methods ``around_step`` of subscribers, the first outermost.
        patches: Take the replacements.
    """

    def __init__(self, around: Sequence[Callable[[Any], Any]], patches: PatchSet) -> None:
        self._builders = around
        self._patches = patches
        # The closure cells of torch's wrappers that were written to, with their contents before.
        self._cells: list[tuple[Any, Any]] = []
        for cls in _subclasses(Optimizer):
            self.reach(cls)

    def restore(self) -> None:
        """Restore what is not in the patches, and replace no more steps."""
        for cell, original in self._cells:
            cell.cell_contents = original
        self._cells = []

    def reach(self, cls: type) -> None:
        """Replace the steps of a class and of those that it derives from, as far as torch has put its hooks there."""
        replaced = {id(patch.parent) for patch in self._patches if patch.attribute == "step"}
        for base in cls.__mro__:
            step = vars(base).get("step")
            if getattr(step, "hooked", False) and id(base) not in replaced:
                original = original_of(step)
                self._patches.replace(base, "step", imitate(self._around(original), original))
                for cell in _cells_of_wrapped(original):
                    self._cells.append((cell, cell.cell_contents))
                    cell.cell_contents = self._around(cell.cell_contents)

    def _around(self, step: Any) -> Any:
        for build in reversed(self._builders):
            step = build(step)
        return step


def _cells_of_wrapped(step: Any) -> Iterator[Any]:
    """Yield the closure cell in which torch's wrapper of a step has the step itself, unless that is replaced."""
    while getattr(getattr(step, "__wrapped__", None), "hooked", False):
        # Somebody else's wrapper around torch's.
        step = step.__wrapped__
    for cell in getattr(step, "__closure__", None) or ():
        if cell.cell_contents is getattr(step, "__wrapped__", cell):
            yield cell


def _subclasses(cls: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(cls):
        yield derived
        yield from _subclasses(derived)
