"""Gradients of activations: of which operator's result each node of the graph is, and what arrives there.

They are the first to underflow in half precision. A node is known by its sequence number, which torch gives it just
before it calls the operator; what arrives at it in a backward pass is the gradient of the operator's results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.diagnostics.exponents import Exponents
from autoamp.diagnostics.observer import Call
from autoamp.rules import CastPolicy
from autoamp.torch_private import current_graph_task, current_node, next_sequence_number, sequence_number

__all__ = ["ActivationGradients", "HalfResults"]

_KEY = "autoamp.ranges"
# Graphs are forgotten at each step of an optimizer; without one, at so many nodes.
_MOST_NODES = 2**18


class ActivationGradients:
    """Counts the exponents of the gradients of activations, without the loss scale.

    Args:
        pass_scale: Returns what the backward pass that runs is scaled by where its graph does not tell.
        quietly: Calls what looks at tensors, unobserved.

    Attributes:
        available: Whether this torch tells which node runs, and the numbers of nodes.
    """

    available = None not in (current_node, next_sequence_number)

    def __init__(self, pass_scale: Callable[[], float], quietly: Callable[[Callable[[], Any]], None]) -> None:
        self._pass_scale = pass_scale
        self._quietly = quietly
        self._next = next_sequence_number() if self.available else 0
        self._results: dict[int, Exponents] = {}
        self._scales: dict[int, float] = {}
        self._divisors: dict[int, float] = {}

    def ran(self, gradients: Exponents | None, scale: float | None = None) -> None:
        """Hear that an operator ran in a forward pass, if a node was made for it.

        Args:
            gradients: What the exponents of its results' gradients are added to; None where nobody asks.
            scale: Where it multiplied a loss by its scale, that scale.
        """
        number = next_sequence_number()
        if number == self._next:
            return
        self._next = number
        if len(self._results) > _MOST_NODES:
            self.forget()
        if scale is not None:
            self._scales[number - 1] = scale
        elif gradients is not None:
            self._results[number - 1] = gradients

    def goes_back(self) -> None:
        """Hear that an operator runs in a backward pass. At the first one of a pass its nodes are found."""
        task, node = current_graph_task(), current_node()
        if task in self._divisors or node is None:
            return
        reached = _reached([node])
        scaled = [one for one in reached if sequence_number(one) in self._scales]
        self._divisors[task] = self._scales[sequence_number(scaled[0])] if scaled else self._pass_scale()
        # What lies between the scaled loss and the root is none of the model's.
        for one in _reached(scaled) if scaled else reached:
            gradients = self._results.get(sequence_number(one))
            if gradients is not None and _KEY not in one.metadata:
                one.metadata[_KEY] = True
                one.register_prehook(functools.partial(self._arrived, gradients))

    def _arrived(self, into: Exponents, gradients: Sequence[Any]) -> None:
        divisor = self._divisors.get(current_graph_task())
        if divisor is None:
            # The profile has ended, and the graph lives on.
            return
        found = [g for g in gradients if g is not None and g.is_floating_point() and g.layout is torch.strided]
        self._quietly(lambda: into.add(*(gradient.detach().float() / divisor for gradient in found)))

    def forget(self) -> None:
        """Forget the graphs so far: a step, or the profile, has ended."""
        self._results.clear()
        self._scales.clear()
        self._divisors.clear()


def _reached(roots: Iterable[Any]) -> list[Any]:
    """Return the nodes from some roots on, these among them."""
    waiting, known = list(roots), dict.fromkeys(roots)
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in known:
                known[following] = None
                waiting.append(following)
    return list(known)


class HalfResults:
    """Which results of a program that runs in fp32 would be in half precision by the lists in force.

    A result of an op on the list ``fp16`` would be, and one of an op on no list whose arguments all would be. Casts
    that a program makes by itself from half to fp32 are none in fp32, and not seen.
    """

    def __init__(self) -> None:
        self._halves: Any = WeakIdKeyDictionary()

    def note(self, call: Call | None, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, mutates: bool) -> bool:
        """Tell whether an operator's results would be half, and remember it of these.

        Args:
            call: The innermost call of a listed function that it is made within; None for none.
            inputs, outputs: The floating tensors that it gets and returns.
            mutates: Whether it writes to its first argument, whose dtype stays.
        """
        policy = _policy_of(call)
        if policy is CastPolicy.FP16:
            half = True
        elif policy is CastPolicy.FP32:
            half = False
        else:
            # Numbers without a dimension do not promote others.
            counted = [tensor for tensor in inputs if tensor.dim()] or inputs
            half = bool(counted) and all(tensor in self._halves for tensor in (inputs[:1] if mutates else counted))
        for output in outputs:
            if half:
                self._halves[output] = True
            else:
                self._halves.pop(output, None)
        return half


def _policy_of(call: Call | None) -> CastPolicy | None:
    """Return the policy of the innermost call, unless one around it runs all within in fp32."""
    found = None if call is None else call.op.policy
    while call is not None:
        if call.op.policy in (CastPolicy.FP32, CastPolicy.BANNED):
            return CastPolicy.FP32
        call = call.outer
    return found
