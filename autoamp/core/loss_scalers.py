"""Which loss is scaled by which scaler, and the state of all scalers as one checkpoint.

A loss is told by the ``loss_id`` that the program gives, and by its optimizers: each call of `initialize` has scalers
of its own for the optimizers that it names. An optimizer with a ``scale_loss`` of its own has its own scalers, too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoamp.core.loss_scale import DynamicLossScaler, LossScaler, is_count
from autoamp.errors import CheckpointError, UsageError, kind_of


class LossScalers:
    """The scalers of all losses.

    Args:
        scalers: One for each ``loss_id``.

    Attributes:
        all: As given, and those that came later, in the order of their entries in a checkpoint.
    """

    def __init__(self, scalers: Sequence[LossScaler]) -> None:
        self.all = list(scalers)
        # Of the call of `initialize` that named an optimizer, and of the last call, for optimizers that none named.
        self._by_optimizer: weakref.WeakKeyDictionary[Any, list[LossScaler]] = weakref.WeakKeyDictionary()
        self._current: list[LossScaler] | None = None
        # By which losses were scaled since the last call.
        self._since_initialize: set[LossScaler] = set()
        self._own: weakref.WeakKeyDictionary[Any, list[LossScaler]] = weakref.WeakKeyDictionary()

    @property
    def latest(self) -> list[LossScaler]:
        """Those of the last call of `initialize`, with what earlier ones share with it; without any call all."""
        return self.all if self._current is None else self._current

    def choose(self, loss_id: int, optimizers: Any = ()) -> LossScaler:
        """Return the scaler of a loss of these optimizers: one, or a list or tuple.

        Of optimizers that different calls of `initialize` set up, the first whose gradients are checked decides.

        Raises:
            UsageError: There is none of that number.
        """
        latest = self.latest
        try:
            choices = [self._by_optimizer.get(optimizer, latest) for optimizer in as_list(optimizers)] or [latest]
        except TypeError:
            # What no weak reference can be made to is refused where it is guarded.
            choices = [latest]
        fitting = [scalers[loss_id] for scalers in choices if 0 <= loss_id < len(scalers)]
        if not fitting:
            known = " or ".join(map(str, range(max(map(len, choices)))))
            raise UsageError(f"loss_id={loss_id} has no scaler; choose {known}")
        chosen = next((scaler for scaler in fitting if scaler.checks), fitting[0])
        if self._current is not None:
            self._since_initialize.add(chosen)
        return chosen

    def use(self, scalers: list[LossScaler], optimizers: Iterable[Any]) -> None:
        """Scale losses of these optimizers, and of all that no call of `initialize` named, by these scalers.

        Args:
            scalers: One for each ``loss_id``.
            optimizers: Those that a call of `initialize` names.
        """
        self.all += [scaler for scaler in scalers if not any(scaler is known for known in self.all)]
        self._current = scalers
        self._since_initialize.clear()
        for optimizer in optimizers:
            self._by_optimizer[optimizer] = scalers

    def forget_but(self, scalers: Iterable[LossScaler]) -> None:
        """Forget all scalers but these, and the optimizers' own."""
        # Nobody asks a scaler that is forgotten about the steps that it has yet to hear of.
        self.catch_up()
        wanted = {id(scaler) for scaler in (*scalers, *(s for own in self._own.values() for s in own))}
        self.all = [scaler for scaler in self.all if id(scaler) in wanted]

    def catch_up(self) -> None:
        """Let all scalers hear of what became of the last steps. Waits for the device where that alone knows."""
        for scaler in self.all:
            scaler.unread.catch_up()

    # -- optimizers with scalers of their own --

    def give_own(self, optimizer: Any, scalers: Sequence[LossScaler]) -> list[LossScaler]:
        """Give an optimizer scalers of its own, in place of those that it had, and return them.

        Args:
            optimizer: Referred to weakly.
            scalers: One for each loss of a step. A scaler that serves another loss already is copied. When the first
                optimizer gets its own, all scalers that were there are forgotten.
        """
        before = self._own.get(optimizer, ())
        taken = [scaler for scaler in self.all if scaler not in before] if self._own else []
        own: list[LossScaler] = []
        for scaler in scalers:
            # No loss may move the scale of another.
            own.append(copy.copy(scaler) if scaler in (*taken, *own) else scaler)
        self.all = [*taken, *own]
        self._own[optimizer] = own
        return own

    def forget_own(self, optimizer: Any) -> None:
        """Take an optimizer's own scalers and its ``scale_loss`` back, if it had any."""
        if self._own.pop(optimizer, None) is not None:
            vars(optimizer).pop("scale_loss", None)

    def with_own(self) -> list[Any]:
        """Return the optimizers that live and have scalers of their own."""
        return list(self._own)

    # -- checkpoints --

    @property
    def has_dynamic(self) -> bool:
        """Whether a scaler has a scale that moves, so that a resumed run has to know it."""
        return any(isinstance(scaler, DynamicLossScaler) for scaler in self.all)

    def state_dict(self, skipped_steps: int) -> dict[str, Any]:
        """Return the scalers' state, ``loss_scaler0`` and so on, with the number of skips as ``skipped_steps``.

        Of the scalers of earlier calls of `initialize` those that losses were scaled by since the last one: models of
        an earlier training may live on.
        """
        scalers = self.all
        if self._current is not None:
            wanted = {*self._current, *self._since_initialize}
            scalers = [scaler for scaler in scalers if scaler in wanted]
        state: dict[str, Any] = {f"loss_scaler{i}": scaler.state_dict() for i, scaler in enumerate(scalers)}
        return {**state, "skipped_steps": skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Load what `state_dict` returned, all of it or nothing.

        Returns:
            The number of skips; 0 for a checkpoint of Apex, which has none.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(f"the state is {kind_of(state)}; pass what state_dict() returned; nothing was loaded")
        if "_growth_tracker" in state:
            raise CheckpointError(
                "expected the result of state_dict(), got the state of a torch.amp.GradScaler; nothing was loaded. "
                "docs/howto/grad_scaler.md shows how to load it: pass {'loss_scaler0': {'loss_scale': state['scale'], "
                "'unskipped': state['_growth_tracker']}}"
            )
        # Earlier models may just live on: their scalers are in no checkpoint of the last call.
        count = sum(str(key).startswith("loss_scaler") for key in state)
        scalers = self.latest if count == len(self.latest) else self.all
        names = [f"loss_scaler{i}" for i in range(len(scalers))]
        missing = [name for name in names if name not in state]
        for key in missing or sorted(str(key) for key in state if key not in {*names, "skipped_steps"}):
            raise CheckpointError(
                f"key {key!r} is {'missing' if missing else 'unknown'}; this run has the loss scalers "
                f"{', '.join(names)}; nothing was loaded"
            )
        skipped = state.get("skipped_steps", 0)
        if not is_count(skipped):
            raise CheckpointError(
                f"key 'skipped_steps': {skipped!r} is not a whole number of 0 or more; nothing was loaded"
            )
        for name, scaler in zip(names, scalers, strict=True):
            scaler.check_state_dict(state[name], name)
        for name, scaler in zip(names, scalers, strict=True):
            scaler.load_state_dict(state[name])
        return int(skipped)


def as_list(values: Any) -> list[Any]:
    """Return optimizers or models as a list: one of them, or a list or tuple."""
    return list(values) if isinstance(values, (list, tuple)) else [values]
