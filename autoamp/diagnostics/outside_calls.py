"""The calls of torch's functions between the calls of models, such as those of the loss, kept for each step.

Each is kept with its arguments and results, by reference and without graphs. If the step goes wrong these values tell
which call made inf or nan of finite values, and that call alone runs once more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoamp.diagnostics.call_sites import Caller, user_frame
from autoamp.diagnostics.kept_calls import KeptTensor, floating, map_kept
from autoamp.diagnostics.op_names import bare_name
from autoamp.diagnostics.origins import nonfinite_value
from autoamp.patching import original_of
from autoamp.tape import CannotRerun
from autoamp.tensors import map_tensors
from autoamp.torch_private import Unnoticed, insert_modes, is_transformed, remove_modes

# A program that computes more than that outside of models is not looked at there.
_MAX_CALLS, _MAX_BYTES = 64, 2**26
# With these a program writes -inf on purpose, as into masked scores.
_WRITERS = frozenset(("masked_fill", "where", "full", "full_like", "new_full", "fill", "index_fill", "__setitem__"))


def key_of(tensor: Tensor) -> Any:
    """Return what a tensor is known by as long as its memory is kept."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class OutsideCall(NamedTuple):
    """A call of a function of torch.

    Attributes:
        func: The function.
        args, kwargs: The arguments, with a `KeptTensor` in the place of each tensor.
        caller: The line of the program.
        results: The floating tensors that it returned.
    """

    func: Any
    args: Any
    kwargs: Any
    caller: Caller | None
    results: list[KeptTensor]

    def given(self) -> Iterator[KeptTensor]:
        """Yield the tensors that it was given."""
        found: list[KeptTensor] = []
        map_kept((self.args, self.kwargs), found.append)
        yield from found

    def run(self) -> list[Tensor]:
        """Call the function once more, and return the floating tensors that it returns."""
        args, kwargs = map_kept((self.args, self.kwargs), KeptTensor.get)
        return floating(self.func(*args, **kwargs))


class OutsideCalls(Unnoticed, TorchFunctionMode):
    """Keeps what this thread calls between `resume` and `pause`, until `drop`.

    It keeps no more once a step had too many calls there, or too large values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True
        self._calls: list[OutsideCall] = []
        self._nbytes = 0

    def resume(self) -> None:
        """Keep calls from now on."""
        if self._is_on:
            insert_modes(self)

    def pause(self) -> None:
        """Keep no more, until `resume`."""
        remove_modes(self)

    def drop(self) -> None:
        """Drop the calls."""
        self._calls, self._nbytes = [], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        func, kwargs = original_of(func), kwargs or {}
        if not self._is_on or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        kept = map_tensors((args, kwargs), self._keep)
        result = func(*args, **kwargs)
        if results := [self._keep(tensor) for tensor in floating(result)]:
            caller = Caller.of(user_frame(sys._getframe(1)))
            self._calls.append(OutsideCall(func, kept[0], kept[1], caller, results))
        if len(self._calls) > _MAX_CALLS or self._nbytes > _MAX_BYTES:
            self._is_on = False
            self.drop()
        return result

    def _keep(self, tensor: Tensor) -> Any:
        # One of a transform is known by no memory.
        is_plain = tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        # On a device its memory counts, and the host knows too late what went wrong.
        if not is_plain or is_transformed(tensor) or tensor.device.type != "cpu":
            self._is_on = False
            return tensor
        self._nbytes += tensor.nbytes
        return KeptTensor(tensor)

    def origin_of(self, key: Any) -> OutsideCall | None:
        """Return the call that made the inf or nan in a tensor of finite values; None if it came from elsewhere.

        Args:
            key: The `key_of` the tensor.

        Raises:
            CannotRerun: A value on the way was written to.
        """
        return self._origin(key, len(self._calls)) if self._is_on else None

    def _origin(self, key: Any, end: int) -> OutsideCall | None:
        made = [place for place in range(end) if any(key_of(one.tensor) == key for one in self._calls[place].results)]
        if not made:
            return None
        place = made[-1]
        call = self._calls[place]
        given = [(one, nonfinite_value(one.tensor)) for one in call.given() if one.tensor.is_floating_point()]
        for value in ("nan", "inf"):
            for one in (one for one, found in given if found == value and not one.is_stale):
                origin = self._origin(key_of(one.tensor), place)
                # An inf that was written on purpose is not the cause of what a function makes nan of it.
                is_mask = value == "inf" and origin is not None and bare_name(origin.func) in _WRITERS
                return call if is_mask and nonfinite_value(*(one.tensor for one in call.results)) == "nan" else origin
        for one in (one for one, _ in given if one.is_stale):
            if (origin := self._origin(key_of(one.tensor), place)) is not None:
                return origin
            raise CannotRerun("a tensor outside of the model was written to since")
        return call
